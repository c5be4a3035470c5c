// How long placement takes, how close it is to the best, and how much it leaves unused. No I/O: the
// scheduler's own functions on simulated clusters. Times are of this thread's CPU.
//
// bench_scheduler            all of it
// bench_scheduler --quick    small sizes, a second or so: that the benchmark works
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/rng.h"
#include "coordinator/scheduler/placement.h"
#include "coordinator/scheduler/scheduler.h"
#include "tests/support/random_cluster.h"

namespace muster::coordinator {
namespace {

double ThreadSeconds() {
  timespec now;
  CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double Quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1,
                         static_cast<size_t>(share * static_cast<double>(values.size())))];
}

void Release(SlotIndex& index, const JobId& job) {
  const std::set<WorkerId> workers = index.WorkersOf(job);
  for (const WorkerId& id : workers) {
    const std::vector<SlotView> slots = index.Find(id)->slots;
    for (const SlotView& slot : slots) {
      if (slot.held_by == job) index.SetHolder(id, slot.device, JobId());
    }
  }
}

void Take(SlotIndex& index, const JobId& job, const std::vector<v1::Placement>& placements) {
  for (const v1::Placement& placement : placements) {
    index.SetHolder(WorkerId(placement.worker()), placement.device(), job);
  }
}

// ---- a large gang on a large cluster ------------------------------------------------------------

void LargeGangs(int workers, int ranks, int rounds) {
  SlotIndex index;
  synthetic::AddFleet(index, workers);
  Rng rng(1);
  // About half of the slots are taken, by whole workers and by parts of them.
  for (const auto& [id, worker] : std::map<WorkerId, WorkerView>(index.workers())) {
    WorkerView busy = worker;
    const uint64_t kind = rng.Below(4);
    const size_t taken = kind == 0 ? 8 : kind == 1 ? rng.Below(9) : kind == 2 ? 4 : 0;
    for (size_t i = 0; i < taken; ++i) busy.slots[i].held_by = JobId("holder");
    index.Put(std::move(busy));
  }
  std::vector<double> seconds;
  std::map<std::string, int> levels;
  for (int round = 0; round < rounds; ++round) {
    WaitingJob job = synthetic::MeshOf(ranks, round);
    const auto placements = [&] {
      SlotIndex::Trial trial(index);
      const double begin = ThreadSeconds();
      auto placed = PlaceGang(trial, job);
      seconds.push_back(ThreadSeconds() - begin);
      return placed;
    }();
    CHECK(placements.has_value());
    ++levels[v1::TopologyLevel_Name(CostOf(index, job, *placements).level())];
    // The next round sees another cluster.
    for (int i = 0; i < 50; ++i) {
      auto worker = index.workers().begin();
      std::advance(worker, static_cast<int64_t>(rng.Below(index.workers().size())));
      WorkerView changed = worker->second;
      for (SlotView& slot : changed.slots) slot.held_by = rng.Chance(0.5) ? JobId("h") : JobId();
      index.Put(std::move(changed));
    }
  }
  std::printf(
      "large gang: %d ranks on %d workers x 8, %d placements: median %.2f ms, p99 %.2f ms, "
      "max %.2f ms (bar: p99 < 10 ms);",
      ranks, workers, rounds, 1e3 * Quantile(seconds, 0.5), 1e3 * Quantile(seconds, 0.99),
      1e3 * Quantile(seconds, 1));
  for (const auto& [level, times] : levels) std::printf(" %s %d", level.c_str(), times);
  std::printf("\n");
}

// ---- close to the best? -------------------------------------------------------------------------

void SmallGangs(int gangs) {
  Rng rng(2);
  std::vector<double> ratios;
  double sum = 0;
  int exact = 0;
  while (static_cast<int>(ratios.size()) < gangs) {
    SlotIndex index = synthetic::RandomCluster(rng);
    const WaitingJob job = synthetic::RandomMesh(rng);
    SlotIndex::Trial trial(index);
    const auto placements = PlaceGang(trial, job);
    if (!placements.has_value()) continue;
    trial.Rollback();
    const double cost = CostOf(index, job, *placements).total();
    if (cost <= 0) continue;
    const double best = synthetic::CheapestByExhaustion(index, job, cost);
    ratios.push_back(cost / best);
    sum += ratios.back();
    if (ratios.back() < 1 + 1e-9) ++exact;
  }
  std::printf(
      "small gangs: %d random gangs on random clusters against all assignments: mean cost "
      "%.4f of the optimum (bar 1.03), p99 %.3f, max %.3f, %d optimal\n",
      gangs, sum / gangs, Quantile(ratios, 0.99), Quantile(ratios, 1), exact);
}

