// Ranks of an attempt that are replaced before it trains, in the same epoch.
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Workers "a", "b" and "c" with one slot each, and a job with a rank on each of the first two.
class MembershipTest : public CoreTest {
 protected:
  MembershipTest() {
    Connect("a");
    Connect("b");
    Submit();
    Connect("c");
    EXPECT_EQ(WorkersOfRanks(), "a b");
    job_ = Job().id();
  }

  struct Session {
    SessionId id;
    uint64_t incarnation = 1;
    uint64_t revision = 0;
    v1::Desired desired;  // the newest
  };

  void Connect(const std::string& worker, const v1::Observed& observed = {}, uint32_t protocol = 3,
               uint64_t incarnation = 1) {
    SessionOpened hello = HelloOf(worker, 1);
    hello.incarnation = Incarnation(incarnation);
    hello.hello.set_protocol_version(protocol);
    *hello.hello.mutable_observed() = observed;
    sessions_[worker] = {hello.session, incarnation, 0, {}};
    Do(hello);
  }
  void Do(const CoreEvent& event) {
    Handle(event);
    for (const SendAction& send : Actions<SendAction>()) {
      if (!send.message.has_desired()) continue;
      for (auto& [name, session] : sessions_) {
        if (session.id != send.session) continue;
        session.desired = send.message.desired();
        session.revision = session.desired.revision();
      }
    }
  }
  void Send(const std::string& worker, v1::FromWorker message) {
    message.set_incarnation(sessions_[worker].incarnation);
    Do(SessionMessage{sessions_[worker].id, message});
  }

  std::string WorkersOfRanks() const {
    std::string text;
    const v1::Job job = Job();
    for (const v1::RankStatus& rank : job.ranks()) {
      absl::StrAppend(&text, text.empty() ? "" : " ", rank.worker());
    }
    return text;
  }
  // What `worker` was last told of the job.
  v1::DesiredAttempt Told(const std::string& worker) {
    for (const v1::DesiredAttempt& attempt : sessions_[worker].desired.attempts()) {
      if (attempt.job_id() == job_) return attempt;
    }
    return {};
  }
  v1::Observed Holding(int rank, v1::RankState state, uint32_t membership,
                       const std::string& refusal = "") const {
    v1::Observed observed;
    v1::ObservedAttempt& attempt = *observed.add_attempts();
    attempt.set_job_id(job_);
    attempt.set_epoch(Job().epoch());
    attempt.set_membership(membership);
    attempt.set_refusal(refusal);
    if (!refusal.empty()) attempt.set_refusal_cause(v1::CAUSE_LAUNCH);
    attempt.add_ranks()->set_rank(rank);
    attempt.mutable_ranks(0)->set_state(state);
    return observed;
  }
  void Report(const std::string& worker, v1::Observed observed) {
    v1::FromWorker message;
    observed.set_applied_revision(sessions_[worker].revision);
    *message.mutable_observed() = std::move(observed);
    Send(worker, std::move(message));
  }
  void Report(const std::string& worker, int rank, v1::RankState state, uint32_t membership) {
    Report(worker, Holding(rank, state, membership));
  }
  void Refuse(const std::string& worker, int rank, uint32_t membership) {
    Report(worker, Holding(rank, v1::RANK_STATE_ASSIGNED, membership, "its disk is full"));
  }
  // Lets time pass in which all workers but those in `silent` are heard.
  void Hear(absl::Duration time, const std::set<std::string>& silent,
            const std::map<std::string, v1::Observed>& reports) {
    for (absl::Duration passed; passed < time; passed += absl::Seconds(1)) {
      now_ += absl::Seconds(1);
      Do(TimerFired{});
      for (const auto& [worker, session] : std::map<std::string, Session>(sessions_)) {
        if (silent.contains(worker)) continue;
        const auto report = reports.find(worker);
        Report(worker, report == reports.end() ? v1::Observed() : report->second);
      }
    }
  }
  int64_t FreeSlotsOf(const std::string& worker) const {
    for (const v1::Worker& row : core_->ListWorkers()) {
      if (row.name() == worker) return row.slots_free();
    }
    return -1;
  }
  void StartBoth() {
    Report("a", 0, v1::RANK_STATE_PREPARED, 1);
    Report("b", 1, v1::RANK_STATE_PREPARED, 1);
    EXPECT_EQ(Job().state(), v1::JOB_STATE_STARTING);
    Report("a", 0, v1::RANK_STATE_RUNNING, 1);
  }
  absl::Status Put(const std::string& worker, uint32_t membership) {
    v1::FromWorker message;
    v1::KeyValuePut& put = *message.mutable_put();
    put.set_job_id(job_);
    put.set_epoch(1);
    put.set_membership(membership);
    put.set_key("address");
    put.set_value(absl::StrCat("of ", worker));
    Send(worker, message);
    for (const SendAction& send : Actions<SendAction>()) {
      if (!send.message.has_value()) continue;
      return absl::Status(static_cast<absl::StatusCode>(send.message.value().status_code()),
                          send.message.value().status_message());
    }
    return absl::UnknownError("no reply");
  }

