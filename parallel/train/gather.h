// Texts of unequal length, from every rank to every rank.
#ifndef MUSTER_PARALLEL_TRAIN_GATHER_H_
#define MUSTER_PARALLEL_TRAIN_GATHER_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "parallel/comm/communicator.h"

namespace muster::parallel {

// Collective; blocks the host. For small texts (records, names): allocates. The result is in rank
// order. Status codes: those of the communicator.
absl::StatusOr<std::vector<std::string>> GatherText(Communicator& communicator,
                                                    kernels::Device& device,
                                                    kernels::Stream& stream,
                                                    const std::string& text);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_GATHER_H_
