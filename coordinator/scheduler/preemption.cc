#include "coordinator/scheduler/preemption.h"

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "coordinator/scheduler/placement.h"

namespace muster::coordinator {
namespace {

struct Candidate {
  JobId id;
  bool waits = false;  // slots are kept for it
  double cost = 0;     // device-seconds
  int32_t priority = 0;
  int queue = QueueTree::kNone;
  int64_t ranks = 0;
  std::string tenant = {};
  // Of the jobs of another queue: that queue or one above it, which must use more than is
  // guaranteed to it. kNone: it is of the same queue.
  int borrows = QueueTree::kNone;
  std::shared_ptr<const Elasticity> elastic = nullptr;  // it may shrink
  int32_t share = kWholeDevice;                         // thousandths of each of its devices
  // What the search leaves to it now, and before it is stopped: all its ranks, or fewer.
  int64_t keeps = 0;
  int64_t base = 0;
};

// An order that does not depend on addresses.
struct ById {
  bool operator()(const Candidate* a, const Candidate* b) const { return a->id < b->id; }
};

// Slots taken from their holders for a while; all are given back when it is destroyed.
class Taken {
 public:
  explicit Taken(SlotIndex& index) : index_(index) {}
  ~Taken() {
    std::vector<HeldSlot> slots;
    for (const auto& [slot, holder] : before_) slots.push_back({slot.worker, slot.device, holder});
    index_.SetHolders(slots);
    for (const auto& [of, share] : parts_before_) {
      index_.SetShare(of.first.worker, of.first.device, of.second, share);
    }
  }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  // Of a slot that one job holds as a whole.
  void Change(const Slot& slot, const JobId& before, const JobId& holder) {
    before_.emplace(slot, before);
    index_.SetHolder(slot.worker, slot.device, holder);
  }
  // What the job takes of the slot becomes free.
  void Release(const Slot& slot, const JobId& job, int32_t share) {
    parts_before_.emplace(std::make_pair(slot, job), share);
    index_.SetShare(slot.worker, slot.device, job, 0);
  }
  struct Held {
    Slot slot;
    int32_t share;
    bool alone;  // nobody else takes a part of it
  };
  // The slots of the job.
  std::vector<Held> SlotsOf(const JobId& job) const {
    std::vector<Held> slots;
    const Holding* holder = index_.HolderOf(job);
    if (holder == nullptr) return slots;
    for (const WorkerView* worker : holder->workers) {
      for (const SlotView& slot : worker->slots) {
        if (!slot.TakenBy(holder)) continue;
        slots.push_back({{worker->id, slot.device},
                         slot.ShareOf(job),
                         slot.holder == holder && slot.parts.empty()});
      }
    }
    return slots;
  }
  void Free(const JobId& job) {
    std::vector<Held>& slots = of_[job];
    slots = SlotsOf(job);
    for (const Held& held : slots) {
      held.alone ? void(before_.emplace(held.slot, job))
                 : void(parts_before_.emplace(std::make_pair(held.slot, job), held.share));
    }
    SetAll(slots, job, /*back=*/false);
  }
  // Of a job that was freed, the workers on which it had slots.
  std::set<WorkerId> WorkersOf(const JobId& job) const {
    std::set<WorkerId> workers = index_.WorkersOf(job);
    const auto freed = of_.find(job);
    if (freed == of_.end()) return workers;
    for (const Held& held : freed->second) workers.insert(held.slot.worker);
    return workers;
  }
  // Undoes Free.
  void Return(const JobId& job) { SetAll(of_[job], job, /*back=*/true); }

 private:
  void SetAll(const std::vector<Held>& slots, const JobId& job, bool back) {
    std::vector<HeldSlot> changes;
    changes.reserve(slots.size());
    for (const Held& held : slots) {
      changes.push_back({held.slot.worker, held.slot.device, back ? job : JobId()});
      if (!held.alone) changes.back().part = DevicePart{job, back ? held.share : 0};
    }
    index_.SetHolders(changes);
  }

