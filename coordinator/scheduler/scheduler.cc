#include "coordinator/scheduler/scheduler.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "coordinator/scheduler/placement.h"
#include "coordinator/scheduler/spares.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

constexpr int kWorkersNamedMax = 8;   // in one explanation
constexpr size_t kEndsTriedMax = 64;  // jobs whose ends are tried for one explanation

// Holds, while a plan is made, the free slots on which jobs that do not fit will start.
const JobId& Reserved() {
  static const auto* const id = new JobId("(reserved)");  // no job has such an id
  return *id;
}

// What the job asks for.
v1::WaitReason ReasonOf(const WaitingJob& job, v1::WaitCode code) {
  v1::WaitReason reason;
  reason.set_code(code);
  reason.set_queue(job.queue);
  reason.set_ranks(job.ranks);
  reason.set_device(job.device);
  reason.set_group(job.group);
  if (job.share < kWholeDevice) reason.set_share(static_cast<double>(job.share) / kWholeDevice);
  return reason;
}

// Which jobs a plan looks at behind those that do not fit, and which it explains.
struct Scope {
  int behind = 0;  // SchedulePolicy::explained_behind
  bool explains = true;
  bool preempts = true;
  const JobId* only = nullptr;  // the plan ends at this job and explains no other
  // When jobs are expected to end; null: RunningJobs::by_end().
  const std::set<std::pair<absl::Time, JobId>>* ends = nullptr;
};

// Null when there is no such slot.
const SlotView* FindSlot(const SlotIndex& index, const Slot& slot) {
  const WorkerView* worker = index.Find(slot.worker);
  if (worker == nullptr) return nullptr;
  for (const SlotView& view : worker->slots) {
    if (view.device == slot.device) return &view;
  }
  return nullptr;
}

// What a plan tries on the index of slots; all is as before when it is destroyed.
struct Attempted {
  explicit Attempted(SlotIndex& slots) : index(slots), trial(slots) {}
  ~Attempted() {
    trial.Rollback();  // what it took may have been given away before
    index.SetHoldersBack(given);
  }
  Attempted(const Attempted&) = delete;
  Attempted& operator=(const Attempted&) = delete;

  // Gives a slot that is free or kept for a job that waits to another one; empty: to none.
  void Give(const Slot& slot, const JobId& before, const JobId& holder) {
    given.push_back({slot.worker, slot.device, before});
    index.SetHolder(slot.worker, slot.device, holder);
  }
  // The job takes so many thousandths of a slot; 0: nothing.
  void Share(const Slot& slot, const JobId& job, int32_t share) {
    const SlotView* view = FindSlot(index, slot);
    if (view == nullptr) return;
    given.push_back({slot.worker, slot.device, JobId(), DevicePart{job, view->ShareOf(job)}});
    index.SetShare(slot.worker, slot.device, job, share);
  }

  SlotIndex& index;
  SlotIndex::Trial trial;
  std::vector<HeldSlot> given;  // with who held it before
};

// The slots that a job holds.
std::vector<Slot> SlotsOf(const SlotIndex& index, const JobId& job) {
  std::vector<Slot> slots;
  const Holding* holder = index.HolderOf(job);
  if (holder == nullptr) return slots;
  for (const WorkerView* worker : holder->workers) {
    for (const SlotView& slot : worker->slots) {
      if (slot.TakenBy(holder)) slots.push_back({worker->id, slot.device});
    }
  }
  return slots;
}

class Planner {
 public:
  Planner(Attempted& attempted, const Snapshot& cluster, const SchedulePolicy& policy,
          absl::Time now, Scope scope)
      : attempted_(attempted),
        index_(attempted.index),
        trial_(attempted.trial),
        cluster_(cluster),
        tree_(cluster.tree),
        running_(cluster.running),
        policy_(policy),
        now_(now),
        scope_(scope),
        kept_(cluster.kept),
        use_(cluster.use) {
    for (const auto& [id, kept] : kept_) {
      use_.Count(tree_, tree_.Find(kept.queue), kept.device,
                 static_cast<int64_t>(kept.slots.size()), kept.tenant, 1, kept.share);
    }
    for (size_t queue = 0; queue < tree_.queues().size(); ++queue) {
      shares_.push_back(ShareOf(cluster_, use_, static_cast<int>(queue), now_));
    }
    first_.assign(tree_.queues().size() + 1, nullptr);
    line_of_.assign(tree_.queues().size(), nullptr);
    matches_.resize(tree_.queues().size() + 1);
    place_.assign(tree_.queues().size(), 0);
    entrants_.resize(tree_.queues().size());
  }

  // The slots of those that start stay taken in the trial.
  Schedule Run(const WaitingQueue& queue) {
    schedule_.wake_at = queue.NextRetry(now_);
    KeepSpares();
    StartKept(queue);
    if (scope_.explains && scope_.only == nullptr) {
      const size_t each = static_cast<size_t>(scope_.behind) + 1;
      schedule_.explanations.reserve(std::min(queue.size(), queue.queues().size() * each));
    }
    // For every queue and shape the first job that was not looked at, those of a queue in order.
    lines_.reserve(queue.queues().size());
    for (const auto& [name, shapes] : queue.queues()) {
      Line& line = lines_.emplace_back();
      line.queue = tree_.Find(name);
      if (line.queue != QueueTree::kNone && !tree_.at(line.queue).leaf)
        line.queue = QueueTree::kNone;
      line.cursors.reserve(shapes.size());
      line.heads.reserve(shapes.size());
      for (const auto& [shape, jobs] : shapes) {
        line.cursors.push_back({jobs.begin(), jobs.end(), &shape});
        line.heads.push_back({jobs.begin()->first, &line.cursors.back()});
      }
      std::sort(line.heads.begin(), line.heads.end(), GoesAfter);
      if (line.queue != QueueTree::kNone) {
        line_of_[static_cast<size_t>(line.queue)] = &line;
        line.last_turn = cluster_.history.LastTurn(name);
      }
    }
    for (size_t of = tree_.queues().size(); of > 0; --of) BeginMatches(static_cast<int>(of) - 1);
    BeginMatches(QueueTree::kNone);
    for (Line* line = NextLine(); line != nullptr; line = NextAfter(*line)) {
      if (line->blocker != nullptr && !scope_.explains && NobodyCanStart(*line)) {
        line->heads.clear();
        continue;
      }
      if (line->blocker != nullptr && !line->reserved && scope_.explains &&
          scope_.only == nullptr) {
        TellThoseBehind(*line);
        continue;
      }
      Cursor& cursor = *line->heads.back().cursor;
      const WaitingJob& job = cursor.next->second;
      if (!settled_.contains(job.id)) Consider(job, *line, cursor);
      if (scope_.only != nullptr && job.id == *scope_.only) break;
      GoOn(*line, cursor, job);
    }
    HoldReserved(absl::InfinitePast());
    if (scope_.explains && scope_.preempts && scope_.only == nullptr) ResizeRunning();
    if (scope_.explains) DecideReserves();
    trial_.Release(SpareHolder());
    if (!reservations_.empty()) schedule_.again_at = now_ + kSharesInterval;
    return std::move(schedule_);
  }

 private:
  // How far the plan has come with the jobs of one shape in one queue.
  struct Cursor {
    WaitingQueue::Jobs::const_iterator next, end;
    const GangShape* shape;
    bool may_start = false;  // once the cluster is idle
    bool misfit = false;     // one did not fit, so that none behind it does
    int behind = 0;          // jobs looked at behind that one
  };
  // The next job of a shape. What orders them is here, since jobs are far apart in memory.
  struct Head {
    QueueOrder order;
    Cursor* cursor;
  };
  static bool GoesAfter(const Head& a, const Head& b) { return b.order < a.order; }
  // How far it has come with a queue.
  struct Line {
    int queue = QueueTree::kNone;  // kNone: there is no such queue that jobs wait in
    absl::Time last_turn = absl::InfinitePast();
    std::vector<Cursor> cursors;          // by shape
    std::vector<Head> heads;              // of those that have jobs, the one that goes first last
    const WaitingJob* blocker = nullptr;  // the first job that does not fit and holds back others
    bool reserved = false;                // it is known when and where the blocker will start
    int behind = 0;                       // jobs looked at behind the blocker
    std::shared_ptr<const v1::WaitReason> why_behind = nullptr;  // why these wait; null: not made
  };
  // When a job that does not fit will start.
  struct Reservation {
    const WaitingJob* job;
    absl::Time at;                          // InfiniteFuture: not known
    std::vector<SlotIndex::SlotRef> slots;  // by rank
  };

  // What decides whose turn it is, of a queue of which First() has a job.
  struct Entrant {
    const WaitingJob* head = nullptr;
    bool borrows = false;  // with that job
    absl::Time since;      // OverdueSince()
    double share = 0;
  };

  const WaitingJob& HeadOf(const Line& line) const {
    return line.heads.back().cursor->next->second;
  }

  // The first job of the queue was looked at.
  void GoOn(Line& line, Cursor& cursor, const WaitingJob& job) {
    if (line.blocker != nullptr && line.behind >= scope_.behind) {
      schedule_.horizon.queues.emplace(job.queue, job.order());
      return line.heads.clear();
    }
    if (cursor.misfit && cursor.behind >= scope_.behind) {
      schedule_.horizon.shapes.emplace(std::make_pair(job.queue, job.shape()), job.order());
      return line.heads.pop_back();
    }
    if (++cursor.next == cursor.end) return line.heads.pop_back();
    // To its place among the others.
    const Head head = {cursor.next->first, &cursor};
    auto place = line.heads.end() - 1;
    for (; place != line.heads.begin() && !GoesAfter(*(place - 1), head); --place) {
      *place = *(place - 1);
    }
    *place = head;
  }

