#include "worker/daemon/core/daemon_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/status_matchers.h"
#include "worker/daemon/core/limits.h"

namespace muster::worker {
namespace {

using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const AttemptKey kAttempt{JobId("job-a"), Epoch(3)};
const RankKey kRank0{kAttempt, 0};

v1::RankIdentity Identity(const RankKey& key) {
  v1::RankIdentity identity;
  identity.set_job_id(key.attempt.job.value());
  identity.set_epoch(key.attempt.epoch.value());
  identity.set_rank(key.rank);
  return identity;
}

// A core and its durable records, driven event by event.
class DaemonCoreTest : public ::testing::Test {
 protected:
  DaemonCoreTest() { Restart(); }

  DaemonCoreConfig Config() {
    DaemonCoreConfig config;
    config.hello.set_worker("w0");
    config.hello.set_boot_id(boot_);
    for (const char* name : {"cpu:0", "cpu:1"}) config.hello.add_devices()->set_name(name);
    config.new_identity = "identity";
    config.rank_socket = "/state/rank.sock";
    config.attempts_directory = "/state/attempts";
    config.threads_per_slot = 4;
    return config;
  }

  // Keeps the records only, as after kill -9 and a new start.
  void Restart() {
    DaemonOutput output;
    auto core = DaemonCore::Recover(Config(), records_, now_, &output);
    ASSERT_TRUE(core.ok()) << core.status();
    core_ = std::move(*core);
    Keep(std::move(output));
  }

  void Do(const DaemonEvent& event) { Keep(core_->Handle(event, now_)); }

  void Keep(DaemonOutput output) {
    for (const DaemonRecord& record : output.records) {
      if (record.value.has_value()) {
        records_[record.name] = *record.value;
      } else {
        records_.erase(record.name);
      }
    }
    actions_ = std::move(output.actions);
    EXPECT_THAT(core_->CheckInvariants(), IsEmpty());
  }

  template <typename Action>
  std::vector<Action> Actions() const {
    std::vector<Action> found;
    for (const DaemonAction& action : actions_) {
      if (const Action* match = std::get_if<Action>(&action)) found.push_back(*match);
    }
    return found;
  }
  // The kinds of the messages that the last event sent.
  std::vector<std::string> Sent() const {
    static const std::map<int, std::string> kNames = {
        {v1::FromWorker::kHello, "hello"},   {v1::FromWorker::kObserved, "observed"},
        {v1::FromWorker::kPut, "put"},       {v1::FromWorker::kGet, "get"},
        {v1::FromWorker::kCommit, "commit"}, {v1::FromWorker::kNotice, "notice"}};
    std::vector<std::string> kinds;
    for (const auto& send : Actions<SendToCoordinator>()) {
      kinds.push_back(kNames.at(send.message.kind_case()));
    }
    return kinds;
  }
  v1::FromWorker SentOf(v1::FromWorker::KindCase kind) const {
    for (const auto& send : Actions<SendToCoordinator>()) {
      if (send.message.kind_case() == kind) return send.message;
    }
    ADD_FAILURE() << "not sent";
    return {};
  }

  v1::FromCoordinator Message() const {
    v1::FromCoordinator message;
    message.set_cluster_id(cluster_);
    message.set_leader_term(term_);
    message.set_history_id(history_);
    return message;
  }
  void Receive(const v1::FromCoordinator& message) { Do(CoordinatorMessage{session_, message}); }
  void Connect() {
    session_ = SessionId(session_.value() + 1);
    revision_ = 0;
    Do(SessionUp{session_});
    v1::FromCoordinator message = Message();
    message.mutable_welcome()->set_heartbeat_interval_ms(500);
    Receive(message);
  }
  void Disconnect() { Do(SessionDown{session_}); }

  static v1::DesiredAttempt Wanted(const AttemptKey& key, v1::DesiredPhase phase,
                                   const std::vector<std::string>& devices = {"cpu:0"}) {
    v1::DesiredAttempt attempt;
    attempt.set_job_id(key.job.value());
    attempt.set_epoch(key.epoch.value());
    attempt.set_phase(phase);
    attempt.set_stop_grace_ms(2000);
    attempt.mutable_spec();
    for (size_t i = 0; i < devices.size(); ++i) {
      v1::RankAssignment& rank = *attempt.add_ranks();
      rank.set_rank(static_cast<int>(i));
      rank.set_device(devices[i]);
    }
    return attempt;
  }
  void Desire(const std::vector<v1::DesiredAttempt>& attempts) {
    v1::FromCoordinator message = Message();
    message.mutable_desired()->set_revision(++revision_);
    for (const auto& attempt : attempts) *message.mutable_desired()->add_attempts() = attempt;
    Receive(message);
  }

  void RunRank() {
    Connect();
    Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
    Do(AttemptPrepared{kAttempt, absl::OkStatus()});
    Do(RankStarted{kRank0, 100});
  }
  void Exit(const RankKey& key, int code, v1::Cause cause) {
    RankExited event{key, 100};
    event.exit.set_code(code);
    event.exit.set_cause(cause);
    Do(event);
  }
  void Commit(int64_t step) {
    v1::CommitRequest request;
    *request.mutable_identity() = Identity(kRank0);
    request.mutable_checkpoint()->set_step(step);
    Do(RankCall{CallId(++call_), request});
  }
  v1::ReportResponse Report(const std::string& phase, int64_t step) {
    v1::ReportRequest request;
    *request.mutable_identity() = Identity(kRank0);
    request.mutable_progress()->set_phase(phase);
    request.mutable_progress()->set_step(step);
    Do(RankCall{CallId(++call_), request});
    const auto replies = Actions<ReplyToRank>();
    if (replies.size() != 1 || !replies[0].response.ok()) {
      ADD_FAILURE() << "the report was not answered";
      return {};
    }
    return std::get<v1::ReportResponse>(*replies[0].response);
  }

  v1::ObservedRank Observed(int index = 0) const {
    return core_->Observe().attempts(0).ranks(index);
  }

