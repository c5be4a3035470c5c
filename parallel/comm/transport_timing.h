// Times the two transports of a group's collectives on the machine at hand.
#ifndef MUSTER_PARALLEL_COMM_TRANSPORT_TIMING_H_
#define MUSTER_PARALLEL_COMM_TRANSPORT_TIMING_H_

#include <functional>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/transport_choice.h"

namespace muster::parallel {

struct TransportTiming {
  Communicator& group;  // whose calls are timed
  Communicator& host;   // the same ranks on their hosts, for barriers and for agreement
  kernels::Device& device;
  // Memory of this rank that its peers read, at least as large as on any of them; calls only read
  // it, whatever it holds. The timed sizes are those of 4, 16 and 64 MiB that fit.
  kernels::Tensor shared;
  int64_t least_bytes = 0;  // smaller sizes are not timed
  // Makes later calls of the group take this transport; UseForSums for its sums by copy engines.
  std::function<void(Transport)> force;
  std::function<void(const kernels::Tensor&)> use_for_sums;
};

// A collective of the group, blocks. The same result on every rank: of each time the slowest
// rank's. Empty where a rank has no memory to time with. Takes a little more than twice the largest
// size of device memory for as long as it runs. Status codes: those of the communicators.
absl::StatusOr<TransportTimes> TimeTransports(const TransportTiming& timing);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_TRANSPORT_TIMING_H_
