// Speed of the scheduler: plans of a cluster in racks, blocks and zones with queues in a tree,
// priorities and quotas, one thread. A fifth of the jobs requires one block. Jobs start, end and
// are replaced until as many gangs have started as asked; every end of a job is followed by a plan,
// as in the coordinator. Prints one line of JSON. Its digests of what was decided and explained are
// the same for as long as the scheduler decides and says the same.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/rng.h"
#include "coordinator/scheduler/queue_tree.h"
#include "coordinator/scheduler/scheduler.h"
#include "tests/support/random_cluster.h"

namespace muster::coordinator {
namespace {

// Of this thread's CPU time.
double CpuSeconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// FNV-1a.
class Digest {
 public:
  void Add(std::string_view text) {
    for (const char c : text) Add(static_cast<uint8_t>(c));
    Add(uint8_t{0});
  }
  uint64_t value() const { return value_; }

 private:
  void Add(uint8_t byte) { value_ = (value_ ^ byte) * 0x100000001b3; }

  uint64_t value_ = 0xcbf29ce484222325;
};

struct Options {
  int workers = 640;
  int slots = 8;
  int queues = 30;
  int jobs = 15'000;
  int decisions = 4'000;
  uint64_t seed = 1;
  bool flat = false;
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options), rng_(options.seed) {
    v1::QueuePolicy policy;
    const int64_t share = int64_t{options.workers} * options.slots / options.queues;
    for (int i = 0; i < options.queues; ++i) {
      v1::QueueSpec& queue = *policy.add_queues();
      queue.set_name(absl::StrCat("q", i));
      (*queue.mutable_guaranteed())["cpu"] = share / 2;
      (*queue.mutable_borrowing_limit())["cpu"] = 3 * share;
      queue.set_weight(1 + i % 3);
    }
    tree_ = *QueueTree::Make(policy);
    use_ = QueueUse(tree_);
    if (options.flat) {
      for (int i = 0; i < options.workers; ++i) {
        synthetic::AddWorker(slots_, absl::StrCat("worker-", i), options.slots);
      }
    } else {
      synthetic::AddFleet(slots_, options.workers, options.slots);
    }
    for (int i = 0; i < options.jobs; ++i) Submit();
  }

  void Run() {
    Plan();  // fills the cluster; not counted
    taken_.clear();
    cpu_ = 0;
    int64_t started = 0;
    preempted_ = 0;
    while (started < options_.decisions) {
      CHECK(!running_.by_end().empty());
      now_ = running_.by_end().begin()->first;
      End(running_.by_end().begin()->second);
      Submit();
      started += Plan();
    }
    std::sort(taken_.begin(), taken_.end());
    std::printf(
        "{\"flat\":%s,\"workers\":%d,\"slots\":%d,\"queues\":%d,\"waiting\":%zu,\"running\":%zu,"
        "\"started\":%lld,\"preempted\":%lld,\"plans\":%zu,\"cpu_seconds\":%.3f,"
        "\"decisions_per_second\":%.0f,\"plan_ms_median\":%.3f,\"plan_ms_p99\":%.3f,"
        "\"decided\":\"%016llx\",\"explained\":\"%016llx\"}\n",
        options_.flat ? "true" : "false", options_.workers, options_.slots, options_.queues,
        queue_.size(), running_.all().size(), static_cast<long long>(started),
        static_cast<long long>(preempted_), taken_.size(), cpu_,
        static_cast<double>(started + preempted_) / cpu_, 1e3 * taken_[taken_.size() / 2],
        1e3 * taken_[taken_.size() * 99 / 100], static_cast<unsigned long long>(decided_.value()),
        static_cast<unsigned long long>(explained_.value()));
  }

