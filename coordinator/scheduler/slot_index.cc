#include "coordinator/scheduler/slot_index.h"

#include <algorithm>

namespace muster::coordinator {

int FreeSlots(const WorkerView& worker, v1::DeviceKind kind) {
  if (!worker.ready) return 0;
  return static_cast<int>(
      std::count_if(worker.slots.begin(), worker.slots.end(),
                    [kind](const SlotView& slot) { return slot.free && slot.kind == kind; }));
}

void SlotIndex::Count(const WorkerView& worker, int sign) {
  std::map<v1::DeviceKind, int> slots;
  for (const SlotView& slot : worker.slots) {
    ++slots[slot.kind];
    if (!worker.ready || slot.free || slot.held_by.empty()) continue;
    auto& held = kinds_[slot.kind].held;
    if ((held[slot.held_by] += sign) == 0) held.erase(slot.held_by);
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

void SlotIndex::SetReady(const WorkerId& id, bool ready, const std::string& unready_reason) {
  Update(id, [&](WorkerView& worker) {
    worker.ready = ready;
    worker.unready_reason = ready ? "" : unready_reason;
  });
}

void SlotIndex::SetHolder(const WorkerId& id, const std::string& device, const std::string& job) {
  Update(id, [&](WorkerView& worker) {
    for (SlotView& slot : worker.slots) {
      if (slot.device != device) continue;
      slot.free = job.empty();
      slot.held_by = job;
    }
  });
}

const SlotIndex::Kind& SlotIndex::Of(v1::DeviceKind kind) const {
  static const auto* const none = new Kind();
  const auto found = kinds_.find(kind);
  return found == kinds_.end() ? *none : found->second;
}

std::vector<std::string> SlotIndex::Trial::Take(const WorkerId& id, v1::DeviceKind kind, int count,
                                                const std::string& job) {
  std::vector<std::string> devices;
  index_.Update(id, [&](WorkerView& worker) {
    for (SlotView& slot : worker.slots) {
      if (static_cast<int>(devices.size()) == count) break;
      if (!slot.free || slot.kind != kind) continue;
      slot.free = false;
      slot.held_by = job;
      devices.push_back(slot.device);
    }
  });
  for (const std::string& device : devices) taken_.emplace_back(id, device);
  return devices;
}

void SlotIndex::Trial::Rollback() {
  for (const auto& [worker, device] : taken_) index_.SetHolder(worker, device, "");
  taken_.clear();
}

}  // namespace muster::coordinator
