#include "coordinator/core/core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/core/attempt_machine.h"
#include "coordinator/core/causes.h"
#include "coordinator/core/job_machine.h"
#include "coordinator/core/schema.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(JobMachine, FullProduct_EachPairHasAtMostOneRowAndFinalStatesHaveNone) {
  std::map<std::pair<int, int>, int> rows;
  for (const JobTransition& row : kJobTransitions) ++rows[{row.from, static_cast<int>(row.event)}];
  size_t legal = 0;
  for (size_t state = 0; state < kJobStateCount; ++state) {
    for (size_t event = 0; event < kJobEventCount; ++event) {
      const auto from = static_cast<v1::JobState>(state);
      const v1::JobState to = Next(from, static_cast<JobEvent>(event));
      const auto row = rows.find({static_cast<int>(state), static_cast<int>(event)});
      EXPECT_EQ(to != v1::JOB_STATE_UNSPECIFIED, row != rows.end());
      if (row != rows.end()) {
        EXPECT_EQ(row->second, 1) << state << " " << event;
        EXPECT_NE(to, from);
        EXPECT_FALSE(IsFinal(from)) << state;
        ++legal;
      }
    }
  }
  EXPECT_EQ(legal, kJobTransitions.size());
}

TEST(AttemptMachine, FullProduct_OnlyMovesForwardAndStopsFromEveryLiveState) {
  size_t legal = 0;
  for (size_t state = 0; state < kAttemptStateCount; ++state) {
    const auto from = static_cast<v1::AttemptState>(state);
    for (size_t event = 0; event < kAttemptEventCount; ++event) {
      const v1::AttemptState to = Next(from, static_cast<AttemptEvent>(event));
      if (to == v1::ATTEMPT_STATE_UNSPECIFIED) continue;
      EXPECT_GT(to, from);
      ++legal;
    }
    EXPECT_EQ(Next(from, AttemptEvent::kStop) == v1::ATTEMPT_STATE_STOPPING,
              IsUp(from) || from == v1::ATTEMPT_STATE_QUIESCING);
  }
  EXPECT_EQ(legal, kAttemptTransitions.size());
}

TEST(Causes, Backoff_DoublesUpToItsLimit) {
  v1::BackoffSpec spec;
  spec.mutable_initial()->set_nanos(500'000'000);
  spec.mutable_max()->set_seconds(30);
  EXPECT_EQ(BackoffBefore(spec, v1::CAUSE_CRASH, 1), absl::Milliseconds(500));
  EXPECT_EQ(BackoffBefore(spec, v1::CAUSE_CRASH, 3), absl::Seconds(2));
  EXPECT_EQ(BackoffBefore(spec, v1::CAUSE_CRASH, 900), absl::Seconds(30));
  EXPECT_EQ(BackoffBefore(spec, v1::CAUSE_PREEMPTED, 3), absl::ZeroDuration());
}

TEST(Schema, Keys_SortAsTheirNumbersAndDecode) {
  EXPECT_LT(schema::EventKey(255), schema::EventKey(256));
  ASSERT_OK_AND_ASSIGN(
      const schema::KeyValueKey key,
      schema::DecodeKeyValueKey(schema::Encode({JobId("a-bcdfg"), Epoch(7), "k"})));
  EXPECT_EQ(key.job, JobId("a-bcdfg"));
  EXPECT_EQ(key.epoch, Epoch(7));
  EXPECT_EQ(key.key, "k");
  EXPECT_THAT(schema::DecodeKeyValueKey("short"), StatusIs(absl::StatusCode::kDataLoss));
}

// A core, its store, and one worker "w" with two slots that reports what the test says.
class CoreTest : public ::testing::Test {
 protected:
  CoreTest() { Restart(); }

  void Restart() {
    CoreOutput output;
    auto core = Core::Recover(config_, *store_, Rng(7), now_, &output);
    ASSERT_OK(core.status());
    core_ = std::move(*core);
    Take(std::move(output));
  }

