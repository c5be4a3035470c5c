// Jobs that run a command instead of the engine.
#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

class CommandJobTest : public CoreTest {
 protected:
  static v1::JobSpec CommandSpec(int ranks = 2) {
    v1::JobSpec spec = Spec(ranks);
    spec.clear_engine();
    spec.clear_checkpoint();
    spec.add_command("train");
    return spec;
  }
  // Opens a session of a daemon that runs commands.
  void HelloOfToday(uint64_t incarnation = 1) {
    SessionOpened hello = HelloOf("w", 2);
    hello.hello.set_protocol_version(2);
    hello.incarnation = Incarnation(incarnation);
    session_ = hello.session;
    incarnation_ = incarnation;
    Handle(hello);
    if (const auto desired = LastDesired()) revision_ = desired->revision();
  }
  void SubmitCommand(int ranks = 2) {
    Handle(SubmitEvent{CallId(1), CommandSpec(ranks), "r"});
    ASSERT_OK(Actions<ReplyAction>()[0].status);
  }
  // Brings it to RUNNING. Its command reports nothing yet.
  v1::Job RunCommand() {
    HelloOfToday();
    SubmitCommand();
    Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
    Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
    EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
    return Job();
  }
  // Lets time pass in which the daemon sends the same again and again.
  void Beat(absl::Duration time, const v1::Observed& observed) {
    for (const absl::Time until = now_ + time; now_ < until && Job().attempts() < 2;) {
      Wait(std::min(absl::Seconds(2), until - now_));
      if (Job().state() == v1::JOB_STATE_RECOVERING) return;
      Observe(observed);
    }
  }
  v1::Observed Silent(const v1::Job& job) { return Ranks(job, v1::RANK_STATE_TRAINING); }
  // A report of rank 0.
  void Report(const v1::Job& job, const v1::RankProgress& progress) {
    v1::Observed observed = Ranks(job, v1::RANK_STATE_TRAINING);
    *observed.mutable_attempts(0)->mutable_ranks(0)->mutable_progress() = progress;
    Observe(std::move(observed));
  }
  // A job that is preempted after that step, and whose ranks then exit with 0.
  v1::Job StopAt(int64_t step, bool commit) {
    const v1::Job job = RunCommand();
    Report(job, At(step));
    if (commit) {
      EXPECT_EQ(Commit(job, step), 0);
    }
    ChangeJobEvent event;
    event.call = CallId(5);
    event.job = job.id();
    event.change = ChangeJobEvent::Change::kPreempt;
    event.caller = "client test";
    Handle(event);
    EXPECT_OK(Actions<ReplyAction>()[0].status);
    if (const auto desired = LastDesired()) revision_ = desired->revision();
    Observe(
        Ranks(job, v1::RANK_STATE_RELEASED, {{0, v1::CAUSE_COMPLETED}, {1, v1::CAUSE_COMPLETED}}));
    return Job();
  }
  static v1::RankProgress At(int64_t step) {
    v1::RankProgress progress;
    progress.set_reports(true);
    progress.set_step(step);
    progress.set_steps(1000);
    progress.set_train_loss(2.5);
    progress.set_consumed_tokens(77);
    return progress;
  }
};

TEST_F(CommandJobTest, WhatItReports_IsShown_AndSurvivesARestart) {
  const v1::Job job = RunCommand();
  EXPECT_EQ(Job().steps(), 0) << "it has not said";
  v1::RankProgress progress = At(12);
  progress.set_command_pid(4242);
  Report(job, progress);
  Wait(absl::Seconds(2));  // progress is stored once a second
  progress.set_step(13);
  Report(job, progress);
  EXPECT_EQ(Job().ranks(0).pid(), 4242);
  Restart();
  EXPECT_EQ(Job().step(), 13);
  EXPECT_EQ(Job().steps(), 1000);
  EXPECT_EQ(Job().train_loss(), 2.5);
  EXPECT_EQ(Job().consumed_tokens(), 77);
}

TEST_F(CommandJobTest, ThePidShown_IsOfTheCommand_AndNeverOfTheProcessThatWaitsForIt) {
  const v1::Job job = RunCommand();
  const auto report = [&](int64_t command) {
    v1::Observed observed = Ranks(job, v1::RANK_STATE_TRAINING);
    v1::ObservedRank& rank = *observed.mutable_attempts(0)->mutable_ranks(0);
    rank.set_pid(4200);
    rank.mutable_progress()->set_command_pid(command);
    Observe(std::move(observed));
    return Job().ranks(0).pid();
  };
  EXPECT_EQ(report(0), 0) << "a daemon that has just adopted the rank has not heard from it";
  EXPECT_EQ(report(4242), 4242);
  EXPECT_EQ(report(0), 4242);
}

TEST_F(CommandJobTest, SilentFromTheBeginning_IsNoHang) {
  const v1::Job job = RunCommand();
  Beat(3 * config_.progress_timeout, Silent(job));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Job().attempts(), 1);
}