  SlotIndex& index_;
  std::map<Slot, JobId> before_;                            // who held all of it
  std::map<std::pair<Slot, JobId>, int32_t> parts_before_;  // what a job took of it
  std::map<JobId, std::vector<Held>> of_;
};

class Search {
 public:
  Search(const EvictionSearch& search, const WaitingJob& job)
      : search_(search), job_(job), queue_(search.tree.Find(job.queue)), taken_(search.slots) {}

  std::optional<Eviction> Run(absl::Time& retry_at) {
    const int64_t gained = FindCandidates(retry_at);
    if (candidates_.empty() || gained < job_.ranks || !GroupsMayFit()) return std::nullopt;
    use_.emplace(search_.use);
    for (const auto& [id, kept] : search_.kept) {
      if (id == job_.id) continue;
      if (kept.share < kWholeDevice) continue;  // what is kept of a device counts already
      for (const Slot& slot : kept.slots) kept_for_.emplace(slot, id);
    }
    for (Candidate& candidate : candidates_) candidate.keeps = candidate.base = candidate.ranks;
    FreeWhatIsReleased();
    if (Fits()) return std::nullopt;
    const std::optional<std::vector<Site>> sites = SitesThatHold();
    if (!sites.has_value()) return std::nullopt;
    Shrink();
    std::optional<Choice> best;
    if (Fits()) {
      best.emplace();  // nobody has to be stopped
    } else {
      TakeBetter(Choose(Cheapest(), 0), best);
      TakeBetter(Choose(ByWorker(), 0), best);
      for (const Site& site : *sites) {
        if (best.has_value() && site.cost_at_least > best->cost) break;
        TakeBetter(Choose(site.order, site.tried_from), best);
      }
    }
    if (!best.has_value()) return std::nullopt;
    for (Candidate* victim : best->victims) Leave(*victim, 0);
    Unshrink();
    return Result(*best);
  }

 private:
  struct Choice {
    std::vector<Candidate*> victims;
    double cost = 0;
  };
  // A domain or worker that holds the gang if its jobs are stopped.
  struct Site {
    std::vector<Candidate*> order;  // those in it
    size_t tried_from = 0;          // the first so many of them have too few slots
    double cost_at_least = 0;       // of any of them whose slots suffice
  };

