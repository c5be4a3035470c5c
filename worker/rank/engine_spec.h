// The engine's options as a job spec describes them. Pure functions: no file, no device and no
// memory of parameters. Every spec given here has its defaults (spec::ApplyDefaults) and is valid
// (spec::Validate). Error messages begin with the field of the spec; failures are marked with
// FailureDomain configuration (parallel/train/failure.h).
#ifndef MUSTER_WORKER_RANK_ENGINE_SPEC_H_
#define MUSTER_WORKER_RANK_ENGINE_SPEC_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "muster/v1/spec.pb.h"
#include "parallel/comm/communicator.h"
#include "parallel/mesh/mesh.h"
#include "parallel/model/model.h"
#include "parallel/train/trainer.h"
#include "proto/spec/spec.h"

namespace muster::worker {

// The kind of device that every rank of the job trains on.
kernels::DeviceKind DeviceKindOf(const v1::JobSpec& spec);

// An absolute `path` unchanged; a relative one below the spec's working directory.
std::string ResolvePath(const v1::JobSpec& spec, const std::string& path);

using spec::Describe;  // the architecture and sizes of the whole model

// How the ranks of a job divide the work.
struct SplitRun {
  parallel::Mesh mesh;
  int zero_shards = 1;  // number of ranks over which ZeRO shards
};
// kInvalidArgument: parallel/plan refuses the layout, or its degrees do not multiply to the number
// of ranks.
absl::StatusOr<SplitRun> SplitOf(const v1::JobSpec& spec);

// The part of the model that the rank at `coordinate` holds: its pipeline stage's blocks, its share
// of the tensor group, and how they are computed. kInvalidArgument: more stages than blocks.
absl::StatusOr<parallel::ModelParallel> PartOf(const v1::JobSpec& spec,
                                               const parallel::PerAxis& coordinate);
// What to tell people about the kernels that the job will run on a GPU: a sentence for attention
// (kernels/attention/head_width.h) and for the state-space scan (kernels/ssm/ssd_workspace.h) where
// these are the slow ones.
std::vector<std::string> KernelWarnings(const v1::JobSpec& spec);
// The model of that part, which describes its parameters and does not allocate them.
absl::StatusOr<std::unique_ptr<parallel::Model>> BuildModel(const v1::JobSpec& spec,
                                                            const parallel::PerAxis& coordinate);

// All options of the trainer but job, epoch, checkpoint_groups and the number of threads, which the
// assignment has.
parallel::TrainerOptions OptionsOf(const v1::JobSpec& spec);

// The NCCL options of the spec; host and on_failure are the caller's to fill in.
parallel::NcclOptions NcclOptionsOf(const v1::JobSpec& spec);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_ENGINE_SPEC_H_