  absl::Time now_ = absl::UnixEpoch();
  std::string boot_ = "first";
  std::map<std::string, std::string> records_;
  std::unique_ptr<DaemonCore> core_;
  std::vector<DaemonAction> actions_;
  SessionId session_;
  std::string cluster_ = "cluster-1";
  uint64_t term_ = 5;
  std::string history_;
  uint64_t revision_ = 0;
  uint64_t call_ = 0;
};

TEST_F(DaemonCoreTest, Session_Opens_HelloFirstAndObservedAfterWelcome) {
  Do(SessionUp{SessionId(1)});
  EXPECT_THAT(Sent(), ElementsAre("hello"));
  session_ = SessionId(1);
  v1::FromCoordinator message = Message();
  message.mutable_welcome();
  Receive(message);
  EXPECT_THAT(Sent(), ElementsAre("observed"));
  EXPECT_EQ(core_->cluster_id(), "cluster-1");
}

// The incarnation comes from the disk, so that a clock that steps back locks no daemon out.
TEST_F(DaemonCoreTest, Identity_IsKeptAndTheIncarnationGrowsWithEachStart) {
  const auto hello = [this](uint64_t session) {
    Do(SessionUp{SessionId(session)});
    const auto sent = Actions<SendToCoordinator>();
    return sent.empty() ? v1::FromWorker() : sent[0].message;
  };
  EXPECT_EQ(hello(1).incarnation(), 1u);
  EXPECT_EQ(hello(2).hello().identity(), "identity");
  EXPECT_EQ(hello(3).hello().protocol_version(), 5u);
  EXPECT_EQ(hello(4).hello().leader_term(), 0u);
  Connect();
  for (uint64_t start = 2; start <= 4; ++start) {
    DaemonOutput output;
    DaemonCoreConfig config = Config();
    config.new_identity = "another";
    config.first_incarnation = Incarnation(100);
    ASSERT_OK_AND_ASSIGN(core_, DaemonCore::Recover(config, records_, now_, &output));
    Keep(std::move(output));
    const v1::FromWorker first = hello(10 + start);
    EXPECT_EQ(first.incarnation(), start);
    EXPECT_EQ(first.hello().identity(), "identity");
    EXPECT_EQ(first.hello().leader_term(), 5u);
  }
}

TEST_F(DaemonCoreTest, Session_WithoutWelcome_IsDialledAgain) {
  Do(SessionUp{SessionId(1)});
  ASSERT_THAT(Actions<ArmTimer>(), SizeIs(1));
  now_ = Actions<ArmTimer>()[0].at;
  Do(TimerFired{});
  EXPECT_THAT(Actions<Reconnect>(), SizeIs(1));
}

TEST_F(DaemonCoreTest, Heartbeat_Passes_ObservedIsSentAgain) {
  Connect();
  for (int i = 0; i < 3; ++i) {
    ASSERT_THAT(Actions<ArmTimer>(), SizeIs(1));
    EXPECT_EQ(Actions<ArmTimer>()[0].at, now_ + absl::Milliseconds(500));
    now_ = Actions<ArmTimer>()[0].at;
    Do(TimerFired{});
    EXPECT_THAT(Sent(), ElementsAre("observed"));
  }
}

TEST_F(DaemonCoreTest, LeaderTerm_OlderThanSeen_IsIgnoredAlsoAfterRestart) {
  Connect();
  Restart();
  term_ = 4;
  session_ = SessionId(9);
  Do(SessionUp{session_});
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  EXPECT_THAT(Actions<PrepareAttempt>(), IsEmpty());
  EXPECT_THAT(Actions<Reconnect>(), SizeIs(1));
  EXPECT_FALSE(core_->Holds(kAttempt));
}

TEST_F(DaemonCoreTest, History_OtherThanSeen_NeedsAHigherTermAlsoAfterRestart) {
  Connect();
  EXPECT_EQ(core_->history_id(), "") << "an older coordinator has none";
  Disconnect();
  history_ = "first";
  Connect();
  EXPECT_EQ(core_->history_id(), "first") << "it was upgraded";
  Disconnect();
  Restart();
  history_ = "second";
  Connect();
  EXPECT_THAT(Actions<Reconnect>(), SizeIs(1));
  EXPECT_EQ(core_->history_id(), "first");
  Disconnect();
  term_ = 4;
  Connect();
  EXPECT_THAT(Actions<Reconnect>(), SizeIs(1));
  Disconnect();
  term_ = 6;
  Connect();
  EXPECT_THAT(Actions<Reconnect>(), IsEmpty());
  EXPECT_EQ(core_->history_id(), "second");
  Disconnect();
  Do(SessionUp{SessionId(99)});
  EXPECT_EQ(SentOf(v1::FromWorker::kHello).hello().history_id(), "second");
  EXPECT_EQ(SentOf(v1::FromWorker::kHello).hello().leader_term(), 6u);
}

// The histories of two versions are told apart by the term with which each was said.
TEST_F(DaemonCoreTest, History_IsForgottenWithAHigherTermThatHasNone) {
  history_ = "first";
  Connect();
  Disconnect();
  history_ = "";
  ++term_;
  Connect();
  EXPECT_EQ(core_->history_id(), "") << "of an older coordinator";
  Disconnect();
  Restart();
  history_ = "second";
  Connect();
  EXPECT_THAT(Actions<Reconnect>(), IsEmpty());
  EXPECT_EQ(core_->history_id(), "second");
  Disconnect();
  // An older daemon on the same directory changes what it knows, and keeps what it does not.
  v1::StoredCluster stored;
  ASSERT_TRUE(stored.ParseFromString(records_.at("cluster")));
  stored.set_leader_term(++term_);
  records_["cluster"] = stored.SerializeAsString();
  Restart();
  history_ = "third";
  Connect();
  EXPECT_THAT(Actions<Reconnect>(), IsEmpty());
  EXPECT_EQ(core_->history_id(), "third");
}

TEST_F(DaemonCoreTest, SpecOfTheAttempt_IsKeptWhereADesiredHasNoneUntilARestart) {
  Connect();
  v1::DesiredAttempt wanted = Wanted(kAttempt, v1::DESIRED_PHASE_PREPARED);
  wanted.mutable_spec()->set_name("job");
  wanted.mutable_spec()->mutable_resources()->set_share(0.5);
  wanted.add_restore()->set_step(10);
  Desire({wanted});
  EXPECT_TRUE(core_->Observe().attempts(0).has_spec());
  Do(AttemptPrepared{kAttempt, absl::OkStatus()});
  Restart();
  EXPECT_FALSE(core_->Observe().attempts(0).has_spec());

  Connect();
  v1::DesiredAttempt bare = Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING);
  bare.clear_spec();
  Desire({bare});
  EXPECT_THAT(Actions<StartRank>(), IsEmpty()) << "it waits for the spec";
  wanted.set_phase(v1::DESIRED_PHASE_PREPARED);
  Desire({wanted});
  ASSERT_THAT(Actions<StartRank>(), SizeIs(1)) << "phases only advance";
  EXPECT_EQ(Actions<StartRank>()[0].assignment.spec().name(), "job");

