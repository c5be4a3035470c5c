#include "coordinator/scheduler/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/rng.h"
#include "coordinator/scheduler/scheduler.h"
#include "tests/support/random_cluster.h"
#include "tests/support/sanitized.h"
#include "tests/support/seed.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

using synthetic::AddWorker;
using synthetic::Gang;

std::optional<std::vector<v1::Placement>> Place(SlotIndex& index, const WaitingJob& job) {
  SlotIndex::Trial trial(index);
  const bool fits = FitsNow(trial, job);
  auto placements = PlaceGang(trial, job);
  EXPECT_EQ(placements.has_value(), fits);
  return placements;
}

// "w0 w0 w1": the workers by rank.
std::string Workers(const std::optional<std::vector<v1::Placement>>& placements) {
  if (!placements.has_value()) return "none";
  std::vector<std::string> names;
  for (const v1::Placement& placement : *placements) names.push_back(placement.worker());
  return absl::StrJoin(names, " ");
}

TEST(Placement, GangLargerThanAWorker_GoesToTheFullestRackThatHoldsIt) {
  SlotIndex index;
  for (const char* name : {"a0", "a1", "a2"}) AddWorker(index, name, 4, {"", "", "a", ""});
  for (const char* name : {"b0", "b1"}) AddWorker(index, name, 4, {"", "", "b", ""});
  AddWorker(index, "c0", 4, {"", "", "c", ""});
  AddWorker(index, "alone", 4);
  EXPECT_EQ(Workers(Place(index, Gang(8))), "b0 b0 b0 b0 b1 b1 b1 b1");
  EXPECT_EQ(Workers(Place(index, Gang(4))), "a0 a0 a0 a0") << "one worker is the narrowest domain";
}

TEST(Placement, RequiredLevel_IsWaitedFor) {
  SlotIndex index;
  for (const char* name : {"a0", "a1"}) AddWorker(index, name, 4, {"", "", "a", ""}, /*busy=*/1);
  for (const char* name : {"b0", "b1"}) AddWorker(index, name, 4, {"", "", "b", ""}, /*busy=*/1);
  WaitingJob job = Gang(8);
  EXPECT_NE(Workers(Place(index, job)), "none");
  job.placement.required = v1::TOPOLOGY_LEVEL_RACK;
  EXPECT_EQ(Workers(Place(index, job)), "none");
  EXPECT_TRUE(CouldFit(job, index));
  const auto shortage = FindDomainShortage(job, index, /*ever=*/false);
  ASSERT_TRUE(shortage.has_value());
  EXPECT_EQ(shortage->level, v1::TOPOLOGY_LEVEL_RACK);
  EXPECT_EQ(shortage->segment, 8);
  EXPECT_EQ(shortage->slots, 6);
  EXPECT_EQ(shortage->level_at_least, v1::TOPOLOGY_LEVEL_CLUSTER);
  EXPECT_THAT(shortage->jobs, SizeIs(1));
  job.ranks = 9;
  EXPECT_FALSE(CouldFit(job, index));
  EXPECT_EQ(FindDomainShortage(job, index, /*ever=*/true)->slots, 8);
}

// The one that holds most now could never hold the gang; the end of a job opens the other one.
TEST(Placement, DomainsThatAreFull_NameTheJobsWhoseEndOpensOne) {
  SlotIndex index;
  AddWorker(index, "a0", 4, {"", "", "a", ""});
  for (const char* name : {"b0", "b1"}) AddWorker(index, name, 4, {"", "", "b", ""}, /*busy=*/3);
  WaitingJob job = Gang(6);
  job.placement.required = v1::TOPOLOGY_LEVEL_RACK;
  const auto rack = FindDomainShortage(job, index, /*ever=*/false);
  ASSERT_TRUE(rack.has_value());
  EXPECT_EQ(rack->domain, "a");
  ASSERT_THAT(rack->jobs, SizeIs(1));
  EXPECT_EQ(rack->jobs[0].second, 6);
  EXPECT_TRUE(OpensOn(index, *rack, *index.Find(WorkerId("b0"))));
  EXPECT_FALSE(OpensOn(index, *rack, *index.Find(WorkerId("a0"))));
  // Of single workers too.
  job.ranks = 4;
  job.placement.required = v1::TOPOLOGY_LEVEL_HOST;
  index.SetHolder(WorkerId("a0"), "cpu:0", JobId("small"));
  const auto host = FindDomainShortage(job, index, /*ever=*/false);
  ASSERT_TRUE(host.has_value());
  EXPECT_EQ(host->domain, "a0");
  ASSERT_THAT(host->jobs, SizeIs(1));
  EXPECT_EQ(host->jobs[0].first, JobId("small"));
}

