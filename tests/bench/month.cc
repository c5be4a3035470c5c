// A simulated month of 2,048 workers x 8 devices that fail as Llama 3's did, planned by
// the real scheduler: Plan() after every event, as in the coordinator. Beside it the same jobs and
// the same faults under "restart everything, FIFO". Prints one line of JSON for each.
//
// Goodput is the part of the device time that was held by jobs, or free and asked for by jobs that
// wait, in which steps were trained that were kept. Devices of workers that are out count for
// neither.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/rng.h"
#include "coordinator/scheduler/placement.h"
#include "coordinator/scheduler/queue_tree.h"
#include "coordinator/scheduler/scheduler.h"
#include "tests/sim/queue.h"

namespace muster::coordinator {
namespace {

// ---- what things take ---------------------------------------------------------------------------

// Llama 3's report: 466 interruptions of a job in 54 days on 16,384 GPUs.
constexpr double kInterruptionsPerDeviceSecond = 466.0 / (54 * 86'400.0 * 16'384);
// Kinds of interruptions, and how many of the 466 they were (table 5 of the report).
struct Fault {
  const char* name;
  int of_466;
  absl::Duration noticed;          // by Muster: from the fault to the end of the attempt
  absl::Duration noticed_by_peer;  // by the peer
  absl::Duration out;              // the worker gets no ranks for so long
  bool announced;                  // Muster drains the worker at a step boundary
};
// A rank that ends is noticed within 2.3 s (tests/gpu/product.py); a host that is silent is given
// up after 30 s; a hang ends after 10 minutes (docs/operations.md). A PyTorch job that does not
// lose a process waits for the timeout of its collectives, 10 minutes; torchrun notices processes
// that end within its poll and stops the others. Hardware is out for four hours, a planned change
// of a host takes one.
constexpr Fault kFaults[] = {
    {"device", 268, absl::Milliseconds(2300), absl::Seconds(30), absl::Hours(4), false},
    {"process", 56, absl::Milliseconds(2300), absl::Seconds(30), absl::ZeroDuration(), false},
    {"network", 42, absl::Seconds(30), absl::Minutes(10), absl::Hours(4), false},
    {"host", 46, absl::Seconds(30), absl::Minutes(10), absl::Hours(4), false},
    {"hang", 7, absl::Minutes(10), absl::Minutes(10), absl::ZeroDuration(), false},
    {"maintenance", 47, absl::ZeroDuration(), absl::ZeroDuration(), absl::Hours(1), true},
};
// Muster, from the start of an attempt to its first step without what it reads: 11 s, measured on 4
// GPUs (tests/gpu/product.py), and what NCCL's set-up adds per rank, 26 s at 96 K ranks and 11 s at
// 48 K (NVIDIA/nccl pull request 1789).
constexpr absl::Duration kLaunch = absl::Seconds(3);
absl::Duration InitialiseOf(int64_t ranks) {
  return absl::Seconds(8) + static_cast<double>(ranks) * absl::Microseconds(500);
}
// The peer, which launches everything anew: SageMaker HyperPod puts a recovery of this kind at 15
// to 30 minutes; a launch that follows no failure is given five.
constexpr absl::Duration kRelaunchOfPeer = absl::Minutes(15);
constexpr absl::Duration kLaunchOfPeer = absl::Minutes(5);
// Processes end, ports close, device memory is free again.
constexpr absl::Duration kRelease = absl::Seconds(2);
// A checkpoint holds 12 bytes for each of 405e9 parameters on 512 workers. Storage takes 2 TB/s
// from 2,048 workers (Llama 3's report), so that one writes and reads 1 GB/s. Training waits for
// it.
constexpr double kBytesPerWorker = 12 * 405e9 / 512;
constexpr double kBytesPerSecond = 2e12 / 2048;
const absl::Duration kSave = absl::Seconds(kBytesPerWorker / kBytesPerSecond);
const absl::Duration kRestore = kSave;
constexpr int kSlots = 8;

// Young's interval between checkpoints, for both.
absl::Duration IntervalOf(int64_t ranks) {
  const double between_faults = 1 / (kInterruptionsPerDeviceSecond * static_cast<double>(ranks));
  return absl::Seconds(std::sqrt(2 * absl::ToDoubleSeconds(kSave) * between_faults));
}

struct Options {
  int workers = 2048;
  int days = 30;
  double load = 1.0;
  uint64_t seed = 1;
};

// ---- the trace ----------------------------------------------------------------------------------

struct Arrival {
  absl::Time at;
  int32_t ranks;
  int32_t priority;
  absl::Duration training;
};
struct Interruption {
  absl::Time at;
  int worker;
  const Fault* fault;
};
struct Trace {
  absl::Time begin = absl::FromUnixSeconds(1'000'000'000);  // as the simulated time
  std::vector<Arrival> arrivals;
  std::vector<Interruption> interruptions;
};

// Half of the device time is asked for by gangs of 1,024 to 4,096 devices that train for days, 30 %
// by gangs of 64 to 512, 20 % by jobs of one to four workers.
Trace MakeTrace(const Options& options) {
  struct Mix {
    double share;
    std::vector<int32_t> ranks;
    int32_t priority;
    double hours_min, hours_max;
  };
  static const std::vector<Mix> kMixes = {
      {0.5, {1024, 2048, 4096}, 800, 24, 168},
      {0.3, {64, 128, 256, 512}, 500, 4, 48},
      {0.2, {8, 8, 16, 32}, 50, 0.5, 8},
  };
  Trace trace;
  Rng rng(options.seed);
  const absl::Duration span = absl::Hours(24 * options.days);
  const double devices = static_cast<double>(options.workers) * kSlots;
  for (const Mix& mix : kMixes) {
    double ranks = 0;
    for (const int32_t each : mix.ranks) ranks += each / static_cast<double>(mix.ranks.size());
    // Hours are spread evenly over their logarithm.
    const double hours = (mix.hours_max - mix.hours_min) / std::log(mix.hours_max / mix.hours_min);
    const double per_hour = options.load * mix.share * devices / (ranks * hours);
    const auto submit = [&](absl::Time at) {
      const int32_t size = mix.ranks[rng.Below(mix.ranks.size())];
      if (size > options.workers * kSlots) return;
      const double length =
          mix.hours_min * std::exp(rng.Uniform() * std::log(mix.hours_max / mix.hours_min));
      trace.arrivals.push_back({at, size, mix.priority, absl::Hours(length)});
    };
    // As many as fill the cluster wait at the beginning.
    double asked = 0;
    while (asked < mix.share * devices) {
      submit(trace.begin);
      asked += trace.arrivals.back().ranks;
    }
    absl::Duration at = absl::ZeroDuration();
    while (true) {
      at += absl::Hours(-std::log(1 - rng.Uniform()) / per_hour);
      if (at >= span) break;
      submit(trace.begin + at);
    }
  }
  std::stable_sort(trace.arrivals.begin(), trace.arrivals.end(),
                   [](const Arrival& a, const Arrival& b) { return a.at < b.at; });
  absl::Duration at = absl::ZeroDuration();
  while (true) {
    at += absl::Seconds(-std::log(1 - rng.Uniform()) / (kInterruptionsPerDeviceSecond * devices));
    if (at >= span) break;
    uint64_t which = rng.Below(466);
    const Fault* fault = kFaults;
    while (which >= static_cast<uint64_t>(fault->of_466)) which -= fault++->of_466;
    const int worker = static_cast<int>(rng.Below(static_cast<uint64_t>(options.workers)));
    trace.interruptions.push_back({trace.begin + at, worker, fault});
  }
  return trace;
}

// ---- the cluster --------------------------------------------------------------------------------

enum Class {
  kProductive,
  kWanted,  // free while jobs wait that ask for it
  kLaunching,
  kInitialising,
  kRestoring,
  kCheckpointStall,
  kReplayed,
  kHung,
  kReleasing,  // and saving before a stop
  kClasses,
};
constexpr const char* kClassNames[kClasses] = {"productive",   "wanted",    "launching",
                                               "initialising", "restoring", "checkpoint_stall",
                                               "replayed",     "hung",      "releasing"};

class Month {
 public:
  // Not `scheduled`: one queue in order of submission, where nobody passes a job that does not fit,
  // and a failure starts everything of the job anew.
  Month(const Options& options, const Trace& trace, bool scheduled)
      : options_(options), trace_(trace), scheduled_(scheduled) {
    for (int i = 0; i < options.workers; ++i) {
      ends_out_.push_back(absl::InfinitePast());
      slots_.Put(MakeWorker(i, /*ready=*/true));
    }
  }

