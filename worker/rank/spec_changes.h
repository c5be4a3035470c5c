// The changes of a job spec that may let it fit into less memory, with an estimate of what each
// costs. Estimates order the choices; they are not measurements: selective recomputation 2 %, full
// 30 %; ZeRO-3 5 %; each halved micro-batch 4 %; each doubled tensor degree 8 %; pipelines their
// bubble; offload 3 % and half of the time that the host's optimizer takes.
#ifndef MUSTER_WORKER_RANK_SPEC_CHANGES_H_
#define MUSTER_WORKER_RANK_SPEC_CHANGES_H_

#include <string>
#include <vector>

#include "muster/v1/spec.pb.h"

namespace muster::worker {

struct SpecChange {
  v1::JobSpec spec;                   // after the change; valid
  std::vector<std::string> settings;  // as for --set: "engine.training.recompute=selective"
  double slowdown = 1;                // estimated time of a step over that of the spec as given
  // Which layout, micro-batch, ZeRO stage and offload share the change has, each by a number, from
  // the outermost choice to the innermost. Changes with a common prefix differ only in the choices
  // behind it, and in recomputation and gradient order. Empty: the change is not one of these.
  std::vector<int> path;
  // Ascends in the order of generation: of the changes with a common prefix of `path` the one with
  // the largest number needs the least device memory.
  int number = 0;
};

// Every valid combination of: more tensor and pipeline parallelism at the expense of data
// parallelism, smaller micro-batches, higher ZeRO stages, recomputation, gradients in any order
// and, on CUDA devices, quarters of the optimizer's state on the host; less of it there than
// `spec` says only with `less_offload`. The cheapest first; of equally cheap ones that with fewer
// settings. Requires: `spec` has its defaults and is valid.
std::vector<SpecChange> SpecChanges(const v1::JobSpec& spec, bool less_offload);

// Estimated time of a step with this recomputation over that without.
double RecomputeFactor(v1::Recompute mode);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_SPEC_CHANGES_H_