  // A rank that runs is told of a later membership with the spec that is kept.
  Do(RankStarted{kRank0, 100});
  bare.set_membership(2);
  bare.mutable_ranks(0)->set_membership(2);
  Desire({bare});
  ASSERT_THAT(Actions<ReassignRank>(), SizeIs(1));
  const v1::RankAssignment assignment = Actions<ReassignRank>()[0].assignment;
  EXPECT_EQ(assignment.spec().name(), "job");
  ASSERT_EQ(assignment.restore_size(), 1);
  EXPECT_EQ(assignment.membership(), 2u);
}

TEST_F(DaemonCoreTest, RankWithoutASpecYet_TakesItsShareWhenThatComes) {
  Connect();
  v1::DesiredAttempt wanted = Wanted(kAttempt, v1::DESIRED_PHASE_PREPARED);
  wanted.clear_spec();
  Desire({wanted});
  EXPECT_THAT(Actions<PrepareAttempt>(), IsEmpty());
  wanted.mutable_spec()->mutable_resources()->set_share(0.5);
  Desire({wanted});
  ASSERT_THAT(Actions<PrepareAttempt>(), SizeIs(1));
  v1::StoredAttempt stored;
  ASSERT_TRUE(stored.ParseFromString(records_.at("attempt.job-a.e3")));
  EXPECT_EQ(stored.ranks(0).share(), 500);
}

// Two histories may have given the same number to attempts of their own.
TEST_F(DaemonCoreTest, Attempt_OfAnotherHistory_IsEndedAndNeverTakenForTheOneThatIsWanted) {
  history_ = "first";
  Connect();
  v1::DesiredAttempt wanted = Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING);
  wanted.set_history_id("first");
  Desire({wanted});
  Do(AttemptPrepared{kAttempt, absl::OkStatus()});
  Do(RankStarted{kRank0, 100});
  Restart();
  Do(RankStarted{kRank0, 100});
  EXPECT_EQ(core_->Observe().attempts(0).history_id(), "first");

  // A later history may have the attempt from the backup that it began with.
  history_ = "second";
  term_ = 6;
  Connect();
  Desire({wanted});
  EXPECT_THAT(Actions<SignalRank>(), IsEmpty());
  wanted.set_history_id("second");
  Desire({wanted});
  ASSERT_THAT(Actions<SignalRank>(), SizeIs(1));
  EXPECT_TRUE(Actions<SignalRank>()[0].kill);
  Exit(kRank0, -1, v1::CAUSE_CRASH);
  Do(ReleaseProven{kRank0});
  EXPECT_FALSE(core_->Holds(kAttempt));
}

TEST_F(DaemonCoreTest, Cluster_OtherThanOwn_IsRefused) {
  Connect();
  Disconnect();
  cluster_ = "cluster-2";
  term_ = 99;
  Connect();
  EXPECT_THAT(Actions<Reconnect>(), SizeIs(1));
  EXPECT_EQ(core_->cluster_id(), "cluster-1");
  EXPECT_EQ(core_->leader_term(), 5u);
}

TEST_F(DaemonCoreTest, Message_OfAnOlderSession_IsIgnored) {
  Connect();
  const SessionId old = session_;
  Disconnect();
  Connect();
  v1::FromCoordinator message = Message();
  message.mutable_desired()->set_revision(7);
  *message.mutable_desired()->add_attempts() = Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING);
  Do(CoordinatorMessage{old, message});
  EXPECT_FALSE(core_->Holds(kAttempt));
}

TEST_F(DaemonCoreTest, Attempt_Prepared_StartsNothing) {
  Connect();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_PREPARED)});
  ASSERT_THAT(Actions<PrepareAttempt>(), SizeIs(1));
  const v1::RankAssignment assignment = Actions<PrepareAttempt>()[0].ranks[0];
  EXPECT_EQ(assignment.run_directory(), "/state/attempts/job-a.e3/rank-0");
  EXPECT_EQ(assignment.daemon_socket(), "/state/rank.sock");
  EXPECT_EQ(assignment.threads(), 4);
  EXPECT_EQ(assignment.worker(), "w0");
  Do(AttemptPrepared{kAttempt, absl::OkStatus()});
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_PREPARED);
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
}

TEST_F(DaemonCoreTest, SpecOfTheAttempt_ReachesEachRankAndThatOfAnAssignmentToo) {
  Connect();
  v1::DesiredAttempt by_rank = Wanted(kAttempt, v1::DESIRED_PHASE_PREPARED, {"cpu:0"});
  by_rank.clear_spec();
  by_rank.mutable_ranks(0)->mutable_spec()->set_name("of the rank");
  v1::DesiredAttempt at_once =
      Wanted({JobId("job-b"), Epoch(1)}, v1::DESIRED_PHASE_PREPARED, {"cpu:1"});
  at_once.mutable_spec()->set_name("of the attempt");
  at_once.add_restore()->set_step(10);
  Desire({by_rank, at_once});
  std::vector<std::string> specs;
  for (const PrepareAttempt& prepare : Actions<PrepareAttempt>()) {
    for (const v1::RankAssignment& rank : prepare.ranks) {
      specs.push_back(absl::StrCat(rank.spec().name(), " ", rank.restore_size()));
    }
  }
  EXPECT_THAT(specs, ElementsAre("of the rank 0", "of the attempt 1"));
}