  void Take(CoreOutput output) {
    ASSERT_OK(store_->Write({output.batch}));
    EXPECT_THAT(core_->CheckInvariants(), IsEmpty());
    actions_ = std::move(output.actions);
  }
  void Handle(const CoreEvent& event) { Take(core_->Handle(event, now_)); }
  void Wait(absl::Duration time) {
    now_ += time;
    Handle(TimerFired{});
  }

  template <typename Action>
  std::vector<Action> Actions() const {
    std::vector<Action> out;
    for (const CoreAction& action : actions_) {
      if (const auto* match = std::get_if<Action>(&action)) out.push_back(*match);
    }
    return out;
  }
  std::optional<v1::Desired> LastDesired() const {
    std::optional<v1::Desired> out;
    for (const SendAction& send : Actions<SendAction>()) {
      if (send.message.has_desired()) out = send.message.desired();
    }
    return out;
  }

  static v1::JobSpec Spec(int ranks = 2) {
    v1::JobSpec spec;
    spec.set_name("job");
    spec.set_queue("default");
    spec.set_priority(50);
    spec.mutable_engine()->mutable_training()->set_steps(100);
    spec.mutable_resources()->set_device(v1::DEVICE_KIND_CPU);
    spec.mutable_resources()->set_ranks(ranks);
    spec.mutable_checkpoint()->set_every_steps(10);
    spec.mutable_restart()->set_max_failures(1);
    spec.mutable_restart()->mutable_backoff()->mutable_initial()->set_seconds(1);
    spec.mutable_restart()->mutable_backoff()->mutable_max()->set_seconds(60);
    return spec;
  }
  v1::Job Submit(const std::string& request = "r", int ranks = 2) {
    Handle(SubmitEvent{CallId(1), Spec(ranks), request});
    const auto replies = Actions<ReplyAction>();
    EXPECT_EQ(replies.size(), 1u);
    EXPECT_OK(replies[0].status);
    return replies[0].job;
  }
  void Hello(uint64_t incarnation = 1, const v1::Observed& observed = {}) {
    SessionOpened hello;
    hello.session = session_ = SessionId(session_.value() + 1);
    hello.incarnation = Incarnation(incarnation);
    incarnation_ = incarnation;
    hello.hello.set_worker("w");
    for (const char* name : {"cpu:0", "cpu:1"}) {
      v1::Device& device = *hello.hello.add_devices();
      device.set_name(name);
      device.set_kind(v1::DEVICE_KIND_CPU);
    }
    *hello.hello.mutable_observed() = observed;
    Handle(hello);
    if (const auto desired = LastDesired()) revision_ = desired->revision();
  }
  void Send(v1::FromWorker message) {
    message.set_incarnation(incarnation_);
    Handle(SessionMessage{session_, message});
    if (const auto desired = LastDesired()) revision_ = desired->revision();
  }
  static v1::Observed Ranks(const v1::Job& job, v1::RankState state,
                            const std::map<int, v1::Cause>& exits = {}) {
    v1::Observed observed;
    v1::ObservedAttempt& attempt = *observed.add_attempts();
    attempt.set_job_id(job.id());
    attempt.set_epoch(job.epoch());
    for (int i = 0; i < job.spec().resources().ranks(); ++i) {
      v1::ObservedRank& rank = *attempt.add_ranks();
      rank.set_rank(i);
      rank.set_state(state);
      if (const auto exit = exits.find(i); exit != exits.end()) {
        if (state < v1::RANK_STATE_EXITED) rank.set_state(v1::RANK_STATE_EXITED);
        rank.mutable_exit()->set_cause(exit->second);
      }
    }
    return observed;
  }
  void Observe(v1::Observed observed) {
    observed.set_applied_revision(revision_);
    v1::FromWorker message;
    *message.mutable_observed() = std::move(observed);
    Send(std::move(message));
  }
  v1::Job Job() const { return core_->GetJob("job").value(); }
  v1::Job Train(int ranks = 2) {
    Hello();
    Submit("r", ranks);
    Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
    Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
    EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
    return Job();
  }
  int Commit(const v1::Job& job, int64_t step) {
    v1::FromWorker message;
    message.mutable_commit()->set_job_id(job.id());
    message.mutable_commit()->set_epoch(job.epoch());
    message.mutable_commit()->mutable_checkpoint()->set_step(step);
    Send(std::move(message));
    for (const SendAction& send : Actions<SendAction>()) {
      if (send.message.has_verdict()) return send.message.verdict().status_code();
    }
    return -1;
  }

