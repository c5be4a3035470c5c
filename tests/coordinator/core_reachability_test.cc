// When the coordinator takes a worker for lost: silence alone is no proof of death.
#include <map>
#include <set>
#include <string>
#include <utility>

#include "coordinator/core/schema.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Workers "w1" to "w5" with one slot each. A job of `ranks` ranks trains on the first ones.
class FleetTest : public CoreTest {
 protected:
  void Start(int ranks, int workers = 5) {
    for (int i = 1; i <= workers; ++i) Open(i, {});
    Submit("r", ranks);
    for (const v1::RankState state : {v1::RANK_STATE_PREPARED, v1::RANK_STATE_TRAINING}) {
      for (int i = 1; i <= ranks; ++i) Report(i, state, 0);
    }
    ASSERT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  }
  static std::string Name(int worker) { return absl::StrCat("w", worker); }
  virtual std::map<std::string, std::string> LabelsOf(int) const { return {}; }
  void Open(int worker, const v1::Observed& observed) {
    SessionOpened hello = HelloOf(Name(worker), 1);
    *hello.hello.mutable_observed() = observed;
    for (const auto& [label, value] : LabelsOf(worker)) {
      (*hello.hello.mutable_labels())[label] = value;
    }
    sessions_[worker] = hello.session;
    Handle(hello);
  }
  // What a worker holds: its rank of the job, if it has one, in this state and at this step.
  v1::Observed Held(int worker, v1::RankState state, int64_t step) const {
    v1::Observed observed;
    const v1::Job job = Job();
    for (const v1::RankStatus& of_job : job.ranks()) {
      if (of_job.worker() != Name(worker)) continue;
      v1::ObservedAttempt& attempt = *observed.add_attempts();
      attempt.set_job_id(job.id());
      attempt.set_epoch(job.epoch());
      v1::ObservedRank& rank = *attempt.add_ranks();
      rank.set_rank(of_job.rank());
      rank.set_state(state);
      if (step > 0) rank.mutable_progress()->set_step(step);
    }
    return observed;
  }
  void Report(int worker, v1::RankState state, int64_t step) {
    v1::FromWorker message;
    message.set_incarnation(1);
    *message.mutable_observed() = Held(worker, state, step);
    Handle(SessionMessage{sessions_[worker], message});
  }
  // Every second the workers of `heard` send a heartbeat; with `trains`, each with a step more.
  void Live(absl::Duration time, const std::set<int>& heard, bool trains = true) {
    for (const absl::Time until = now_ + time; now_ < until;) {
      now_ += absl::Seconds(1);
      if (trains) ++step_;
      Handle(TimerFired{});
      for (const int worker : heard) Report(worker, state_, step_);
    }
  }
  v1::WorkerState StateOf(int worker) const {
    for (const v1::Worker& row : core_->ListWorkers()) {
      if (row.name() == Name(worker)) return row.state();
    }
    return v1::WORKER_STATE_UNSPECIFIED;
  }

  std::map<int, SessionId> sessions_;
  v1::RankState state_ = v1::RANK_STATE_TRAINING;  // of the ranks of workers that are heard
  int64_t step_ = 0;
};

TEST_F(FleetTest, CoordinatorStoppedForLong_LosesNothingWhateverRunsFirst) {
  Start(2);
  for (const absl::Duration pause : {absl::Seconds(45), absl::Minutes(5), absl::Seconds(45)}) {
    Pause(pause);
    EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
    for (int i = 1; i <= 5; ++i) EXPECT_EQ(StateOf(i), v1::WORKER_STATE_READY) << i;
    Live(absl::Seconds(5), {1, 2, 3, 4, 5});
  }
  EXPECT_EQ(Job().epoch(), 1u);
}

TEST_F(FleetTest, PauseAfterASilence_LeavesTheFullTimeToComeBack) {
  Start(2);
  Live(config_.lost_after - absl::Seconds(1), {2, 3, 4, 5}, /*trains=*/false);
  EXPECT_EQ(StateOf(1), v1::WORKER_STATE_UNREACHABLE);
  Pause(absl::Minutes(1));
  Live(config_.lost_after - absl::Seconds(2), {2, 3, 4, 5}, /*trains=*/false);
  EXPECT_EQ(StateOf(1), v1::WORKER_STATE_UNREACHABLE);
  Live(absl::Seconds(4), {2, 3, 4, 5}, /*trains=*/false);
  EXPECT_EQ(StateOf(1), v1::WORKER_STATE_LOST);
}