TEST_F(DaemonCoreTest, Desired_Repeated_StartsEachRankOnce) {
  Connect();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  EXPECT_THAT(Actions<PrepareAttempt>(), IsEmpty());
  Do(AttemptPrepared{kAttempt, absl::OkStatus()});
  EXPECT_THAT(Actions<StartRank>(), SizeIs(1));
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
  Do(RankStarted{kRank0, 100});
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_RUNNING);
  EXPECT_EQ(Observed().pid(), 100);
}

TEST_F(DaemonCoreTest, Desired_OlderRevision_IsIgnored) {
  RunRank();
  v1::FromCoordinator late = Message();
  late.mutable_desired()->set_revision(revision_ - 1);  // holds nothing
  ++revision_;
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  Receive(late);
  EXPECT_THAT(Actions<SignalRank>(), IsEmpty());
  EXPECT_TRUE(core_->Holds(kAttempt));
}

TEST_F(DaemonCoreTest, Rank_Exits_IsReportedReleasedAndNeverRestarted) {
  RunRank();
  Exit(kRank0, 3, v1::CAUSE_CRASH);
  EXPECT_THAT(Sent(), ElementsAre("observed"));
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_EXITED);
  EXPECT_EQ(Observed().exit().code(), 3);
  ASSERT_THAT(Actions<VerifyRelease>(), SizeIs(1));
  Do(ReleaseProven{kRank0});
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_RELEASED);
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
  Restart();
  Connect();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
  EXPECT_EQ(Observed().exit().code(), 3);
}

TEST_F(DaemonCoreTest, Progress_Reported_StateIsSentAtOnceAndStepsLater) {
  RunRank();
  for (const char* phase : {"starting", "balancing", "bootstrapping", "allocating"}) {
    Report(phase, 0);
    EXPECT_EQ(Observed().state(), v1::RANK_STATE_RUNNING) << phase;
    EXPECT_EQ(Observed().progress().phase(), phase);
  }
  Report("training", 1);
  EXPECT_THAT(Sent(), ElementsAre("observed"));
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_TRAINING);
  Report("training", 2);
  EXPECT_THAT(Sent(), IsEmpty());
  now_ += absl::Milliseconds(200);
  Do(TimerFired{});
  EXPECT_EQ(SentOf(v1::FromWorker::kObserved).observed().attempts(0).ranks(0).progress().step(), 2);
}

TEST_F(DaemonCoreTest, Connection_Lost_RankTrainsOn) {
  RunRank();
  Disconnect();
  EXPECT_THAT(Actions<SignalRank>(), IsEmpty());
  now_ += absl::Hours(48);
  Do(TimerFired{});
  EXPECT_THAT(Actions<SignalRank>(), IsEmpty());
  Report("training", 7);
  Connect();
  EXPECT_THAT(Actions<SignalRank>(), IsEmpty());
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_TRAINING);
}

TEST_F(DaemonCoreTest, Attempt_MissingInDesiredOfThisSession_IsKilledAndForgotten) {
  RunRank();
  Desire({});
  ASSERT_THAT(Actions<SignalRank>(), SizeIs(1));
  EXPECT_TRUE(Actions<SignalRank>()[0].kill);
  Exit(kRank0, -1, v1::CAUSE_CRASH);
  Do(ReleaseProven{kRank0});
  EXPECT_THAT(Actions<AttemptForgotten>(), SizeIs(1));
  EXPECT_FALSE(core_->Holds(kAttempt));
  EXPECT_EQ(records_.count("attempt.job-a.e3"), 0u);
}

TEST_F(DaemonCoreTest, Attempt_Stale_IsKilledAlsoWhenTheDaemonRestartsMeanwhile) {
  RunRank();
  Desire({});
  Restart();
  EXPECT_THAT(Actions<AttachRank>(), SizeIs(1));
  Do(RankStarted{kRank0, 100});
  ASSERT_THAT(Actions<SignalRank>(), SizeIs(1));
  EXPECT_TRUE(Actions<SignalRank>()[0].kill);
}

TEST_F(DaemonCoreTest, Stop_Asked_TermThenKillAfterGrace) {
  RunRank();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_STOPPED)});
  ASSERT_THAT(Actions<SignalRank>(), SizeIs(1));
  EXPECT_FALSE(Actions<SignalRank>()[0].kill);
  EXPECT_TRUE(Report("training", 4).stop());
  now_ += absl::Milliseconds(1999);
  Do(TimerFired{});
  EXPECT_THAT(Actions<SignalRank>(), IsEmpty());
  now_ += absl::Milliseconds(1);
  Do(TimerFired{});
  ASSERT_THAT(Actions<SignalRank>(), SizeIs(1));
  EXPECT_TRUE(Actions<SignalRank>()[0].kill);
  RankExited exited{kRank0, 100};
  exited.exit.set_signal(9);
  exited.exit.set_cause(v1::CAUSE_CRASH);
  Do(exited);
  EXPECT_EQ(Observed().exit().cause(), v1::CAUSE_CANCELLED);
}

TEST_F(DaemonCoreTest, Stop_OfAnAttemptThatIsUnknownHere_IsProvenReleased) {
  Connect();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_STOPPED)});
  EXPECT_THAT(Actions<VerifyRelease>(), SizeIs(1));
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
  Do(ReleaseProven{kRank0});
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_RELEASED);
}

TEST_F(DaemonCoreTest, Phase_GoesBackFromStopped_StaysStopped) {
  RunRank();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_STOPPED)});
  Exit(kRank0, 0, v1::CAUSE_CANCELLED);
  Do(ReleaseProven{kRank0});
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
}

TEST_F(DaemonCoreTest, Device_OfAStaleRankThatStillRuns_IsNotGivenToAnother) {
  RunRank();
  const AttemptKey next{JobId("job-a"), Epoch(4)};
  Desire({Wanted(next, v1::DESIRED_PHASE_RUNNING)});
  Do(AttemptPrepared{next, absl::OkStatus()});
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
  Exit(kRank0, -1, v1::CAUSE_CRASH);
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
  Do(ReleaseProven{kRank0});
  ASSERT_THAT(Actions<StartRank>(), SizeIs(1));
  EXPECT_EQ(Actions<StartRank>()[0].rank.attempt, next);
}