// A worker that says nothing of its rack is a rack of its own.
TEST(Placement, WorkerWithoutALabel_IsADomainOfItsOwn) {
  SlotIndex index;
  AddWorker(index, "a", 4);
  AddWorker(index, "b", 4);
  WaitingJob job = Gang(4);
  job.placement.required = v1::TOPOLOGY_LEVEL_RACK;
  EXPECT_EQ(Workers(Place(index, job)), "a a a a");
  job.ranks = 5;
  EXPECT_EQ(Workers(Place(index, job)), "none");
}

TEST(Placement, PreferredLevel_TakesTheFullestDomainAndNeverWaits) {
  SlotIndex index;
  AddWorker(index, "a0", 8, {"", "", "a", ""});
  AddWorker(index, "b0", 2, {"", "", "b", ""});
  AddWorker(index, "b1", 2, {"", "", "b", ""});
  WaitingJob job = Gang(4);
  job.placement.preferred = v1::TOPOLOGY_LEVEL_RACK;
  EXPECT_EQ(Workers(Place(index, job)), "b0 b0 b1 b1");
  job.ranks = 10;
  EXPECT_NE(Workers(Place(index, job)), "none");
}

TEST(Placement, Segments_AreEachInOneDomain) {
  SlotIndex index;
  for (int rack = 0; rack < 3; ++rack) {
    for (int i = 0; i < 3; ++i) {
      AddWorker(index, absl::StrCat("r", rack, "-", i), 2, {"", "", absl::StrCat("r", rack), ""});
    }
  }
  WaitingJob job = Gang(12);
  job.placement = {.required = v1::TOPOLOGY_LEVEL_RACK, .segment = 4};
  const auto placed = Place(index, job);
  ASSERT_TRUE(placed.has_value());
  for (size_t rank = 0; rank < 12; ++rank) {
    EXPECT_EQ((*placed)[rank].worker().substr(0, 2), (*placed)[rank / 4 * 4].worker().substr(0, 2));
  }
  job.ranks = 16;  // 18 slots are free, 4 in every rack
  EXPECT_EQ(Workers(Place(index, job)), "none");
  EXPECT_EQ(FindDomainShortage(job, index, /*ever=*/false)->segment, 4);
  job.placement = {.preferred = v1::TOPOLOGY_LEVEL_RACK, .segment = 4};
  EXPECT_NE(Workers(Place(index, job)), "none");
}

TEST(Placement, Spread_TakesAsManyDomainsAsPossible) {
  SlotIndex index;
  for (int i = 0; i < 4; ++i) AddWorker(index, absl::StrCat("w", i), 4, {"", "", "r", ""});
  WaitingJob job = Gang(8);
  job.placement.spread = v1::TOPOLOGY_LEVEL_HOST;
  EXPECT_EQ(Workers(Place(index, job)), "w0 w0 w1 w1 w2 w2 w3 w3");
  job.group = 4;
  EXPECT_EQ(Workers(Place(index, job)), "w0 w0 w0 w0 w1 w1 w1 w1") << "tensor groups stay whole";
}