  CoreConfig config_;
  std::unique_ptr<MemoryStore> store_ = MemoryStore::Make("test");
  std::unique_ptr<Core> core_;
  absl::Time now_ = absl::FromUnixSeconds(1000);
  std::vector<CoreAction> actions_;
  SessionId session_;
  uint64_t incarnation_ = 1;
  uint64_t revision_ = 0;
};

TEST_F(CoreTest, Submit_SameRequestAgain_ReturnsTheFirstJobAlsoAfterARestart) {
  const v1::Job first = Submit("r");
  Restart();
  Handle(SubmitEvent{CallId(2), Spec(), "r"});
  ASSERT_EQ(Actions<ReplyAction>().size(), 1u);
  EXPECT_TRUE(Actions<ReplyAction>()[0].existed);
  EXPECT_EQ(Actions<ReplyAction>()[0].job.id(), first.id());
}

TEST_F(CoreTest, Submit_NameOfALiveJob_IsRefused) {
  Submit("r");
  Handle(SubmitEvent{CallId(2), Spec(), "other"});
  EXPECT_THAT(Actions<ReplyAction>()[0].status, StatusIs(absl::StatusCode::kAlreadyExists));
}

// The work that an event costs is counted in rows written and rows shown.
TEST_F(CoreTest, Submit_ToAFullCluster_TouchesNoOtherJob) {
  Train();
  int touched = 0;
  for (int i = 0; i < 1000; ++i) {
    v1::JobSpec spec = Spec();
    spec.set_name(absl::StrCat("waiting-", i));
    const CoreOutput output =
        core_->Handle(SubmitEvent{CallId(1), spec, absl::StrCat("w", i)}, now_);
    for (const Batch::Change& change : output.batch.changes) {
      touched += change.table == Table::kJobs ? 1 : 0;
    }
    for (const CoreAction& action : output.actions) {
      if (const auto* reply = std::get_if<ReplyAction>(&action)) {
        ASSERT_OK(reply->status);
        EXPECT_FALSE(reply->job.waiting().empty());
      }
      touched += std::holds_alternative<JobChanged>(action) ? 1 : 0;
    }
  }
  EXPECT_EQ(touched, 2 * 1000);
  EXPECT_THAT(core_->CheckInvariants(), IsEmpty());
  EXPECT_THAT(core_->GetJob("waiting-0")->waiting(), HasSubstr("2 cpu slots, 0 are free of 2"));
  EXPECT_THAT(core_->GetJob("waiting-1")->waiting(), HasSubstr("waits behind job waiting-0"));
  EXPECT_THAT(core_->GetJob("waiting-999")->waiting(), HasSubstr("more than 32 jobs go before it"));
}

