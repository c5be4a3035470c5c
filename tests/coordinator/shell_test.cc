// Persist before act: a store whose writes wait for the test, and a scripted core.
#include "coordinator/shell.h"
#include "base/mutex.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/coordinator/scripted_core.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::Not;

// A memory store whose writes wait until Open(true).
class GatedStore : public Store {
 public:
  absl::Status Write(const std::vector<Batch>& batches) override {
    MutexLock lock(&mutex_);
    ++started_;
    mutex_.Await(Condition(&open_));
    batches_.push_back(batches.size());
    return memory_->Write(batches);
  }
  absl::StatusOr<std::optional<std::string>> Get(Table table, const std::string& key) override {
    return memory_->Get(table, key);
  }
  absl::Status Scan(
      Table table, const std::string& begin, const std::string& end,
      absl::AnyInvocable<bool(const std::string&, const std::string&)> visit) override {
    return memory_->Scan(table, begin, end, std::move(visit));
  }

  absl::Status Backup(const std::string& directory) override { return memory_->Backup(directory); }

  void Open(bool open) {
    MutexLock lock(&mutex_);
    open_ = open;
  }
  void WaitForWrite(int number) {
    MutexLock lock(&mutex_);
    auto reached = [&] { return started_ >= number; };
    mutex_.Await(Condition(&reached));
  }
  std::vector<size_t> batches() {
    MutexLock lock(&mutex_);
    return batches_;
  }
  void Fail() { memory_->FailWrites(true); }

 private:
  Mutex mutex_;
  bool open_ = true;
  int started_ = 0;
  std::vector<size_t> batches_;  // of each write
  const std::unique_ptr<MemoryStore> memory_ = MemoryStore::Make("scripted");
};

class RecordingStream : public SessionStream {
 public:
  void Send(v1::FromCoordinator message) override {
    MutexLock lock(&mutex_);
    messages_.push_back(std::move(message));
  }
  void Close(const absl::Status& status) override {
    MutexLock lock(&mutex_);
    closed_ = status;
    is_closed_ = true;
  }
  v1::FromCoordinator WaitForMessage() {
    MutexLock lock(&mutex_);
    auto some = [&] { return !messages_.empty(); };
    mutex_.Await(Condition(&some));
    return messages_.front();
  }
  absl::Status WaitForClose() {
    MutexLock lock(&mutex_);
    mutex_.Await(Condition(&is_closed_));
    return closed_;
  }

 private:
  Mutex mutex_;
  std::vector<v1::FromCoordinator> messages_;
  absl::Status closed_;
  bool is_closed_ = false;
};

class ShellTest : public ::testing::Test {
 protected:
  ShellTest() {
    auto started = Shell::Start(
        {store_, clock_, *log_, metrics_},
        [this](absl::Time, CoreOutput*) -> absl::StatusOr<std::unique_ptr<Core>> {
          auto core = std::make_unique<ScriptedCore>();
          core_ = core.get();
          return core;
        },
        [this](const absl::Status& status) {
          failure_ = status;
          ++failures_;
          failed_.Notify();
        });
    CHECK_OK(started);
    shell_ = *std::move(started);
  }
  ~ShellTest() override { store_.Open(true); }

  struct Call {
    Notification done;
    absl::StatusOr<JobReply> reply = absl::UnknownError("no reply");
  };
  std::shared_ptr<Call> Submit(const std::string& name) {
    auto call = std::make_shared<Call>();
    v1::JobSpec spec;
    spec.set_name(name);
    shell_->Submit(std::move(spec), "", "client", [call](absl::StatusOr<JobReply> reply) {
      call->reply = std::move(reply);
      call->done.Notify();
    });
    return call;
  }

  GatedStore store_;
  RealClock clock_;
  std::shared_ptr<Logger> log_ = Logger::Discard();
  std::unique_ptr<metrics::Registry> registry_ = metrics::DiscardRegistry();
  Metrics metrics_{*registry_};
  ScriptedCore* core_ = nullptr;
  absl::Status failure_;
  std::atomic<int> failures_ = 0;
  Notification failed_;
  std::unique_ptr<Shell> shell_;
};

