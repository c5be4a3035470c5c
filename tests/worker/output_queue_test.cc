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
#include "base/mutex.h"
#include "tests/support/status_matchers.h"

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
  EXPECT_THAT(Add({"a"}, {Reply(1), Observed(1, 2), ArmTimer{}}), ElementsAre("timer"));
  EXPECT_THAT(Add({}, {Observed(1, 3), ArmTimer{}}), ElementsAre("observed 1", "timer"));
  EXPECT_THAT(Add({}, {Observed(1, 4)}), ElementsAre("observed 1"));
  Disk(absl::OkStatus());
  // The newest says all that those before said.
  EXPECT_THAT(Await(2), ElementsAre("reply 1", "observed 4"));
}

TEST_F(OutputQueueTest, RecordsWithoutEnd_DoNotHoldBackWhatIsDurable) {
  Add({"a"}, {Observed(1, 1)});
  AwaitWrites(1);
  Add({"b"}, {Observed(1, 2)});
  Add({"c"}, {Observed(1, 3)});
  Add({"d"}, {Observed(1, 4)});
  Disk(absl::OkStatus());
  // The last says what those between said, for which it is as durable.
  EXPECT_THAT(Await(2), ElementsAre("observed 1", "observed 4"));
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

}  // namespace
}  // namespace muster::worker
