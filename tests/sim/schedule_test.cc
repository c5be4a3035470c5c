// The scheduler alone against what docs/queues.md promises: random queues, clusters and jobs,
// planned after every event for a simulated day. After every event limits hold to the device, for
// queues and tenants; no job that was stopped could have been left alone, and the one that it was
// stopped for was entitled to that; no gang waits beyond the bound; spares go to jobs that recover
// alone; workers that are avoided get ranks only where nothing else holds the gang; reserved
// devices go to those whom they are reserved for; and a gang that requires a domain is inside one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/rng.h"
#include "coordinator/scheduler/placement.h"
#include "coordinator/scheduler/queue_tree.h"
#include "coordinator/scheduler/scheduler.h"
#include "coordinator/scheduler/spares.h"
#include "tests/sim/queue.h"
#include "tests/support/scheduled_jobs.h"

namespace muster::coordinator {
namespace {

constexpr absl::Duration kDay = absl::Hours(24);
constexpr absl::Duration kTurnAfter = absl::Hours(2);
constexpr absl::Duration kRuntimeMax = absl::Hours(1);
constexpr absl::Duration kStopTakes = absl::Seconds(10);

// What a day met, so that a test can require that it did.
struct Met {
  int64_t started = 0, stopped = 0, at_tenant_limit = 0, overdue = 0, shared = 0;
  int64_t faults = 0, on_spares = 0, waits_for_spares = 0, last_resort = 0, avoided_left = 0;
  int64_t outranked = 0, reclaimed = 0;  // victims: of the same queue, of one that borrows
  int64_t shrunk = 0, grown = 0, required = 0, on_reserved = 0, reserved_kept = 0;
  int64_t set_aside = 0, on_time = 0;  // slots for a gang that is first, and it started by then

  Met& operator+=(const Met& other) {
    for (int64_t Met::*of :
         {&Met::started, &Met::stopped, &Met::at_tenant_limit, &Met::overdue, &Met::shared,
          &Met::faults, &Met::on_spares, &Met::waits_for_spares, &Met::last_resort,
          &Met::avoided_left, &Met::outranked, &Met::reclaimed, &Met::shrunk, &Met::grown,
          &Met::required, &Met::on_reserved, &Met::reserved_kept, &Met::set_aside, &Met::on_time}) {
      this->*of += other.*of;
    }
    return *this;
  }
};

// What a day has beside jobs and queues.
struct Kind {
  // Jobs of one priority in queues without quota, where the bound of waiting holds for all.
  bool fair = false;
  // Devices fail, some are spares, and workers get a bad record.
  bool faulty = false;
  bool shares = false;    // some jobs share their devices
  bool elastic = false;   // some may have several sizes
  bool required = false;  // some require one rack or worker
  bool reserved = false;  // now and then devices are reserved for some of the jobs
};

class Day {
 public:
  Day(uint64_t seed, const Kind& kind)
      : rng_(seed), more_(seed * 15'485'863), kind_(kind), fair_(kind.fair), faulty_(kind.faulty) {
    v1::QueuePolicy policy;
    if (faulty_) {
      v1::SparePolicy& cluster = *policy.add_spares();
      cluster.set_level(v1::TOPOLOGY_LEVEL_CLUSTER);
      (*cluster.mutable_devices())["cpu"] = static_cast<int64_t>(1 + rng_.Below(4));
      if (rng_.Chance(0.5)) {
        v1::SparePolicy& rack = *policy.add_spares();
        rack.set_level(v1::TOPOLOGY_LEVEL_RACK);
        (*rack.mutable_devices())["cpu"] = static_cast<int64_t>(1 + rng_.Below(2));
      }
    }
    const int count = 2 + static_cast<int>(rng_.Below(3));
    for (int i = 0; i < count; ++i) {
      v1::QueueSpec& queue = *policy.add_queues();
      queue.set_name(absl::StrCat("q", i));
      queue.set_weight(fair_ ? (i == 0 ? 0.01 : 1) : static_cast<double>(1 + rng_.Below(3)));
      if (i > 0 && rng_.Chance(0.3)) {
        queue.set_parent(absl::StrCat("q", rng_.Below(static_cast<uint64_t>(i))));
      } else if (!fair_) {
        (*queue.mutable_guaranteed())["cpu"] = static_cast<int64_t>(rng_.Below(9));
      }
      if (fair_) continue;
      if (rng_.Chance(0.5)) {
        (*queue.mutable_borrowing_limit())["cpu"] = static_cast<int64_t>(4 + rng_.Below(12));
      }
      if (rng_.Chance(0.3)) queue.set_running_jobs_max(static_cast<int32_t>(2 + rng_.Below(4)));
      if (rng_.Chance(0.5)) {
        (*queue.mutable_tenant_limit())["cpu"] = static_cast<int64_t>(4 + rng_.Below(8));
      }
    }
    policy.mutable_turn_after()->set_seconds(absl::ToInt64Seconds(kTurnAfter));
    tree_ = *QueueTree::Make(policy);
    use_ = QueueUse(tree_);
    for (size_t queue = 0; queue < tree_.queues().size(); ++queue) {
      if (tree_.queues()[queue].leaf) leaves_.push_back(tree_.queues()[queue].name);
    }
    const int workers = 2 + static_cast<int>(rng_.Below(4));
    for (int i = 0; i < workers; ++i) {
      WorkerView worker{.id = WorkerId(absl::StrCat("w", i)), .ready = true};
      worker.path.names[2] = absl::StrCat("rack", i % 2);
      const int slots = 2 + static_cast<int>(rng_.Below(7));
      for (int slot = 0; slot < slots; ++slot) {
        worker.slots.push_back({.device = absl::StrCat("cpu:", slot)});
      }
      // Its daemon cannot share devices. The first one's always can.
      if (kind_.shares && i > 0 && more_.Chance(0.2)) {
        for (SlotView& slot : worker.slots) slot.undivided = true;
      }
      total_ += slots;
      slots_.Put(std::move(worker));
    }
  }