TEST(Placement, TensorGroupLargerThanEveryWorker_StaysInOneNvlinkDomain) {
  SlotIndex index;
  for (int domain = 0; domain < 3; ++domain) {
    for (int i = 0; i < 3; ++i) {
      AddWorker(index, absl::StrCat("n", domain, "-", i), 4,
                {"", "", "", absl::StrCat("n", domain)}, /*busy=*/domain == 0 ? 2 : 0);
    }
  }
  WaitingJob job = Gang(16);
  job.group = 8;
  const auto placed = Place(index, job);
  ASSERT_TRUE(placed.has_value());
  for (size_t rank = 0; rank < 16; ++rank) {
    EXPECT_EQ((*placed)[rank].worker().substr(0, 2), (*placed)[rank / 8 * 8].worker().substr(0, 2));
  }
  job.ranks = 24;  // 30 slots are free, but n0 has 6
  EXPECT_EQ(Workers(Place(index, job)), "none");
  EXPECT_EQ(FindDomainShortage(job, index, /*ever=*/false)->level,
            v1::TOPOLOGY_LEVEL_NVLINK_DOMAIN);
}

// Eight GPUs, so many in each group of linked ones and on each node, the second of them taken.
WorkerView LinkedWorker(int in_group, int on_node) {
  WorkerView worker;
  worker.id = WorkerId("w");
  worker.ready = true;
  for (int i = 0; i < 8; ++i) {
    SlotView slot;
    slot.device = absl::StrCat("cuda:", i);
    slot.kind = v1::DEVICE_KIND_CUDA;
    slot.link_group = i / in_group;
    slot.numa_node = i / on_node;
    worker.slots.push_back(slot);
  }
  worker.slots[1].held_by = JobId("other");
  return worker;
}

TEST(Placement, DevicesOfAGroup_AreLinked) {
  SlotIndex index;
  index.Put(LinkedWorker(4, 8));
  WaitingJob job = Gang(4);
  job.group = 4;
  job.device = v1::DEVICE_KIND_CUDA;
  const auto placed = Place(index, job);
  ASSERT_TRUE(placed.has_value());
  EXPECT_EQ((*placed)[0].device(), "cuda:4");
  EXPECT_EQ((*placed)[3].device(), "cuda:7");
}

// Two nodes with two groups of two devices each: what fits into a group goes into one, the smallest
// that has room, on the node with the least left; what does not goes into the groups of one node.
TEST(Placement, DevicesOfALargerGroup_AreOnOneNode) {
  SlotIndex index;
  WorkerView worker = LinkedWorker(2, 4);
  const auto devices = [&](int ranks, int group = 0) {
    index.Put(worker);
    WaitingJob job = Gang(ranks);
    job.group = group == 0 ? ranks : group;
    job.device = v1::DEVICE_KIND_CUDA;
    std::vector<std::string> names;
    const auto placed = Place(index, job);
    for (const v1::Placement& rank : *placed) names.push_back(rank.device());
    return absl::StrJoin(names, " ");
  };
  EXPECT_EQ(devices(1), "cuda:0");
  EXPECT_EQ(devices(2), "cuda:2 cuda:3");
  EXPECT_EQ(devices(2, 1), "cuda:2 cuda:3");  // without tensor groups too
  EXPECT_EQ(devices(6, 2), "cuda:2 cuda:3 cuda:4 cuda:5 cuda:6 cuda:7");
  EXPECT_EQ(devices(3), "cuda:2 cuda:3 cuda:0");
  EXPECT_EQ(devices(4), "cuda:4 cuda:5 cuda:6 cuda:7");
  worker.slots[4].held_by = JobId("other");
  EXPECT_EQ(devices(4), "cuda:2 cuda:3 cuda:6 cuda:7");
}

TEST(Placement, ReservedDevices_AreForTheJobsOfTheReservation) {
  SlotIndex index;
  AddWorker(index, "w", 4);
  WorkerView worker = *index.Find(WorkerId("w"));
  worker.slots[0].reserved = worker.slots[1].reserved = "team";
  index.Put(worker);
  const SlotIndex before = index;
  WaitingJob job = Gang(3);
  EXPECT_EQ(Workers(Place(index, job)), "none");
  EXPECT_EQ(index.Of(v1::DEVICE_KIND_CPU).reserved, 2);
  job.reservations = {"team"};
  EXPECT_EQ(Workers(Place(index, job)), "w w w");
  EXPECT_EQ(index, before);
}