TEST_F(FleetTest, PauseDoesNotEndAGangAsHung) {
  Start(2);
  Pause(config_.progress_timeout + absl::Minutes(1));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
}

TEST_F(FleetTest, OneWorkerWithItsWholeGang_IsLostAfterTheLimit) {
  Start(1);
  Live(config_.lost_after, {2, 3, 4, 5});
  EXPECT_EQ(StateOf(1), v1::WORKER_STATE_LOST);
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_WORKER_LOST);
}

TEST_F(FleetTest, MostWorkersSilentAtOnce_AreHeldUntilTheBound) {
  Start(3);
  Live(absl::Minutes(10), {4, 5});
  for (const int i : {1, 2, 3}) EXPECT_EQ(StateOf(i), v1::WORKER_STATE_UNREACHABLE) << i;
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  // They return one by one, while most are heard again.
  Open(1, Held(1, v1::RANK_STATE_TRAINING, step_));
  Live(config_.lost_after - absl::Seconds(2), {1, 4, 5}, /*trains=*/false);
  EXPECT_EQ(StateOf(2), v1::WORKER_STATE_UNREACHABLE);
  Open(2, Held(2, v1::RANK_STATE_TRAINING, step_));
  EXPECT_EQ(Job().epoch(), 1u);
  Live(config_.lost_after, {1, 2, 4, 5}, /*trains=*/false);
  EXPECT_EQ(StateOf(3), v1::WORKER_STATE_LOST);
}

TEST_F(FleetTest, AllWorkersSilentBeyondTheBound_AreLost) {
  Start(2);
  Wait(config_.partition_hold - absl::Seconds(1));
  for (int i = 1; i <= 5; ++i) EXPECT_EQ(StateOf(i), v1::WORKER_STATE_UNREACHABLE) << i;
  Wait(absl::Seconds(3));
  for (int i = 1; i <= 5; ++i) EXPECT_EQ(StateOf(i), v1::WORKER_STATE_LOST) << i;
}

TEST_F(FleetTest, SilentWorkerWhoseGangTrainsOn_IsHeldAsLongAsItDoes) {
  Start(2);
  Live(absl::Minutes(20), {2, 3, 4, 5});
  EXPECT_EQ(StateOf(1), v1::WORKER_STATE_UNREACHABLE);
  EXPECT_EQ(Job().epoch(), 1u);
  Live(config_.lost_after + absl::Seconds(1), {2, 3, 4, 5}, /*trains=*/false);
  EXPECT_EQ(StateOf(1), v1::WORKER_STATE_LOST);
}

// Nine workers: "w1" to "w4" are in rack a, the others in rack b.
class RackTest : public FleetTest {
 protected:
  std::map<std::string, std::string> LabelsOf(int worker) const override {
    return {{"rack", worker <= 4 ? "a" : "b"}};
  }
  void ExpectStates(const std::set<int>& workers, v1::WorkerState state) const {
    for (const int i : workers) EXPECT_EQ(StateOf(i), state) << i;
  }
  std::string LastMessage(v1::EventKind kind) const {
    std::string message;
    EXPECT_OK(
        store_->Scan(Table::kEvents, "", "", [&](const std::string& key, const std::string& value) {
          v1::Event event;
          EXPECT_OK(schema::Parse(Table::kEvents, key, value, event));
          if (event.kind() == kind) message = event.message();
          return true;
        }));
    return message;
  }
};

TEST_F(RackTest, MostWorkersOfARackSilentAtOnce_AreHeldUntilTheBound) {
  Start(2, 9);
  Live(absl::Minutes(10), {4, 5, 6, 7, 8, 9});
  ExpectStates({1, 2, 3}, v1::WORKER_STATE_UNREACHABLE);
  EXPECT_THAT(LastMessage(v1::EVENT_KIND_WORKER_UNREACHABLE),
              HasSubstr("3 of 4 workers of rack a fell silent together"));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  Live(config_.partition_hold - absl::Minutes(10) + absl::Seconds(3), {4, 5, 6, 7, 8, 9});
  ExpectStates({1, 2, 3}, v1::WORKER_STATE_LOST);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_WORKER_LOST);
}