  void Run() {
    begin_ = counted_to_ = trace_.begin;
    const absl::Time end = begin_ + absl::Hours(24 * options_.days);
    for (const Arrival& arrival : trace_.arrivals) {
      time_.At(arrival.at, [this, &arrival] { Submit(arrival); });
    }
    for (const Interruption& interruption : trace_.interruptions) {
      time_.At(interruption.at, [this, &interruption] { Interrupt(interruption); });
    }
    while (time_.Step(end)) {
    }
    CountFree(end);
    for (auto& [id, job] : jobs_) {
      if (job.running()) Account(job, end, /*kept=*/true);
    }
    Print(end);
  }

 private:
  struct Job {
    WaitingJob waiting;
    absl::Duration training;  // in all
    absl::Duration done = absl::ZeroDuration();
    bool failed = false;  // its last attempt
    // Of its attempt.
    absl::Time started = absl::InfiniteFuture();
    absl::Duration launch, initialise, restore;
    uint64_t attempt = 0;  // grows at each start and end
    bool stopping = false;

    bool running() const { return started != absl::InfiniteFuture(); }
    absl::Duration before_training() const { return launch + initialise + restore; }
  };
  // How far an attempt has come.
  struct Progress {
    absl::Duration trained = absl::ZeroDuration(), saved = absl::ZeroDuration();
    absl::Duration stalled = absl::ZeroDuration();
  };

