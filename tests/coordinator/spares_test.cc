// Devices that are kept free for jobs that recover from a fault.
#include "coordinator/scheduler/spares.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/scheduler/scheduler.h"
#include "tests/coordinator/core_fixture.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

v1::QueuePolicy Keep(v1::TopologyLevel level, int64_t devices) {
  v1::QueuePolicy policy;
  v1::SparePolicy& spares = *policy.add_spares();
  spares.set_level(level);
  (*spares.mutable_devices())["cpu"] = devices;
  return policy;
}

// Two racks of two workers with four slots each.
class SparesTest : public ::testing::Test {
 protected:
  SparesTest() {
    for (int i = 0; i < 4; ++i) {
      WorkerView worker{.id = WorkerId(absl::StrCat("w", i)), .ready = true};
      worker.path.names[DepthOf(v1::TOPOLOGY_LEVEL_RACK)] = absl::StrCat("r", i / 2);
      for (int slot = 0; slot < 4; ++slot) {
        worker.slots.push_back({.device = absl::StrCat("cpu:", slot)});
      }
      slots_.Put(std::move(worker));
    }
  }
  void Define(const v1::QueuePolicy& policy) {
    auto tree = QueueTree::Make(policy);
    ASSERT_OK(tree.status());
    tree_ = *std::move(tree);
    use_ = QueueUse(tree_);
  }
  void Wait(const std::string& id, int ranks, int recovering = 0, int group = 1,
            int32_t share = kWholeDevice) {
    WaitingJob job;
    job.id = JobId(id);
    job.name = id;
    job.queue = "default";
    job.ranks = ranks;
    job.group = group;
    job.submit_sequence = ++sequence_;
    job.recovering = recovering;
    job.share = share;
    waiting_.Add(std::move(job));
  }
  Schedule Plan() {
    const SlotIndex before = slots_;
    Schedule plan = coordinator::Plan(Cluster(), waiting_, SchedulePolicy(), now_);
    EXPECT_EQ(slots_, before);
    return plan;
  }
  Snapshot Cluster() { return {slots_, running_, kept_, tree_, use_, history_}; }
  static std::vector<std::string> Started(const Schedule& plan) {
    std::vector<std::string> ids;
    for (const Decision& decision : plan.decisions) {
      if (const auto* start = std::get_if<Start>(&decision)) ids.push_back(start->job.value());
    }
    return ids;
  }
  void Hold(const std::string& worker, int slots) {
    for (int i = 0; i < slots; ++i) {
      slots_.SetHolder(WorkerId(worker), absl::StrCat("cpu:", i), JobId("other"));
    }
  }

  const absl::Time now_ = absl::FromUnixSeconds(1000);
  SlotIndex slots_;
  RunningJobs running_;
  KeptSlots kept_;
  QueueTree tree_;
  QueueUse use_{tree_};
  QueueHistory history_;
  WaitingQueue waiting_;
  uint64_t sequence_ = 0;
};

TEST_F(SparesTest, NewJob_LeavesThemFree_OneThatRecoversTakesThem) {
  Define(Keep(v1::TOPOLOGY_LEVEL_RACK, 4));
  Wait("new", 9);
  const Schedule waits = Plan();
  EXPECT_THAT(Started(waits), IsEmpty());
  ASSERT_EQ(waits.explanations.size(), 1u);
  const v1::WaitReason reason = waits.explanations[0].reason();
  EXPECT_EQ(reason.code(), v1::WAIT_CODE_SPARES);
  EXPECT_EQ(reason.slots_spare(), 8);
  EXPECT_TRUE(reason.lasting()) << "eight of sixteen are none at best";
  Wait("recovers", 9, 9);
  EXPECT_THAT(Started(Plan()), ::testing::ElementsAre("recovers"));
}

// Two racks of eight devices, four of each are to be spares. A gang of nine takes all of one rack
// and one device of the other.
TEST_F(SparesTest, JobWithAShare_TakesOneOnlyWhenItRecovers) {
  for (const int32_t share : {500, kWholeDevice}) {
    waiting_ = WaitingQueue();
    Define(Keep(v1::TOPOLOGY_LEVEL_RACK, 4));
    Wait("new", 9, 0, 1, share);
    const Schedule waits = Plan();
    EXPECT_THAT(Started(waits), IsEmpty());
    ASSERT_EQ(waits.explanations.size(), 1u);
    EXPECT_EQ(waits.explanations[0].reason().code(), v1::WAIT_CODE_SPARES);
    Wait("recovers", 9, 9, 1, share);
    const Schedule plan = Plan();
    ASSERT_THAT(Started(plan), ::testing::ElementsAre("recovers"));
    SlotIndex after = slots_;
    for (const v1::Placement& placement : std::get<Start>(plan.decisions[0]).placements) {
      after.SetShare(WorkerId(placement.worker()), placement.device(), JobId("recovers"), share);
    }
    EXPECT_EQ(SpareDevices(after, tree_).free, 4);
    EXPECT_EQ(SpareDevices(after, tree_).missing, 4) << "what is left of a device is no spare";
  }
}