  // The jobs behind one of which it is not known when it starts. Most of what a plan looks at are
  // these, and there is only one thing to say of nearly all of them.
  void TellThoseBehind(Line& line) {
    while (!line.heads.empty()) {
      Cursor& cursor = *line.heads.back().cursor;
      const WaitingJob& job = cursor.next->second;
      if (cursor.may_start && job.not_before <= now_ && settled_.empty()) {
        ++line.behind;
        if (cursor.misfit) ++cursor.behind;
        Want(job.device);
        ExplainBehind(job, line);
      } else if (!settled_.contains(job.id)) {
        Consider(job, line, cursor);
      }
      GoOn(line, cursor, job);
    }
  }

  // The jobs behind one that does not fit, and of which it is not known when it will, are only told
  // so: that changes nothing for other queues, so that all are looked at in one go.
  Line* NextAfter(Line& line) {
    if (line.blocker != nullptr && !line.reserved && !line.heads.empty()) return &line;
    MovedOn(line.queue);
    return NextLine();
  }
  // The queue whose turn it is; null when no job is left.
  Line* NextLine() {
    // The queue whose turn it was comes first: it alone may have run out of jobs, and no match is
    // to meet it before that is known.
    for (auto stale = stale_.rbegin(); stale != stale_.rend(); ++stale) {
      SetFirst(*stale);
      for (int below = *stale; below != QueueTree::kNone; below = tree_.at(below).parent) {
        const int above = tree_.at(below).parent;
        Enter(below);
        Replay(above, place_[static_cast<size_t>(below)]);
        First(above) = Winner(above);
      }
    }
    stale_.clear();
    if (Line* first = First(QueueTree::kNone); first != nullptr) return first;
    for (Line& line : lines_) {
      if (line.queue == QueueTree::kNone && !line.heads.empty()) return &line;
    }
    return nullptr;
  }

  // Of a queue and those below it the one whose turn it is; null when none has a job left.
  Line*& First(int queue) { return first_[static_cast<size_t>(queue + 1)]; }
  // Of a queue without queues below it.
  void SetFirst(int queue) {
    if (!tree_.at(queue).leaf) return;
    Line* line = line_of_[static_cast<size_t>(queue)];
    First(queue) = line != nullptr && !line->heads.empty() ? line : nullptr;
  }
  // The queues below one play a knockout: matches_ has the winner of match i at i, those of matches
  // 2 i and 2 i + 1 play it, and the queues themselves follow. A queue that changes plays its own
  // matches again and no others.
  void BeginMatches(int queue) {
    if (queue != QueueTree::kNone && tree_.at(queue).leaf) return SetFirst(queue);
    const std::vector<int>& below = tree_.Below(queue);
    std::vector<int>& matches = matches_[static_cast<size_t>(queue + 1)];
    matches.assign(below.size(), QueueTree::kNone);
    matches.insert(matches.end(), below.begin(), below.end());
    for (size_t i = 0; i < below.size(); ++i) {
      place_[static_cast<size_t>(below[i])] = i;
      Enter(below[i]);
    }
    for (size_t match = below.size(); match-- > 1;) Play(matches, match);
    First(queue) = Winner(queue);
  }
  void Replay(int queue, size_t place) {
    std::vector<int>& matches = matches_[static_cast<size_t>(queue + 1)];
    for (size_t match = (matches.size() / 2 + place) / 2; match > 0; match /= 2) {
      Play(matches, match);
    }
  }
  void Play(std::vector<int>& matches, size_t match) {
    const int a = matches[2 * match];
    const int b = matches[2 * match + 1];
    const bool first = First(b) == nullptr || (First(a) != nullptr && GoesBefore(a, b));
    matches[match] = first ? a : b;
  }
  Line* Winner(int queue) {
    const std::vector<int>& matches = matches_[static_cast<size_t>(queue + 1)];
    return matches.empty() ? nullptr : First(matches[1]);
  }
  // The first job of the queue, or what it uses, has changed.
  void MovedOn(int queue) {
    if (queue != QueueTree::kNone) stale_.push_back(queue);
  }

  // Of two queues beside each other, both with jobs.
  bool GoesBefore(int a, int b) const {
    const Entrant& one = entrants_[static_cast<size_t>(a)];
    const Entrant& other = entrants_[static_cast<size_t>(b)];
    if (one.borrows != other.borrows) return other.borrows;
    if (one.since != other.since) return one.since < other.since;
    if (one.share != other.share) return one.share < other.share;
    return one.head->order() < other.head->order();
  }
  // To be called when the first job of the queue, or what the queue uses, has changed.
  void Enter(int queue) {
    const Line* line = First(queue);
    if (line == nullptr) return;
    Entrant& entrant = entrants_[static_cast<size_t>(queue)];
    entrant.head = &HeadOf(*line);
    entrant.borrows = Borrows(queue, *entrant.head);
    entrant.since = OverdueSince(*line);
    entrant.share = shares_[static_cast<size_t>(queue)];
  }

  // Since when the first job of the queue waits, if that is too long; else InfiniteFuture.
  absl::Time OverdueSince(const Line& line) const {
    if (line.blocker != nullptr) return absl::InfiniteFuture();
    const absl::Time since = std::max(HeadOf(line).queued_at, line.last_turn);
    return now_ >= since + tree_.turn_after() ? since : absl::InfiniteFuture();
  }

  // With the job the queue uses more than is guaranteed to it.
  bool Borrows(int queue, const WaitingJob& job) const {
    const size_t kind = static_cast<size_t>(job.device);
    return use_.at(queue).thousandths[kind] + int64_t{job.ranks} * job.share >
           tree_.at(queue).guaranteed[kind] * kWholeDevice;
  }

  void Count(int queue, v1::DeviceKind device, int64_t ranks, const std::string& tenant, int sign,
             int32_t share = kWholeDevice) {
    if (queue == QueueTree::kNone) return;
    use_.Count(tree_, queue, device, ranks, tenant, sign, share);
    for (const int above : tree_.Path(queue)) {
      shares_[static_cast<size_t>(above)] = ShareOf(cluster_, use_, above, now_);
    }
    MovedOn(queue);
  }

  // None of the jobs behind the blocker could start, so that they need not be looked at.
  bool NobodyCanStart(const Line& line) const {
    if (!line.reserved) return true;
    if (reserved_held_ > 0) return false;
    for (const Head& head : line.heads) {
      if (index_.RoomOf(SlotsWantedBy(head.cursor->next->second)).free > 0) return false;
    }
    return true;
  }

  EvictionSearch evictions() const {
    return {attempted_.index, running_,     kept_, stopped_, tree_, use_,
            cluster_.history, cluster_.use, now_};
  }

  // The jobs for which slots are kept start, go on waiting for them, or give them up.
  void StartKept(const WaitingQueue& waiting) {
    std::map<QueueOrder, const WaitingJob*> jobs;
    for (const auto& [id, kept] : kept_) {
      const WaitingJob* job = waiting.Find(id);
      if (job == nullptr) continue;
      jobs.emplace(job->order(), job);
      names_.emplace(job->id, job->name);
    }
    for (const auto& [order, job] : jobs) {
      // Its own use is counted already. Jobs that are being stopped for it count until they are
      // gone.
      const Kept& kept = kept_.find(job->id)->second;
      // An elastic job starts with as many ranks as slots are kept for it.
      const WaitingJob sized =
          job->sizes.empty() ? *job : AtSize(*job, static_cast<int32_t>(kept.slots.size()));
      if (!job->sizes.empty() &&
          !std::binary_search(job->sizes.begin(), job->sizes.end(), sized.ranks)) {
        GiveUp(job->id);
        schedule_.decisions.emplace_back(GiveUpKept{job->id});
        continue;
      }
      Uncount(kept);
      const int queue = tree_.Find(job->queue);
      const bool limited =
          queue != QueueTree::kNone &&
          FindLimit(tree_, use_, queue, job->device, sized.ranks, job->tenant, job->share)
              .has_value();
      auto placements = limited ? std::nullopt : TryPlace(sized);
      Count(tree_.Find(kept.queue), kept.device, static_cast<int64_t>(kept.slots.size()),
            kept.tenant, 1, kept.share);
      if (placements.has_value()) {
        settled_.insert(job->id);
        Uncount(kept);
        kept_.erase(job->id);
        Place(sized, *std::move(placements), /*in_turn=*/true);
      } else if (StillKept(evictions(), job->id, kept_.find(job->id)->second)) {
        settled_.insert(job->id);
        const WaitingJob& waits = *job;  // a lambda cannot hold a structured binding
        Explain(waits, [&] { return KeptFor(waits); });
      } else {
        GiveUp(job->id);
        schedule_.decisions.emplace_back(GiveUpKept{job->id});
      }
    }
  }

  // Slots that are kept for the job are free again, or will be once it has ended.
  void GiveUp(const JobId& job) {
    Changed();
    // One that stops to be resized holds the slots on which it runs until it has ended, and those
    // that are kept for it look the same in the index.
    if (!running_.Contains(job)) {
      for (const Slot& slot : SlotsOf(index_, job)) {
        FindSlot(index_, slot)->held_by == job ? attempted_.Give(slot, job, JobId())
                                               : attempted_.Share(slot, job, 0);
      }
    }
    Uncount(kept_.find(job)->second);
    kept_.erase(job);
  }
  void Uncount(const Kept& kept) {
    Count(tree_.Find(kept.queue), kept.device, static_cast<int64_t>(kept.slots.size()), kept.tenant,
          -1, kept.share);
  }

