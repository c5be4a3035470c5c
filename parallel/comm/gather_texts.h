// Small host data between ranks, on top of any Communicator.
#ifndef MUSTER_PARALLEL_COMM_GATHER_TEXTS_H_
#define MUSTER_PARALLEL_COMM_GATHER_TEXTS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "parallel/comm/communicator.h"

namespace muster::parallel {

// Every rank's text, in rank order, on every rank. Blocks the host. Status codes: those of the
// communicator.
absl::StatusOr<std::vector<std::string>> GatherTexts(Communicator& communicator,
                                                     kernels::Stream& stream,
                                                     const std::string& text);
// The same on a host stream of its own.
absl::StatusOr<std::vector<std::string>> GatherTexts(Communicator& communicator,
                                                     const std::string& text);

// The same on every rank: OK where all ranks pass OK, else kUnavailable with the number and the
// message of the first rank that does not. Blocks the host. Else the communicator's status.
absl::Status AgreeOnStatus(Communicator& communicator, const absl::Status& mine);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_GATHER_TEXTS_H_