TEST_F(CoreTest, HeadOfALongQueue_Starts_ShowsOnlyTheJobsNearTheFront) {
  const v1::Job job = Train();
  for (int i = 0; i < 1000; ++i) {
    v1::JobSpec spec = Spec();
    spec.set_name(absl::StrCat("waiting-", i));
    Take(core_->Handle(SubmitEvent{CallId(1), spec, ""}, now_));
  }
  const std::map<int, v1::Cause> done = {{0, v1::CAUSE_COMPLETED}, {1, v1::CAUSE_COMPLETED}};
  Observe(Ranks(job, v1::RANK_STATE_RELEASED, done));
  EXPECT_EQ(core_->GetJob("waiting-0")->state(), v1::JOB_STATE_PLACING);
  EXPECT_THAT(core_->GetJob("waiting-1")->waiting(), HasSubstr("needs 2 cpu slots"));
  EXPECT_LE(Actions<JobChanged>().size(), 40u);
  // One far back leaves: nobody else notices.
  Handle(CancelEvent{CallId(2), "waiting-500"});
  EXPECT_EQ(Actions<JobChanged>().size(), 1u);
  // One of higher priority comes: the last that was near the front is not any more.
  v1::JobSpec urgent = Spec();
  urgent.set_name("urgent");
  urgent.set_priority(99);
  Handle(SubmitEvent{CallId(3), urgent, ""});
  EXPECT_THAT(core_->GetJob("urgent")->waiting(), HasSubstr("needs 2 cpu slots"));
  EXPECT_THAT(core_->GetJob("waiting-32")->waiting(), HasSubstr("waits behind job urgent"));
  EXPECT_THAT(core_->GetJob("waiting-33")->waiting(), HasSubstr("more than 32 jobs"));
  Restart();
  EXPECT_THAT(core_->GetJob("waiting-32")->waiting(), HasSubstr("waits behind job urgent"));
  EXPECT_THAT(core_->GetJob("waiting-999")->waiting(), HasSubstr("more than 32 jobs"));
}

TEST_F(CoreTest, GetJob_MistypedName_NamesTheNearest) {
  Submit();
  EXPECT_THAT(core_->GetJob("jbo"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("did you mean 'job'")));
}

TEST_F(CoreTest, Launch_IsTwoPhase) {
  Hello();
  Submit();
  ASSERT_TRUE(LastDesired().has_value());
  EXPECT_EQ(LastDesired()->attempts(0).phase(), v1::DESIRED_PHASE_PREPARED);
  EXPECT_EQ(LastDesired()->attempts(0).ranks_size(), 2);
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  ASSERT_TRUE(LastDesired().has_value());
  EXPECT_EQ(LastDesired()->attempts(0).phase(), v1::DESIRED_PHASE_RUNNING);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_STARTING);
}

TEST_F(CoreTest, RanksOfAGangOnTwoWorkers_AreToldHowManyShareTheirWorker) {
  Hello();
  SessionOpened hello;
  hello.session = SessionId(session_.value() + 1);
  hello.incarnation = Incarnation(1);
  hello.hello.set_worker("v");
  v1::Device& device = *hello.hello.add_devices();
  device.set_name("cpu:0");
  device.set_kind(v1::DEVICE_KIND_CPU);
  Handle(hello);
  Submit("r", 3);
  std::map<int, std::pair<int, int>> told;  // local rank and local ranks, by rank
  for (const SendAction& send : Actions<SendAction>()) {
    for (const v1::DesiredAttempt& attempt : send.message.desired().attempts()) {
      for (const v1::RankAssignment& rank : attempt.ranks()) {
        EXPECT_EQ(rank.world_size(), 3);
        EXPECT_EQ(rank.local_ranks(), attempt.ranks_size());
        told[rank.rank()] = {rank.local_rank(), rank.local_ranks()};
      }
    }
  }
  ASSERT_EQ(told.size(), 3u);
  std::vector<std::pair<int, int>> local;
  for (const auto& [rank, of] : told) local.push_back(of);
  std::sort(local.begin(), local.end());
  EXPECT_EQ(local, (std::vector<std::pair<int, int>>{{0, 1}, {0, 2}, {1, 2}}));
}

