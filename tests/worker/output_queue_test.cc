// The order of records and actions on their way out of the daemon, and what a slow disk holds up.
#include "worker/daemon/output_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "tests/support/status_matchers.h"
#include "worker/daemon/state_directory.h"

namespace muster::worker {
namespace {

using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr absl::Duration kPatience = absl::Seconds(30);

DaemonAction Observed(uint64_t session, uint64_t revision) {
  SendToCoordinator send{SessionId(session), {}};
  send.message.mutable_observed()->set_applied_revision(revision);
  return send;
}

DaemonAction Reply(uint64_t call) { return ReplyToRank{CallId(call), v1::CommitResponse()}; }

std::string Text(const DaemonAction& action) {
  if (const auto* reply = std::get_if<ReplyToRank>(&action)) {
    return absl::StrCat("reply ", reply->call.value());
  }
  if (const auto* send = std::get_if<SendToCoordinator>(&action)) {
    return absl::StrCat("observed ", send->message.observed().applied_revision());
  }
  return std::holds_alternative<ArmTimer>(action) ? "timer" : "another";
}

class OutputQueueTest : public ::testing::Test {
 protected:
  OutputQueueTest() {
    OutputQueue::Parts parts;
    parts.write = [this](const std::vector<DaemonRecord>& records) { return Write(records); };
    parts.carry = [this](DaemonAction action) {
      MutexLock lock(&mutex_);
      carried_.push_back(Text(action));
    };
    parts.failed = [this](const absl::Status& status) {
      MutexLock lock(&mutex_);
      carried_.push_back(absl::StrCat("failed: ", status.message()));
    };
    queue_ = std::make_unique<OutputQueue>(loop_, std::move(parts));
  }
  ~OutputQueueTest() override {
    Disk(absl::OkStatus());
    loop_.Stop();
  }

  // From now on writes end, with this status.
  void Disk(absl::Status status) {
    MutexLock lock(&mutex_);
    disk_ = std::move(status);
    disk_answers_ = true;
  }
  // Adds an output with a record of each name. Returns what has been carried out since the last
  // call.
  std::vector<std::string> Add(const std::vector<std::string>& records,
                               std::vector<DaemonAction> actions) {
    DaemonOutput output;
    for (const std::string& name : records) output.records.push_back({name, "value"});
    output.actions = std::move(actions);
    Notification added;
    loop_.Post([&] {
      queue_->Add(std::move(output));
      added.Notify();
    });
    added.WaitForNotification();
    MutexLock lock(&mutex_);
    return std::exchange(carried_, {});
  }
  // Waits until `count` actions have been carried out since the last call of Add or of this.
  std::vector<std::string> Await(size_t count) {
    MutexLock lock(&mutex_);
    auto done = [this, count]()
                    ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return carried_.size() >= count; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(Condition(&done), kPatience));
    return std::exchange(carried_, {});
  }
  // Waits until the writer has taken `count` groups.
  std::vector<std::string> AwaitWrites(size_t count) {
    MutexLock lock(&mutex_);
    auto done = [this, count]()
                    ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return writes_.size() >= count; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(Condition(&done), kPatience));
    return writes_;
  }

 private:
  absl::Status Write(const std::vector<DaemonRecord>& records) {
    MutexLock lock(&mutex_);
    std::string names;
    for (const DaemonRecord& record : records) names += record.name;
    writes_.push_back(names);
    auto answers = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return disk_answers_; };
    mutex_.Await(Condition(&answers));
    return disk_;
  }

  RealClock clock_;
  Mutex mutex_;
  bool disk_answers_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status disk_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> writes_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> carried_ ABSL_GUARDED_BY(mutex_);
  ThreadLoop loop_{clock_};

 protected:
  std::unique_ptr<OutputQueue> queue_;
};

TEST_F(OutputQueueTest, Actions_WaitForTheRecordsOfTheirOutputAndOfThoseBefore) {
  EXPECT_THAT(Add({}, {Reply(1)}), ElementsAre("reply 1"));
  EXPECT_THAT(Add({"a"}, {Reply(2)}), IsEmpty());
  EXPECT_THAT(Add({}, {Reply(3)}), IsEmpty());
  AwaitWrites(1);
  EXPECT_THAT(Add({"b"}, {Reply(4)}), IsEmpty());
  Disk(absl::OkStatus());
  EXPECT_THAT(Await(3), ElementsAre("reply 2", "reply 3", "reply 4"));
  EXPECT_THAT(Add({}, {Reply(5)}), ElementsAre("reply 5"));
}

TEST_F(OutputQueueTest, RecordsThatWaitForTheDisk_AreOneGroup) {
  Add({"a"}, {});
  AwaitWrites(1);
  Add({"b", "c"}, {});
  Add({"d"}, {});
  Add({"e"}, {Reply(1)});
  Disk(absl::OkStatus());
  Await(1);
  EXPECT_THAT(AwaitWrites(2), ElementsAre("a", "bcde"));
}

TEST_F(OutputQueueTest, SlowDisk_StopsNeitherTimersNorHeartbeats) {
  EXPECT_THAT(Add({}, {Observed(1, 1)}), ElementsAre("observed 1"));
  EXPECT_THAT(Add({"a"}, {Reply(1), Observed(1, 2), ArmTimer{}}),
              ElementsAre("observed 1", "timer"));
  EXPECT_THAT(Add({}, {Observed(1, 3), ArmTimer{}}), ElementsAre("observed 1", "timer"));
  EXPECT_THAT(Add({}, {Observed(1, 4)}), ElementsAre("observed 1"));
  Disk(absl::OkStatus());
  // The newest says all that those before said.
  EXPECT_THAT(Await(2), ElementsAre("reply 1", "observed 4"));
}