  // Returns an upper bound of the slots that the job can get.
  int64_t FindCandidates(absl::Time& retry_at) {
    int64_t slots = search_.slots.RoomOf(SlotsWantedBy(job_)).free;
    for (const auto& [id, kept] : search_.kept) {
      if (kept.device != job_.device) continue;
      if (id == job_.id) {
        slots += static_cast<int64_t>(kept.slots.size());
      } else if (kept.queue == job_.queue && kept.priority < job_.priority) {
        candidates_.push_back({.id = id,
                               .waits = true,
                               .priority = kept.priority,
                               .queue = queue_,
                               .ranks = static_cast<int64_t>(kept.slots.size()),
                               .tenant = kept.tenant,
                               .share = kept.share});
        slots += static_cast<int64_t>(kept.slots.size());
      }
    }
    slots += search_.running.Stopping(job_.device).ranks;
    // Of each queue: the jobs below a priority, and which queue they borrow in.
    struct Source {
      const RunningJobs::ByPriority& jobs;
      int queue;
      int borrows;
    };
    std::vector<Source> sources = {
        {search_.running.Of(job_.device, job_.queue), queue_, QueueTree::kNone}};
    const int others = MayReclaim() ? QueueCount() : 0;
    for (int other = 0; other < others; ++other) {
      const QueueTree::Queue& queue = search_.tree.at(other);
      if (other == queue_ || !queue.leaf) continue;
      const int borrows = ReclaimsFrom(other);
      if (borrows == QueueTree::kNone) continue;
      sources.push_back({search_.running.Of(job_.device, queue.name), other, borrows});
    }
    const auto each = [&](auto visit) {
      for (const Source& source : sources) {
        for (const auto& [priority, peers] : source.jobs) {
          if (source.borrows == QueueTree::kNone && priority >= job_.priority) break;
          visit(source, priority, peers);
        }
      }
    };
    each([&](const Source&, int32_t, const RunningJobs::Peers& peers) { slots += peers.ranks; });
    if (slots < job_.ranks) return slots;
    std::map<int, double> debts;  // by queue
    double most_debt = 0;
    each([&](const Source& source, int32_t priority, const RunningJobs::Peers& peers) {
      for (const JobId& id : peers.jobs) {
        if (search_.stopped.contains(id)) continue;
        const RunningJob& running = *search_.running.Find(id);
        const absl::Time from = running.started_at + running.min_runtime;
        if (search_.now < from) {
          retry_at = std::min(retry_at, from);
          slots -= running.ranks;
          continue;
        }
        const absl::Duration lost = std::max(absl::ZeroDuration(), search_.now - running.saved_at);
        candidates_.push_back({.id = id,
                               .cost = absl::ToDoubleSeconds(lost + kRestartCost) *
                                       (running.ranks * (running.share / double{kWholeDevice})),
                               .priority = priority,
                               .queue = source.queue,
                               .ranks = running.ranks,
                               .tenant = running.tenant,
                               .borrows = source.borrows,
                               .elastic = MayShrink(running) ? running.elastic : nullptr,
                               .share = running.share});
        if (source.queue == QueueTree::kNone || debts.contains(source.queue)) continue;
        const double debt =
            DebtOf(search_.tree, search_.use, search_.history, search_.past, source.queue,
                   job_.device, search_.slots.Of(job_.device).total, search_.now);
        debts.emplace(source.queue, debt);
        most_debt = std::max(most_debt, debt);
      }
    });
    for (Candidate& candidate : candidates_) {
      if (candidate.waits || most_debt == 0) continue;
      candidate.cost += absl::ToDoubleSeconds(kFairnessCost) * DevicesOf(candidate) *
                        (most_debt - debts[candidate.queue]);
    }
    return slots;
  }
  static double DevicesOf(const Candidate& candidate) {
    return static_cast<double>(candidate.ranks) * candidate.share / kWholeDevice;
  }

  // False: not even with the slots of all candidates, and those that are being released anyway, are
  // there workers that hold the whole tensor groups of the job. Far cheaper than to try.
  bool GroupsMayFit() const {
    const int unit = UnitOf(job_, search_.slots.Of(job_.device));
    if (unit == 1 || !job_.reservations.empty()) return true;
    const SlotsFor wanted = SlotsWantedBy(job_);
    int64_t slots_in_groups = 0;
    for (const auto& [free, workers] : search_.slots.RoomOf(wanted).workers_by_free) {
      slots_in_groups += int64_t{free - free % unit} * static_cast<int64_t>(workers.size());
    }
    std::map<const WorkerView*, int, ByName> more;  // slots that its free ones would be joined by
    const auto add = [&](const JobId& id) {
      const Holding* holder = search_.slots.HolderOf(id);
      if (holder == nullptr) return;
      for (const WorkerView* worker : holder->workers) {
        if (!worker->ready) continue;
        for (const SlotView& slot : worker->slots) {
          if (slot.kind == job_.device && slot.TakenBy(holder)) ++more[worker];
        }
      }
    };
    for (const Candidate& candidate : candidates_) add(candidate.id);
    for (const JobId& id : search_.running.Stopping(job_.device).jobs) add(id);
    for (const JobId& id : search_.stopped) add(id);
    add(job_.id);
    for (const auto& [worker, slots] : more) {
      const int free = FreeSlots(*worker, wanted);
      slots_in_groups += (free + slots) / unit * unit - free / unit * unit;
    }
    return slots_in_groups >= job_.ranks;
  }

  int QueueCount() const { return static_cast<int>(search_.tree.queues().size()); }

  // With so many thousandths of devices more.
  bool Borrows(int queue, int64_t more) const {
    const size_t kind = static_cast<size_t>(job_.device);
    const QueueUse& use = use_.has_value() ? *use_ : search_.use;
    return use.at(queue).thousandths[kind] + more >
           search_.tree.at(queue).guaranteed[kind] * kWholeDevice;
  }

