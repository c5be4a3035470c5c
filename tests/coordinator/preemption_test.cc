#include "coordinator/scheduler/preemption.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "coordinator/scheduler/placement.h"
#include "coordinator/scheduler/scheduler.h"
#include "proto/time.h"
#include "tests/support/sanitized.h"
#include "tests/support/scheduled_jobs.h"
#include "tests/support/seed.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::WaitingGang;

const absl::Time kNow = absl::FromUnixSeconds(100'000);

// Queues `default` and `other`, without quota.
v1::QueuePolicy TwoQueues() {
  v1::QueuePolicy policy;
  policy.add_queues()->set_name("default");
  policy.add_queues()->set_name("other");
  return policy;
}

// Workers with CPU slots, and jobs that hold some of them.
struct Cluster {
  void AddWorker(int slots, const std::string& rack = "") {
    WorkerView worker;
    worker.id = WorkerId(absl::StrCat("w", slots_of.size()));
    worker.ready = true;
    worker.path.names[2] = rack;
    for (int i = 0; i < slots; ++i) {
      SlotView slot;
      slot.device = absl::StrCat("cpu:", i);
      worker.slots.push_back(slot);
    }
    index.Put(worker);
    slots_of.push_back(slots);
  }
  // A job that has run for an hour and saved its work so long ago.
  void Run(const std::string& name, int32_t priority, const std::vector<Slot>& slots,
           absl::Duration unsaved = absl::ZeroDuration(), const std::string& queue = "default") {
    RunningJob job;
    job.name = name;
    job.queue = queue;
    job.priority = priority;
    job.ranks = static_cast<int32_t>(slots.size());
    job.started_at = kNow - absl::Hours(1);
    job.saved_at = kNow - unsaved;
    running.Put(JobId(name), job);
    for (const Slot& slot : slots) index.SetHolder(slot.worker, slot.device, JobId(name));
  }
  void Change(const std::string& name, void (*change)(RunningJob&)) {
    RunningJob job = *running.Find(JobId(name));
    change(job);
    running.Put(JobId(name), job);
  }
  // What a coordinator does with the decision.
  void CarryOut(const Preempt& preempt, const WaitingJob& job) {
    for (const JobId& id : preempt.eviction.outbid) Drop(id);
    Kept& mine = kept[job.id];
    mine = {job.queue, job.priority, job.device, job.tenant, {}};
    for (const Slot& slot : preempt.eviction.slots) mine.slots.insert(slot);
    for (const JobId& id : preempt.eviction.stopped) {
      Change(id.value(), [](RunningJob& stopped) { stopped.stopping = true; });
    }
    HoldKept();
  }
  void Drop(const JobId& id) {
    for (const Slot& slot : kept[id].slots) {
      if (HolderOf(slot) == id) index.SetHolder(slot.worker, slot.device, JobId());
    }
    kept.erase(id);
  }
  // The job has released its slots.
  void Release(const std::string& name) {
    for (const auto& [id, worker] : std::map<WorkerId, WorkerView>(index.workers())) {
      for (const SlotView& slot : worker.slots) {
        if (slot.held_by == JobId(name)) index.SetHolder(id, slot.device, JobId());
      }
    }
    running.Remove(JobId(name));
    HoldKept();
  }
  void HoldKept() {
    for (const auto& [id, of] : kept) {
      for (const Slot& slot : of.slots) {
        if (HolderOf(slot) == JobId()) index.SetHolder(slot.worker, slot.device, id);
      }
    }
  }
  JobId HolderOf(const Slot& slot) const {
    for (const SlotView& view : index.Find(slot.worker)->slots) {
      if (view.device == slot.device) return view.held_by;
    }
    return JobId();
  }
  Schedule Plan(const std::vector<WaitingJob>& jobs, absl::Time now = kNow) {
    WaitingQueue queue;
    for (const WaitingJob& job : jobs) queue.Add(job);
    const SlotIndex before = index;
    const QueueTree tree = *QueueTree::Make(policy);
    QueueUse use(tree);
    for (const auto& [id, job] : running.all()) {
      use.Count(tree, tree.Find(job.queue), job.device, job.ranks, job.tenant, 1);
    }
    Schedule plan =
        coordinator::Plan({index, running, kept, tree, use, history}, queue, SchedulePolicy(), now);
    EXPECT_EQ(index, before) << "a plan leaves the slots as they were";
    return plan;
  }

  SlotIndex index;
  RunningJobs running;
  KeptSlots kept;
  std::vector<int> slots_of;
  v1::QueuePolicy policy = TwoQueues();
  QueueHistory history;
};

Slot At(int worker, int device) {
  return {WorkerId(absl::StrCat("w", worker)), absl::StrCat("cpu:", device)};
}

std::vector<std::string> Stopped(const Schedule& plan) {
  std::vector<std::string> names;
  for (const Decision& decision : plan.decisions) {
    const auto* preempt = std::get_if<Preempt>(&decision);
    if (preempt == nullptr) continue;
    for (const JobId& id : preempt->eviction.stopped) names.push_back(id.value());
  }
  return names;
}

TEST(Preemption, OfJobsWithASmallerPriority_TheOneThatLosesLeastIsStopped) {
  Cluster cluster;
  cluster.AddWorker(2);
  cluster.AddWorker(2);
  cluster.Run("long-unsaved", 10, {At(0, 0), At(0, 1)}, absl::Minutes(20));
  cluster.Run("just-saved", 20, {At(1, 0), At(1, 1)}, absl::Seconds(5));
  const Schedule plan = cluster.Plan({WaitingGang("urgent", 2, 90)});
  EXPECT_EQ(Stopped(plan), std::vector<std::string>{"just-saved"});
  ASSERT_EQ(plan.explanations.size(), 1u);
  const v1::WaitReason& reason = plan.explanations[0].reason();
  EXPECT_EQ(reason.code(), v1::WAIT_CODE_SLOTS_KEPT);
  ASSERT_EQ(reason.stopping_size(), 1);
  EXPECT_EQ(reason.stopping(0).job_name(), "just-saved");
  EXPECT_EQ(reason.stopping(0).slots(), 2);
}

TEST(Preemption, EqualPriorityOrAnotherQueue_IsLeftAlone) {
  Cluster cluster;
  cluster.AddWorker(4);
  cluster.Run("equal", 50, {At(0, 0), At(0, 1)});
  cluster.Run("elsewhere", 10, {At(0, 2), At(0, 3)}, absl::ZeroDuration(), "other");
  const Schedule plan = cluster.Plan({WaitingGang("job", 2, 50)});
  EXPECT_TRUE(plan.decisions.empty());
  EXPECT_EQ(plan.explanations[0].reason().code(), v1::WAIT_CODE_SLOTS_TAKEN);
}

TEST(Preemption, JobThatHasJustStarted_IsStoppedOnlyAfterItsMinRuntime) {
  Cluster cluster;
  cluster.AddWorker(1);
  cluster.Run("young", 10, {At(0, 0)});
  cluster.Change("young", [](RunningJob& job) {
    job.started_at = kNow - absl::Seconds(10);
    job.min_runtime = absl::Seconds(30);
  });
  const WaitingJob urgent = WaitingGang("urgent", 1, 90);
  const Schedule early = cluster.Plan({urgent});
  EXPECT_TRUE(early.decisions.empty());
  EXPECT_EQ(early.wake_at, kNow + absl::Seconds(20));
  EXPECT_EQ(Stopped(cluster.Plan({urgent}, early.wake_at)), std::vector<std::string>{"young"});
}

TEST(Preemption, SlotsThatAreReleasedAnyway_AreWaitedForWithoutStoppingMore) {
  Cluster cluster;
  cluster.AddWorker(2);
  cluster.Run("ends", 10, {At(0, 0)});
  cluster.Run("goes-on", 10, {At(0, 1)});
  cluster.Change("ends", [](RunningJob& job) { job.stopping = true; });
  const WaitingJob one = WaitingGang("one", 1, 90), two = WaitingGang("two", 2, 90);
  const Schedule waits = cluster.Plan({one});
  ASSERT_EQ(waits.decisions.size(), 1u);
  EXPECT_EQ(std::get<Reserve>(waits.decisions[0]).starts_at, kNow + kStopExpected);
  EXPECT_EQ(Stopped(cluster.Plan({two})), std::vector<std::string>{"goes-on"});
}

TEST(Preemption, KeptSlots_GoToTheWinnerAndToNobodyElse) {
  Cluster cluster;
  cluster.AddWorker(2);
  cluster.Run("victim", 10, {At(0, 0)});  // the other slot is free
  const WaitingJob winner = WaitingGang("winner", 2, 90);
  WaitingJob other = WaitingGang("other", 1, 95);
  other.queue = "other";
  const Schedule plan = cluster.Plan({winner});
  ASSERT_EQ(Stopped(plan), std::vector<std::string>{"victim"});
  cluster.CarryOut(std::get<Preempt>(plan.decisions[0]), winner);
  const Schedule meanwhile = cluster.Plan({winner, other});
  EXPECT_TRUE(meanwhile.decisions.empty()) << "one slot is free, and kept, as is the other one";
  cluster.Release("victim");
  WaitingJob victim = WaitingGang("victim-again", 1, 10);
  victim.queue = "other";
  const Schedule then = cluster.Plan({winner, other, victim});
  ASSERT_EQ(then.decisions.size(), 1u);
  EXPECT_EQ(std::get<Start>(then.decisions[0]).job, winner.id);
}

TEST(Preemption, JobThatLacksSlotsKeptForAnother_IsToldThatThisOneHasToEndToo) {
  Cluster cluster;
  cluster.AddWorker(2);
  cluster.Run("victim", 10, {At(0, 0)});
  const WaitingJob winner = WaitingGang("winner", 2, 90);
  const Schedule plan = cluster.Plan({winner});
  cluster.CarryOut(std::get<Preempt>(plan.decisions[0]), winner);
  WaitingJob other = WaitingGang("other", 2, 95);
  other.queue = "other";
  const Schedule meanwhile = cluster.Plan({winner, other});
  ASSERT_EQ(meanwhile.explanations.size(), 2u);
  const v1::WaitReason reason = meanwhile.explanations[1].reason();
  EXPECT_EQ(reason.code(), v1::WAIT_CODE_SLOTS_TAKEN);
  ASSERT_EQ(reason.change().jobs_end_size(), 2) << reason.DebugString();
  EXPECT_EQ(reason.change().jobs_end(0).job_name(), "victim");
  EXPECT_EQ(reason.change().jobs_end(1).job_name(), "winner");
}

TEST(Preemption, JobBehindOneOfAnotherQueueThatDoesNotFit_IsToldThatThisOneGoesFirst) {
  Cluster cluster;
  cluster.AddWorker(4);
  cluster.Run("runs", 90, {At(0, 0), At(0, 1), At(0, 2)}, absl::ZeroDuration(), "other");
  cluster.Change("runs", [](RunningJob& job) { job.ends_at = kNow + absl::Hours(1); });
  const WaitingJob first = WaitingGang("first", 4, 50);
  WaitingJob second = WaitingGang("second", 4, 50);
  second.queue = "other";
  const Schedule plan = cluster.Plan({first, second});
  ASSERT_EQ(plan.explanations.size(), 2u);
  EXPECT_FALSE(plan.explanations[0].reason().has_blocker());
  const v1::WaitReason reason = plan.explanations[1].reason();
  EXPECT_EQ(reason.code(), v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_EQ(reason.blocker().job_name(), "first");
  EXPECT_EQ(FromProto(reason.reserved_start()), kNow + absl::Hours(1));
  // With another worker, the end of the job on that is enough.
  cluster.AddWorker(8);
  std::vector<Slot> slots;
  for (int i = 0; i < 8; ++i) slots.push_back(At(1, i));
  cluster.Run("larger", 90, slots, absl::ZeroDuration(), "other");
  WaitingJob third = WaitingGang("third", 6, 50);
  third.queue = "other";
  const v1::WaitReason apart = cluster.Plan({first, third}).explanations[1].reason();
  EXPECT_EQ(apart.code(), v1::WAIT_CODE_SLOTS_TAKEN);
  ASSERT_EQ(apart.change().jobs_end_size(), 1);
  EXPECT_EQ(apart.change().jobs_end(0).job_name(), "larger");
  EXPECT_FALSE(apart.has_blocker()) << apart.DebugString();
}

TEST(Preemption, LargerPriority_TakesOverWhatIsKept) {
  Cluster cluster;
  cluster.AddWorker(2);
  cluster.Run("victim", 10, {At(0, 0), At(0, 1)});
  const WaitingJob first = WaitingGang("first", 2, 50), second = WaitingGang("second", 2, 90);
  const Schedule plan = cluster.Plan({first});
  cluster.CarryOut(std::get<Preempt>(plan.decisions[0]), first);
  const Schedule over = cluster.Plan({first, second});
  ASSERT_EQ(over.decisions.size(), 1u);
  const Eviction& eviction = std::get<Preempt>(over.decisions[0]).eviction;
  EXPECT_TRUE(eviction.stopped.empty());
  EXPECT_EQ(eviction.outbid, std::vector<JobId>{first.id});
}

TEST(Preemption, WorkerOfKeptSlotsThatIsGone_MakesTheWinnerChooseAgain) {
  Cluster cluster;
  cluster.AddWorker(1);
  cluster.AddWorker(1);
  cluster.Run("cheap", 10, {At(0, 0)});
  cluster.Run("dear", 10, {At(1, 0)}, absl::Hours(1));
  const WaitingJob winner = WaitingGang("winner", 1, 90);
  const Schedule plan = cluster.Plan({winner});
  ASSERT_EQ(Stopped(plan), std::vector<std::string>{"cheap"});
  cluster.CarryOut(std::get<Preempt>(plan.decisions[0]), winner);
  cluster.index.Remove(WorkerId("w0"));
  cluster.running.Remove(JobId("cheap"));
  const Schedule again = cluster.Plan({winner});
  ASSERT_EQ(again.decisions.size(), 2u);
  EXPECT_EQ(std::get<GiveUpKept>(again.decisions[0]).job, winner.id);
  EXPECT_EQ(Stopped(again), std::vector<std::string>{"dear"});
}

// Whether the job fits once these have released their slots.
bool FitsWithout(SlotIndex index, const std::vector<JobId>& gone, const WaitingJob& job) {
  SlotIndex::Trial trial(index);
  for (const JobId& id : gone) trial.Release(id);
  return PlaceGang(trial, job).has_value();
}

// On random clusters: nobody of an equal or larger priority is stopped, nobody in vain, and jobs
// are stopped exactly when that lets the gang start.
TEST(Preemption, RandomClusters_NoMoreAreStoppedThanNeeded) {
  Rng rng(testing::TestSeed());
  int preempted = 0, several = 0;
  for (int round = 0; round < 3000; ++round) {
    Cluster cluster;
    std::vector<Slot> slots;
    const int workers = 1 + static_cast<int>(rng.Below(4));
    for (int worker = 0; worker < workers; ++worker) {
      const int count = 1 + static_cast<int>(rng.Below(6));
      cluster.AddWorker(count);
      for (int i = 0; i < count; ++i) slots.push_back(At(worker, i));
    }
    std::map<std::string, std::vector<Slot>> held;
    for (const Slot& slot : slots) {
      if (rng.Below(5) > 0) held[absl::StrCat("running-", rng.Below(6))].push_back(slot);
    }
    for (const auto& [name, of] : held) {
      cluster.Run(name, static_cast<int32_t>(rng.Below(4)) * 10, of,
                  absl::Seconds(static_cast<int64_t>(rng.Below(1000))));
    }
    WaitingJob job = WaitingGang(absl::StrCat("job-", round), 1 + static_cast<int>(rng.Below(8)),
                                 static_cast<int32_t>(rng.Below(4)) * 10);
    job.group = rng.Below(2) == 0 ? 1 : 2;
    job.ranks *= job.group;
    std::vector<JobId> evictable;
    for (const auto& [name, of] : held) {
      if (cluster.running.Find(JobId(name))->priority < job.priority) {
        evictable.push_back(JobId(name));
      }
    }
    const Schedule plan = cluster.Plan({job});
    const bool could = FitsWithout(cluster.index, evictable, job);
    if (FitsWithout(cluster.index, {}, job)) {
      ASSERT_EQ(plan.decisions.size(), 1u);
      ASSERT_TRUE(std::holds_alternative<Start>(plan.decisions[0])) << "round " << round;
      continue;
    }
    ASSERT_EQ(!plan.decisions.empty(), could) << "round " << round;
    if (!could) continue;
    const Eviction& eviction = std::get<Preempt>(plan.decisions[0]).eviction;
    ++preempted;
    several += eviction.stopped.size() > 1;
    ASSERT_EQ(eviction.slots.size(), static_cast<size_t>(job.ranks));
    ASSERT_TRUE(FitsWithout(cluster.index, eviction.stopped, job)) << "round " << round;
    for (const JobId& id : eviction.stopped) {
      ASSERT_LT(cluster.running.Find(id)->priority, job.priority) << "round " << round;
      std::vector<JobId> others = eviction.stopped;
      std::erase(others, id);
      ASSERT_FALSE(FitsWithout(cluster.index, others, job))
          << "round " << round << ": " << id << " is stopped in vain";
    }
  }
  EXPECT_GT(preempted, 100);
  EXPECT_GT(several, 20);
}

// Workers of 12 slots for queues with guarantees: `owner`, whose jobs claim them, and two that
// borrow.
Cluster WithBorrowers(int64_t guaranteed_to_second) {
  Cluster cluster;
  cluster.policy.Clear();
  for (const std::string name : {"owner", "first", "second"}) {
    cluster.policy.add_queues()->set_name(name);
  }
  (*cluster.policy.mutable_queues(0)->mutable_guaranteed())["cpu"] = 2;
  (*cluster.policy.mutable_queues(2)->mutable_guaranteed())["cpu"] = guaranteed_to_second;
  cluster.AddWorker(12);
  return cluster;
}
WaitingJob OfOwner() {
  WaitingJob job = WaitingGang("job", 2, 50);
  job.queue = "owner";
  return job;
}

TEST(Preemption, OfTwoQueuesThatBorrow_TheOneBeyondItsFairShareGivesDevicesBack) {
  // By weight a queue may call 4 of 12 devices its own. `second` uses no more on average.
  Cluster cluster = WithBorrowers(0);
  for (int i = 0; i < 5; ++i) {
    cluster.Run(absl::StrCat("first-", i), 10, {At(0, 2 * i), At(0, 2 * i + 1)}, absl::Minutes(5),
                "first");
  }
  cluster.Run("a-second", 10, {At(0, 10), At(0, 11)}, absl::Minutes(5), "second");
  EXPECT_EQ(Stopped(cluster.Plan({OfOwner()})), std::vector<std::string>{"first-0"})
      << "as dear as a-second, whose name comes first";
  // Fairness outweighs work of less than 10 minutes x the part of its devices that `first` owes.
  cluster.Change("a-second", [](RunningJob& job) { job.saved_at = kNow - absl::Minutes(4); });
  EXPECT_EQ(Stopped(cluster.Plan({OfOwner()})), std::vector<std::string>{"first-0"});
  cluster.Change("a-second", [](RunningJob& job) { job.saved_at = kNow; });
  EXPECT_EQ(Stopped(cluster.Plan({OfOwner()})), std::vector<std::string>{"a-second"});
}

TEST(Preemption, WhatAQueueUsedBefore_CountsAsItsUse) {
  Cluster cluster = WithBorrowers(0);
  for (int i = 0; i < 6; ++i) {
    const std::string queue = i < 3 ? "first" : "second";
    cluster.Run(absl::StrCat(queue, "-", i), 10, {At(0, 2 * i), At(0, 2 * i + 1)}, absl::Minutes(5),
                queue);
  }
  EXPECT_EQ(Stopped(cluster.Plan({OfOwner()})), std::vector<std::string>{"first-0"}) << "by name";
  v1::QueueUsage usage;
  (*usage.mutable_device_seconds())["cpu"] = 8 * 7 * 86'400;
  *usage.mutable_as_of() = ToProto(kNow);
  cluster.history.Restore("second", usage);
  EXPECT_EQ(Stopped(cluster.Plan({OfOwner()})), std::vector<std::string>{"second-3"});
}

TEST(Preemption, WhatIsGuaranteedToAQueue_IsItsFairShareAtLeast) {
  Cluster cluster = WithBorrowers(5);
  for (int i = 0; i < 6; ++i) {
    const std::string queue = i < 3 ? "second" : "a-first";
    cluster.Run(absl::StrCat(queue, "-", i), 10, {At(0, 2 * i), At(0, 2 * i + 1)}, absl::Minutes(5),
                i < 3 ? "second" : "first");
  }
  v1::QueueUsage usage;
  (*usage.mutable_device_seconds())["cpu"] = 7 * 86'400 / std::log(2.0) * 5;
  *usage.mutable_as_of() = ToProto(kNow);
  cluster.history.Restore("first", usage);
  cluster.history.Restore("second", usage);
  EXPECT_EQ(Stopped(cluster.Plan({OfOwner()})), std::vector<std::string>{"a-first-3"})
      << "both use 5.5 on average, of 5 that are guaranteed to `second`";
}

// Racks of two workers of two slots, all of them held by jobs of one cost for each device.
TEST(Preemption, GangThatFitsOneRackAfterOneEviction_DoesNotStopJobsInTwo) {
  Cluster cluster;
  for (int i = 0; i < 6; ++i) cluster.AddWorker(2, absl::StrCat("r", i / 2));
  cluster.Run("b", 10, {At(0, 0), At(0, 1)});
  cluster.Run("stays-b", 90, {At(1, 0), At(1, 1)});
  cluster.Run("c", 10, {At(2, 0), At(2, 1)});
  cluster.Run("stays-c", 90, {At(3, 0), At(3, 1)});
  cluster.Run("whole", 10, {At(4, 0), At(4, 1), At(5, 0), At(5, 1)});
  EXPECT_EQ(Stopped(cluster.Plan({WaitingGang("urgent", 4, 50)})),
            std::vector<std::string>{"whole"});
}

TEST(Preemption, GangThatRequiresARack_GetsTheOneWhoseJobsCostLeast) {
  Cluster cluster;
  for (int i = 0; i < 4; ++i) cluster.AddWorker(2, absl::StrCat("r", i / 2));
  // 60 s a device and what was not saved.
  cluster.Run("b1", 10, {At(0, 0), At(0, 1)}, absl::Seconds(10));
  cluster.Run("b2", 10, {At(1, 0), At(1, 1)}, absl::Seconds(100));
  cluster.Run("whole", 10, {At(2, 0), At(2, 1), At(3, 0), At(3, 1)}, absl::Seconds(50));
  WaitingJob job = WaitingGang("urgent", 4, 50);
  EXPECT_EQ(Stopped(cluster.Plan({job})), (std::vector<std::string>{"whole"}));
  job.placement.required = v1::TOPOLOGY_LEVEL_RACK;
  EXPECT_EQ(Stopped(cluster.Plan({job})), (std::vector<std::string>{"whole"}));
}

TEST(Preemption, GangThatRequiresARack_MayGetAWorkerThatIsInNone) {
  Cluster cluster;
  cluster.AddWorker(2, "r0");
  cluster.AddWorker(4);
  cluster.Run("in-rack", 10, {At(0, 0), At(0, 1)});
  cluster.Run("alone", 10, {At(1, 0), At(1, 1), At(1, 2), At(1, 3)}, absl::Hours(1));
  WaitingJob job = WaitingGang("urgent", 4, 50);
  job.placement.required = v1::TOPOLOGY_LEVEL_RACK;
  EXPECT_EQ(Stopped(cluster.Plan({job})), (std::vector<std::string>{"alone"}));
}

// Small racks, where every set of jobs can be tried.
TEST(Preemption, OnRandomRacks_VictimsCostLittleMoreThanTheCheapestSetThatSuffices) {
  Rng rng(testing::TestSeed());
  double sum = 0, most = 0;
  int preempted = 0, optimal = 0;
  for (int round = 0; round < testing::Cases(4000); ++round) {
    Cluster cluster;
    std::map<std::string, std::vector<Slot>> held;
    const int workers = 2 + static_cast<int>(rng.Below(5));
    for (int worker = 0; worker < workers; ++worker) {
      const int slots = 1 + static_cast<int>(rng.Below(4));
      cluster.AddWorker(slots, absl::StrCat("r", rng.Below(3)));
      for (int i = 0; i < slots; ++i) {
        // Neighbours often are of one job.
        const std::string job = absl::StrCat("running-", (worker + rng.Below(3)) % 8);
        if (rng.Below(6) > 0) held[job].push_back(At(worker, i));
      }
    }
    std::map<JobId, double> costs;
    for (const auto& [name, of] : held) {
      const auto unsaved = static_cast<int64_t>(rng.Below(600));
      cluster.Run(name, rng.Chance(0.2) ? 90 : 10, of, absl::Seconds(unsaved));
      if (cluster.running.Find(JobId(name))->priority == 90) continue;
      costs[JobId(name)] = static_cast<double>(of.size()) * static_cast<double>(60 + unsaved);
    }
    WaitingJob job =
        WaitingGang(absl::StrCat("job-", round), 1 + static_cast<int>(rng.Below(6)), 50);
    if (rng.Chance(0.5)) job.placement.required = v1::TOPOLOGY_LEVEL_RACK;
    if (rng.Chance(0.3)) job.group = 2;
    job.ranks *= job.group;
    const Schedule plan = cluster.Plan({job});
    if (plan.decisions.empty() || std::holds_alternative<Start>(plan.decisions[0])) continue;
    double cost = 0;
    for (const std::string& name : Stopped(plan)) cost += costs.at(JobId(name));
    double best = cost;
    const std::vector<std::pair<JobId, double>> of(costs.begin(), costs.end());
    for (size_t set = 1; set < size_t{1} << of.size(); ++set) {
      std::vector<JobId> gone;
      double all = 0;
      for (size_t i = 0; i < of.size(); ++i) {
        if ((set >> i & 1) == 0) continue;
        gone.push_back(of[i].first);
        all += of[i].second;
      }
      if (all < best && FitsWithout(cluster.index, gone, job)) best = all;
    }
    ++preempted;
    optimal += cost == best ? 1 : 0;
    sum += cost / best;
    most = std::max(most, cost / best);
  }
  ASSERT_GT(preempted, testing::Cases(400));
  EXPECT_GT(optimal, preempted * 95 / 100);
  EXPECT_LT(sum / preempted, 1.01);
  EXPECT_LT(most, 3);
}

// Makes a running job elastic.
void MakeElastic(Cluster& cluster, const std::string& name, std::vector<int32_t> sizes,
                 absl::Duration grow_after = absl::Minutes(5), bool asked = false) {
  RunningJob job = *cluster.running.Find(JobId(name));
  auto elastic = std::make_shared<Elasticity>();
  elastic->gang.id = JobId(name);
  elastic->gang.name = name;
  elastic->gang.queue = job.queue;
  elastic->gang.priority = job.priority;
  elastic->gang.ranks = sizes.front();
  elastic->gang.sizes = std::move(sizes);
  elastic->grow_after = grow_after;
  elastic->asked = asked;
  job.elastic = std::move(elastic);
  cluster.running.Put(JobId(name), job);
}

// By job: how many slots it goes on with.
std::map<std::string, int> ResizedIn(const Schedule& plan) {
  std::map<std::string, int> sizes;
  for (const Decision& decision : plan.decisions) {
    const auto* resize = std::get_if<Resize>(&decision);
    if (resize == nullptr) continue;
    sizes[resize->resized.job.value()] = static_cast<int>(resize->resized.slots.size());
  }
  return sizes;
}

using Sizes = std::map<std::string, int>;

TEST(Elastic, RunningJob_ShrinksAsLittleAsNeededBeforeAnotherOneIsStopped) {
  Cluster cluster;
  cluster.AddWorker(8);
  cluster.Run("elastic", 10, {At(0, 0), At(0, 1), At(0, 2), At(0, 3)}, absl::Hours(1));
  cluster.Run("rigid", 10, {At(0, 4), At(0, 5)});
  cluster.Run("same", 90, {At(0, 6), At(0, 7)});
  MakeElastic(cluster, "elastic", {1, 2, 3, 4});
  Schedule plan = cluster.Plan({WaitingGang("urgent", 1, 90)});
  EXPECT_EQ(ResizedIn(plan), (Sizes{{"elastic", 3}}));
  EXPECT_EQ(Stopped(plan), std::vector<std::string>{});
  plan = cluster.Plan({WaitingGang("urgent", 3, 90)});
  EXPECT_EQ(ResizedIn(plan), (Sizes{{"elastic", 1}}));
  EXPECT_EQ(Stopped(plan), std::vector<std::string>{});
}

TEST(Elastic, JobThatShrinksAndIsOutbid_HoldsItsSlotsUntilItHasEnded) {
  Cluster cluster;
  cluster.AddWorker(4);
  cluster.AddWorker(8);  // of the other queue, so that it comes second
  std::vector<Slot> of_other;
  for (int device = 0; device < 8; ++device) of_other.push_back(At(1, device));
  cluster.Run("runs", 90, of_other, absl::ZeroDuration(), "other");
  cluster.Run("shrinks", 10, {At(0, 0), At(0, 1), At(0, 2), At(0, 3)});
  cluster.Change("shrinks", [](RunningJob& job) { job.stopping = true; });
  cluster.kept[JobId("shrinks")] = {"default", 10, v1::DEVICE_KIND_CPU, "", {At(0, 0), At(0, 1)}};
  const WaitingJob winner = WaitingGang("winner", 3, 90);
  WaitingJob other = WaitingGang("other", 1, 90);
  other.queue = "other";
  const Schedule plan = cluster.Plan({winner, other});
  ASSERT_EQ(plan.decisions.size(), 1u) << "no slot is free yet for the other one";
  const Eviction& eviction = std::get<Preempt>(plan.decisions[0]).eviction;
  EXPECT_EQ(eviction.outbid, std::vector<JobId>{JobId("shrinks")});
  EXPECT_EQ(eviction.slots.size(), 3u);
}

TEST(Elastic, WhereShrinkingIsNotEnough_OthersAreStoppedAndWhatIsLeftIsGivenBack) {
  Cluster cluster;
  cluster.AddWorker(6);
  cluster.Run("elastic", 10, {At(0, 0), At(0, 1), At(0, 2)}, absl::Hours(1));
  cluster.Run("rigid", 10, {At(0, 3), At(0, 4), At(0, 5)});
  MakeElastic(cluster, "elastic", {2, 3});
  Schedule plan = cluster.Plan({WaitingGang("urgent", 4, 90)});
  EXPECT_EQ(Stopped(plan), std::vector<std::string>{"rigid"});
  EXPECT_EQ(ResizedIn(plan), (Sizes{{"elastic", 2}}));
  // The slots of the one that is stopped are enough.
  plan = cluster.Plan({WaitingGang("urgent", 3, 90)});
  EXPECT_EQ(Stopped(plan), std::vector<std::string>{"rigid"});
  EXPECT_EQ(ResizedIn(plan), Sizes{});
}

TEST(Elastic, SizesThatTheLayoutDoesNotAllow_AreNotTaken) {
  Cluster cluster;
  cluster.AddWorker(8);
  cluster.Run("elastic", 10,
              {At(0, 0), At(0, 1), At(0, 2), At(0, 3), At(0, 4), At(0, 5), At(0, 6), At(0, 7)});
  MakeElastic(cluster, "elastic", {2, 4, 8});
  EXPECT_EQ(ResizedIn(cluster.Plan({WaitingGang("urgent", 1, 90)})), (Sizes{{"elastic", 4}}));
  EXPECT_EQ(ResizedIn(cluster.Plan({WaitingGang("urgent", 5, 90)})), (Sizes{{"elastic", 2}}));
}

TEST(Elastic, EqualPriorityAndAskedSizes_AreLeftAlone) {
  Cluster cluster;
  cluster.AddWorker(4);
  cluster.Run("equal", 90, {At(0, 0), At(0, 1)});
  cluster.Run("asked", 10, {At(0, 2), At(0, 3)});
  MakeElastic(cluster, "equal", {1, 2});
  MakeElastic(cluster, "asked", {2}, absl::Minutes(5), /*asked=*/true);
  const Schedule plan = cluster.Plan({WaitingGang("urgent", 1, 90)});
  EXPECT_EQ(ResizedIn(plan), Sizes{});
  EXPECT_EQ(Stopped(plan), std::vector<std::string>{"asked"}) << "it may be stopped as a whole";
}

TEST(Elastic, FreeSlots_AreTakenAfterAWhileIfNoJobWaits) {
  Cluster cluster;
  cluster.AddWorker(4);
  cluster.Run("elastic", 10, {At(0, 0)});
  MakeElastic(cluster, "elastic", {1, 2, 3}, absl::Hours(2));
  Schedule plan = cluster.Plan({});
  EXPECT_EQ(ResizedIn(plan), Sizes{});
  EXPECT_EQ(plan.wake_at, kNow + absl::Hours(1));
  EXPECT_EQ(ResizedIn(cluster.Plan({}, plan.wake_at)), (Sizes{{"elastic", 3}}));
  // A job that waits for more than is free.
  EXPECT_EQ(ResizedIn(cluster.Plan({WaitingGang("large", 4, 10)}, plan.wake_at)), Sizes{});
  // One that can never start.
  EXPECT_EQ(ResizedIn(cluster.Plan({WaitingGang("impossible", 5, 10)}, plan.wake_at)),
            (Sizes{{"elastic", 3}}));
  // It would end before it had grown.
  cluster.Change("elastic", [](RunningJob& job) { job.ends_at = kNow + absl::Hours(2); });
  EXPECT_EQ(ResizedIn(cluster.Plan({}, plan.wake_at)), Sizes{});
}

TEST(Elastic, SizesThatUsersAskedFor_AreHadAtOnce) {
  Cluster cluster;
  cluster.AddWorker(4);
  cluster.Run("grows", 10, {At(0, 0)});
  cluster.Run("shrinks", 10, {At(0, 1), At(0, 2)});
  MakeElastic(cluster, "grows", {2}, absl::Hours(2), /*asked=*/true);
  MakeElastic(cluster, "shrinks", {1}, absl::Hours(2), /*asked=*/true);
  EXPECT_EQ(ResizedIn(cluster.Plan({})), (Sizes{{"grows", 2}, {"shrinks", 1}}));
  EXPECT_EQ(ResizedIn(cluster.Plan({WaitingGang("large", 4, 10)})), (Sizes{{"shrinks", 1}}));
}

TEST(Elastic, WaitingJob_StartsWithTheLargestSizeThatFits) {
  Cluster cluster;
  cluster.AddWorker(4);
  cluster.Run("other", 90, {At(0, 0)});
  WaitingJob job = WaitingGang("job", 1, 10);
  job.sizes = {1, 2, 4};
  const Schedule plan = cluster.Plan({job});
  ASSERT_EQ(plan.decisions.size(), 1u);
  EXPECT_EQ(std::get<Start>(plan.decisions[0]).placements.size(), 2u);
}

TEST(Elastic, TrafficOfASize_HasItsDataDegree) {
  WaitingJob job = WaitingGang("job", 8, 10);
  job.group = 2;
  job.sizes = {4, 8, 16};
  job.traffic_known = true;
  job.traffic_of_largest = {{v1::MESH_AXIS_TENSOR, 2, 1, 100},
                            {v1::MESH_AXIS_DATA, 4, 2, 150},
                            {v1::MESH_AXIS_PIPELINE, 2, 8, 10}};
  const WaitingJob eight = AtSize(job, 8);
  ASSERT_EQ(eight.traffic.size(), 3u);
  EXPECT_EQ(eight.traffic[1].degree, 2);
  EXPECT_DOUBLE_EQ(eight.traffic[1].bytes, 100);
  EXPECT_EQ(eight.traffic[2].stride, 4);
  EXPECT_DOUBLE_EQ(eight.traffic[2].bytes, 20);
  EXPECT_EQ(AtSize(job, 4).traffic.size(), 2u) << "one replica sends nothing to others";
}

// Nobody shrinks further than needed: with the next larger size of any, the job would not fit.
TEST(Elastic, OnRandomClusters_NoneShrinksFurtherThanNeededAndNoneIsStoppedForNothing) {
  Rng rng(testing::TestSeed());
  for (int round = 0; round < 300; ++round) {
    Cluster cluster;
    const int slots = 4 + static_cast<int>(rng.Below(12));
    cluster.AddWorker(slots);
    int at = 0;
    std::map<std::string, int> held;
    std::map<std::string, std::vector<int32_t>> sizes;
    for (int job = 0; at < slots && job < 5; ++job) {
      const int ranks = std::min(slots - at, 1 + static_cast<int>(rng.Below(6)));
      std::vector<Slot> mine;
      for (int i = 0; i < ranks; ++i) mine.push_back(At(0, at++));
      const std::string name = absl::StrCat("job", job);
      cluster.Run(name, 10, mine, absl::Seconds(rng.Below(100)));
      held[name] = ranks;
      if (rng.Chance(0.3)) continue;
      for (int32_t size = 1; size <= ranks; ++size) {
        if (size == ranks || rng.Chance(0.5)) sizes[name].push_back(size);
      }
      MakeElastic(cluster, name, sizes[name]);
    }
    const int free = slots - at;
    const int wanted = free + 1 + static_cast<int>(rng.Below(slots - free));
    const Schedule plan = cluster.Plan({WaitingGang("urgent", wanted, 90)});
    const Sizes resized = ResizedIn(plan);
    int got = free;
    for (const std::string& name : Stopped(plan)) got += held[name];
    for (const auto& [name, size] : resized) got += held[name] - size;
    ASSERT_GE(got, wanted) << "round " << round;
    for (const auto& [name, size] : resized) {
      const std::vector<int32_t>& of = sizes[name];
      const int larger = *std::upper_bound(of.begin(), of.end(), size);
      EXPECT_LT(got - (larger - size), wanted) << name << " in round " << round;
    }
    // As small as all of them can be, the elastic ones are not enough where any job is stopped.
    int most = free;
    for (const auto& [name, of] : sizes) most += held[name] - of.front();
    EXPECT_EQ(Stopped(plan).empty(), most >= wanted) << "round " << round;
  }
}

}  // namespace
}  // namespace muster::coordinator
