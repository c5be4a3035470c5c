// A job as users see it, in parts with disjoint fields: when a job changes, the parts that did not
// change are shared with what was published before.
#ifndef MUSTER_COORDINATOR_CORE_JOB_VIEW_H_
#define MUSTER_COORDINATOR_CORE_JOB_VIEW_H_

#include <array>
#include <cstddef>
#include <memory>

#include "muster/v1/job.pb.h"

namespace muster::coordinator {

enum class JobPart : uint8_t {
  kState,    // everything of one value: state, progress, why it waits; id and name too
  kSpec,     // what never changes
  kRanks,    // Job.ranks
  kCurve,    // Job.losses
  kHistory,  // Job.causes, Job.checkpoints
  kCount,
};

// Value type. A part that is null did not change, or is empty.
struct JobView {
  std::array<std::shared_ptr<const v1::Job>, static_cast<size_t>(JobPart::kCount)> parts;

  std::shared_ptr<const v1::Job>& operator[](JobPart part) {
    return parts[static_cast<size_t>(part)];
  }
  const std::shared_ptr<const v1::Job>& operator[](JobPart part) const {
    return parts[static_cast<size_t>(part)];
  }
  // Takes over the parts that `changed` has.
  void Update(const JobView& changed) {
    for (size_t i = 0; i < parts.size(); ++i) {
      if (changed.parts[i] != nullptr) parts[i] = changed.parts[i];
    }
  }
  // The whole job.
  v1::Job Merge() const {
    v1::Job job;
    for (const auto& part : parts) {
      if (part != nullptr) job.MergeFrom(*part);
    }
    return job;
  }
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_JOB_VIEW_H_