  // With the job some part of its path uses no more than is guaranteed to it: else it gets nothing
  // back from any queue.
  bool MayReclaim() const {
    if (queue_ == QueueTree::kNone) return false;
    const std::vector<int>& path = search_.tree.Path(queue_);
    return std::any_of(path.begin(), path.end(), [this](int queue) {
      return !Borrows(queue, int64_t{job_.ranks} * job_.share);
    });
  }

  // Where the path of the other queue parts from that of the job's: the queue there, if what it
  // uses beyond its guaranteed devices is to be given back to this one. Else kNone.
  int ReclaimsFrom(int other) const {
    const std::vector<int>& mine = search_.tree.Path(queue_);
    const std::vector<int>& theirs = search_.tree.Path(other);
    size_t at = 0;
    while (at < mine.size() && at < theirs.size() && mine[at] == theirs[at]) ++at;
    if (at == mine.size() || at == theirs.size()) return QueueTree::kNone;
    const bool within = !Borrows(mine[at], int64_t{job_.ranks} * job_.share);
    return within && Borrows(theirs[at], 0) ? theirs[at] : QueueTree::kNone;
  }

  static bool MayShrink(const RunningJob& running) {
    return running.elastic != nullptr && !running.elastic->asked &&
           running.elastic->gang.sizes.front() < running.ranks;
  }

  // Leaves so many of its ranks to the candidate. With fewer than it has, and some, its slots are
  // free and Fits() places it anew.
  void Leave(Candidate& candidate, int64_t ranks) {
    if (candidate.keeps == ranks) return;
    if (candidate.keeps == candidate.ranks) taken_.Free(candidate.id);
    if (ranks == candidate.ranks) taken_.Return(candidate.id);
    Count(candidate, -1);
    candidate.keeps = ranks;
    Count(candidate, 1);
    if (ranks > 0 && ranks < candidate.ranks) {
      shrunk_.insert(&candidate);
    } else {
      shrunk_.erase(&candidate);
    }
  }
  void Count(const Candidate& candidate, int sign) {
    if (candidate.keeps == 0) return;
    use_->Count(search_.tree, candidate.queue, job_.device, candidate.keeps, candidate.tenant, sign,
                candidate.share);
  }

  // Every elastic candidate becomes as small as it can be, those of other queues while these
  // borrow.
  void Shrink() {
    for (Candidate* candidate : Cheapest()) {
      if (candidate->elastic == nullptr) continue;
      if (candidate->borrows != QueueTree::kNone && !Borrows(candidate->borrows, 0)) continue;
      Leave(*candidate, candidate->elastic->gang.sizes.front());
      candidate->base = candidate->keeps;
    }
  }

  // Gives back what is not needed: those whose restart costs most are left alone first.
  void Unshrink() {
    std::vector<Candidate*> order;
    for (Candidate* candidate : Cheapest()) {
      if (shrunk_.contains(candidate)) order.push_back(candidate);
    }
    std::sort(order.begin(), order.end(), [](const Candidate* a, const Candidate* b) {
      return std::make_tuple(-a->cost, a->id) < std::make_tuple(-b->cost, b->id);
    });
    for (Candidate* candidate : order) {
      const int64_t least = candidate->keeps;
      Leave(*candidate, candidate->ranks);
      if (Fits()) continue;
      const std::vector<int32_t>& sizes = candidate->elastic->gang.sizes;
      auto size = std::lower_bound(sizes.begin(), sizes.end(), candidate->ranks);
      while (size != sizes.begin() && *--size > least) {
        Leave(*candidate, *size);
        if (Fits()) break;
      }
      if (!Fits()) Leave(*candidate, least);
    }
  }