  WorkerView MakeWorker(int number, bool ready) const {
    WorkerView worker{.id = WorkerId(absl::StrCat("w", number)), .ready = ready};
    worker.path.names = {absl::StrCat("z", number / 512), absl::StrCat("b", number / 128),
                         absl::StrCat("r", number / 16), ""};
    for (int slot = 0; slot < kSlots; ++slot) {
      worker.slots.push_back({.device = absl::StrCat("cuda:", slot), .kind = v1::DEVICE_KIND_CUDA});
    }
    return worker;
  }
  absl::Time now() const { return time_.now(); }

  void Submit(const Arrival& arrival) {
    Job job;
    job.training = arrival.training;
    WaitingJob& waiting = job.waiting;
    waiting.submit_sequence = jobs_.size() + 1;
    waiting.id = JobId(absl::StrCat("job-", waiting.submit_sequence));
    waiting.name = waiting.id.value();
    waiting.queue = "default";
    waiting.priority = arrival.priority;
    waiting.ranks = arrival.ranks;
    waiting.device = v1::DEVICE_KIND_CUDA;
    waiting.group = kSlots;
    waiting.queued_at = now();
    const JobId id = waiting.id;
    jobs_.emplace(id, std::move(job));
    Wait(id);
  }

  void Wait(const JobId& id) {
    CountFree(now());
    Job& job = jobs_.at(id);
    job.waiting.runtime = Expected(job);
    job.waiting.queued_at = now();
    queue_.Add(job.waiting);
    asked_ += job.waiting.ranks;
    Due();
  }

