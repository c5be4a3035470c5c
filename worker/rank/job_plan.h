// What a job spec will take, rank by rank, before anything is started: memory, work, idle time of
// the pipeline; and the cheapest change of the spec with which it fits a device.
#ifndef MUSTER_WORKER_RANK_JOB_PLAN_H_
#define MUSTER_WORKER_RANK_JOB_PLAN_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "muster/v1/spec.pb.h"
#include "parallel/mesh/mesh.h"
#include "parallel/train/memory.h"
#include "parallel/train/volume.h"

namespace muster::worker {

// Ranks that are alike: the data- and context-parallel ranks of one pipeline stage and of tensor
// ranks with equal shares.
struct RankPlan {
  int pipeline = 0;    // stage
  int tensor = 0;      // the first of the tensor ranks
  int ranks = 0;       // how many there are
  int first_rank = 0;  // of the job
  // Of transformer blocks, on this stage; and whether it has the embedding and the head.
  int blocks = 0;
  bool embedding = false, head = false;
  int64_t parameters = 0;  // held by the model's part, before ZeRO shards them
  parallel::MemoryUse memory;
  parallel::StepVolume sent;  // by each of the ranks in a step
  // With ZeRO 2 and 3: parameters that are not sharded, but for the optimizer's state.
  struct Whole {
    int64_t tables = 0;  // of the embedding and the head
    int64_t keys = 0;    // of key/value heads that tensor ranks share
    int64_t small = 0;   // below resident_elements, and norms whose gradients tensor ranks sum
    int64_t total() const { return tables + keys + small; }
  };
  Whole whole;
  // Its tensor group's shares are: exchanges go through NCCL (parallel/train/memory.h, MostOfEach).
  bool too_uneven = false;
};

struct JobPlan {
  kernels::DeviceKind device = kernels::DeviceKind::kCpu;
  parallel::PerAxis degrees{1, 1, 1, 1};
  std::vector<RankPlan> ranks;  // by stage, then tensor rank
  int64_t parameters = 0;       // of the whole model
  int64_t flops_per_token = 0;  // forward and backward, without recomputation
  int64_t tokens_per_step = 0;
  int64_t micro_batches = 0;  // per rank and step
  // Idle share of the pipeline's time, of a step without communication; 0 without a pipeline.
  double bubble = 0;

  // Of the rank that takes most: device memory, on the host with what it takes besides.
  int64_t needed_bytes() const;
  const RankPlan& largest() const;
  int64_t host_bytes() const;  // of the host's memory, of the rank that takes most of it
  // The largest rank's bytes over the mean of all ranks, less 1.
  double imbalance() const;
};

// What must be there for a rank: on the host also what it stages there.
int64_t NeededBytes(const parallel::MemoryUse& use, kernels::DeviceKind device);

// What the rank at `coordinate` needs; with `blocks`, were its stage to hold these instead of its
// own. As PlanJob.
absl::StatusOr<int64_t> RankBytes(const v1::JobSpec& spec, const parallel::PerAxis& coordinate,
                                  std::optional<parallel::BlockRange> blocks = std::nullopt);

// Requires: `spec` has its defaults and is valid. Looks at no file: without the data sets, the
// numbers of a long evaluation (8 bytes per micro-batch of it) are not counted. kInvalidArgument as
// SetUpEngine. Costs milliseconds, whatever the model's size: no parameter is made.
absl::StatusOr<JobPlan> PlanJob(const v1::JobSpec& spec);

struct Change {
  // As for --set: "engine.training.recompute=selective".
  std::vector<std::string> settings;
  double slowdown = 1;  // estimate of the step's time over that of the spec as it is
  JobPlan plan;
};

// The change with the least estimated cost after which every rank fits into `bytes` (as
// NeededBytes), on CUDA devices with `host_bytes` of the host's memory beside it; none found: no
// value. Tried: other numbers of blocks on each pipeline stage; alone and together: recomputation,
// of as many blocks as it takes; higher stages of ZeRO; smaller micro-batches; more tensor and
// pipeline parallelism at the expense of data parallelism; on CUDA devices quarters of the
// optimizer's state on the host. Estimates order the choices; they are not measurements: recompute
// selective 2 %, full 30 %; ZeRO-3 5 %; each halved micro-batch 4 %; each doubled tensor degree
// 8 %; pipelines their bubble; offload 3 % and half of what the host takes for it.
std::optional<Change> CheapestFit(const v1::JobSpec& spec, int64_t bytes,
                                  int64_t host_bytes = std::numeric_limits<int64_t>::max());

// Other numbers of blocks on the stages of a pipeline, with which its largest rank takes the least,
// as evenly in work as that goes; no value where memory is even, or that saves less than 5 %.
std::optional<Change> EvenMemory(const v1::JobSpec& spec, const JobPlan& plan);
// "engine.parallel.pipeline_blocks=[9,7] would even it: 61.20 GiB for the largest rank, about 3 %
// slower by estimate".
std::string EvenText(const Change& change);

// "engine.training.recompute=selective would fit: 71.20 GiB for the largest rank, about 2 %
// slower", or that nothing was found and what is left to do.
std::string AdviceText(const std::optional<Change>& change);

std::string BytesText(int64_t bytes);  // "71.20 GiB"

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_JOB_PLAN_H_
