#include "coordinator/core/workers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/schema.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::coordinator {

bool Covers(const v1::Reservation& reservation, const std::string& device) {
  return reservation.devices().empty() ||
         std::count(reservation.devices().begin(), reservation.devices().end(), device) > 0;
}

std::set<JobId> WorkerEntry::Jobs() const {
  std::set<JobId> jobs;
  for (const auto& [device, holders] : held) {
    for (const SlotHolder& holder : holders) jobs.insert(holder.job);
  }
  return jobs;
}

int32_t WorkerEntry::HeldOf(const std::string& device) const {
  int32_t sum = 0;
  const auto holders = held.find(device);
  if (holders == held.end()) return sum;
  for (const SlotHolder& holder : holders->second) sum += holder.share;
  return sum;
}

WorkerEntry* WorkerTable::Find(const WorkerId& id) {
  const auto it = entries_.find(id);
  return it == entries_.end() ? nullptr : &it->second;
}

const WorkerEntry* WorkerTable::Find(const WorkerId& id) const {
  const auto it = entries_.find(id);
  return it == entries_.end() ? nullptr : &it->second;
}

WorkerEntry* WorkerTable::FindSession(SessionId session) {
  const auto it = sessions_.find(session);
  return it == sessions_.end() ? nullptr : Find(it->second);
}

const WorkerEntry* WorkerTable::FindSession(SessionId session) const {
  const auto it = sessions_.find(session);
  return it == sessions_.end() ? nullptr : Find(it->second);
}

absl::StatusOr<WorkerEntry*> WorkerTable::Add(const WorkerId& id, Batch& batch) {
  if (WorkerEntry* known = Find(id); known != nullptr) return known;
  if (entries_.size() >= kWorkersMax) {
    // The worker that was lost longest ago is forgotten.
    auto oldest = entries_.end();
    for (auto it = entries_.begin(); it != entries_.end(); ++it) {
      if (it->second.row.state() != v1::WORKER_STATE_LOST || !it->second.held.empty()) continue;
      if (oldest == entries_.end() || it->second.last_heard < oldest->second.last_heard) {
        oldest = it;
      }
    }
    if (oldest == entries_.end()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("worker ", id.value(), ": the cluster has as many workers as it can hold, ",
                       kWorkersMax));
    }
    Remove(WorkerId(oldest->first), batch);
  }
  WorkerEntry& entry = entries_[id];
  entry.row.set_name(id.value());
  ++by_state_[entry.row.state()];
  return &entry;
}

void WorkerTable::Remove(const WorkerId& id, Batch& batch) {
  const auto found = entries_.find(id);
  CHECK(found != entries_.end() && found->second.held.empty()) << id;
  CloseSession(found->second);
  batch.Delete(Table::kWorkers, id.value());
  --by_state_[found->second.row.state()];
  entries_.erase(found);
  away_.erase(id);
  undivided_.erase(id);
  untallied_.insert(id);
  slots_.Remove(id);
}

void WorkerTable::SetState(WorkerEntry& worker, v1::WorkerState state) {
  --by_state_[worker.row.state()];
  worker.row.set_state(state);
  ++by_state_[state];
  Refresh(worker);
}

void WorkerTable::Recover(v1::Worker row, absl::Time now) {
  WorkerEntry& entry = entries_[WorkerId(row.name())];
  ++by_state_[row.state()];
  entry.last_heard = row.state() == v1::WORKER_STATE_LOST ? FromProto(row.last_heard()) : now;
  entry.row = std::move(row);
  Refresh(entry);
}

void WorkerTable::OpenSession(WorkerEntry& worker, SessionId session) {
  CloseSession(worker);
  worker.session = session;
  sessions_[session] = worker.id();
  Refresh(worker);
}

void WorkerTable::CloseSession(WorkerEntry& worker) {
  if (worker.session.has_value()) sessions_.erase(*worker.session);
  worker.session.reset();
  worker.desired = DesiredList();
  worker.observed.clear();
  worker.specs_wait = false;
  Refresh(worker);
}

void WorkerTable::Hold(const v1::Placement& placement, const JobId& job, Epoch epoch,
                       int32_t share) {
  WorkerEntry* worker = Find(WorkerId(placement.worker()));
  CHECK(worker != nullptr) << "placement on unknown worker " << placement.worker();
  CHECK_LE(worker->HeldOf(placement.device()) + share, kWholeDevice)
      << placement.worker() << " " << placement.device() << " is held twice; second: " << job;
  worker->held[placement.device()].push_back({job, epoch, placement.rank(), share});
  share == kWholeDevice ? slots_.SetHolder(worker->id(), placement.device(), job)
                        : slots_.SetShare(worker->id(), placement.device(), job, share);
  held_by_[job] += share;
  untallied_.insert(worker->id());
}