TEST_F(ShellTest, SubmittedJob_IsPublishedAndAnsweredAfterTheSync) {
  store_.Open(false);
  const auto call = Submit("a");
  store_.WaitForWrite(1);
  EXPECT_FALSE(call->done.HasBeenNotified());
  EXPECT_EQ(shell_->published().Find("a"), nullptr);
  EXPECT_EQ(shell_->published().last_event(), 0u);
  store_.Open(true);
  call->done.WaitForNotification();
  ASSERT_OK(call->reply);
  EXPECT_EQ(call->reply->job.id(), "a-1");
  ASSERT_NE(shell_->published().Find("a"), nullptr);
  EXPECT_EQ(shell_->published().last_event(), 1u);
}

TEST_F(ShellTest, OutputsThatWaitForTheDisk_ShareOneWriteAndKeepTheirOrder) {
  store_.Open(false);
  std::vector<std::shared_ptr<Call>> calls = {Submit("first")};
  store_.WaitForWrite(1);
  for (int i = 0; i < 9; ++i) calls.push_back(Submit(absl::StrCat("later-", i)));
  // The loop runs in order: when it has handled this message, all ten outputs wait for the disk.
  Notification queued;
  shell_->Deliver(SessionId(1), v1::FromWorker(), [&queued] { queued.Notify(); });
  queued.WaitForNotification();
  store_.Open(true);
  for (const auto& call : calls) call->done.WaitForNotification();
  EXPECT_THAT(store_.batches(), ::testing::ElementsAre(1, 9));
  const std::vector<PublishedState::Row> rows = shell_->published().List(0, 100);
  ASSERT_EQ(rows.size(), 10u);
  EXPECT_EQ(rows.front().job->name(), "later-8");
  EXPECT_EQ(rows.back().job->name(), "first");
}

// What workers report keeps them from being taken for silent: it must not wait for the disk.
TEST_F(ShellTest, HeartbeatsAreHandledWhileTheStoreDoesNotAnswer) {
  constexpr int kHeartbeats = 5000;
  static_assert(kHeartbeats > kBatchesWaitingMax);
  store_.Open(false);
  const auto call = Submit("a");
  store_.WaitForWrite(1);
  Notification handled;
  for (int i = 0; i < kHeartbeats; ++i) {
    shell_->Deliver(SessionId(1), v1::FromWorker(), [&handled, i] {
      if (i == kHeartbeats - 1) handled.Notify();
    });
  }
  handled.WaitForNotification();
  EXPECT_FALSE(call->done.HasBeenNotified());
  EXPECT_EQ(shell_->published().Find("a"), nullptr) << "what they told is behind the submission";
  const auto last = Submit("b");
  store_.Open(true);
  call->done.WaitForNotification();
  last->done.WaitForNotification();
  EXPECT_EQ(shell_->published().Find("a")->step(), kHeartbeats);
}

TEST_F(ShellTest, JobThatIsNotDurableYet_IsUnknown) {
  store_.Open(false);
  const auto call = Submit("a");
  store_.WaitForWrite(1);
  // The core has the job by now, and the disk has not.
  EXPECT_THAT(shell_->GetJob("a"), StatusIs(absl::StatusCode::kNotFound));
  store_.Open(true);
  call->done.WaitForNotification();
  ASSERT_OK_AND_ASSIGN(const auto job, shell_->GetJob("a"));
  EXPECT_EQ(job->id(), "a-1");
}

TEST_F(ShellTest, UnknownName_IsAnsweredWhileTheLoopIsBusy) {
  const auto call = Submit("llama");
  call->done.WaitForNotification();
  Notification busy;
  // The loop's thread may still be leaving its wait when this test returns.
  const auto release = std::make_shared<Notification>();
  shell_->Deliver(SessionId(1), v1::FromWorker(), [&busy, release] {
    busy.Notify();
    release->WaitForNotification();
  });
  busy.WaitForNotification();
  EXPECT_THAT(shell_->GetJob("lama"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("did you mean 'llama'")));
  Notification cancelled;
  absl::Status answer;
  shell_->Cancel("lama", "client", [&](absl::StatusOr<JobReply> reply) {
    answer = reply.status();
    cancelled.Notify();
  });
  EXPECT_TRUE(cancelled.HasBeenNotified());
  release->Notify();
  cancelled.WaitForNotification();
  EXPECT_THAT(answer, StatusIs(absl::StatusCode::kNotFound, HasSubstr("llama")));
}