TEST_F(RackTest, WorkersOfARackThatReturnOneByOne_HaveTheFullTimeEach) {
  Start(4, 9);
  // The network returns before any of them would be given up.
  Live(config_.lost_after - absl::Seconds(5), {5, 6, 7, 8, 9});
  for (const int i : {2, 3, 4}) Open(i, Held(i, v1::RANK_STATE_TRAINING, step_));
  Live(config_.lost_after - absl::Seconds(2), {2, 3, 4, 5, 6, 7, 8, 9}, /*trains=*/false);
  ExpectStates({1}, v1::WORKER_STATE_UNREACHABLE);
  EXPECT_THAT(LastMessage(v1::EVENT_KIND_WORKER_UNREACHABLE),
              HasSubstr("most workers of rack a, which return now"));
  EXPECT_EQ(Job().epoch(), 1u);
  Live(absl::Seconds(4), {2, 3, 4, 5, 6, 7, 8, 9}, /*trains=*/false);
  ExpectStates({1}, v1::WORKER_STATE_LOST);
}

TEST_F(RackTest, CoordinatorRestartedMeanwhile_HoldsARackAsBefore) {
  Start(2, 9);
  Live(absl::Minutes(1), {5, 6, 7, 8, 9});
  Restart();
  for (int i = 5; i <= 9; ++i) Open(i, Held(i, v1::RANK_STATE_TRAINING, step_));
  Live(absl::Minutes(10), {5, 6, 7, 8, 9});
  ExpectStates({1, 2, 3, 4}, v1::WORKER_STATE_UNREACHABLE);
  EXPECT_EQ(Job().epoch(), 1u);
}

TEST_F(RackTest, WorkersOfARackThatFallSilentOneByOne_AreLostAfterTheLimit) {
  Start(1, 9);
  Live(config_.unreachable_after + absl::Seconds(1), {2, 3, 4, 5, 6, 7, 8, 9});
  Live(config_.unreachable_after + absl::Seconds(1), {3, 4, 5, 6, 7, 8, 9});
  Live(config_.lost_after, {4, 5, 6, 7, 8, 9});
  ExpectStates({1, 2}, v1::WORKER_STATE_LOST);
  Live(absl::Seconds(1), {4, 5, 6, 7, 8, 9});
  ExpectStates({3}, v1::WORKER_STATE_LOST);
}

TEST_F(RackTest, TwoWorkersOfARackOfFourSilentAtOnce_AreLostAfterTheLimit) {
  Start(2, 9);
  Live(config_.lost_after, {3, 4, 5, 6, 7, 8, 9});
  ExpectStates({1, 2}, v1::WORKER_STATE_LOST);
}

// Racks of two, in blocks of four.
class BlockTest : public RackTest {
 protected:
  std::map<std::string, std::string> LabelsOf(int worker) const override {
    return {{"rack", absl::StrCat((worker - 1) / 2)}, {"block", worker <= 4 ? "a" : "b"}};
  }
};

TEST_F(BlockTest, ItsWorkersSilentAtOnce_AreHeldThoughARackHasTooFew) {
  Start(2, 9);
  Live(absl::Minutes(10), {5, 6, 7, 8, 9});
  ExpectStates({1, 2, 3, 4}, v1::WORKER_STATE_UNREACHABLE);
  EXPECT_THAT(LastMessage(v1::EVENT_KIND_WORKER_UNREACHABLE),
              HasSubstr("4 of 4 workers of block a fell silent together"));
  EXPECT_EQ(Job().epoch(), 1u);
}

TEST_F(BlockTest, OneRackOfTwoSilent_IsLostAfterTheLimit) {
  Start(2, 9);
  Live(config_.lost_after, {3, 4, 5, 6, 7, 8, 9});
  ExpectStates({1, 2}, v1::WORKER_STATE_LOST);
}