TEST_F(CoreTest, GangAcrossHosts_GetsAddressesThatOthersReach) {
  const auto join = [this](const char* worker, const char* boot_id, const char* address,
                           const char* outside) {
    SessionOpened hello;
    hello.session = session_ = SessionId(session_.value() + 1);
    hello.incarnation = Incarnation(1);
    hello.hello.set_worker(worker);
    hello.hello.set_host(absl::StrCat("host-", worker));
    hello.hello.set_boot_id(boot_id);
    hello.hello.set_address(address);
    hello.hello.set_outside_address(outside);
    v1::Device& device = *hello.hello.add_devices();
    device.set_name("cpu:0");
    device.set_kind(v1::DEVICE_KIND_CPU);
    Handle(hello);
  };
  join("a", "x", "127.0.0.1", "10.0.0.1");  // on the coordinator's host
  Submit("one", 1);
  EXPECT_EQ(Job().ranks(0).address(), "127.0.0.1") << "nobody else has to reach it";
  Handle(CancelEvent{CallId(2), Job().id()});
  Observe(Ranks(Job(), v1::RANK_STATE_RELEASED));
  join("b", "y", "10.0.0.2", "");
  join("c", "x", "127.0.0.1", "10.0.0.1");  // another daemon of a's host
  Submit("three", 3);
  const v1::Job job = Job();
  ASSERT_EQ(job.ranks_size(), 3);
  std::map<std::string, std::string> address;
  for (const v1::RankStatus& rank : job.ranks()) {
    address[rank.worker()] = rank.address();
    EXPECT_EQ(rank.host(), absl::StrCat("host-", rank.worker()));
  }
  EXPECT_EQ(address, (std::map<std::string, std::string>{
                         {"a", "10.0.0.1"}, {"b", "10.0.0.2"}, {"c", "10.0.0.1"}}));
  const std::optional<v1::Desired> desired = LastDesired();
  ASSERT_TRUE(desired.has_value());
  for (const v1::RankAssignment& rank : desired->attempts(0).ranks()) {
    EXPECT_EQ(rank.address(), job.ranks(rank.rank()).address());
  }
}

TEST_F(CoreTest, HelloWithAnAddressThatNobodyCanDial_IsRefused) {
  for (const char* address : {"worker-1", "0.0.0.0", "::", "10.0.0.1:20000"}) {
    SessionOpened hello;
    hello.session = SessionId(9);
    hello.incarnation = Incarnation(1);
    hello.hello.set_worker("w");
    hello.hello.set_address(address);
    Handle(hello);
    ASSERT_EQ(Actions<CloseAction>().size(), 1u) << address;
    EXPECT_THAT(Actions<CloseAction>()[0].status,
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no numeric IP address")));
  }
}

// Two workers that cannot talk cost nothing once; twice in a row they use up the budget.
TEST_F(CoreTest, NetworkBetweenTwoWorkers_CountsWhenItFailsTwiceInARow) {
  v1::Job job = Train();
  for (int i = 0; i < 3; ++i) {
    v1::Observed observed = Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_NETWORK}});
    observed.mutable_attempts(0)->mutable_ranks(0)->mutable_exit()->set_peer(1);
    Observe(std::move(observed));
    Observe(Ranks(job, v1::RANK_STATE_RELEASED));
    ASSERT_EQ(Job().causes_size(), i + 1);
    const v1::AttemptEnd end = Job().causes(i);
    EXPECT_EQ(end.cause(), v1::CAUSE_NETWORK);
    EXPECT_EQ(end.rank(), 0);
    ASSERT_EQ(end.between_size(), 1) << "both ranks are on one worker";
    EXPECT_EQ(end.between(0), "w");
    EXPECT_THAT(end.message(), HasSubstr("between w (host"));
    EXPECT_EQ(end.counted(), i > 0) << i;
    if (i == 2) break;
    Wait(absl::Seconds(2));
    job = Job();
    Observe(Ranks(job, v1::RANK_STATE_PREPARED));
    Observe(Ranks(job, v1::RANK_STATE_TRAINING));
  }
  EXPECT_EQ(Job().state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(Job().message(), HasSubstr("failed 2 time(s)"));
}