  // The first promise that was broken; empty: none.
  std::string Play(Met& met) {
    const absl::Time begin = time_.now();
    // Half more than there is room for.
    const double per_hour = 1.5 * total_ / (0.3 * total_ * 0.5);
    for (absl::Duration at; at < kDay; at += absl::Hours(2 * rng_.Uniform() / per_hour)) {
      time_.At(begin + at, [this] { Submit(); });
    }
    for (absl::Duration at; kind_.reserved && at < kDay; at += absl::Hours(2 * more_.Uniform())) {
      time_.At(begin + at, [this] { Reserve(); });
    }
    while (broken_.empty() && time_.Step(begin + kDay)) {
      CheckLimits();
      CheckDevices();
      if (fair_) CheckWaiting();
    }
    met += met_;
    return broken_;
  }

 private:
  void Submit() {
    WaitingJob job;
    job.submit_sequence = ++sequence_;
    job.id = JobId(absl::StrCat("job-", sequence_));
    job.name = job.id.value();
    job.queue = leaves_[rng_.Below(leaves_.size())];
    job.priority = fair_ ? 50 : static_cast<int32_t>(rng_.Below(3)) * 40;
    const double part = rng_.Uniform();
    job.ranks = 1 + static_cast<int32_t>(part * part * part * total_);
    if (rng_.Chance(0.3)) job.tenant = "other";
    job.runtime = absl::Minutes(1) + rng_.Uniform() * (kRuntimeMax - absl::Minutes(1));
    job.queued_at = time_.now();
    if (kind_.shares && rng_.Chance(0.6)) {
      constexpr int32_t kShares[] = {500, 500, 250, 333, 100, 750};
      job.share = kShares[rng_.Below(std::size(kShares))];
    }
    if (!tree_.CheckJob(job.queue, job.device, job.ranks, job.share).ok()) job.ranks = 1;
    if (kind_.required && more_.Chance(0.4)) {
      job.placement.required =
          more_.Chance(0.7) ? v1::TOPOLOGY_LEVEL_RACK : v1::TOPOLOGY_LEVEL_HOST;
      if (!CouldFit(job, slots_)) job.placement = {};
    }
    if (kind_.elastic && job.share == kWholeDevice && more_.Chance(0.4)) {
      const int32_t most = job.ranks;
      for (int32_t size = 1; size <= most; ++size) {
        if (size == most || more_.Chance(0.4)) job.sizes.push_back(size);
      }
      job.ranks = job.sizes.front();
    }
    for (const char* name : {"r0", "r1"}) {
      if (kind_.reserved && more_.Chance(0.3)) job.reservations.push_back(name);
    }
    queue_.Add(job);
    Due();
  }

  // All or some devices of a worker are for some jobs for a while. Others that run on them go on.
  void Reserve() {
    auto worker = slots_.workers().begin();
    std::advance(worker, more_.Below(slots_.workers().size()));
    const WorkerId id = worker->first;
    const std::string name = more_.Chance(0.5) ? "r0" : "r1";
    std::vector<std::string> devices;
    for (const SlotView& slot : worker->second.slots) {
      if (slot.reserved.empty() && more_.Chance(0.7)) devices.push_back(slot.device);
      for (const auto& [job, kept] : kept_) {
        const bool admits = Admits(*queue_of(job), name);
        if (!admits && kept.slots.contains({id, slot.device})) ++met_.reserved_kept;
      }
    }
    SetReserved(id, devices, name);
    Due();
    time_.After(absl::Hours(3 * more_.Uniform()), [this, id, devices] {
      SetReserved(id, devices, "");
      Due();
    });
  }
  void SetReserved(const WorkerId& id, const std::vector<std::string>& devices,
                   const std::string& name) {
    WorkerView worker = *slots_.Find(id);
    for (SlotView& slot : worker.slots) {
      if (std::count(devices.begin(), devices.end(), slot.device) > 0) slot.reserved = name;
    }
    slots_.Put(std::move(worker));
  }
  static bool Admits(const WaitingJob& job, const std::string& reservation) {
    return reservation.empty() ||
           std::count(job.reservations.begin(), job.reservations.end(), reservation) > 0;
  }
  // As it waits, or did before it started.
  const WaitingJob* queue_of(const JobId& id) const {
    const WaitingJob* waits = queue_.Find(id);
    return waits != nullptr ? waits : &waited_.at(id);
  }

  void Due() {
    if (std::exchange(due_, true)) return;
    time_.At(time_.now(), [this] {
      due_ = false;
      Decide();
    });
  }