TEST_F(CommandJobTest, SilentAfterAReport_IsAHang) {
  const v1::Job job = RunCommand();
  Beat(2 * config_.progress_timeout, Silent(job));
  Report(job, At(3));
  Beat(config_.progress_timeout - absl::Seconds(5), Silent(job));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  Report(job, At(4));
  Beat(config_.progress_timeout - absl::Seconds(5), Silent(job));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING) << "another step is progress";
  Beat(absl::Seconds(15), Silent(job));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_HANG);
}

TEST_F(CommandJobTest, DoesNotBegin_IsAHang) {
  HelloOfToday();
  SubmitCommand();
  const v1::Job job = Job();
  Observe(Ranks(job, v1::RANK_STATE_PREPARED));
  Beat(config_.progress_timeout + absl::Seconds(15), Ranks(job, v1::RANK_STATE_RUNNING));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_HANG);
}

TEST_F(CommandJobTest, EveryRankExitsWithSuccess_Succeeds) {
  const v1::Job job = RunCommand();
  Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_COMPLETED}}));
  Beat(config_.progress_timeout, Silent(job));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING) << "one rank may be done long before another";
  Observe(
      Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_COMPLETED}, {1, v1::CAUSE_COMPLETED}}));
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(CommandJobTest, CommittedCheckpoint_RefundsAFailureAndIsGivenBack) {
  v1::Job job = RunCommand();
  for (int i = 1; i <= 3; ++i) {  // restart.max_failures is 1
    EXPECT_EQ(Commit(job, 10 * i), 0);
    Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{1, v1::CAUSE_CRASH}}));
    Observe(Ranks(job, v1::RANK_STATE_RELEASED));
    EXPECT_EQ(Job().failures(), 0);
    Wait(absl::Seconds(5));  // the back-off
    job = Job();
    Observe(Ranks(job, v1::RANK_STATE_PREPARED));
    ASSERT_TRUE(LastDesired().has_value());
    const v1::DesiredAttempt attempt = LastDesired()->attempts(0);
    EXPECT_EQ(attempt.restore(0).step(), 10 * i);
    EXPECT_EQ(attempt.ranks(1).attempt(), i + 1);
    Observe(Ranks(job, v1::RANK_STATE_TRAINING));
  }
}

TEST_F(CommandJobTest, ExitsWithSuccessWhenAskedToStop_GoesOnFromItsCheckpoint) {
  const v1::Job job = StopAt(500, /*commit=*/true);
  EXPECT_EQ(job.state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(job.causes(0).cause(), v1::CAUSE_PREEMPTED);
  EXPECT_EQ(job.last_committed_step(), 500);
}

TEST_F(CommandJobTest, HasDoneAllStepsWhenAskedToStop_Succeeds) {
  EXPECT_EQ(StopAt(1000, /*commit=*/true).state(), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(CommandJobTest, ExitsWithSuccessAndHasNothingToGoOnFrom_Succeeds) {
  EXPECT_EQ(StopAt(500, /*commit=*/false).state(), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(CommandJobTest, DaemonThatIsTooOld_IsNamed) {
  Hello();
  SubmitCommand();
  Observe(Ranks(Job(), v1::RANK_STATE_RELEASED));
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_LAUNCH);
  EXPECT_NE(Job().causes(0).message().find("worker w is of version"), std::string::npos);
  EXPECT_FALSE(Job().causes(0).counted());
}

// Workers are numbered in order of their lowest ranks, whatever their names.
TEST_F(CommandJobTest, Assignment_SaysWhereTheWorkerComesAmongThoseOfTheAttempt) {
  std::map<SessionId, std::string> workers;
  for (const char* worker : {"b", "a", "c"}) {
    SessionOpened hello = HelloOf(worker, 2);
    hello.hello.set_protocol_version(2);
    workers[hello.session] = worker;
    Handle(hello);
  }
  SubmitCommand(6);
  std::map<int, int> group_of_rank;
  for (const SendAction& send : Actions<SendAction>()) {
    if (!send.message.has_desired() || send.message.desired().attempts().empty()) continue;
    for (const v1::RankAssignment& rank : send.message.desired().attempts(0).ranks()) {
      group_of_rank[rank.rank()] = rank.group_rank();
      EXPECT_EQ(rank.group_world_size(), 3);
      EXPECT_EQ(rank.local_ranks(), 2);
      EXPECT_EQ(rank.attempt(), 1);
      EXPECT_EQ(rank.local_devices_size(), 0) << "CPU slots need no list";
    }
  }
  ASSERT_EQ(group_of_rank.size(), 6u);
  int next = 0;
  std::map<std::string, int> group_of_worker;
  const v1::Job job = Job();
  for (const v1::RankStatus& rank : job.ranks()) {
    const auto [group, first] = group_of_worker.emplace(rank.worker(), next);
    if (first) ++next;
    EXPECT_EQ(group_of_rank[rank.rank()], group->second) << rank.rank();
  }
}

}  // namespace
}  // namespace muster::coordinator