TEST_F(SparesTest, JobThatFitsBesideThem_TakesNone) {
  Define(Keep(v1::TOPOLOGY_LEVEL_RACK, 4));
  Wait("recovers", 8, 8);
  const Schedule plan = Plan();
  ASSERT_EQ(Started(plan).size(), 1u);
  for (const v1::Placement& placement : std::get<Start>(plan.decisions[0]).placements) {
    slots_.SetHolder(WorkerId(placement.worker()), placement.device(), JobId("recovers"));
  }
  EXPECT_EQ(SpareDevices(slots_, tree_).free, 8);
  EXPECT_EQ(SpareDevices(slots_, tree_).missing, 0);
}

TEST_F(SparesTest, JobThatCouldNeverStartBesideThem_HoldsBackNone) {
  Define(Keep(v1::TOPOLOGY_LEVEL_CLUSTER, 4));
  Wait("large", 13);
  Wait("small", 4);
  const Schedule plan = Plan();
  EXPECT_THAT(Started(plan), ::testing::ElementsAre("small"));
  ASSERT_EQ(plan.explanations.size(), 1u);
  const v1::WaitReason reason = plan.explanations[0].reason();
  EXPECT_EQ(reason.code(), v1::WAIT_CODE_SPARES);
  EXPECT_TRUE(reason.lasting());
  EXPECT_EQ(reason.change().spares_lowered_by(), 1);
  EXPECT_EQ(reason.change().slots_added(), 1);
  EXPECT_EQ(reason.change().ranks_at_most(), 12);
}

TEST_F(SparesTest, MoreRanksThanBefore_TakeNoSpares) {
  Define(Keep(v1::TOPOLOGY_LEVEL_CLUSTER, 4));
  Wait("grown", 13, 12);
  EXPECT_THAT(Started(Plan()), IsEmpty());
}

TEST_F(SparesTest, WholeWorkersAreKept_AndTheRestWhereLeastIsFree) {
  Define(Keep(v1::TOPOLOGY_LEVEL_CLUSTER, 5));
  Hold("w0", 3);
  SlotIndex::Trial trial(slots_);
  EXPECT_EQ(HoldSpares(trial, tree_), 0);
  EXPECT_EQ(slots_.WorkersOf(SpareHolder()), (std::set<WorkerId>{WorkerId("w0"), WorkerId("w1")}));
}

TEST_F(SparesTest, SparesOfRacks_CountForTheCluster) {
  v1::QueuePolicy policy = Keep(v1::TOPOLOGY_LEVEL_CLUSTER, 6);
  *policy.add_spares() = Keep(v1::TOPOLOGY_LEVEL_RACK, 2).spares(0);
  Define(policy);
  EXPECT_EQ(SpareDevices(slots_, tree_).free, 6);
  Hold("w0", 4);
  Hold("w1", 4);
  EXPECT_EQ(SpareDevices(slots_, tree_).missing, 2);
  const std::vector<v1::SpareStatus> status = CountSpares(slots_, tree_);
  ASSERT_EQ(status.size(), 2u);
  EXPECT_EQ(status[0].level(), v1::TOPOLOGY_LEVEL_RACK);
  EXPECT_EQ(status[0].domains(), 2);
  EXPECT_THAT(status[0].short_names(), ::testing::ElementsAre("r0"));
}

TEST_F(SparesTest, WorkerThatIsAvoided_IsNoSpare) {
  Define(Keep(v1::TOPOLOGY_LEVEL_RACK, 4));
  WorkerView bad = *slots_.Find(WorkerId("w0"));
  bad.standing = v1::WORKER_STANDING_AVOIDED;
  slots_.Put(bad);
  SlotIndex::Trial trial(slots_);
  HoldSpares(trial, tree_);
  EXPECT_FALSE(slots_.WorkersOf(SpareHolder()).contains(WorkerId("w0")));
}

TEST_F(SparesTest, SlotsOfAJobThatEnds_BecomeSparesFirst) {
  Define(Keep(v1::TOPOLOGY_LEVEL_CLUSTER, 4));
  for (const char* worker : {"w0", "w1", "w2", "w3"}) Hold(worker, 4);
  RunningJob other{.name = "other", .queue = "default", .ranks = 16};
  other.ends_at = now_ + absl::Hours(1);
  running_.Put(JobId("other"), other);
  use_.Count(tree_, 0, v1::DEVICE_KIND_CPU, 16, "", 1);
  Wait("new", 12);
  EXPECT_EQ(coordinator::Explain(Cluster(), waiting_, SchedulePolicy(), now_, JobId("new"))
                .reason.estimated_start()
                .seconds(),
            absl::ToUnixSeconds(other.ends_at));
}