  absl::Duration LaunchOf(const Job& job) const {
    return scheduled_ ? kLaunch : job.failed ? kRelaunchOfPeer : kLaunchOfPeer;
  }
  // How long an attempt that is not interrupted takes.
  absl::Duration Expected(const Job& job) const {
    const absl::Duration left = job.training - job.done;
    const absl::Duration interval = IntervalOf(job.waiting.ranks);
    return LaunchOf(job) + InitialiseOf(job.waiting.ranks) +
           (job.done > absl::ZeroDuration() ? kRestore : absl::ZeroDuration()) + left +
           std::ceil(absl::FDivDuration(left, interval)) * kSave;
  }

  Progress ProgressOf(const Job& job, absl::Time at) const {
    Progress progress;
    const absl::Duration spent = at - job.started - job.before_training();
    if (spent <= absl::ZeroDuration()) return progress;
    const absl::Duration interval = IntervalOf(job.waiting.ranks);
    const double cycles = std::floor(absl::FDivDuration(spent, interval + kSave));
    const absl::Duration rest = spent - cycles * (interval + kSave);
    progress.saved = cycles * interval;
    progress.trained = progress.saved + std::min(rest, interval);
    progress.stalled = cycles * kSave + std::max(absl::ZeroDuration(), rest - interval);
    const absl::Duration left = job.training - job.done;
    progress.trained = std::min(progress.trained, left);
    progress.saved = std::min(progress.saved, left);
    return progress;
  }

  void Spend(Class on, int64_t devices, absl::Duration time) {
    seconds_[on] += static_cast<double>(devices) * absl::ToDoubleSeconds(time);
  }

  // Puts the time of the attempt up to `at` into its classes. `kept`: what it trained is not lost.
  void Account(Job& job, absl::Time at, bool kept) {
    const int64_t ranks = job.waiting.ranks;
    absl::Duration left = at - job.started;
    for (const auto& [on, time] :
         {std::make_pair(kLaunching, job.launch), std::make_pair(kInitialising, job.initialise),
          std::make_pair(kRestoring, job.restore)}) {
      Spend(on, ranks, std::min(left, time));
      left -= std::min(left, time);
    }
    const Progress progress = ProgressOf(job, at);
    const absl::Duration good = kept ? progress.trained : progress.saved;
    Spend(kProductive, ranks, good);
    Spend(kReplayed, ranks, progress.trained - good);
    Spend(kCheckpointStall, ranks, progress.stalled);
    job.done += good;
  }

  // ---- plans

  void Due() {
    if (std::exchange(plan_due_, true)) return;
    time_.At(now(), [this] {
      plan_due_ = false;
      scheduled_ ? Plan() : StartInOrder();
    });
  }

  void Plan() {
    // What stopping a job would cost changes with time.
    if (now() - saved_as_of_ > absl::Minutes(5)) {
      saved_as_of_ = now();
      for (const auto& [id, running] : std::map<JobId, RunningJob>(running_.all())) {
        const Job& job = jobs_.at(id);
        if (running.stopping) continue;
        RunningJob changed = running;
        const Progress progress = ProgressOf(job, now());
        changed.saved_at = now() - (progress.trained - progress.saved);
        running_.Put(id, changed);
      }
    }
    timespec before = {}, after = {};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before);
    const Schedule plan = coordinator::Plan({slots_, running_, kept_, tree_, use_, history_},
                                            queue_, SchedulePolicy(), now());
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &after);
    ++plans_;
    plan_seconds_ += static_cast<double>(after.tv_sec - before.tv_sec) +
                     1e-9 * static_cast<double>(after.tv_nsec - before.tv_nsec);
    for (const Decision& decision : plan.decisions) {
      if (const auto* start = std::get_if<Start>(&decision)) {
        DropKept(start->job);
        Begin(start->job, start->placements);
        if (start->in_turn) history_.TookTurn("default", now());
      } else if (const auto* preempt = std::get_if<Preempt>(&decision)) {
        Stop(*preempt);
      } else if (const auto* give_up = std::get_if<GiveUpKept>(&decision)) {
        DropKept(give_up->job);
        Due();
      }
    }
    const absl::Time again = std::min(plan.wake_at, plan.again_at);
    if (again < next_plan_ || next_plan_ <= now()) {
      next_plan_ = again;
      if (again != absl::InfiniteFuture()) {
        time_.At(again, [this, again] {
          if (next_plan_ == again) Due();
        });
      }
    }
  }