 private:
  void Submit() {
    const std::string queue = absl::StrCat("q", rng_.Below(options_.queues));
    const auto priority = static_cast<int32_t>(rng_.Below(10)) * 10;
    static constexpr int kRanks[] = {1, 1, 2, 4, 8, 8, 16, 32, 64};
    WaitingJob job = synthetic::MeshOf(kRanks[rng_.Below(std::size(kRanks))], ++jobs_);
    job.queue = queue;
    job.priority = priority;
    if (options_.flat) {
      job.traffic.clear();
    } else if (rng_.Chance(0.2)) {
      job.placement.required = v1::TOPOLOGY_LEVEL_BLOCK;
    }
    job.runtime = absl::Seconds(600 + static_cast<int64_t>(rng_.Below(36'000)));
    job.queued_at = now_;
    queue_.Add(std::move(job));
  }

  int64_t Plan() {
    const double begin = CpuSeconds();
    const Schedule plan = coordinator::Plan({slots_, running_, kept_, tree_, use_, history_},
                                            queue_, SchedulePolicy(), now_);
    const double took = CpuSeconds() - begin;
    taken_.push_back(took);
    cpu_ += took;
    Record(plan);
    int64_t started = 0;
    for (const Decision& decision : plan.decisions) {
      if (const auto* start = std::get_if<Start>(&decision)) {
        Begin(*start);
        ++started;
      } else if (const auto* preempt = std::get_if<Preempt>(&decision)) {
        for (const JobId& id : preempt->eviction.stopped) {
          End(id);  // at once; it does not return
          ++preempted_;
        }
      }
    }
    return started;
  }

  void Record(const Schedule& plan) {
    for (const Decision& decision : plan.decisions) {
      if (const auto* start = std::get_if<Start>(&decision)) {
        decided_.Add(absl::StrCat("start ", start->job.value(), start->in_turn ? " in turn" : ""));
        for (const v1::Placement& placement : start->placements) {
          decided_.Add(
              absl::StrCat(placement.rank(), "=", placement.worker(), "/", placement.device()));
        }
      } else if (const auto* preempt = std::get_if<Preempt>(&decision)) {
        decided_.Add(absl::StrCat("preempt for ", preempt->job.value()));
        for (const JobId& id : preempt->eviction.stopped) decided_.Add(id.value());
        for (const Slot& slot : preempt->eviction.slots) {
          decided_.Add(absl::StrCat(slot.worker.value(), "/", slot.device));
        }
      } else if (const auto* resize = std::get_if<Resize>(&decision)) {
        decided_.Add(
            absl::StrCat("resize ", resize->resized.job.value(), " for ", resize->for_job.value()));
        for (const Slot& slot : resize->resized.slots) {
          decided_.Add(absl::StrCat(slot.worker.value(), "/", slot.device));
        }
      }
    }
    for (const Explanation& explanation : plan.explanations) {
      explained_.Add(explanation.job.value());
      explained_.Add(explanation.reason().SerializeAsString());
    }
  }

  void Begin(const Start& start) {
    const WaitingJob job = *queue_.Find(start.job);
    RunningJob running;
    running.name = job.name;
    running.queue = job.queue;
    running.priority = job.priority;
    running.ranks = job.ranks;
    running.started_at = running.saved_at = now_;
    running.min_runtime = absl::Minutes(10);
    running.ends_at = now_ + job.runtime;
    running_.Put(job.id, running);
    history_.Accrue(tree_, use_, tree_.Find(job.queue), now_);
    if (start.in_turn) history_.TookTurn(job.queue, now_);
    use_.Count(tree_, tree_.Find(job.queue), job.device, job.ranks, job.tenant, 1);
    for (const v1::Placement& placement : start.placements) {
      slots_.SetHolder(WorkerId(placement.worker()), placement.device(), job.id);
    }
    queue_.Remove(job.id);
  }

  void End(JobId id) {
    const RunningJob job = *running_.Find(id);
    history_.Accrue(tree_, use_, tree_.Find(job.queue), now_);
    use_.Count(tree_, tree_.Find(job.queue), job.device, job.ranks, job.tenant, -1);
    for (const WorkerId& worker : std::set<WorkerId>(slots_.WorkersOf(id))) {
      const WorkerView view = *slots_.Find(worker);
      for (const SlotView& slot : view.slots) {
        if (slot.held_by == id) slots_.SetHolder(worker, slot.device, JobId());
      }
    }
    running_.Remove(id);
  }

  const Options options_;
  Rng rng_;
  absl::Time now_ = absl::FromUnixSeconds(1'000'000);
  QueueTree tree_;
  QueueUse use_{tree_};
  QueueHistory history_;
  SlotIndex slots_;
  RunningJobs running_;
  KeptSlots kept_;
  WaitingQueue queue_;
  int jobs_ = 0;
  int64_t preempted_ = 0;
  std::vector<double> taken_;
  double cpu_ = 0;
  Digest decided_, explained_;
};

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Speed of the scheduler");
  app.add_option("--workers", options.workers)->capture_default_str();
  app.add_option("--slots", options.slots)->capture_default_str();
  app.add_option("--queues", options.queues)->capture_default_str();
  app.add_option("--jobs", options.jobs, "That wait at any time")->capture_default_str();
  app.add_option("--decisions", options.decisions, "Gangs that start")->capture_default_str();
  app.add_option("--seed", options.seed)->capture_default_str();
  app.add_flag("--flat", options.flat, "Workers in no domains, jobs without traffic and rules");
  CLI11_PARSE(app, argc, argv);
  Bench(options).Run();
  return 0;
}

}  // namespace
}  // namespace muster::coordinator

int main(int argc, char** argv) { return muster::coordinator::Main(argc, argv); }