  void Decide() {
    spares_.clear();
    {
      SlotIndex::Trial trial(slots_);
      HoldSpares(trial, tree_);
      if (const Holding* spares = slots_.HolderOf(SpareHolder()); spares != nullptr) {
        for (const WorkerView* worker : spares->workers) {
          for (const SlotView& slot : worker->slots) {
            if (slot.holder == spares) spares_.insert({worker->id, slot.device});
          }
        }
      }
    }
    const Schedule plan =
        Plan({slots_, running_, kept_, tree_, use_, history_}, queue_, SchedulePolicy(), now());
    for (const Explanation& explanation : plan.explanations) {
      const v1::WaitCode code = explanation.reason().code();
      if (code == v1::WAIT_CODE_TENANT_LIMIT) ++met_.at_tenant_limit;
      if (code == v1::WAIT_CODE_SPARES) ++met_.waits_for_spares;
    }
    for (const Decision& decision : plan.decisions) {
      const int64_t missing = SpareDevices(slots_, tree_).missing;
      if (const auto* start = std::get_if<Start>(&decision)) {
        CheckPlaced(*queue_.Find(start->job), SlotsOf(*start));
        // Others may have a reservation on what it could take instead.
        if (plan.again_at == absl::InfiniteFuture()) CheckLastResort(*start);
        WaitingJob job = *queue_.Find(start->job);
        job.ranks = static_cast<int32_t>(start->placements.size());
        Begin(*start);
        CheckSpares(job, missing);
      } else if (const auto* resize = std::get_if<Resize>(&decision)) {
        CheckPlaced(waited_.at(resize->resized.job), resize->resized.slots);
        resized_.emplace(resize->for_job, *resize);
        if (resize->for_job == JobId()) Shrink(*resize);
      } else if (const auto* preempt = std::get_if<Preempt>(&decision)) {
        CheckPlaced(*queue_.Find(preempt->job), preempt->eviction.slots);
        CheckEntitled(*preempt);
        for (auto [at, end] = resized_.equal_range(preempt->job); at != end; ++at) {
          Shrink(at->second);
        }
        CheckNeeded(*preempt);
        resized_.clear();
        Stop(*preempt);
        CheckSpares(*queue_.Find(preempt->job), missing);
      } else if (const auto* give_up = std::get_if<GiveUpKept>(&decision)) {
        Drop(give_up->job);
      }
    }
    CheckSetAside(plan);
    again_ = std::min(plan.wake_at, plan.again_at);
    if (again_ == absl::InfiniteFuture()) return;
    time_.At(again_, [this, at = again_] {
      if (again_ == at) Due();
    });
  }

  absl::Time now() const { return time_.now(); }
  void Use(const RunningJob& job, int sign) {
    history_.Accrue(tree_, use_, tree_.Find(job.queue), now());
    use_.Count(tree_, tree_.Find(job.queue), job.device, job.ranks, job.tenant, sign, job.share);
  }