  // ---- spares

  // Free slots become spares where some are missing.
  void KeepSpares() {
    if (!tree_.spares().empty()) spares_missing_ = HoldSpares(trial_, tree_);
  }
  int64_t SparesHeld(v1::DeviceKind kind) const {
    const Holding* holder = index_.HolderOf(SpareHolder());
    return holder == nullptr ? 0 : holder->slots[static_cast<size_t>(kind)];
  }
  bool MayTakeSpares(const WaitingJob& job) const {
    return !tree_.spares().empty() && job.ranks <= job.recovering;
  }
  // Until KeepSpares() they are as free as other slots, but for those that are reserved.
  void OpenSpares() {
    trial_.Release(SpareHolder());
    SetReserved(held_until_);
  }
  // The most slots of any domain that it may be in which are not spares, once nobody runs, and all
  // slots of that domain.
  struct BesideSpares {
    int64_t slots = 0;
    int64_t all = 0;
  };
  BesideSpares MostBesideSpares(const WaitingJob& job) {
    if (spares_wanted_.empty()) spares_wanted_ = SparesWanted(index_, tree_);
    const size_t kind = static_cast<size_t>(job.device);
    const v1::TopologyLevel required = job.placement.required;
    const bool in_one = required > v1::TOPOLOGY_LEVEL_HOST && job.placement.segment == 0;
    const v1::TopologyLevel level = in_one ? required : v1::TOPOLOGY_LEVEL_CLUSTER;
    BesideSpares most;
    for (const auto& [path, number] : index_.domains_of(level)) {
      const SlotIndex::Domain& domain = index_.domain(number);
      const auto here = domain.slots.find(job.device);
      if (here == domain.slots.end()) continue;
      const int64_t all = here->second.Sum(job.share);
      const int64_t slots =
          std::max<int64_t>(0, all - spares_wanted_[static_cast<size_t>(number)][kind]);
      if (std::make_pair(slots, all) > std::make_pair(most.slots, most.all)) most = {slots, all};
    }
    return most;
  }
  // It would start now if it could take spares.
  bool FitsWithSpares(const WaitingJob& job) {
    if (SparesHeld(job.device) == 0) return false;
    SlotIndex::Trial trial(attempted_.index);
    trial.Release(SpareHolder());
    return FitsNow(trial, job);
  }

  // The slots that are kept for the job count as free. It takes spares before it takes workers that
  // are avoided, and both only where it has to.
  std::optional<std::vector<v1::Placement>> TryPlace(const WaitingJob& job) {
    const bool spares = MayTakeSpares(job) && SparesHeld(job.device) > 0;
    auto placements = TryPlaceBesideSpares(job, /*last_resort=*/!spares);
    if (placements.has_value() || !spares) return placements;
    OpenSpares();
    placements = TryPlaceBesideSpares(job, /*last_resort=*/false);
    KeepSpares();
    if (placements.has_value() || index_.marked().empty()) return placements;
    placements = TryPlaceBesideSpares(job, /*last_resort=*/true);
    if (placements.has_value()) return placements;
    OpenSpares();
    placements = TryPlaceBesideSpares(job, /*last_resort=*/true);
    KeepSpares();
    return placements;
  }
  std::optional<std::vector<v1::Placement>> TryPlaceBesideSpares(const WaitingJob& job,
                                                                 bool last_resort) {
    if (index_.HolderOf(job.id) == nullptr) return PlaceGang(trial_, job, last_resort);
    const std::vector<Slot> own = SlotsOf(index_, job.id);
    trial_.Release(job.id);
    auto placements = PlaceGang(trial_, job, last_resort);
    if (!placements.has_value()) {
      std::vector<HeldSlot> back;
      for (const Slot& slot : own) {
        back.push_back({slot.worker, slot.device, job.id});
        if (job.share < kWholeDevice) back.back().part = DevicePart{job.id, job.share};
      }
      attempted_.index.SetHolders(back);
    }
    return placements;
  }

  // Stops running jobs so that this one can start; false when that does not help.
  bool TryPreempt(const WaitingJob& job) {
    if (!scope_.preempts) return false;
    HoldReserved(absl::InfinitePast());
    const bool spares = MayTakeSpares(job);
    if (spares) OpenSpares();
    std::optional<Eviction> eviction = ChooseVictims(evictions(), job, schedule_.wake_at);
    if (!eviction.has_value()) {
      if (spares) KeepSpares();
      return false;
    }
    spares_wait_ = true;
    for (const JobId& id : eviction->outbid) {
      GiveUp(id);
      settled_.erase(id);
    }
    stopped_.insert(eviction->stopped.begin(), eviction->stopped.end());
    for (Resized& resized : eviction->resized) DecideResize(std::move(resized), job.id);
    eviction->resized.clear();
    Keep(job, eviction->slots);
    spares_wait_ = false;
    KeepSpares();
    settled_.insert(job.id);
    largest_holders_.erase(job.device);
    Explain(job, [&] { return KeptFor(job); });
    schedule_.decisions.emplace_back(Preempt{job.id, *std::move(eviction)});
    return true;
  }

  // Keeps slots for a job: those that are free, and others once their holders have released them.
  void Keep(const WaitingJob& job, const std::vector<Slot>& slots) {
    Changed();
    names_.emplace(job.id, job.name);
    Kept& kept = kept_[job.id];
    kept = {job.queue, job.priority, job.device, job.tenant, {}, job.share};
    for (const Slot& slot : slots) {
      kept.slots.insert(slot);
      const SlotView* view = FindSlot(index_, slot);
      if (view == nullptr) continue;
      if (view->KeepsAtOnce(job.share)) {
        attempted_.Share(slot, job.id, job.share);
      } else if (!view->held()) {
        attempted_.Give(slot, JobId(), job.id);
      }
    }
    Count(tree_.Find(job.queue), job.device, static_cast<int64_t>(slots.size()), job.tenant, 1,
          job.share);
  }

  // Its attempt is being ended, or will be by this plan.
  bool IsStopping(const JobId& job) const {
    const RunningJob* running = running_.Find(job);
    return running != nullptr && (running->stopping || stopped_.contains(job));
  }

  // ---- elastic jobs that run

  void DecideResize(Resized resized, const JobId& for_job) {
    const RunningJob& running = *running_.Find(resized.job);
    stopped_.insert(resized.job);
    largest_holders_.erase(running.device);
    Keep(running.elastic->gang, resized.slots);
    schedule_.decisions.emplace_back(Resize{std::move(resized), for_job});
  }

  void ResizeRunning() {
    std::vector<std::pair<int32_t, JobId>> order;
    for (const JobId& id : running_.elastic()) {
      if (!stopped_.contains(id)) order.emplace_back(-running_.Find(id)->priority, id);
    }
    std::sort(order.begin(), order.end());
    for (const auto& [priority, id] : order) {
      if (std::optional<Resized> resized = NewSize(id, *running_.Find(id)); resized.has_value()) {
        DecideResize(*std::move(resized), JobId());
      }
    }
  }

  // What becomes of a running job for which no other one has to shrink.
  std::optional<Resized> NewSize(const JobId& id, const RunningJob& running) {
    const Elasticity& elastic = *running.elastic;
    const std::vector<int32_t>& sizes = elastic.gang.sizes;
    const bool reserved = !elastic.gang.reservations.empty();
    const int64_t most = reserved ? sizes.back() : running.ranks + index_.Of(running.device).free;
    if (elastic.asked) {
      if (sizes.front() == running.ranks) return std::nullopt;
      if (sizes.front() > running.ranks && Wanted(running.device)) return std::nullopt;
      return sizes.front() > most ? std::nullopt : Moved(id, running, sizes.front());
    }
    if (Wanted(running.device)) return std::nullopt;
    for (auto size = sizes.rbegin(); size != sizes.rend() && *size > running.ranks; ++size) {
      if (*size > most) continue;
      const absl::Time due = running.started_at + elastic.grow_after;
      if (now_ < due) {
        schedule_.wake_at = std::min(schedule_.wake_at, due);
        return std::nullopt;
      }
      // The restart would cost more than the rest gains.
      if (running.ends_at < now_ + std::max(elastic.grow_after, kRestartCost)) return std::nullopt;
      if (auto moved = Moved(id, running, *size); moved.has_value()) return moved;
    }
    return std::nullopt;
  }

  // Where the job would be with so many ranks; its own slots count as free.
  std::optional<Resized> Moved(const JobId& id, const RunningJob& running, int32_t ranks) {
    const int queue = tree_.Find(running.queue);
    if (queue != QueueTree::kNone && ranks > running.ranks) {
      Count(queue, running.device, running.ranks, running.tenant, -1);
      const bool limited =
          FindLimit(tree_, use_, queue, running.device, ranks, running.tenant).has_value();
      Count(queue, running.device, running.ranks, running.tenant, 1);
      if (limited) return std::nullopt;
    }
    SlotIndex::Trial trial(attempted_.index);
    trial.Release(id);
    const auto placements = PlaceGang(trial, AtSize(running.elastic->gang, ranks));
    if (!placements.has_value()) return std::nullopt;
    Resized resized{id, {}};
    for (const v1::Placement& placement : *placements) {
      resized.slots.push_back({WorkerId(placement.worker()), placement.device()});
    }
    return resized;
  }

  // ---- jobs that wait, one by one

