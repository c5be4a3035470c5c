// The address at which other machines reach the ranks of this worker: by the daemon's flags, else
// by the route to the coordinator.
#ifndef MUSTER_WORKER_DAEMON_NETWORK_H_
#define MUSTER_WORKER_DAEMON_NETWORK_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/network.h"

namespace muster::worker {

// At most one of the two is given; with neither the route to the coordinator decides.
struct AddressChoice {
  std::string address;    // --address
  std::string interface;  // --interface: a name, a network such as 10.0.0.0/8, or an address
};

struct WorkerAddress {
  std::string address;          // v1::Hello.address
  std::string outside_address;  // v1::Hello.outside_address
};

// Finds the addresses for the Hello to `coordinator` (HOST:PORT). kInvalidArgument: a flag
// names no address of this machine, the message lists what there is. kUnavailable: the
// coordinator's name does not resolve, or no route leads there.
absl::StatusOr<WorkerAddress> FindAddress(const NetworkView& network, const AddressChoice& choice,
                                          const std::string& coordinator);

// Checks that `text` is empty or a range of ports above 1023, such as 20000-20999, with two for
// each of `ranks` ranks: for its peers and for its metrics. kInvalidArgument says what is wrong.
absl::Status CheckPortRange(const std::string& text, int ranks);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_NETWORK_H_