  void Begin(const Start& start) {
    Drop(start.job);
    const WaitingJob job = *queue_.Find(start.job);
    RunningJob running = testing::RunningGang(job, now());
    running.ranks = static_cast<int32_t>(start.placements.size());
    if (!job.sizes.empty()) {
      running.elastic = std::make_shared<Elasticity>(Elasticity{job, absl::Minutes(5), false});
    }
    running.min_runtime = absl::Seconds(30);
    running.ends_at = now() + job.runtime;
    running_.Put(job.id, running);
    Use(running, 1);
    if (faulty_ && rng_.Chance(0.3)) {
      time_.After(rng_.Uniform() * job.runtime, [this, id = job.id, at = running.started_at] {
        const RunningJob* fails = running_.Find(id);
        if (fails != nullptr && !fails->stopping && fails->started_at == at) Fail(id);
      });
    }
    if (const auto expected = set_aside_.find(start.job); expected != set_aside_.end()) {
      met_.on_time += now() <= expected->second ? 1 : 0;
    }
    if (start.in_turn) history_.TookTurn(job.queue, now());
    for (const v1::Placement& placement : start.placements) {
      slots_.SetShare(WorkerId(placement.worker()), placement.device(), job.id, job.share);
      runs_on_[job.id].insert({WorkerId(placement.worker()), placement.device()});
    }
    queue_.Remove(job.id);
    first_since_.erase(job.queue);
    waited_.insert_or_assign(job.id, job).first->second.recovering = 0;
    ++met_.started;
    time_.At(running.ends_at, [this, id = job.id, at = running.started_at] {
      const RunningJob* ends = running_.Find(id);
      if (ends != nullptr && !ends->stopping && ends->started_at == at) End(id);
    });
  }
  // One of its workers is the reason; it goes on elsewhere.
  void Fail(const JobId& id) {
    ++met_.faults;
    WaitingJob job = waited_.at(id);
    job.recovering = running_.Find(id)->ranks;
    job.runtime = std::max(absl::Minutes(1), running_.Find(id)->ends_at - now());
    job.queued_at = now();
    const std::set<WorkerId> workers = slots_.WorkersOf(id);
    auto culprit = workers.begin();
    std::advance(culprit, rng_.Below(workers.size()));
    End(id);
    SetStanding(*culprit, slots_.Find(*culprit)->standing == v1::WORKER_STANDING_UNSPECIFIED
                              ? v1::WORKER_STANDING_SUSPECT
                              : v1::WORKER_STANDING_AVOIDED);
    // Its device is repaired later.
    const SlotView& broken =
        slots_.Find(*culprit)->slots[rng_.Below(slots_.Find(*culprit)->slots.size())];
    if (broken.usable && !broken.held()) SetUsable(*culprit, broken.device, false);
    time_.After(absl::Hours(2 * rng_.Uniform()), [this, worker = *culprit] {
      for (const SlotView& slot : std::vector<SlotView>(slots_.Find(worker)->slots)) {
        if (!slot.usable) SetUsable(worker, slot.device, true);
      }
      SetStanding(worker, v1::WORKER_STANDING_UNSPECIFIED);
      Due();
    });
    queue_.Add(std::move(job));
  }
  void SetStanding(const WorkerId& id, v1::WorkerStanding standing) {
    WorkerView worker = *slots_.Find(id);
    worker.standing = standing;
    slots_.Put(std::move(worker));
  }
  void SetUsable(const WorkerId& id, const std::string& device, bool usable) {
    WorkerView worker = *slots_.Find(id);
    for (SlotView& slot : worker.slots) {
      if (slot.device == device) slot.usable = usable;
    }
    slots_.Put(std::move(worker));
  }
  void End(const JobId& id) {
    Use(*running_.Find(id), -1);
    running_.Remove(id);
    runs_on_.erase(id);
    Free(slots_, id);
    HoldKept(slots_, kept_);
    Due();
  }
  void Stop(const Preempt& preempt) {
    for (const JobId& id : preempt.eviction.outbid) Drop(id);
    for (const JobId& id : preempt.eviction.stopped) {
      ++met_.stopped;
      StopRunning(id);
    }
    const WaitingJob& job = *queue_.Find(preempt.job);
    kept_[job.id] = {job.queue,
                     job.priority,
                     job.device,
                     job.tenant,
                     {preempt.eviction.slots.begin(), preempt.eviction.slots.end()},
                     job.share};
    HoldKept(slots_, kept_);
  }
  void StopRunning(const JobId& id) {
    RunningJob running = *running_.Find(id);
    running.stopping = true;
    const absl::Duration left = std::max(absl::Minutes(1), running.ends_at - now());
    running_.Put(id, running);
    time_.After(kStopTakes, [this, id, left] {
      End(id);
      WaitingJob job = waited_.at(id);
      job.runtime = left;
      job.queued_at = now();
      queue_.Add(std::move(job));
    });
  }
  // Or lets it grow.
  void Shrink(const Resize& resize) {
    const JobId& id = resize.resized.job;
    const WaitingJob& job = waited_.at(id);
    ++(resize.for_job == JobId() ? met_.grown : met_.shrunk);
    StopRunning(id);
    kept_[id] = {job.queue,
                 job.priority,
                 job.device,
                 job.tenant,
                 {resize.resized.slots.begin(), resize.resized.slots.end()},
                 job.share};
    HoldKept(slots_, kept_);
  }
  void Drop(const JobId& id) {
    const auto kept = kept_.find(id);
    if (kept == kept_.end()) return;
    // One that stops to be resized still has the slots on which it runs.
    for (const Slot& slot : kept->second.slots) {
      const auto runs = runs_on_.find(id);
      if (runs != runs_on_.end() && runs->second.contains(slot)) continue;
      slots_.SetShare(slot.worker, slot.device, id, 0);
    }
    kept_.erase(kept);
  }
  static void Free(SlotIndex& slots, const JobId& holder) {
    for (const WorkerId& worker : std::set<WorkerId>(slots.WorkersOf(holder))) {
      for (const SlotView& slot : std::vector<SlotView>(slots.Find(worker)->slots)) {
        if (slot.ShareOf(holder) > 0) slots.SetShare(worker, slot.device, holder, 0);
      }
    }
  }
  static void HoldKept(SlotIndex& slots, const KeptSlots& kept) {
    for (const auto& [id, of] : kept) {
      for (const Slot& slot : of.slots) {
        for (const SlotView& view : slots.Find(slot.worker)->slots) {
          if (view.device != slot.device) continue;
          if (!view.held() || view.KeepsAtOnce(of.share)) {
            slots.SetShare(slot.worker, slot.device, id, of.share);
          }
          break;
        }
      }
    }
  }

  // ---- what is promised

  void Break(const std::string& what) {
    if (broken_.empty()) broken_ = absl::StrCat(absl::FormatTime(now()), ": ", what);
  }

  // Only a job that recovers leaves fewer spares than there were, and has no more ranks than
  // before.
  void CheckSpares(const WaitingJob& job, int64_t missing) {
    const int64_t more = SpareDevices(slots_, tree_).missing - missing;
    if (more <= 0) return;
    ++met_.on_spares;
    if (job.ranks > job.recovering) {
      Break(absl::StrCat(job.id.value(), " takes ", more, " spares and does not recover"));
    }
  }
  void HoldThese(SlotIndex& slots, const std::set<Slot>& spares) {
    for (const Slot& spare : spares) {
      for (const SlotView& slot : slots.Find(spare.worker)->slots) {
        if (slot.device != spare.device || !slot.free()) continue;
        slots.SetHolder(spare.worker, spare.device, SpareHolder());
        break;
      }
    }
  }
  static std::vector<Slot> SlotsOf(const Start& start) {
    std::vector<Slot> slots;
    for (const v1::Placement& placement : start.placements) {
      slots.push_back({WorkerId(placement.worker()), placement.device()});
    }
    return slots;
  }
  // The slots that a job gets, or that are kept for it, are in the domain that it requires, and
  // none is reserved for others.
  void CheckPlaced(const WaitingJob& job, const std::vector<Slot>& slots) {
    std::set<std::string> racks, workers;
    for (const Slot& slot : slots) {
      const WorkerView& worker = *slots_.Find(slot.worker);
      workers.insert(worker.id.value());
      racks.insert(worker.path.names[2]);
      for (const SlotView& view : worker.slots) {
        if (view.device != slot.device || view.reserved.empty()) continue;
        ++met_.on_reserved;
        if (!Admits(job, view.reserved)) {
          Break(absl::StrCat(job.id.value(), " is placed on ", worker.id.value(), " ", view.device,
                             ", which is reserved as ", view.reserved));
        }
      }
    }
    const v1::TopologyLevel level = job.placement.required;
    if (level == v1::TOPOLOGY_LEVEL_UNSPECIFIED) return;
    ++met_.required;
    const std::set<std::string>& domains = level == v1::TOPOLOGY_LEVEL_RACK ? racks : workers;
    if (domains.size() != 1) {
      Break(absl::StrCat(job.id.value(), " requires one domain and is in ", domains.size()));
    }
  }

