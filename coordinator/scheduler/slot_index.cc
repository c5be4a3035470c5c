#include "coordinator/scheduler/slot_index.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

namespace muster::coordinator {

int FreeSlots(const WorkerView& worker, v1::DeviceKind kind) {
  if (!worker.ready) return 0;
  return static_cast<int>(
      std::count_if(worker.slots.begin(), worker.slots.end(),
                    [kind](const SlotView& slot) { return slot.free() && slot.kind == kind; }));
}

int TotalSlots(const WorkerView& worker, v1::DeviceKind kind) {
  return static_cast<int>(
      std::count_if(worker.slots.begin(), worker.slots.end(),
                    [kind](const SlotView& slot) { return slot.kind == kind; }));
}

const std::string& SlotIndex::Domain::name() const {
  static const auto* const cluster = new std::string("cluster");
  return level == v1::TOPOLOGY_LEVEL_CLUSTER ? *cluster : path.name(level);
}

bool SlotIndex::SameDomains(const SlotIndex& a, const SlotIndex& b) {
  for (size_t level = 0; level < a.numbers_.size(); ++level) {
    if (a.numbers_[level].size() != b.numbers_[level].size()) return false;
    for (const auto& [path, number] : a.numbers_[level]) {
      const auto twin = b.numbers_[level].find(path);
      if (twin == b.numbers_[level].end()) return false;
      const Domain& one = a.domain(number);
      const Domain& other = b.domain(twin->second);
      if (one.workers != other.workers || one.slots != other.slots ||
          one.children.size() != other.children.size()) {
        return false;
      }
    }
  }
  return true;
}

bool SlotIndex::SameHolders(const SlotIndex& a, const SlotIndex& b) {
  const auto same_workers = [](const WorkerView* x, const WorkerView* y) { return x->id == y->id; };
  return std::equal(a.holders_.begin(), a.holders_.end(), b.holders_.begin(), b.holders_.end(),
                    [&](const auto& x, const auto& y) {
                      const Holding& one = x.second;
                      const Holding& other = y.second;
                      return x.first == y.first && one.slots == other.slots &&
                             std::equal(one.workers.begin(), one.workers.end(),
                                        other.workers.begin(), other.workers.end(), same_workers);
                    });
}

// Whatever else is there follows from the workers, and has addresses of its own.
SlotIndex::SlotIndex(const SlotIndex& other) {
  for (const auto& [id, worker] : other.workers_) Put(worker);
}
SlotIndex& SlotIndex::operator=(const SlotIndex& other) {
  if (this != &other) *this = SlotIndex(other);
  return *this;
}

void SlotIndex::Order(std::map<WorkerId, WorkerView>::iterator worker) {
  constexpr uint64_t kGap = uint64_t{1} << 32;
  const uint64_t before = worker == workers_.begin() ? 0 : std::prev(worker)->second.order;
  const auto next = std::next(worker);
  const uint64_t after = next == workers_.end() ? before + 2 * kGap : next->second.order;
  worker->second.order = before + (after - before) / 2;
  if (worker->second.order > before && worker->second.order < after &&
      after < std::numeric_limits<uint64_t>::max() - 4 * kGap) {
    return;
  }
  // Everybody keeps their place, so that sets stay in order.
  uint64_t order = 0;
  for (auto& [id, view] : workers_) view.order = order += kGap;
}

Holding& SlotIndex::HolderFor(const JobId& job) {
  const auto [known, added] = holders_.try_emplace(job);
  if (added) known->second.id = job;
  return known->second;
}

void SlotIndex::Left(Holding& holder) {
  if (!holder.workers.empty()) return;
  if (trials_ > 0) {
    emptied_.push_back(&holder);
  } else {
    holders_.erase(JobId(holder.id));
  }
}

void SlotIndex::ForgetEmptied() {
  std::vector<Holding*> emptied = std::exchange(emptied_, {});
  std::sort(emptied.begin(), emptied.end());
  emptied.erase(std::unique(emptied.begin(), emptied.end()), emptied.end());
  for (Holding* holder : emptied) Left(*holder);
}

int SlotIndex::Enter(const WorkerView& worker) {
  int at = kCluster;
  ++domains_[kCluster].workers;
  for (size_t depth = 0; depth < kDomainLevels.size(); ++depth) {
    if (worker.path.names[depth].empty()) continue;
    const v1::TopologyLevel level = kDomainLevels[depth];
    const DomainPath path = worker.path.Above(depth + 1);
    const auto [known, is_new] = numbers_[static_cast<size_t>(level)].try_emplace(path, -1);
    if (is_new) {
      if (unused_.empty()) {
        known->second = static_cast<int>(domains_.size());
        domains_.emplace_back();
      } else {
        known->second = unused_.back();
        unused_.pop_back();
      }
      Domain& fresh = domains_[static_cast<size_t>(known->second)];
      fresh.level = level;
      fresh.path = path;
      fresh.parent = at;
      domains_[static_cast<size_t>(at)].children.insert(known->second);
    }
    at = known->second;
    ++domains_[static_cast<size_t>(at)].workers;
  }
  return at;
}

void SlotIndex::Leave(int domain) {
  while (domain >= 0) {
    Domain& left = domains_[static_cast<size_t>(domain)];
    const int parent = left.parent;
    if (--left.workers == 0 && domain != kCluster) {
      domains_[static_cast<size_t>(parent)].children.erase(domain);
      numbers_[static_cast<size_t>(left.level)].erase(left.path);
      left = Domain();
      unused_.push_back(domain);
    }
    domain = parent;
  }
}

void SlotIndex::CountInDomains(const WorkerView& worker, v1::DeviceKind kind, int total, int free,
                               int sign) {
  for (int at = worker.home; at >= 0; at = domains_[static_cast<size_t>(at)].parent) {
    std::map<v1::DeviceKind, Domain::Slots>& kinds = domains_[static_cast<size_t>(at)].slots;
    const auto here = kinds.try_emplace(kind).first;
    Domain::Slots& slots = here->second;
    const auto add = [sign](std::map<int, int>& counts, int key) {
      const auto found = counts.try_emplace(key, 0).first;
      if ((found->second += sign) == 0) counts.erase(found);
    };
    add(slots.workers_by_total, total);
    if (free > 0) {
      add(slots.workers_by_free, free);
      if (at == worker.home) {
        const auto alike = slots.direct.try_emplace(free).first;
        sign > 0 ? void(alike->second.insert(&worker)) : void(alike->second.erase(&worker));
        if (alike->second.empty()) slots.direct.erase(alike);
      }
    }
    if (slots.workers_by_total.empty()) kinds.erase(here);
  }
}

namespace {

// Adds the worker to those of a holder, by name, or takes it away.
void NoteWorker(Holding& holder, const WorkerView& worker, int sign) {
  std::vector<const WorkerView*>& workers = holder.workers;
  const auto at = std::lower_bound(workers.begin(), workers.end(), &worker, ByName());
  if (sign > 0) {
    workers.insert(at, &worker);
  } else {
    workers.erase(at);
  }
}

}  // namespace

void SlotIndex::Count(WorkerView& worker, int sign) {
  struct Sums {
    int total = 0, free = 0, reserved = 0;
  };
  std::map<v1::DeviceKind, Sums> kinds;
  std::map<JobId, Holding*> holders;
  std::set<std::string> reservations;
  for (SlotView& slot : worker.slots) {
    Sums& sums = kinds[slot.kind];
    ++sums.total;
    if (worker.ready && slot.free()) ++sums.free;
    if (!slot.reserved.empty()) {
      reservations.insert(slot.reserved);
      if (worker.ready && slot.usable && !slot.held()) ++sums.reserved;
    }
    if (!slot.held()) {
      slot.holder = nullptr;
      continue;
    }
    if (sign > 0) slot.holder = &HolderFor(slot.held_by);
    holders.emplace(slot.held_by, slot.holder);
    if (worker.ready) slot.holder->slots[static_cast<size_t>(slot.kind)] += sign;
  }
  for (const auto& [id, holder] : holders) {
    NoteWorker(*holder, worker, sign);
    if (sign < 0) Left(*holder);
  }
  for (const std::string& reservation : reservations) {
    std::set<WorkerId>& workers = reserved_on_[reservation];
    sign > 0 ? void(workers.insert(worker.id)) : void(workers.erase(worker.id));
    if (workers.empty()) reserved_on_.erase(reservation);
  }
  if (worker.standing != v1::WORKER_STANDING_UNSPECIFIED) {
    sign > 0 ? void(marked_.insert(&worker)) : void(marked_.erase(&worker));
  }
  for (const auto& [of, sums] : kinds) {
    Kind& kind = kinds_[of];
    kind.total += sign * sums.total;
    if ((kind.workers_by_total[sums.total] += sign) == 0) kind.workers_by_total.erase(sums.total);
    kind.reserved += sign * sums.reserved;
    if (!worker.ready) {
      kind.away_slots += sign * sums.total;
      sign > 0 ? void(kind.away.insert(&worker)) : void(kind.away.erase(&worker));
    } else if (sums.free > 0) {
      kind.free += sign * sums.free;
      WorkerSet& workers = kind.workers_by_free[sums.free];
      sign > 0 ? void(workers.insert(&worker)) : void(workers.erase(&worker));
      if (workers.empty()) kind.workers_by_free.erase(sums.free);
    }
    CountInDomains(worker, of, sums.total, sums.free, sign);
    if (kind.total == 0) kinds_.erase(of);
  }
}

template <typename Change>
void SlotIndex::Update(const WorkerId& id, Change change) {
  const auto found = workers_.find(id);
  if (found == workers_.end()) return;
  Count(found->second, -1);
  change(found->second);
  Count(found->second, 1);
}

void SlotIndex::MoveFree(const WorkerView& worker, v1::DeviceKind of, int before, int now) {
  // The node of the tree goes along, so that nothing is allocated.
  const auto move = [&](std::map<int, WorkerSet>& workers_by) {
    WorkerSet::node_type node;
    if (before > 0) {
      const auto from = workers_by.find(before);
      node = from->second.extract(&worker);
      if (from->second.empty()) workers_by.erase(from);
    }
    if (now == 0) return;
    node.empty() ? void(workers_by[now].insert(&worker))
                 : void(workers_by[now].insert(std::move(node)));
  };
  Kind& kind = kinds_.find(of)->second;
  kind.free += now - before;
  move(kind.workers_by_free);
  for (int at = worker.home; at >= 0; at = domains_[static_cast<size_t>(at)].parent) {
    Domain::Slots& slots = domains_[static_cast<size_t>(at)].slots.find(of)->second;
    if (before > 0) {
      const auto from = slots.workers_by_free.find(before);
      if (--from->second == 0) slots.workers_by_free.erase(from);
    }
    if (now > 0) ++slots.workers_by_free[now];
    if (at == worker.home) move(slots.direct);
  }
}

void SlotIndex::Hold(WorkerView& worker, SlotView& slot, Holding* holder) {
  Holding* const before = slot.holder;
  if (before == holder) return;
  const auto holds = [&worker](const Holding* one) {
    return std::any_of(worker.slots.begin(), worker.slots.end(),
                       [one](const SlotView& other) { return other.holder == one; });
  };
  if (holder != nullptr && !holds(holder)) NoteWorker(*holder, worker, 1);
  slot.holder = holder;
  if (holder != nullptr) {
    slot.held_by = holder->id;
  } else {
    slot.held_by = JobId();
  }
  const size_t kind = static_cast<size_t>(slot.kind);
  if (worker.ready) {
    if (before != nullptr) --before->slots[kind];
    if (holder != nullptr) ++holder->slots[kind];
    if (!slot.reserved.empty() && slot.usable && (before == nullptr) != (holder == nullptr)) {
      kinds_.find(slot.kind)->second.reserved += holder == nullptr ? 1 : -1;
    }
  }
  if (before != nullptr && !holds(before)) {
    NoteWorker(*before, worker, -1);
    Left(*before);
  }
}

template <typename Change>
void SlotIndex::Reassign(WorkerView& worker, Change change) {
  using ByKind = std::array<int, v1::DeviceKind_ARRAYSIZE>;
  const auto free = [&worker] {
    ByKind slots = {};
    for (const SlotView& slot : worker.slots) {
      if (worker.ready && slot.free()) ++slots[static_cast<size_t>(slot.kind)];
    }
    return slots;
  };
  const ByKind before = free();
  change(worker);
  const ByKind now = free();
  for (size_t kind = 0; kind < now.size(); ++kind) {
    if (now[kind] == before[kind]) continue;
    MoveFree(worker, static_cast<v1::DeviceKind>(kind), before[kind], now[kind]);
  }
}

template <typename Iterator>
void SlotIndex::SetEach(Iterator begin, Iterator end) {
  if (trials_ == 0) ++version_;
  while (begin != end) {
    Iterator next = begin;
    while (next != end && next->worker == begin->worker) ++next;
    const auto found = workers_.find(begin->worker);
    if (found != workers_.end()) {
      Reassign(found->second, [&](WorkerView& worker) {
        for (Iterator at = begin; at != next; ++at) {
          for (SlotView& slot : worker.slots) {
            if (slot.device != at->device || slot.held_by == at->holder) continue;
            Hold(worker, slot, at->holder.value().empty() ? nullptr : &HolderFor(at->holder));
          }
        }
      });
    }
    begin = next;
  }
}

void SlotIndex::SetHolder(const std::vector<SlotRef>& slots, const JobId& job) {
  if (slots.empty()) return;
  Holding* const holder = job.value().empty() ? nullptr : &HolderFor(job);
  for (auto begin = slots.begin(); begin != slots.end();) {
    auto next = begin;
    while (next != slots.end() && next->worker == begin->worker) ++next;
    Reassign(Mutable(*begin->worker), [&](WorkerView& worker) {
      for (auto at = begin; at != next; ++at) {
        Hold(worker, worker.slots[static_cast<size_t>(at->slot - worker.slots.data())], holder);
      }
    });
    begin = next;
  }
}

void SlotIndex::SetHolders(const std::vector<HeldSlot>& slots) {
  SetEach(slots.begin(), slots.end());
}
void SlotIndex::SetHoldersBack(const std::vector<HeldSlot>& slots) {
  SetEach(slots.rbegin(), slots.rend());
}

void SlotIndex::Put(WorkerView worker) {
  Remove(worker.id);
  ++version_;
  const WorkerId id = worker.id;
  const auto added = workers_.emplace(id, std::move(worker)).first;
  Order(added);
  added->second.home = Enter(added->second);
  Count(added->second, 1);
}

void SlotIndex::Remove(const WorkerId& id) {
  const auto found = workers_.find(id);
  if (found == workers_.end()) return;
  ++version_;
  Count(found->second, -1);
  Leave(found->second.home);
  workers_.erase(found);
}

const WorkerView* SlotIndex::Find(const WorkerId& id) const {
  const auto found = workers_.find(id);
  return found == workers_.end() ? nullptr : &found->second;
}

void SlotIndex::SetHolder(const WorkerId& id, const std::string& device, const JobId& job) {
  SetHolders({{id, device, job}});
}

const SlotIndex::Kind& SlotIndex::Of(v1::DeviceKind kind) const {
  static const auto* const none = new Kind();
  const auto found = kinds_.find(kind);
  return found == kinds_.end() ? *none : found->second;
}

const Holding* SlotIndex::HolderOf(const JobId& job) const {
  const auto found = holders_.find(job);
  return found == holders_.end() || found->second.workers.empty() ? nullptr : &found->second;
}

std::set<WorkerId> SlotIndex::WorkersOf(const JobId& job) const {
  std::set<WorkerId> workers;
  const Holding* holder = HolderOf(job);
  if (holder == nullptr) return workers;
  for (const WorkerView* worker : holder->workers) workers.insert(workers.end(), worker->id);
  return workers;
}

std::vector<std::string> SlotIndex::Trial::Take(const WorkerId& id, v1::DeviceKind kind, int count,
                                                const JobId& job, int group) {
  const WorkerView* worker = index_.Find(id);
  return worker == nullptr ? std::vector<std::string>() : Take(*worker, kind, count, job, group);
}

std::vector<std::string> SlotIndex::Trial::Take(const WorkerView& on, v1::DeviceKind kind,
                                                int count, const JobId& job, int group) {
  std::vector<std::string> devices;
  Holding& holder = index_.HolderFor(job);
  index_.Reassign(Mutable(on), [&](WorkerView& worker) {
    const auto fits = [kind](const SlotView& slot) { return slot.free() && slot.kind == kind; };
    std::map<int, int> linked;  // free slots by group of linked devices
    for (const SlotView& slot : worker.slots) {
      if (fits(slot)) ++linked[slot.link_group];
    }
    while (static_cast<int>(devices.size()) < count && !linked.empty()) {
      const int wanted = std::min(group, count - static_cast<int>(devices.size()));
      auto best = linked.end();
      for (auto at = linked.begin(); at != linked.end(); ++at) {
        const bool better =
            best == linked.end() ||
            (at->second >= wanted ? best->second < wanted || at->second < best->second
                                  : best->second < wanted && at->second > best->second);
        if (better) best = at;
      }
      int left = std::min(wanted, best->second);
      best->second -= left;
      for (const bool suspect : {false, true}) {
        for (SlotView& slot : worker.slots) {
          if (left == 0) break;
          if (!fits(slot) || slot.link_group != best->first || slot.suspect != suspect) continue;
          changed_.push_back({&worker, &slot, nullptr});
          index_.Hold(worker, slot, &holder);
          devices.push_back(slot.device);
          --left;
        }
      }
      if (best->second == 0) linked.erase(best);
    }
  });
  index_.Left(holder);
  return devices;
}

void SlotIndex::Trial::Open(const std::vector<std::string>& reservations) {
  for (const std::string& name : reservations) {
    const auto found = index_.reserved_on_.find(name);
    if (found == index_.reserved_on_.end()) continue;
    const std::set<WorkerId> workers = found->second;
    for (const WorkerId& id : workers) {
      index_.Update(id, [&](WorkerView& worker) {
        for (SlotView& slot : worker.slots) {
          if (slot.reserved != name) continue;
          slot.reserved.clear();
          opened_.push_back({id, slot.device, name});
        }
      });
    }
  }
}

void SlotIndex::Trial::Close() {
  for (const Opened& opened : std::exchange(opened_, {})) {
    index_.Update(opened.worker, [&opened](WorkerView& worker) {
      for (SlotView& slot : worker.slots) {
        if (slot.device == opened.device) slot.reserved = opened.reservation;
      }
    });
  }
}

void SlotIndex::Trial::Release(const JobId& job) {
  const auto found = index_.holders_.find(job);
  if (found == index_.holders_.end() || found->second.workers.empty()) return;
  Holding& holder = found->second;
  // The last one first: each leaves the list of the holder.
  while (!holder.workers.empty()) {
    index_.Reassign(Mutable(*holder.workers.back()), [&](WorkerView& worker) {
      for (SlotView& slot : worker.slots) {
        if (slot.holder != &holder) continue;
        changed_.push_back({&worker, &slot, &holder});
        index_.Hold(worker, slot, nullptr);
      }
    });
  }
}

void SlotIndex::Trial::TakeAll(const WorkerView& on, v1::DeviceKind kind, const JobId& holder) {
  Holding& hides = index_.HolderFor(holder);
  index_.Reassign(Mutable(on), [&](WorkerView& worker) {
    for (SlotView& slot : worker.slots) {
      if (!slot.free() || slot.kind != kind) continue;
      changed_.push_back({&worker, &slot, nullptr});
      index_.Hold(worker, slot, &hides);
    }
  });
  index_.Left(hides);
}

void SlotIndex::Trial::Rollback() {
  for (auto begin = changed_.rbegin(); begin != changed_.rend();) {
    auto next = begin;
    while (next != changed_.rend() && next->worker == begin->worker) ++next;
    index_.Reassign(*begin->worker, [&](WorkerView& worker) {
      for (auto at = begin; at != next; ++at) index_.Hold(worker, *at->slot, at->before);
    });
    begin = next;
  }
  changed_.clear();
}

}  // namespace muster::coordinator
