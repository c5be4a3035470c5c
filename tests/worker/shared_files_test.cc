#include "worker/rank/shared_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "parallel/train/failure.h"
#include "tests/support/status_matchers.h"

namespace muster::worker {
namespace {

using parallel::FailureDomain;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kDirectory[] = "/checkpoints/job";

// Makes a rank on each of the named hosts.
std::vector<RankHost> On(const std::vector<const char*>& hosts) {
  std::vector<RankHost> ranks;
  for (const char* host : hosts) {
    ranks.push_back({absl::StrCat("worker-", host), host, "10.0.0.1", host});
  }
  return ranks;
}

// Calls `body` on every rank, each with its communicator and device.
void OnRanks(size_t size, const std::function<void(size_t rank, parallel::Communicator& world,
                                                   kernels::Device& device)>& body) {
  auto world = parallel::MakeLocalCommunicators(static_cast<int>(size), absl::Seconds(60));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = kernels::MakeCpuDevice(1);
      body(rank, *world[rank], *device);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

v1::JobSpec SpecWithData() {
  v1::JobSpec spec;
  spec.mutable_engine()->mutable_data()->add_train()->set_path("/data/kjv.train");
  spec.mutable_engine()->mutable_data()->add_validation()->set_path("/data/kjv.validation");
  spec.mutable_engine()->mutable_model()->set_initialize_from("/models/small");
  return spec;
}

std::unique_ptr<MemoryFileSystem> Disk() {
  auto files = MemoryFileSystem::Make();
  for (const char* directory : {"/data", "/models/small", kDirectory}) {
    EXPECT_OK(files->MakeDirectory(directory));
  }
  for (const char* prefix : {"/data/kjv.train", "/data/kjv.validation"}) {
    EXPECT_OK(files->WriteAtomically(absl::StrCat(prefix, ".idx"), "an index"));
    EXPECT_OK(files->WriteAtomically(absl::StrCat(prefix, ".bin"), "tokens"));
  }
  std::string weights(8, '\0');
  const uint64_t header = 4;
  std::memcpy(weights.data(), &header, sizeof(header));
  EXPECT_OK(files->WriteAtomically("/models/small/config.json", "{}"));
  EXPECT_OK(files->WriteAtomically("/models/small/model.safetensors", weights + "headweights"));
  return files;
}

// Every rank's status of CheckInputs when `change` has modified the disk of the last of three
// hosts.
std::vector<absl::Status> Compare(const std::function<void(FileSystem&)>& change) {
  std::vector<absl::Status> statuses(3);
  const std::vector<RankHost> hosts = On({"a", "b", "c"});
  OnRanks(3, [&](size_t rank, parallel::Communicator& world, kernels::Device& device) {
    const auto disk = Disk();
    if (rank == 2) change(*disk);
    const auto inputs = DescribeInputs(SpecWithData(), *disk);
    ASSERT_OK(inputs);
    statuses[rank] = CheckInputs(world, device, hosts, *inputs);
  });
  return statuses;
}

TEST(SharedFiles, SameInputs_AreFoundTheSame) {
  for (const absl::Status& status : Compare([](FileSystem&) {})) EXPECT_OK(status);
}

TEST(SharedFiles, IndexOfTheSameSizeAndOtherContent_IsNamedWithBothWorkers) {
  for (const absl::Status& status : Compare([](FileSystem& files) {
         EXPECT_OK(files.WriteAtomically("/data/kjv.train.idx", "an iNdex"));
       })) {
    EXPECT_EQ(parallel::DomainOf(status), FailureDomain::kData);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("engine.data.train[0].path: /data/kjv.train"),
                      HasSubstr("worker worker-a (host a) has an index of 8 bytes"),
                      HasSubstr("worker worker-c (host c) has an index of 8 bytes")));
  }
}

TEST(SharedFiles, OtherTokensOrWeights_AreNamed) {
  EXPECT_THAT(
      std::string(Compare([](FileSystem& files) {
                    EXPECT_OK(files.WriteAtomically("/data/kjv.validation.bin", "more tok"));
                  })[0]
                      .message()),
      AllOf(HasSubstr("engine.data.validation[0].path"), HasSubstr("8 bytes of tokens")));
  EXPECT_THAT(std::string(Compare([](FileSystem& files) {
                            EXPECT_OK(files.WriteAtomically("/models/small/config.json", "{ }"));
                          })[1]
                              .message()),
              HasSubstr("engine.model.initialize_from: /models/small"));
}

TEST(SharedFiles, AbsentDataSet_IsAnErrorOfItsField) {
  const auto disk = Disk();
  EXPECT_OK(disk->RemoveFile("/data/kjv.train.idx"));
  const absl::Status status = DescribeInputs(SpecWithData(), *disk).status();
  EXPECT_EQ(parallel::DomainOf(status), FailureDomain::kData);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("engine.data.train[0].path"), HasSubstr("/data/kjv.train.idx")));
}

