// Small host data between ranks, on top of any Communicator.
#ifndef MUSTER_PARALLEL_COMM_GATHER_TEXTS_H_
#define MUSTER_PARALLEL_COMM_GATHER_TEXTS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "parallel/comm/communicator.h"

namespace muster::parallel {

// Every rank's text, in rank order, on every rank. Blocks the host. Status codes: those of the
// communicator.
absl::StatusOr<std::vector<std::string>> GatherTexts(Communicator& communicator,
                                                     kernels::Stream& stream,
                                                     const std::string& text);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_GATHER_TEXTS_H_
