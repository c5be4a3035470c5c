// The change of a job spec that makes it fit its devices, or that evens out its memory, and the
// words in which users are told.
#ifndef MUSTER_WORKER_RANK_PLAN_ADVICE_H_
#define MUSTER_WORKER_RANK_PLAN_ADVICE_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "muster/v1/spec.pb.h"
#include "worker/rank/job_plan.h"

namespace muster::worker {

struct PlannedChange {
  std::vector<std::string> settings;  // as for --set: "engine.training.recompute=selective"
  double slowdown = 1;                // estimated time of a step over that of the spec as given
  JobPlan plan;                       // after the change
};

// The change with the least estimated cost (spec_changes.h, stage_blocks.h) after which every rank
// needs at most `bytes` (NeededBytes) and, on CUDA devices, at most `host_bytes` of the host's
// memory. Recomputation that it adds is for as few blocks as fit. No value: none was found within
// 2000 predictions, which take a few seconds. Requires: `spec` has its defaults and is valid.
std::optional<PlannedChange> CheapestFit(const v1::JobSpec& spec, int64_t bytes,
                                         int64_t host_bytes = std::numeric_limits<int64_t>::max());

// The numbers of blocks on the stages of a pipeline with which its largest rank needs the least
// memory. `plan` is that of `spec`. No value: ranks differ by less than 5 % already, or moving
// blocks saves less than 5 %.
std::optional<PlannedChange> EvenMemory(const v1::JobSpec& spec, const JobPlan& plan);

// "engine.parallel.pipeline_blocks=[9,7] would even it: 61.20 GiB for the largest rank, about 3 %
// slower by estimate".
std::string EvenText(const PlannedChange& change);

// "engine.training.recompute=selective would fit: 71.20 GiB for the largest rank, about 2 % slower
// by estimate"; without a value, that nothing was found and what is left to do.
std::string AdviceText(const std::optional<PlannedChange>& change);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_PLAN_ADVICE_H_