// A gang that has ended does not wait for a worker that is held.
TEST_F(FleetTest, GangThatEndedOnAHeldWorker_StartsElsewhere) {
  Start(2);
  Live(absl::Seconds(10), {2, 5}, /*trains=*/false);
  v1::FromWorker message;
  message.set_incarnation(1);
  v1::ObservedAttempt& attempt = *message.mutable_observed()->add_attempts();
  attempt.set_job_id(Job().id());
  attempt.set_epoch(1);
  attempt.add_ranks()->set_rank(1);
  attempt.mutable_ranks(0)->set_state(v1::RANK_STATE_RELEASED);
  attempt.mutable_ranks(0)->mutable_exit()->set_cause(v1::CAUSE_CRASH);
  Handle(SessionMessage{sessions_[2], message});
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  state_ = v1::RANK_STATE_RELEASED;
  Live(config_.lost_after, {2, 5}, /*trains=*/false);
  EXPECT_EQ(StateOf(1), v1::WORKER_STATE_UNREACHABLE);
  EXPECT_EQ(Job().epoch(), 2u);
  // The old rank still runs when the worker returns: nothing is placed beside it.
  SessionOpened hello = HelloOf("w1", 1);
  attempt.mutable_ranks(0)->set_rank(0);
  attempt.mutable_ranks(0)->set_state(v1::RANK_STATE_TRAINING);
  attempt.mutable_ranks(0)->clear_exit();
  *hello.hello.mutable_observed() = message.observed();
  Handle(hello);
  EXPECT_EQ(core_->ListWorkers()[0].slots_free(), 0);
}

TEST_F(FleetTest, RemovedWorker_IsGivenUpAtOnceAndForgotten) {
  Start(2);
  Handle(RemoveWorkerEvent{CallId(9), "w1"});
  ASSERT_EQ(Actions<ReplyAction>().size(), 1u);
  EXPECT_OK(Actions<ReplyAction>()[0].status);
  EXPECT_EQ(Actions<CloseAction>().size(), 1u);
  EXPECT_EQ(StateOf(1), v1::WORKER_STATE_UNSPECIFIED);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  Restart();
  EXPECT_EQ(core_->ListWorkers().size(), 4u);
  Handle(RemoveWorkerEvent{CallId(9), "w1"});
  EXPECT_THAT(Actions<ReplyAction>()[0].status, StatusIs(absl::StatusCode::kNotFound));
}

// ---- what a session may touch -------------------------------------------------------------------

TEST_F(CoreTest, HelloOfAnotherIdentity_IsRefusedUntilTheWorkerIsLostOrRemoved) {
  SessionOpened owner = HelloOf("w", 2);
  owner.hello.set_identity("owner");
  Handle(owner);
  SessionOpened other = HelloOf("w", 2);
  other.hello.set_identity("other");
  other.incarnation = Incarnation(~uint64_t{0});
  for (const char* identity : {"other", ""}) {
    other.hello.set_identity(identity);
    Handle(other);
    ASSERT_EQ(Actions<CloseAction>().size(), 1u);
    EXPECT_EQ(Actions<CloseAction>()[0].session, other.session);
    EXPECT_THAT(Actions<CloseAction>()[0].status,
                StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("remove-worker w")));
  }
  EXPECT_EQ(core_->SessionOf(WorkerId("w")), owner.session);
  Restart();  // what a name belongs to is durable
  Handle(other);
  EXPECT_EQ(Actions<CloseAction>().size(), 1u);
  Handle(owner);
  EXPECT_THAT(Actions<CloseAction>(), IsEmpty());
  for (const v1::Worker& worker : core_->ListWorkers()) EXPECT_EQ(worker.identity(), "");
  Handle(RemoveWorkerEvent{CallId(9), "w"});
  other.session = SessionId(++last_session_);
  other.hello.set_identity("other");
  Handle(other);
  EXPECT_THAT(Actions<CloseAction>(), IsEmpty());
  // Its incarnation does not outlive its identity.
  Wait(config_.partition_hold + absl::Seconds(1));
  EXPECT_EQ(core_->ListWorkers()[0].state(), v1::WORKER_STATE_LOST);
  owner.session = SessionId(++last_session_);
  Handle(owner);
  EXPECT_THAT(Actions<CloseAction>(), IsEmpty());
}

