// Verifying checkpoints: every damage is found, by the rank whose share has it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "parallel/checkpoint/checkpoint.h"
#include "tests/parallel/checkpoint_saving.h"
#include "tests/support/forwarding_file_system.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using ::muster::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

class DamagedCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    auto results = SaveOn(2, *files_, StateAt(10, 1));
    ASSERT_OK(results[0]);
    result_ = *results[0];
    shard_ = result_.directory + "/rank-00001.safetensors";
    manifest_ = result_.directory + "/manifest.json";
  }
  absl::Status Open(Verify verify) {
    return CheckpointReader::Open(*files_, result_.directory, verify).status();
  }
  std::unique_ptr<MemoryFileSystem> files_ = MemoryFileSystem::Make();
  SaveResult result_;
  std::string shard_, manifest_;
};

TEST_F(DamagedCheckpoint, AnyFlippedByte_IsFound) {
  for (const std::string& path :
       {shard_, manifest_, result_.directory + "/rank-00000.safetensors"}) {
    ASSERT_OK_AND_ASSIGN(const std::string sound, files_->Read(path));
    for (size_t at = 0; at < sound.size(); ++at) {
      std::string damaged = sound;
      damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
      ASSERT_OK(files_->WriteAtomically(path, damaged));
      EXPECT_THAT(Open(Verify::kFull), StatusIs(absl::StatusCode::kDataLoss, HasSubstr(path)))
          << "byte " << at;
    }
    ASSERT_OK(files_->WriteAtomically(path, sound));
    EXPECT_OK(Open(Verify::kFull));
  }
}

TEST_F(DamagedCheckpoint, FlippedTensorByte_IsFoundByTheReadThatNeedsIt_WithTensorAndOffsets) {
  ASSERT_OK_AND_ASSIGN(std::string bytes, files_->Read(shard_));
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  ASSERT_OK(files_->WriteAtomically(shard_, bytes));
  ASSERT_OK_AND_ASSIGN(auto reader,
                       CheckpointReader::Open(*files_, result_.directory, Verify::kSizes));
  std::vector<float> out(24);
  EXPECT_OK(reader->Read("weight", DType::kF32, Box{{0, 0}, {3, 4}}, out.data()));
  EXPECT_THAT(reader->Read("weight", DType::kF32, Box{{5, 0}, {1, 1}}, out.data()),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr("rank-00001.safetensors"), HasSubstr("'weight' [3:6, 0:4]"),
                             HasSubstr("bytes"))));
}

// Counts how often each byte of each shard is read.
class CountingFileSystem : public ::muster::testing::ForwardingFileSystem {
 public:
  using ForwardingFileSystem::ForwardingFileSystem;
  absl::StatusOr<std::string> ReadRange(const std::string& path, int64_t offset,
                                        int64_t length) override {
    std::vector<int>& reads = reads_[path];
    reads.resize(static_cast<size_t>(*inner_.Size(path)));
    for (int64_t i = offset; i < offset + length; ++i) ++reads[static_cast<size_t>(i)];
    bytes_ += length;
    return inner_.ReadRange(path, offset, length);
  }
  const std::map<std::string, std::vector<int>>& reads() const { return reads_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::map<std::string, std::vector<int>> reads_;
  int64_t bytes_ = 0;
};

TEST(Checkpoint, SharesOfAllRanks_ReadEveryByteOnce) {
  for (const int saved_by : {1, 2, 5}) {
    std::unique_ptr<MemoryFileSystem> files = MemoryFileSystem::Make();
    const auto saved = SaveOn(saved_by, *files, StateAt(10, 1));
    ASSERT_OK(saved[0]);
    for (const int ranks : {1, 2, 3, 8}) {
      CountingFileSystem counting(*files);
      int readers = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        ASSERT_OK_AND_ASSIGN(auto reader,
                             CheckpointReader::Open(counting, saved[0]->directory, Verify::kSizes));
        const int64_t before = counting.bytes();
        int64_t told = 0;
        ASSERT_OK(reader->VerifyBytes({rank, ranks}, [&](int64_t bytes) {
          told += bytes;
          return true;
        }));
        EXPECT_EQ(told, counting.bytes() - before);
        EXPECT_EQ(told, reader->BytesOf({rank, ranks}));
        readers += told > 0 ? 1 : 0;
      }
      EXPECT_GE(readers, std::min(ranks, 2));
      int64_t shards = 0;
      for (const auto& [path, reads] : counting.reads()) {
        ++shards;
        for (const int times : reads) ASSERT_EQ(times, 1) << path;
      }
      EXPECT_EQ(shards, static_cast<int64_t>(files->List(saved[0]->directory)->size() -
                                             1));  // without the manifest
    }
  }
}

TEST_F(DamagedCheckpoint, AnyFlippedByte_IsFoundByTheRankThatHasIt) {
  ASSERT_OK_AND_ASSIGN(const std::string sound, files_->Read(shard_));
  constexpr int kRanks = 3;
  for (size_t at = 0; at < sound.size(); ++at) {
    std::string damaged = sound;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    ASSERT_OK(files_->WriteAtomically(shard_, damaged));
    int found = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      ASSERT_OK_AND_ASSIGN(auto reader,
                           CheckpointReader::Open(*files_, result_.directory, Verify::kSizes));
      const absl::Status status = reader->VerifyBytes({rank, kRanks}, [](int64_t) { return true; });
      if (status.ok()) continue;
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss));
      ++found;
    }
    EXPECT_EQ(found, 1) << "byte " << at;
  }
}

TEST_F(DamagedCheckpoint, VerificationThatIsCancelled_EndsAfterTheNextChunk) {
  ASSERT_OK_AND_ASSIGN(auto reader,
                       CheckpointReader::Open(*files_, result_.directory, Verify::kSizes));
  int calls = 0;
  EXPECT_THAT(reader->VerifyBytes({},
                                  [&](int64_t) {
                                    ++calls;
                                    return false;
                                  }),
              StatusIs(absl::StatusCode::kCancelled));
  EXPECT_EQ(calls, 1);
}

TEST_F(DamagedCheckpoint, TruncatedAndMissingFiles_AreFoundByTheCheapCheck) {
  ASSERT_OK_AND_ASSIGN(const std::string shard, files_->Read(shard_));
  ASSERT_OK(files_->WriteAtomically(shard_, shard.substr(0, shard.size() - 1)));
  EXPECT_THAT(Open(Verify::kSizes), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("bytes long")));
  ASSERT_OK(files_->RemoveFile(shard_));
  EXPECT_THAT(Open(Verify::kSizes), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("is missing")));
  ASSERT_OK_AND_ASSIGN(const std::string manifest, files_->Read(manifest_));
  for (size_t length = 0; length < manifest.size(); ++length) {
    ASSERT_OK(files_->WriteAtomically(manifest_, manifest.substr(0, length)));
    EXPECT_THAT(Open(Verify::kSizes), StatusIs(absl::StatusCode::kDataLoss));
  }
  ASSERT_OK(files_->RemoveFile(manifest_));
  EXPECT_THAT(Open(Verify::kSizes), StatusIs(absl::StatusCode::kNotFound));
}

TEST_F(DamagedCheckpoint, AnotherManifestThanTheCommittedOne_IsRefused) {
  EXPECT_THAT(CheckpointReader::Open(*files_, result_.directory, Verify::kSizes, "00000000"),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("committed with 00000000")));
}

}  // namespace
}  // namespace muster::parallel