TEST(SparePolicyTest, WhatCannotBe_IsRefusedByField) {
  v1::QueuePolicy policy = Keep(v1::TOPOLOGY_LEVEL_HOST, 1);
  *policy.add_spares() = Keep(v1::TOPOLOGY_LEVEL_RACK, -1).spares(0);
  *policy.add_spares() = Keep(v1::TOPOLOGY_LEVEL_RACK, 1).spares(0);
  policy.add_spares();
  policy.mutable_reputation()->set_avoid_above(0);
  const absl::Status status = QueueTree::Make(policy).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  for (const char* line :
       {"spares[0].level: spares of a host are lost with it", "spares[1].devices.cpu: -1 is out of",
        "spares[2].level: there are two of level rack", "spares[3].level: required",
        "spares[3].devices: required", "reputation.avoid_above: 0 is out of range"}) {
    EXPECT_THAT(status.message(), HasSubstr(line));
  }
}

using SparesCoreTest = CoreTest;

TEST_F(SparesCoreTest, DeviceThatIsKeptFree_IsOfTheClassSpare) {
  Hello();
  Handle(ApplyQueuesEvent{CallId(5), Keep(v1::TOPOLOGY_LEVEL_CLUSTER, 1), {}});
  std::vector<FleetUsageChanged> changed = Actions<FleetUsageChanged>();
  ASSERT_EQ(changed.size(), 1u);
  EXPECT_EQ(changed[0].usage.times_size(), 2);
  EXPECT_EQ(changed[0].usage.times(1).usage_class(), v1::USAGE_CLASS_SPARE);
  EXPECT_EQ(changed[0].usage.times(1).devices(), 1);
  Submit("r", 1);
  EXPECT_EQ(core_->GetQueues(now_).spares(0).free(), 1);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
}

TEST_F(SparesCoreTest, JobWhoseDeviceFailed_RecoversOnASpare) {
  Hello();
  Handle(ApplyQueuesEvent{CallId(5), Keep(v1::TOPOLOGY_LEVEL_CLUSTER, 1), {}});
  Submit("r", 1);
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
  const std::string broken = Job().ranks(0).device();
  Observe(Ranks(Job(), v1::RANK_STATE_RELEASED, {{0, v1::CAUSE_DEVICE}}));
  // Its daemon offers the device no more.
  SessionOpened hello = HelloOf("w", 2);
  session_ = hello.session;
  for (v1::Device& device : *hello.hello.mutable_devices()) {
    if (device.name() == broken) device.set_unusable("broken");
  }
  Handle(hello);
  Wait(absl::Seconds(2));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING) << "after the back-off";
  EXPECT_NE(Job().ranks(0).device(), broken);
}

TEST_F(SparesCoreTest, PolicyThatGuaranteesMoreThanThereIs_OrLetsNothingRun_IsWarnedOf) {
  Hello();
  v1::QueuePolicy policy;
  v1::QueueSpec& queue = *policy.add_queues();
  queue.set_name("research");
  (*queue.mutable_guaranteed())["cpu"] = 2;
  Handle(ApplyQueuesEvent{CallId(5), policy, {}});
  ASSERT_EQ(Actions<ReplyAction>().size(), 1u);
  EXPECT_THAT(Actions<ReplyAction>()[0].warnings, ::testing::IsEmpty());
  (*policy.mutable_queues(0)->mutable_guaranteed())["cpu"] = 3;
  policy.mutable_queues(0)->set_running_jobs_max(0);
  Handle(ApplyQueuesEvent{CallId(6), policy, {}});
  ASSERT_EQ(Actions<ReplyAction>().size(), 1u);
  EXPECT_THAT(Actions<ReplyAction>()[0].warnings,
              ::testing::ElementsAre(
                  HasSubstr("queues: 3 cpu are guaranteed in all, and all workers have 2"),
                  HasSubstr("queues[0].running_jobs_max: 0, so that no job of queue research")));
}

TEST_F(SparesCoreTest, PolicyThatKeepsAllOfADomain_IsWarnedOf) {
  Hello();
  Handle(ApplyQueuesEvent{CallId(5), Keep(v1::TOPOLOGY_LEVEL_CLUSTER, 2), {}});
  const auto replies = Actions<ReplyAction>();
  ASSERT_EQ(replies.size(), 1u);
  ASSERT_EQ(replies[0].warnings.size(), 1u);
  EXPECT_THAT(replies[0].warnings[0], HasSubstr("spares[0].devices.cpu: in cluster"));
  Submit("r", 1);
  EXPECT_EQ(WaitOf("job").code(), v1::WAIT_CODE_SPARES);
}

}  // namespace
}  // namespace muster::coordinator