TEST_F(OutputQueueTest, ObservedOfAnEarlierSession_IsNotRepeatedInTheNext) {
  EXPECT_THAT(Add({}, {Observed(1, 1)}), ElementsAre("observed 1"));
  EXPECT_THAT(Add({"a"}, {Observed(2, 2)}), IsEmpty());
  Disk(absl::OkStatus());
  EXPECT_THAT(Await(1), ElementsAre("observed 2"));
}

TEST_F(OutputQueueTest, AwaitWritten_ReturnsWhenAllIsDurableOrAWriteHasFailed) {
  queue_->AwaitWritten();
  Add({"a"}, {Reply(1)});
  AwaitWrites(1);
  Add({"b"}, {Reply(2)});
  Notification written;
  std::thread waiter([this, &written] {
    queue_->AwaitWritten();
    written.Notify();
  });
  EXPECT_FALSE(written.WaitForNotificationWithTimeout(absl::Milliseconds(100)));
  Disk(absl::OkStatus());
  waiter.join();
  EXPECT_THAT(Add({}, {}), ElementsAre("reply 1", "reply 2"));
  Disk(absl::UnavailableError("disk full"));
  Add({"c"}, {});
  queue_->AwaitWritten();
}

TEST_F(OutputQueueTest, FailedWrite_CarriesNothingOutAndIsReportedOnce) {
  Add({"a"}, {Reply(1)});
  Add({"b"}, {Reply(2)});
  Disk(absl::UnavailableError("disk full"));
  EXPECT_THAT(Await(1), ElementsAre("failed: disk full"));
  EXPECT_THAT(Add({"c"}, {Reply(3)}), IsEmpty());
  EXPECT_THAT(Add({}, {Reply(4)}), IsEmpty());
}

// ---- files --------------------------------------------------------------------------------------

// Counts syncs; everything else is the file system's.
class CountingFiles : public FileSystem {
 public:
  int file_syncs = 0;
  int directory_syncs = 0;
  MemoryFileSystem& memory() { return *files_; }

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    absl::StatusOr<std::unique_ptr<WritableFile>> file = files_->Create(path);
    if (!file.ok()) return file;
    return std::make_unique<File>(*std::move(file), file_syncs);
  }
  absl::StatusOr<std::string> Read(const std::string& path) override { return files_->Read(path); }
  absl::StatusOr<std::string> ReadRange(const std::string& path, int64_t offset,
                                        int64_t length) override {
    return files_->ReadRange(path, offset, length);
  }
  absl::StatusOr<int64_t> Size(const std::string& path) override { return files_->Size(path); }
  bool Exists(const std::string& path) override { return files_->Exists(path); }
  absl::Status MakeDirectory(const std::string& path) override {
    return files_->MakeDirectory(path);
  }
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    return files_->List(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return files_->Rename(from, to);
  }
  absl::Status SyncDirectory(const std::string& path) override {
    ++directory_syncs;
    return files_->SyncDirectory(path);
  }
  absl::Status RemoveFile(const std::string& path) override { return files_->RemoveFile(path); }
  absl::Status RemoveTree(const std::string& path) override { return files_->RemoveTree(path); }

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
  std::unique_ptr<MemoryFileSystem> files_ = MemoryFileSystem::Make();
};

TEST(WriteRecordsTest, Group_SyncsEachFileOnceAndTheDirectoryOnce) {
  CountingFiles files;
  ASSERT_OK(files.MakeDirectory("/records"));
  ASSERT_OK(WriteRecords(files, "/records", {{"gone", "1"}, {"a", "1"}}));
  files.file_syncs = files.directory_syncs = 0;
  ASSERT_OK(WriteRecords(
      files, "/records",
      {{"a", "2"}, {"b", "1"}, {"gone", "2"}, {"a", "3"}, {"gone", {}}, {"never", {}}}));
  EXPECT_EQ(files.file_syncs, 2);  // a and b
  EXPECT_EQ(files.directory_syncs, 1);
  files.memory().Crash();
  ASSERT_OK_AND_ASSIGN(const auto names, files.List("/records"));
  EXPECT_THAT(names, ElementsAre("a", "b"));
  EXPECT_EQ(files.Read("/records/a").value(), "3");
  EXPECT_EQ(files.Read("/records/b").value(), "1");
}

TEST(WriteRecordsTest, NoRecords_TouchNothing) {
  CountingFiles files;
  ASSERT_OK(WriteRecords(files, "/absent", {}));
  EXPECT_EQ(files.directory_syncs, 0);
}

TEST(WriteRecordsTest, FailedWrite_KeepsWhatWasThere) {
  CountingFiles files;
  ASSERT_OK(files.MakeDirectory("/records"));
  ASSERT_OK(WriteRecords(files, "/records", {{"a", "1"}}));
  files.memory().FailWrites(true);
  EXPECT_THAT(WriteRecords(files, "/records", {{"b", "1"}, {"a", "2"}}),
              StatusIs(absl::StatusCode::kUnavailable));
  files.memory().FailWrites(false);
  files.memory().Crash();
  EXPECT_EQ(files.Read("/records/a").value(), "1");
  EXPECT_FALSE(files.Exists("/records/b"));
}

}  // namespace
}  // namespace muster::worker
