// What a training checkpoint calls things, shared by those who write and read it.
#ifndef MUSTER_PARALLEL_TRAIN_CHECKPOINT_NAMES_H_
#define MUSTER_PARALLEL_TRAIN_CHECKPOINT_NAMES_H_

#include "parallel/checkpoint/checkpoint.h"
#include "parallel/model/model.h"

namespace muster::parallel {

// Parameters are saved under their own names, AdamW's moments behind these.
inline constexpr char kFirstMomentPrefix[] = "optimizer.m.";
inline constexpr char kSecondMomentPrefix[] = "optimizer.v.";

// Keys of CheckpointState.integers.
inline constexpr char kSeedKey[] = "seed";
inline constexpr char kDataFingerprintKey[] = "data.fingerprint";  // Sampler::fingerprint()

void WriteDescription(const ModelDescription& description, CheckpointState& state);
// What WriteDescription left: texts["model.family"], integers["model.<size>"].
ModelDescription ReadDescription(const CheckpointState& state);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_CHECKPOINT_NAMES_H_