  // What is set aside is a slot for every rank of a job that still waits, each once, where the job
  // may be, and for one job of a queue.
  void CheckSetAside(const Schedule& plan) {
    std::set<std::string> queues;
    set_aside_.clear();
    for (const Decision& decision : plan.decisions) {
      const auto* reserve = std::get_if<coordinator::Reserve>(&decision);
      if (reserve == nullptr) continue;
      const WaitingJob* job = queue_.Find(reserve->job);
      if (job == nullptr) return Break(reserve->job.value() + " does not wait for what it is set");
      ++met_.set_aside;
      CheckPlaced(*job, reserve->slots);
      const std::set<Slot> slots(reserve->slots.begin(), reserve->slots.end());
      if (static_cast<int32_t>(slots.size()) != job->ranks ||
          reserve->slots.size() != slots.size()) {
        Break(absl::StrCat(slots.size(), " slots are set aside for ", job->ranks, " ranks of ",
                           job->id.value()));
      }
      if (!queues.insert(job->queue).second) {
        Break(absl::StrCat("slots are set aside for two jobs of ", job->queue));
      }
      if (reserve->starts_at < now()) Break(job->id.value() + " is to start in the past");
      set_aside_.emplace(job->id, reserve->starts_at);
    }
  }

  // Every victim is of the same queue with a smaller priority; or a branch of the tree uses more
  // than is guaranteed to it until the last of its victims is gone, while that of the job, where
  // the two part, does not with the job.
  void CheckEntitled(const Preempt& preempt) {
    const WaitingJob& job = *queue_.Find(preempt.job);
    const size_t kind = static_cast<size_t>(job.device);
    QueueUse use = use_;
    for (const auto& [id, of] : kept_) {
      use.Count(tree_, tree_.Find(of.queue), of.device, static_cast<int64_t>(of.slots.size()),
                of.tenant, 1, of.share);
    }
    const auto beyond = [&](int queue) {
      return use.at(queue).thousandths[kind] - tree_.at(queue).guaranteed[kind] * kWholeDevice;
    };
    struct Branch {
      int64_t all = 0, largest = 0;  // thousandths that its victims give up
    };
    std::map<int, Branch> branches;
    const auto check = [&](const JobId& id, int64_t devices) {
      const RunningJob& victim = *running_.Find(id);
      if (victim.queue == job.queue) {
        ++met_.outranked;
        if (victim.priority < job.priority) return;
        return Break(absl::StrCat(id.value(), " of priority ", victim.priority, " makes room for ",
                                  job.id.value(), " of ", job.priority));
      }
      ++met_.reclaimed;
      const std::vector<int>& mine = tree_.Path(tree_.Find(job.queue));
      const std::vector<int>& theirs = tree_.Path(tree_.Find(victim.queue));
      size_t at = 0;
      while (mine[at] == theirs[at]) ++at;  // both are leaves
      if (beyond(mine[at]) + int64_t{job.ranks} * job.share > 0) {
        Break(absl::StrCat(id.value(), " makes room for ", job.id.value(), ", with which ",
                           tree_.at(mine[at]).name, " borrows"));
      }
      Branch& branch = branches[theirs[at]];
      branch.all += devices * victim.share;
      branch.largest = std::max(branch.largest, devices * victim.share);
    };
    for (auto [at, end] = resized_.equal_range(job.id); at != end; ++at) {
      const Resized& resized = at->second.resized;
      check(resized.job,
            running_.Find(resized.job)->ranks - static_cast<int64_t>(resized.slots.size()));
    }
    for (const JobId& id : preempt.eviction.stopped) check(id, running_.Find(id)->ranks);
    for (const JobId& id : preempt.eviction.outbid) {
      const Kept& of = kept_.at(id);
      if (of.queue == job.queue && of.priority < job.priority) continue;
      Break(absl::StrCat(job.id.value(), " takes what is kept for ", id.value()));
    }
    for (const auto& [id, running] : running_.all()) {
      if (!running.stopping) continue;
      use.Count(tree_, tree_.Find(running.queue), running.device, running.ranks, running.tenant, -1,
                running.share);
    }
    for (const auto& [queue, branch] : branches) {
      if (beyond(queue) - branch.all + branch.largest > 0) continue;
      Break(absl::StrCat(tree_.at(queue).name, " gives up more than it borrows for ",
                         job.id.value()));
    }
  }