TEST_F(DaemonCoreTest, Device_ThatRanksShare_TakesThoseThatHaveRoomOnIt) {
  const auto share = [](const AttemptKey& key, double part) {
    v1::DesiredAttempt attempt = Wanted(key, v1::DESIRED_PHASE_RUNNING);
    attempt.mutable_spec()->mutable_resources()->set_share(part);
    return attempt;
  };
  const AttemptKey b{JobId("job-b"), Epoch(1)}, c{JobId("job-c"), Epoch(1)};
  const std::vector<v1::DesiredAttempt> wanted = {share(kAttempt, 0.5), share(b, 0.5),
                                                  share(c, 0.25)};
  Connect();
  Desire(wanted);
  for (const AttemptKey& key : {kAttempt, b, c}) Do(AttemptPrepared{key, absl::OkStatus()});
  EXPECT_THAT(Actions<StartRank>(), IsEmpty()) << "the third has no room";
  EXPECT_EQ(core_->Observe().attempts(1).ranks(0).state(), v1::RANK_STATE_PREPARED);
  Do(RankStarted{kRank0, 100});
  Do(RankStarted{{b, 0}, 101});
  Restart();  // the shares are among the records
  Connect();
  Desire(wanted);
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
  Do(RankStarted{kRank0, 100});
  Do(RankStarted{{b, 0}, 101});
  Exit({b, 0}, 0, v1::CAUSE_COMPLETED);
  EXPECT_THAT(Actions<StartRank>(), IsEmpty()) << "its release is not proven";
  Do(ReleaseProven{{b, 0}});
  ASSERT_THAT(Actions<StartRank>(), SizeIs(1));
  EXPECT_EQ(Actions<StartRank>()[0].rank.attempt, c);
  EXPECT_EQ(Actions<StartRank>()[0].assignment.threads(), 1) << "a quarter of four";
  EXPECT_EQ(Actions<StartRank>()[0].assignment.device_memory_limit_bytes(), 0) << "no GPU";
}

TEST_F(DaemonCoreTest, Device_NotOffered_AttemptIsRefusedWithTheReason) {
  Connect();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING, {"cpu:7"})});
  EXPECT_THAT(Actions<PrepareAttempt>(), IsEmpty());
  EXPECT_THAT(core_->Observe().attempts(0).refusal(), HasSubstr("cpu:7"));
  EXPECT_EQ(core_->Observe().attempts(0).refusal_cause(), v1::CAUSE_LAUNCH);
}

TEST_F(DaemonCoreTest, Device_Fails_TheNextHelloSaysSoAndItsRankIsLeftAlone) {
  RunRank();
  const int slots = core_->Summary().slots;
  Do(DeviceFailed{"cpu:0", "Xid 79"});
  EXPECT_EQ(core_->Summary().slots, slots - 1);
  ASSERT_THAT(Actions<Reconnect>(), SizeIs(1));
  EXPECT_THAT(Actions<Reconnect>()[0].reason, HasSubstr("cpu:0"));
  EXPECT_THAT(Actions<SignalRank>(), IsEmpty());
  Do(DeviceFailed{"cpu:0", "Xid 79 again"});
  Do(DeviceFailed{"cpu:99", "not of this worker"});
  EXPECT_THAT(Actions<Reconnect>(), IsEmpty());
  Do(SessionDown{session_});
  Do(SessionUp{SessionId(session_.value() + 1)});
  ASSERT_THAT(Sent(), ElementsAre("hello"));
  const v1::Hello hello = SentOf(v1::FromWorker::kHello).hello();
  EXPECT_EQ(hello.devices(0).unusable(), "Xid 79");
  EXPECT_EQ(hello.devices(1).unusable(), "");
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_RUNNING);
}

TEST_F(DaemonCoreTest, Preparation_Fails_RefusalKeepsItsCauseAndStopReleases) {
  Connect();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  Do(AttemptPrepared{kAttempt, absl::NotFoundError("no directory /x"), v1::CAUSE_USER_ERROR});
  EXPECT_THAT(Sent(), ElementsAre("observed"));
  EXPECT_EQ(core_->Observe().attempts(0).refusal_cause(), v1::CAUSE_USER_ERROR);
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_STOPPED)});
  Do(ReleaseProven{kRank0});
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_RELEASED);
}

TEST_F(DaemonCoreTest, Daemon_RestartsWhileRankRuns_AttachesAndStartsNothing) {
  RunRank();
  Restart();
  EXPECT_THAT(Actions<AttachRank>(), SizeIs(1));
  Connect();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
  Do(RankStarted{kRank0, 100});
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_RUNNING);
}

TEST_F(DaemonCoreTest, Daemon_DiesBetweenOrderAndStart_RankIsStartedOnceWanted) {
  Connect();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  Do(AttemptPrepared{kAttempt, absl::OkStatus()});
  ASSERT_THAT(Actions<StartRank>(), SizeIs(1));
  Restart();
  Do(RankNotStarted{kRank0, absl::OkStatus()});
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());  // no Desired has said yet that it is wanted
  Connect();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  EXPECT_THAT(Actions<StartRank>(), SizeIs(1));
}

TEST_F(DaemonCoreTest, Machine_RestartsBetweenOrderAndStart_RankIsLostAndNotStartedAgain) {
  Connect();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  Do(AttemptPrepared{kAttempt, absl::OkStatus()});
  ASSERT_THAT(Actions<StartRank>(), SizeIs(1));
  boot_ = "second";
  Restart();
  EXPECT_THAT(Actions<AttachRank>(), SizeIs(1));
  Do(RankNotStarted{kRank0, absl::OkStatus()});
  Connect();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_EXITED);
  EXPECT_EQ(Observed().exit().cause(), v1::CAUSE_WORKER_LOST);
}

TEST_F(DaemonCoreTest, Commit_Asked_IsDurableBeforeTheReplyAndTheSend) {
  RunRank();
  Commit(50);
  EXPECT_EQ(records_.count("commit.job-a.e3.50"), 1u);
  EXPECT_THAT(Actions<ReplyToRank>(), SizeIs(1));
  EXPECT_EQ(SentOf(v1::FromWorker::kCommit).commit().checkpoint().step(), 50);
}

