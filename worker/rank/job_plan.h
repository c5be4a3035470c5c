// What a job will take, rank by rank, predicted from its spec before anything is started: memory,
// work, bytes sent and the idle time of the pipeline.
//
// Every spec given here has its defaults and is valid. Looks at no file: without the data sets, the
// results of a long evaluation (8 bytes for each of its micro-batches) are not counted.
#ifndef MUSTER_WORKER_RANK_JOB_PLAN_H_
#define MUSTER_WORKER_RANK_JOB_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "muster/v1/spec.pb.h"
#include "parallel/mesh/mesh.h"
#include "parallel/train/memory.h"
#include "parallel/train/volume.h"

namespace muster::worker {

// A set of ranks that need the same: the data- and context-parallel ranks of one pipeline stage and
// of the tensor ranks with equal shares.
struct RankPlan {
  int pipeline = 0;    // stage
  int tensor = 0;      // the first of the tensor ranks
  int ranks = 0;       // how many ranks the set has
  int first_rank = 0;  // the first of them, numbered as in the job
  // Transformer blocks on this stage, and whether it has the embedding and the head.
  int blocks = 0;
  bool embedding = false, head = false;
  int64_t parameters =
      0;  // elements that the rank's part of the model has, before ZeRO shards them
  parallel::MemoryUse memory;
  parallel::StepVolume sent;  // by each of the ranks in a step
  // Elements that ZeRO 2 and 3 leave whole on every rank, but for the optimizer's state.
  struct Whole {
    int64_t tables = 0;  // of embedding and head, where they are tied
    int64_t keys = 0;    // of key/value heads that several tensor ranks share
    int64_t small = 0;   // tensors below resident_elements, and norms whose gradients the tensor
                         // group sums
    int64_t total() const { return tables + keys + small; }
  };
  Whole whole;
  // The shares of its tensor group differ too much for buffers of one size on all of its ranks:
  // exchanges go through NCCL instead of peer memory (parallel/train/memory.h, MostOfEach).
  bool too_uneven = false;
};

struct JobPlan {
  kernels::DeviceKind device = kernels::DeviceKind::kCpu;
  parallel::PerAxis degrees{1, 1, 1, 1};
  std::vector<RankPlan> ranks;  // by stage, then by tensor rank; never empty after PlanJob
  int64_t parameters = 0;       // elements of the whole model
  int64_t flops_per_token = 0;  // forward and backward, without recomputation
  int64_t tokens_per_step = 0;
  int64_t micro_batches = 0;  // per rank and step
  // Share of a step's time, without communication, that pipeline stages are idle, 0 to 1; 0 without
  // a pipeline.
  double bubble = 0;

  // NeededBytes of the rank that needs most, and its set.
  int64_t needed_bytes() const;
  const RankPlan& largest() const;
  // Of the host's memory, of the rank that takes most of it.
  int64_t host_bytes() const;
  // needed_bytes over the mean of all ranks, less 1.
  double imbalance() const;
};

// The bytes that must be free on a rank's device; on a CPU device that includes its host buffers.
int64_t NeededBytes(const parallel::MemoryUse& use, kernels::DeviceKind device);

// NeededBytes of the rank at `coordinate`; with `blocks`, as if its stage held these blocks. Status
// codes as PlanJob.
absl::StatusOr<int64_t> RankBytes(const v1::JobSpec& spec, const parallel::PerAxis& coordinate,
                                  std::optional<parallel::BlockRange> blocks = std::nullopt);

// kInvalidArgument, marked with FailureDomain configuration, as SplitOf and PartOf (engine_spec.h).
// Takes milliseconds for any size of model, because no parameter is allocated.
absl::StatusOr<JobPlan> PlanJob(const v1::JobSpec& spec);

// "71.20 GiB" or "512.0 MiB".
std::string BytesText(int64_t bytes);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_JOB_PLAN_H_