  // Without one of the avoided workers that it takes, the gang does not fit on the others of these
  // and those that are not avoided.
  void CheckLastResort(const Start& start) {
    const WaitingJob& job = *queue_.Find(start.job);
    std::set<WorkerId> avoided;
    for (const v1::Placement& placement : start.placements) {
      const WorkerId id(placement.worker());
      if (slots_.Find(id)->standing == v1::WORKER_STANDING_AVOIDED) avoided.insert(id);
    }
    met_.last_resort += avoided.empty() ? 0 : 1;
    met_.avoided_left += avoided.empty() ? static_cast<int64_t>(slots_.marked().size()) : 0;
    for (const WorkerId& id : avoided) {
      SlotIndex slots = slots_;
      Free(slots, job.id);
      HoldThese(slots, spares_);
      const WaitingJob sized = AtSize(job, static_cast<int32_t>(start.placements.size()));
      SlotIndex::Trial trial(slots);
      HoldSpares(trial, tree_);  // what the plan has given up since
      for (const WorkerView* worker : slots.marked()) {
        const bool others = worker->standing == v1::WORKER_STANDING_AVOIDED &&
                            (worker->id == id || !avoided.contains(worker->id));
        if (others) trial.TakeAll(*worker, SlotsFor{job.device, job.share}, JobId("(hidden)"));
      }
      if (PlaceGang(trial, sized).has_value()) {
        Break(absl::StrCat(job.id.value(), " takes ", id.value(), ", which it could avoid"));
      }
    }
  }
  // What jobs that run take of a device is never more than it, and one job takes no device twice.
  void CheckDevices() {
    std::map<JobId, int64_t> devices;
    for (const auto& [id, worker] : slots_.workers()) {
      for (const SlotView& slot : worker.slots) {
        int32_t taken = 0, jobs = 0;
        for (const DevicePart& part : slot.Holders()) {
          const RunningJob* job = running_.Find(part.job);
          if (job == nullptr) continue;
          ++jobs;
          ++devices[part.job];
          // What is kept for one that stops to be resized is not taken yet.
          if (runs_on_.at(part.job).contains({id, slot.device})) taken += part.share;
          if (part.share != job->share) Break(absl::StrCat(part.job.value(), " has another share"));
        }
        if (taken > kWholeDevice) {
          Break(
              absl::StrCat(taken, " thousandths of ", id.value(), " ", slot.device, " are taken"));
        }
        if (jobs > 1) ++met_.shared;
        if (slot.undivided && !slot.parts.empty()) {
          Break(absl::StrCat("a part of ", id.value(), " ", slot.device, " is given away"));
        }
      }
    }
    for (const auto& [id, job] : running_.all()) {
      // One that stops to be resized holds what is kept for it besides.
      if (devices[id] == job.ranks || (devices[id] > job.ranks && kept_.contains(id))) continue;
      Break(absl::StrCat(id.value(), " has ", devices[id], " devices for ", job.ranks, " ranks"));
    }
  }

  // Counts anew what jobs hold.
  void CheckLimits() {
    for (size_t of = 0; of < tree_.queues().size(); ++of) {
      const QueueTree::Queue& queue = tree_.queues()[of];
      int64_t devices = 0, jobs = 0;
      std::map<std::string, int64_t> tenants;
      for (const auto& [id, job] : running_.all()) {
        const std::vector<int>& path = tree_.Path(tree_.Find(job.queue));
        if (std::count(path.begin(), path.end(), static_cast<int>(of)) == 0) continue;
        int64_t held = 0;
        for (const WorkerId& worker : slots_.WorkersOf(id)) {
          for (const SlotView& slot : slots_.Find(worker)->slots) held += slot.ShareOf(id);
        }
        // What is kept for its new size is not used yet.
        if (kept_.contains(id)) held = int64_t{job.ranks} * job.share;
        devices += held;
        tenants[job.tenant] += held;
        ++jobs;
      }
      const auto& limit = queue.limit[v1::DEVICE_KIND_CPU];
      const auto& tenant_limit = queue.tenant_limit[v1::DEVICE_KIND_CPU];
      if (limit.has_value() && devices > *limit * kWholeDevice) {
        Break(absl::StrCat(queue.name, " uses ", devices, " thousandths of ", *limit));
      }
      if (queue.running_jobs_max.has_value() && jobs > *queue.running_jobs_max) {
        Break(absl::StrCat(queue.name, " runs ", jobs, " of ", *queue.running_jobs_max));
      }
      for (const auto& [tenant, used] : tenants) {
        if (tenant_limit.has_value() && used > *tenant_limit * kWholeDevice) {
          Break(absl::StrCat("tenant '", tenant, "' uses ", used, " thousandths of ", *tenant_limit,
                             " in ", queue.name));
        }
      }
    }
  }