void WorkerTable::Free(const v1::Placement& placement, const JobId& job, Epoch epoch) {
  if (!Holds(placement, job, epoch)) return;
  WorkerEntry& worker = *Find(WorkerId(placement.worker()));
  const auto holders = worker.held.find(placement.device());
  const auto holder = std::find_if(holders->second.begin(), holders->second.end(),
                                   [&job](const SlotHolder& one) { return one.job == job; });
  const auto held = held_by_.find(job);
  if ((held->second -= holder->share) == 0) held_by_.erase(held);
  holders->second.erase(holder);
  if (holders->second.empty()) worker.held.erase(holders);
  Refresh(worker);
}

bool WorkerTable::Holds(const v1::Placement& placement, const JobId& job, Epoch epoch) const {
  const WorkerEntry* worker = Find(WorkerId(placement.worker()));
  if (worker == nullptr) return false;
  const auto it = worker->held.find(placement.device());
  return it != worker->held.end() &&
         std::any_of(it->second.begin(), it->second.end(), [&](const SlotHolder& holder) {
           return holder.job == job && holder.epoch == epoch && holder.rank == placement.rank();
         });
}

void WorkerTable::Keep(const WorkerId& id, const std::string& device, const JobId& job,
                       int32_t share) {
  WorkerEntry* worker = Find(id);
  if (worker == nullptr) return;
  worker->kept_for[device].insert_or_assign(job, share);
  Refresh(*worker);
}

void WorkerTable::DropKept(const WorkerId& id, const std::string& device, const JobId& job) {
  WorkerEntry* worker = Find(id);
  if (worker == nullptr) return;
  const auto kept = worker->kept_for.find(device);
  if (kept == worker->kept_for.end() || kept->second.erase(job) == 0) return;
  if (kept->second.empty()) worker->kept_for.erase(kept);
  Refresh(*worker);
}

void WorkerTable::Persist(const WorkerEntry& worker, Turn& turn) {
  v1::Worker row = worker.row;
  *row.mutable_last_heard() = ToProto(worker.last_heard);
  turn.batch().Put(Table::kWorkers, row.name(), schema::Serialize(row));
}

namespace {

// Numbers for devices such that those with the same one are close to each other.
std::map<std::string, int> LinkGroups(const v1::Worker& row) {
  std::map<std::string, int> groups;
  int next = 0;
  for (const v1::Device& device : row.devices()) {
    if (device.nvlinks().empty() || groups.contains(device.name())) continue;
    std::vector<const v1::Device*> linked = {&device};
    groups[device.name()] = ++next;
    while (!linked.empty()) {
      const v1::Device& one = *linked.back();
      linked.pop_back();
      for (const v1::Device& other : row.devices()) {
        if (one.nvlinks().count(other.name()) + other.nvlinks().count(one.name()) == 0) continue;
        if (groups.emplace(other.name(), next).second) linked.push_back(&other);
      }
    }
  }
  std::map<std::string, std::vector<std::string>> below;  // devices by switch
  for (const v1::Device& device : row.devices()) {
    if (!device.pcie_switch().empty() && !groups.contains(device.name())) {
      below[device.pcie_switch()].push_back(device.name());
    }
  }
  for (const auto& [name, devices] : below) {
    if (devices.size() == 1) continue;
    ++next;
    for (const std::string& device : devices) groups.emplace(device, next);
  }
  for (const v1::Device& device : row.devices()) {
    groups.emplace(device.name(), -1 - std::max(0, device.numa_node()));
  }
  return groups;
}

}  // namespace

WorkerView WorkerTable::ViewOf(const WorkerEntry& worker) const {
  WorkerView out;
  out.path = topology_.PathOf(worker.row);
  out.id = worker.id();
  out.standing = worker.row.reputation().standing();
  out.ready = worker.Ready();
  if (!out.ready) {
    out.away = !worker.stale_attempts.empty() ? v1::AWAY_REASON_ENDS_ATTEMPT
               : worker.session.has_value()   ? v1::AWAY_REASON_NOT_HEARD
                                              : v1::AWAY_REASON_NOT_CONNECTED;
    if (worker.InMaintenance()) {
      out.away = worker.row.cordon().drain() ? v1::AWAY_REASON_DRAINED : v1::AWAY_REASON_CORDONED;
    }
    if (!worker.stale_attempts.empty()) out.ends_attempt = *worker.stale_attempts.begin();
  }
  const std::map<std::string, int> links = LinkGroups(worker.row);
  for (const v1::Device& device : worker.row.devices()) {
    SlotView slot;
    slot.link_group = links.at(device.name());
    slot.numa_node = std::max(0, device.numa_node());
    for (const v1::Reservation& reservation : worker.row.reservations()) {
      if (Covers(reservation, device.name())) slot.reserved = reservation.name();
    }
    for (const v1::DeviceFaults& faults : worker.row.reputation().devices()) {
      if (faults.device() == device.name()) slot.suspect = faults.suspect();
    }
    slot.device = device.name();
    slot.kind = device.kind();
    slot.usable = device.unusable().empty();
    slot.undivided = !worker.shares_devices;
    if (const auto held = worker.held.find(device.name()); held != worker.held.end()) {
      for (const SlotHolder& holder : held->second) slot.SetShare(holder.job, holder.share);
    }
    if (const auto kept = worker.kept_for.find(device.name()); kept != worker.kept_for.end()) {
      for (const auto& [job, share] : kept->second) {
        if (!slot.held() || slot.KeepsAtOnce(share)) slot.SetShare(job, share);
      }
    }
    out.slots.push_back(std::move(slot));
  }
  return out;
}