// "x" has no rank of the job: whatever it says about the job changes nothing.
TEST_F(CoreTest, WorkerWithoutARankOfTheJob_CanNeitherReadNorWriteAnythingOfIt) {
  const v1::Job job = Train();
  EXPECT_EQ(Commit(job, 10), 0);
  const SessionOpened x = HelloOf("x", 1);
  Handle(x);
  const auto status_of = [&](v1::FromWorker message) {
    message.set_incarnation(1);
    Handle(SessionMessage{x.session, message});
    for (const SendAction& send : Actions<SendAction>()) {
      if (send.message.has_value()) return send.message.value().status_code();
      if (send.message.has_verdict()) return send.message.verdict().status_code();
    }
    return -1;
  };
  const int denied = static_cast<int>(absl::StatusCode::kPermissionDenied);
  v1::FromWorker put;
  put.mutable_put()->set_job_id(job.id());
  put.mutable_put()->set_epoch(1);
  put.mutable_put()->set_key("k");
  EXPECT_EQ(status_of(put), denied);
  v1::FromWorker get;
  get.mutable_get()->set_job_id(job.id());
  get.mutable_get()->set_epoch(1);
  get.mutable_get()->set_key("k");
  EXPECT_EQ(status_of(get), denied);
  v1::FromWorker commit;
  commit.mutable_commit()->set_job_id(job.id());
  commit.mutable_commit()->set_epoch(1);
  commit.mutable_commit()->mutable_checkpoint()->set_step(20);
  EXPECT_EQ(status_of(commit), denied);
  v1::FromWorker notice;
  notice.mutable_notice()->set_job_id(job.id());
  notice.mutable_notice()->set_epoch(1);
  notice.mutable_notice()->mutable_removed()->set_step(10);
  notice.mutable_notice()->mutable_removed()->set_epoch(1);
  status_of(notice);
  notice.mutable_notice()->mutable_damaged()->mutable_checkpoint()->set_step(10);
  notice.mutable_notice()->mutable_damaged()->mutable_checkpoint()->set_epoch(1);
  status_of(notice);
  EXPECT_EQ(Job().last_committed_step(), 10);
  v1::FromWorker observed;
  v1::ObservedAttempt& attempt = *observed.mutable_observed()->add_attempts();
  attempt.set_job_id(job.id());
  attempt.set_epoch(500);
  status_of(observed);
  Observe({});  // "w" has lost the attempt
  Wait(absl::Seconds(2));
  EXPECT_EQ(Job().epoch(), 2u) << "what x says of epochs does not count";
}

TEST_F(CoreTest, DesiredOfANewDaemon_HasTheSpecOncePerAttempt) {
  SessionOpened hello = HelloOf("w", 2);
  hello.hello.set_protocol_version(1);
  session_ = hello.session;
  Handle(hello);
  Submit();
  ASSERT_TRUE(LastDesired().has_value());
  const v1::DesiredAttempt attempt = LastDesired()->attempts(0);
  EXPECT_EQ(attempt.spec().name(), "job");
  ASSERT_EQ(attempt.ranks_size(), 2);
  EXPECT_FALSE(attempt.ranks(0).has_spec());
}

// A daemon with many slots, which takes what it is told as its version does, and 300 jobs with the
// largest specs there are: together more than a message may have.
class LargeSpecsTest : public CoreTest {
 protected:
  static constexpr int kJobs = 300;
  static constexpr size_t kMessageBytesMax = 64 << 20;  // of a daemon

