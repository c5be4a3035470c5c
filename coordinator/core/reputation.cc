#include "coordinator/core/reputation.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "coordinator/core/causes.h"
#include "coordinator/core/limits.h"
#include "proto/time.h"

namespace muster::coordinator::reputation {
namespace {

constexpr double kSuspectFrom = 0.5;  // faults

DeadlineKey DeadlineOf(const WorkerEntry& worker) {
  return {DeadlineKey::Kind::kReputation, worker.row.name()};
}

// Counts the faults as of `now`. The clock may have been set back.
void DecayUntil(v1::Reputation& reputation, const QueueTree& tree, absl::Time now) {
  const absl::Duration passed =
      reputation.has_as_of() ? std::max(absl::ZeroDuration(), now - FromProto(reputation.as_of()))
                             : absl::ZeroDuration();
  reputation.set_faults(Decayed(reputation.faults(), passed, tree.fault_half_life()));
  for (v1::DeviceFaults& device : *reputation.mutable_devices()) {
    device.set_faults(Decayed(device.faults(), passed, tree.fault_half_life()));
    device.set_suspect(device.faults() >= kSuspectFrom);
  }
  *reputation.mutable_as_of() = ToProto(now);
}

// When the standing of the worker or of a device will be a better one; InfiniteFuture: it is the
// best.
absl::Time NextChange(const v1::Reputation& reputation, const QueueTree& tree) {
  absl::Time next = absl::InfiniteFuture();
  const auto below = [&](double faults, double limit) {
    // A little later than computed, so that it is so by then.
    next = std::min(next, FromProto(reputation.as_of()) + absl::Seconds(1) +
                              tree.fault_half_life() * std::max(0.0, std::log2(faults / limit)));
  };
  if (reputation.standing() == v1::WORKER_STANDING_AVOIDED) {
    below(reputation.faults(), tree.avoid_above());
  } else if (reputation.standing() == v1::WORKER_STANDING_SUSPECT) {
    below(reputation.faults(), kSuspectFrom);
  }
  for (const v1::DeviceFaults& device : reputation.devices()) {
    if (device.suspect()) below(device.faults(), kSuspectFrom);
  }
  return next;
}

// Lets the standing follow from the faults, which are settled.
void Update(WorkerEntry& worker, const QueueTree& tree, WorkerTable& workers, Deadlines& deadlines,
            Turn& turn) {
  v1::Reputation& reputation = *worker.row.mutable_reputation();
  const bool was_avoided = reputation.standing() == v1::WORKER_STANDING_AVOIDED;
  const bool avoided = reputation.faults() > tree.avoid_above();
  const bool suspect = reputation.faults() >= kSuspectFrom;
  reputation.set_standing(avoided   ? v1::WORKER_STANDING_AVOIDED
                          : suspect ? v1::WORKER_STANDING_SUSPECT
                                    : v1::WORKER_STANDING_UNSPECIFIED);
  if (avoided != was_avoided) {
    reputation.clear_avoided_since();
    if (avoided) *reputation.mutable_avoided_since() = ToProto(turn.now());
    turn.Log(AboutWorker(
        worker.row.name(), avoided ? v1::EVENT_KIND_WORKER_AVOIDED : v1::EVENT_KIND_WORKER_TRUSTED,
        avoided ? absl::StrCat("worker ", worker.row.name(), " has ",
                               absl::StrFormat("%.1f", reputation.faults()),
                               " faults and gets ranks only where nothing else holds a gang; after "
                               "a repair: `muster forgive ",
                               worker.row.name(), "`")
                : absl::StrCat("the faults of worker ", worker.row.name(),
                               " are long ago: it gets ranks as others do")));
  }
  deadlines.Set(DeadlineOf(worker), NextChange(reputation, tree));
  WorkerTable::Persist(worker, turn);
  workers.Refresh(worker);
  turn.Reschedule();
}

}  // namespace

double Decayed(double faults, absl::Duration time, absl::Duration half_life) {
  return faults * std::exp2(-absl::FDivDuration(time, half_life));
}

void Note(WorkerEntry& worker, const Fault& fault, const QueueTree& tree, WorkerTable& workers,
          Deadlines& deadlines, Turn& turn) {
  v1::Reputation& reputation = *worker.row.mutable_reputation();
  DecayUntil(reputation, tree, turn.now());
  reputation.set_faults(reputation.faults() + fault.weight);
  if (!fault.device.empty()) {
    auto& devices = *reputation.mutable_devices();
    auto device = std::find_if(devices.begin(), devices.end(), [&](const v1::DeviceFaults& one) {
      return one.device() == fault.device;
    });
    if (device == devices.end()) {
      devices.Add()->set_device(fault.device);
      std::sort(devices.begin(), devices.end(),
                [](const auto& a, const auto& b) { return a.device() < b.device(); });
      device = std::find_if(devices.begin(), devices.end(), [&](const v1::DeviceFaults& one) {
        return one.device() == fault.device;
      });
    }
    device->set_faults(device->faults() + fault.weight);
    device->set_suspect(device->faults() >= kSuspectFrom);
    // Devices that a worker has no longer are forgotten.
    const auto known = [&](const v1::DeviceFaults& one) {
      return std::any_of(worker.row.devices().begin(), worker.row.devices().end(),
                         [&](const v1::Device& own) { return own.name() == one.device(); });
    };
    devices.erase(std::remove_if(devices.begin(), devices.end(),
                                 [&](const v1::DeviceFaults& one) { return !known(one); }),
                  devices.end());
  }
  v1::WorkerFault& latest = *reputation.add_latest();
  *latest.mutable_time() = ToProto(turn.now());
  const bool slow = fault.slowdown > 0;
  if (!slow) latest.set_cause(fault.cause);
  latest.set_slowdown(fault.slowdown);
  if (slow) latest.set_rank(fault.rank);
  latest.set_job_name(fault.job_name);
  latest.set_job_id(fault.job_id);
  latest.set_device(fault.device);
  latest.set_weight(fault.weight);
  if (reputation.latest_size() > kLatestFaultsMax) {
    reputation.mutable_latest()->DeleteSubrange(0, reputation.latest_size() - kLatestFaultsMax);
  }
  v1::Event event = AboutWorker(
      worker.row.name(), v1::EVENT_KIND_WORKER_FAULT,
      absl::StrCat(
          "a fault of worker ", worker.row.name(),
          fault.device.empty() ? "" : absl::StrCat(", device ", fault.device), ": ",
          slow ? absl::StrFormat(
                     "rank %d computes %.2f times as long as others that do the same work",
                     fault.rank, fault.slowdown)
               : CauseText(fault.cause),
          fault.job_name.empty() ? "" : absl::StrCat(", of job ", fault.job_name),
          fault.weight < 1 ? "; it counts half, since another worker may be the reason" : "",
          "; it has ", absl::StrFormat("%.1f", reputation.faults()), " now"));
  if (!slow) event.set_cause(fault.cause);
  turn.Log(std::move(event));
  Update(worker, tree, workers, deadlines, turn);
}

void Recover(const WorkerEntry& worker, const QueueTree& tree, Deadlines& deadlines) {
  if (!worker.row.has_reputation()) return;
  deadlines.Set(DeadlineOf(worker), NextChange(worker.row.reputation(), tree));
}

void Review(WorkerEntry& worker, const QueueTree& tree, WorkerTable& workers, Deadlines& deadlines,
            Turn& turn) {
  if (!worker.row.has_reputation()) return;
  DecayUntil(*worker.row.mutable_reputation(), tree, turn.now());
  Update(worker, tree, workers, deadlines, turn);
}

void Forgive(WorkerEntry& worker, WorkerTable& workers, Deadlines& deadlines, Turn& turn) {
  if (!worker.row.has_reputation()) return;
  worker.row.clear_reputation();
  deadlines.Clear(DeadlineOf(worker));
  WorkerTable::Persist(worker, turn);
  turn.Log(AboutWorker(worker.row.name(), v1::EVENT_KIND_WORKER_FORGIVEN,
                       absl::StrCat("the faults of worker ", worker.row.name(),
                                    " are forgotten: it gets ranks as others do")));
  workers.Refresh(worker);
  turn.Reschedule();
}

}  // namespace muster::coordinator::reputation