  std::vector<Slot> HeldBy(const JobId& job) const {
    std::vector<Slot> slots;
    for (const WorkerId& worker : slots_.WorkersOf(job)) {
      for (const SlotView& slot : slots_.Find(worker)->slots) {
        if (slot.ShareOf(job) > 0) slots.push_back({worker, slot.device});
      }
    }
    return slots;
  }
  // Had one of those that are stopped been left alone, the job would not fit. What fits beside
  // fewer jobs fits beside none of them too, so that then no part of them would have been enough.
  void CheckNeeded(const Preempt& preempt) {
    const WaitingJob& job = *queue_.Find(preempt.job);
    // Jobs that shrink go on where others are stopped for them.
    std::set<Slot> of_resized;
    for (auto [at, end] = resized_.equal_range(job.id); at != end; ++at) {
      of_resized.insert(at->second.resized.slots.begin(), at->second.resized.slots.end());
    }
    for (const JobId& spared : preempt.eviction.stopped) {
      const std::vector<Slot> held = HeldBy(spared);
      if (std::any_of(held.begin(), held.end(),
                      [&](const Slot& slot) { return of_resized.contains(slot); })) {
        continue;
      }
      SlotIndex slots = slots_;
      SlotIndex::Trial spares(slots);
      if (job.recovering < job.ranks) {
        HoldThese(slots, spares_);
        HoldSpares(spares, tree_);  // what the plan has given up since
      }
      QueueUse use = use_;
      KeptSlots kept = kept_;
      std::set<JobId> gone(preempt.eviction.stopped.begin(), preempt.eviction.stopped.end());
      gone.erase(spared);
      for (const auto& [id, running] : running_.all()) {
        if (running.stopping) gone.insert(id);
      }
      for (const JobId& id : preempt.eviction.outbid) {
        Free(slots, id);
        kept.erase(id);
      }
      Free(slots, job.id);
      kept.erase(job.id);
      for (const JobId& id : gone) {
        const RunningJob& running = *running_.Find(id);
        Free(slots, id);
        use.Count(tree_, tree_.Find(running.queue), running.device, running.ranks, running.tenant,
                  -1, running.share);
      }
      HoldKept(slots, kept);
      for (const auto& [id, of] : kept) {
        use.Count(tree_, tree_.Find(of.queue), of.device, static_cast<int64_t>(of.slots.size()),
                  of.tenant, 1, of.share);
      }
      if (FindLimit(tree_, use, tree_.Find(job.queue), job.device, job.ranks, job.tenant, job.share)
              .has_value()) {
        continue;
      }
      SlotIndex::Trial trial(slots);
      if (PlaceGang(trial, job).has_value()) {
        Break(absl::StrCat(spared.value(), " is stopped in vain for ", job.id.value()));
      }
    }
  }

  // A gang that is first in its queue waits for turn_after, then for those that run, and as often
  // again as a gang of another queue had waited for longer.
  void CheckWaiting() {
    const absl::Duration most =
        kTurnAfter + static_cast<double>(leaves_.size()) * kRuntimeMax + kSharesInterval;
    for (const auto& [name, shapes] : queue_.queues()) {
      const WaitingJob* first = nullptr;
      for (const auto& [shape, jobs] : shapes) {
        const WaitingJob& job = jobs.begin()->second;
        if (first == nullptr || job.order() < first->order()) first = &job;
      }
      const auto known = first_since_.find(name);
      if (known == first_since_.end() || known->second.first != first->id) {
        first_since_[name] = {first->id, now()};
        continue;
      }
      const absl::Duration waits = now() - known->second.second;
      if (waits > kTurnAfter) ++met_.overdue;
      if (waits > most) {
        Break(absl::StrCat(first->id.value(), " of ", first->ranks, " ranks in ", name,
                           " waits for ", absl::FormatDuration(waits),
                           " as the first of its queue"));
      }
    }
  }