TEST(Placement, Cost_IsBytesTimesDistanceOfTheHops) {
  SlotIndex index;
  AddWorker(index, "a0", 2, {"z", "", "a", ""});
  AddWorker(index, "b0", 2, {"z", "", "b", ""});
  WaitingJob job = Gang(4);
  job.group = 2;
  job.traffic = {{v1::MESH_AXIS_TENSOR, 2, 1, 100}, {v1::MESH_AXIS_DATA, 2, 2, 10}};
  const auto placed = Place(index, job);
  ASSERT_TRUE(placed.has_value());
  const v1::PlacementCost cost = CostOf(index, job, *placed);
  EXPECT_EQ(cost.level(), v1::TOPOLOGY_LEVEL_ZONE);
  EXPECT_EQ(cost.domain(), "z");
  ASSERT_EQ(cost.axes_size(), 2);
  EXPECT_EQ(cost.axes(0).distance(), 1);
  EXPECT_EQ(cost.axes(0).cost(), 100);
  EXPECT_EQ(cost.axes(1).distance(), 24);
  EXPECT_EQ(cost.axes(1).farthest(), v1::TOPOLOGY_LEVEL_ZONE);
  EXPECT_EQ(cost.total(), 340);
}

// ---- properties on random clusters --------------------------------------------------------------

// Whether the runs of ranks that must be in one domain fit, counted domain by domain.
bool Fits(const SlotIndex& index, const WaitingJob& job) {
  // Slots of workers in whole tensor groups, or single slots where none is as large.
  int largest = 0;
  for (const auto& [id, worker] : index.workers()) {
    largest = std::max(largest, static_cast<int>(worker.slots.size()));
  }
  // A tensor group larger than every worker is in one NVLink domain, if one is as large.
  std::map<std::string, int> linked;
  const auto nvlink_domain = [](const WorkerView& worker) {
    return worker.path.name(v1::TOPOLOGY_LEVEL_NVLINK_DOMAIN).empty()
               ? absl::StrCat("worker ", worker.id.value())
               : absl::StrJoin(worker.path.names, "/");
  };
  for (const auto& [id, worker] : index.workers()) {
    linked[nvlink_domain(worker)] += static_cast<int>(worker.slots.size());
  }
  const bool across = job.group > largest &&
                      std::any_of(linked.begin(), linked.end(),
                                  [&](const auto& domain) { return domain.second >= job.group; });
  const int unit = job.group <= largest || across ? job.group : 1;
  const bool segmented = job.placement.segment > 0;
  const int run = segmented ? job.placement.segment : job.ranks;
  const v1::TopologyLevel level = job.placement.required == v1::TOPOLOGY_LEVEL_UNSPECIFIED
                                      ? v1::TOPOLOGY_LEVEL_CLUSTER
                                      : job.placement.required;
  // By domain, and where its units are: on workers or in NVLink domains.
  std::map<std::string, std::map<std::string, int>> free;
  for (const auto& [id, worker] : index.workers()) {
    std::string key = "cluster";
    if (level != v1::TOPOLOGY_LEVEL_CLUSTER) {
      // The first name at the level or below it, else the worker itself.
      key = absl::StrCat("worker ", id.value());
      for (size_t depth = 0; depth < kDomainLevels.size(); ++depth) {
        if (kDomainLevels[depth] <= level && !worker.path.names[depth].empty()) {
          const DomainPath path = worker.path.Above(depth + 1);
          key = absl::StrJoin(path.names, "/");
          break;
        }
      }
    }
    free[key][across ? nvlink_domain(worker) : id.value()] += FreeSlots(worker, job.device);
  }
  int runs = 0;
  for (const auto& [key, places] : free) {
    int slots = 0;
    for (const auto& [place, count] : places) slots += count / unit * unit;
    runs += slots / run;
  }
  return runs >= job.ranks / run;
}

