// What a daemon finds of its records after a crash at any moment.
#include "worker/daemon/record_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/file_system.h"
#include "tests/support/forwarding_file_system.h"
#include "tests/support/status_matchers.h"

namespace muster::worker {
namespace {

using ::muster::testing::IsOk;
using ::muster::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr char kJournal[] = "/records/journal";

// Counts syncs; everything else is the file system's.
class CountingFiles : public testing::ForwardingFileSystem {
 public:
  using ForwardingFileSystem::ForwardingFileSystem;
  int syncs = 0;

  absl::StatusOr<std::unique_ptr<WritableFile>> Reopen(const std::string& path,
                                                       int64_t length) override {
    absl::StatusOr<std::unique_ptr<WritableFile>> file = inner_.Reopen(path, length);
    if (!file.ok()) return file;
    return std::make_unique<File>(*std::move(file), syncs);
  }
  absl::Status SyncDirectory(const std::string& path) override {
    ++syncs;
    return inner_.SyncDirectory(path);
  }

 private:
  class File : public WritableFile {
   public:
    File(std::unique_ptr<WritableFile> file, int& syncs) : file_(std::move(file)), syncs_(syncs) {}
    absl::Status Append(absl::string_view bytes) override { return file_->Append(bytes); }
    absl::Status Sync() override {
      ++syncs_;
      return file_->Sync();
    }
    absl::Status Close() override { return file_->Close(); }

   private:
    const std::unique_ptr<WritableFile> file_;
    int& syncs_;
  };
};

class RecordLogTest : public ::testing::Test {
 protected:
  RecordLogTest() { EXPECT_OK(files_->MakeDirectory("/records")); }

  std::unique_ptr<RecordLog> Open() {
    absl::StatusOr<std::unique_ptr<RecordLog>> log = RecordLog::Open(*files_, "/records");
    EXPECT_OK(log.status());
    return log.ok() ? *std::move(log) : nullptr;
  }
  // As a daemon that starts finds them.
  std::map<std::string, std::string> Records() {
    const std::unique_ptr<RecordLog> log = Open();
    return log == nullptr ? std::map<std::string, std::string>() : log->records();
  }
  void Put(const std::string& journal) { ASSERT_OK(files_->WriteAtomically(kJournal, journal)); }

  const std::unique_ptr<MemoryFileSystem> files_ = MemoryFileSystem::Make();
};

TEST_F(RecordLogTest, Group_IsDurableWithOneSync) {
  CountingFiles files(*files_);
  ASSERT_OK_AND_ASSIGN(const auto log, RecordLog::Open(files, "/records"));
  ASSERT_OK(log->Write({{"gone", "1"}, {"a", "1"}}));
  files.syncs = 0;
  ASSERT_OK(
      log->Write({{"a", "2"}, {"b", "1"}, {"gone", "2"}, {"a", "3"}, {"gone", {}}, {"never", {}}}));
  EXPECT_EQ(files.syncs, 1);
  files_->Crash();
  EXPECT_THAT(Records(), ElementsAre(Pair("a", "3"), Pair("b", "1")));
}

TEST_F(RecordLogTest, NoChanges_TouchNothing) {
  CountingFiles files(*files_);
  ASSERT_OK_AND_ASSIGN(const auto log, RecordLog::Open(files, "/records"));
  files.syncs = 0;
  ASSERT_OK(log->Write({}));
  EXPECT_EQ(files.syncs, 0);
}

TEST_F(RecordLogTest, FailedWrite_KeepsWhatWasThere) {
  const std::unique_ptr<RecordLog> log = Open();
  ASSERT_OK(log->Write({{"a", "1"}}));
  files_->FailWrites(true);
  EXPECT_THAT(log->Write({{"b", "1"}, {"a", "2"}}), StatusIs(absl::StatusCode::kUnavailable));
  files_->FailWrites(false);
  files_->Crash();
  EXPECT_THAT(Records(), ElementsAre(Pair("a", "1")));
}

TEST_F(RecordLogTest, EntryCutShortAnywhere_IsLeftOutAndWrittenOver) {
  ASSERT_OK(Open()->Write({{"a", "1"}}));
  ASSERT_OK_AND_ASSIGN(const std::string before, files_->Read(kJournal));
  ASSERT_OK(Open()->Write({{"a", "2"}, {"b", "1"}}));
  ASSERT_OK_AND_ASSIGN(const std::string after, files_->Read(kJournal));
  for (size_t length = before.size(); length < after.size(); ++length) {
    Put(after.substr(0, length));
    EXPECT_THAT(Records(), ElementsAre(Pair("a", "1"))) << length;
    // The file has grown, and not all of its bytes are there.
    Put(after.substr(0, length) + std::string(after.size() - length, '\0'));
    EXPECT_THAT(Records(), ElementsAre(Pair("a", "1"))) << length;
    ASSERT_OK(Open()->Write({{"c", "1"}}));
    EXPECT_THAT(Records(), ElementsAre(Pair("a", "1"), Pair("c", "1"))) << length;
  }
}

TEST_F(RecordLogTest, DamageBeforeTheEnd_IsDataLossThatNamesFileAndByte) {
  ASSERT_OK(Open()->Write({{"a", "value"}}));
  ASSERT_OK_AND_ASSIGN(const std::string first, files_->Read(kJournal));
  ASSERT_OK(Open()->Write({{"b", "1"}}));
  ASSERT_OK_AND_ASSIGN(std::string bytes, files_->Read(kJournal));
  bytes[first.size() - 2] ^= 1;
  Put(bytes);
  EXPECT_THAT(RecordLog::Open(*files_, "/records").status(),
              StatusIs(absl::StatusCode::kDataLoss, AllOf(HasSubstr(kJournal), HasSubstr("byte"))));
}

TEST_F(RecordLogTest, FilesOfEarlierVersions_AreTakenOver) {
  ASSERT_OK(files_->WriteAtomically("/records/cluster", "c"));
  ASSERT_OK(files_->WriteAtomically("/records/attempt.a.e1", std::string("\0x", 2)));
  ASSERT_OK(files_->WriteAtomically("/records/identity.tmp", "half"));
  const auto both = ElementsAre(Pair("attempt.a.e1", std::string("\0x", 2)), Pair("cluster", "c"));
  EXPECT_THAT(Records(), both);
  ASSERT_OK_AND_ASSIGN(const auto names, files_->List("/records"));
  EXPECT_THAT(names, ElementsAre("journal"));
  // A crash before they are gone: what has changed since counts.
  ASSERT_OK(Open()->Write({{"cluster", {}}}));
  ASSERT_OK(files_->WriteAtomically("/records/cluster", "c"));
  EXPECT_THAT(Records(), ElementsAre(Pair("attempt.a.e1", std::string("\0x", 2))));
}

TEST_F(RecordLogTest, JournalOfManyChanges_StaysShort) {
  const std::unique_ptr<RecordLog> log = Open();
  const std::string value(10'000, 'x');
  for (int i = 0; i < 3'000; ++i) {
    ASSERT_OK(log->Write({{absl::StrCat("a", i), value}, {absl::StrCat("a", i - 1), {}}}));
    ASSERT_OK_AND_ASSIGN(const int64_t size, files_->Size(kJournal));
    ASSERT_LE(size, RecordLog::kJournalBytes + 20'000);
  }
  files_->Crash();
  EXPECT_THAT(Records(), ElementsAre(Pair("a2999", value)));
}

}  // namespace
}  // namespace muster::worker
