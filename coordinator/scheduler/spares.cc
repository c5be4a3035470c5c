#include "coordinator/scheduler/spares.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "proto/spec/names.h"

namespace muster::coordinator {
namespace {

constexpr int kNamedMax = 8;  // SpareStatus.short_names, too_small

int64_t TotalOf(const SlotIndex::Domain& domain, v1::DeviceKind kind) {
  const auto slots = domain.slots.find(kind);
  int64_t total = 0;
  if (slots == domain.slots.end()) return total;
  for (const auto& [size, workers] : slots->second.workers_by_total) {
    total += int64_t{size} * workers;
  }
  return total;
}

// Slots that the holder has in every domain that has some.
std::map<int, PerDevice<int64_t>> HeldByDomain(const SlotIndex& index) {
  std::map<int, PerDevice<int64_t>> held;
  const Holding* holder = index.HolderOf(SpareHolder());
  if (holder == nullptr) return held;
  for (const WorkerView* worker : holder->workers) {
    PerDevice<int64_t> here = {};
    for (const SlotView& slot : worker->slots) {
      if (slot.holder == holder) ++here[static_cast<size_t>(slot.kind)];
    }
    for (int at = worker->home; at >= 0; at = index.domain(at).parent) {
      PerDevice<int64_t>& sums = held[at];
      for (size_t kind = 0; kind < sums.size(); ++kind) sums[kind] += here[kind];
    }
  }
  return held;
}

using ByFree = std::map<int, WorkerSet>;  // workers by free slots

// The workers in the domain that have free slots of the kind and are not avoided, by standing.
std::map<v1::WorkerStanding, ByFree> FreeWorkers(const SlotIndex& index, int domain,
                                                 v1::DeviceKind kind) {
  std::map<v1::WorkerStanding, ByFree> workers;
  std::vector<int> todo = {domain};
  while (!todo.empty()) {
    const SlotIndex::Domain& at = index.domain(todo.back());
    todo.pop_back();
    todo.insert(todo.end(), at.children.begin(), at.children.end());
    const auto slots = at.slots.find(kind);
    if (slots == at.slots.end()) continue;
    for (const auto& [free, alike] : slots->second.direct) {
      for (const WorkerView* worker : alike) {
        if (worker->standing == v1::WORKER_STANDING_AVOIDED) continue;
        workers[worker->standing][free].insert(worker);
      }
    }
  }
  return workers;
}

// Takes up to so many slots. Returns those that are missing.
int64_t TakeSpares(SlotIndex::Trial& trial, int domain, v1::DeviceKind kind, int64_t wanted) {
  for (auto& [standing, by_free] : FreeWorkers(trial.index(), domain, kind)) {
    while (wanted > 0 && !by_free.empty()) {
      auto best = by_free.upper_bound(
          static_cast<int>(std::min<int64_t>(wanted, std::numeric_limits<int>::max())));
      if (best != by_free.begin()) --best;
      const WorkerView* worker = *best->second.begin();
      const int count = static_cast<int>(std::min<int64_t>(wanted, best->first));
      best->second.erase(best->second.begin());
      if (best->second.empty()) by_free.erase(best);
      trial.Take(*worker, SlotsFor{kind}, count, SpareHolder(), count);
      wanted -= count;
    }
  }
  return wanted;
}

}  // namespace

const JobId& SpareHolder() {
  static const auto* const id = new JobId("(spare)");
  return *id;
}

int64_t HoldSpares(SlotIndex::Trial& trial, const QueueTree& tree) {
  const SlotIndex& index = trial.index();
  int64_t missing = 0;
  for (const QueueTree::Spares& spares : tree.spares()) {
    const std::map<int, PerDevice<int64_t>> held = HeldByDomain(index);
    for (const auto& [path, number] : index.domains_of(spares.level)) {
      for (const v1::DeviceKind kind : {v1::DEVICE_KIND_CPU, v1::DEVICE_KIND_CUDA}) {
        const size_t of = static_cast<size_t>(kind);
        int64_t wanted = spares.devices[of];
        if (wanted == 0) continue;
        wanted = std::min(wanted, TotalOf(index.domain(number), kind));
        if (const auto known = held.find(number); known != held.end()) wanted -= known->second[of];
        if (wanted <= 0) continue;
        missing += TakeSpares(trial, number, kind, wanted);
      }
    }
  }
  return missing;
}

std::vector<PerDevice<int64_t>> SparesWanted(const SlotIndex& index, const QueueTree& tree) {
  std::vector<PerDevice<int64_t>> wanted;
  const auto visit = [&](const auto& self, int number) -> PerDevice<int64_t> {
    const SlotIndex::Domain& domain = index.domain(number);
    PerDevice<int64_t> sums = {};
    for (const int child : domain.children) {
      const PerDevice<int64_t> below = self(self, child);
      for (size_t kind = 0; kind < sums.size(); ++kind) sums[kind] += below[kind];
    }
    for (const QueueTree::Spares& spares : tree.spares()) {
      if (spares.level != domain.level) continue;
      for (size_t kind = 0; kind < sums.size(); ++kind) {
        sums[kind] = std::max(
            sums[kind],
            std::min(spares.devices[kind], TotalOf(domain, static_cast<v1::DeviceKind>(kind))));
      }
    }
    if (wanted.size() <= static_cast<size_t>(number)) {
      wanted.resize(static_cast<size_t>(number) + 1);
    }
    return wanted[static_cast<size_t>(number)] = sums;
  };
  visit(visit, SlotIndex::kCluster);
  return wanted;
}

std::vector<v1::SpareStatus> CountSpares(SlotIndex& index, const QueueTree& tree) {
  std::vector<v1::SpareStatus> out;
  SlotIndex::Trial trial(index);
  HoldSpares(trial, tree);
  const std::map<int, PerDevice<int64_t>> held = HeldByDomain(index);
  for (const QueueTree::Spares& spares : tree.spares()) {
    for (const v1::DeviceKind kind : {v1::DEVICE_KIND_CPU, v1::DEVICE_KIND_CUDA}) {
      const size_t of = static_cast<size_t>(kind);
      if (spares.devices[of] == 0) continue;
      v1::SpareStatus& status = out.emplace_back();
      status.set_level(spares.level);
      status.set_device(spec::EnumName(kind));
      for (const auto& [path, number] : index.domains_of(spares.level)) {
        const SlotIndex::Domain& domain = index.domain(number);
        const int64_t total = TotalOf(domain, kind);
        if (total == 0) continue;
        const int64_t wanted = std::min(spares.devices[of], total);
        const auto known = held.find(number);
        // Where narrower domains keep more, the rest is theirs.
        const int64_t free = std::min(wanted, known == held.end() ? 0 : known->second[of]);
        status.set_domains(status.domains() + 1);
        status.set_wanted(status.wanted() + wanted);
        status.set_free(status.free() + free);
        if (free < wanted) {
          status.set_domains_short(status.domains_short() + 1);
          if (status.short_names_size() < kNamedMax) status.add_short_names(domain.name());
        }
        if (total <= spares.devices[of] && status.too_small_size() < kNamedMax) {
          status.add_too_small(domain.name());
        }
      }
    }
  }
  return out;
}

SpareCount SpareDevices(SlotIndex& index, const QueueTree& tree) {
  SpareCount count;
  if (tree.spares().empty()) return count;
  SlotIndex::Trial trial(index);
  count.missing = HoldSpares(trial, tree);
  const Holding* holder = index.HolderOf(SpareHolder());
  if (holder == nullptr) return count;
  for (const int64_t slots : holder->slots) count.free += slots;
  return count;
}

}  // namespace muster::coordinator
