#include "coordinator/core/worker_faults.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "coordinator/core/reputation.h"
#include "coordinator/core/slow_ranks.h"
#include "proto/spec/elastic.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

// Of the device; empty: not known.
std::string ModelOf(const v1::Worker& worker, const std::string& device) {
  for (const v1::Device& one : worker.devices()) {
    if (one.name() == device) return one.model();
  }
  return "";
}

}  // namespace

// Of a hang, or a rank that could not be started, a worker is the likely reason once; when the same
// happens to the job again, the job is.
void WorkerFaults::NoteEnd(const JobEntry& job, const StopReason& reason, Turn& turn) {
  Fault fault{.cause = reason.cause, .job_name = job.name(), .job_id = job.fixed.id()};
  const auto note = [&](const std::string& name) {
    WorkerEntry* worker = workers_.Find(WorkerId(name));
    if (worker == nullptr || worker->row.state() == v1::WORKER_STATE_LOST) return;
    reputation::Note(*worker, fault, scheduling_.tree(), workers_, deadlines_, turn);
  };
  if (job.state.between_size() > 1) {
    fault.weight = 0.5;
    for (const std::string& worker : job.state.between()) note(worker);
    return;
  }
  if (job.state.between_size() == 1) return note(job.state.between(0));
  const bool again = !job.ends.empty() && job.ends.back().cause() == reason.cause;
  switch (reason.cause) {
    case v1::CAUSE_DEVICE:
    case v1::CAUSE_HANG:
      if (reason.rank < 0 || (again && reason.cause == v1::CAUSE_HANG)) return;
      fault.device = job.gang.rank(reason.rank).device();
      note(job.gang.rank(reason.rank).worker());
      break;
    case v1::CAUSE_LAUNCH:
      if (!again && !reason.worker.empty()) note(reason.worker);
      break;
    default:
      break;
  }
}

// A worker has one such fault of an attempt, however many of its ranks are slow. Where the same
// rank was slow on another worker, its share of the work is the likely reason.
void WorkerFaults::NoteSlowRanks(JobEntry& job, Turn& turn) {
  std::vector<std::string> models;
  for (const v1::RankStatus& rank : job.gang.ranks()) {
    const WorkerEntry* worker = workers_.Find(WorkerId(rank.worker()));
    models.push_back(worker == nullptr ? "" : ModelOf(worker->row, rank.device()));
  }
  const std::vector<int32_t> peers = PeersOf(spec::AtSize(job.spec(), job.size()), models);
  std::map<std::string, Fault> faults;  // by worker
  for (const SlowRank& slow : job.gang.slow_ranks().Judge(peers, turn.now())) {
    const v1::RankStatus& rank = job.gang.rank(slow.rank);
    const auto [fault, first] = faults.try_emplace(rank.worker(), Fault{.job_name = job.name(),
                                                                        .job_id = job.fixed.id(),
                                                                        .device = rank.device(),
                                                                        .slowdown = slow.slowdown,
                                                                        .rank = slow.rank});
    if (!first) fault->second.device.clear();
  }
  const auto was_slow = [&](const WorkerEntry& worker, auto matches) {
    const auto& latest = worker.row.reputation().latest();
    return std::any_of(latest.begin(), latest.end(), [&](const v1::WorkerFault& fault) {
      return fault.slowdown() > 0 && fault.job_id() == job.fixed.id() && matches(fault);
    });
  };
  // Named, since clang lets no lambda capture a structured binding.
  for (const auto& of_worker : faults) {
    const auto& name = of_worker.first;
    const auto& fault = of_worker.second;
    WorkerEntry* worker = workers_.Find(WorkerId(name));
    if (worker == nullptr || worker->row.state() == v1::WORKER_STATE_LOST) continue;
    const bool known = was_slow(*worker, [&](const v1::WorkerFault& one) {
      return FromProto(one.time()) >= FromProto(job.attempt.started());
    });
    const bool elsewhere =
        std::any_of(workers_.entries().begin(), workers_.entries().end(), [&](const auto& other) {
          return other.second.row.name() != name &&
                 was_slow(other.second,
                          [&](const v1::WorkerFault& one) { return one.rank() == fault.rank; });
        });
    if (known || elsewhere) continue;
    reputation::Note(*worker, fault, scheduling_.tree(), workers_, deadlines_, turn);
  }
}

}  // namespace muster::coordinator
