// Devices that several jobs share: the index of slots, placement, plans and queues.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "coordinator/scheduler/placement.h"
#include "coordinator/scheduler/preemption.h"
#include "coordinator/scheduler/scheduler.h"
#include "tests/support/sanitized.h"
#include "tests/support/scheduled_jobs.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

const absl::Time kNow = absl::FromUnixSeconds(100'000);

WorkerView MakeWorker(const std::string& name, int slots, const std::string& rack = "") {
  WorkerView worker{.id = WorkerId(name), .ready = true};
  worker.path.names[2] = rack;
  for (int i = 0; i < slots; ++i) worker.slots.push_back({.device = absl::StrCat("cpu:", i)});
  return worker;
}

// Its daemon cannot share devices.
WorkerView MakeOlder(const std::string& name, int slots, const std::string& rack = "") {
  WorkerView worker = MakeWorker(name, slots, rack);
  for (SlotView& slot : worker.slots) slot.undivided = true;
  return worker;
}

WaitingJob Wants(const std::string& name, int ranks, int32_t share, int32_t priority = 50) {
  WaitingJob job = testing::WaitingGang(name, ranks, priority);
  job.share = share;
  return job;
}

// A cluster as a coordinator keeps it.
struct Cluster {
  void Run(const WaitingJob& job, const std::vector<Slot>& slots,
           absl::Time ends_at = absl::InfiniteFuture()) {
    RunningJob running = testing::RunningGang(job, kNow - absl::Hours(1));
    running.ends_at = ends_at;
    this->running.Put(job.id, running);
    for (const Slot& slot : slots) index.SetShare(slot.worker, slot.device, job.id, job.share);
  }
  void Stop(const std::string& name) {
    RunningJob job = *running.Find(JobId(name));
    job.stopping = true;
    running.Put(JobId(name), job);
  }
  void Release(const std::string& name) {
    running.Remove(JobId(name));
    for (const WorkerId& id : std::set<WorkerId>(index.WorkersOf(JobId(name)))) {
      for (const SlotView& slot : std::vector<SlotView>(index.Find(id)->slots)) {
        index.SetShare(id, slot.device, JobId(name), 0);
      }
    }
    for (const auto& [id, of] : kept) Hold(id);
  }
  // What a coordinator does with the decision.
  void CarryOut(const Preempt& preempt, const WaitingJob& job) {
    kept[job.id] = {job.queue, job.priority, job.device, job.tenant, {}, job.share};
    kept[job.id].slots.insert(preempt.eviction.slots.begin(), preempt.eviction.slots.end());
    for (const JobId& id : preempt.eviction.stopped) Stop(id.value());
    Hold(job.id);
  }
  void Hold(const JobId& id) {
    const Kept& of = kept.at(id);
    for (const Slot& slot : of.slots) {
      for (const SlotView& view : index.Find(slot.worker)->slots) {
        if (view.device != slot.device) continue;
        if (view.held() && !view.KeepsAtOnce(of.share)) break;
        index.SetShare(slot.worker, slot.device, id, of.share);
        break;
      }
    }
  }
  Schedule Plan(const std::vector<WaitingJob>& jobs) {
    WaitingQueue queue;
    for (const WaitingJob& job : jobs) queue.Add(job);
    const SlotIndex before = index;
    QueueUse use(tree);
    for (const auto& [id, job] : running.all()) {
      use.Count(tree, tree.Find(job.queue), job.device, job.ranks, job.tenant, 1, job.share);
    }
    Schedule plan = coordinator::Plan({index, running, kept, tree, use, history}, queue,
                                      SchedulePolicy(), kNow);
    EXPECT_EQ(index, before) << "a plan leaves the slots as they were";
    return plan;
  }

  SlotIndex index;
  RunningJobs running;
  KeptSlots kept;
  QueueTree tree;
  QueueHistory history;
};

// "w0 cpu:1", by rank.
std::vector<std::string> Places(const Start& start) {
  std::vector<std::string> places;
  for (const v1::Placement& placement : start.placements) {
    places.push_back(absl::StrCat(placement.worker(), " ", placement.device()));
  }
  return places;
}

std::map<std::string, std::vector<std::string>> Started(const Schedule& plan) {
  std::map<std::string, std::vector<std::string>> started;
  for (const Decision& decision : plan.decisions) {
    if (const auto* start = std::get_if<Start>(&decision)) {
      started[start->job.value()] = Places(*start);
    }
  }
  return started;
}

std::vector<JobId> Stopped(const Schedule& plan) {
  std::vector<JobId> stopped;
  for (const Decision& decision : plan.decisions) {
    const auto* preempt = std::get_if<Preempt>(&decision);
    if (preempt == nullptr) continue;
    stopped.insert(stopped.end(), preempt->eviction.stopped.begin(),
                   preempt->eviction.stopped.end());
  }
  return stopped;
}

// ---- the index of slots -------------------------------------------------------------------------

TEST(SharedSlots, ChangesOneByOne_LeadToTheSameSumsForEveryShare) {
  Rng rng(testing::TestSeed());
  SlotIndex index;
  std::map<WorkerId, WorkerView> workers;
  constexpr int32_t kShares[] = {1000, 700, 500, 333};
  for (int round = 0; round < testing::Cases(3000); ++round) {
    const WorkerId id(absl::StrCat("w", rng.Below(5)));
    const auto known = workers.find(id);
    if (known == workers.end()) {
      WorkerView worker = MakeWorker(id.value(), static_cast<int>(1 + rng.Below(4)),
                                     absl::StrCat("rack-", rng.Below(2)));
      if (rng.Below(3) == 0) worker.slots[0].kind = v1::DEVICE_KIND_CUDA;
      index.Put(worker);
      workers[id] = std::move(worker);
    } else if (const uint64_t what = rng.Below(12); what == 0) {
      index.Remove(id);
      workers.erase(known);
    } else if (what < 3) {
      known->second.ready = !known->second.ready;
      index.Put(known->second);
    } else if (what == 3) {
      SlotView& slot = known->second.slots[rng.Below(known->second.slots.size())];
      slot.reserved = slot.reserved.empty() ? "mine" : "";
      index.Put(known->second);
    } else {
      SlotView& slot = known->second.slots[rng.Below(known->second.slots.size())];
      const JobId job(absl::StrCat("job-", rng.Below(4)));
      const int32_t share = slot.ShareOf(job) > 0 ? 0 : kShares[rng.Below(4)];
      if (share <= slot.room()) {
        slot.SetShare(job, share);
        index.SetShare(id, slot.device, job, share);
      }
    }
    SlotIndex fresh;
    for (const auto& [other, worker] : workers) fresh.Put(worker);
    ASSERT_EQ(index, fresh) << "after change " << round;
    for (const v1::DeviceKind kind : {v1::DEVICE_KIND_CPU, v1::DEVICE_KIND_CUDA}) {
      for (const SlotsFor slots : {SlotsFor{kind, 1000, false}, SlotsFor{kind, 500, false},
                                   SlotsFor{kind, 500, true}, SlotsFor{kind, 333, false}}) {
        ASSERT_EQ(index.RoomOf(slots), fresh.RoomOf(slots)) << slots.share << " round " << round;
        for (const v1::TopologyLevel level :
             {v1::TOPOLOGY_LEVEL_CLUSTER, v1::TOPOLOGY_LEVEL_RACK}) {
          for (const auto& [path, number] : index.domains_of(level)) {
            ASSERT_EQ(index.RoomIn(number, slots),
                      fresh.RoomIn(fresh.domains_of(level).at(path), slots));
          }
        }
      }
    }
  }
}

TEST(SharedSlots, MoreSharesThanAreKept_AreCountedAnew) {
  SlotIndex index;
  index.Put(MakeWorker("w", 2));
  index.SetShare(WorkerId("w"), "cpu:0", JobId("a"), 400);
  for (int round = 0; round < 2; ++round) {
    for (int32_t share = 1; share <= 1000; share += 13) {
      EXPECT_EQ(index.RoomOf({v1::DEVICE_KIND_CPU, share}).free, share <= 600 ? 2 : 1) << share;
    }
  }
}

TEST(SharedSlots, Trial_RestoresPartsInWhateverOrderTheyWereFreed) {
  SlotIndex index;
  index.Put(MakeWorker("w", 2));
  for (const char* job : {"a", "b"}) index.SetShare(WorkerId("w"), "cpu:0", JobId(job), 500);
  index.SetShare(WorkerId("w"), "cpu:0", JobId("kept"), 1000);  // more than there is room for yet
  const SlotIndex before = index;
  for (const auto& [first, second] : {std::pair("a", "kept"), std::pair("kept", "b")}) {
    {
      SlotIndex::Trial trial(index);
      trial.Release(JobId(first));
      trial.Release(JobId(second));
      trial.Take(WorkerId("w"), SlotsFor{v1::DEVICE_KIND_CPU, 400}, 2, JobId("c"));
      EXPECT_NE(index, before);
    }
    ASSERT_EQ(index, before) << first;
  }
}

TEST(SharedSlots, WhatIsKeptOfADevice_BecomesTheWholeOnceTheOthersAreGone) {
  SlotView slot{.device = "cpu:0"};
  slot.SetShare(JobId("a"), 500);
  EXPECT_TRUE(slot.KeepsAtOnce(1000));
  slot.SetShare(JobId("winner"), 1000);
  EXPECT_EQ(slot.room(), 0);
  slot.SetShare(JobId("a"), 0);
  EXPECT_EQ(slot.held_by, JobId("winner"));
  EXPECT_THAT(slot.parts, IsEmpty());
}

// ---- placement ----------------------------------------------------------------------------------

TEST(SharedPlacement, SingleRank_TakesTheDeviceOnWhichTheLeastIsLeftOver) {
  Cluster cluster;
  for (const char* worker : {"w0", "w1", "w2"}) cluster.index.Put(MakeWorker(worker, 1));
  cluster.Run(Wants("large", 1, 700), {{WorkerId("w1"), "cpu:0"}});
  cluster.Run(Wants("small", 1, 250), {{WorkerId("w2"), "cpu:0"}});
  const auto started = Started(cluster.Plan(
      {Wants("a", 1, 300), Wants("b", 1, 300), Wants("c", 1, 600), Wants("whole", 1, 1000)}));
  EXPECT_THAT(started.at("a"), ElementsAre("w1 cpu:0")) << "nothing is left over";
  EXPECT_THAT(started.at("b"), ElementsAre("w2 cpu:0"));
  EXPECT_THAT(started.at("c"), ElementsAre("w0 cpu:0")) << "0.45 are left elsewhere";
  EXPECT_FALSE(started.contains("whole")) << "no device is free as a whole";
}

TEST(SharedPlacement, RanksOfOneJob_AreOnDevicesOfTheirOwn) {
  Cluster cluster;
  cluster.index.Put(MakeWorker("w0", 2));
  const Schedule plan = cluster.Plan({Wants("pair", 2, 250), Wants("trio", 3, 250)});
  const auto started = Started(plan);
  EXPECT_THAT(started.at("pair"), UnorderedElementsAre("w0 cpu:0", "w0 cpu:1"));
  EXPECT_FALSE(started.contains("trio")) << "there are two devices";
  ASSERT_EQ(plan.explanations.size(), 1u);
  EXPECT_EQ(plan.explanations[0].reason().code(), v1::WAIT_CODE_CLUSTER_TOO_SMALL);
  EXPECT_EQ(plan.explanations[0].reason().share(), 0.25);
}

TEST(SharedPlacement, Gang_TakesSharedDevicesUnlessOthersAreCloserTogether) {
  Cluster cluster;
  for (const char* worker : {"w0", "w1", "w2"}) cluster.index.Put(MakeWorker(worker, 2));
  cluster.Run(Wants("on-w2", 2, 500), {{WorkerId("w2"), "cpu:0"}, {WorkerId("w2"), "cpu:1"}});
  EXPECT_THAT(Started(cluster.Plan({Wants("gang", 2, 500)})).at("gang"),
              UnorderedElementsAre("w2 cpu:0", "w2 cpu:1"));
  Cluster apart;
  for (const char* worker : {"w0", "w1", "w2"}) apart.index.Put(MakeWorker(worker, 2));
  apart.Run(Wants("on-two", 2, 500), {{WorkerId("w1"), "cpu:0"}, {WorkerId("w2"), "cpu:0"}});
  const auto places = Started(apart.Plan({Wants("gang", 2, 500)})).at("gang");
  EXPECT_EQ(places[0].substr(0, 2), places[1].substr(0, 2)) << places[0] << ", " << places[1];
}

// A gang is placed exactly when there are enough devices with room, and never on one without.
TEST(SharedPlacement, RandomClusters_AreFilledExactly) {
  Rng rng(testing::TestSeed());
  for (int round = 0; round < 300; ++round) {
    SlotIndex index;
    int devices = 0;
    const int workers = 1 + static_cast<int>(rng.Below(4));
    for (int i = 0; i < workers; ++i) {
      const int slots = 1 + static_cast<int>(rng.Below(4));
      devices += slots;
      index.Put(MakeWorker(absl::StrCat("w", i), slots, absl::StrCat("rack-", i % 2)));
    }
    for (int number = 0; number < 12; ++number) {
      const int32_t share = rng.Chance(0.3) ? 1000 : static_cast<int32_t>(1 + rng.Below(999));
      const WaitingJob job =
          Wants(absl::StrCat("job-", number), 1 + static_cast<int>(rng.Below(devices)), share);
      int with_room = 0;
      for (const auto& [id, worker] : index.workers()) {
        for (const SlotView& slot : worker.slots) with_room += slot.HasRoom(share) ? 1 : 0;
      }
      SlotIndex::Trial trial(index);
      ASSERT_EQ(FitsNow(trial, job), with_room >= job.ranks) << "round " << round;
      const auto placements = PlaceGang(trial, job);
      trial.Rollback();
      ASSERT_EQ(placements.has_value(), with_room >= job.ranks) << "round " << round;
      if (!placements.has_value()) continue;
      std::set<std::pair<std::string, std::string>> places;
      for (const v1::Placement& placement : *placements) {
        ASSERT_TRUE(places.emplace(placement.worker(), placement.device()).second);
        index.SetShare(WorkerId(placement.worker()), placement.device(), job.id, share);
      }
      for (const auto& [id, worker] : index.workers()) {
        for (const SlotView& slot : worker.slots) {
          int32_t taken = 0;
          for (const DevicePart& part : slot.Holders()) taken += part.share;
          ASSERT_LE(taken, kWholeDevice);
        }
      }
    }
  }
}

// ---- plans --------------------------------------------------------------------------------------

TEST(SharedPlans, WholeDevice_WaitsForAllThatShareIt) {
  Cluster cluster;
  cluster.index.Put(MakeWorker("w0", 1));
  cluster.Run(Wants("a", 1, 500), {{WorkerId("w0"), "cpu:0"}});
  cluster.Run(Wants("b", 1, 250), {{WorkerId("w0"), "cpu:0"}});
  const Schedule plan = cluster.Plan({Wants("whole", 1, 1000)});
  EXPECT_THAT(plan.decisions, IsEmpty());
  const v1::WaitReason reason = plan.explanations[0].reason();
  EXPECT_EQ(reason.code(), v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_EQ(reason.slots_free(), 0);
  EXPECT_EQ(reason.slots_shared(), 1);
  ASSERT_EQ(reason.change().jobs_end_size(), 2);
}

TEST(SharedPlans, JobWithAShare_IsToldOfTheOneJobWhoseEndIsEnough) {
  Cluster cluster;
  cluster.index.Put(MakeWorker("w0", 1));
  cluster.Run(Wants("large", 1, 700), {{WorkerId("w0"), "cpu:0"}});
  cluster.Run(Wants("small", 1, 200), {{WorkerId("w0"), "cpu:0"}});
  const v1::WaitReason reason = cluster.Plan({Wants("half", 1, 500)}).explanations[0].reason();
  EXPECT_EQ(reason.code(), v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_EQ(reason.share(), 0.5);
  EXPECT_EQ(reason.slots_shared(), 1);
  ASSERT_EQ(reason.change().jobs_end_size(), 1);
  EXPECT_EQ(reason.change().jobs_end(0).job_name(), "large");
}

TEST(SharedPlans, FirstJobThatDoesNotFit_IsNotDelayedByJobsThatWouldShareItsDevice) {
  Cluster cluster;
  cluster.index.Put(MakeWorker("w0", 1));
  cluster.Run(Wants("runs", 1, 500), {{WorkerId("w0"), "cpu:0"}}, kNow + absl::Minutes(10));
  WaitingJob whole = Wants("whole", 1, 1000);
  WaitingJob longer = Wants("longer", 1, 500), shorter = Wants("shorter", 1, 500);
  longer.runtime = absl::Hours(1);
  shorter.runtime = absl::Minutes(5);
  const auto started = Started(cluster.Plan({whole, longer, shorter}));
  EXPECT_FALSE(started.contains("longer")) << "it would end after `whole` starts";
  EXPECT_TRUE(started.contains("shorter"));
}

// ---- workers whose daemons cannot share devices

TEST(OlderDaemons, JobWithAShare_GoesToAnotherWorkerOrWaitsForTheUpgrade) {
  Cluster cluster;
  cluster.index.Put(MakeOlder("a", 2));
  cluster.index.Put(MakeWorker("b", 1));
  const auto started = Started(
      cluster.Plan({Wants("half", 1, 500), Wants("other", 1, 500), Wants("whole", 2, 1000)}));
  EXPECT_THAT(started.at("half"), ElementsAre("b cpu:0"));
  EXPECT_THAT(started.at("other"), ElementsAre("b cpu:0"));
  EXPECT_THAT(started.at("whole"), UnorderedElementsAre("a cpu:0", "a cpu:1"));
  cluster.Run(Wants("runs", 1, 1000), {{WorkerId("b"), "cpu:0"}});
  const Schedule plan = cluster.Plan({Wants("late", 1, 500)});
  EXPECT_THAT(plan.decisions, IsEmpty());
  const v1::WaitReason reason = plan.explanations[0].reason();
  EXPECT_EQ(reason.code(), v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_EQ(reason.slots_free(), 0);
  EXPECT_EQ(reason.slots_total(), 1);
  ASSERT_EQ(reason.change().workers_return_size(), 1);
  EXPECT_EQ(reason.change().workers_return(0).worker(), "a");
  EXPECT_EQ(reason.change().workers_return(0).slots(), 2);
  EXPECT_THAT(reason.change().jobs_end(), IsEmpty());
}

TEST(OlderDaemons, GangThatOthersNeverHold_HoldsBackNone) {
  Cluster cluster;
  cluster.index.Put(MakeOlder("a", 4, "r"));
  cluster.index.Put(MakeWorker("b", 1, "r"));
  WaitingJob gang = Wants("gang", 2, 500), in_rack = Wants("in-rack", 2, 500);
  in_rack.placement.required = v1::TOPOLOGY_LEVEL_RACK;
  const Schedule plan = cluster.Plan({gang, in_rack, Wants("whole", 5, 1000)});
  EXPECT_EQ(Started(plan).at("whole").size(), 5u);
  ASSERT_EQ(plan.explanations.size(), 2u);
  for (const Explanation& explanation : plan.explanations) {
    const v1::WaitReason reason = explanation.reason();
    EXPECT_EQ(reason.code(), v1::WAIT_CODE_CLUSTER_TOO_SMALL);
    EXPECT_EQ(reason.slots_total(), 1);
    EXPECT_EQ(reason.change().slots_added(), 1);
    ASSERT_EQ(reason.change().workers_return_size(), 1);
    EXPECT_EQ(reason.change().workers_return(0).worker(), "a");
  }
}

TEST(OlderDaemons, JobWithAShare_StopsNobodyThere) {
  Cluster cluster;
  cluster.index.Put(MakeOlder("a", 1));
  cluster.index.Put(MakeWorker("b", 1));
  cluster.Run(Wants("cheap", 1, 1000, 10), {{WorkerId("a"), "cpu:0"}});
  cluster.Run(Wants("dear", 1, 1000, 20), {{WorkerId("b"), "cpu:0"}});
  EXPECT_THAT(Stopped(cluster.Plan({Wants("urgent", 1, 500, 90)})), ElementsAre(JobId("dear")));
}

TEST(OlderDaemons, SlotKeptForAShare_IsGivenUpWhenItsDaemonWasReplacedByAnOlderOne) {
  Cluster cluster;
  cluster.index.Put(MakeWorker("a", 1));
  cluster.Run(Wants("goes", 1, 1000, 10), {{WorkerId("a"), "cpu:0"}});
  const WaitingJob urgent = Wants("urgent", 1, 500, 90);
  const Schedule plan = cluster.Plan({urgent});
  ASSERT_EQ(plan.decisions.size(), 1u);
  cluster.CarryOut(std::get<Preempt>(plan.decisions[0]), urgent);
  EXPECT_THAT(cluster.Plan({urgent}).decisions, IsEmpty());
  WorkerView older = *cluster.index.Find(WorkerId("a"));
  older.slots[0].undivided = true;
  cluster.index.Put(older);
  const Schedule later = cluster.Plan({urgent});
  ASSERT_EQ(later.decisions.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<GiveUpKept>(later.decisions[0]));
}

// ---- preemption ---------------------------------------------------------------------------------

TEST(SharedPreemption, JobWithAShare_StopsOneThatSharesADevice) {
  Cluster cluster;
  cluster.index.Put(MakeWorker("w0", 1));
  cluster.Run(Wants("stays", 1, 500, 90), {{WorkerId("w0"), "cpu:0"}});
  cluster.Run(Wants("goes", 1, 500, 10), {{WorkerId("w0"), "cpu:0"}});
  const WaitingJob urgent = Wants("urgent", 1, 400, 90);
  const Schedule plan = cluster.Plan({urgent});
  EXPECT_THAT(Stopped(plan), ElementsAre(JobId("goes")));
  cluster.CarryOut(std::get<Preempt>(plan.decisions[0]), urgent);
  const WaitingJob thief = Wants("thief", 1, 300);
  EXPECT_THAT(cluster.Plan({urgent, thief}).decisions, IsEmpty());
  cluster.Release("goes");
  const auto started = Started(cluster.Plan({urgent, thief}));
  EXPECT_TRUE(started.contains("urgent"));
  EXPECT_FALSE(started.contains("thief")) << "0.1 is left";
}

TEST(SharedPreemption, WholeDevice_StopsAllThatShareItAndGetsWhatEachLeaves) {
  Cluster cluster;
  cluster.index.Put(MakeWorker("w0", 1));
  cluster.Run(Wants("a", 1, 500, 10), {{WorkerId("w0"), "cpu:0"}});
  cluster.Run(Wants("b", 1, 300, 10), {{WorkerId("w0"), "cpu:0"}});
  const WaitingJob urgent = Wants("urgent", 1, 1000, 90);
  const Schedule plan = cluster.Plan({urgent});
  EXPECT_THAT(Stopped(plan), ElementsAre(JobId("a"), JobId("b")));
  cluster.CarryOut(std::get<Preempt>(plan.decisions[0]), urgent);
  const WaitingJob thief = Wants("thief", 1, 200, 95);
  EXPECT_THAT(Stopped(cluster.Plan({urgent})), IsEmpty());
  cluster.Release("a");
  WaitingJob other = thief;
  other.priority = 50;
  const Schedule meanwhile = cluster.Plan({urgent, other});
  EXPECT_THAT(meanwhile.decisions, IsEmpty()) << "what `a` left is kept";
  cluster.Release("b");
  EXPECT_THAT(Started(cluster.Plan({urgent, other})).at("urgent"), ElementsAre("w0 cpu:0"));
}

TEST(SharedPreemption, JobWithAShare_StopsOneThatHasAWholeDevice) {
  Cluster cluster;
  cluster.index.Put(MakeWorker("w0", 1));
  cluster.Run(Wants("whole", 1, 1000, 10), {{WorkerId("w0"), "cpu:0"}});
  const WaitingJob urgent = Wants("urgent", 1, 500, 90);
  const Schedule plan = cluster.Plan({urgent});
  EXPECT_THAT(Stopped(plan), ElementsAre(JobId("whole")));
  cluster.CarryOut(std::get<Preempt>(plan.decisions[0]), urgent);
  EXPECT_THAT(cluster.Plan({urgent}).decisions, IsEmpty());
  cluster.Release("whole");
  const auto started = Started(cluster.Plan({urgent, Wants("beside", 1, 500)}));
  EXPECT_TRUE(started.contains("urgent"));
  EXPECT_TRUE(started.contains("beside")) << "half of it is left";
}

// ---- queues -------------------------------------------------------------------------------------

TEST(SharedQueues, Shares_CountAgainstLimitsToTheThousandth) {
  Cluster cluster;
  cluster.index.Put(MakeWorker("w0", 4));
  v1::QueuePolicy policy;
  v1::QueueSpec& queue = *policy.add_queues();
  queue.set_name("default");
  (*queue.mutable_guaranteed())["cpu"] = 1;
  (*queue.mutable_borrowing_limit())["cpu"] = 0;
  cluster.tree = *QueueTree::Make(policy);
  const Schedule plan =
      cluster.Plan({Wants("a", 1, 333), Wants("b", 1, 333), Wants("c", 1, 334), Wants("d", 1, 1)});
  const auto started = Started(plan);
  EXPECT_TRUE(started.contains("a") && started.contains("b") && started.contains("c"));
  ASSERT_EQ(plan.explanations.size(), 1u);
  const v1::WaitReason reason = plan.explanations[0].reason();
  EXPECT_EQ(reason.code(), v1::WAIT_CODE_QUEUE_QUOTA);
  EXPECT_EQ(reason.used(), 1);
  EXPECT_EQ(reason.used_devices(), 1.0);
  EXPECT_OK(cluster.tree.CheckJob("default", v1::DEVICE_KIND_CPU, 2, 500));
  EXPECT_THAT(std::string(cluster.tree.CheckJob("default", v1::DEVICE_KIND_CPU, 3, 500).message()),
              HasSubstr("resources.ranks: 3 shares of 0.5 of cpu devices are more than queue"));
}

}  // namespace
}  // namespace muster::coordinator