TEST_F(DaemonCoreTest, Commit_WithoutSession_GetsItsVerdictBeforeTheExitIsReported) {
  RunRank();
  Report("training", 50);
  Disconnect();
  Commit(50);
  Exit(kRank0, 0, v1::CAUSE_COMPLETED);
  Do(ReleaseProven{kRank0});
  Restart();  // the commit is kept over it
  session_ = SessionId(20);
  Do(SessionUp{session_});
  const v1::ObservedRank in_hello =
      SentOf(v1::FromWorker::kHello).hello().observed().attempts(0).ranks(0);
  EXPECT_FALSE(in_hello.has_exit());
  EXPECT_EQ(in_hello.state(), v1::RANK_STATE_TRAINING);
  v1::FromCoordinator welcome = Message();
  welcome.mutable_welcome();
  Receive(welcome);
  EXPECT_THAT(Sent(), ElementsAre("commit", "observed"));
  EXPECT_FALSE(SentOf(v1::FromWorker::kObserved).observed().attempts(0).ranks(0).has_exit());
  v1::FromCoordinator verdict = Message();
  verdict.mutable_verdict()->set_job_id("job-a");
  verdict.mutable_verdict()->set_epoch(3);
  verdict.mutable_verdict()->set_step(50);
  Receive(verdict);
  EXPECT_THAT(Sent(), ElementsAre("observed"));
  EXPECT_TRUE(SentOf(v1::FromWorker::kObserved).observed().attempts(0).ranks(0).has_exit());
}

TEST_F(DaemonCoreTest, CommitLeftInTheRunDirectory_IsSentBeforeTheExitIsReported) {
  RunRank();
  Report("training", 50);
  v1::CheckpointRecord left;
  left.set_step(50);
  RankExited exited{kRank0, 4711};
  exited.exit.set_cause(v1::CAUSE_CRASH);
  exited.exit.set_signal(9);
  exited.commits.push_back(left);
  Do(exited);
  EXPECT_THAT(Sent(), ElementsAre("commit", "observed"));
  EXPECT_EQ(records_.count("commit.job-a.e3.50"), 1u);
  EXPECT_FALSE(SentOf(v1::FromWorker::kObserved).observed().attempts(0).ranks(0).has_exit());
}

TEST_F(DaemonCoreTest, Commit_WithoutVerdict_IsRepeatedUntilOneComes) {
  RunRank();
  Commit(50);
  now_ += absl::Seconds(5);
  Do(TimerFired{});
  EXPECT_THAT(Sent(), ElementsAre("commit", "observed"));
  v1::FromCoordinator message = Message();
  message.mutable_verdict()->set_job_id("job-a");
  message.mutable_verdict()->set_epoch(3);
  message.mutable_verdict()->set_step(50);
  Receive(message);
  EXPECT_EQ(records_.count("commit.job-a.e3.50"), 0u);
  EXPECT_EQ(Report("training", 51).last_committed_step(), 50);
  now_ += absl::Seconds(5);
  Do(TimerFired{});
  EXPECT_THAT(Sent(), ElementsAre("observed"));
  Restart();
  EXPECT_EQ(Report("training", 52).last_committed_step(), 50);
}

TEST_F(DaemonCoreTest, Commit_Refused_IsForgottenAndNotCounted) {
  RunRank();
  Commit(50);
  v1::FromCoordinator message = Message();
  message.mutable_verdict()->set_job_id("job-a");
  message.mutable_verdict()->set_epoch(3);
  message.mutable_verdict()->set_step(50);
  message.mutable_verdict()->set_status_code(static_cast<int>(absl::StatusCode::kAborted));
  Receive(message);
  EXPECT_EQ(core_->Summary().commits_pending, 0);
  EXPECT_EQ(Report("training", 51).last_committed_step(), 0);
}

TEST_F(DaemonCoreTest, KeyValueCalls_WaitThroughALostSession) {
  RunRank();
  v1::PutRequest put;
  *put.mutable_identity() = Identity(kRank0);
  put.set_key("comm/world/0");
  put.set_value("address");
  Do(RankCall{CallId(1), put});
  const uint64_t put_request = SentOf(v1::FromWorker::kPut).put().request();
  v1::GetRequest get;
  *get.mutable_identity() = Identity(kRank0);
  get.set_key("comm/world/1");
  Do(RankCall{CallId(2), get});
  Disconnect();
  Connect();
  EXPECT_THAT(Sent(), ElementsAre("put", "get", "observed"));
  v1::FromCoordinator message = Message();
  message.mutable_value()->set_request(put_request);
  Receive(message);
  ASSERT_THAT(Actions<ReplyToRank>(), SizeIs(1));
  EXPECT_EQ(Actions<ReplyToRank>()[0].call, CallId(1));
  Disconnect();
  Connect();
  EXPECT_THAT(Sent(), ElementsAre("get", "observed"));
}

TEST_F(DaemonCoreTest, Get_OfOneKeyByTwoCallers_IsAskedOnceAndAnswersBoth) {
  RunRank();
  v1::GetRequest get;
  *get.mutable_identity() = Identity(kRank0);
  get.set_key("id");
  Do(RankCall{CallId(1), get});
  const uint64_t request = SentOf(v1::FromWorker::kGet).get().request();
  Do(RankCall{CallId(2), get});
  EXPECT_THAT(Sent(), IsEmpty());
  v1::FromCoordinator message = Message();
  message.mutable_value()->set_request(request);
  message.mutable_value()->set_value("v");
  Receive(message);
  ASSERT_THAT(Actions<ReplyToRank>(), SizeIs(2));
  EXPECT_EQ(std::get<v1::GetResponse>(*Actions<ReplyToRank>()[1].response).value(), "v");
}

TEST_F(DaemonCoreTest, Get_WhileTheAttemptIsStopped_EndsWithAborted) {
  RunRank();
  v1::GetRequest get;
  *get.mutable_identity() = Identity(kRank0);
  get.set_key("never");
  Do(RankCall{CallId(1), get});
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_STOPPED)});
  ASSERT_THAT(Actions<ReplyToRank>(), SizeIs(1));
  EXPECT_THAT(Actions<ReplyToRank>()[0].response, StatusIs(absl::StatusCode::kAborted));
}