// The least bytes that leave a set of `units` tensor groups of a mesh, per rank of a group. A set
// that touches `a` data rings and `b` pipeline rings has at most a x b groups, and cuts each ring
// that it does not contain.
double LeastCut(int64_t units, const AxisTraffic& data, const AxisTraffic& pipeline) {
  double least = -1;
  for (int64_t a = 1; a <= pipeline.degree; ++a) {
    const int64_t b = (units + a - 1) / a;
    if (b > data.degree) continue;
    const int64_t cut_data = data.degree > 1 ? std::max<int64_t>(0, a - units / data.degree) : 0;
    const int64_t cut_pipeline =
        pipeline.degree > 1 ? std::max<int64_t>(0, b - units / pipeline.degree) : 0;
    const double cut = data.bytes * static_cast<double>(cut_data) +
                       pipeline.bytes * static_cast<double>(cut_pipeline);
    if (least < 0 || cut < least) least = cut;
  }
  return std::max(0.0, least);
}

// Below the cost of every placement: each domain of a level has at most as many groups as the one
// with the most free slots, and what leaves a set of so many is at least LeastCut.
double LowerBound(const WaitingJob& job, const SlotIndex& index) {
  const AxisTraffic &data = job.traffic[1], &pipeline = job.traffic[2];
  const int64_t units = job.ranks / job.group;
  double total = 0;
  for (const AxisTraffic& axis : job.traffic) total += axis.degree > 1 ? axis.bytes : 0;
  double last = DistanceOf(v1::TOPOLOGY_LEVEL_HOST);
  const std::vector<std::pair<v1::TopologyLevel, v1::TopologyLevel>> levels = {
      {v1::TOPOLOGY_LEVEL_HOST, v1::TOPOLOGY_LEVEL_RACK},
      {v1::TOPOLOGY_LEVEL_RACK, v1::TOPOLOGY_LEVEL_BLOCK},
      {v1::TOPOLOGY_LEVEL_BLOCK, v1::TOPOLOGY_LEVEL_ZONE},
      {v1::TOPOLOGY_LEVEL_ZONE, v1::TOPOLOGY_LEVEL_CLUSTER}};
  for (const auto& [level, across] : levels) {
    int64_t most = 0;
    if (level == v1::TOPOLOGY_LEVEL_HOST) {
      most = index.Of(job.device).workers_by_free.rbegin()->first / job.group;
    } else {
      for (const auto& [path, number] : index.domains_of(level)) {
        int64_t hold = 0;
        for (const auto& [free, workers] :
             index.domain(number).slots.at(job.device).workers_by_free) {
          hold += int64_t{free / job.group} * workers;
        }
        most = std::max(most, hold);
      }
    }
    if (most >= units) break;
    double per_unit = -1;
    for (int64_t size = 1; size <= most; ++size) {
      const double cut = LeastCut(size, data, pipeline) / static_cast<double>(size);
      if (per_unit < 0 || cut < per_unit) per_unit = cut;
    }
    total += per_unit * (DistanceOf(across) - last);
    last = DistanceOf(across);
  }
  return total;
}

void LargeAgainstBound(int gangs) {
  Rng rng(3);
  std::vector<double> ratios;
  double sum = 0;
  while (static_cast<int>(ratios.size()) < gangs) {
    SlotIndex index;
    synthetic::AddFleet(index, 640);
    for (const auto& [id, worker] : std::map<WorkerId, WorkerView>(index.workers())) {
      if (!rng.Chance(0.4)) continue;
      WorkerView busy = worker;
      for (SlotView& slot : busy.slots) slot.held_by = JobId("holder");
      index.Put(std::move(busy));
    }
    const int ranks = 8 << (1 + rng.Below(7));
    WaitingJob job = synthetic::MeshOf(ranks, 0);
    SlotIndex::Trial trial(index);
    const auto placements = PlaceGang(trial, job);
    if (!placements.has_value()) continue;
    trial.Rollback();
    ratios.push_back(CostOf(index, job, *placements).total() / LowerBound(job, index));
    sum += ratios.back();
  }
  std::printf(
      "large gangs: %d of 16 to 1024 ranks on 640 workers x 8, 40 %% of them busy: mean cost "
      "%.3f of a lower bound, p99 %.3f\n",
      gangs, sum / gangs, Quantile(ratios, 0.99));
}

