// How many bytes a rank sends in a training step along every axis, by the formulas of the methods.
#ifndef MUSTER_PARALLEL_TRAIN_VOLUME_H_
#define MUSTER_PARALLEL_TRAIN_VOLUME_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "parallel/model/model.h"
#include "parallel/train/memory.h"

namespace muster::parallel {

// Bytes of one rank and step, by the group that they are sent in. Not counted: the numbers that all
// ranks exchange in a step (losses, norms, stop votes), checkpoints and evaluations.
struct StepVolume {
  int64_t pipeline = 0;  // outputs and gradients between stages, and a tied table's gradient
  int64_t context = 0;   // attention over sequences that are cut over ranks
  int64_t tensor = 0;    // hidden states, losses, and norms' gradients with sequence parallelism
  int64_t keys = 0;      // gradients of key/value heads that tensor ranks share
  // Gradients are reduced within a shard group and between its replicas. Compressed gradients are
  // exchanged among all of these ranks at once, and counted as `gradients` where ZeRO shards, else
  // as `replicas`.
  int64_t gradients = 0;
  int64_t replicas = 0;
  int64_t parameters = 0;  // gathered within a shard group

  int64_t total() const {
    return pipeline + context + tensor + keys + gradients + replicas + parameters;
  }
};

// In a ring, an all-gather or reduce-scatter of n bytes over k ranks sends n (k - 1) / k from each
// rank, an all-reduce twice that. The host's all-reduce of fp32 cuts at cache lines and sends small
// data to all ranks at once; it is counted by AllReduceBytes, exactly. With compressed gradients
// the step is one after the warm-up. `part` is what place.model was made with. Requires: as
// PredictMemory.
StepVolume PredictVolume(const TrainerPlace& place, const ModelParallel& part,
                         kernels::DeviceKind device);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_VOLUME_H_
