// Compares what several ranks must hold with the same bits.
#ifndef MUSTER_PARALLEL_TRAIN_REPLICA_CHECK_H_
#define MUSTER_PARALLEL_TRAIN_REPLICA_CHECK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "parallel/train/inputs.h"
#include "parallel/train/model_runner.h"
#include "parallel/train/rank_memory.h"

namespace muster::parallel {

// Compares checksums of parameters, master weights and moments over all ranks that hold the same
// slice of them, along whatever axis they are replicated. A collective, between steps; takes pinned
// host memory for the largest bucket meanwhile. kDataLoss (FailureDomain::kDevice) on every rank
// names the tensors that differ and the ranks that hold them; `step` is for that message.
absl::Status CheckReplicas(const TrainerInputs& inputs, RankMemory& memory, ModelRunner& runner,
                           int64_t step);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_REPLICA_CHECK_H_