  void Want(v1::DeviceKind device) { wanted_[static_cast<size_t>(device)] = true; }
  bool Wanted(v1::DeviceKind device) const { return wanted_[static_cast<size_t>(device)]; }

  void Consider(const WaitingJob& job, Line& line, Cursor& cursor) {
    const WaitingJob* blocker = line.blocker;
    if (blocker != nullptr) ++line.behind;
    if (cursor.misfit) ++cursor.behind;
    if (job.not_before > now_) {
      Want(job.device);
      return Explain(job, [&] { return BackOff(job); });
    }
    // One that can never start holds back none.
    if (!cursor.may_start) {
      if (const auto never = NeverStarts(job, line.queue); never.has_value()) {
        cursor.misfit = true;
        return Explain(job, [&] { return *never; });
      }
      cursor.may_start = true;  // as all jobs of this shape in this queue
    }
    if (blocker != nullptr && !line.reserved) {
      Want(job.device);
      return ExplainBehind(job, line);
    }
    const std::optional<QueueLimit> limit =
        FindLimit(tree_, use_, line.queue, job.device, job.ranks, job.tenant, job.share);
    bool passes_over = false;  // it fits, but would delay a job in front
    if (!limit.has_value()) {
      if (StartsLarger(job, line)) return;
      if (auto placements = TryStart(job, cursor.shape, blocker == nullptr, passes_over);
          placements.has_value()) {
        return Place(job.sizes.empty() ? job : AtSize(job, job.ranks), *std::move(placements),
                     blocker == nullptr);
      }
    }
    Want(job.device);
    if (blocker != nullptr) return ExplainBehind(job, line);
    if (passes_over) {
      line.blocker = &job;
      return Explain(job, [&] { return PassesOver(job); });
    }
    if (TryPreempt(job)) return;
    cursor.misfit = true;
    if (limit.has_value()) {
      // Another tenant may start.
      if (policy_.strict_fifo && limit->kind != QueueLimit::Kind::kTenant) line.blocker = &job;
      return Explain(job, [&] { return AtLimit(job, *limit); });
    }
    if (policy_.strict_fifo) Block(job, line);
    Explain(job, [&] { return NotNow(job); });
  }

  // Starts an elastic job with the largest of its sizes above the smallest that fits.
  bool StartsLarger(const WaitingJob& job, const Line& line) {
    for (size_t i = job.sizes.size(); i > 1; --i) {
      const int32_t ranks = job.sizes[i - 1];
      const int64_t spares = ranks <= job.recovering ? SparesHeld(job.device) : 0;
      if (index_.Of(job.device).free + reserved_held_ + spares < ranks &&
          job.reservations.empty()) {
        continue;
      }
      if (FindLimit(tree_, use_, line.queue, job.device, ranks, job.tenant).has_value()) continue;
      const WaitingJob sized = AtSize(job, ranks);
      bool passes_over = false;
      auto placements = TryStart(sized, nullptr, /*first_of_queue=*/false, passes_over);
      if (!placements.has_value()) continue;
      Place(sized, *std::move(placements), line.blocker == nullptr);
      return true;
    }
    return false;
  }

  // CouldFit, which is found out once for all queues.
  bool MayEverFit(const WaitingJob& job) {
    const auto known =
        std::find_if(could_fit_.begin(), could_fit_.end(), [&job](const CouldFitOf& one) {
          return one.ranks == job.ranks && one.group == job.group && one.share == job.share &&
                 one.device == job.device && one.placement == job.placement;
        });
    if (known != could_fit_.end()) return known->fits;
    could_fit_.push_back(
        {job.ranks, job.group, job.share, job.device, job.placement, CouldFit(job, index_)});
    return could_fit_.back().fits;
  }

  // Why the job waits until the cluster, its queues or the job are changed. It holds back none.
  std::optional<v1::WaitReason> NeverStarts(const WaitingJob& job, int queue) {
    if (queue == QueueTree::kNone || !tree_.at(queue).leaf) {
      return ReasonOf(job, v1::WAIT_CODE_NO_QUEUE);
    }
    const size_t kind = static_cast<size_t>(job.device);
    const int64_t thousandths = int64_t{job.ranks} * job.share;
    for (const int above : tree_.Path(queue)) {
      const QueueTree::Queue& limits = tree_.at(above);
      for (const auto& most : {limits.limit[kind], limits.tenant_limit[kind]}) {
        if (!most.has_value() || thousandths <= *most * kWholeDevice) continue;
        v1::WaitReason reason = ReasonOf(job, v1::WAIT_CODE_QUOTA_TOO_SMALL);
        reason.set_limiting_queue(limits.name);
        reason.set_limit(*most);
        return reason;
      }
    }
    const SlotIndex::Kind& slots = index_.Of(job.device);
    if (!MayEverFit(job)) return NeverFits(job, slots, UnitOf(job, slots));
    if (tree_.spares().empty() || MayTakeSpares(job)) return std::nullopt;
    const BesideSpares most = MostBesideSpares(job);
    if (most.slots >= job.ranks) return std::nullopt;
    const int unit = UnitOf(job, slots);
    v1::WaitReason reason = WithSlots(job, v1::WAIT_CODE_SPARES, slots, unit);
    reason.set_slots_spare(spares_wanted_[SlotIndex::kCluster][kind]);
    reason.set_lasting(true);
    v1::StartChange& change = *reason.mutable_change();
    if (most.all >= job.ranks) change.set_spares_lowered_by(job.ranks - most.slots);
    change.set_ranks_at_most(static_cast<int32_t>(most.slots - most.slots % unit));
    change.set_slots_added(job.ranks - most.slots);
    return reason;
  }

  // ---- jobs that do not fit, and jobs that start before them

  // The job holds back the others of its queue.
  void Block(const WaitingJob& job, Line& line) {
    line.blocker = &job;
    if (static_cast<int>(reservations_.size()) >= policy_.reservations_max) return;
    HoldReserved(absl::InfinitePast());
    std::vector<SlotIndex::SlotRef> slots;
    const absl::Time at = StartOf(job, slots);
    line.reserved = at != absl::InfiniteFuture();
    const auto first = static_cast<int64_t>(reserved_.size());
    for (const SlotIndex::SlotRef& slot : slots) reserved_.push_back({slot, at, job.share});
    // Of the same slot, the earliest first, with what all jobs take of it.
    const auto before = [](const ReservedSlot& a, const ReservedSlot& b) {
      if (a.slot.worker != b.slot.worker) return ByName()(a.slot.worker, b.slot.worker);
      if (a.slot.slot != b.slot.slot) return a.slot.slot < b.slot.slot;
      return a.until < b.until;
    };
    std::sort(reserved_.begin() + first, reserved_.end(), before);
    std::inplace_merge(reserved_.begin(), reserved_.begin() + first, reserved_.end(), before);
    reservations_.push_back({&job, at, std::move(slots)});
    size_t kept = 0;
    for (size_t i = 0; i < reserved_.size(); ++i) {
      if (i > 0 && reserved_[kept].slot.slot == reserved_[i].slot.slot) {
        reserved_[kept].share = std::min(kWholeDevice, reserved_[kept].share + reserved_[i].share);
      } else {
        kept += i > 0 ? 1 : 0;
        reserved_[kept] = reserved_[i];
      }
    }
    if (!reserved_.empty()) reserved_.resize(kept + 1);
    Changed();
  }

  // Once all jobs were looked at. Slots that are kept for a job go to that one when they are free.
  void DecideReserves() {
    std::set<const SlotView*> lost;
    for (const auto& [id, kept] : kept_) {
      if (kept.share < kWholeDevice) continue;  // counts already
      for (const Slot& slot : kept.slots) lost.insert(FindSlot(index_, slot));
    }
    for (const Reservation& reservation : reservations_) {
      if (reservation.at == absl::InfiniteFuture()) continue;
      if (std::any_of(reservation.slots.begin(), reservation.slots.end(),
                      [&lost](const auto& slot) { return lost.contains(slot.slot); })) {
        continue;
      }
      std::vector<SlotIndex::SlotRef> slots = reservation.slots;
      std::sort(slots.begin(), slots.end(),
                [](const SlotIndex::SlotRef& a, const SlotIndex::SlotRef& b) {
                  return a.worker != b.worker ? ByName()(a.worker, b.worker) : a.slot < b.slot;
                });
      Reserve reserve{reservation.job->id, {}, reservation.at};
      reserve.slots.reserve(slots.size());
      for (const SlotIndex::SlotRef& slot : slots) {
        reserve.slots.push_back({slot.worker->id, slot.slot->device});
      }
      schedule_.decisions.emplace_back(std::move(reserve));
    }
  }

  // When the job starts if nothing but ends of running jobs happens, and on which slots;
  // InfiniteFuture when that is not known.
  absl::Time StartOf(const WaitingJob& job, std::vector<SlotIndex::SlotRef>& slots) {
    SlotIndex::Trial trial(attempted_.index);
    const bool spares = MayTakeSpares(job);
    if (spares) trial.Release(SpareHolder());
    // What jobs that end leave becomes spares first.
    const auto keep_spares = [&] {
      if (!spares && spares_missing_ > 0) HoldSpares(trial, tree_);
    };
    for (const JobId& id : running_.Stopping(job.device).jobs) trial.Release(id);
    keep_spares();
    const auto placed = [&] {
      auto taken = TakeSlots(trial, job);
      if (!taken.has_value()) return false;
      slots = *std::move(taken);
      return true;
    };
    if (placed()) return now_ + kStopExpected;
    const auto& ends = scope_.ends != nullptr ? *scope_.ends : running_.by_end();
    auto end = ends.begin();
    auto ours = started_ends_.begin();
    while (end != ends.end() || ours != started_ends_.end()) {
      const bool mine = end == ends.end() || (ours != started_ends_.end() && *ours < *end);
      const auto& [at, id] = mine ? *ours++ : *end++;
      if (at + kOverrunMax < now_) continue;
      const int64_t before = FreeFor(job);
      trial.Release(id);
      keep_spares();
      const bool more = FreeFor(job) > before || !job.reservations.empty();
      if (FreeFor(job) < job.ranks && job.reservations.empty()) continue;
      if (more && placed()) return std::max(now_, at);
    }
    return absl::InfiniteFuture();
  }