void FleetTally::Add(const FleetTally& other, int sign) {
  held += sign * other.held;
  idle += sign * other.idle;
  away += sign * other.away;
  maintenance += sign * other.maintenance;
  unusable += sign * other.unusable;
}

int64_t WorkerTable::HeldBy(const JobId& job) const {
  const auto held = held_by_.find(job);
  return held == held_by_.end() ? 0 : held->second;
}

// A device that a daemon has stopped to offer stays somebody's until it is released.
FleetTally WorkerTable::TallyOf(const WorkerEntry& worker) {
  FleetTally tally;
  for (const auto& [device, holders] : worker.held) tally.held += worker.HeldOf(device);
  int64_t& usable = worker.Ready()           ? tally.idle
                    : worker.InMaintenance() ? tally.maintenance
                                             : tally.away;
  for (const v1::Device& device : worker.row.devices()) {
    const int64_t left = kWholeDevice - worker.HeldOf(device.name());
    (device.unusable().empty() || !worker.Ready() ? usable : tally.unusable) += left;
  }
  return tally;
}

const FleetTally& WorkerTable::Tally() {
  for (const WorkerId& id : std::exchange(untallied_, {})) {
    const WorkerEntry* worker = Find(id);
    tally_.Add(tallies_[id], -1);
    if (worker == nullptr) {
      tallies_.erase(id);
      continue;
    }
    tallies_[id] = TallyOf(*worker);
    tally_.Add(tallies_[id], 1);
  }
  return tally_;
}

bool WorkerTable::TallyIsRight() const {
  FleetTally fresh;
  for (const auto& [id, worker] : entries_) fresh.Add(TallyOf(worker), 1);
  return fresh == tally_;
}

void WorkerTable::Refresh(const WorkerEntry& worker) {
  untallied_.insert(worker.id());
  const bool ready_by_row =
      worker.row.state() == v1::WORKER_STATE_READY && !worker.row.has_cordon();
  if (ready_by_row && !worker.Ready()) {
    away_.insert(worker.id());
  } else {
    away_.erase(worker.id());
  }
  if (!worker.shares_devices && worker.row.state() != v1::WORKER_STATE_LOST) {
    undivided_.insert(worker.id());
  } else {
    undivided_.erase(worker.id());
  }
  if (worker.row.state() == v1::WORKER_STATE_LOST) return slots_.Remove(worker.id());
  WorkerView now = ViewOf(worker);
  if (const WorkerView* known = slots_.Find(worker.id()); known != nullptr && *known == now) return;
  slots_.Put(std::move(now));
}

bool WorkerTable::SlotsAreRight() const {
  SlotIndex fresh;
  for (const auto& [id, worker] : entries_) {
    if (worker.row.state() != v1::WORKER_STATE_LOST) fresh.Put(ViewOf(worker));
  }
  return fresh == slots_;
}

v1::Event AboutWorker(const std::string& worker, v1::EventKind kind, std::string message) {
  v1::Event event;
  event.set_kind(kind);
  event.set_worker(worker);
  event.set_rank(-1);
  event.set_message(std::move(message));
  return event;
}

absl::Status WorkerTable::CheckKnown(const std::vector<std::string>& names) const {
  if (names.empty()) return absl::InvalidArgumentError("workers: at least one is required");
  if (names.size() > kWorkersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("workers: ", names.size(), " names; at most ", kWorkersMax));
  }
  for (const std::string& name : names) {
    if (Find(WorkerId(name)) == nullptr) {
      return absl::NotFoundError(absl::StrCat("no worker has the name ", spec::Quoted(name),
                                              "; `muster get workers` lists them"));
    }
  }
  return absl::OkStatus();
}

}  // namespace muster::coordinator
