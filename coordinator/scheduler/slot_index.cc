#include "coordinator/scheduler/slot_index.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/container/inlined_vector.h"

namespace muster::coordinator {

namespace {

template <typename Parts>
auto PartOf(Parts& parts, const JobId& job) {
  return std::lower_bound(parts.begin(), parts.end(), job,
                          [](const DevicePart& part, const JobId& id) { return part.job < id; });
}

}  // namespace

int32_t SlotView::room() const {
  if (!held_by.value().empty()) return 0;
  int32_t left = kWholeDevice;
  for (const DevicePart& part : parts) left -= part.share;
  return std::max(0, left);
}

int32_t SlotView::ShareOf(const JobId& job) const {
  if (held_by == job) return kWholeDevice;
  const auto part = PartOf(parts, job);
  return part != parts.end() && part->job == job ? part->share : 0;
}

// Where one job takes the whole device it is `held_by`, also while others still have parts.
void SlotView::SetShare(const JobId& job, int32_t share) {
  if (held_by == job) held_by = JobId();
  auto part = PartOf(parts, job);
  const bool known = part != parts.end() && part->job == job;
  if (known && share > 0) {
    part->share = share;
  } else if (known) {
    parts.erase(part);
  } else if (share > 0) {
    parts.insert(part, DevicePart{job, share});
  }
  if (!held_by.value().empty()) return;
  part = std::find_if(parts.begin(), parts.end(),
                      [](const DevicePart& one) { return one.share == kWholeDevice; });
  if (part == parts.end()) return;
  held_by = std::move(part->job);
  parts.erase(part);
}

std::vector<DevicePart> SlotView::Holders() const {
  std::vector<DevicePart> holders = parts;
  if (!held_by.value().empty()) holders.push_back({held_by, kWholeDevice});
  return holders;
}

int FreeSlots(const WorkerView& worker, const SlotsFor& slots) {
  if (!worker.ready) return 0;
  return static_cast<int>(
      std::count_if(worker.slots.begin(), worker.slots.end(),
                    [&slots](const SlotView& slot) { return slots.Has(slot); }));
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

namespace {

void CountSize(WorkerSizes& sizes, int total, bool undivided, int sign) {
  const auto add = [total, sign](Counts& counts) {
    const auto found = counts.try_emplace(total, 0).first;
    if ((found->second += sign) == 0) counts.erase(found);
  };
  add(sizes.workers_by_total);
  if (undivided) add(sizes.undivided_by_total);
}

}  // namespace

void SlotIndex::CountInDomains(const WorkerView& worker, v1::DeviceKind kind, int total, int free,
                               bool undivided, int sign) {
  for (int at = worker.home; at >= 0; at = domains_[static_cast<size_t>(at)].parent) {
    std::map<v1::DeviceKind, Domain::Slots>& kinds = domains_[static_cast<size_t>(at)].slots;
    const auto here = kinds.try_emplace(kind).first;
    Domain::Slots& slots = here->second;
    const auto add = [sign](Counts& counts, int key) {
      const auto found = counts.try_emplace(key, 0).first;
      if ((found->second += sign) == 0) counts.erase(found);
    };
    CountSize(slots, total, undivided, sign);
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

namespace {

// In the sums that the worker has of its own slots.
void CountSlot(WorkerView& worker, const SlotView& slot, int sign) {
  if (!slot.parts.empty()) worker.shared += sign;
  if (worker.ready && slot.free()) worker.free[static_cast<size_t>(slot.kind)] += sign;
}

}  // namespace

void SlotIndex::Count(WorkerView& worker, int sign) {
  struct Sums {
    int total = 0, free = 0, reserved = 0;
    bool undivided = false;
  };
  std::map<v1::DeviceKind, Sums> kinds;
  std::map<JobId, Holding*> holders;
  std::set<std::string> reservations;
  if (sign > 0) {
    worker.free = {};
    worker.shared = 0;
    for (const SlotView& slot : worker.slots) CountSlot(worker, slot, 1);
  }
  for (SlotView& slot : worker.slots) {
    Sums& sums = kinds[slot.kind];
    ++sums.total;
    sums.undivided |= slot.undivided;
    if (worker.ready && slot.free()) ++sums.free;
    if (!slot.reserved.empty()) {
      reservations.insert(slot.reserved);
      if (worker.ready && slot.usable && !slot.held()) ++sums.reserved;
    }
    const auto count = [&](const JobId& job, Holding*& holder) {
      if (sign > 0) holder = &HolderFor(job);
      holders.emplace(job, holder);
      if (worker.ready) holder->slots[static_cast<size_t>(slot.kind)] += sign;
    };
    for (DevicePart& part : slot.parts) count(part.job, part.holder);
    if (slot.held_by.value().empty()) {
      slot.holder = nullptr;
    } else {
      count(slot.held_by, slot.holder);
    }
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
    CountSize(kind, sums.total, sums.undivided, sign);
    if (worker.ready && sums.undivided) {
      sign > 0 ? void(kind.undivided.insert(&worker)) : void(kind.undivided.erase(&worker));
    }
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
    CountInDomains(worker, of, sums.total, sums.free, sums.undivided, sign);
  }
  CountShared(worker, sign);
  CountInSums(worker, sign);
  for (const auto& [of, sums] : kinds) {
    const auto kind = kinds_.find(of);
    if (kind->second.total == 0) kinds_.erase(kind);
  }
}

void SlotIndex::CountShared(const WorkerView& worker, int sign) {
  if (!worker.ready) return;
  for (const SlotView& slot : worker.slots) {
    if (slot.parts.empty()) continue;
    Kind& kind = kinds_.find(slot.kind)->second;
    kind.shared += sign;
    const bool open = slot.usable && slot.reserved.empty() && !slot.undivided;
    const int32_t left = open ? slot.room() : 0;
    if (left == 0) continue;
    // Of several devices with as much room, the first adds the worker and the first takes it away.
    if (sign > 0) {
      kind.workers_by_room[left].insert(&worker);
      continue;
    }
    const auto alike = kind.workers_by_room.find(left);
    if (alike == kind.workers_by_room.end()) continue;
    alike->second.erase(&worker);
    if (alike->second.empty()) kind.workers_by_room.erase(alike);
  }
}

// ---- sums for shares ----------------------------------------------------------------------------

void SlotIndex::MoveRoom(Room& room, const WorkerView& worker, int before, int now) {
  room.free += now - before;
  if (before > 0) {
    const auto from = room.workers_by_free.find(before);
    from->second.erase(&worker);
    if (from->second.empty()) room.workers_by_free.erase(from);
  }
  if (now > 0) room.workers_by_free[now].insert(&worker);
}

void SlotIndex::MoveRoomIn(Sums& sums, const WorkerView& worker, v1::DeviceKind kind, int before,
                           int now) const {
  if (before == now) return;
  const auto of_kind = sums.kinds.try_emplace(kind).first;
  MoveRoom(of_kind->second, worker, before, now);
  if (of_kind->second.free == 0) sums.kinds.erase(of_kind);
  if (sums.domains.size() < domains_.size()) sums.domains.resize(domains_.size());
  for (int at = worker.home; at >= 0; at = domains_[static_cast<size_t>(at)].parent) {
    auto& kinds = sums.domains[static_cast<size_t>(at)];
    const auto here = kinds.try_emplace(kind).first;
    Domain::Room& slots = here->second;
    if (before > 0) {
      const auto from = slots.workers_by_free.find(before);
      if (--from->second == 0) slots.workers_by_free.erase(from);
    }
    if (now > 0) ++slots.workers_by_free[now];
    if (at == worker.home) {
      if (before > 0) {
        const auto from = slots.direct.find(before);
        from->second.erase(&worker);
        if (from->second.empty()) slots.direct.erase(from);
      }
      if (now > 0) slots.direct[now].insert(&worker);
    }
    if (slots.workers_by_free.empty()) kinds.erase(here);
  }
}

void SlotIndex::CountInSums(const WorkerView& worker, int sign) const {
  for (auto& [of, sums] : sums_) {
    std::set<v1::DeviceKind> kinds;
    for (const SlotView& slot : worker.slots) kinds.insert(slot.kind);
    for (const v1::DeviceKind kind : kinds) {
      const int slots = FreeSlots(worker, SlotsFor{kind, of.first, of.second});
      MoveRoomIn(sums, worker, kind, sign > 0 ? 0 : slots, sign > 0 ? slots : 0);
    }
  }
}

SlotIndex::Sums& SlotIndex::SumsOf(const SlotsFor& slots) const {
  const std::pair<int32_t, bool> key(slots.share, slots.shared);
  const auto [known, first] = sums_.try_emplace(key);
  Sums& sums = known->second;
  sums.asked = ++asks_;
  if (!first) return sums;
  for (const auto& [id, worker] : workers_) {
    std::set<v1::DeviceKind> kinds;
    for (const SlotView& slot : worker.slots) kinds.insert(slot.kind);
    for (const v1::DeviceKind kind : kinds) {
      MoveRoomIn(sums, worker, kind, 0,
                 FreeSlots(worker, SlotsFor{kind, slots.share, slots.shared}));
    }
  }
  if (sums_.size() > kSharesKept) {
    sums_.erase(std::min_element(sums_.begin(), sums_.end(), [](const auto& a, const auto& b) {
      return a.second.asked < b.second.asked;
    }));
  }
  return sums;
}

const SlotIndex::Room& SlotIndex::RoomOf(const SlotsFor& slots) const {
  static const auto* const none = new Room();
  if (slots.share == kWholeDevice && !slots.shared) return Of(slots.kind);
  const Sums& sums = SumsOf(slots);
  const auto found = sums.kinds.find(slots.kind);
  return found == sums.kinds.end() ? *none : found->second;
}

const SlotIndex::Domain::Room& SlotIndex::RoomIn(int number, const SlotsFor& slots) const {
  static const auto* const none = new Domain::Room();
  if (slots.share == kWholeDevice && !slots.shared) {
    const auto found = domain(number).slots.find(slots.kind);
    return found == domain(number).slots.end() ? *none : found->second;
  }
  const Sums& sums = SumsOf(slots);
  if (static_cast<size_t>(number) >= sums.domains.size()) return *none;
  const auto& kinds = sums.domains[static_cast<size_t>(number)];
  const auto found = kinds.find(slots.kind);
  return found == kinds.end() ? *none : found->second;
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

namespace {

bool TakesSlotOf(const WorkerView& worker, const Holding* holder) {
  for (const SlotView& slot : worker.slots) {
    if (slot.holder == holder || (worker.shared > 0 && slot.TakenBy(holder))) return true;
  }
  return false;
}

}  // namespace

void SlotIndex::Hold(WorkerView& worker, SlotView& slot, Holding* holder) {
  Holding* const before = slot.holder;
  if (before == holder) return;
  const bool held = slot.held();
  if (holder != nullptr && !TakesSlotOf(worker, holder)) NoteWorker(*holder, worker, 1);
  CountSlot(worker, slot, -1);
  slot.holder = holder;
  if (holder != nullptr) {
    slot.held_by = holder->id;
  } else {
    slot.held_by = JobId();
  }
  CountSlot(worker, slot, 1);
  const size_t kind = static_cast<size_t>(slot.kind);
  if (worker.ready) {
    if (before != nullptr) --before->slots[kind];
    if (holder != nullptr) ++holder->slots[kind];
    if (!slot.reserved.empty() && slot.usable && held != slot.held()) {
      kinds_.find(slot.kind)->second.reserved += held ? 1 : -1;
    }
  }
  if (before != nullptr && !TakesSlotOf(worker, before)) {
    NoteWorker(*before, worker, -1);
    Left(*before);
  }
}

void SlotIndex::SetPart(WorkerView& worker, SlotView& slot, Holding& holder, int32_t share) {
  const bool held = slot.held();
  const bool taken = slot.TakenBy(&holder);
  const bool on_worker = TakesSlotOf(worker, &holder);
  CountSlot(worker, slot, -1);
  slot.SetShare(holder.id, share);
  CountSlot(worker, slot, 1);
  // What a job takes may have become the whole device.
  slot.holder = slot.held_by.value().empty() ? nullptr : &HolderFor(slot.held_by);
  for (DevicePart& part : slot.parts) part.holder = &HolderFor(part.job);
  const int change = (share > 0 ? 1 : 0) - (taken ? 1 : 0);
  if (worker.ready) {
    holder.slots[static_cast<size_t>(slot.kind)] += change;
    if (!slot.reserved.empty() && slot.usable && held != slot.held()) {
      kinds_.find(slot.kind)->second.reserved += held ? 1 : -1;
    }
  }
  if (!on_worker && share > 0) NoteWorker(holder, worker, 1);
  if (on_worker && !TakesSlotOf(worker, &holder)) NoteWorker(holder, worker, -1);
  Left(holder);
}

template <typename Change>
void SlotIndex::Reassign(WorkerView& worker, Change change) {
  using ByKind = std::array<int, v1::DeviceKind_ARRAYSIZE>;
  const auto count = [&worker](int32_t share, bool shared) {
    ByKind slots = {};
    for (const SlotView& slot : worker.slots) {
      if (worker.ready && SlotsFor{slot.kind, share, shared}.Has(slot)) {
        ++slots[static_cast<size_t>(slot.kind)];
      }
    }
    return slots;
  };
  const ByKind before = worker.free;
  std::vector<ByKind> before_of;  // by share
  for (const auto& [of, sums] : sums_) before_of.push_back(count(of.first, of.second));
  if (worker.shared > 0) CountShared(worker, -1);
  change(worker);
  const ByKind& now = worker.free;
  if (worker.shared > 0) CountShared(worker, 1);
  for (size_t kind = 0; kind < now.size(); ++kind) {
    if (now[kind] == before[kind]) continue;
    MoveFree(worker, static_cast<v1::DeviceKind>(kind), before[kind], now[kind]);
  }
  size_t next = 0;
  for (auto& [of, sums] : sums_) {
    const ByKind then = before_of[next++];
    const ByKind left = count(of.first, of.second);
    for (size_t kind = 0; kind < left.size(); ++kind) {
      MoveRoomIn(sums, worker, static_cast<v1::DeviceKind>(kind), then[kind], left[kind]);
    }
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
            if (slot.device != at->device) continue;
            if (at->part.has_value()) {
              SetPart(worker, slot, HolderFor(at->part->job), at->part->share);
              continue;
            }
            if (slot.held_by == at->holder) continue;
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

void SlotIndex::SetShare(const WorkerId& id, const std::string& device, const JobId& job,
                         int32_t share) {
  SetHolders({{id, device, JobId(), DevicePart{job, share}}});
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

std::vector<std::string> SlotIndex::Trial::Take(const WorkerId& id, const SlotsFor& slots,
                                                int count, const JobId& job, int group) {
  const WorkerView* worker = index_.Find(id);
  return worker == nullptr ? std::vector<std::string>() : Take(*worker, slots, count, job, group);
}

std::vector<std::string> SlotIndex::Trial::Take(const WorkerView& on, const SlotsFor& slots,
                                                int count, const JobId& job, int group) {
  std::vector<std::string> devices;
  for (const SlotView* slot : TakeSlots(on, slots, count, job, group)) {
    devices.push_back(slot->device);
  }
  return devices;
}

namespace {

// The free slots of a worker that have one SlotView::link_group.
struct LinkGroup {
  int number;
  int numa_node;
  int free = 0;
};
using LinkGroups = absl::InlinedVector<LinkGroup, 8>;

constexpr int kAnyNode = -1;

// The group from which to take as many of `wanted` slots as it has: the fullest that has them all;
// else one of the fullest node whose groups have, and `node` says so for the next call; else the
// one with most. Requires: there are groups.
LinkGroups::iterator NearestGroup(LinkGroups& groups, int wanted, int& node) {
  const auto on_node = [&](int number) {
    int free = 0;
    for (const LinkGroup& one : groups) free += one.numa_node == number ? one.free : 0;
    return free;
  };
  if (node != kAnyNode && on_node(node) == 0) node = kAnyNode;
  auto best = groups.end();
  for (auto at = groups.begin(); at != groups.end(); ++at) {
    if (at->free < wanted || (node != kAnyNode && at->numa_node != node)) continue;
    if (best == groups.end() || at->free < best->free ||
        (at->free == best->free && on_node(at->numa_node) < on_node(best->numa_node))) {
      best = at;
    }
  }
  if (best != groups.end()) return best;
  if (node == kAnyNode) {
    int fewest = std::numeric_limits<int>::max();
    for (const LinkGroup& one : groups) {
      const int free = on_node(one.numa_node);
      if (free < wanted || free >= fewest) continue;
      fewest = free;
      node = one.numa_node;
    }
  }
  for (auto at = groups.begin(); at != groups.end(); ++at) {
    if (node != kAnyNode && at->numa_node != node) continue;
    if (best == groups.end() || at->free > best->free) best = at;
  }
  return best;
}

}  // namespace

std::vector<const SlotView*> SlotIndex::Trial::TakeSlots(const WorkerView& on,
                                                         const SlotsFor& slots, int count,
                                                         const JobId& job, int group) {
  const bool whole = slots.share == kWholeDevice;
  std::vector<const SlotView*> devices;
  devices.reserve(std::min(on.slots.size(), static_cast<size_t>(count)));
  Holding& holder = index_.HolderFor(job);
  index_.Reassign(Mutable(on), [&](WorkerView& worker) {
    const auto take = [&](SlotView& slot) {
      changed_.push_back({&worker, &slot, nullptr});
      if (whole) {
        index_.Hold(worker, slot, &holder);
      } else {
        changed_.back().part = &holder;
        index_.SetPart(worker, slot, holder, slots.share);
      }
      devices.push_back(&slot);
    };
    // A device of which the job takes a part has room for others, but none for the job.
    const auto fits = [&](const SlotView& slot) {
      return slots.Has(slot) && (whole || slot.ShareOf(job) == 0);
    };
    std::vector<SlotView*> by_room;
    if (!whole) {
      for (SlotView& slot : worker.slots) {
        if (fits(slot)) by_room.push_back(&slot);
      }
      std::stable_sort(by_room.begin(), by_room.end(), [](const SlotView* a, const SlotView* b) {
        return std::make_pair(a->suspect, a->room()) < std::make_pair(b->suspect, b->room());
      });
      if (group == 1) {
        by_room.resize(std::min(by_room.size(), static_cast<size_t>(count)));
        for (SlotView* slot : by_room) take(*slot);
        return;
      }
    }
    // There are few groups.
    LinkGroups linked;
    for (const SlotView& slot : worker.slots) {
      if (!fits(slot)) continue;
      auto group_of =
          std::lower_bound(linked.begin(), linked.end(), slot.link_group,
                           [](const LinkGroup& one, int number) { return one.number < number; });
      if (group_of == linked.end() || group_of->number != slot.link_group) {
        group_of = linked.insert(group_of, {slot.link_group, slot.numa_node});
      }
      ++group_of->free;
    }
    const int unit = group > 1 ? group : count;  // ranks without groups talk to each other as well
    int wanted = 0;                              // of the unit that is being taken
    int node = kAnyNode;
    while (static_cast<int>(devices.size()) < count && !linked.empty()) {
      if (wanted == 0) {
        wanted = std::min(unit, count - static_cast<int>(devices.size()));
        node = kAnyNode;
      }
      const auto best = NearestGroup(linked, wanted, node);
      int left = std::min(wanted, best->free);
      best->free -= left;
      wanted -= left;
      const auto consider = [&](SlotView& slot) {
        if (left == 0 || !fits(slot) || slot.link_group != best->number) return;
        take(slot);
        --left;
      };
      for (SlotView* slot : by_room) consider(*slot);
      for (const bool suspect : {false, true}) {
        for (SlotView& slot : worker.slots) {
          if (slot.suspect == suspect) consider(slot);
        }
      }
      if (best->free == 0) linked.erase(best);
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
        if (!slot.TakenBy(&holder)) continue;
        changed_.push_back({&worker, &slot, &holder});
        if (slot.holder == &holder) {
          index_.Hold(worker, slot, nullptr);
        } else {
          changed_.back().part = &holder;
          changed_.back().share = slot.ShareOf(job);
          index_.SetPart(worker, slot, holder, 0);
        }
      }
    });
  }
}

void SlotIndex::Trial::TakeRest(const JobId& job, const JobId& holder) {
  const auto found = index_.holders_.find(job);
  if (found == index_.holders_.end()) return;
  Holding& rest = index_.HolderFor(holder);
  for (const WorkerView* on : found->second.workers) {
    index_.Reassign(Mutable(*on), [&](WorkerView& worker) {
      for (SlotView& slot : worker.slots) {
        if (slot.holder == &found->second || !slot.TakenBy(&found->second) || slot.room() == 0) {
          continue;
        }
        changed_.push_back({&worker, &slot, nullptr, &rest, slot.ShareOf(holder)});
        index_.SetPart(worker, slot, rest, changed_.back().share + slot.room());
      }
    });
  }
  index_.Left(rest);
}

void SlotIndex::Trial::TakeAll(const WorkerView& on, const SlotsFor& slots, const JobId& holder) {
  Holding& hides = index_.HolderFor(holder);
  index_.Reassign(Mutable(on), [&](WorkerView& worker) {
    for (SlotView& slot : worker.slots) {
      if (!slots.Has(slot)) continue;
      changed_.push_back({&worker, &slot, nullptr});
      if (slot.free()) {
        index_.Hold(worker, slot, &hides);
      } else {
        changed_.back().part = &hides;
        changed_.back().share = slot.ShareOf(holder);
        index_.SetPart(worker, slot, hides, changed_.back().share + slot.room());
      }
    }
  });
  index_.Left(hides);
}

void SlotIndex::Trial::Rollback() {
  for (auto begin = changed_.rbegin(); begin != changed_.rend();) {
    auto next = begin;
    while (next != changed_.rend() && next->worker == begin->worker) ++next;
    index_.Reassign(*begin->worker, [&](WorkerView& worker) {
      for (auto at = begin; at != next; ++at) {
        at->part == nullptr ? index_.Hold(worker, *at->slot, at->before)
                            : index_.SetPart(worker, *at->slot, *at->part, at->share);
      }
    });
    begin = next;
  }
  changed_.clear();
}

}  // namespace muster::coordinator