  void StartInOrder() {
    while (queue_.size() > 0) {
      const WaitingJob* first = nullptr;
      for (const auto& [shape, jobs] : queue_.queues().begin()->second) {
        for (const auto& [order, job] : jobs) {
          if (first == nullptr || job.submit_sequence < first->submit_sequence) first = &job;
        }
      }
      std::optional<std::vector<v1::Placement>> placements;
      {
        SlotIndex::Trial trial(slots_);
        placements = PlaceGang(trial, *first);
      }
      if (!placements.has_value()) return;
      Begin(JobId(first->id), *placements);
    }
  }

  void DropKept(const JobId& id) {
    if (kept_.erase(id) == 0) return;
    Release(id);
  }
  void Release(const JobId& holder) {
    std::vector<HeldSlot> slots;
    for (const WorkerId& worker : slots_.WorkersOf(holder)) {
      for (const SlotView& slot : slots_.Find(worker)->slots) {
        if (slot.held_by == holder) slots.push_back({worker, slot.device, JobId()});
      }
    }
    slots_.SetHolders(slots);
  }

  void Begin(const JobId& id, const std::vector<v1::Placement>& placements) {
    CountFree(now());
    Job& job = jobs_.at(id);
    const absl::Duration expected = Expected(job);
    job.started = now();
    job.launch = LaunchOf(job);
    job.initialise = InitialiseOf(job.waiting.ranks);
    job.restore = job.done > absl::ZeroDuration() ? kRestore : absl::ZeroDuration();
    const uint64_t attempt = ++job.attempt;
    RunningJob running;
    running.name = job.waiting.name;
    running.queue = job.waiting.queue;
    running.priority = job.waiting.priority;
    running.device = job.waiting.device;
    running.ranks = job.waiting.ranks;
    running.started_at = running.saved_at = now();
    running.min_runtime = absl::Seconds(30);
    running.ends_at = now() + expected;
    running_.Put(id, running);
    Use(job, 1);
    std::vector<HeldSlot> slots;
    for (const v1::Placement& placement : placements) {
      slots.push_back({WorkerId(placement.worker()), placement.device(), id});
    }
    slots_.SetHolders(slots);
    queue_.Remove(id);
    asked_ -= job.waiting.ranks;
    ++starts_;
    time_.At(now() + expected, [this, id, attempt] {
      if (jobs_.at(id).attempt != attempt || jobs_.at(id).stopping) return;
      Account(jobs_.at(id), now(), /*kept=*/true);
      ++finished_;
      End(id, /*again=*/false);
    });
  }
  void Use(const Job& job, int sign) {
    history_.Accrue(tree_, use_, tree_.Find("default"), now());
    use_.Count(tree_, tree_.Find("default"), job.waiting.device, job.waiting.ranks, "", sign);
    held_ += sign * job.waiting.ranks;
  }

  // The attempt is over; its slots are released a little later.
  void End(const JobId& id, bool again) {
    Job& job = jobs_.at(id);
    ++job.attempt;
    job.started = absl::InfiniteFuture();
    job.stopping = true;
    RunningJob running = *running_.Find(id);
    running.stopping = true;
    running_.Put(id, running);
    Spend(kReleasing, job.waiting.ranks, kRelease);
    time_.After(kRelease, [this, id, again] { Released(id, again); });
  }
  void Released(const JobId& id, bool again) {
    CountFree(now());
    Job& job = jobs_.at(id);
    job.stopping = false;
    Use(job, -1);
    running_.Remove(id);
    Release(id);
    for (const auto& [winner, kept] : kept_) {
      for (const Slot& slot : kept.slots) {
        const WorkerView* worker = slots_.Find(slot.worker);
        const auto view = std::find_if(worker->slots.begin(), worker->slots.end(),
                                       [&](const SlotView& v) { return v.device == slot.device; });
        if (!view->held()) slots_.SetHolder(slot.worker, slot.device, winner);
      }
    }
    if (again) Wait(id);
    Due();
  }

