// Jobs that share devices, in the core: who holds what, what it counts as, and what is told of it.
#include <gmock/gmock.h>

#include <string>

#include "coordinator/core/device_account.h"
#include "proto/class_time.h"
#include "proto/time.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class SharesTest : public CoreTest {
 protected:
  // Opens a session of a daemon with one slot, which shares devices.
  void HelloOfOneSlot(const v1::Observed& observed = {}, uint32_t version = 4) {
    SessionOpened hello = HelloOf("w", 1);
    hello.hello.set_protocol_version(version);
    *hello.hello.mutable_observed() = observed;
    session_ = hello.session;
    Handle(hello);
    if (const auto desired = LastDesired()) revision_ = desired->revision();
  }
  void SubmitShare(const std::string& name, double share, int32_t priority = 50) {
    v1::JobSpec spec = Spec(1);
    spec.set_name(name);
    spec.set_priority(priority);
    if (share < 1) spec.mutable_resources()->set_share(share);
    Handle(SubmitEvent{CallId(1), spec, name});
    if (const auto desired = LastDesired()) revision_ = desired->revision();
    ASSERT_OK(Actions<ReplyAction>()[0].status);
  }
  v1::Job Find(const std::string& name) const { return core_->GetJob(name).value(); }
  // All jobs of these names are in the state.
  v1::Observed All(const std::vector<std::string>& names, v1::RankState state) const {
    v1::Observed observed;
    for (const std::string& name : names) {
      *observed.add_attempts() = Ranks(Find(name), state).attempts(0);
    }
    return observed;
  }
  void Train(const std::vector<std::string>& names) {
    Observe(All(names, v1::RANK_STATE_PREPARED));
    Observe(All(names, v1::RANK_STATE_TRAINING));
  }
  double SecondsOf(const std::string& name) const {
    const v1::Usage usage = Find(name).usage();
    double seconds = 0;
    for (const v1::ClassTime& time : usage.times()) {
      seconds += time.device_seconds() +
                 DevicesIn(time) * absl::ToDoubleSeconds(now_ - FromProto(usage.as_of()));
    }
    return seconds;
  }
};

