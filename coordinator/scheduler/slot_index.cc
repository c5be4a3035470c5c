#include "coordinator/scheduler/slot_index.h"

#include <algorithm>

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

void SlotIndex::Count(const WorkerView& worker, int sign) {
  std::map<v1::DeviceKind, int> slots;
  std::set<JobId> holders;
  for (const SlotView& slot : worker.slots) {
    ++slots[slot.kind];
    if (!slot.held()) continue;
    holders.insert(slot.held_by);
    if (!worker.ready) continue;
    auto& held = kinds_[slot.kind].held;
    if ((held[slot.held_by] += sign) == 0) held.erase(slot.held_by);
  }
  for (const JobId& holder : holders) {
    std::set<WorkerId>& workers = workers_of_[holder];
    sign > 0 ? void(workers.insert(worker.id)) : void(workers.erase(worker.id));
    if (workers.empty()) workers_of_.erase(holder);
  }
  for (const auto& [of, count] : slots) {
    Kind& kind = kinds_[of];
    kind.total += sign * count;
    if ((kind.workers_by_total[count] += sign) == 0) kind.workers_by_total.erase(count);
    if (!worker.ready) {
      kind.away_slots += sign * count;
      sign > 0 ? void(kind.away.insert(worker.id)) : void(kind.away.erase(worker.id));
    } else if (const int free = FreeSlots(worker, of); free > 0) {
      kind.free += sign * free;
      std::set<WorkerId>& alike = kind.workers_by_free[free];
      sign > 0 ? void(alike.insert(worker.id)) : void(alike.erase(worker.id));
      if (alike.empty()) kind.workers_by_free.erase(free);
    }
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

void SlotIndex::Put(WorkerView worker) {
  Remove(worker.id);
  Count(worker, 1);
  const WorkerId id = worker.id;
  workers_.emplace(id, std::move(worker));
}

void SlotIndex::Remove(const WorkerId& id) {
  const auto found = workers_.find(id);
  if (found == workers_.end()) return;
  Count(found->second, -1);
  workers_.erase(found);
}

const WorkerView* SlotIndex::Find(const WorkerId& id) const {
  const auto found = workers_.find(id);
  return found == workers_.end() ? nullptr : &found->second;
}

void SlotIndex::SetHolder(const WorkerId& id, const std::string& device, const JobId& job) {
  Update(id, [&](WorkerView& worker) {
    for (SlotView& slot : worker.slots) {
      if (slot.device == device) slot.held_by = job;
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
                                                const JobId& job) {
  std::vector<std::string> devices;
  index_.Update(id, [&](WorkerView& worker) {
    for (SlotView& slot : worker.slots) {
      if (static_cast<int>(devices.size()) == count) break;
      if (!slot.free() || slot.kind != kind) continue;
      slot.held_by = job;
      devices.push_back(slot.device);
    }
  });
  for (const std::string& device : devices) before_.emplace_back(id, device, JobId());
  return devices;
}

void SlotIndex::Trial::Release(const JobId& job) {
  const std::set<WorkerId> workers = index_.WorkersOf(job);
  for (const WorkerId& id : workers) {
    index_.Update(id, [&](WorkerView& worker) {
      for (SlotView& slot : worker.slots) {
        if (slot.held_by != job) continue;
        slot.held_by = JobId();
        before_.emplace_back(id, slot.device, job);
      }
    });
  }
}

void SlotIndex::Trial::Rollback() {
  for (auto change = before_.rbegin(); change != before_.rend(); ++change) {
    const auto& [worker, device, holder] = *change;
    index_.SetHolder(worker, device, holder);
  }
  before_.clear();
}

}  // namespace muster::coordinator