  std::string job_;
  std::map<std::string, Session> sessions_;
};

TEST_F(MembershipTest, WorkerThatRefuses_IsReplacedInTheEpochAndTheOthersStay) {
  Report("a", 0, v1::RANK_STATE_PREPARED, 1);
  Refuse("b", 1, 1);
  const v1::Job job = Job();
  EXPECT_EQ(WorkersOfRanks(), "a c");
  EXPECT_EQ(job.epoch(), 1u);
  EXPECT_EQ(job.attempts(), 1);
  EXPECT_EQ(job.membership(), 2u);
  EXPECT_EQ(job.state(), v1::JOB_STATE_PLACING);
  ASSERT_THAT(job.replacements(), SizeIs(1));
  EXPECT_EQ(job.replacements(0).worker(), "b");
  EXPECT_EQ(job.replacements(0).cause(), v1::CAUSE_LAUNCH);
  EXPECT_EQ(job.replacements(0).stayed(), 1);
  EXPECT_EQ(job.replacements(0).ranks(0).worker(), "c");
  EXPECT_THAT(job.replacements(0).message(), HasSubstr("its disk is full"));
  EXPECT_THAT(job.causes(), IsEmpty()) << "no attempt has ended";

  EXPECT_EQ(Told("a").membership(), 2u);
  EXPECT_EQ(Told("a").phase(), v1::DESIRED_PHASE_PREPARED);
  EXPECT_EQ(Told("c").ranks(0).rank(), 1);
  EXPECT_EQ(Told("b").phase(), v1::DESIRED_PHASE_STOPPED);
  EXPECT_EQ(Told("b").membership(), 1u);

  // What was prepared before counts once its daemon knows of the new membership.
  Report("c", 1, v1::RANK_STATE_PREPARED, 2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
  Report("a", 0, v1::RANK_STATE_PREPARED, 1);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
  Report("a", 0, v1::RANK_STATE_PREPARED, 2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_STARTING);
  Report("a", 0, v1::RANK_STATE_TRAINING, 2);
  Report("c", 1, v1::RANK_STATE_TRAINING, 2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Job().failures(), 0);
}

TEST_F(MembershipTest, DeviceOfTheWorkerThatLeft_IsFreeOnceItsReleaseIsProven) {
  Refuse("b", 1, 1);
  ASSERT_EQ(WorkersOfRanks(), "a c");
  EXPECT_EQ(FreeSlotsOf("b"), 0);
  Handle(SubmitEvent{CallId(2),
                     [] {
                       v1::JobSpec spec = Spec(1);
                       spec.set_name("other");
                       return spec;
                     }(),
                     "other"});
  EXPECT_EQ(core_->GetJob("other")->state(), v1::JOB_STATE_QUEUED);
  Report("b", 1, v1::RANK_STATE_EXITED, 1);
  EXPECT_EQ(FreeSlotsOf("b"), 0);
  Report("b", 1, v1::RANK_STATE_RELEASED, 1);
  EXPECT_EQ(core_->GetJob("other")->state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(core_->GetJob("other").value().ranks(0).worker(), "b");
}

// A daemon that applied the Desired which stops its ranks and holds none has proven it too.
TEST_F(MembershipTest, WorkerThatLeftAndHoldsNothing_HasProvenTheRelease) {
  Refuse("b", 1, 1);
  EXPECT_EQ(FreeSlotsOf("b"), 0);
  Report("b", v1::Observed());
  EXPECT_EQ(FreeSlotsOf("b"), 1);
}

// What a rank on it holds is proven free first, and nothing is noted against the worker.
TEST_F(MembershipTest,
       WorkerThatIsDrainedBeforeTheGangTrains_IsReplacedAndDrainedOnceItsReleaseIsProven) {
  StartBoth();
  v1::DrainRequest drain;
  drain.add_workers("b");
  Do(FleetEvent{CallId(9), drain, {}});
  const v1::Job job = Job();
  EXPECT_EQ(WorkersOfRanks(), "a c");
  EXPECT_EQ(job.epoch(), 1u);
  EXPECT_EQ(job.membership(), 2u);
  ASSERT_THAT(job.replacements(), SizeIs(1));
  EXPECT_EQ(job.replacements(0).cause(), v1::CAUSE_MAINTENANCE);
  EXPECT_THAT(job.causes(), IsEmpty()) << "no attempt has ended";
  EXPECT_EQ(Told("b").phase(), v1::DESIRED_PHASE_STOPPED);
  const auto row = [this] { return core_->ListWorkers()[1]; };
  EXPECT_FALSE(row().cordon().drained());
  Do(TimerFired{});
  EXPECT_EQ(Job().membership(), 2u) << "what leaves already is not replaced again";
  Report("b", 1, v1::RANK_STATE_RELEASED, 1);
  EXPECT_TRUE(row().cordon().drained());
  EXPECT_EQ(row().reputation().faults(), 0);
  Report("c", 1, v1::RANK_STATE_PREPARED, 2);
  Report("a", 0, v1::RANK_STATE_PREPARED, 2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_STARTING);
}

// Two hosts of a gang that are drained by one request are not each other's replacement.
TEST_F(MembershipTest, WorkersThatAreDrainedTogether_TakeNoneOfEachOthersRanks) {
  Connect("d");
  v1::DrainRequest drain;
  for (const char* worker : {"a", "c"}) drain.add_workers(worker);
  Do(FleetEvent{CallId(9), drain, {}});
  EXPECT_EQ(WorkersOfRanks(), "d b");
  EXPECT_THAT(Job().replacements(), SizeIs(1));
}

TEST_F(MembershipTest, WorkerThatIsDrainedWithoutFreeSlotsElsewhere_EndsTheAttempt) {
  v1::DrainRequest drain;
  for (const char* worker : {"b", "c"}) drain.add_workers(worker);
  Do(FleetEvent{CallId(9), drain, {}});
  EXPECT_EQ(Job().attempt_state(), v1::ATTEMPT_STATE_STOPPING);
  EXPECT_EQ(Job().membership(), 1u);
}

TEST_F(MembershipTest, WorkerThatIsLostWhileOthersPrepare_IsReplaced) {
  Report("a", 0, v1::RANK_STATE_PREPARED, 1);
  Hear(config_.lost_after + absl::Seconds(1), {"b"},
       {{"a", Holding(0, v1::RANK_STATE_PREPARED, 1)}});
  const v1::Job job = Job();
  EXPECT_EQ(WorkersOfRanks(), "a c");
  EXPECT_EQ(job.epoch(), 1u);
  EXPECT_EQ(job.membership(), 2u);
  EXPECT_EQ(job.replacements(0).cause(), v1::CAUSE_WORKER_LOST);
  // It returns with what it had: that is stale, and its slot is not used before it is gone.
  Connect("b", Holding(1, v1::RANK_STATE_PREPARED, 1));
  EXPECT_EQ(FreeSlotsOf("b"), 0);
  EXPECT_THAT(sessions_["b"].desired.attempts(), IsEmpty());
  Report("b", v1::Observed());
  EXPECT_EQ(FreeSlotsOf("b"), 1);
  EXPECT_EQ(WorkersOfRanks(), "a c");
}

TEST_F(MembershipTest, HostThatIsRestartedWhileRanksBootstrap_IsReplacedAndTheOthersStartAnew) {
  StartBoth();
  EXPECT_OK(Put("a", 1));
  Connect("b", {}, 3, /*incarnation=*/2);  // it holds nothing
  const v1::Job job = Job();
  EXPECT_EQ(WorkersOfRanks(), "a c");
  EXPECT_EQ(job.epoch(), 1u);
  EXPECT_EQ(job.membership(), 2u);
  EXPECT_EQ(job.state(), v1::JOB_STATE_PLACING);
  EXPECT_FALSE(job.has_running_since());
  EXPECT_EQ(FreeSlotsOf("b"), 1) << "it has proven that nothing is left";
  EXPECT_EQ(Told("a").phase(), v1::DESIRED_PHASE_PREPARED);
  EXPECT_EQ(Told("a").ranks(0).membership(), 2u);

  // Keys are of one membership.
  EXPECT_THAT(Put("a", 1), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("membership")));
  EXPECT_OK(Put("c", 2));
  EXPECT_THAT(Put("b", 2), StatusIs(absl::StatusCode::kPermissionDenied));

  // A rank that runs counts as prepared.
  Report("a", 0, v1::RANK_STATE_RUNNING, 2);
  Report("c", 1, v1::RANK_STATE_PREPARED, 2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_STARTING);
  EXPECT_EQ(Told("a").phase(), v1::DESIRED_PHASE_RUNNING);
  // Exits of an earlier membership are not those of the ranks that run now.
  v1::Observed late = Holding(0, v1::RANK_STATE_EXITED, 1);
  late.mutable_attempts(0)->mutable_ranks(0)->mutable_exit()->set_cause(v1::CAUSE_CRASH);
  Report("a", late);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_STARTING);
}