TEST_F(SharesTest, TwoHalves_HoldOneDeviceAndTheSumOfTheirTimeIsThatOfTheDevice) {
  HelloOfOneSlot();
  SubmitShare("a", 0.5);
  SubmitShare("b", 0.333);
  SubmitShare("c", 0.5);
  EXPECT_EQ(Find("b").state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(WaitOf("c").code(), v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_EQ(WaitOf("c").slots_shared(), 1);
  Train({"a", "b"});
  const v1::Worker worker = core_->ListWorkers()[0];
  EXPECT_EQ(worker.slots_free(), 0);
  EXPECT_DOUBLE_EQ(worker.slots_used(), 0.833);
  EXPECT_DOUBLE_EQ(worker.devices(0).used(), 0.833);
  EXPECT_THAT(worker.devices(0).jobs(), ElementsAre("a", "b"));
  const double a = SecondsOf("a"), b = SecondsOf("b");
  Wait(absl::Seconds(60));  // its invariants: all accounts add up to the device's time
  EXPECT_DOUBLE_EQ(SecondsOf("a") - a, 30);
  EXPECT_NEAR(SecondsOf("b") - b, 0.333 * 60, 1e-9);
}

TEST_F(SharesTest, RestartOfTheCoordinator_KnowsWhoHoldsWhat) {
  HelloOfOneSlot();
  SubmitShare("a", 0.5);
  SubmitShare("b", 0.5);
  Train({"a", "b"});
  Restart();
  EXPECT_THAT(core_->CheckInvariants(), IsEmpty());
  HelloOfOneSlot(All({"a", "b"}, v1::RANK_STATE_TRAINING));
  EXPECT_EQ(Find("a").attempts(), 1);
  EXPECT_EQ(Find("b").attempts(), 1);
  EXPECT_THAT(core_->ListWorkers()[0].devices(0).jobs(), ElementsAre("a", "b"));
}

TEST_F(SharesTest, JobWithALargerPriority_GetsTheWholeDeviceOnceBothHaveReleasedIt) {
  HelloOfOneSlot();
  SubmitShare("a", 0.5);
  SubmitShare("b", 0.5);
  Train({"a", "b"});
  SubmitShare("urgent", 1, 90);
  EXPECT_EQ(Find("a").state(), v1::JOB_STATE_PREEMPTING);
  EXPECT_EQ(Find("b").state(), v1::JOB_STATE_PREEMPTING);
  EXPECT_EQ(WaitOf("urgent").stopping_size(), 2);
  v1::Observed half = All({"a", "b"}, v1::RANK_STATE_TRAINING);
  *half.mutable_attempts(0) =
      Ranks(Find("a"), v1::RANK_STATE_RELEASED, {{0, v1::CAUSE_PREEMPTED}}).attempts(0);
  Observe(half);
  EXPECT_EQ(Find("a").state(), v1::JOB_STATE_QUEUED) << "what it left is kept";
  EXPECT_EQ(Find("urgent").state(), v1::JOB_STATE_QUEUED);
  Restart();
  *half.mutable_attempts(1) =
      Ranks(Find("b"), v1::RANK_STATE_RELEASED, {{0, v1::CAUSE_PREEMPTED}}).attempts(0);
  HelloOfOneSlot(half);
  EXPECT_EQ(Find("urgent").state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(core_->ListWorkers()[0].slots_used(), 1.0);
}

TEST_F(SharesTest, DaemonThatIsTooOld_GetsNoJobWithAShareAndIsNamed) {
  HelloOfOneSlot({}, 3);
  SubmitShare("half", 0.5);
  EXPECT_EQ(Find("half").state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(WaitOf("half").code(), v1::WAIT_CODE_CLUSTER_TOO_SMALL);
  EXPECT_EQ(WaitOf("half").slots_total(), 0);
  ASSERT_EQ(WaitOf("half").change().workers_return_size(), 1);
  EXPECT_EQ(WaitOf("half").change().workers_return(0).worker(), "w");
  SubmitShare("whole", 1);
  ASSERT_EQ(Find("whole").state(), v1::JOB_STATE_PLACING)
      << "one that cannot start holds back none";
  Observe(Ranks(Find("whole"), v1::RANK_STATE_PREPARED));
  Observe(Ranks(Find("whole"), v1::RANK_STATE_TRAINING));
  Handle(SessionClosed{session_});
  EXPECT_EQ(WaitOf("half").slots_total(), 0) << "while it is away";
  HelloOfOneSlot(Ranks(Find("whole"), v1::RANK_STATE_TRAINING), 4);
  EXPECT_EQ(WaitOf("half").code(), v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_EQ(WaitOf("half").slots_total(), 1);
  Observe(Ranks(Find("whole"), v1::RANK_STATE_RELEASED, {{0, v1::CAUSE_COMPLETED}}));
  EXPECT_EQ(Find("half").state(), v1::JOB_STATE_PLACING);
}

TEST_F(SharesTest, RestartOfTheCoordinator_TakesDaemonsForNewUntilTheySayHello) {
  HelloOfOneSlot({}, 3);
  SubmitShare("half", 0.5);
  Restart();
  EXPECT_EQ(WaitOf("half").code(), v1::WAIT_CODE_SLOTS_TAKEN);
  HelloOfOneSlot({}, 3);
  EXPECT_EQ(WaitOf("half").code(), v1::WAIT_CODE_CLUSTER_TOO_SMALL);
}

TEST_F(SharesTest, PlanBesideADaemonThatIsTooOld_CanBeMadeAgain) {
  SessionOpened older = HelloOf("a", 1);
  older.hello.set_protocol_version(3);
  Handle(older);
  HelloOfOneSlot();
  SubmitShare("half", 0.5);
  ASSERT_EQ(Find("half").ranks(0).worker(), "w");
  DecisionReplay decisions;
  ASSERT_OK(Replay(*store_, nullptr, 0, &decisions).status());
  EXPECT_EQ(decisions.report().plans, 1);
  EXPECT_THAT(decisions.report().differences, IsEmpty());
  // It would have taken the rank.
  Batch rows;
  ASSERT_OK(
      store_->Scan(Table::kLog, "", "", [&](const std::string& key, const std::string& value) {
        v1::LogEntry entry;
        EXPECT_TRUE(entry.ParseFromString(value));
        for (v1::PlanRecord& plan : *entry.mutable_plans()) {
          EXPECT_THAT(plan.undivided(), ElementsAre("a"));
          plan.clear_undivided();
        }
        rows.Put(Table::kLog, key, entry.SerializeAsString());
        return true;
      }));
  const std::unique_ptr<MemoryStore> changed = store_->Copy();
  ASSERT_OK(changed->Write({rows}));
  DecisionReplay without;
  ASSERT_OK(Replay(*changed, nullptr, 0, &without).status());
  ASSERT_EQ(without.report().differences.size(), 1u);
  EXPECT_THAT(without.report().differences[0].now, HasSubstr("starts on a/"));
}

TEST_F(SharesTest, DrainedWorker_IsDrainedWhenBothHaveLeft) {
  HelloOfOneSlot();
  SubmitShare("a", 0.5);
  SubmitShare("b", 0.5);
  Train({"a", "b"});
  v1::DrainRequest drain;
  drain.add_workers("w");
  drain.mutable_timeout();  // at once
  FleetEvent event;
  event.call = CallId(5);
  event.request = drain;
  Handle(event);
  v1::Observed observed = All({"a", "b"}, v1::RANK_STATE_RELEASED);
  v1::ObservedAttempt b = observed.attempts(1);
  *observed.mutable_attempts(1) = Ranks(Find("b"), v1::RANK_STATE_TRAINING).attempts(0);
  Observe(observed);
  EXPECT_FALSE(core_->ListWorkers()[0].cordon().drained());
  *observed.mutable_attempts(1) = b;
  Observe(observed);
  EXPECT_TRUE(core_->ListWorkers()[0].cordon().drained());
}

// A spare is a whole device, in its number and in the time that is counted for it.
TEST_F(SharesTest, DeviceThatIsShared_IsNoSpare) {
  HelloOfOneSlot();
  SubmitShare("a", 0.5);
  Train({"a"});
  v1::QueuePolicy policy;
  v1::SparePolicy& spares = *policy.add_spares();
  spares.set_level(v1::TOPOLOGY_LEVEL_CLUSTER);
  (*spares.mutable_devices())["cpu"] = 1;
  const auto status = [this] { return core_->GetQueues(now_).spares(0); };
  Handle(ApplyQueuesEvent{CallId(5), policy, {}});
  EXPECT_EQ(status().free(), 0);
  EXPECT_EQ(status().domains_short(), 1);
  Handle(CancelEvent{CallId(6), "a"});
  Observe(Ranks(Find("a"), v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Find("a").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(core_->ListWorkers()[0].slots_free(), 1);
  EXPECT_EQ(status().free(), 1);
  Wait(absl::Seconds(60));  // its invariants: all accounts add up to the device's time
  EXPECT_EQ(status().free(), 0) << "nothing was heard of its worker";
  HelloOfOneSlot();
  EXPECT_EQ(status().free(), 1);
  SubmitShare("b", 0.5);
  EXPECT_EQ(Find("b").state(), v1::JOB_STATE_QUEUED);
}

}  // namespace
}  // namespace muster::coordinator