  Rng rng_, more_;
  const Kind kind_;
  const bool fair_, faulty_;
  sim::Queue time_;
  std::vector<std::string> leaves_;
  int total_ = 0;
  QueueTree tree_;
  QueueUse use_{tree_};
  QueueHistory history_;
  SlotIndex slots_;
  RunningJobs running_;
  KeptSlots kept_;
  std::set<Slot> spares_;                  // before the newest plan
  std::map<JobId, absl::Time> set_aside_;  // by the newest plan: when the job is to start
  std::map<JobId, std::set<Slot>> runs_on_;
  std::multimap<JobId, Resize> resized_;  // of this plan, by the job that they are for
  WaitingQueue queue_;
  std::map<JobId, WaitingJob> waited_;  // as they were before they started
  std::map<std::string, std::pair<JobId, absl::Time>> first_since_;  // by queue
  uint64_t sequence_ = 0;
  bool due_ = false;
  absl::Time again_ = absl::InfiniteFuture();
  Met met_;
  std::string broken_;
};

// Under a sanitizer a day takes some 20 times as long: a few of each kind reach the code, and prove
// nothing about how often they meet what they are for.
bool Few() { return std::getenv("MUSTER_SIM_SEEDS") != nullptr; }
int64_t DaysOf(int64_t all) { return Few() ? std::max<int64_t>(1, all / 20) : all; }

TEST(ScheduledDay, WithQuotasAndPriorities_LimitsHoldAndNoneIsStoppedInVain) {
  Met met;
  const int64_t days = DaysOf(50);
  for (int64_t seed = 1; seed <= days; ++seed) {
    ASSERT_EQ(Day(seed, {}).Play(met), "") << "seed " << seed;
  }
  if (Few()) return;
  EXPECT_GT(met.started, 80 * days);
  EXPECT_GT(met.stopped, 8 * days);
  EXPECT_GT(met.outranked, 4 * days);
  EXPECT_GT(met.reclaimed, 2 * days);
  EXPECT_GT(met.at_tenant_limit, 8 * days);
  EXPECT_GT(met.set_aside, 50 * days);
  EXPECT_GT(met.on_time, days);
}

TEST(ScheduledDay, WithElasticJobsInRacks_VictimsAreEntitledAndRacksAreKept) {
  Met met;
  const int64_t days = DaysOf(40);
  for (int64_t seed = 1; seed <= days; ++seed) {
    ASSERT_EQ(Day(seed, {.elastic = true, .required = true}).Play(met), "") << "seed " << seed;
  }
  if (Few()) return;
  EXPECT_GT(met.shrunk, 4 * days);
  EXPECT_GT(met.grown, days);
  EXPECT_GT(met.required, 10 * days);
  EXPECT_GT(met.stopped, 4 * days);
}

TEST(ScheduledDay, WithElasticJobsAndFaults_SparesAreForJobsThatRecover) {
  Met met;
  const int64_t days = DaysOf(8);
  for (int64_t seed = 1; seed <= days; ++seed) {
    ASSERT_EQ(Day(seed, {.faulty = true, .elastic = true}).Play(met), "") << "seed " << seed;
  }
  if (Few()) return;
  EXPECT_GT(met.shrunk, days);
  EXPECT_GT(2 * met.grown, days);
  EXPECT_GT(met.faults, 10 * days);
  EXPECT_GT(met.on_spares, days);
}

TEST(ScheduledDay, WithElasticJobsAndSharedDevices_NoneIsGivenTwiceAndLimitsHold) {
  Met met;
  const int64_t days = DaysOf(4);
  for (int64_t seed = 1; seed <= days; ++seed) {
    ASSERT_EQ(Day(seed, {.shares = true, .elastic = true}).Play(met), "") << "seed " << seed;
  }
  if (Few()) return;
  EXPECT_GT(met.shrunk, days);
  EXPECT_GT(2 * met.grown, days);
  EXPECT_GT(met.shared, 100 * days);
}

TEST(ScheduledDay, WithReservations_DevicesGoToThoseThatTheyAreReservedFor) {
  Met met;
  const int64_t days = DaysOf(40);
  for (int64_t seed = 1; seed <= days; ++seed) {
    ASSERT_EQ(Day(seed, {.required = true, .reserved = true}).Play(met), "") << "seed " << seed;
  }
  if (Few()) return;
  EXPECT_GT(met.on_reserved, 10 * days);
  EXPECT_GT(met.stopped, 4 * days);
}

TEST(ScheduledDay, WithRequiredRacksAndWithoutQuota_NoGangWaitsBeyondTheBound) {
  Met met;
  const int64_t days = DaysOf(20);
  for (int64_t seed = 1; seed <= days; ++seed) {
    ASSERT_EQ(Day(seed, {.fair = true, .required = true}).Play(met), "") << "seed " << seed;
  }
  if (Few()) return;
  EXPECT_GT(met.required, 10 * days);
}

TEST(ScheduledDay, WithFaults_SparesAreForJobsThatRecoverAndAvoidedWorkersTheLastResort) {
  Met met;
  const int64_t days = DaysOf(40);
  for (int64_t seed = 1; seed <= days; ++seed) {
    ASSERT_EQ(Day(seed, {.faulty = true}).Play(met), "") << "seed " << seed;
  }
  if (Few()) return;
  EXPECT_GT(met.started, 40 * days);
  EXPECT_GT(met.faults, 10 * days);
  EXPECT_GT(met.on_spares, days);
  EXPECT_GT(met.waits_for_spares, days);
  EXPECT_GT(met.last_resort, days);
  EXPECT_GT(met.avoided_left, days);
}

TEST(ScheduledDay, WithSharedDevices_NoneIsGivenTwiceAndLimitsHold) {
  Met met;
  const int64_t days = DaysOf(20);
  for (int64_t seed = 1; seed <= days; ++seed) {
    ASSERT_EQ(Day(seed, {.shares = true}).Play(met), "") << "seed " << seed;
  }
  if (Few()) return;
  EXPECT_GT(met.started, 80 * days);
  EXPECT_GT(met.stopped, 8 * days);
  EXPECT_GT(met.shared, 100 * days);
}

TEST(ScheduledDay,
     WithSharedDevicesAndFaults_SparesAreForJobsThatRecoverAndAvoidedWorkersTheLastResort) {
  Met met;
  const int64_t days = DaysOf(20);
  for (int64_t seed = 1; seed <= days; ++seed) {
    ASSERT_EQ(Day(seed, {.faulty = true, .shares = true}).Play(met), "") << "seed " << seed;
  }
  if (Few()) return;
  // What days without shares have to meet, and shares besides.
  EXPECT_GT(met.started, 40 * days);
  EXPECT_GT(met.shared, 100 * days);
  EXPECT_GT(met.faults, 10 * days);
  EXPECT_GT(met.on_spares, days);
  EXPECT_GT(met.waits_for_spares, days);
  EXPECT_GT(met.last_resort, days);
  EXPECT_GT(met.avoided_left, days);
}

TEST(ScheduledDay, WithSharedDevicesAndWithoutQuota_NoGangWaitsBeyondTheBound) {
  Met met;
  const int64_t days = DaysOf(8);
  for (int64_t seed = 1; seed <= days; ++seed) {
    ASSERT_EQ(Day(seed, {.fair = true, .shares = true}).Play(met), "") << "seed " << seed;
  }
  if (Few()) return;
  EXPECT_GT(met.shared, 100 * days);
}

TEST(ScheduledDay, WithUnequalShares_NoGangWaitsBeyondTheBound) {
  Met met;
  const int64_t days = DaysOf(20);
  for (int64_t seed = 1; seed <= days; ++seed) {
    ASSERT_EQ(Day(seed, {.fair = true}).Play(met), "") << "seed " << seed;
  }
  if (Few()) return;
  EXPECT_GT(met.started, 50 * days);
  EXPECT_GT(met.overdue, 5 * days);
}

}  // namespace
}  // namespace muster::coordinator