  // Slots of jobs that are being stopped, unless they are kept for another job.
  void FreeWhatIsReleased() {
    std::set<JobId> stopping = search_.running.Stopping(job_.device).jobs;
    stopping.insert(search_.stopped.begin(), search_.stopped.end());
    for (const JobId& id : stopping) {
      for (const Taken::Held& held : taken_.SlotsOf(id)) {
        const auto kept = kept_for_.find(held.slot);
        if (held.alone) {
          taken_.Change(held.slot, id, kept == kept_for_.end() ? JobId() : kept->second);
        } else {
          taken_.Release(held.slot, id, held.share);
        }
      }
      const RunningJob& running = *search_.running.Find(id);
      use_->Count(search_.tree, search_.tree.Find(running.queue), running.device, running.ranks,
                  running.tenant, -1, running.share);
    }
    taken_.Free(job_.id);
    const auto own = search_.kept.find(job_.id);
    if (own != search_.kept.end()) {
      use_->Count(search_.tree, queue_, job_.device, job_.ranks, job_.tenant, -1, job_.share);
    }
  }

  // The job and those that are shrunk.
  bool Fits() {
    int64_t wanted = job_.ranks;
    bool reserved = !job_.reservations.empty();
    for (const Candidate* candidate : shrunk_) {
      wanted += candidate->keeps;
      reserved |= !candidate->elastic->gang.reservations.empty();
    }
    // Those that shrink take whole devices.
    const bool whole = job_.share == kWholeDevice;
    const int64_t free = search_.slots.RoomOf(SlotsWantedBy(job_)).free;
    if (free < (whole ? wanted : job_.ranks) && !reserved) return false;
    if (queue_ != QueueTree::kNone &&
        FindLimit(search_.tree, *use_, queue_, job_.device, job_.ranks, job_.tenant, job_.share)
            .has_value()) {
      return false;
    }
    if (!shrunk_.empty()) return Place(nullptr, nullptr);
    SlotIndex::Trial trial(search_.slots);
    return FitsNow(trial, job_);
  }

  // Where they would be.
  bool Place(std::vector<Slot>* slots, std::vector<Resized>* resized) {
    SlotIndex::Trial trial(search_.slots);
    const auto place = [&trial](const WaitingJob& gang, std::vector<Slot>* out) {
      const auto placements = PlaceGang(trial, gang);
      for (size_t i = 0; out != nullptr && placements.has_value() && i < placements->size(); ++i) {
        out->push_back({WorkerId((*placements)[i].worker()), (*placements)[i].device()});
      }
      return placements.has_value();
    };
    if (!place(job_, slots)) return false;
    for (const Candidate* candidate : shrunk_) {
      const WaitingJob gang =
          AtSize(candidate->elastic->gang, static_cast<int32_t>(candidate->keeps));
      Resized* out =
          resized == nullptr ? nullptr : &resized->emplace_back(Resized{candidate->id, {}});
      if (!place(gang, out == nullptr ? nullptr : &out->slots)) return false;
    }
    return true;
  }

  // It goes into one domain as a whole.
  bool RequiresOne() const {
    const PlacementRule& rule = job_.placement;
    return rule.required != v1::TOPOLOGY_LEVEL_UNSPECIFIED &&
           rule.required != v1::TOPOLOGY_LEVEL_CLUSTER && rule.segment == 0;
  }
  // A slot that is free, or would be if the jobs on it were stopped, is one that the job may take.
  bool MayTake(const SlotView& slot) const {
    return slot.kind == job_.device && slot.MayHold(job_.share) &&
           (slot.reserved.empty() ||
            std::count(job_.reservations.begin(), job_.reservations.end(), slot.reserved) > 0);
  }

  // Candidates' slots on one worker.
  struct Here {
    int64_t free = 0;  // slots beside them
    int64_t held = 0;
    std::vector<std::pair<Candidate*, int64_t>> candidates;
  };
  using HeldOn = std::map<const WorkerView*, Here, ByName>;

