// The names of tensors and keys in a training checkpoint, for writing and reading it.
#ifndef MUSTER_PARALLEL_TRAIN_CHECKPOINT_NAMES_H_
#define MUSTER_PARALLEL_TRAIN_CHECKPOINT_NAMES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/checkpoint/box.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/model/model.h"

namespace muster::parallel {

// Parameters are saved under their own names, AdamW's moments behind these.
inline constexpr char kFirstMomentPrefix[] = "optimizer.m.";
inline constexpr char kSecondMomentPrefix[] = "optimizer.v.";
// Of compressed gradients, per parameter: what each rank that gradients are averaged over has not
// sent yet, and its momentum. The first dimension of these tensors is the rank.
inline constexpr char kResidualPrefix[] = "optimizer.residual.";
inline constexpr char kResidualMomentumPrefix[] = "optimizer.residual_momentum.";

inline constexpr int kOptimizerStates = 3;  // 0: parameter, 1: first moment, 2: second moment
std::string StateName(int state, const std::string& parameter);
// `state`: of GradientCompressor::state, 0: not sent, 1: its momentum.
std::string ResidualName(int state, const std::string& parameter);
// The shape of a tensor whose first dimension is `ranks` ranks, and a box in the part of one.
std::vector<int64_t> PerRank(std::vector<int64_t> shape, int64_t ranks);
Box OfRank(Box box, int64_t rank);

// Of CheckpointState.files: the file of the tokenizer that the data was made with, unchanged. None
// of models that were trained on bytes.
inline constexpr char kTokenizerFile[] = "tokenizer";

// Keys of CheckpointState.integers.
inline constexpr char kSeedKey[] = "seed";
// Updates of the optimizer: the step minus the updates that fp16 skipped.
inline constexpr char kUpdatesKey[] = "optimizer.updates";
// Dynamic loss scaling (kernels::StepState); the scale itself is in CheckpointState.numbers.
inline constexpr char kLossScaleKey[] = "loss_scale";
inline constexpr char kCleanStepsKey[] = "loss_scale.clean_steps";
inline constexpr char kHysteresisKey[] = "loss_scale.hysteresis";
inline constexpr char kDataFingerprintKey[] = "data.fingerprint";  // Sampler::fingerprint()

// Adds the description to `state`: texts["model.family"], integers["model.<size>"] and
// ["model.flag.<flag>"], numbers["model.<number>"].
void WriteDescription(const ModelDescription& description, CheckpointState& state);
ModelDescription ReadDescription(const CheckpointState& state);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_CHECKPOINT_NAMES_H_