TEST_F(CoreTest, PreflightThatFails_IsALaunchProblemBetweenTwoWorkers) {
  Hello();
  Submit();
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  v1::Observed observed = Ranks(Job(), v1::RANK_STATE_RUNNING, {{1, v1::CAUSE_LAUNCH}});
  observed.mutable_attempts(0)->mutable_ranks(1)->mutable_exit()->set_peer(0);
  Observe(std::move(observed));
  Observe(Ranks(Job(), v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_LAUNCH);
  EXPECT_EQ(Job().causes(0).between_size(), 1);
  EXPECT_FALSE(Job().causes(0).counted());
}

// What a rank says of its peer must not make the coordinator look outside the job.
TEST_F(CoreTest, PeerThatDoesNotExist_IsLeftOut) {
  const v1::Job job = Train();
  v1::Observed observed = Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_NETWORK}});
  observed.mutable_attempts(0)->mutable_ranks(0)->mutable_exit()->set_peer(1000);
  Observe(std::move(observed));
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().causes(0).between_size(), 0);
}

TEST_F(CoreTest, NetworkFailureBeforeItsWorkerIsGivenUp_BecomesALostWorker) {
  const v1::Job job = Train();
  v1::Observed observed = Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_NETWORK}});
  observed.mutable_attempts(0)->mutable_ranks(0)->mutable_exit()->set_peer(1);
  Observe(std::move(observed));
  Wait(config_.lost_after);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_WORKER_LOST);
  EXPECT_EQ(Job().causes(0).between_size(), 0);
  EXPECT_THAT(Job().causes(0).message(), HasSubstr("before: between w"));
}

TEST_F(CoreTest, Placement_IsMeasuredFromAllocationUntilEveryDaemonHasAccepted) {
  Submit();
  now_ += absl::Seconds(3);  // in the queue: not part of it
  Hello();
  now_ += absl::Milliseconds(250);
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  ASSERT_EQ(Actions<Measured>().size(), 1u);
  EXPECT_EQ(Actions<Measured>()[0].what, Measured::What::kPlacement);
  EXPECT_DOUBLE_EQ(Actions<Measured>()[0].seconds, 0.25);
}

TEST_F(CoreTest, AllRanksCompleted_SucceedsOnceReleaseIsProven) {
  const v1::Job job = Train();
  const std::map<int, v1::Cause> done = {{0, v1::CAUSE_COMPLETED}, {1, v1::CAUSE_COMPLETED}};
  Observe(Ranks(job, v1::RANK_STATE_EXITED, done));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(core_->ListWorkers()[0].slots_free(), 0);
  Observe(Ranks(job, v1::RANK_STATE_RELEASED, done));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(core_->ListWorkers()[0].slots_free(), 2);
}

TEST_F(CoreTest, CommunicationFirst_TheCrashWithinTheGraceIsTheCause) {
  const v1::Job job = Train();
  Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_COMMUNICATION}}));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  now_ += absl::Milliseconds(500);
  Observe(
      Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_COMMUNICATION}, {1, v1::CAUSE_CRASH}}));
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_CRASH);
  EXPECT_EQ(Job().causes(0).rank(), 1);
  EXPECT_TRUE(Job().causes(0).counted());
}

TEST_F(CoreTest, OutOfMemory_BeforeTrainingIsNotTriedAgain_AfterwardsItIs) {
  EXPECT_EQ(BudgetOf(v1::CAUSE_OUT_OF_MEMORY, /*trained=*/false), Budget::kNotRetried);
  EXPECT_EQ(BudgetOf(v1::CAUSE_OUT_OF_MEMORY, /*trained=*/true), Budget::kCounted);
}

TEST_F(CoreTest, CommunicationAlone_IsTheCauseAfterTheGrace) {
  const v1::Job job = Train();
  Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_COMMUNICATION}}));
  Wait(absl::Seconds(1));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
}

