#include "coordinator/scheduler/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "proto/time.h"
#include "tests/support/seed.h"

namespace muster::coordinator {
namespace {

WorkerView MakeWorker(int index, int slots, int busy = 0) {
  WorkerView worker;
  worker.id = WorkerId(absl::StrCat("w", index));
  worker.ready = true;
  for (int i = 0; i < slots; ++i) {
    SlotView slot;
    slot.device = absl::StrCat("cpu:", i);
    if (i < busy) slot.held_by = JobId("holder");
    worker.slots.push_back(slot);
  }
  return worker;
}

WaitingJob MakeJob(int index, int ranks, int priority = 50) {
  WaitingJob job;
  job.id = JobId(absl::StrCat("job-", index));
  job.name = absl::StrCat("job-", index);
  job.queue = "default";
  job.ranks = ranks;
  job.priority = priority;
  job.submit_sequence = static_cast<uint64_t>(index) + 1;
  return job;
}

struct ClusterView {
  std::vector<WorkerView> workers;
};

// Queues beside each other, without quota.
QueueTree Queues() {
  v1::QueuePolicy policy;
  for (const char* name : {"default", "other", "elsewhere", "a", "b"}) {
    policy.add_queues()->set_name(name);
  }
  return *QueueTree::Make(policy);
}

// The slots of a cluster, and the jobs that hold some.
struct State {
  explicit State(const ClusterView& cluster = {}) {
    for (const WorkerView& worker : cluster.workers) slots.Put(worker);
    RunningJob holder;
    holder.name = "the-holder";
    holder.queue = "elsewhere";
    running.Put(JobId("holder"), holder);
  }
  Snapshot snapshot() { return {slots, running, kept, tree, use, history}; }
  void EndsAt(const JobId& id, absl::Time at) {
    const RunningJob* known = running.Find(id);
    RunningJob job = known == nullptr ? RunningJob() : *known;
    job.ends_at = at;
    running.Put(id, job);
  }