// What every rank gets from GroupsByDirectory; rank i sees disks[i].
std::vector<std::vector<int>> Groups(const std::vector<RankHost>& hosts,
                                     const std::vector<FileSystem*>& disks) {
  std::vector<std::vector<int>> found(hosts.size());
  OnRanks(hosts.size(), [&](size_t rank, parallel::Communicator& world, kernels::Device& device) {
    const auto groups = GroupsByDirectory(world, device, *disks[rank], hosts, kDirectory,
                                          /*epoch=*/3, absl::ZeroDuration());
    ASSERT_OK(groups);
    found[rank] = *groups;
  });
  return found;
}

TEST(SharedFiles, DirectoriesThatAreOne_AreFoundAndLeftAsTheyWere) {
  const auto disk = Disk();
  EXPECT_OK(disk->WriteAtomically(absl::StrCat(kDirectory, "/.same-directory.e2.rank-0"), "old"));
  const std::vector<RankHost> hosts = On({"a", "a", "b", "c"});
  for (const auto& groups : Groups(hosts, {disk.get(), disk.get(), disk.get(), disk.get()})) {
    EXPECT_EQ(groups, (std::vector<int>{0, 0, 0, 0}));
    EXPECT_OK(CheckShared(groups, hosts, kDirectory));
  }
  EXPECT_EQ(disk->List(kDirectory)->size(), 0u) << "what an earlier attempt left is gone, too";
}

TEST(SharedFiles, DirectoriesOfTwoDisks_AreToldApart) {
  const auto one = Disk(), other = Disk();
  const std::vector<RankHost> hosts = On({"a", "b", "b", "c"});
  for (const auto& groups : Groups(hosts, {one.get(), other.get(), other.get(), one.get()})) {
    EXPECT_EQ(groups, (std::vector<int>{0, 1, 1, 0}));
    const absl::Status status = CheckShared(groups, hosts, kDirectory);
    EXPECT_EQ(parallel::DomainOf(status), FailureDomain::kStorage);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("worker worker-b (host b) is another directory than on worker "
                                "worker-a (host a)"),
                      HasSubstr("checkpoint.storage")));
  }
}

// A host's view of `disk` through a cache that does not show one file yet.
class CachedView : public FileSystem {
 public:
  CachedView(FileSystem& disk, std::string hidden) : disk_(disk), hidden_(std::move(hidden)) {}
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    return disk_.Create(path);
  }
  absl::StatusOr<std::string> Read(const std::string& path) override {
    if (path == hidden_) return absl::NotFoundError(path);
    return disk_.Read(path);
  }
  absl::StatusOr<std::string> ReadRange(const std::string& path, int64_t offset,
                                        int64_t length) override {
    return disk_.ReadRange(path, offset, length);
  }
  absl::StatusOr<int64_t> Size(const std::string& path) override { return disk_.Size(path); }
  bool Exists(const std::string& path) override { return disk_.Exists(path); }
  absl::Status MakeDirectory(const std::string& path) override { return disk_.MakeDirectory(path); }
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    return disk_.List(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return disk_.Rename(from, to);
  }
  absl::Status SyncDirectory(const std::string& path) override { return disk_.SyncDirectory(path); }
  absl::Status RemoveFile(const std::string& path) override { return disk_.RemoveFile(path); }
  absl::Status RemoveTree(const std::string& path) override { return disk_.RemoveTree(path); }

 private:
  FileSystem& disk_;
  const std::string hidden_;
};

TEST(SharedFiles, FirstRanksFileHiddenByACache_GroupIsFoundThroughAnotherRank) {
  const auto disk = Disk();
  CachedView cached(*disk, absl::StrCat(kDirectory, "/.same-directory.e3.rank-0"));
  const std::vector<RankHost> hosts = On({"a", "b", "c"});
  for (const auto& groups : Groups(hosts, {disk.get(), disk.get(), &cached})) {
    EXPECT_EQ(groups, (std::vector<int>{0, 0, 0}));
    EXPECT_OK(CheckShared(groups, hosts, kDirectory));
  }
}

TEST(SharedFiles, DirectoryThatCannotBeWritten_IsTheFailureOfAll) {
  const auto good = Disk(), bad = Disk();
  bad->FailWrites(true);
  const std::vector<RankHost> hosts = On({"a", "b"});
  OnRanks(2, [&](size_t rank, parallel::Communicator& world, kernels::Device& device) {
    const auto groups = GroupsByDirectory(world, device, rank == 0 ? *good : *bad, hosts,
                                          kDirectory, 3, absl::ZeroDuration());
    EXPECT_EQ(parallel::DomainOf(groups.status()), FailureDomain::kStorage);
    EXPECT_THAT(std::string(groups.status().message()), HasSubstr("worker worker-b (host b)"));
  });
}

}  // namespace
}  // namespace muster::worker