  // Holds the slots that are reserved before `end` and free, and no others; with InfinitePast,
  // none.
  void HoldReserved(absl::Time end) {
    const absl::Time level = LevelOf(end);
    if (level == held_until_) return;
    held_until_ = level;
    SetReserved(level);
  }
  void SetReserved(absl::Time level) {
    const Holding* const held = index_.HolderOf(Reserved());
    std::vector<SlotIndex::SlotRef> hold, leave;
    std::vector<HeldSlot> parts;
    for (const ReservedSlot& reserved : reserved_) {
      const SlotView& slot = *reserved.slot.slot;
      const Holding* const holder = slot.holder;
      const bool wanted = reserved.until <= level;
      if (reserved.share < kWholeDevice || !slot.parts.empty()) {
        const int32_t share = wanted ? reserved.share : 0;
        // Where it is not free as far as it is reserved, what is left is not to be taken either.
        if (slot.ShareOf(Reserved()) == share || (wanted && slot.room() == 0)) continue;
        parts.push_back(
            {reserved.slot.worker->id, slot.device, JobId(), DevicePart{Reserved(), share}});
        reserved_held_ += wanted ? 1 : -1;
      } else if (wanted) {
        if (holder == nullptr) hold.push_back(reserved.slot);
      } else if (holder != nullptr && holder == held) {
        leave.push_back(reserved.slot);
      }
    }
    reserved_held_ += static_cast<int64_t>(hold.size()) - static_cast<int64_t>(leave.size());
    attempted_.index.SetHolder(leave, JobId());
    attempted_.index.SetHolder(hold, Reserved());
    const bool leaves =
        !leave.empty() || std::any_of(parts.begin(), parts.end(),
                                      [](const HeldSlot& slot) { return slot.part->share == 0; });
    if (!parts.empty()) attempted_.index.SetHolders(parts);
    if (leaves && spares_missing_ > 0 && !spares_wait_) KeepSpares();
  }

  // Slots that a rank of the job can get.
  int64_t FreeFor(const WaitingJob& job) const { return index_.RoomOf(SlotsWantedBy(job)).free; }

  // At most so many whole devices are free while reserved slots are held at this level. Requires:
  // nothing is kept spare.
  int64_t FreeAt(absl::Time level, v1::DeviceKind kind) {
    for (const FreeWhenHeld& known : free_at_) {
      if (known.level == level && known.kind == kind) return known.free;
    }
    const Holding* const held = index_.HolderOf(Reserved());
    int64_t free = index_.Of(kind).free;
    for (const ReservedSlot& reserved : reserved_) {
      const SlotView& slot = *reserved.slot.slot;
      if (slot.kind != kind) continue;
      const bool wanted = reserved.until <= level;
      if (wanted && reserved.slot.worker->ready && slot.free()) --free;
      if (!wanted && held != nullptr && slot.TakenBy(held)) ++free;
    }
    free_at_.push_back({level, kind, free});
    return free;
  }

  // Slots have changed hands for good, or others are reserved.
  void Changed() {
    misfits_.clear();
    free_at_.clear();
    if (spares_missing_ > 0 && !spares_wait_) KeepSpares();
  }
  // The level of reservations that HoldReserved would hold.
  absl::Time LevelOf(absl::Time end) const {
    absl::Time level = absl::InfinitePast();
    for (const Reservation& reservation : reservations_) {
      if (reservation.at < end) level = std::max(level, reservation.at);
    }
    return level;
  }

  // Places the job where it delays none of the jobs with a reservation. `passes_over`: it fits, but
  // only so that it might; not found out behind a job of its queue that does not fit.
  // `shape`: of the job, so that what is found out counts for others of it; null: it is not asked
  // for.
  std::optional<std::vector<v1::Placement>> TryStart(const WaitingJob& job, const GangShape* shape,
                                                     bool first_of_queue, bool& passes_over) {
    for (const Reservation& reservation : reservations_) {
      const WaitingJob& first = *reservation.job;
      if (reservation.at != absl::InfiniteFuture() || first.device != job.device ||
          first.queue == job.queue || now_ < first.queued_at + tree_.passed_over_max()) {
        continue;
      }
      passes_over = true;
      return std::nullopt;
    }
    const int64_t spares = MayTakeSpares(job) ? SparesHeld(job.device) : 0;
    if (reserved_.empty() ||
        (FreeFor(job) + reserved_held_ + spares < job.ranks && job.reservations.empty())) {
      return TryPlaceAlike(job, shape, held_until_);
    }
    const absl::Time end = now_ + job.runtime;
    if (shape != nullptr && !first_of_queue && KnownMisfit(*shape, LevelOf(end)) &&
        !kept_.contains(job.id)) {
      return std::nullopt;
    }
    // Mostly numbers tell, and it is far cheaper to ask them than to hold other slots.
    if (shape != nullptr && NumbersTell(job)) {
      if (first_of_queue && !FitsBesideNone(job, *shape)) return std::nullopt;
      const absl::Time level = LevelOf(end);
      if (job.share == kWholeDevice && FreeAt(level, job.device) < job.ranks) {
        const auto [known, first] = misfits_.emplace(shape, level);
        known->second = std::min(known->second, level);
        passes_over = first_of_queue;
        return std::nullopt;
      }
    }
    HoldReserved(end);
    auto placements = TryPlaceAlike(job, shape, held_until_);
    if (!placements.has_value() && first_of_queue) {
      HoldReserved(absl::InfinitePast());
      SlotIndex::Trial trial(attempted_.index);
      passes_over = FitsNow(trial, job);
    }
    return placements;
  }

  // The job gets no slots but those that are free.
  bool NumbersTell(const WaitingJob& job) const {
    return tree_.spares().empty() && job.reservations.empty() && !kept_.contains(job.id) &&
           index_.HolderOf(job.id) == nullptr;
  }
  // The job fits if nothing is reserved, and nothing is from then on.
  bool FitsBesideNone(const WaitingJob& job, const GangShape& shape) {
    HoldReserved(absl::InfinitePast());
    if (KnownMisfit(shape, absl::InfinitePast())) return false;
    SlotIndex::Trial trial(attempted_.index);
    if (FitsNow(trial, job)) return true;
    misfits_.insert_or_assign(&shape, absl::InfinitePast());
    return false;
  }

  // A shape that does not fit beside the slots that are held at a level does not beside more.
  bool KnownMisfit(const GangShape& shape, absl::Time level) const {
    const auto known = misfits_.find(&shape);
    return known != misfits_.end() && known->second <= level;
  }
  std::optional<std::vector<v1::Placement>> TryPlaceAlike(const WaitingJob& job,
                                                          const GangShape* shape,
                                                          absl::Time level) {
    if (shape == nullptr || kept_.contains(job.id)) return TryPlace(job);
    if (KnownMisfit(*shape, level)) return std::nullopt;
    auto placements = TryPlace(job);
    if (placements.has_value()) return placements;
    const auto [known, first] = misfits_.emplace(shape, level);
    known->second = std::min(known->second, level);
    return placements;
  }

  void Place(const WaitingJob& job, std::vector<v1::Placement> placements, bool in_turn) {
    Changed();
    AddHolder(job);
    names_.emplace(job.id, job.name);
    Count(tree_.Find(job.queue), job.device, job.ranks, job.tenant, 1, job.share);
    if (job.runtime != absl::InfiniteDuration()) started_ends_.emplace(now_ + job.runtime, job.id);
    schedule_.decisions.emplace_back(Start{job.id, std::move(placements), in_turn});
  }

  // ---- reasons

  template <typename Reason>
  void Explain(const WaitingJob& job, Reason reason) {
    if (!scope_.explains || (scope_.only != nullptr && job.id != *scope_.only)) return;
    schedule_.explanations.emplace_back(job.id, reason());
  }

  v1::WaitReason AtLimit(const WaitingJob& job, const QueueLimit& limit) const {
    v1::WaitReason reason = ReasonOf(job, v1::WAIT_CODE_QUEUE_QUOTA);
    if (limit.kind == QueueLimit::Kind::kJobs) reason.set_code(v1::WAIT_CODE_QUEUE_JOBS);
    if (limit.kind == QueueLimit::Kind::kTenant) {
      reason.set_code(v1::WAIT_CODE_TENANT_LIMIT);
      reason.set_tenant(job.tenant);
    }
    reason.set_limiting_queue(tree_.at(limit.queue).name);
    reason.set_limit(limit.limit);
    reason.set_used(limit.used);
    reason.set_used_devices(static_cast<double>(limit.thousandths) / kWholeDevice);
    return reason;
  }

