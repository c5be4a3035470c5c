// What a rank sends in a training step, along every axis: the formulas of the methods.
#ifndef MUSTER_PARALLEL_TRAIN_VOLUME_H_
#define MUSTER_PARALLEL_TRAIN_VOLUME_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "parallel/model/model.h"
#include "parallel/train/memory.h"

namespace muster::parallel {

// Bytes of one rank and step, by the group that they travel in. Not counted: the numbers that a
// step exchanges between all ranks (losses, norms, stop votes), checkpoints and evaluations.
struct StepVolume {
  int64_t pipeline = 0;  // outputs and gradients between stages, and a tied table's gradient
  int64_t context = 0;   // attention over sequences that ranks share
  int64_t tensor = 0;    // hidden states, losses, and gradients of what sees some rows only
  int64_t keys = 0;      // gradients of key/value heads that tensor ranks share
  // Reduced within a shard group and between its replicas. Compressed ones are exchanged among all
  // of these ranks at once: the shard group's where ZeRO shards, else the replicas'.
  int64_t gradients = 0;
  int64_t replicas = 0;
  int64_t parameters = 0;  // gathered within a shard group

  int64_t total() const {
    return pipeline + context + tensor + keys + gradients + replicas + parameters;
  }
};

// Of a ring: an all-gather or reduce-scatter of n bytes over k ranks is n (k - 1) / k for each, an
// all-reduce twice that; on the host, where parts are whole cache lines and a small one goes to
// everybody at once, that of the rank (AllReduceBytes). What ranks send is that to the byte; with
// compressed gradients in a step after the warm-up. `part`: what place.model was made with.
// Requires: as PredictMemory.
StepVolume PredictVolume(const TrainerPlace& place, const ModelParallel& part,
                         kernels::DeviceKind device);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_VOLUME_H_