TEST(Placement, RandomGangs_AreWholeAndPlacedExactlyWhenTheRulesAllowIt) {
  Rng rng(testing::TestSeed());
  int placed = 0, refused = 0;
  for (int round = 0; round < testing::Cases(4000); ++round) {
    SlotIndex index = synthetic::RandomCluster(rng);
    WaitingJob job = synthetic::RandomGang(rng);
    const SlotIndex before = index;
    const auto placements = Place(index, job);
    ASSERT_EQ(index, before) << "round " << round;
    ASSERT_EQ(placements.has_value(), Fits(index, job))
        << "round " << round << ": " << job.ranks << " ranks, group " << job.group << ", required "
        << job.placement.required << ", preferred " << job.placement.preferred << ", segment "
        << job.placement.segment << ", spread " << job.placement.spread;
    placements.has_value() ? ++placed : ++refused;
    SlotIndex idle;
    for (const auto& [id, worker] : index.workers()) {
      WorkerView left = worker;
      for (SlotView& slot : left.slots) slot.held_by = JobId();
      idle.Put(std::move(left));
    }
    EXPECT_EQ(CouldFit(job, index), Place(idle, job).has_value()) << "round " << round;
    if (placements.has_value()) {
      EXPECT_TRUE(CouldFit(job, index)) << "round " << round;
    } else {
      if (!CouldFit(job, index)) {
        EXPECT_TRUE(FindDomainShortage(job, index, /*ever=*/true).has_value() ||
                    index.Of(job.device).total < job.ranks || job.group > 1)
            << "round " << round;
      }
      continue;
    }
    // Whole, disjoint, on free slots.
    ASSERT_EQ(placements->size(), static_cast<size_t>(job.ranks));
    std::set<std::string> taken;
    for (int rank = 0; rank < job.ranks; ++rank) {
      const v1::Placement& placement = (*placements)[static_cast<size_t>(rank)];
      EXPECT_EQ(placement.rank(), rank);
      EXPECT_TRUE(taken.insert(placement.worker() + " " + placement.device()).second);
      const WorkerView* worker = index.Find(WorkerId(placement.worker()));
      ASSERT_NE(worker, nullptr);
      const auto slot =
          std::find_if(worker->slots.begin(), worker->slots.end(),
                       [&](const SlotView& s) { return s.device == placement.device(); });
      ASSERT_NE(slot, worker->slots.end());
      EXPECT_TRUE(slot->free() && worker->ready) << "round " << round;
    }
    // Each run that must be in one domain is.
    if (job.placement.required != v1::TOPOLOGY_LEVEL_UNSPECIFIED) {
      const int run = job.placement.segment > 0 ? job.placement.segment : job.ranks;
      for (int rank = 0; rank < job.ranks; ++rank) {
        const v1::Placement& one = (*placements)[static_cast<size_t>(rank)];
        const v1::Placement& first = (*placements)[static_cast<size_t>(rank / run * run)];
        const v1::TopologyLevel common =
            one.worker() == first.worker()
                ? v1::TOPOLOGY_LEVEL_HOST
                : CommonLevel(index.Find(WorkerId(one.worker()))->path,
                              index.Find(WorkerId(first.worker()))->path);
        EXPECT_LE(common, job.placement.required) << "round " << round << " rank " << rank;
      }
    }
    // The same inputs give the same placement, whatever the order in which workers joined.
    SlotIndex other;
    for (auto worker = index.workers().rbegin(); worker != index.workers().rend(); ++worker) {
      other.Put(worker->second);
    }
    EXPECT_EQ(other, index);
    EXPECT_EQ(Workers(Place(other, job)), Workers(placements)) << "round " << round;
  }
  EXPECT_GT(placed, testing::Cases(500));
  EXPECT_GT(refused, testing::Cases(500));
}

