#include "coordinator/scheduler/slot_index.h"

#include <algorithm>
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

void SlotIndex::CountInDomains(const WorkerView& worker, int domain, v1::DeviceKind kind, int total,
                               int free, int sign) {
  for (int at = domain; at >= 0; at = domains_[static_cast<size_t>(at)].parent) {
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
      if (at == domain) {
        const auto alike = slots.direct.try_emplace(free).first;
        sign > 0 ? void(alike->second.insert(worker.id)) : void(alike->second.erase(worker.id));
        if (alike->second.empty()) slots.direct.erase(alike);
      }
    }
    if (slots.workers_by_total.empty()) kinds.erase(here);
  }
}

void SlotIndex::Count(const WorkerView& worker, int domain, int sign) {
  struct Sums {
    int total = 0, free = 0, reserved = 0;
  };
  std::map<v1::DeviceKind, Sums> kinds;
  std::set<JobId> holders;
  std::set<std::string> reservations;
  for (const SlotView& slot : worker.slots) {
    Sums& sums = kinds[slot.kind];
    ++sums.total;
    if (worker.ready && slot.free()) ++sums.free;
    if (!slot.reserved.empty()) {
      reservations.insert(slot.reserved);
      if (worker.ready && slot.usable && !slot.held()) ++sums.reserved;
    }
    if (!slot.held()) continue;
    holders.insert(slot.held_by);
    if (!worker.ready) continue;
    auto& held = kinds_[slot.kind].held;
    if ((held[slot.held_by] += sign) == 0) held.erase(slot.held_by);
  }
  const auto note = [&worker, sign](auto& workers_by, const auto& key) {
    std::set<WorkerId>& workers = workers_by[key];
    sign > 0 ? void(workers.insert(worker.id)) : void(workers.erase(worker.id));
    if (workers.empty()) workers_by.erase(key);
  };
  for (const JobId& holder : holders) note(workers_of_, holder);
  for (const std::string& reservation : reservations) note(reserved_on_, reservation);
  for (const auto& [of, sums] : kinds) {
    Kind& kind = kinds_[of];
    kind.total += sign * sums.total;
    if ((kind.workers_by_total[sums.total] += sign) == 0) kind.workers_by_total.erase(sums.total);
    kind.reserved += sign * sums.reserved;
    if (!worker.ready) {
      kind.away_slots += sign * sums.total;
      sign > 0 ? void(kind.away.insert(worker.id)) : void(kind.away.erase(worker.id));
    } else if (sums.free > 0) {
      kind.free += sign * sums.free;
      note(kind.workers_by_free, sums.free);
    }
    CountInDomains(worker, domain, of, sums.total, sums.free, sign);
    if (kind.total == 0) kinds_.erase(of);
  }
}

template <typename Change>
void SlotIndex::Update(const WorkerId& id, Change change) {
  const auto found = workers_.find(id);
  if (found == workers_.end()) return;
  const int home = home_.at(id);
  Count(found->second, home, -1);
  change(found->second);
  Count(found->second, home, 1);
}

void SlotIndex::MoveFree(const WorkerView& worker, int domain, v1::DeviceKind of, int before,
                         int now) {
  // The node of the tree goes along, so that nothing is allocated.
  const auto move = [&](std::map<int, std::set<WorkerId>>& workers_by) {
    std::set<WorkerId>::node_type node;
    if (before > 0) {
      const auto from = workers_by.find(before);
      node = from->second.extract(worker.id);
      if (from->second.empty()) workers_by.erase(from);
    }
    if (now == 0) return;
    node.empty() ? void(workers_by[now].insert(worker.id))
                 : void(workers_by[now].insert(std::move(node)));
  };
  Kind& kind = kinds_.find(of)->second;
  kind.free += now - before;
  move(kind.workers_by_free);
  for (int at = domain; at >= 0; at = domains_[static_cast<size_t>(at)].parent) {
    Domain::Slots& slots = domains_[static_cast<size_t>(at)].slots.find(of)->second;
    if (before > 0) {
      const auto from = slots.workers_by_free.find(before);
      if (--from->second == 0) slots.workers_by_free.erase(from);
    }
    if (now > 0) ++slots.workers_by_free[now];
    if (at == domain) move(slots.direct);
  }
}

