// At which address other machines reach the ranks of this worker, as the daemon's flags and the
// route to the coordinator say.
#ifndef MUSTER_WORKER_DAEMON_NETWORK_H_
#define MUSTER_WORKER_DAEMON_NETWORK_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/network.h"

namespace muster::worker {

// One of the two at most; both empty: the route to the coordinator decides.
struct AddressChoice {
  std::string address;    // --address
  std::string interface;  // --interface: a name, a network such as 10.0.0.0/8, or an address
};

struct WorkerAddress {
  std::string address;          // v1::Hello.address
  std::string outside_address;  // v1::Hello.outside_address
};

// The addresses to tell the coordinator at `coordinator` (HOST:PORT). kInvalidArgument: a flag
// names no address of this machine, the message lists what there is. kUnavailable: the
// coordinator's name does not resolve, or no route leads there.
absl::StatusOr<WorkerAddress> FindAddress(const NetworkView& network, const AddressChoice& choice,
                                          const std::string& coordinator);

// Whether `text` is empty or a range of ports above 1023, such as 20000-20999, with one for each of
// `ranks` ranks and for the metrics of each. kInvalidArgument.
absl::Status CheckPortRange(const std::string& text, int ranks);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_NETWORK_H_