  HeldOn CandidatesOn() {
    HeldOn on;
    for (Candidate& candidate : candidates_) {
      const Holding* holder = search_.slots.HolderOf(candidate.id);
      if (holder == nullptr) continue;
      for (const WorkerView* worker : holder->workers) {
        if (!worker->ready) continue;
        int64_t slots = 0;
        for (const SlotView& slot : worker->slots) {
          slots += MayTake(slot) && slot.TakenBy(holder) ? 1 : 0;
        }
        if (slots == 0) continue;
        Here& here = on[worker];
        here.held += slots;
        here.candidates.emplace_back(&candidate, slots);
      }
    }
    for (auto& [worker, here] : on) here.free = FreeOn(*worker);
    return on;
  }
  int64_t FreeOn(const WorkerView& worker) const {
    const SlotsFor wanted = SlotsWantedBy(job_);
    if (job_.reservations.empty()) return FreeSlots(worker, wanted);
    return std::count_if(worker.slots.begin(), worker.slots.end(), [&](const SlotView& slot) {
      return worker.ready && MayTake(slot) && slot.room() >= job_.share;
    });
  }

  // The domains of one level, or workers, that hold the gang in whole tensor groups once no
  // candidate is left there: of the level that it requires, else of the narrowest that has some;
  // the cluster is none. At most kDomainsTriedMax that have candidates, those whose may cost least.
  // No value: no domain of the level that it requires holds it.
  std::optional<std::vector<Site>> SitesThatHold() {
    const HeldOn on = CandidatesOn();
    const int unit = UnitOf(job_, search_.slots.Of(job_.device));
    std::vector<Site> sites;
    bool any = RequiresOne() && AddSitesAt(job_.placement.required, on, unit, sites);
    // One that requires a rack fits on a worker that is in none too.
    const v1::TopologyLevel end =
        RequiresOne() ? job_.placement.required : v1::TOPOLOGY_LEVEL_CLUSTER;
    for (int level = v1::TOPOLOGY_LEVEL_HOST; level < end && !any; ++level) {
      any = AddSitesAt(static_cast<v1::TopologyLevel>(level), on, unit, sites);
    }
    // Of workers without candidates, slots that are reserved for the job are not looked for.
    if (RequiresOne() && !any && job_.reservations.empty()) return std::nullopt;
    std::stable_sort(sites.begin(), sites.end(), [](const Site& a, const Site& b) {
      return a.cost_at_least < b.cost_at_least;
    });
    if (sites.size() > kDomainsTriedMax) sites.resize(kDomainsTriedMax);
    return sites;
  }

  // Returns whether any domain of the level holds the gang, with candidates in it or without.
  bool AddSitesAt(v1::TopologyLevel level, const HeldOn& on, int unit, std::vector<Site>& sites) {
    const SlotsFor wanted = SlotsWantedBy(job_);
    const auto whole = [unit](int64_t slots) { return slots - slots % unit; };
    if (level == v1::TOPOLOGY_LEVEL_HOST) {
      bool any = false;
      for (const auto& [free, workers] : search_.slots.RoomOf(wanted).workers_by_free) {
        any |= whole(free) >= job_.ranks;
      }
      for (const auto& [worker, here] : on) {
        if (whole(here.free + here.held) < job_.ranks) continue;
        any = true;
        sites.push_back(MakeSite(here.candidates, job_.ranks - here.free));
      }
      return any;
    }
    struct Domain {
      int64_t free = 0;   // now
      int64_t whole = 0;  // in whole groups, once no candidate is left
      std::map<Candidate*, int64_t, ById> held;
    };
    std::map<int, Domain> domains;  // by number
    for (const auto& [path, number] : search_.slots.domains_of(level)) {
      Domain& domain = domains[number];
      for (const auto& [free, workers] : search_.slots.RoomIn(number, wanted).workers_by_free) {
        domain.free += int64_t{free} * workers;
        domain.whole += whole(free) * workers;
      }
    }
    const auto domain_of = [&](const WorkerView& worker) {
      int number = worker.home;
      while (number >= 0 && search_.slots.domain(number).level < level) {
        number = search_.slots.domain(number).parent;
      }
      return domains.find(number);
    };
    // Slots that are reserved for the job are no part of the sums.
    for (auto at = search_.slots.workers().begin();
         !job_.reservations.empty() && at != search_.slots.workers().end(); ++at) {
      const auto domain = domain_of(at->second);
      if (domain == domains.end()) continue;
      const int64_t free = FreeOn(at->second), counted = FreeSlots(at->second, wanted);
      domain->second.free += free - counted;
      domain->second.whole += whole(free) - whole(counted);
    }
    for (const auto& [worker, here] : on) {
      const auto domain = domain_of(*worker);
      if (domain == domains.end()) continue;
      domain->second.whole += whole(here.free + here.held) - whole(here.free);
      for (const auto& [candidate, slots] : here.candidates) {
        domain->second.held[candidate] += slots;
      }
    }
    bool any = false;
    for (const auto& [path, number] : search_.slots.domains_of(level)) {
      const Domain& domain = domains[number];
      if (domain.whole < job_.ranks) continue;
      any = true;
      if (domain.held.empty()) continue;
      sites.push_back(MakeSite({domain.held.begin(), domain.held.end()}, job_.ranks - domain.free));
    }
    return any;
  }