TEST_F(DaemonCoreTest, Call_OfAStaleEpoch_IsAborted) {
  RunRank();
  v1::CommitRequest request;
  *request.mutable_identity() = Identity({{JobId("job-a"), Epoch(2)}, 0});
  request.mutable_checkpoint()->set_step(10);
  Do(RankCall{CallId(1), request});
  ASSERT_THAT(Actions<ReplyToRank>(), SizeIs(1));
  EXPECT_THAT(Actions<ReplyToRank>()[0].response,
              StatusIs(absl::StatusCode::kAborted, HasSubstr("job-a epoch 2")));
  EXPECT_EQ(core_->Summary().commits_pending, 0);
}

TEST_F(DaemonCoreTest, Puts_WaitInBoundedMemory) {
  RunRank();
  Disconnect();
  v1::PutRequest put;
  *put.mutable_identity() = Identity(kRank0);
  put.set_key("k");
  put.set_value(std::string(kValueBytesMax, 'x'));
  uint64_t waiting = 0;
  const auto refusal = [&]() -> absl::Status {
    Do(RankCall{CallId(waiting + 1), put});
    const auto replies = Actions<ReplyToRank>();
    return replies.empty() ? absl::OkStatus() : replies[0].response.status();
  };
  absl::Status refused;
  while (waiting < 1000 && (refused = refusal()).ok()) ++waiting;
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("try again")));
  EXPECT_EQ(waiting, kKeyValueBytesMax / kValueBytesMax - 1);
  // A caller that is gone frees what it put.
  Do(RankCallCancelled{CallId(1)});
  EXPECT_OK(refusal());
}

TEST_F(DaemonCoreTest, CommitsAndNoticesOfOutsizedCheckpoints_AreRefused) {
  RunRank();
  v1::CommitRequest commit;
  *commit.mutable_identity() = Identity(kRank0);
  commit.mutable_checkpoint()->set_step(50);
  commit.mutable_checkpoint()->set_path(std::string(kCheckpointBytesMax, 'x'));
  Do(RankCall{CallId(1), commit});
  EXPECT_THAT(Actions<ReplyToRank>()[0].response.status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("step 50")));
  EXPECT_EQ(core_->Summary().commits_pending, 0);
  v1::NotifyRequest notice;
  *notice.mutable_identity() = Identity(kRank0);
  notice.mutable_damaged()->set_reason(std::string(kCheckpointBytesMax, 'x'));
  Do(RankCall{CallId(2), notice});
  EXPECT_THAT(Actions<ReplyToRank>()[0].response.status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("notice")));
}

TEST_F(DaemonCoreTest, Notice_IsAnsweredWhenTheCoordinatorHasTakenIt) {
  RunRank();
  Disconnect();
  v1::NotifyRequest request;
  *request.mutable_identity() = Identity(kRank0);
  request.mutable_evaluation()->set_step(100);
  Do(RankCall{CallId(1), request});
  EXPECT_THAT(Actions<ReplyToRank>(), IsEmpty());
  // The stream may break behind the notice: whether it arrived is not known, so it is sent again.
  for (int session = 0; session < 2; ++session) {
    Connect();
    EXPECT_THAT(Sent(), ElementsAre("notice", "get", "observed"));
    EXPECT_EQ(SentOf(v1::FromWorker::kNotice).notice().evaluation().step(), 100);
    EXPECT_THAT(Actions<ReplyToRank>(), IsEmpty());
  }
  const v1::KeyValueGet get = SentOf(v1::FromWorker::kGet).get();
  EXPECT_EQ(get.job_id(), "job-a");
  EXPECT_EQ(get.key(), "");  // answered at once, whatever the coordinator thinks of the attempt
  v1::FromCoordinator taken = Message();
  taken.mutable_value()->set_request(get.request());
  taken.mutable_value()->set_status_code(static_cast<int>(absl::StatusCode::kInvalidArgument));
  Receive(taken);
  ASSERT_THAT(Actions<ReplyToRank>(), SizeIs(1));
  EXPECT_OK(Actions<ReplyToRank>()[0].response);
  Connect();
  EXPECT_THAT(Sent(), ElementsAre("observed"));
}

TEST_F(DaemonCoreTest, NoticeOfACallerThatIsGone_IsKeptOnceUntilItIsTaken) {
  RunRank();
  Disconnect();
  v1::NotifyRequest request;
  *request.mutable_identity() = Identity(kRank0);
  request.mutable_removed()->set_step(100);
  for (uint64_t call = 1; call <= 3; ++call) {  // the rank gives up waiting, and asks again
    Do(RankCall{CallId(call), request});
    Do(RankCallCancelled{CallId(call)});
  }
  Do(RankCall{CallId(4), request});
  Connect();
  EXPECT_THAT(Sent(), ElementsAre("notice", "get", "observed"));
  v1::FromCoordinator taken = Message();
  taken.mutable_value()->set_request(SentOf(v1::FromWorker::kGet).get().request());
  taken.mutable_value()->set_status_code(static_cast<int>(absl::StatusCode::kAborted));
  Receive(taken);
  ASSERT_THAT(Actions<ReplyToRank>(), SizeIs(1));
  EXPECT_EQ(Actions<ReplyToRank>()[0].call, CallId(4));
  EXPECT_OK(Actions<ReplyToRank>()[0].response);
}

// An attempt of two ranks here, in membership `membership`.
v1::DesiredAttempt Membership(v1::DesiredAttempt attempt, uint32_t membership) {
  attempt.set_membership(membership);
  for (v1::RankAssignment& rank : *attempt.mutable_ranks()) rank.set_membership(membership);
  return attempt;
}

TEST_F(DaemonCoreTest, NewMembership_KeepsWhatIsPreparedAndStartsItFromTheNewAssignment) {
  Connect();
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_PREPARED)});
  Do(AttemptPrepared{kAttempt, absl::OkStatus()});
  Desire({Membership(Wanted(kAttempt, v1::DESIRED_PHASE_PREPARED), 2)});
  EXPECT_THAT(Actions<PrepareAttempt>(), IsEmpty());
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_PREPARED);
  EXPECT_EQ(core_->Observe().attempts(0).membership(), 2u);
  Desire({Membership(Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING), 2)});
  ASSERT_THAT(Actions<StartRank>(), SizeIs(1));
  EXPECT_EQ(Actions<StartRank>()[0].assignment.membership(), 2u);
}

