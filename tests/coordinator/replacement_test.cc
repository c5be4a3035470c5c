#include "coordinator/scheduler/replacement.h"

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
#include "coordinator/scheduler/demand.h"
#include "coordinator/scheduler/gang_layout.h"
#include "coordinator/scheduler/placement.h"
#include "tests/support/random_cluster.h"
#include "tests/support/sanitized.h"
#include "tests/support/seed.h"

namespace muster::coordinator {
namespace {

using synthetic::AddWorker;
using synthetic::Gang;
using Placements = std::vector<v1::Placement>;

Placements Place(SlotIndex& index, const WaitingJob& job) {
  SlotIndex::Trial trial(index);
  return PlaceGang(trial, job).value_or(Placements());
}

void Hold(SlotIndex& index, const Placements& placements, const JobId& job) {
  for (const v1::Placement& placement : placements) {
    index.SetHolder(WorkerId(placement.worker()), placement.device(), job);
  }
}

// Where the ranks of `lost` go; the worker is gone.
std::optional<Placements> Replace(SlotIndex& index, const WaitingJob& job,
                                  const Placements& placements, const std::string& lost,
                                  std::set<WorkerId> excluded = {}) {
  std::set<int32_t> ranks;
  for (const v1::Placement& placement : placements) {
    if (placement.worker() == lost) ranks.insert(placement.rank());
  }
  index.Remove(WorkerId(lost));
  SlotIndex::Trial trial(index);
  return PlaceReplacements(trial, job, placements, ranks, excluded);
}

// "2:w3 3:w3"
std::string Text(const std::optional<Placements>& placements) {
  if (!placements.has_value()) return "none";
  std::vector<std::string> texts;
  for (const v1::Placement& placement : *placements) {
    texts.push_back(absl::StrCat(placement.rank(), ":", placement.worker()));
  }
  return absl::StrJoin(texts, " ");
}

TEST(Replacement, RanksOfALostWorker_GoTogetherToTheNearestThatHoldsThem) {
  SlotIndex index;
  for (const char* name : {"a0", "a1"}) AddWorker(index, name, 2, {"", "", "a", ""});
  const WaitingJob job = Gang(4);
  const Placements placements = Place(index, job);
  ASSERT_EQ(Text(placements), "0:a0 1:a0 2:a1 3:a1");
  Hold(index, placements, job.id);
  AddWorker(index, "b0", 2, {"", "", "b", ""});
  AddWorker(index, "a2", 2, {"", "", "a", ""});
  EXPECT_EQ(Text(Replace(index, job, placements, "a1")), "2:a2 3:a2");
  EXPECT_EQ(Text(Replace(index, job, placements, "a1", {WorkerId("a2")})), "2:b0 3:b0");
  EXPECT_EQ(Text(Replace(index, job, placements, "a1", {WorkerId("a2"), WorkerId("b0")})), "none");
}

TEST(Replacement, RankWithAShare_GetsADeviceOnWhichTheGangHasNone) {
  SlotIndex index;
  for (const char* name : {"a", "b"}) AddWorker(index, name, 1);
  WaitingJob job = Gang(2);
  job.share = 300;
  const Placements placements = Place(index, job);
  ASSERT_EQ(Text(placements), "0:a 1:b");
  for (const v1::Placement& placement : placements) {
    index.SetShare(WorkerId(placement.worker()), placement.device(), job.id, job.share);
  }
  const SlotIndex before = index;
  EXPECT_EQ(Text(Replace(index, job, placements, "b")), "none") << "a has room, for others";
  AddWorker(index, "c", 1);
  index.SetShare(WorkerId("c"), "cpu:0", JobId("other"), 701);
  EXPECT_EQ(Text(Replace(index, job, placements, "b")), "none");
  index.SetShare(WorkerId("c"), "cpu:0", JobId("other"), 700);
  EXPECT_EQ(Text(Replace(index, job, placements, "b")), "1:c");
  index.Remove(WorkerId("c"));
  SlotIndex rest = before;
  rest.Remove(WorkerId("b"));
  EXPECT_EQ(index, rest);
}

TEST(Replacement, TensorGroup_StaysOnOneWorker) {
  SlotIndex index;
  for (const char* name : {"w0", "w1"}) AddWorker(index, name, 2);
  WaitingJob job = Gang(4);
  job.group = 2;
  const Placements placements = Place(index, job);
  Hold(index, placements, job.id);
  AddWorker(index, "half-0", 2, {}, /*busy=*/1);
  AddWorker(index, "half-1", 2, {}, /*busy=*/1);
  EXPECT_EQ(Text(Replace(index, job, placements, "w1")), "none");
  AddWorker(index, "whole", 2);
  EXPECT_EQ(Text(Replace(index, job, placements, "w1")), "2:whole 3:whole");
}

TEST(Replacement, RequiredDomain_IsTheOneOfTheRanksThatStay) {
  SlotIndex index;
  for (const char* name : {"a0", "a1"}) AddWorker(index, name, 2, {"", "", "a", ""});
  WaitingJob job = Gang(4);
  job.placement.required = v1::TOPOLOGY_LEVEL_RACK;
  const Placements placements = Place(index, job);
  Hold(index, placements, job.id);
  AddWorker(index, "b0", 4, {"", "", "b", ""});
  EXPECT_EQ(Text(Replace(index, job, placements, "a1")), "none");
  for (const char* name : {"a2", "a3"}) AddWorker(index, name, 1, {"", "", "a", ""});
  EXPECT_EQ(Text(Replace(index, job, placements, "a1")), "2:a2 3:a3");
}

// A segment that has lost all its ranks may go to any domain that holds it whole.
TEST(Replacement, SegmentWithoutRanks_TriesDomainsUntilOneHoldsIt) {
  SlotIndex index;
  AddWorker(index, "a0", 2, {"", "", "a", ""});
  AddWorker(index, "b0", 2, {"", "", "b", ""});
  WaitingJob job = Gang(4);
  job.placement.required = v1::TOPOLOGY_LEVEL_RACK;
  job.placement.segment = 2;
  const Placements placements = Place(index, job);
  ASSERT_EQ(Text(placements), "0:a0 1:a0 2:b0 3:b0");
  Hold(index, placements, job.id);
  AddWorker(index, "a1", 1, {"", "", "a", ""});
  AddWorker(index, "b1", 1, {"", "", "b", ""});
  EXPECT_EQ(Text(Replace(index, job, placements, "b0")), "none");
  for (const char* name : {"c0", "c1"}) AddWorker(index, name, 1, {"", "", "c", ""});
  EXPECT_EQ(Text(Replace(index, job, placements, "b0")), "2:c0 3:c1");
}

TEST(Replacement, DevicesReservedForTheJob_AreTaken) {
  SlotIndex index;
  for (const char* name : {"w0", "w1"}) AddWorker(index, name, 1);
  WaitingJob job = Gang(2);
  const Placements placements = Place(index, job);
  Hold(index, placements, job.id);
  WorkerView reserved;
  reserved.id = WorkerId("r0");
  reserved.ready = true;
  reserved.slots.push_back({.device = "cpu:0", .reserved = "vision"});
  index.Put(reserved);
  EXPECT_EQ(Text(Replace(index, job, placements, "w1")), "none");
  job.reservations = {"vision"};
  EXPECT_EQ(Text(Replace(index, job, placements, "w1")), "1:r0");
}

// The first broken rule of a gang that is placed; empty when it keeps all.
std::string BrokenRule(const SlotIndex& index, const WaitingJob& job, const Demand& demand,
                       const Placements& placements) {
  const GangLayout layout(job, /*by_group=*/demand.unit() > 1);
  std::vector<Granule> granules = demand.granules;
  if (demand.limit > kClusterDepth) granules.push_back({demand.limit, demand.ranks});
  for (const Granule& granule : granules) {
    for (int32_t position = 0; position < job.ranks; ++position) {
      const auto first = static_cast<int32_t>(position - position % granule.size);
      const std::string& one = placements[layout.RankAt(first)].worker();
      const std::string& other = placements[layout.RankAt(position)].worker();
      if (one == other) continue;
      const v1::TopologyLevel common =
          CommonLevel(index.Find(WorkerId(one))->path, index.Find(WorkerId(other))->path);
      if (Depth(common) < granule.depth) {
        return absl::StrCat("ranks ", layout.RankAt(first), " on ", one, " and ",
                            layout.RankAt(position), " on ", other, " are too far apart");
      }
    }
  }
  return "";
}

// Where a twin of the lost worker is free, the ranks can go there; wherever they go, the rules
// hold.
TEST(Replacement, RandomGangs_KeepTheirRulesAndMoveNoOtherRank) {
  Rng rng(testing::TestSeed());
  int replaced = 0, without_twin = 0;
  for (int round = 0; round < testing::Cases(3000); ++round) {
    SlotIndex index = synthetic::RandomCluster(rng);
    const WaitingJob job =
        rng.Chance(0.5) ? synthetic::RandomGang(rng) : synthetic::RandomMesh(rng);
    const Demand demand = DemandOf(job, index, /*strict=*/false);
    Placements placements = Place(index, job);
    if (placements.empty() || !BrokenRule(index, job, demand, placements).empty()) continue;
    Hold(index, placements, job.id);
    const std::string lost = placements[rng.Below(placements.size())].worker();
    const bool whole =
        std::all_of(placements.begin(), placements.end(),
                    [&lost](const v1::Placement& at) { return at.worker() == lost; });
    if (whole) continue;
    const bool twin = rng.Chance(0.5);
    if (twin) {
      WorkerView view = *index.Find(WorkerId(lost));
      view.id = WorkerId("twin");
      for (SlotView& slot : view.slots) slot.held_by = JobId();
      index.Put(view);
    }
    const std::optional<Placements> moved = Replace(index, job, placements, lost);
    if (twin) {
      ASSERT_TRUE(moved.has_value()) << "round " << round << ": the twin has room";
    }
    if (!moved.has_value()) continue;
    ++(twin ? replaced : without_twin);
    for (const v1::Placement& placement : *moved) {
      EXPECT_EQ(placements[placement.rank()].worker(), lost) << "a rank moved that stays";
      placements[placement.rank()] = placement;
      const WorkerView& worker = *index.Find(WorkerId(placement.worker()));
      const auto slot =
          std::find_if(worker.slots.begin(), worker.slots.end(),
                       [&](const SlotView& view) { return view.device == placement.device(); });
      ASSERT_NE(slot, worker.slots.end());
      EXPECT_TRUE(slot->free()) << "round " << round << " " << placement.ShortDebugString();
    }
    std::set<std::string> slots;
    for (const v1::Placement& placement : placements) {
      EXPECT_NE(placement.worker(), lost);
      EXPECT_TRUE(slots.insert(absl::StrCat(placement.worker(), "/", placement.device())).second);
    }
    EXPECT_EQ(BrokenRule(index, job, DemandOf(job, index, /*strict=*/false), placements), "")
        << "round " << round << " after " << Text(moved);
  }
  EXPECT_GT(replaced, testing::Cases(100));
  EXPECT_GT(without_twin, testing::Cases(30));
}

}  // namespace
}  // namespace muster::coordinator