  // Victims save and stop at a step boundary; the slots are kept for the winner.
  void Stop(const Preempt& preempt) {
    CountFree(now());
    CHECK(preempt.eviction.resized.empty());
    for (const JobId& id : preempt.eviction.outbid) DropKept(id);
    for (const JobId& id : preempt.eviction.stopped) SaveAndStop(id);
    preempted_ += static_cast<int64_t>(preempt.eviction.stopped.size());
    const WaitingJob& job = *queue_.Find(preempt.job);
    Kept& kept = kept_[job.id];
    kept = {job.queue, job.priority, job.device, job.tenant, {}};
    for (const Slot& slot : preempt.eviction.slots) {
      kept.slots.insert(slot);
      const WorkerView* worker = slots_.Find(slot.worker);
      for (const SlotView& view : worker->slots) {
        if (view.device == slot.device && !view.held()) {
          slots_.SetHolder(slot.worker, slot.device, job.id);
        }
      }
    }
  }
  void SaveAndStop(const JobId& id) {
    Job& job = jobs_.at(id);
    if (job.stopping) return;
    Account(job, now(), /*kept=*/true);
    job.failed = false;
    job.stopping = true;
    RunningJob running = *running_.Find(id);
    running.stopping = true;
    running_.Put(id, running);
    Spend(kReleasing, job.waiting.ranks, kSave);
    const uint64_t attempt = ++job.attempt;
    job.started = absl::InfiniteFuture();
    time_.After(kSave, [this, id, attempt] {
      if (jobs_.at(id).attempt == attempt) End(id, /*again=*/true);
    });
  }

  // ---- faults

  void Interrupt(const Interruption& interruption) {
    ++interruptions_;
    const Fault& fault = *interruption.fault;
    const WorkerId worker(absl::StrCat("w", interruption.worker));
    std::set<JobId> hit;
    for (const SlotView& slot : slots_.Find(worker)->slots) {
      if (slot.held() && running_.Contains(slot.held_by)) hit.insert(slot.held_by);
    }
    for (const JobId& id : hit) {
      Job& job = jobs_.at(id);
      if (job.stopping) continue;  // it ends anyway
      ++failures_;
      if (fault.announced && scheduled_) {
        SaveAndStop(id);
        continue;
      }
      Account(job, now(), /*kept=*/false);
      const absl::Duration noticed = scheduled_ ? fault.noticed : fault.noticed_by_peer;
      Spend(kHung, job.waiting.ranks, noticed);
      job.failed = true;
      job.stopping = true;
      const uint64_t attempt = ++job.attempt;
      job.started = absl::InfiniteFuture();
      time_.After(noticed, [this, id, attempt] {
        if (jobs_.at(id).attempt == attempt) End(id, /*again=*/true);
      });
    }
    if (fault.out == absl::ZeroDuration()) return;
    SetReady(interruption.worker, false);
    absl::Time& until = ends_out_[static_cast<size_t>(interruption.worker)];
    until = std::max(until, now() + fault.out);
    time_.At(until, [this, number = interruption.worker] {
      if (ends_out_[static_cast<size_t>(number)] == now()) SetReady(number, true);
    });
  }
  void SetReady(int number, bool ready) {
    CountFree(now());
    WorkerView worker = *slots_.Find(WorkerId(absl::StrCat("w", number)));
    worker.ready = ready;
    slots_.Put(std::move(worker));
    Due();
  }

  // ---- what is printed