  // `missing`: slots that the candidates, with their slots there, are to leave.
  static Site MakeSite(std::vector<std::pair<Candidate*, int64_t>> held, int64_t missing) {
    std::sort(held.begin(), held.end(), [](const auto& a, const auto& b) {
      const auto key = [](const auto& of) {
        return std::make_tuple(of.first->cost / static_cast<double>(of.second), !of.first->waits,
                               of.first->priority);
      };
      return key(a) != key(b) ? key(a) < key(b) : a.first->id < b.first->id;
    });
    Site site;
    for (const auto& [candidate, slots] : held) {
      site.order.push_back(candidate);
      if (missing <= 0) continue;
      // Of the last one a part would be enough, so that no choice costs less.
      site.cost_at_least += candidate->cost * static_cast<double>(std::min(missing, slots)) /
                            static_cast<double>(slots);
      missing -= slots;
      if (missing > 0) ++site.tried_from;
    }
    return site;
  }

  std::vector<Candidate*> Cheapest() {
    std::vector<Candidate*> order;
    for (Candidate& candidate : candidates_) order.push_back(&candidate);
    std::sort(order.begin(), order.end(), [](const Candidate* a, const Candidate* b) {
      return std::make_tuple(!a->waits, a->cost, a->priority, a->id) <
             std::make_tuple(!b->waits, b->cost, b->priority, b->id);
    });
    return order;
  }

  // Those that share the cheapest worker first, so that slots beside each other become free.
  std::vector<Candidate*> ByWorker() {
    std::map<WorkerId, std::pair<double, std::vector<Candidate*>>> workers;
    for (Candidate* candidate : Cheapest()) {
      for (const WorkerId& id : taken_.WorkersOf(candidate->id)) {
        auto& [cost, here] = workers[id];
        cost += candidate->cost;
        here.push_back(candidate);
      }
    }
    std::vector<std::tuple<double, WorkerId>> ranking;
    for (const auto& [id, of] : workers) {
      ranking.emplace_back(of.first / TotalSlots(*search_.slots.Find(id), job_.device), id);
    }
    std::sort(ranking.begin(), ranking.end());
    std::vector<Candidate*> order;
    std::set<JobId> known;
    for (const auto& [cost, id] : ranking) {
      for (Candidate* candidate : workers[id].second) {
        if (known.insert(candidate->id).second) order.push_back(candidate);
      }
    }
    // A job that waits may have no slot yet.
    for (Candidate* candidate : Cheapest()) {
      if (known.insert(candidate->id).second) order.push_back(candidate);
    }
    return order;
  }