  void Begin(uint32_t protocol_version) {
    protocol_version_ = protocol_version;
    for (int i = 0; i < kJobs; ++i) {
      v1::JobSpec spec = Spec(1);
      spec.set_name(absl::StrCat("n", i));
      (*spec.mutable_env())["LARGE"] = std::string(250'000, 'x');
      Take(core_->Handle(SubmitEvent{CallId(1), spec, ""}, now_), /*check=*/false);
      ASSERT_OK(Actions<ReplyAction>()[0].status);
    }
    Open();
  }
  void Open() {
    SessionOpened hello = HelloOf("w", kJobs);
    session_ = hello.session;
    hello.hello.set_protocol_version(protocol_version_);
    *hello.hello.mutable_observed() = Held();
    Handle(hello);
    TakeDesired();
  }
  v1::Observed Held() const {
    v1::Observed observed;
    observed.set_applied_revision(revision_);
    for (const auto& [id, state] : held_) {
      v1::ObservedAttempt& attempt = *observed.add_attempts();
      attempt.set_job_id(id);
      attempt.set_epoch(1);
      attempt.set_has_spec(protocol_version_ >= 5 && described_.contains(id));
      attempt.add_ranks()->set_state(state);
    }
    return observed;
  }
  // Applies the newest Desired, if there is one.
  void TakeDesired() {
    const std::optional<v1::Desired> desired = LastDesired();
    if (!desired.has_value()) return;
    EXPECT_LT(desired->ByteSizeLong(), kMessageBytesMax);
    revision_ = desired->revision();
    std::set<std::string> listed;
    for (const v1::DesiredAttempt& attempt : desired->attempts()) {
      const std::string& id = attempt.job_id();
      listed.insert(id);
      if (attempt.has_spec()) described_.insert(id);
      v1::RankState& state = held_[id];
      // A daemon starts nothing without a spec; an older one keeps none beyond a Desired.
      const bool can = protocol_version_ >= 5 ? described_.contains(id) : attempt.has_spec();
      if (attempt.phase() == v1::DESIRED_PHASE_RUNNING && state < v1::RANK_STATE_RUNNING) {
        EXPECT_TRUE(can || protocol_version_ >= 5) << id;
        if (can) state = v1::RANK_STATE_RUNNING;
      }
      if (state == v1::RANK_STATE_UNSPECIFIED) state = v1::RANK_STATE_ASSIGNED;
      if (can && state == v1::RANK_STATE_ASSIGNED) state = v1::RANK_STATE_PREPARED;
    }
    for (const auto& [id, state] : held_) EXPECT_TRUE(listed.contains(id)) << id << " is stale";
  }
  void Report() {
    v1::FromWorker message;
    *message.mutable_observed() = Held();
    message.set_incarnation(1);
    Handle(SessionMessage{session_, message});
    TakeDesired();
  }
  int64_t Running() const {
    return std::count_if(held_.begin(), held_.end(),
                         [](const auto& held) { return held.second >= v1::RANK_STATE_RUNNING; });
  }

  uint32_t protocol_version_ = 0;
  std::map<std::string, v1::RankState> held_;  // by job
  std::set<std::string> described_;            // whose spec the process has
};

TEST_F(LargeSpecsTest, OfMoreJobsThanAMessageHolds_ComeInSeveralAndAllAreStarted) {
  Begin(5);
  EXPECT_LT(held_.size(), 140u) << "32 MiB of specs";
  EXPECT_GT(held_.size(), 120u);
  int reports = 0;
  for (; Running() < kJobs && reports < 20; ++reports) Report();
  EXPECT_EQ(Running(), kJobs);
  EXPECT_LE(reports, 5);
  Report();
  EXPECT_FALSE(LastDesired().has_value());
  // A new session, whose daemon has all specs, is told none of them again.
  Open();
  ASSERT_TRUE(LastDesired().has_value());
  EXPECT_EQ(LastDesired()->attempts_size(), kJobs);
  EXPECT_LT(LastDesired()->ByteSizeLong(), 1u << 20);
}

TEST_F(LargeSpecsTest, OfADaemonThatWasRestarted_AreSentAgainAndNothingIsStale) {
  Begin(5);
  Report();
  EXPECT_GT(Running(), 120) << "these need their specs no more";
  EXPECT_GT(held_.size(), 240u);
  described_.clear();
  Open();
  for (int reports = 0; Running() < kJobs && reports < 20; ++reports) Report();
  EXPECT_EQ(Running(), kJobs);
}

TEST_F(LargeSpecsTest, OfAnOlderDaemon_FollowWhenEarlierRanksRun) {
  Begin(4);
  EXPECT_LT(held_.size(), 140u);
  for (int reports = 0; Running() < kJobs && reports < 20; ++reports) Report();
  EXPECT_EQ(Running(), kJobs);
}

// ---- ended jobs ---------------------------------------------------------------------------------

TEST_F(CoreTest, JobOlderThanAllEndedOnes_EndsAndKeepsItsRecord) {
  const v1::Job old = Train();
  ASSERT_EQ(Commit(old, 10), 0);
  for (size_t i = 0; i < kEndedJobsMax; ++i) {
    v1::JobSpec spec = Spec();
    spec.set_name(absl::StrCat("n", i));
    now_ += absl::Milliseconds(1);
    Take(core_->Handle(SubmitEvent{CallId(1), spec, ""}, now_), /*check=*/false);
    Take(core_->Handle(CancelEvent{CallId(2), spec.name()}, now_), /*check=*/false);
  }
  ASSERT_OK(core_->GetJob("n0").status());
  Handle(CancelEvent{CallId(3), "job"});
  Observe(Ranks(old, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(Job().checkpoints_size(), 1);
  EXPECT_THAT(core_->GetJob("n0").status(), StatusIs(absl::StatusCode::kNotFound));
  Restart();
  EXPECT_EQ(Job().id(), old.id());
  Handle(SubmitEvent{CallId(4), Spec(), "r"});
  EXPECT_TRUE(Actions<ReplyAction>()[0].existed);
}

}  // namespace
}  // namespace muster::coordinator