TEST_F(CoreTest, CrashAfterACommit_IsRefundedAndRestartsFromIt) {
  const v1::Job job = Train();
  EXPECT_EQ(Commit(job, 10), 0);
  Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_CRASH}}));
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().failures(), 0);
  // Nobody has reported a step, but it got that far.
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).step(), 10);
  Wait(absl::Seconds(1));
  EXPECT_EQ(Job().epoch(), 2u);
  ASSERT_TRUE(LastDesired().has_value());
  ASSERT_EQ(LastDesired()->attempts(0).ranks(0).restore_size(), 1);
  EXPECT_EQ(LastDesired()->attempts(0).ranks(0).restore(0).step(), 10);
}

TEST_F(CoreTest, Commit_OfAnEndedEpoch_IsRefusedButARepeatIsNot) {
  const v1::Job job = Train();
  EXPECT_EQ(Commit(job, 10), 0);
  Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_CRASH}}));
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Commit(job, 10), 0);
  EXPECT_EQ(Commit(job, 20), static_cast<int>(absl::StatusCode::kAborted));
  EXPECT_EQ(Job().last_committed_step(), 10);
}

TEST_F(CoreTest, BudgetUsedUp_FailsTheJobWithTheNumbers) {
  v1::Job job = Train();
  for (int i = 0; i < 2; ++i) {
    Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_CRASH}}));
    Observe(Ranks(job, v1::RANK_STATE_RELEASED));
    if (i == 1) break;
    Wait(absl::Seconds(1));
    job = Job();
    Observe(Ranks(job, v1::RANK_STATE_PREPARED));
    Observe(Ranks(job, v1::RANK_STATE_TRAINING));
  }
  EXPECT_EQ(Job().state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(Job().message(), HasSubstr("restart.max_failures is 1"));
}

TEST_F(CoreTest, DataError_IsNotRetried) {
  const v1::Job job = Train();
  Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_DATA}}));
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_FAILED);
}

TEST_F(CoreTest, Cancel_WhileTraining_WaitsForTheProofOfRelease) {
  const v1::Job job = Train();
  Handle(CancelEvent{CallId(3), "job"});
  EXPECT_EQ(Job().state(), v1::JOB_STATE_STOPPING);
  ASSERT_TRUE(LastDesired().has_value());
  EXPECT_EQ(LastDesired()->attempts(0).phase(), v1::DESIRED_PHASE_STOPPED);
  revision_ = LastDesired()->revision();
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_CANCELLED);
  Handle(CancelEvent{CallId(4), "job"});
  EXPECT_OK(Actions<ReplyAction>()[0].status);
}

TEST_F(CoreTest, CoordinatorRestart_WorkersReturn_NothingIsRestarted) {
  const v1::Job job = Train();
  Restart();
  Wait(absl::Seconds(5));
  Hello(1, Ranks(job, v1::RANK_STATE_TRAINING));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Job().epoch(), 1u);
  ASSERT_TRUE(LastDesired().has_value());
  EXPECT_EQ(LastDesired()->attempts(0).phase(), v1::DESIRED_PHASE_RUNNING);
}

TEST_F(CoreTest, LostWorker_ReturnsWithStaleRanks_GetsNothingUntilTheyAreGone) {
  const v1::Job job = Train();
  Wait(config_.unreachable_after);
  EXPECT_EQ(core_->ListWorkers()[0].state(), v1::WORKER_STATE_UNREACHABLE);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  Wait(config_.lost_after);
  EXPECT_EQ(core_->ListWorkers()[0].state(), v1::WORKER_STATE_LOST);
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_WORKER_LOST);
  EXPECT_FALSE(Job().causes(0).counted());
  Wait(absl::Seconds(1));
  Hello(1, Ranks(job, v1::RANK_STATE_TRAINING));
  EXPECT_EQ(Job().epoch(), 1u);
  ASSERT_TRUE(LastDesired().has_value());
  EXPECT_EQ(LastDesired()->attempts_size(), 0);
  Observe({});
  EXPECT_EQ(Job().epoch(), 2u);
}