  SlotIndex slots;
  RunningJobs running;
  KeptSlots kept;
  QueueTree tree = Queues();
  QueueUse use{tree};
  QueueHistory history;
};

WaitingQueue QueueOf(const std::vector<WaitingJob>& jobs) {
  WaitingQueue queue;
  for (const WaitingJob& job : jobs) queue.Add(job);
  return queue;
}

Schedule PlanNow(const ClusterView& cluster, const std::vector<WaitingJob>& jobs) {
  State state(cluster);
  return Plan(state.snapshot(), QueueOf(jobs), SchedulePolicy(), absl::UnixEpoch());
}

const Start& StartOf(const Schedule& plan, size_t index = 0) {
  return std::get<Start>(plan.decisions[index]);
}

std::set<std::string> WorkersOf(const Start& start) {
  std::set<std::string> out;
  for (const v1::Placement& placement : start.placements) out.insert(placement.worker());
  return out;
}

TEST(Scheduler, GangThatFitsOneWorker_TakesTheTightestOne) {
  const Schedule plan =
      PlanNow({{MakeWorker(0, 8), MakeWorker(1, 3), MakeWorker(2, 4)}}, {MakeJob(0, 3)});
  ASSERT_EQ(plan.decisions.size(), 1u);
  EXPECT_EQ(WorkersOf(StartOf(plan)), std::set<std::string>{"w1"});
}

WaitingJob MakeTensorJob(int index, int ranks, int group, int stride = 1) {
  WaitingJob job = MakeJob(index, ranks);
  job.group = group;
  job.stride = stride;
  return job;
}

std::string WorkersByRank(const Start& start) {
  std::string text;
  for (const v1::Placement& placement : start.placements) {
    absl::StrAppend(&text, text.empty() ? "" : " ", placement.worker());
  }
  return text;
}

TEST(Scheduler, TensorGroups_StayOnOneWorker) {
  const Schedule plan = PlanNow({{MakeWorker(0, 6), MakeWorker(1, 6)}}, {MakeTensorJob(0, 8, 4)});
  ASSERT_EQ(plan.decisions.size(), 1u);
  EXPECT_EQ(WorkersByRank(StartOf(plan)), "w0 w0 w0 w0 w1 w1 w1 w1");
}

TEST(Scheduler, TensorGroupsOfRanksThatAreNotNeighbours_StayOnOneWorker) {
  // Data 2 before tensor 2: ranks 0 and 2 are one group, 1 and 3 the other.
  const Schedule plan =
      PlanNow({{MakeWorker(0, 3), MakeWorker(1, 3)}}, {MakeTensorJob(0, 4, 2, /*stride=*/2)});
  ASSERT_EQ(plan.decisions.size(), 1u);
  EXPECT_EQ(WorkersByRank(StartOf(plan)), "w0 w1 w0 w1");
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(StartOf(plan).placements[static_cast<size_t>(rank)].rank(), rank);
  }
}

TEST(Scheduler, TensorGroupLargerThanEveryWorker_SpansWorkers) {
  const Schedule plan = PlanNow({{MakeWorker(0, 1), MakeWorker(1, 1)}}, {MakeTensorJob(0, 2, 2)});
  ASSERT_EQ(plan.decisions.size(), 1u);
  EXPECT_EQ(WorkersByRank(StartOf(plan)), "w0 w1");
}

TEST(Scheduler, TensorGroupsThatDoNotFit_WaitAndSayWhy) {
  const Schedule waits = PlanNow({{MakeWorker(0, 4, 1), MakeWorker(1, 4, 1), MakeWorker(2, 4, 2)}},
                                 {MakeTensorJob(0, 8, 4)});
  ASSERT_TRUE(waits.decisions.empty());
  const v1::WaitReason& reason = waits.explanations[0].reason();
  EXPECT_EQ(reason.code(), v1::WAIT_CODE_SLOTS_SCATTERED);
  EXPECT_EQ(reason.group(), 4);
  std::string free;
  for (const v1::WorkerSlots& worker : reason.free()) {
    absl::StrAppend(&free, worker.worker(), " ", worker.slots(), " ");
  }
  EXPECT_EQ(free, "w0 3 w1 3 w2 2 ");
  const Schedule never =
      PlanNow({{MakeWorker(0, 6), MakeWorker(1, 3)}}, {MakeTensorJob(0, 8, 4), MakeJob(1, 1)});
  EXPECT_EQ(never.explanations[0].reason().code(), v1::WAIT_CODE_GROUPS_TOO_LARGE);
  EXPECT_EQ(never.explanations[0].reason().groups_total(), 1);
  EXPECT_EQ(never.explanations[0].reason().change().worker_with_slots(), 4);
  EXPECT_EQ(never.decisions.size(), 1u) << "a job that can never start holds back none";
}

TEST(Scheduler, SlotsOfDifferentWorkers_HoldAGangTogether) {
  const Schedule plan =
      PlanNow({{MakeWorker(0, 4), MakeWorker(1, 6), MakeWorker(2, 8)}}, {MakeJob(0, 12)});
  ASSERT_EQ(plan.decisions.size(), 1u);
  EXPECT_EQ(WorkersOf(StartOf(plan)), (std::set<std::string>{"w0", "w2"}));
}

// On random small clusters a gang starts exactly when enough whole groups fit on workers.
TEST(Scheduler, GangOfGroups_StartsExactlyWhenItFits) {
  Rng rng(testing::TestSeed());
  for (int round = 0; round < 2000; ++round) {
    ClusterView cluster;
    int largest = 0;
    const int workers = 1 + static_cast<int>(rng.Below(4));
    for (int i = 0; i < workers; ++i) {
      const int slots = 1 + static_cast<int>(rng.Below(8));
      cluster.workers.push_back(MakeWorker(i, slots, static_cast<int>(rng.Below(slots + 1))));
      largest = std::max(largest, slots);
    }
    const int group = 1 + static_cast<int>(rng.Below(4));
    const int groups = 1 + static_cast<int>(rng.Below(4));
    const int stride = rng.Below(2) == 0 ? 1 : groups;
    const int unit = group <= largest ? group : 1;
    int capacity = 0;
    for (const WorkerView& worker : cluster.workers) {
      capacity +=
          static_cast<int>(std::count_if(worker.slots.begin(), worker.slots.end(),
                                         [](const SlotView& slot) { return slot.free(); })) /
          unit;
    }
    const Schedule plan = PlanNow(cluster, {MakeTensorJob(0, group * groups, group, stride)});
    ASSERT_EQ(plan.decisions.size() == 1, capacity >= group * groups / unit) << "round " << round;
    if (plan.decisions.empty() || unit == 1) continue;
    for (const v1::Placement& placement : StartOf(plan).placements) {
      const int rank = placement.rank();
      const int first = rank / (stride * group) * (stride * group) + rank % stride;
      EXPECT_EQ(placement.worker(), StartOf(plan).placements[static_cast<size_t>(first)].worker())
          << "round " << round << ", rank " << rank;
    }
  }
}

TEST(Scheduler, HigherPriority_GoesFirstEvenIfSubmittedLater) {
  const Schedule plan = PlanNow({{MakeWorker(0, 2)}}, {MakeJob(0, 2, 10), MakeJob(1, 2, 90)});
  ASSERT_EQ(plan.decisions.size(), 1u);
  EXPECT_EQ(StartOf(plan).job, JobId("job-1"));
}

TEST(Scheduler, JobThatDoesNotFit_HoldsBackJobsBehindIt) {
  const Schedule plan = PlanNow({{MakeWorker(0, 4, 2)}}, {MakeJob(0, 4), MakeJob(1, 1)});
  EXPECT_TRUE(plan.decisions.empty());
  ASSERT_EQ(plan.explanations.size(), 2u);
  const v1::WaitReason& front = plan.explanations[0].reason();
  EXPECT_EQ(front.code(), v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_EQ(front.ranks(), 4);
  EXPECT_EQ(front.slots_free(), 2);
  EXPECT_EQ(front.slots_total(), 4);
  ASSERT_EQ(front.change().jobs_end_size(), 1);
  EXPECT_EQ(front.change().jobs_end(0).job_id(), "holder");
  EXPECT_EQ(front.change().jobs_end(0).job_name(), "the-holder");
  EXPECT_EQ(front.change().jobs_end(0).slots(), 2);
  const v1::WaitReason& second = plan.explanations[1].reason();
  EXPECT_EQ(second.code(), v1::WAIT_CODE_BEHIND);
  EXPECT_EQ(second.blocker().job_name(), "job-0");
  EXPECT_EQ(second.change().priority_above(), 50);
}

TEST(Scheduler, MoreRanksThanTheClusterHas_SaysWhatToAdd) {
  const Schedule plan = PlanNow({{MakeWorker(0, 4)}}, {MakeJob(0, 64)});
  ASSERT_EQ(plan.explanations.size(), 1u);
  EXPECT_EQ(plan.explanations[0].reason().code(), v1::WAIT_CODE_CLUSTER_TOO_SMALL);
  EXPECT_EQ(plan.explanations[0].reason().slots_total(), 4);
  EXPECT_EQ(plan.explanations[0].reason().change().slots_added(), 60);
  EXPECT_EQ(plan.explanations[0].reason().change().ranks_at_most(), 4);
}

TEST(Scheduler, GpusThatNoWorkerOffers_HaveToBeAdded) {
  WaitingJob job = MakeJob(0, 2);
  job.device = v1::DEVICE_KIND_CUDA;
  const Schedule plan = PlanNow({{MakeWorker(0, 4)}}, {job});
  ASSERT_EQ(plan.explanations.size(), 1u);
  const v1::WaitReason& reason = plan.explanations[0].reason();
  EXPECT_EQ(reason.code(), v1::WAIT_CODE_CLUSTER_TOO_SMALL);
  EXPECT_EQ(reason.device(), v1::DEVICE_KIND_CUDA);
  EXPECT_EQ(reason.change().slots_added(), 2);
  EXPECT_EQ(reason.change().ranks_at_most(), 0) << "no number of ranks would do";
}

TEST(Scheduler, WorkerThatIsAway_GetsNothingAndIsNamed) {
  WorkerView away = MakeWorker(1, 2);
  away.ready = false;
  away.away = v1::AWAY_REASON_NOT_HEARD;
  const Schedule plan = PlanNow({{MakeWorker(0, 1), away}}, {MakeJob(0, 2)});
  EXPECT_TRUE(plan.decisions.empty());
  ASSERT_EQ(plan.explanations[0].reason().change().workers_return_size(), 1);
  const v1::AwayWorker named = plan.explanations[0].reason().change().workers_return(0);
  EXPECT_EQ(named.worker(), "w1");
  EXPECT_EQ(named.slots(), 2);
  EXPECT_EQ(named.reason(), v1::AWAY_REASON_NOT_HEARD);
}

TEST(Scheduler, BackOff_WakesAtItsEndAndHoldsBackNone) {
  WaitingJob backing_off = MakeJob(0, 1, 90);
  backing_off.not_before = absl::UnixEpoch() + absl::Seconds(7);
  const Schedule plan = PlanNow({{MakeWorker(0, 1)}}, {backing_off, MakeJob(1, 1)});
  ASSERT_EQ(plan.decisions.size(), 1u);
  EXPECT_EQ(StartOf(plan).job, JobId("job-1"));
  EXPECT_EQ(plan.wake_at, backing_off.not_before);
  EXPECT_EQ(plan.explanations[0].reason().code(), v1::WAIT_CODE_BACK_OFF);
  EXPECT_EQ(plan.explanations[0].reason().until().seconds(), 7);
}

TEST(Scheduler, JobsBeyondTheHorizon_AreNotLookedAt) {
  std::vector<WaitingJob> jobs = {MakeJob(0, 4, 90)};
  for (int i = 1; i <= 10'000; ++i) jobs.push_back(MakeJob(i, 1));
  WaitingJob other_queue = MakeJob(10'001, 2, 10);
  other_queue.queue = "other";
  jobs.push_back(other_queue);
  const Schedule plan = PlanNow({{MakeWorker(0, 4, 2)}}, jobs);
  ASSERT_EQ(plan.decisions.size(), 1u);
  EXPECT_EQ(StartOf(plan).job, other_queue.id);
  const size_t behind = static_cast<size_t>(SchedulePolicy().explained_behind);
  EXPECT_EQ(plan.explanations.size(), 1 + behind);
  EXPECT_FALSE(plan.horizon.Excludes(jobs[behind]));
  EXPECT_TRUE(plan.horizon.Excludes(jobs[behind + 1]));
  EXPECT_FALSE(plan.horizon.Excludes(MakeJob(20'000, 1, 90 + 1)));
}

TEST(Scheduler, ManyJobsLargerThanTheCluster_AreNotLookedAtAndHoldBackNone) {
  std::vector<WaitingJob> jobs;
  for (int i = 0; i < 10'000; ++i) jobs.push_back(MakeJob(i, 64));
  jobs.push_back(MakeJob(10'000, 2));
  const Schedule plan = PlanNow({{MakeWorker(0, 2)}}, jobs);
  ASSERT_EQ(plan.decisions.size(), 1u);
  EXPECT_EQ(StartOf(plan).job, jobs.back().id);
  const size_t behind = static_cast<size_t>(SchedulePolicy().explained_behind);
  EXPECT_EQ(plan.explanations.size(), 1 + behind);
  EXPECT_TRUE(plan.horizon.Excludes(jobs[behind + 1]));
  EXPECT_FALSE(plan.horizon.Excludes(MakeJob(20'000, 2)));
}

TEST(Scheduler, BackOffBeyondTheHorizon_StillWakes) {
  std::vector<WaitingJob> jobs = {MakeJob(0, 4, 90)};
  for (int i = 1; i <= 100; ++i) jobs.push_back(MakeJob(i, 1));
  jobs[100].not_before = absl::UnixEpoch() + absl::Seconds(7);
  EXPECT_EQ(PlanNow({{MakeWorker(0, 4, 2)}}, jobs).wake_at, jobs[100].not_before);
}

// The fewest workers whose free slots hold `ranks`, by trying every set; -1 = none.
int FewestByBruteForce(const std::vector<int>& free, int ranks) {
  int best = -1;
  for (unsigned set = 0; set < (1u << free.size()); ++set) {
    int sum = 0, count = 0;
    for (size_t i = 0; i < free.size(); ++i) {
      if (set & (1u << i)) {
        sum += free[i];
        ++count;
      }
    }
    if (sum >= ranks && (best < 0 || count < best)) best = count;
  }
  return best;
}

int TotalSlots(const ClusterView& cluster) {
  size_t total = 0;
  for (const WorkerView& worker : cluster.workers) total += worker.slots.size();
  return static_cast<int>(total);
}

TEST(Scheduler, JobLargerThanTheCluster_SaysSoAndHoldsBackNone) {
  ClusterView cluster;
  cluster.workers.push_back(MakeWorker(0, 2, 0));
  const Schedule plan = PlanNow(cluster, {MakeJob(0, 64, 90), MakeJob(1, 2, 10)});
  ASSERT_EQ(plan.decisions.size(), 1u);
  EXPECT_EQ(StartOf(plan).job, MakeJob(1, 2, 10).id);
  ASSERT_EQ(plan.explanations.size(), 1u);
  EXPECT_EQ(plan.explanations[0].reason().code(), v1::WAIT_CODE_CLUSTER_TOO_SMALL);
}

TEST(Scheduler, RandomClusters_GangsAreWholeDisjointAndOnTheFewestWorkers) {
  Rng rng(muster::testing::TestSeed());
  for (int round = 0; round < 2000; ++round) {
    ClusterView cluster;
    const int workers = 1 + static_cast<int>(rng.Below(7));
    for (int i = 0; i < workers; ++i) {
      const int slots = static_cast<int>(rng.Below(6));
      WorkerView worker =
          MakeWorker(i, slots, slots == 0 ? 0 : static_cast<int>(rng.Below(slots + 1u)));
      worker.ready = !rng.Chance(0.1);
      cluster.workers.push_back(worker);
    }
    std::vector<WaitingJob> queue;
    for (int i = 0; i < 4; ++i) {
      queue.push_back(
          MakeJob(i, 1 + static_cast<int>(rng.Below(8)), static_cast<int>(rng.Below(3)) * 10));
    }
    const Schedule plan = PlanNow(cluster, queue);
    EXPECT_EQ(plan.decisions.size() + plan.explanations.size(), queue.size());

    // Checks the decisions one by one, in order of priority and submission.
    std::stable_sort(queue.begin(), queue.end(), [](const WaitingJob& a, const WaitingJob& b) {
      return a.priority > b.priority;
    });
    std::set<std::string> taken;
    size_t at = 0;
    for (const WaitingJob& job : queue) {
      std::vector<int> free;
      for (const WorkerView& worker : cluster.workers) {
        int count = 0;
        for (const SlotView& slot : worker.slots) {
          count += worker.ready && slot.free() &&
                   taken.count(absl::StrCat(worker.id.value(), slot.device)) == 0;
        }
        free.push_back(count);
      }
      const int fewest = FewestByBruteForce(free, job.ranks);
      if (TotalSlots(cluster) < job.ranks) continue;  // waits for more machines, holds back none
      if (fewest < 0) break;                          // strict order: nothing behind it may start
      ASSERT_LT(at, plan.decisions.size()) << "round " << round << " " << job.id;
      const Start& decision = StartOf(plan, at++);
      ASSERT_EQ(decision.job, job.id) << "round " << round;
      ASSERT_EQ(static_cast<int>(decision.placements.size()), job.ranks);
      EXPECT_EQ(static_cast<int>(WorkersOf(decision).size()), fewest) << "round " << round;
      for (int rank = 0; rank < job.ranks; ++rank) {
        const v1::Placement& placement = decision.placements[static_cast<size_t>(rank)];
        EXPECT_EQ(placement.rank(), rank);
        EXPECT_TRUE(taken.insert(placement.worker() + placement.device()).second)
            << "round " << round << ": slot given twice";
      }
    }
    EXPECT_EQ(at, plan.decisions.size()) << "round " << round;
  }
}

// The sums after many changes are those of an index that was made at once.
TEST(SlotIndex, ChangesOneByOne_LeadToTheSameSums) {
  Rng rng(testing::TestSeed());
  SlotIndex index;
  std::map<WorkerId, WorkerView> workers;
  for (int round = 0; round < 2000; ++round) {
    const WorkerId id(absl::StrCat("w", rng.Below(6)));
    const auto known = workers.find(id);
    if (known == workers.end()) {
      WorkerView worker = MakeWorker(0, static_cast<int>(1 + rng.Below(5)));
      worker.id = id;
      if (rng.Below(3) == 0) worker.slots[0].kind = v1::DEVICE_KIND_CUDA;
      index.Put(worker);
      workers[id] = std::move(worker);
    } else if (const uint64_t what = rng.Below(10); what == 0) {
      index.Remove(id);
      workers.erase(known);
    } else if (what < 3) {
      known->second.ready = !known->second.ready;
      index.Put(known->second);
    } else {
      SlotView& slot = known->second.slots[rng.Below(known->second.slots.size())];
      slot.held_by = slot.held() ? JobId() : JobId(absl::StrCat("job-", rng.Below(3)));
      index.SetHolder(id, slot.device, slot.held_by);
    }
    SlotIndex fresh;
    for (const auto& [other, worker] : workers) fresh.Put(worker);
    ASSERT_EQ(index, fresh) << "after change " << round;
  }
}

TEST(SlotIndex, PlanLeavesItAsItWas) {
  State state;
  for (int i = 0; i < 4; ++i) state.slots.Put(MakeWorker(i, 8, /*busy=*/i));
  const SlotIndex before = state.slots;
  std::vector<WaitingJob> jobs;
  for (int i = 0; i < 5; ++i) jobs.push_back(MakeJob(i, 6));
  const WaitingQueue queue = QueueOf(jobs);
  const Schedule first = Plan(state.snapshot(), queue, SchedulePolicy(), absl::UnixEpoch());
  EXPECT_EQ(first.decisions.size(), 4u);
  EXPECT_EQ(state.slots, before);
  state.EndsAt(JobId("holder"), absl::UnixEpoch() + absl::Hours(1));
  Explain(state.snapshot(), queue, SchedulePolicy(), absl::UnixEpoch(), jobs[4].id);
  EXPECT_EQ(state.slots, before);
  const Schedule again = Plan(state.snapshot(), queue, SchedulePolicy(), absl::UnixEpoch());
  ASSERT_EQ(again.decisions.size(), first.decisions.size() + 1) << "its start is known now";
  EXPECT_EQ(std::get<Reserve>(again.decisions.back()).job, jobs[4].id);
}

TEST(Scheduler, ExplainedJobThatFits_Starts) {
  State state({{MakeWorker(0, 4)}});
  const Forecast forecast = Explain(state.snapshot(), QueueOf({MakeJob(0, 2), MakeJob(1, 2)}),
                                    SchedulePolicy(), absl::UnixEpoch(), JobId("job-1"));
  ASSERT_TRUE(forecast.start.has_value());
  EXPECT_EQ(forecast.start->placements.size(), 2u);
}

TEST(Scheduler, JobBeyondTheHorizon_IsExplainedWhenAsked) {
  State state({{MakeWorker(0, 4, /*busy=*/2)}});
  std::vector<WaitingJob> jobs;
  for (int i = 0; i < 500; ++i) jobs.push_back(MakeJob(i, 4));
  const Forecast forecast =
      Explain(state.snapshot(), QueueOf(jobs), SchedulePolicy(), absl::UnixEpoch(), jobs[400].id);
  EXPECT_EQ(forecast.reason.code(), v1::WAIT_CODE_BEHIND);
  EXPECT_EQ(forecast.reason.ahead(), 400);
  EXPECT_FALSE(forecast.reason.has_estimated_start()) << "no end of the holder is known";
}

TEST(Scheduler, EstimatedStart_IsWhenTheJobsInFrontHaveRun) {
  State state({{MakeWorker(0, 4, /*busy=*/4)}});
  state.EndsAt(JobId("holder"), absl::UnixEpoch() + absl::Seconds(100));
  WaitingJob front = MakeJob(0, 4);
  front.runtime = absl::Seconds(30);
  const WaitingQueue queue = QueueOf({front, MakeJob(1, 1), MakeJob(2, 4)});
  const auto estimate = [&](int job) {
    const v1::WaitReason reason = Explain(state.snapshot(), queue, SchedulePolicy(),
                                          absl::UnixEpoch(), JobId(absl::StrCat("job-", job)))
                                      .reason;
    return reason.has_estimated_start() ? reason.estimated_start().seconds() : -1;
  };
  EXPECT_EQ(estimate(0), 100);
  EXPECT_EQ(estimate(1), 130);
  EXPECT_EQ(estimate(2), -1) << "nobody knows when job-1 ends";
}

// On random clusters the estimate is when plans, made one after the other as jobs end, start it.
TEST(Scheduler, EstimatedStart_IsWhenPlansStartIt) {
  Rng rng(testing::TestSeed());
  int estimated = 0;
  for (int round = 0; round < 300; ++round) {
    State state;
    absl::Time now = absl::UnixEpoch();
    std::map<JobId, absl::Time> ends;
    const int workers = 1 + static_cast<int>(rng.Below(4));
    for (int i = 0; i < workers; ++i) {
      WorkerView worker = MakeWorker(i, 1 + static_cast<int>(rng.Below(6)));
      for (SlotView& slot : worker.slots) {
        if (rng.Below(3) == 0) continue;
        slot.held_by = JobId(absl::StrCat("running-", rng.Below(5)));
        if (!ends.contains(slot.held_by)) {
          ends[slot.held_by] = now + absl::Seconds(1 + static_cast<int>(rng.Below(1000)));
        }
      }
      state.slots.Put(worker);
    }
    for (const auto& [job, end] : ends) state.EndsAt(job, end);
    std::vector<WaitingJob> jobs;
    for (int i = 0; i < 6; ++i) {
      jobs.push_back(
          MakeJob(i, 1 + static_cast<int>(rng.Below(8)), static_cast<int>(rng.Below(3))));
      jobs.back().queue = rng.Below(2) == 0 ? "a" : "b";
      jobs.back().runtime = absl::Seconds(1 + static_cast<int>(rng.Below(1000)));
      if (rng.Below(5) == 0) {
        jobs.back().not_before = now + absl::Seconds(1 + static_cast<int>(rng.Below(1000)));
      }
    }
    WaitingQueue queue = QueueOf(jobs);
    const WaitingJob target = jobs[rng.Below(jobs.size())];
    const Forecast forecast = Explain(state.snapshot(), queue, SchedulePolicy(), now, target.id);
    absl::Time started = absl::InfiniteFuture();
    while (now != absl::InfiniteFuture() && started == absl::InfiniteFuture()) {
      const Schedule plan = Plan(state.snapshot(), queue, SchedulePolicy(), now);
      for (size_t i = 0; i < plan.decisions.size(); ++i) {
        if (!ChangesState(plan.decisions[i])) continue;
        const Start& start = StartOf(plan, i);
        if (start.job == target.id) started = now;
        for (const v1::Placement& placement : start.placements) {
          state.slots.SetHolder(WorkerId(placement.worker()), placement.device(), start.job);
        }
        ends[start.job] = now + queue.Find(start.job)->runtime;
        const WaitingJob& job = *queue.Find(start.job);
        RunningJob running;
        running.queue = job.queue;
        running.ranks = job.ranks;
        running.ends_at = ends[start.job];
        running.started_at = now;
        running.min_runtime = absl::InfiniteDuration();  // nobody is stopped
        state.running.Put(start.job, running);
        state.use.Count(state.tree, state.tree.Find(job.queue), job.device, job.ranks, "", 1);
        queue.Remove(start.job);
      }
      now = plan.wake_at;
      for (const auto& [job, end] : ends) now = std::min(now, end);
      for (auto end = ends.begin(); end != ends.end();) {
        if (end->second > now) {
          ++end;
          continue;
        }
        const std::set<WorkerId> held = state.slots.WorkersOf(end->first);
        for (const WorkerId& id : held) {
          const WorkerView worker = *state.slots.Find(id);
          for (const SlotView& slot : worker.slots) {
            if (slot.held_by == end->first) state.slots.SetHolder(id, slot.device, JobId());
          }
        }
        if (const RunningJob* job = state.running.Find(end->first); job != nullptr) {
          state.use.Count(state.tree, state.tree.Find(job->queue), job->device, job->ranks, "", -1);
          state.running.Remove(end->first);
        }
        end = ends.erase(end);
      }
    }
    if (forecast.start.has_value()) {
      EXPECT_EQ(started, absl::UnixEpoch()) << "round " << round;
    } else if (forecast.reason.has_estimated_start()) {
      EXPECT_EQ(started, FromProto(forecast.reason.estimated_start())) << "round " << round;
      ++estimated;
    } else {
      EXPECT_EQ(started, absl::InfiniteFuture()) << "round " << round;
    }
  }
  EXPECT_GT(estimated, 50);
}

TEST(Scheduler, ManyWorkersThatAreAway_AreNotAllNamed) {
  ClusterView cluster;
  for (int i = 0; i < 20; ++i) {
    cluster.workers.push_back(MakeWorker(i + 10, 1));
    cluster.workers.back().ready = false;
  }
  const Schedule plan = PlanNow(cluster, {MakeJob(0, 2)});
  ASSERT_EQ(plan.explanations.size(), 1u);
  EXPECT_EQ(plan.explanations[0].reason().change().workers_return_size(), 8);
  EXPECT_EQ(plan.explanations[0].reason().change().workers_return(7).worker(), "w17");
  EXPECT_EQ(plan.explanations[0].reason().change().workers_return_unnamed(), 12);
}

}  // namespace
}  // namespace muster::coordinator
