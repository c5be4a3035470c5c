#include "coordinator/core/planned_job.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "coordinator/core/device_accounts.h"
#include "coordinator/core/traffic.h"
#include "proto/spec/deadline.h"
#include "proto/spec/elastic.h"
#include "proto/spec/share.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

constexpr double kEstimateSecondsMax = 10 * 365 * 86'400.0;  // longer: nobody knows

// The distance between neighbouring ranks of a tensor group in the numbering of ranks.
int32_t TensorStride(const v1::ParallelSpec& parallel) {
  int32_t stride = 1;
  for (const int axis : parallel.order()) {
    switch (axis) {
      case v1::MESH_AXIS_DATA:
        stride *= std::max(1, parallel.data());
        break;
      case v1::MESH_AXIS_CONTEXT:
        stride *= std::max(1, parallel.context());
        break;
      case v1::MESH_AXIS_PIPELINE:
        stride *= std::max(1, parallel.pipeline());
        break;
      default:  // the tensor axis
        return stride;
    }
  }
  return 1;  // no order: the tensor axis comes first
}

}  // namespace

absl::Duration LimitOf(const JobEntry& job, absl::Time now) {
  if (!job.spec().has_time_limit()) return absl::InfiniteDuration();
  absl::Duration ran = FromProto(job.state.ran());
  if (job.state.has_running_since()) {
    ran += std::max(absl::ZeroDuration(), now - FromProto(job.state.running_since()));
  }
  return std::max(absl::ZeroDuration(), FromProto(job.spec().time_limit()) - ran);
}

absl::Duration RestOf(const JobEntry& job) {
  const double left = static_cast<double>(std::max<int64_t>(0, job.steps() - job.progress.step()));
  const double seconds = left * job.progress.step_seconds();
  // Daemons report any number.
  if (job.progress.step_seconds() > 0 && seconds < kEstimateSecondsMax) {
    return absl::Seconds(seconds);
  }
  return absl::InfiniteDuration();
}

WaitingJob AsWaiting(const JobEntry& job, const Reservations& reservations) {
  const std::vector<int32_t> sizes = job.allowed_sizes();
  v1::JobSpec largest;
  if (job.elastic()) largest = spec::AtSize(job.spec(), sizes.back());
  const v1::JobSpec& spec = job.elastic() ? largest : job.spec();
  WaitingJob waiting;
  waiting.id = job.id();
  waiting.name = job.name();
  waiting.queue = spec.queue();
  waiting.priority = spec.priority();
  waiting.submit_sequence = job.fixed.submit_sequence();
  waiting.deadline = spec::DeadlineOf(spec);
  waiting.ranks = spec.resources().ranks();
  waiting.device = spec.resources().device();
  waiting.group = std::max(1, spec.engine().parallel().tensor());
  waiting.stride = TensorStride(spec.engine().parallel());
  waiting.placement = {spec.placement().required(), spec.placement().preferred(),
                       spec.placement().spread(), spec.placement().segment()};
  AddTraffic(spec, waiting);
  waiting.reservations = reservations.For(spec);
  if (job.state.has_not_before()) waiting.not_before = FromProto(job.state.not_before());
  waiting.runtime = LimitOf(job, absl::InfinitePast());
  if (job.state.has_rest())
    waiting.runtime = std::min(waiting.runtime, FromProto(job.state.rest()));
  waiting.tenant = TenantOf(spec);
  waiting.recovering = job.state.recovering_ranks();
  waiting.share = spec::ShareOf(spec);
  if (job.state.has_queued()) waiting.queued_at = FromProto(job.state.queued());
  if (!job.elastic()) return waiting;
  waiting.sizes = sizes;
  waiting.traffic_of_largest = waiting.traffic;
  WaitingJob smallest = AtSize(waiting, sizes.front());
  smallest.sizes = std::move(waiting.sizes);
  smallest.traffic_of_largest = std::move(waiting.traffic_of_largest);
  return smallest;
}

std::shared_ptr<const Elasticity> ElasticityOf(const JobEntry& job,
                                               const Reservations& reservations) {
  if (!spec::ResizesWhileRunning(job.spec())) return nullptr;
  const bool asked = job.state.ranks_wanted() != 0;
  if (!asked && job.sizes().size() < 2) return nullptr;
  return std::make_shared<const Elasticity>(Elasticity{
      AsWaiting(job, reservations), FromProto(job.spec().preemption().grow_after()), asked});
}

absl::Time SavedAt(const JobEntry& job) {
  absl::Time saved_at = FromProto(job.attempt.started());
  for (const v1::CheckpointRecord& record : job.checkpoints.records()) {
    if (record.epoch() != job.epoch().value() || record.damaged() || record.removed()) continue;
    saved_at = std::max(saved_at, FromProto(record.committed()));
  }
  return saved_at;
}

RunningJob AsRunning(const JobEntry& job, const Reservations& reservations) {
  const v1::JobSpec& spec = job.spec();
  RunningJob running;
  running.name = job.name();
  running.queue = spec.queue();
  running.priority = spec.priority();
  running.device = spec.resources().device();
  running.ranks = job.size();
  running.share = spec::ShareOf(spec);
  running.elastic = ElasticityOf(job, reservations);
  running.stopping = job.has_attempt() && !job.up();
  running.started_at = FromProto(job.attempt.started());
  running.saved_at = SavedAt(job);
  running.tenant = TenantOf(spec);
  running.min_runtime = FromProto(spec.preemption().min_runtime());
  if (job.state.has_expected_end()) running.ends_at = FromProto(job.state.expected_end());
  return running;
}

Kept KeptFor(const JobEntry& job) {
  const v1::JobSpec& spec = job.spec();
  Kept kept{spec.queue(), spec.priority(),    spec.resources().device(), TenantOf(spec),
            {},           spec::ShareOf(spec)};
  for (const v1::KeptSlot& slot : job.state.kept()) {
    kept.slots.insert({WorkerId(slot.worker()), slot.device()});
  }
  return kept;
}

}  // namespace muster::coordinator