  // The job that it would delay: of those the one that starts first.
  v1::WaitReason PassesOver(const WaitingJob& job) const {
    v1::WaitReason reason = ReasonOf(job, v1::WAIT_CODE_RESERVED);
    SetFirst(job, reason);
    return reason;
  }
  // Of the jobs that go before it and have a reservation, the one that starts first.
  void SetFirst(const WaitingJob& job, v1::WaitReason& reason) const {
    const Reservation* first = nullptr;
    for (const Reservation& reservation : reservations_) {
      if (reservation.job->device != job.device || reservation.job->id == job.id) continue;
      if (first == nullptr || reservation.at < first->at) first = &reservation;
    }
    if (first == nullptr) return;
    SetBlocker(*first->job, reason);
    if (first->at != absl::InfiniteFuture()) *reason.mutable_reserved_start() = ToProto(first->at);
  }

  // Which jobs are to leave slots to it.
  v1::WaitReason KeptFor(const WaitingJob& job) const {
    v1::WaitReason reason = ReasonOf(job, v1::WAIT_CODE_SLOTS_KEPT);
    std::map<JobId, int64_t> stopping;
    for (const Slot& slot : kept_.find(job.id)->second.slots) {
      const SlotView* view = FindSlot(index_, slot);
      if (view == nullptr) continue;
      for (const DevicePart& part : view->Holders()) {
        if (part.job != job.id && IsStopping(part.job)) ++stopping[part.job];
      }
    }
    for (const auto& [id, slots] : stopping) {
      v1::JobSlots& holder = *reason.add_stopping();
      holder.set_job_id(id.value());
      holder.set_job_name(NameOf(id));
      holder.set_slots(slots);
    }
    return reason;
  }

  static v1::WaitReason BackOff(const WaitingJob& job) {
    v1::WaitReason reason = ReasonOf(job, v1::WAIT_CODE_BACK_OFF);
    *reason.mutable_until() = ToProto(job.not_before);
    return reason;
  }

  void ExplainBehind(const WaitingJob& job, Line& line) {
    if (!scope_.explains || (scope_.only != nullptr && job.id != *scope_.only)) return;
    if (line.why_behind == nullptr) line.why_behind = Behind(*line.blocker);
    schedule_.explanations.emplace_back(job, line.why_behind);
  }

  // Of the jobs of a queue behind this one, without what each of them asks for.
  std::shared_ptr<const v1::WaitReason> Behind(const WaitingJob& blocker) const {
    auto reason = std::make_shared<v1::WaitReason>();
    reason->set_code(v1::WAIT_CODE_BEHIND);
    reason->set_queue(blocker.queue);
    SetBlocker(blocker, *reason);
    for (const Reservation& reservation : reservations_) {
      if (reservation.job != &blocker || reservation.at == absl::InfiniteFuture()) continue;
      *reason->mutable_reserved_start() = ToProto(reservation.at);
    }
    reason->mutable_change()->set_priority_above(blocker.priority);
    return reason;
  }

  static void SetBlocker(const WaitingJob& blocker, v1::WaitReason& reason) {
    v1::WaitingJobRef& front = *reason.mutable_blocker();
    front.set_job_id(blocker.id.value());
    front.set_job_name(blocker.name);
    front.set_priority(blocker.priority);
    front.set_ranks(blocker.ranks);
    front.set_device(blocker.device);
  }

  v1::WaitReason WithSlots(const WaitingJob& job, v1::WaitCode code, const SlotIndex::Kind& slots,
                           int group) const {
    v1::WaitReason reason = ReasonOf(job, code);
    reason.set_slots_total(TotalFor(job, slots));
    reason.set_slots_free(FreeFor(job));
    if (slots.shared > 0) {
      SlotsFor with_room = SlotsWantedBy(job);
      with_room.shared = true;
      const int64_t fitting = job.share < kWholeDevice ? index_.RoomOf(with_room).free : 0;
      reason.set_slots_shared(slots.shared - fitting);
    }
    reason.set_group(group);
    reason.set_groups_total(GroupsIn(slots, group, job.share));
    reason.set_slots_reserved(slots.reserved);
    reason.set_slots_spare(SparesHeld(job.device));
    return reason;
  }

  v1::WaitReason OutsideDomains(const WaitingJob& job, v1::WaitCode code,
                                const SlotIndex::Kind& slots, int group,
                                const DomainShortage& shortage) const {
    v1::WaitReason reason = WithSlots(job, code, slots, group);
    reason.set_level(shortage.level);
    reason.set_segment(shortage.segment);
    reason.set_domain(shortage.domain);
    reason.set_domain_slots(shortage.slots);
    for (const auto& [id, held] : shortage.jobs) {
      v1::JobSlots& ends = *reason.mutable_change()->add_jobs_end();
      ends.set_job_id(id.value());
      ends.set_job_name(NameOf(id));
      ends.set_slots(held);
    }
    if (shortage.level_at_least != v1::TOPOLOGY_LEVEL_UNSPECIFIED &&
        job.placement.required != v1::TOPOLOGY_LEVEL_UNSPECIFIED) {
      reason.mutable_change()->set_level_at_least(shortage.level_at_least);
    }
    if (code == v1::WAIT_CODE_DOMAINS_TOO_SMALL && shortage.slots > 0) {
      reason.mutable_change()->set_ranks_at_most(static_cast<int32_t>(shortage.slots));
    }
    return reason;
  }

  v1::WaitReason NeverFits(const WaitingJob& job, const SlotIndex::Kind& slots, int group) const {
    if (index_.empty()) return WithSlots(job, v1::WAIT_CODE_NO_WORKERS, slots, group);
    WaitingJob whole = job;
    whole.share = kWholeDevice;
    const bool upgrades_help =
        job.share < kWholeDevice && !slots.undivided.empty() && CouldFit(whole, index_);
    const auto name_older = [&](v1::WaitReason& reason) {
      if (upgrades_help) AddUndivided(job, *reason.mutable_change());
    };
    if (const int64_t total = TotalFor(job, slots); total < job.ranks) {
      v1::WaitReason reason = WithSlots(job, v1::WAIT_CODE_CLUSTER_TOO_SMALL, slots, group);
      reason.mutable_change()->set_slots_added(job.ranks - total);
      if (total > 0) reason.mutable_change()->set_ranks_at_most(static_cast<int32_t>(total));
      name_older(reason);
      return reason;
    }
    if (const auto shortage = FindDomainShortage(job, index_, /*ever=*/true)) {
      v1::WaitReason reason =
          OutsideDomains(job, v1::WAIT_CODE_DOMAINS_TOO_SMALL, slots, group, *shortage);
      name_older(reason);
      return reason;
    }
    v1::WaitReason reason = WithSlots(job, v1::WAIT_CODE_GROUPS_TOO_LARGE, slots, group);
    reason.mutable_change()->set_worker_with_slots(group);
    reason.mutable_change()->set_tensor_lowered(true);
    name_older(reason);
    return reason;
  }

  // On these workers, of which so many slots are free, there are slots enough for so many ranks
  // once these jobs have ended only with some that jobs in front get first.
  template <typename On>
  bool ReservedMeanwhile(const WaitingJob& job, int64_t slots, int64_t ranks,
                         const v1::StartChange& change, On on) const {
    if (reserved_.empty()) return false;
    std::set<const Holding*> ends;
    for (const v1::JobSlots& one : change.jobs_end()) {
      ends.insert(index_.HolderOf(JobId(one.job_id())));
    }
    for (const v1::JobSlots& one : change.jobs_end()) slots += one.slots();
    const absl::Time level = LevelOf(now_ + job.runtime);
    for (const ReservedSlot& reserved : reserved_) {
      const SlotView& slot = *reserved.slot.slot;
      if (reserved.until > level || slot.kind != job.device || !on(*reserved.slot.worker)) continue;
      if (slot.HasRoom(job.share) || (slot.holder != nullptr && ends.contains(slot.holder)))
        --slots;
    }
    return slots < ranks;
  }

  // What ends so that slots enough for the job are free. Requires: they are not.
  v1::StartChange CheapestEnd(const WaitingJob& job, const SlotIndex::Kind& slots) {
    if (job.share < kWholeDevice && !slots.undivided.empty()) {
      int64_t missing = job.ranks - FreeFor(job);
      for (const WorkerView* worker : slots.undivided) {
        missing -= FreeSlots(*worker, SlotsFor{job.device});
      }
      if (missing <= 0) {
        v1::StartChange change;
        AddUndivided(job, change);
        return change;
      }
    }
    return slots.shared > 0 ? CheapestChangeOfShares(job)
                            : CheapestChange(job.ranks - FreeFor(job), job.device);
  }