TEST_F(MembershipTest, GetThatWaitsWhenAMembershipEnds_IsToBeRepeated) {
  StartBoth();
  v1::FromWorker message;
  message.mutable_get()->set_job_id(job_);
  message.mutable_get()->set_epoch(1);
  message.mutable_get()->set_membership(1);
  message.mutable_get()->set_key("address");
  Send("a", message);
  Refuse("b", 1, 1);
  ASSERT_EQ(Job().membership(), 2u);
  std::vector<int> codes;
  for (const SendAction& send : Actions<SendAction>()) {
    if (send.message.has_value()) codes.push_back(send.message.value().status_code());
  }
  EXPECT_THAT(codes, ElementsAre(static_cast<int>(absl::StatusCode::kUnavailable)));
}

TEST_F(MembershipTest, CheckpointOfAnEarlierMembership_IsRefused) {
  StartBoth();
  Refuse("b", 1, 1);
  ASSERT_EQ(Job().membership(), 2u);
  const auto commit = [this](uint32_t membership) {
    v1::FromWorker message;
    message.mutable_commit()->set_job_id(job_);
    message.mutable_commit()->set_epoch(1);
    message.mutable_commit()->mutable_checkpoint()->set_step(10);
    message.mutable_commit()->mutable_checkpoint()->set_membership(membership);
    Send("a", message);
    for (const SendAction& send : Actions<SendAction>()) {
      if (send.message.has_verdict()) return send.message.verdict().status_code();
    }
    return -1;
  };
  EXPECT_EQ(commit(1), static_cast<int>(absl::StatusCode::kAborted));
  EXPECT_EQ(Job().last_committed_step(), 0);
  EXPECT_EQ(commit(2), 0);
  EXPECT_EQ(Job().last_committed_step(), 10);
}