TEST_F(DaemonCoreTest, NewMembership_TellsARankThatRunsOnceItsAssignmentIsWritten) {
  RunRank();
  Report("training", 1);
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_TRAINING);
  Desire({Membership(Wanted(kAttempt, v1::DESIRED_PHASE_PREPARED), 2)});
  ASSERT_THAT(Actions<ReassignRank>(), SizeIs(1));
  EXPECT_EQ(Actions<ReassignRank>()[0].assignment.membership(), 2u);
  EXPECT_THAT(Actions<SignalRank>(), IsEmpty());
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_RUNNING) << "what it did before counts no more";
  EXPECT_EQ(Observed().pid(), 100);
  // A report of the earlier membership is answered, and says nothing of the current one.
  EXPECT_EQ(Report("training", 2).membership(), 1u);
  EXPECT_EQ(Observed().state(), v1::RANK_STATE_RUNNING);
  Do(RankReassigned{kRank0, 2, absl::OkStatus()});
  EXPECT_EQ(Report("training", 2).membership(), 2u);
  EXPECT_EQ(Observed().progress().step(), 0);
  // It is written once.
  Desire({Membership(Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING), 2)});
  EXPECT_THAT(Actions<ReassignRank>(), IsEmpty());
  EXPECT_THAT(Actions<StartRank>(), IsEmpty());
}

TEST_F(DaemonCoreTest, CallsOfAnEarlierMembership_AreToBeRepeated) {
  RunRank();
  v1::GetRequest get;
  *get.mutable_identity() = Identity(kRank0);
  get.set_key("address");
  Do(RankCall{CallId(50), get});
  EXPECT_THAT(Sent(), ElementsAre("get"));
  Desire({Membership(Wanted(kAttempt, v1::DESIRED_PHASE_PREPARED), 2)});
  ASSERT_THAT(Actions<ReplyToRank>(), SizeIs(1));
  EXPECT_THAT(Actions<ReplyToRank>()[0].response.status(),
              StatusIs(absl::StatusCode::kUnavailable));
  Do(RankCall{CallId(51), get});
  ASSERT_THAT(Actions<ReplyToRank>(), SizeIs(1));
  EXPECT_THAT(Actions<ReplyToRank>()[0].response.status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("was replaced by 2")));
  get.mutable_identity()->set_membership(2);
  Do(RankCall{CallId(52), get});
  EXPECT_EQ(SentOf(v1::FromWorker::kGet).get().membership(), 2u);
}

TEST_F(DaemonCoreTest, DaemonThatIsRestarted_KnowsTheMembershipAndTellsItsRanksAgain) {
  RunRank();
  Desire({Membership(Wanted(kAttempt, v1::DESIRED_PHASE_PREPARED), 2)});
  Restart();
  Do(RankStarted{kRank0, 100});
  EXPECT_EQ(core_->Observe().attempts(0).membership(), 2u);
  EXPECT_THAT(Actions<ReassignRank>(), IsEmpty()) << "it does not know the assignment yet";
  Connect();
  Desire({Membership(Wanted(kAttempt, v1::DESIRED_PHASE_PREPARED), 2)});
  EXPECT_THAT(Actions<ReassignRank>(), SizeIs(1));
}

TEST_F(DaemonCoreTest, AssignmentThatCannotBeWritten_RefusesTheAttempt) {
  RunRank();
  Desire({Membership(Wanted(kAttempt, v1::DESIRED_PHASE_PREPARED), 2)});
  Do(RankReassigned{kRank0, 2, absl::UnavailableError("no space left")});
  EXPECT_EQ(core_->Observe().attempts(0).refusal(), "no space left");
  EXPECT_EQ(Report("bootstrapping", 0).membership(), 1u) << "it must not read the old one";
  EXPECT_THAT(Actions<ReassignRank>(), IsEmpty());
}

// It ended with peers that were replaced, which is none of its faults, and has not done the work.
TEST_F(DaemonCoreTest, RankThatEndsBeforeItLearnsOfTheMembership_HasNotCompleted) {
  for (const v1::Cause cause : {v1::CAUSE_COMPLETED, v1::CAUSE_COMMUNICATION, v1::CAUSE_CRASH}) {
    for (const bool learns : {false, true}) {
      records_.clear();
      Restart();
      RunRank();
      Desire({Membership(Wanted(kAttempt, v1::DESIRED_PHASE_PREPARED), 2)});
      Do(RankReassigned{kRank0, 2, absl::OkStatus()});
      if (learns) {
        v1::ReportRequest report;
        *report.mutable_identity() = Identity(kRank0);
        report.mutable_identity()->set_membership(2);
        Do(RankCall{CallId(++call_), report});
      }
      Exit(kRank0, 0, cause);
      const bool own = learns || cause == v1::CAUSE_CRASH;
      EXPECT_EQ(Observed().exit().cause(), own ? cause : v1::CAUSE_LAUNCH) << learns;
    }
  }
}

TEST_F(DaemonCoreTest, EarlierMembership_CanOnlyEndTheAttempt) {
  RunRank();
  Desire({Membership(Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING), 2)});
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_RUNNING)});
  EXPECT_EQ(core_->Observe().attempts(0).membership(), 2u);
  Desire({Wanted(kAttempt, v1::DESIRED_PHASE_STOPPED)});
  EXPECT_THAT(Actions<SignalRank>(), SizeIs(1));
  EXPECT_EQ(core_->Observe().attempts(0).membership(), 2u);
}

TEST_F(DaemonCoreTest, Record_Unreadable_IsDataLossAndNamed) {
  DaemonOutput output;
  EXPECT_THAT(DaemonCore::Recover(Config(), {{"attempt.x.e1", "\xff"}}, now_, &output).status(),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("attempt.x.e1")));
}

TEST(DirectoryNameTest, JobIdWithSeparators_StaysOneFileName) {
  EXPECT_EQ(DirectoryName({JobId("../../etc"), Epoch(1)}), "%2E%2E%2F%2E%2E%2Fetc.e1");
}

}  // namespace
}  // namespace muster::worker