// ---- a long queue -------------------------------------------------------------------------------

// Ranks of a job: many small ones, some of several workers.
int RanksOf(Rng& rng) {
  const uint64_t kind = rng.Below(100);
  if (kind < 40) return 1 << rng.Below(3);
  if (kind < 75) return 8;
  if (kind < 90) return 8 << (1 + rng.Below(2));
  return 64 << rng.Below(3);
}

// ---- what is left unused ------------------------------------------------------------------------

struct Size {
  int ranks;
  int group;  // of a tensor group
};

// Sizes that leave gaps: tensor groups of 1 to 8, now and then several of them.
Size OddSize(Rng& rng) {
  const int group = 1 + static_cast<int>(rng.Below(8));
  const int groups = rng.Chance(0.3) ? 2 + static_cast<int>(rng.Below(6)) : 1;
  return {group * groups, group};
}

// First fit, the largest job first, as one program would that knows all jobs from the start and
// nothing of racks. Returns the share of slots that is used when nothing more fits.
double FirstFitDecreasing(int workers, std::vector<Size> jobs) {
  std::sort(jobs.begin(), jobs.end(), [](const Size& a, const Size& b) {
    return std::make_pair(a.group, a.ranks) > std::make_pair(b.group, b.ranks);
  });
  std::vector<int> free(static_cast<size_t>(workers), 8);
  int64_t used = 0;
  for (const Size& job : jobs) {
    std::vector<int> then = free;
    int left = job.ranks;
    for (int& slots : then) {
      while (slots >= job.group && left > 0) {
        slots -= job.group;
        left -= job.group;
      }
    }
    if (left > 0) continue;
    free = std::move(then);
    used += job.ranks;
  }
  return static_cast<double>(used) / (8.0 * workers);
}

// Jobs one after the other, those that do not fit are skipped.
double OneByOne(int workers, const std::vector<Size>& jobs) {
  SlotIndex index;
  synthetic::AddFleet(index, workers);
  int64_t used = 0;
  SlotIndex::Trial trial(index);
  for (size_t i = 0; i < jobs.size(); ++i) {
    WaitingJob job = synthetic::Gang(jobs[i].ranks);
    job.id = JobId(absl::StrCat("job-", i));
    job.group = jobs[i].group;
    if (PlaceGang(trial, job).has_value()) used += jobs[i].ranks;
  }
  return static_cast<double>(used) / (8.0 * workers);
}

void Fragmentation(int workers, int rounds) {
  Rng rng(5);
  double decreasing = 0, ours_decreasing = 0, ours_arriving = 0;
  for (int round = 0; round < rounds; ++round) {
    std::vector<Size> jobs;
    for (int64_t demand = 0; demand < int64_t{8} * workers * 13 / 10;) {
      jobs.push_back(OddSize(rng));
      demand += jobs.back().ranks;
    }
    decreasing += FirstFitDecreasing(workers, jobs) / rounds;
    ours_arriving += OneByOne(workers, jobs) / rounds;
    std::sort(jobs.begin(), jobs.end(), [](const Size& a, const Size& b) {
      return std::make_pair(a.group, a.ranks) > std::make_pair(b.group, b.ranks);
    });
    ours_decreasing += OneByOne(workers, jobs) / rounds;
  }
  std::printf(
      "fragmentation: %d workers x 8, tensor groups of 1 to 8, demand 1.3 of all slots, %d "
      "rounds: first fit decreasing uses %.2f %%, ours in the same order %.2f %%, ours in "
      "the order of arrival %.2f %% (bar: not more than 2 %% less)\n",
      workers, rounds, 100 * decreasing, 100 * ours_decreasing, 100 * ours_arriving);
}

