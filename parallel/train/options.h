// How a rank trains: everything of a job's spec that the training engine needs to know, but for the
// model, the mesh and the data.
#ifndef MUSTER_PARALLEL_TRAIN_OPTIONS_H_
#define MUSTER_PARALLEL_TRAIN_OPTIONS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/peer_memory.h"
#include "parallel/optim/gradient_compressor.h"
#include "parallel/optim/optimizer.h"
#include "parallel/optim/schedule.h"
#include "parallel/pipeline/schedule.h"

namespace muster::parallel {

// What the model computes in. Master weights, optimizer state, gradients of parameters and the loss
// are fp32 in all of them.
enum class Precision {
  kFp32,
  kTf32,  // fp32 whose GEMMs round operands to 10 bits of mantissa: CUDA only, set on the device
  kBf16,  // CUDA only
  kFp16,  // CUDA only; with dynamic loss scaling
};

// The same on every rank of a job. Trainer::Make checks it.
struct TrainerOptions {
  int64_t steps = 0;
  int64_t global_batch = 0;  // samples per step; a multiple of micro_batch x data-parallel ranks
  int64_t micro_batch = 0;   // samples
  uint64_t seed = 0;         // of the initial weights and of dropout masks
  AdamWConfig optimizer;
  Schedule schedule;
  int64_t bucket_bytes = 4 << 20;
  bool overlap = true;  // collectives run while the model computes
  // A job of one rank records its micro-batches and updates and replays them as a whole
  // (kernels/device/replay.h) where the device can record. Nothing is recorded with ZeRO 2 and 3 or
  // with an offloaded optimizer, whose memory changes from micro-batch to micro-batch.
  bool record = true;
  Precision precision = Precision::kFp32;
  kernels::LossScaling loss_scaling;  // fp16 only; kept constant unless `dynamic`
  // What gradients are sent as: kF32, or kBF16 with sums in fp32.
  kernels::DType gradient_wire = kernels::DType::kF32;
  // A rank adds its micro-batches one after the other into one buffer, not in the order that is the
  // same for every layout (GradientReducerOptions::chained).
  bool chain_micro_batches = false;
  // Sends only part of every gradient. Requires ZeRO 0 or 1, gradient_wire fp32 and another
  // precision than fp16; works on CPU and on CUDA devices.
  CompressionOptions compression;
  // Stage of ZeRO, 0 to 3, over the shard group of the MeshGroups.
  int zero = 0;
  // Used where the mesh has a pipeline axis. The model then has the layers of this rank's stage.
  PipelineSchedule pipeline_schedule = PipelineSchedule::kOneForwardOneBackward;
  bool reshard_after_forward = true;    // ZeRO-3: frees a block after forward and gathers it again
  int64_t resident_elements = 100'000;  // ZeRO-3: parameters with fewer elements stay whole
  // Registers the memory of collectives with Communicator::Share.
  bool copy_engines = true;
  int64_t copy_engines_least_bytes = ShareOptions().least_bytes;
  // How the computing stream waits for tensor and context collectives that run beside it
  // (Communicator::WaitInWarp). TensorOverlap::kChunked always waits in a warp.
  bool waits_in_warp = false;
  // NcclOptions::thread_blocks_max of the communicators; only the prediction of memory reads it.
  int nccl_thread_blocks = 0;
  // Share, 0 to 1, of master weights and optimizer state that is kept and updated on the host.
  double offload_optimizer = 0;
  // Threads of the host that this rank may use (resources.threads_per_rank): for the offloaded
  // update and for drawing initial weights.
  int host_threads = 1;
  // Compares what several ranks hold (replica_check.h) every so many steps and after the last one;
  // 0: never.
  int64_t verify_every = 0;
  int64_t evaluate_every = 0;      // steps; 0: only after the last one
  int64_t evaluate_samples = 0;    // 0: the whole validation set
  std::string checkpoint_root;     // empty: no checkpoints
  int64_t checkpoint_every = 0;    // steps; > 0 with a root
  int checkpoint_keep = 2;         // committed checkpoints that are not removed
  bool checkpoint_on_stop = true;  // saves when asked to stop
  // Written beside the shards of every checkpoint (CheckpointState::files).
  std::map<std::string, std::string> checkpoint_files;
  // By rank, the lowest rank that writes into the same directory (SaveCheckpoint); empty: all ranks
  // share one directory.
  std::vector<int> checkpoint_groups;
  // How often ranks tell each other how far they are while they read or write checkpoints
  // (control_channel.h). Far below the time limit of a collective.
  absl::Duration control_interval = absl::Seconds(1);
  JobId job;  // part of the names of checkpoints, as is the epoch
  Epoch epoch;
  uint32_t membership = 1;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_OPTIONS_H_