TEST_F(MembershipTest, NoFreeSlot_EndsTheAttemptAsBefore) {
  Do(SessionClosed{sessions_["c"].id});
  Refuse("b", 1, 1);
  EXPECT_EQ(Job().membership(), 1u);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  EXPECT_EQ(Told("a").phase(), v1::DESIRED_PHASE_STOPPED);
}

TEST_F(MembershipTest, GangThatTrains_TakesANewEpoch) {
  StartBoth();
  Report("a", 0, v1::RANK_STATE_TRAINING, 1);
  Report("b", 1, v1::RANK_STATE_TRAINING, 1);
  ASSERT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  Connect("b", {}, 3, /*incarnation=*/2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  EXPECT_EQ(Job().membership(), 1u);
}

// A rank that has joined its communicators has met the one that is lost.
TEST_F(MembershipTest, RankThatTrainsAlready_MakesItANewEpoch) {
  StartBoth();
  Report("a", 0, v1::RANK_STATE_TRAINING, 1);
  Connect("b", {}, 3, /*incarnation=*/2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
}

TEST_F(MembershipTest, DaemonThatKnowsNoMemberships_MakesItANewEpoch) {
  Connect("a", Holding(0, v1::RANK_STATE_PREPARED, 0), /*protocol=*/2);
  Refuse("b", 1, 1);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
}

TEST_F(MembershipTest, DaemonThatKnowsNoMemberships_GetsNoneOfTheRanks) {
  Connect("c", {}, /*protocol=*/2);
  Refuse("b", 1, 1);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
}

TEST_F(MembershipTest, DaemonThatIsReplacedByAnOlderOne_EndsTheAttempt) {
  Refuse("b", 1, 1);
  ASSERT_EQ(Job().membership(), 2u);
  Connect("a", Holding(0, v1::RANK_STATE_PREPARED, 0), /*protocol=*/2, /*incarnation=*/2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
}

TEST_F(MembershipTest, UserError_EndsTheAttemptSinceItIsTheSameAnywhere) {
  v1::Observed observed = Holding(1, v1::RANK_STATE_ASSIGNED, 1, "no such directory");
  observed.mutable_attempts(0)->set_refusal_cause(v1::CAUSE_USER_ERROR);
  Report("b", observed);
  EXPECT_EQ(Job().membership(), 1u);
  EXPECT_NE(Job().state(), v1::JOB_STATE_PLACING);
}

// A worker takes part in an epoch once.
TEST_F(MembershipTest, WorkerThatLeft_IsNotTakenAgain) {
  Refuse("b", 1, 1);
  Report("b", 1, v1::RANK_STATE_RELEASED, 1);
  ASSERT_EQ(FreeSlotsOf("b"), 1);
  Refuse("c", 1, 2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  EXPECT_EQ(Job().membership(), 2u);
}

TEST_F(MembershipTest, CoordinatorThatIsRestarted_KnowsTheMembershipAndWhoLeaves) {
  Report("a", 0, v1::RANK_STATE_PREPARED, 1);
  Refuse("b", 1, 1);
  const v1::Job before = Job();
  Restart();
  EXPECT_EQ(Job().membership(), 2u);
  EXPECT_EQ(WorkersOfRanks(), "a c");
  EXPECT_EQ(Job().replacements(0).SerializeAsString(), before.replacements(0).SerializeAsString());
  Connect("a", Holding(0, v1::RANK_STATE_PREPARED, 2));
  Connect("c", Holding(1, v1::RANK_STATE_PREPARED, 2));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_STARTING);
  Connect("b", Holding(1, v1::RANK_STATE_PREPARED, 1));
  EXPECT_EQ(FreeSlotsOf("b"), 0);
  EXPECT_EQ(Told("b").phase(), v1::DESIRED_PHASE_STOPPED);
  Report("b", 1, v1::RANK_STATE_RELEASED, 1);
  EXPECT_EQ(FreeSlotsOf("b"), 1);
}

TEST_F(MembershipTest, AttemptThatEndsBeforeTheReleaseIsProven_WaitsForIt) {
  Report("a", 0, v1::RANK_STATE_PREPARED, 1);
  Refuse("b", 1, 1);
  Handle(CancelEvent{CallId(9), "job"});
  EXPECT_EQ(Job().state(), v1::JOB_STATE_STOPPING);
  Report("a", 0, v1::RANK_STATE_RELEASED, 2);
  Report("c", 1, v1::RANK_STATE_RELEASED, 2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_STOPPING);
  Report("b", 1, v1::RANK_STATE_RELEASED, 1);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_CANCELLED);
}

TEST_F(MembershipTest, WorkerThatLeavesAndIsLost_HoldsTheAttemptNoLonger) {
  Refuse("b", 1, 1);
  Handle(CancelEvent{CallId(9), "job"});
  Report("a", 0, v1::RANK_STATE_RELEASED, 2);
  Report("c", 1, v1::RANK_STATE_RELEASED, 2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_STOPPING);
  Hear(config_.lost_after + absl::Seconds(1), {"b"}, {});
  EXPECT_EQ(Job().state(), v1::JOB_STATE_CANCELLED);
}

// After a backup was restored, a daemon may be of a membership that is not known.
TEST_F(MembershipTest, DaemonOfALaterMembership_EndsTheAttempt) {
  Report("a", 0, v1::RANK_STATE_PREPARED, 2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  Report("a", 0, v1::RANK_STATE_RELEASED, 2);
  Report("b", 1, v1::RANK_STATE_RELEASED, 1);
  ASSERT_THAT(Job().causes(), SizeIs(1));
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_COORDINATOR);
  EXPECT_FALSE(Job().causes(0).counted());
}

TEST_F(MembershipTest, RankThatIsNotPreparedInTime_IsReplaced) {
  Hear(kPrepareTimeout - absl::Seconds(1), {},
       {{"a", Holding(0, v1::RANK_STATE_PREPARED, 1)},
        {"b", Holding(1, v1::RANK_STATE_ASSIGNED, 1)}});
  EXPECT_EQ(Job().membership(), 1u);
  now_ += absl::Seconds(1);
  Do(TimerFired{});
  EXPECT_EQ(WorkersOfRanks(), "a c");
  EXPECT_EQ(Job().epoch(), 1u);
  EXPECT_THAT(Job().replacements(0).message(), HasSubstr("was not prepared within 1m"));
}

}  // namespace
}  // namespace muster::coordinator