  // Free devices that jobs which wait ask for, since the last call.
  void CountFree(absl::Time at) {
    const int64_t free = slots_.Of(v1::DEVICE_KIND_CUDA).free + KeptFree();
    Spend(kWanted, std::min(free, asked_), at - counted_to_);
    held_seconds_ += static_cast<double>(held_) * absl::ToDoubleSeconds(at - counted_to_);
    counted_to_ = at;
  }
  int64_t KeptFree() const {
    int64_t slots = 0;
    for (const auto& [id, kept] : kept_) {
      const Holding* holder = slots_.HolderOf(id);
      if (holder != nullptr) slots += holder->slots[v1::DEVICE_KIND_CUDA];
    }
    return slots;
  }

  void Print(absl::Time end) const {
    double sum = 0;
    for (const double seconds : seconds_) sum += seconds;
    // Every device-second that a job held is in one class.
    const double held = sum - seconds_[kWanted];
    CHECK(std::abs(held - held_seconds_) < 1e-3 * held) << held << " and " << held_seconds_;
    std::printf(
        "{\"policy\":\"%s\",\"workers\":%d,\"days\":%.0f,\"jobs\":%zu,\"finished\":%lld,"
        "\"attempts\":%lld,\"interruptions\":%lld,\"attempts_interrupted\":%lld,"
        "\"preempted\":%lld,\"goodput\":%.4f,\"productive_device_hours\":%.0f",
        scheduled_ ? "muster" : "restart everything, FIFO", options_.workers,
        absl::ToDoubleHours(end - begin_) / 24, jobs_.size(), static_cast<long long>(finished_),
        static_cast<long long>(starts_), static_cast<long long>(interruptions_),
        static_cast<long long>(failures_), static_cast<long long>(preempted_),
        seconds_[kProductive] / sum, seconds_[kProductive] / 3600);
    for (int on = 0; on < kClasses; ++on) {
      std::printf(",\"%s\":%.5f", kClassNames[on], seconds_[on] / sum);
    }
    std::printf(",\"plans\":%lld,\"plan_ms_mean\":%.3f}\n", static_cast<long long>(plans_),
                plans_ == 0 ? 0 : 1e3 * plan_seconds_ / static_cast<double>(plans_));
  }

  const Options options_;
  const Trace& trace_;
  const bool scheduled_;
  sim::Queue time_;
  absl::Time begin_, counted_to_;
  std::map<JobId, Job> jobs_;
  QueueTree tree_;
  QueueUse use_{tree_};
  QueueHistory history_;
  SlotIndex slots_;
  RunningJobs running_;
  KeptSlots kept_;
  WaitingQueue queue_;
  std::vector<absl::Time> ends_out_;  // by worker
  bool plan_due_ = false;
  absl::Time next_plan_ = absl::InfinitePast();
  absl::Time saved_as_of_ = absl::InfinitePast();
  int64_t asked_ = 0;  // devices, by jobs that wait
  int64_t held_ = 0;   // by jobs that run
  double held_seconds_ = 0;
  std::array<double, kClasses> seconds_ = {};
  int64_t finished_ = 0, starts_ = 0, interruptions_ = 0, failures_ = 0, preempted_ = 0, plans_ = 0;
  double plan_seconds_ = 0;
};

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("A simulated month of a large cluster");
  app.add_option("--workers", options.workers, "Of eight devices each")
      ->capture_default_str()
      ->check(CLI::Range(1, 100'000));
  app.add_option("--days", options.days)->capture_default_str()->check(CLI::Range(1, 365));
  app.add_option("--load", options.load, "Device time that jobs ask for, of what there is")
      ->capture_default_str()
      ->check(CLI::Range(0.01, 10.0));
  app.add_option("--seed", options.seed)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const Trace trace = MakeTrace(options);
  Month(options, trace, /*scheduled=*/true).Run();
  Month(options, trace, /*scheduled=*/false).Run();
  return 0;
}

}  // namespace
}  // namespace muster::coordinator

int main(int argc, char** argv) { return muster::coordinator::Main(argc, argv); }