void SlotIndex::Hold(WorkerView& worker, SlotView& slot, const JobId& job) {
  if (slot.held_by == job) return;
  const auto holds = [&worker](const JobId& holder) {
    return std::any_of(worker.slots.begin(), worker.slots.end(),
                       [&holder](const SlotView& other) { return other.held_by == holder; });
  };
  if (!job.value().empty() && !holds(job)) workers_of_[job].insert(worker.id);
  const JobId before = std::exchange(slot.held_by, job);
  if (!before.value().empty() && !holds(before)) {
    const auto of = workers_of_.find(before);
    of->second.erase(worker.id);
    if (of->second.empty()) workers_of_.erase(of);
  }
  if (!worker.ready) return;
  Kind& kind = kinds_.find(slot.kind)->second;
  if (!before.value().empty()) {
    const auto held = kind.held.find(before);
    if (--held->second == 0) kind.held.erase(held);
  }
  if (!job.value().empty()) ++kind.held[job];
  if (!slot.reserved.empty() && slot.usable && before.value().empty() != job.value().empty()) {
    kind.reserved += job.value().empty() ? 1 : -1;
  }
}

template <typename Change>
void SlotIndex::Reassign(const WorkerId& id, Change change) {
  const auto found = workers_.find(id);
  if (found == workers_.end()) return;
  WorkerView& worker = found->second;
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
    MoveFree(worker, home_.find(id)->second, static_cast<v1::DeviceKind>(kind), before[kind],
             now[kind]);
  }
}

template <typename Iterator>
void SlotIndex::SetEach(Iterator begin, Iterator end) {
  while (begin != end) {
    const WorkerId& id = begin->worker;
    Iterator next = begin;
    while (next != end && next->worker == id) ++next;
    Reassign(id, [&](WorkerView& worker) {
      for (Iterator at = begin; at != next; ++at) {
        for (SlotView& slot : worker.slots) {
          if (slot.device == at->device) Hold(worker, slot, at->holder);
        }
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
  const int home = Enter(worker);
  home_.emplace(worker.id, home);
  Count(worker, home, 1);
  const WorkerId id = worker.id;
  workers_.emplace(id, std::move(worker));
}

void SlotIndex::Remove(const WorkerId& id) {
  const auto found = workers_.find(id);
  if (found == workers_.end()) return;
  const auto home = home_.find(id);
  Count(found->second, home->second, -1);
  Leave(home->second);
  home_.erase(home);
  workers_.erase(found);
}

const WorkerView* SlotIndex::Find(const WorkerId& id) const {
  const auto found = workers_.find(id);
  return found == workers_.end() ? nullptr : &found->second;
}

void SlotIndex::SetHolder(const WorkerId& id, const std::string& device, const JobId& job) {
  Reassign(id, [&](WorkerView& worker) {
    for (SlotView& slot : worker.slots) {
      if (slot.device == device) Hold(worker, slot, job);
    }
  });
}

const SlotIndex::Kind& SlotIndex::Of(v1::DeviceKind kind) const {
  static const auto* const none = new Kind();
  const auto found = kinds_.find(kind);
  return found == kinds_.end() ? *none : found->second;
}

const std::set<WorkerId>& SlotIndex::WorkersOf(const JobId& job) const {
  static const auto* const none = new std::set<WorkerId>();
  const auto found = workers_of_.find(job);
  return found == workers_of_.end() ? *none : found->second;
}

std::vector<std::string> SlotIndex::Trial::Take(const WorkerId& id, v1::DeviceKind kind, int count,
                                                const JobId& job, int group) {
  std::vector<std::string> devices;
  index_.Reassign(id, [&](WorkerView& worker) {
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
      for (SlotView& slot : worker.slots) {
        if (left == 0) break;
        if (!fits(slot) || slot.link_group != best->first) continue;
        index_.Hold(worker, slot, job);
        devices.push_back(slot.device);
        --left;
      }
      if (best->second == 0) linked.erase(best);
    }
  });
  for (const std::string& device : devices) before_.push_back({id, device, JobId()});
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
  const std::set<WorkerId> workers = index_.WorkersOf(job);
  for (const WorkerId& id : workers) {
    index_.Reassign(id, [&](WorkerView& worker) {
      for (SlotView& slot : worker.slots) {
        if (slot.held_by != job) continue;
        before_.push_back({id, slot.device, job});
        index_.Hold(worker, slot, JobId());
      }
    });
  }
}

void SlotIndex::Trial::Rollback() {
  index_.SetHoldersBack(before_);
  before_.clear();
}

}  // namespace muster::coordinator
