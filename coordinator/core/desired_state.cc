#include "coordinator/core/desired_state.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/core/causes.h"
#include "coordinator/core/limits.h"
#include "proto/spec/elastic.h"
#include "proto/time.h"

namespace muster::coordinator {

absl::Duration DesiredState::StopGraceOf(const JobEntry& job) const {
  switch (job.state.stop_cause()) {
    case v1::CAUSE_PREEMPTED:
    case v1::CAUSE_RESIZED:
    case v1::CAUSE_DEADLINE:
    case v1::CAUSE_MAINTENANCE:
      // Its ranks were not asked to stop when one of them was ended by somebody else. A job of
      // before there was such a field has none.
      if (job.state.stop_rank() >= 0 || !job.spec().preemption().has_grace()) {
        return config_.stop_grace;
      }
      return FromProto(job.spec().preemption().grace());
    case v1::CAUSE_UNSPECIFIED:
    case v1::CAUSE_CANCELLED:
    case v1::CAUSE_TIME_LIMIT:
      return config_.stop_grace;
    default:
      return std::min(config_.stop_grace, kFailedStopGrace);
  }
}

DesiredList::Attempt DesiredState::WantedOf(const WorkerEntry& worker, const JobEntry& job) const {
  if (!job.Leaves(worker.row.name())) {
    return {job.epoch(), PropertiesOf(job.state.attempt_state()).asked, StopGraceOf(job),
            job.membership()};
  }
  DesiredList::Attempt wanted{job.epoch(), v1::DESIRED_PHASE_STOPPED,
                              std::min(config_.stop_grace, kFailedStopGrace), 1};
  for (const v1::Placement& placement : job.attempt.leaving()) {
    if (placement.worker() == worker.row.name()) wanted.membership = placement.membership();
  }
  return wanted;
}

// A daemon that is to end an attempt asks nothing of its spec, and neither does one whose ranks
// run: each has got its assignment. Where ranks were replaced, a rank that runs may not have been
// told yet, until it trains; and a daemon that does not keep specs tells it again after a restart.
bool DesiredState::NeedsSpec(const WorkerEntry& worker, const JobEntry& job,
                             const DesiredList::Attempt& wanted) {
  if (wanted.phase == v1::DESIRED_PHASE_STOPPED) return false;
  const bool first = job.membership() == 1;
  if (worker.keeps_specs) {
    const auto observed = worker.observed.find({job.id(), job.epoch()});
    if (observed != worker.observed.end() && observed->second) return false;
  } else if (!first) {
    return true;
  }
  const v1::RankState told = first ? v1::RANK_STATE_RUNNING : v1::RANK_STATE_TRAINING;
  const std::vector<int32_t>& ranks = job.gang.On(worker.row.name());
  return std::any_of(ranks.begin(), ranks.end(),
                     [&job, told](int32_t rank) { return job.gang.state(rank) < told; });
}

std::map<JobId, DesiredList::Attempt> DesiredState::WantedOf(WorkerEntry& worker) const {
  std::map<JobId, DesiredList::Attempt> wanted;
  // Specs that were sent stay in every Desired until they have arrived, so they come first.
  std::vector<JobId> sent, others;
  for (const JobId& id : worker.Jobs()) {
    const JobEntry& job = *jobs_.Find(id);
    DesiredList::Attempt attempt = WantedOf(worker, job);
    if (NeedsSpec(worker, job, attempt)) {
      const DesiredList::Attempt* listed = worker.desired.Find(id, job.epoch());
      // A daemon that does not keep specs has every one that it was sent, and would lose it.
      const bool held = !worker.keeps_specs && worker.observed.contains({id, job.epoch()});
      (held || (listed != nullptr && listed->described) ? sent : others).push_back(id);
    }
    wanted.emplace(id, attempt);
  }
  worker.specs_wait = false;
  size_t bytes = 0;
  for (const JobId& id : sent) {
    bytes += SpecBytes(worker, *jobs_.Find(id));
    wanted[id].described = true;
  }
  for (const JobId& id : others) {
    const JobEntry& job = *jobs_.Find(id);
    const size_t more = SpecBytes(worker, job);
    if (bytes == 0 || bytes + more <= kDesiredSpecBytesMax) {
      bytes += more;
      wanted[id].described = true;
      continue;
    }
    worker.specs_wait = true;
    // One that it does not hold is not listed yet. One that it holds would be stale if it were not.
    if (!worker.observed.contains({id, job.epoch()}) &&
        worker.desired.Find(id, job.epoch()) == nullptr) {
      wanted.erase(id);
    }
  }
  return wanted;
}

size_t DesiredState::SpecBytes(const WorkerEntry& worker, const JobEntry& job) {
  size_t bytes = job.spec().ByteSizeLong();
  for (const v1::CheckpointRecord& checkpoint : job.attempt.restore()) {
    bytes += checkpoint.ByteSizeLong();
  }
  return worker.takes_spec_once ? bytes : bytes * job.gang.On(worker.row.name()).size();
}

v1::DesiredAttempt DesiredState::DesiredOf(const WorkerEntry& worker, const JobEntry& job,
                                           const DesiredList::Attempt& wanted) {
  v1::DesiredAttempt out;
  out.set_job_id(job.fixed.id());
  out.set_job_name(job.name());
  out.set_owner(job.fixed.owner());
  out.set_epoch(job.epoch().value());
  out.set_history_id(job.attempt.history_id());
  out.set_membership(wanted.membership);
  out.set_stop_grace_ms(absl::ToInt64Milliseconds(wanted.stop_grace));
  out.set_phase(wanted.phase);
  if (job.Leaves(worker.row.name())) {
    for (const v1::Placement& placement : job.attempt.leaving()) {
      if (placement.worker() != worker.row.name()) continue;
      v1::RankAssignment& rank = *out.add_ranks();
      rank.set_job_id(job.fixed.id());
      rank.set_epoch(job.epoch().value());
      rank.set_rank(placement.rank());
      rank.set_device(placement.device());
      rank.set_membership(wanted.membership);
    }
    return out;
  }
  // Ranks know one size, that of their attempt.
  v1::JobSpec sized;
  if (job.elastic() && wanted.described) sized = spec::AtSize(job.spec(), job.gang.size());
  const v1::JobSpec& spec = job.elastic() ? sized : job.spec();
  if (worker.takes_spec_once && wanted.described) {
    *out.mutable_spec() = spec;
    *out.mutable_restore() = job.attempt.restore();
  }
  const std::vector<int32_t>& ranks = job.gang.On(worker.row.name());
  const bool gpus = job.spec().resources().device() == v1::DEVICE_KIND_CUDA;
  int32_t local_rank = 0;
  for (const int32_t number : ranks) {
    const v1::Placement& placement = job.attempt.placements(number);
    v1::RankAssignment& rank = *out.add_ranks();
    rank.set_job_id(job.fixed.id());
    rank.set_job_name(job.name());
    rank.set_epoch(job.epoch().value());
    rank.set_membership(wanted.membership);
    rank.set_rank(number);
    rank.set_world_size(job.gang.size());
    rank.set_local_rank(local_rank++);
    rank.set_local_ranks(static_cast<int32_t>(ranks.size()));
    rank.set_device(placement.device());
    rank.set_address(placement.address());
    rank.set_threads(job.spec().resources().threads_per_rank());
    if (job.runs_command()) {
      rank.set_group_rank(job.gang.group_rank(number));
      rank.set_group_world_size(static_cast<int32_t>(job.gang.by_worker().size()));
      rank.set_attempt(job.state.attempts());
      for (size_t i = 0; gpus && i < ranks.size(); ++i) {
        rank.add_local_devices(job.attempt.placements(ranks[i]).device());
      }
    }
    if (worker.takes_spec_once || !wanted.described) continue;
    *rank.mutable_spec() = spec;
    *rank.mutable_restore() = job.attempt.restore();
  }
  return out;
}

void DesiredState::Send(WorkerEntry& worker, Turn& turn) {
  const std::map<JobId, DesiredList::Attempt> wanted = WantedOf(worker);
  if (!worker.desired.Update(wanted)) return;
  worker.desired.Sent(turn.now());
  SendAction send;
  send.session = *worker.session;
  v1::Desired& desired = *send.message.mutable_desired();
  desired.set_revision(worker.desired.revision());
  for (const auto& [id, attempt] : wanted) {
    *desired.add_attempts() = DesiredOf(worker, *jobs_.Find(id), attempt);
  }
  turn.Act(std::move(send));
}

}  // namespace muster::coordinator