// Small gangs cost at most a little more than the best placement inside the narrowest level that
// holds them, which is found by trying all.
TEST(Placement, SmallGangs_CostAboutAsLittleAsPossible) {
  Rng rng(testing::TestSeed());
  double ours = 0, best = 0;
  int compared = 0;
  for (int round = 0; round < 150; ++round) {
    SlotIndex index = synthetic::RandomCluster(rng);
    WaitingJob job = synthetic::RandomMesh(rng);
    const auto placements = Place(index, job);
    if (!placements.has_value()) continue;
    const double cost = CostOf(index, job, *placements).total();
    const double optimum = synthetic::CheapestByExhaustion(index, job, cost);
    if (optimum <= 0) continue;
    EXPECT_LE(optimum, cost * (1 + 1e-9)) << "round " << round;
    EXPECT_LE(cost, 1.6 * optimum) << "round " << round;
    ours += cost / optimum;
    best += 1;
    ++compared;
  }
  EXPECT_GT(compared, 50);
  EXPECT_LE(ours, 1.03 * best);
}

TEST(SlotIndex, DomainsFollowTheWorkers) {
  Rng rng(testing::TestSeed());
  SlotIndex index;
  std::map<WorkerId, WorkerView> workers;
  for (int round = 0; round < 1500; ++round) {
    const WorkerId id(absl::StrCat("w", rng.Below(8)));
    if (workers.contains(id) && rng.Chance(0.3)) {
      index.Remove(id);
      workers.erase(id);
    } else {
      WorkerView worker;
      worker.id = id;
      worker.ready = rng.Chance(0.8);
      worker.path = synthetic::RandomPath(rng);
      const int slots = 1 + static_cast<int>(rng.Below(4));
      for (int i = 0; i < slots; ++i) {
        SlotView slot;
        slot.device = absl::StrCat("cpu:", i);
        if (rng.Chance(0.3)) slot.held_by = JobId("job");
        if (rng.Chance(0.2)) slot.reserved = absl::StrCat("r", rng.Below(2));
        worker.slots.push_back(slot);
      }
      index.Put(worker);
      workers[id] = worker;
    }
    SlotIndex fresh;
    for (const auto& [other, worker] : workers) fresh.Put(worker);
    ASSERT_EQ(index, fresh) << "after change " << round;
  }
}

TEST(Scheduler, GangThatFitsButNotInsideOneRack_SaysWhatWouldHelp) {
  SlotIndex slots;
  for (const char* name : {"a0", "a1"}) AddWorker(slots, name, 4, {"", "", "a", ""}, /*busy=*/1);
  for (const char* name : {"b0", "b1"}) AddWorker(slots, name, 4, {"", "", "b", ""}, /*busy=*/2);
  RunningJobs running;
  running.Put(JobId("holder"), {.name = "the-holder"});
  const KeptSlots kept;
  const QueueTree tree;
  const QueueUse use(tree);
  const QueueHistory history;
  WaitingQueue queue;
  WaitingJob job = Gang(8);
  job.queue = "default";
  job.placement.required = v1::TOPOLOGY_LEVEL_RACK;
  queue.Add(job);
  const Schedule plan =
      Plan({slots, running, kept, tree, use, history}, queue, SchedulePolicy(), absl::UnixEpoch());
  ASSERT_THAT(plan.explanations, SizeIs(1));
  const v1::WaitReason& reason = plan.explanations[0].reason();
  EXPECT_EQ(reason.code(), v1::WAIT_CODE_DOMAINS_FULL);
  EXPECT_EQ(reason.domain(), "a");
  EXPECT_EQ(reason.domain_slots(), 6);
  EXPECT_EQ(reason.slots_free(), 10);
  ASSERT_EQ(reason.change().jobs_end_size(), 1);
  EXPECT_EQ(reason.change().jobs_end(0).job_name(), "the-holder");
  EXPECT_EQ(reason.change().jobs_end(0).slots(), 2);
  EXPECT_EQ(reason.change().level_at_least(), v1::TOPOLOGY_LEVEL_CLUSTER);
}

}  // namespace
}  // namespace muster::coordinator