void LongQueue(int workers, int jobs, int queues) {
  SlotIndex index;
  synthetic::AddFleet(index, workers);
  Rng rng(4);
  WaitingQueue waiting;
  RunningJobs running;
  const KeptSlots kept;
  const SchedulePolicy policy;
  // Half of the cluster is guaranteed to queues with different weights.
  v1::QueuePolicy shared;
  for (int i = 0; i < queues; ++i) {
    v1::QueueSpec& queue = *shared.add_queues();
    queue.set_name(absl::StrCat("queue-", i));
    queue.set_weight(1 + i % 3);
    (*queue.mutable_guaranteed())["cpu"] = int64_t{8} * workers / queues / 2;
  }
  const QueueTree tree = *QueueTree::Make(shared);
  QueueUse use(tree);
  const QueueHistory history;
  for (int i = 0; i < jobs; ++i) {
    WaitingJob job = synthetic::MeshOf(RanksOf(rng), i);
    job.queue = absl::StrCat("queue-", i % queues);
    if (rng.Chance(0.2)) job.placement.required = v1::TOPOLOGY_LEVEL_BLOCK;
    waiting.Add(std::move(job));
  }
  // Plans, and ends of jobs in between, until every job has run.
  std::vector<JobId> order;
  double seconds = 0;
  int64_t decisions = 0, plans = 0, looked = 0;
  std::vector<double> used_while_full;
  while (waiting.size() > 0) {
    const double begin = ThreadSeconds();
    const Schedule plan =
        Plan({index, running, kept, tree, use, history}, waiting, policy, absl::UnixEpoch());
    for (const Decision& decision : plan.decisions) {
      const Start& start = std::get<Start>(decision);
      Take(index, start.job, start.placements);
      RunningJob job{.name = start.job.value(), .queue = waiting.Find(start.job)->queue};
      job.device = v1::DEVICE_KIND_CPU;
      job.ranks = static_cast<int32_t>(start.placements.size());
      job.started_at = absl::UnixEpoch();
      job.min_runtime = absl::InfiniteDuration();  // nobody is stopped
      use.Count(tree, tree.Find(job.queue), job.device, job.ranks, job.tenant, 1);
      waiting.Remove(start.job);
      running.Put(start.job, std::move(job));
      order.push_back(start.job);
      ++decisions;
    }
    seconds += ThreadSeconds() - begin;
    ++plans;
    looked += static_cast<int64_t>(plan.decisions.size() + plan.explanations.size());
    const double used = 1 - static_cast<double>(index.Of(v1::DEVICE_KIND_CPU).free) /
                                static_cast<double>(index.Of(v1::DEVICE_KIND_CPU).total);
    if (waiting.size() > static_cast<size_t>(jobs / 10)) used_while_full.push_back(used);
    CHECK(!order.empty()) << "nothing runs and nothing can start";
    // A twentieth of the running jobs ends.
    for (size_t ends = std::max<size_t>(1, order.size() / 20); ends > 0 && !order.empty(); --ends) {
      const size_t at = rng.Below(order.size());
      Release(index, order[at]);
      const RunningJob& job = *running.Find(order[at]);
      use.Count(tree, tree.Find(job.queue), job.device, job.ranks, job.tenant, -1);
      running.Remove(order[at]);
      order.erase(order.begin() + static_cast<int64_t>(at));
    }
  }
  double mean = 0;
  for (const double used : used_while_full)
    mean += used / static_cast<double>(used_while_full.size());
  std::printf(
      "long queue: %d workers x 8, %d jobs in %d queues, 3 levels, one thread: %.0f jobs "
      "started/s, %.0f/s with those that wait and are told why (bar 2000), %lld plans, %.2f "
      "s; %.2f %% of all slots used while nine tenths of the jobs run\n",
      workers, jobs, queues, static_cast<double>(decisions) / seconds,
      static_cast<double>(looked) / seconds, static_cast<long long>(plans), seconds, 100 * mean);
}

int Main(int argc, char** argv) {
  bool quick = false;
  CLI::App app("Placement: time, cost against the best, use of slots");
  app.add_flag("--quick", quick, "Small sizes: that it works");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  LargeGangs(quick ? 500 : 10'000, quick ? 256 : 1024, quick ? 5 : 500);
  SmallGangs(quick ? 50 : 1000);
  LargeAgainstBound(quick ? 10 : 1000);
  Fragmentation(quick ? 32 : 640, quick ? 1 : 5);
  LongQueue(quick ? 32 : 640, quick ? 300 : 15'000, quick ? 5 : 30);
  return 0;
}

}  // namespace
}  // namespace muster::coordinator

int main(int argc, char** argv) { return muster::coordinator::Main(argc, argv); }
