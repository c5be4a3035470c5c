// The running time of a job, without the core.
#include "coordinator/core/run_clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/core/state_log.h"
#include "coordinator/scheduler/slot_index.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;

class RunClockTest : public ::testing::Test {
 protected:
  RunClockTest() {
    job_.fixed.set_id("train-abcde");
    *job_.fixed.mutable_spec()->mutable_time_limit() = ToProto(absl::Minutes(10));
    job_.state.set_state(v1::JOB_STATE_RUNNING);
    job_.state.set_attempt_live(true);
    job_.state.set_attempt_state(v1::ATTEMPT_STATE_TRAINING);
  }
  Turn At(absl::Duration since) { return Turn(kStart + since, "test", log_, state_log_); }
  bool Due(absl::Duration since) { return deadlines_.next() == kStart + since; }

  static constexpr absl::Time kStart = absl::FromUnixSeconds(1'000'000'000);
  EventLog log_;
  StateLog state_log_;
  SlotIndex slots_;
  Scheduling scheduling_{slots_};
  Deadlines deadlines_;
  RunClock clock_{scheduling_, deadlines_};
  JobEntry job_;
};

TEST_F(RunClockTest, Stop_AddsWhatRanSinceTheStart) {
  Turn first = At(absl::ZeroDuration());
  clock_.Start(job_, first);
  Turn second = At(absl::Minutes(4));
  clock_.Stop(job_, second);
  EXPECT_FALSE(job_.state.has_running_since());
  EXPECT_EQ(FromProto(job_.state.ran()), absl::Minutes(4));
  Turn third = At(absl::Minutes(5));
  clock_.Stop(job_, third);
  EXPECT_EQ(FromProto(job_.state.ran()), absl::Minutes(4)) << "it had stopped";
}

TEST_F(RunClockTest, StopAfterTheClockWasSetBack_AddsNothing) {
  Turn first = At(absl::Minutes(4));
  clock_.Start(job_, first);
  Turn second = At(absl::ZeroDuration());
  clock_.Stop(job_, second);
  EXPECT_EQ(FromProto(job_.state.ran()), absl::ZeroDuration());
}

TEST_F(RunClockTest, CheckLimit_CountsAllThatRanAndSaysWhyAtTheLimit) {
  *job_.state.mutable_ran() = ToProto(absl::Minutes(7));
  Turn first = At(absl::ZeroDuration());
  clock_.Start(job_, first);
  EXPECT_FALSE(clock_.CheckLimit(job_, first).has_value());
  EXPECT_TRUE(Due(absl::Minutes(3)));
  Turn second = At(absl::Minutes(3));
  const auto over = clock_.CheckLimit(job_, second);
  ASSERT_TRUE(over.has_value());
  EXPECT_EQ(over->cause, v1::CAUSE_TIME_LIMIT);
  EXPECT_THAT(over->message, HasSubstr("time_limit, 10m"));
}

TEST_F(RunClockTest, Stop_ClearsTheDeadline) {
  Turn first = At(absl::ZeroDuration());
  clock_.Start(job_, first);
  ASSERT_FALSE(clock_.CheckLimit(job_, first).has_value());
  clock_.Stop(job_, first);
  EXPECT_EQ(deadlines_.next(), absl::InfiniteFuture());
}

TEST_F(RunClockTest, Resume_BeginsToCountForAStateThatDidNot) {
  Turn turn = At(absl::Minutes(1));
  clock_.Resume(job_, turn);
  EXPECT_EQ(FromProto(job_.state.running_since()), turn.now());
  EXPECT_TRUE(turn.persist().contains(job_.id()));
  EXPECT_TRUE(Due(absl::Minutes(1)));
}

}  // namespace
}  // namespace muster::coordinator