TEST_F(CoreTest, Hello_OfAnOlderIncarnation_IsFenced) {
  Hello(5);
  Hello(4);
  ASSERT_EQ(Actions<CloseAction>().size(), 1u);
  EXPECT_THAT(Actions<CloseAction>()[0].status, StatusIs(absl::StatusCode::kAborted));
}

TEST_F(CoreTest, NoProgress_EndsTheAttemptAsAHang) {
  const v1::Job job = Train();
  for (absl::Duration t; t < config_.progress_timeout; t += absl::Seconds(2)) {
    now_ += absl::Seconds(2);
    Observe(Ranks(job, v1::RANK_STATE_TRAINING));
  }
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_HANG);
}

// A start may take long as long as it says something new. One that does not is ended, with what it
// was at.
TEST_F(CoreTest, StartThatGetsStuck_EndsWithItsPhase) {
  Hello();
  Submit("r", 2);
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  const v1::Job job = Job();
  const auto stay = [&](const char* phase, double share) {
    for (absl::Duration t; t < config_.progress_timeout * share; t += absl::Seconds(2)) {
      now_ += absl::Seconds(2);
      v1::Observed observed = Ranks(job, v1::RANK_STATE_RUNNING);
      for (v1::ObservedRank& rank : *observed.mutable_attempts(0)->mutable_ranks()) {
        rank.mutable_progress()->set_phase(phase);
      }
      Observe(std::move(observed));
    }
  };
  for (const char* phase : {"starting", "bootstrapping", "allocating"}) {
    stay(phase, 0.9);
    EXPECT_EQ(Job().state(), v1::JOB_STATE_STARTING) << phase;
    EXPECT_EQ(Job().phase(), phase);
  }
  stay("allocating", 0.2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_HANG);
  EXPECT_THAT(Job().causes(0).message(), HasSubstr("training had not begun"));
  EXPECT_THAT(Job().causes(0).message(), HasSubstr("(allocating)"));
}

TEST_F(CoreTest, Key_WaitsForItsPutAndEndsWithItsEpoch) {
  const v1::Job job = Train();
  const auto get = [&](uint64_t request, const std::string& key) {
    v1::FromWorker message;
    message.mutable_get()->set_request(request);
    message.mutable_get()->set_job_id(job.id());
    message.mutable_get()->set_epoch(1);
    message.mutable_get()->set_key(key);
    Send(std::move(message));
  };
  get(1, "id");
  EXPECT_THAT(Actions<SendAction>(), IsEmpty());
  v1::FromWorker put;
  put.mutable_put()->set_request(2);
  put.mutable_put()->set_job_id(job.id());
  put.mutable_put()->set_epoch(1);
  put.mutable_put()->set_key("id");
  put.mutable_put()->set_value("v");
  Send(put);
  ASSERT_EQ(Actions<SendAction>().size(), 2u);
  EXPECT_EQ(Actions<SendAction>()[1].message.value().value(), "v");
  get(3, "other");
  Handle(CancelEvent{CallId(3), "job"});
  ASSERT_FALSE(Actions<SendAction>().empty());
  EXPECT_EQ(Actions<SendAction>()[0].message.value().status_code(),
            static_cast<int>(absl::StatusCode::kAborted));
}

TEST_F(CoreTest, Heartbeats_WithoutNews_WriteNothing) {
  const v1::Job job = Train();
  now_ += absl::Milliseconds(500);
  const CoreOutput output = core_->Handle(
      SessionMessage{session_,
                     [&] {
                       v1::FromWorker message;
                       message.set_incarnation(incarnation_);
                       *message.mutable_observed() = Ranks(job, v1::RANK_STATE_TRAINING);
                       message.mutable_observed()->set_applied_revision(revision_);
                       return message;
                     }()},
      now_);
  EXPECT_TRUE(output.batch.empty());
}

}  // namespace
}  // namespace muster::coordinator