// Names of one length are compared with their neighbours alone.
TEST(PublishedState, NearestName_IsSoughtAmongABoundedNumber) {
  RealClock clock;
  ThreadLoop loop(clock);
  const auto registry = metrics::DiscardRegistry();
  Metrics metrics(*registry);
  PublishedState published(loop, metrics);
  const auto publish = [&](const std::string& name, uint64_t sequence) {
    auto job = std::make_shared<v1::Job>();
    job->set_id(absl::StrCat("id-", sequence));
    job->set_name(name);
    JobChanged change{JobId(job->id()), sequence, {}};
    change.changed[JobPart::kState] = std::move(job);
    published.PublishJob(change);
  };
  // Names of one length that come before and after the one that is sought.
  for (uint64_t i = 1; i <= 5000; ++i) publish(absl::StrFormat("a-run-of-job-%05d", i), i);
  publish("llama-of-job-12345", 6000);
  for (uint64_t i = 1; i <= 5000; ++i) publish(absl::StrFormat("z-run-of-job-%05d", i), 6000 + i);
  EXPECT_THAT(
      published.NotFound("llama-of-job-12354"),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("did you mean 'llama-of-job-12345'")));
  EXPECT_THAT(published.NotFound("llama-of-job-2345"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("12345'")));
  // 5,000 names of the same length stand between this misspelling and its name: it is not compared.
  EXPECT_THAT(published.NotFound("-lama-of-job-12345"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("`muster get jobs`")));
  published.RemoveJob("id-6000");
  EXPECT_THAT(published.NotFound("llama-of-job-12354"),
              StatusIs(absl::StatusCode::kNotFound, Not(HasSubstr("llama-of-job-12345"))));
}

TEST_F(ShellTest, FailedWrite_FailsEveryCallPublishesNothingAndReportsOnce) {
  const auto stream = std::make_shared<RecordingStream>();
  ASSERT_OK(shell_->OpenSession(Incarnation(1), v1::Hello(), stream));
  stream->WaitForMessage();
  store_.Fail();
  const auto first = Submit("a");
  const auto second = Submit("b");
  failed_.WaitForNotification();
  first->done.WaitForNotification();
  second->done.WaitForNotification();
  EXPECT_THAT(first->reply, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("cannot write")));
  EXPECT_THAT(second->reply, StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(shell_->published().Find("a"), nullptr);
  EXPECT_THAT(failure_, StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(stream->WaitForClose(), StatusIs(absl::StatusCode::kUnavailable));
  const auto later = Submit("c");
  later->done.WaitForNotification();
  EXPECT_THAT(later->reply, StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(failures_, 1);
}

TEST_F(ShellTest, Drain_FinishesCallsThatWereTakenClosesStreamsAndRefusesMore) {
  const auto stream = std::make_shared<RecordingStream>();
  ASSERT_OK(shell_->OpenSession(Incarnation(1), v1::Hello(), stream));
  store_.Open(false);
  const auto taken = Submit("a");
  store_.WaitForWrite(1);
  std::thread drain([this] { shell_->Drain(); });
  store_.Open(true);
  drain.join();
  taken->done.WaitForNotification();
  EXPECT_OK(taken->reply);
  EXPECT_THAT(stream->WaitForClose(), StatusIs(absl::StatusCode::kUnavailable));
  const auto late = Submit("b");
  late->done.WaitForNotification();
  EXPECT_THAT(late->reply, StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(shell_->OpenSession(Incarnation(2), v1::Hello(), std::make_shared<RecordingStream>()),
              StatusIs(absl::StatusCode::kUnavailable));
}

TEST_F(ShellTest, MessagesToDaemons_CarryClusterAndTerm) {
  const auto stream = std::make_shared<RecordingStream>();
  ASSERT_OK(shell_->OpenSession(Incarnation(1), v1::Hello(), stream));
  const v1::FromCoordinator welcome = stream->WaitForMessage();
  EXPECT_TRUE(welcome.has_welcome());
  EXPECT_EQ(welcome.cluster_id(), "scripted");
  EXPECT_EQ(welcome.leader_term(), 7u);
  EXPECT_EQ(welcome.history_id(), "its history");
}

TEST_F(ShellTest, Listing_IsNewestFirstAndContinuesBelowASequence) {
  for (const char* name : {"c", "a", "b"}) {
    const auto call = Submit(name);
    call->done.WaitForNotification();
  }
  const std::vector<PublishedState::Row> rows = shell_->published().List(0, 2);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].job->name(), "b");
  EXPECT_EQ(rows[1].job->name(), "a");
  const std::vector<PublishedState::Row> rest =
      shell_->published().List(rows[1].submit_sequence, 2);
  ASSERT_EQ(rest.size(), 1u);
  EXPECT_EQ(rest[0].job->name(), "c");
}

// Records which gauges with a label exist; discards all values.
class SeriesRegistry : public metrics::Registry {
 public:
  metrics::Counter& GetCounter(const metrics::Family& family,
                               const std::vector<std::string>& labels) override {
    return nowhere_->GetCounter(family, labels);
  }
  metrics::Histogram& GetHistogram(const metrics::Family& family,
                                   const std::vector<std::string>& labels) override {
    return nowhere_->GetHistogram(family, labels);
  }
  metrics::Gauge& GetGauge(const metrics::Family& family,
                           const std::vector<std::string>& labels) override {
    MutexLock lock(&mutex_);
    if (!labels.empty()) series_.emplace(family.name, labels[0]);
    return nowhere_->GetGauge(family, labels);
  }
  void Remove(const metrics::Family& family, const std::vector<std::string>& labels) override {
    MutexLock lock(&mutex_);
    series_.erase({std::string(family.name), labels[0]});
  }

  // The number of series of the job.
  size_t CountOf(const std::string& job) {
    MutexLock lock(&mutex_);
    return CountLocked(job);
  }
  bool AwaitNoneOf(const std::string& job) {
    MutexLock lock(&mutex_);
    auto none = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return CountLocked(job) == 0; };
    return mutex_.AwaitWithTimeout(Condition(&none), absl::Seconds(30));
  }

 private:
  size_t CountLocked(const std::string& job) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return static_cast<size_t>(std::count_if(
        series_.begin(), series_.end(), [&](const auto& entry) { return entry.second == job; }));
  }

  const std::unique_ptr<metrics::Registry> nowhere_ = metrics::DiscardRegistry();
  Mutex mutex_;
  std::set<std::pair<std::string, std::string>> series_ ABSL_GUARDED_BY(mutex_);
};

