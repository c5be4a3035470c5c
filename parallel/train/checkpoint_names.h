// What a training checkpoint calls things, shared by those who write and read it.
#ifndef MUSTER_PARALLEL_TRAIN_CHECKPOINT_NAMES_H_
#define MUSTER_PARALLEL_TRAIN_CHECKPOINT_NAMES_H_

#include "parallel/checkpoint/checkpoint.h"
#include "parallel/model/model.h"

namespace muster::parallel {

// Parameters are saved under their own names, AdamW's moments behind these.
inline constexpr char kFirstMomentPrefix[] = "optimizer.m.";
inline constexpr char kSecondMomentPrefix[] = "optimizer.v.";
// Of compressed gradients, per parameter: what each rank that gradients are averaged over has not
// sent yet, and the momentum of it. Their first dimension is the rank.
inline constexpr char kResidualPrefix[] = "optimizer.residual.";
inline constexpr char kResidualMomentumPrefix[] = "optimizer.residual_momentum.";

// Keys of CheckpointState.integers.
inline constexpr char kSeedKey[] = "seed";
// Updates of the optimizer: the step less those that fp16 skipped.
inline constexpr char kUpdatesKey[] = "optimizer.updates";
// Dynamic loss scaling (kernels::StepState); the scale itself is in CheckpointState.numbers.
inline constexpr char kLossScaleKey[] = "loss_scale";
inline constexpr char kCleanStepsKey[] = "loss_scale.clean_steps";
inline constexpr char kHysteresisKey[] = "loss_scale.hysteresis";
inline constexpr char kDataFingerprintKey[] = "data.fingerprint";  // Sampler::fingerprint()

void WriteDescription(const ModelDescription& description, CheckpointState& state);
// What WriteDescription left: texts["model.family"], integers["model.<size>"] and
// ["model.flag.<flag>"], numbers["model.<number>"].
ModelDescription ReadDescription(const CheckpointState& state);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_CHECKPOINT_NAMES_H_