  v1::WaitReason NotNow(const WaitingJob& job) {
    const SlotIndex::Kind& slots = index_.Of(job.device);
    const int group = UnitOf(job, slots);
    if (FitsWithSpares(job)) {
      v1::WaitReason reason = WithSlots(job, v1::WAIT_CODE_SPARES, slots, group);
      if (FreeFor(job) < job.ranks) *reason.mutable_change() = CheapestEnd(job, slots);
      return reason;
    }
    if (FreeFor(job) < job.ranks) {
      v1::WaitReason reason = WithSlots(job, v1::WAIT_CODE_SLOTS_TAKEN, slots, group);
      *reason.mutable_change() = CheapestEnd(job, slots);
      const auto anywhere = [](const WorkerView&) { return true; };
      if (ReservedMeanwhile(job, FreeFor(job), job.ranks, reason.change(), anywhere)) {
        SetFirst(job, reason);
      }
      return reason;
    }
    if (const auto shortage = FindDomainShortage(job, index_, /*ever=*/false)) {
      v1::WaitReason reason =
          OutsideDomains(job, v1::WAIT_CODE_DOMAINS_FULL, slots, group, *shortage);
      const auto opens = [&](const WorkerView& worker) {
        return OpensOn(index_, *shortage, worker);
      };
      int64_t free = 0;
      for (const auto& [id, worker] : index_.workers()) {
        if (opens(worker)) free += FreeSlots(worker, SlotsWantedBy(job));
      }
      if (!shortage->jobs.empty() &&
          ReservedMeanwhile(job, free, shortage->segment, reason.change(), opens)) {
        SetFirst(job, reason);
      }
      return reason;
    }
    v1::WaitReason reason = WithSlots(job, v1::WAIT_CODE_SLOTS_SCATTERED, slots, group);
    std::map<const WorkerView*, int, ByName> named;
    const auto& by_free = index_.RoomOf(SlotsWantedBy(job)).workers_by_free;
    for (auto alike = by_free.rbegin(); alike != by_free.rend(); ++alike) {
      for (auto worker = alike->second.begin();
           worker != alike->second.end() && named.size() < kWorkersNamedMax; ++worker) {
        named.emplace(*worker, alike->first);
      }
    }
    for (const auto& [worker, free] : named) {
      v1::WorkerSlots& slots_of = *reason.add_free();
      slots_of.set_worker(worker->id.value());
      slots_of.set_slots(free);
    }
    return reason;
  }

  // The jobs that hold slots, most slots first, then by id. Holders stay where they are while there
  // is a trial.
  using Holders = std::vector<std::pair<int64_t, const JobId*>>;

  Holders LargestHolders(v1::DeviceKind kind) const {
    // Numbers are sorted much faster than pairs.
    std::vector<std::pair<uint64_t, const JobId*>> found;
    for (const auto& [job, holder] : index_.holders()) {
      const int64_t slots = holder.slots[static_cast<size_t>(kind)];
      if (slots > 0 && !kept_.contains(job) && IsJob(job)) {
        found.emplace_back(slots, &job);
      }
    }
    // Holders are in order of ids.
    std::vector<uint64_t> order;
    order.reserve(found.size());
    for (size_t i = 0; i < found.size(); ++i) {
      order.push_back(((~found[i].first & 0xffffffff) << 32) | i);
    }
    std::sort(order.begin(), order.end());
    Holders jobs;
    jobs.reserve(order.size());
    for (const uint64_t at : order) {
      const auto& [slots, job] = found[at & 0xffffffff];
      jobs.emplace_back(static_cast<int64_t>(slots), job);
    }
    return jobs;
  }
  // The job has got slots.
  void AddHolder(const WaitingJob& job) {
    const auto cached = largest_holders_.find(job.device);
    const Holding* holder = index_.HolderOf(job.id);
    if (cached == largest_holders_.end() || holder == nullptr) return;
    const std::pair<int64_t, const JobId*> entry(holder->slots[static_cast<size_t>(job.device)],
                                                 &holder->id);
    Holders& jobs = cached->second;
    jobs.insert(std::upper_bound(jobs.begin(), jobs.end(), entry,
                                 [](const auto& a, const auto& b) {
                                   return a.first != b.first ? a.first > b.first
                                                             : *a.second < *b.second;
                                 }),
                entry);
  }

  // What frees `missing` slots: the end of few jobs, namely of the smallest one that suffices, else
  // of the largest ones; where these do not hold as many, of those that slots are kept for and that
  // start first. Workers that are away are named last, since nobody knows when they return.
  v1::StartChange CheapestChange(int64_t missing, v1::DeviceKind kind) {
    const auto [cached, first] = largest_holders_.try_emplace(kind);
    Holders& jobs = cached->second;
    if (first) jobs = LargestHolders(kind);
    v1::StartChange change;
    auto take = jobs.begin();
    while (missing > 0 && take != jobs.end()) {
      if (take->first >= missing) {
        // The last one, and of those with as few slots the last by id.
        take = std::prev(std::partition_point(
            take, jobs.end(), [missing](const auto& job) { return job.first >= missing; }));
      }
      v1::JobSlots& ends = *change.add_jobs_end();
      ends.set_job_id(take->second->value());
      ends.set_job_name(NameOf(*take->second));
      ends.set_slots(take->first);
      missing -= take->first;
      ++take;
    }
    if (missing > 0) AddKept(missing, kind, change);
    if (missing > 0) AddOtherThanEnds(kind, change);
    return change;
  }
  void AddKept(int64_t& missing, v1::DeviceKind kind, v1::StartChange& change) const {
    for (auto kept = kept_.begin(); kept != kept_.end() && missing > 0; ++kept) {
      const Holding* holder = index_.HolderOf(kept->first);
      const int64_t slots = holder == nullptr ? 0 : holder->slots[static_cast<size_t>(kind)];
      if (slots == 0) continue;
      v1::JobSlots& ends = *change.add_jobs_end();
      ends.set_job_id(kept->first.value());
      ends.set_job_name(NameOf(kept->first));
      ends.set_slots(slots);
      missing -= slots;
    }
  }
  void AddOtherThanEnds(v1::DeviceKind kind, v1::StartChange& change) const {
    const SlotIndex::Kind& slots = index_.Of(kind);
    if (slots.away_slots > 0) AddAway(kind, change);
    // What operators reserve is told beside the change.
    if (change.jobs_end().empty() && change.workers_return().empty() && slots.reserved == 0) {
      change.set_slots_released(true);
    }
  }

  // The same where devices are shared, so that the end of a job makes room only where those that
  // stay leave enough: the smallest job whose end suffices, else few whose ends do together, of the
  // kEndsTriedMax that hold most.
  v1::StartChange CheapestChangeOfShares(const WaitingJob& job) {
    std::vector<std::pair<int64_t, JobId>> jobs;
    for (const auto& [id, holder] : index_.holders()) {
      const int64_t slots = holder.slots[static_cast<size_t>(job.device)];
      if (slots > 0 && !kept_.contains(id) && IsJob(id)) jobs.emplace_back(-slots, id);
    }
    std::sort(jobs.begin(), jobs.end());
    jobs.resize(std::min(jobs.size(), kEndsTriedMax));
    const auto suffice = [&](const std::vector<std::pair<int64_t, JobId>>& ends) {
      SlotIndex::Trial trial(attempted_.index);
      for (const auto& [slots, id] : ends) trial.Release(id);
      return FreeFor(job) >= job.ranks;
    };
    std::vector<std::pair<int64_t, JobId>> ends;
    for (auto one = jobs.rbegin(); one != jobs.rend() && ends.empty(); ++one) {
      if (suffice({*one})) ends = {*one};
    }
    if (ends.empty() && suffice(jobs)) {
      ends = jobs;
      for (auto one = jobs.rbegin(); one != jobs.rend(); ++one) {
        std::vector<std::pair<int64_t, JobId>> fewer = ends;
        fewer.erase(std::find(fewer.begin(), fewer.end(), *one));
        if (suffice(fewer)) ends = std::move(fewer);
      }
    }
    v1::StartChange change;
    for (const auto& [slots, id] : ends) {
      v1::JobSlots& end = *change.add_jobs_end();
      end.set_job_id(id.value());
      end.set_job_name(NameOf(id));
      end.set_slots(-slots);
    }
    if (ends.empty()) {
      int64_t missing = job.ranks - FreeFor(job);
      AddKept(missing, job.device, change);
      if (missing > 0) AddOtherThanEnds(job.device, change);
    }
    return change;
  }

  std::string NameOf(const JobId& job) const {
    if (const RunningJob* running = running_.Find(job); running != nullptr) return running->name;
    const auto placed = names_.find(job);
    return placed == names_.end() ? job.value() : placed->second;
  }

  void AddAway(v1::DeviceKind kind, v1::StartChange& change) const {
    const WorkerSet& away = index_.Of(kind).away;
    for (auto at = away.begin();
         at != away.end() && change.workers_return_size() < kWorkersNamedMax; ++at) {
      const WorkerView& worker = **at;
      v1::AwayWorker& named = *change.add_workers_return();
      named.set_worker(worker.id.value());
      named.set_slots(TotalSlots(worker, kind));
      named.set_reason(worker.away);
      named.set_ends_attempt(worker.ends_attempt);
    }
    change.set_workers_return_unnamed(static_cast<int64_t>(away.size()) -
                                      change.workers_return_size());
  }

  // Ready workers whose devices the job would take parts of if their daemons could share them.
  void AddUndivided(const WaitingJob& job, v1::StartChange& change) const {
    const WorkerSet& undivided = index_.Of(job.device).undivided;
    for (auto at = undivided.begin();
         at != undivided.end() && change.workers_return_size() < kWorkersNamedMax; ++at) {
      v1::AwayWorker& named = *change.add_workers_return();
      named.set_worker((*at)->id.value());
      named.set_slots(TotalSlots(**at, job.device));
    }
    change.set_workers_return_unnamed(static_cast<int64_t>(undivided.size()) -
                                      change.workers_return_size());
  }