TEST(Shell, JobThatHasEnded_LosesItsSeriesAfterTheConfiguredTime) {
  const std::unique_ptr<MemoryStore> store = MemoryStore::Make("scripted");
  RealClock clock;
  const std::shared_ptr<Logger> log = Logger::Discard();
  SeriesRegistry registry;
  Metrics metrics(registry);
  auto started = Shell::Start(
      {*store, clock, *log, metrics, /*ended_job_series_kept=*/absl::Milliseconds(1)},
      [](absl::Time, CoreOutput*) -> absl::StatusOr<std::unique_ptr<Core>> {
        return std::make_unique<ScriptedCore>();
      },
      [](const absl::Status&) {});
  ASSERT_OK(started);
  Shell& shell = **started;
  Notification submitted;
  v1::JobSpec spec;
  spec.set_name("gpt");
  shell.Submit(spec, "", "client", [&](absl::StatusOr<JobReply>) { submitted.Notify(); });
  submitted.WaitForNotification();
  ASSERT_OK_AND_ASSIGN(
      const SessionId session,
      shell.OpenSession(Incarnation(1), v1::Hello(), std::make_shared<RecordingStream>()));
  const auto deliver = [&](const v1::FromWorker& message) {
    Notification handled;
    shell.Deliver(session, message, [&] { handled.Notify(); });
    handled.WaitForNotification();
  };
  v1::FromWorker progress;
  progress.mutable_observed();
  deliver(progress);
  // When a later submission is answered, everything before it is published.
  Notification published;
  spec.set_name("other");
  shell.Submit(spec, "", "client", [&](absl::StatusOr<JobReply>) { published.Notify(); });
  published.WaitForNotification();
  EXPECT_EQ(registry.CountOf("gpt"), 11u);
  v1::FromWorker end;
  end.mutable_notice();
  deliver(end);
  EXPECT_TRUE(registry.AwaitNoneOf("gpt"));
  shell.Drain();
}

}  // namespace
}  // namespace muster::coordinator