  // Candidates in this order until the gang fits, without those that it does not take. The first
  // `tried_from` of them are known not to be enough.
  std::optional<Choice> Choose(const std::vector<Candidate*>& order, size_t tried_from) {
    std::vector<Candidate*> freed;
    bool fits = false;
    for (size_t i = 0; i < order.size() && !fits; ++i) {
      Candidate* candidate = order[i];
      // What it borrows may have been taken back by now.
      if (candidate->borrows != QueueTree::kNone && !Borrows(candidate->borrows, 0)) continue;
      Leave(*candidate, 0);
      freed.push_back(candidate);
      fits = i >= tried_from && Fits();
    }
    std::optional<Choice> choice;
    if (fits) {
      choice.emplace();
      std::stable_sort(freed.begin(), freed.end(), [](const Candidate* a, const Candidate* b) {
        return std::make_pair(!a->waits, a->cost) > std::make_pair(!b->waits, b->cost);
      });
      for (Candidate* candidate : freed) {
        Leave(*candidate, candidate->base);
        if (Fits()) continue;
        Leave(*candidate, 0);
        choice->victims.push_back(candidate);
        choice->cost += candidate->cost;
      }
      freed = choice->victims;
    }
    for (Candidate* candidate : freed) Leave(*candidate, candidate->base);
    return choice;
  }

  // Of choices that cost as much the one with the better placement, and of those the first.
  void TakeBetter(std::optional<Choice> choice, std::optional<Choice>& best) {
    if (!choice.has_value() || (best.has_value() && choice->cost > best->cost)) return;
    if (best.has_value() && choice->cost == best->cost) {
      const auto same = [](std::vector<Candidate*> a, std::vector<Candidate*> b) {
        std::sort(a.begin(), a.end(), ById());
        std::sort(b.begin(), b.end(), ById());
        return a == b;
      };
      if (same(choice->victims, best->victims)) return;
      if (PlacementCostOf(*choice) >= PlacementCostOf(*best)) return;
    }
    best = std::move(choice);
  }
  double PlacementCostOf(const Choice& choice) {
    for (Candidate* victim : choice.victims) Leave(*victim, 0);
    double cost = 0;
    {
      SlotIndex::Trial trial(search_.slots);
      const auto placements = PlaceGang(trial, job_);
      CHECK(placements.has_value()) << job_.id;
      cost = CostOf(search_.slots, job_, *placements).total();
    }
    for (Candidate* victim : choice.victims) Leave(*victim, victim->base);
    return cost;
  }

  Eviction Result(const Choice& choice) {
    Eviction eviction;
    CHECK(Place(&eviction.slots, &eviction.resized)) << job_.id;
    std::sort(eviction.resized.begin(), eviction.resized.end(),
              [](const Resized& a, const Resized& b) { return a.job < b.job; });
    for (const Candidate* candidate : choice.victims) {
      (candidate->waits ? eviction.outbid : eviction.stopped).push_back(candidate->id);
    }
    std::sort(eviction.stopped.begin(), eviction.stopped.end());
    std::sort(eviction.outbid.begin(), eviction.outbid.end());
    return eviction;
  }

  const EvictionSearch& search_;
  const WaitingJob& job_;
  const int queue_;
  std::optional<QueueUse> use_;  // without the jobs that are freed; no value: as `search_.use`
  Taken taken_;
  std::vector<Candidate> candidates_;
  // In the order in which they are placed.
  std::set<const Candidate*, ById> shrunk_;
  std::map<Slot, JobId> kept_for_;
};

}  // namespace

std::optional<Eviction> ChooseVictims(const EvictionSearch& search, const WaitingJob& job,
                                      absl::Time& retry_at) {
  return Search(search, job).Run(retry_at);
}

bool StillKept(const EvictionSearch& search, const JobId& job, const Kept& kept) {
  for (const Slot& slot : kept.slots) {
    const WorkerView* worker = search.slots.Find(slot.worker);
    if (worker == nullptr) return false;
    const auto view = std::find_if(worker->slots.begin(), worker->slots.end(),
                                   [&](const SlotView& s) { return s.device == slot.device; });
    if (view == worker->slots.end() || !view->MayHold(kept.share)) return false;
    if (!view->held() || view->held_by == job) continue;
    int32_t left = kWholeDevice;
    for (const DevicePart& part : view->Holders()) {
      const RunningJob* holder = search.running.Find(part.job);
      const bool stops =
          holder != nullptr && (holder->stopping || search.stopped.contains(part.job));
      if (part.job != job && !stops) left -= part.share;
    }
    if (left < kept.share) return false;
  }
  return true;
}

}  // namespace muster::coordinator