  Attempted& attempted_;
  const SlotIndex& index_;
  SlotIndex::Trial& trial_;
  const Snapshot& cluster_;
  const QueueTree& tree_;
  const RunningJobs& running_;
  const SchedulePolicy& policy_;
  const absl::Time now_;
  const Scope scope_;
  // By kind.
  std::map<v1::DeviceKind, Holders> largest_holders_;
  // Of jobs that this plan starts, and of those that slots are kept for.
  std::map<JobId, std::string> names_;
  std::vector<Line> lines_;
  std::vector<Reservation> reservations_;
  // Of all that decides it.
  struct CouldFitOf {
    int32_t ranks, group, share;
    v1::DeviceKind device;
    PlacementRule placement;
    bool fits;
  };
  std::vector<CouldFitOf> could_fit_;
  // Until slots change hands, or others are reserved.
  struct FreeWhenHeld {
    absl::Time level;
    v1::DeviceKind kind;
    int64_t free;
  };
  std::vector<FreeWhenHeld> free_at_;
  struct ReservedSlot {
    SlotIndex::SlotRef slot;  // in the index, whose workers stay while a plan is made
    absl::Time until;         // it is not to be taken for longer
    int32_t share;            // thousandths of it
  };
  std::vector<ReservedSlot> reserved_;  // by worker, then in device order
  // Shapes that do not fit beside the reserved slots that are held at this level, nor at any later
  // one, until slots change hands.
  struct ByShape {
    bool operator()(const GangShape* a, const GangShape* b) const { return *a < *b; }
  };
  std::map<const GangShape*, absl::Time, ByShape> misfits_;
  absl::Time held_until_ = absl::InfinitePast();  // those up to this time are held, if free
  int64_t reserved_held_ = 0;                     // so many
  int64_t spares_missing_ = 0;                    // in all domains together
  bool spares_wait_ = false;  // slots change hands that are none, in several steps
  std::vector<PerDevice<int64_t>> spares_wanted_;        // by domain; empty: not looked up yet
  std::set<std::pair<absl::Time, JobId>> started_ends_;  // of the jobs that this plan starts
  KeptSlots kept_;
  QueueUse use_;                // with the jobs that start and those that slots are kept for
  std::vector<double> shares_;  // by queue
  std::vector<Line*> first_;    // by queue + 1; of those that are not stale
  std::vector<Line*> line_of_;  // by queue; null: nobody waits there
  std::vector<int> stale_;      // queues above which first_ is to be found anew
  std::vector<std::vector<int>> matches_;  // by queue + 1: of the queues below it
  std::vector<size_t> place_;              // by queue: among those below its parent
  std::vector<Entrant> entrants_;          // by queue
  std::set<JobId> stopped_;                // jobs that this plan stops
  PerDevice<bool> wanted_ = {};            // that jobs wait for which could start
  std::set<JobId> settled_;  // jobs for which slots are kept, or that had some and start
  Schedule schedule_;
};

// When `job` starts if nothing but ends of running jobs and of back-offs happens; InfiniteFuture
// when that is not known.
absl::Time EstimateStart(const Snapshot& cluster, WaitingQueue queue, const SchedulePolicy& policy,
                         absl::Time now, const JobId& job) {
  Attempted attempted(cluster.slots);
  std::set<std::pair<absl::Time, JobId>> ends;
  // What they use of their queues ends with them.
  struct Use {
    int queue;
    v1::DeviceKind device;
    int64_t ranks;
    std::string tenant;
    int32_t share;
  };
  std::map<JobId, Use> uses;
  QueueUse use = cluster.use;
  for (const auto& [id, running] : cluster.running.all()) {
    const absl::Time end = running.stopping ? now + kStopExpected : running.ends_at;
    uses.emplace(id, Use{cluster.tree.Find(running.queue), running.device, running.ranks,
                         running.tenant, running.share});
    if (end != absl::InfiniteFuture()) ends.emplace(std::max(now, end), id);
  }
  const auto end_at = [&ends](const JobId& id, absl::Time at) {
    std::erase_if(ends, [&id](const auto& end) { return end.second == id; });
    ends.emplace(at, id);
  };
  const Snapshot ahead{cluster.slots, cluster.running, cluster.kept, cluster.tree,
                       use,           cluster.history};
  for (int step = 0; step < kForecastStepsMax; ++step) {
    // Who is stopped later depends on more than is known here.
    const Schedule next = Planner(attempted, ahead, policy, now,
                                  {.behind = policy.explained_behind,
                                   .explains = false,
                                   .preempts = step == 0,
                                   .ends = &ends})
                              .Run(queue);
    for (const Decision& decision : next.decisions) {
      if (const auto* preempt = std::get_if<Preempt>(&decision)) {
        if (preempt->job == job) return now + kStopExpected;
        for (const JobId& id : preempt->eviction.stopped) end_at(id, now + kStopExpected);
      }
      const auto* start = std::get_if<Start>(&decision);
      if (start == nullptr) continue;
      if (start->job == job) return now;
      const WaitingJob& started = *queue.Find(start->job);
      if (started.runtime != absl::InfiniteDuration()) {
        ends.emplace(now + started.runtime, started.id);
      }
      const Use used{cluster.tree.Find(started.queue), started.device,
                     static_cast<int64_t>(start->placements.size()), started.tenant, started.share};
      uses.insert_or_assign(started.id, used);
      use.Count(cluster.tree, used.queue, used.device, used.ranks, used.tenant, 1, used.share);
      queue.Remove(start->job);
    }
    now = std::min(next.wake_at, ends.empty() ? absl::InfiniteFuture() : ends.begin()->first);
    if (now == absl::InfiniteFuture()) break;
    while (!ends.empty() && ends.begin()->first <= now) {
      const JobId& ended = ends.begin()->second;
      attempted.trial.Release(ended);
      if (const auto used = uses.find(ended); used != uses.end()) {
        use.Count(cluster.tree, used->second.queue, used->second.device, used->second.ranks,
                  used->second.tenant, -1, used->second.share);
        uses.erase(used);
      }
      ends.erase(ends.begin());
    }
  }
  return absl::InfiniteFuture();
}

}  // namespace

double ShareOf(const Snapshot& cluster, const QueueUse& use, int queue, absl::Time now) {
  double share = 0;
  for (const v1::DeviceKind kind : {v1::DEVICE_KIND_CPU, v1::DEVICE_KIND_CUDA}) {
    const int64_t total = cluster.slots.Of(kind).total;
    if (total == 0) continue;
    const int64_t thousandths = use.at(queue).thousandths[static_cast<size_t>(kind)];
    const double used = static_cast<double>(thousandths) / kWholeDevice +
                        cluster.history.Average(cluster.tree, cluster.use, queue, kind, now);
    share = std::max(share, used / static_cast<double>(total));
  }
  return share / cluster.tree.at(queue).weight;
}

Schedule Plan(const Snapshot& cluster, const WaitingQueue& queue, const SchedulePolicy& policy,
              absl::Time now) {
  Attempted attempted(cluster.slots);
  return Planner(attempted, cluster, policy, now, {.behind = policy.explained_behind}).Run(queue);
}

Forecast Explain(const Snapshot& cluster, const WaitingQueue& queue, const SchedulePolicy& policy,
                 absl::Time now, const JobId& job) {
  const WaitingJob* waiting = queue.Find(job);
  CHECK(waiting != nullptr) << job << " does not wait";
  Forecast forecast;
  {
    Attempted attempted(cluster.slots);
    Schedule plan = Planner(attempted, cluster, policy, now,
                            {.behind = std::numeric_limits<int>::max(), .only = &job})
                        .Run(queue);
    const Reserve* set_aside = nullptr;
    for (Decision& decision : plan.decisions) {
      const Reserve* reserve = std::get_if<Reserve>(&decision);
      if (reserve != nullptr && reserve->job == job) set_aside = reserve;
      Start* start = std::get_if<Start>(&decision);
      if (start == nullptr || start->job != job) continue;
      forecast.start = std::move(*start);
      return forecast;
    }
    CHECK(!plan.explanations.empty()) << job;
    forecast.reason = plan.explanations.back().reason();
    if (set_aside != nullptr) *forecast.reason.mutable_set_aside() = AsMessage(*set_aside);
  }
  forecast.reason.set_ahead(queue.CountBefore(*waiting));
  const absl::Time start = EstimateStart(cluster, queue, policy, now, job);
  if (start != absl::InfiniteFuture()) {
    *forecast.reason.mutable_estimated_start() = ToProto(start);
  }
  return forecast;
}

v1::SetAside AsMessage(const Reserve& reserve) {
  v1::SetAside out;
  for (const Slot& slot : reserve.slots) {
    if (out.workers().empty() || out.workers().rbegin()->worker() != slot.worker.value()) {
      out.add_workers()->set_worker(slot.worker.value());
    }
    v1::WorkerSlots& worker = *out.mutable_workers()->rbegin();
    worker.set_slots(worker.slots() + 1);
  }
  out.set_slots(static_cast<int64_t>(reserve.slots.size()));
  *out.mutable_starts_at() = ToProto(reserve.starts_at);
  return out;
}

v1::WaitReason Explanation::reason() const {
  v1::WaitReason reason = *reason_;
  if (asks_.has_value()) {
    reason.set_ranks(asks_->ranks);
    reason.set_group(asks_->group);
    reason.set_device(asks_->device);
    if (asks_->share < kWholeDevice) {
      reason.set_share(static_cast<double>(asks_->share) / kWholeDevice);
    }
  }
  return reason;
}

bool PlanningHorizon::Excludes(const WaitingJob& job) const {
  const auto queue = queues.find(job.queue);
  if (queue != queues.end() && queue->second < job.order()) return true;
  const auto shape = shapes.find({job.queue, job.shape()});
  return shape != shapes.end() && shape->second < job.order();
}

v1::WaitReason BehindMany(const WaitingJob& job, const SchedulePolicy& policy) {
  v1::WaitReason reason = ReasonOf(job, v1::WAIT_CODE_BEHIND_MANY);
  reason.set_behind_more_than(policy.explained_behind);
  return reason;
}

}  // namespace muster::coordinator
