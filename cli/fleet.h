// Commands for the workers of a cluster: cordon, uncordon, forgive, drain, reserve.
#ifndef MUSTER_CLI_FLEET_H_
#define MUSTER_CLI_FLEET_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

struct FleetOptions {
  std::vector<std::string> workers;
  std::string reason;
  std::string timeout;  // of Drain: "10m"; empty = the coordinator's default
};
absl::Status Cordon(CoordinatorClient& client, const FleetOptions& options, Format format,
                    Terminal& terminal);
absl::Status Forgive(CoordinatorClient& client, const FleetOptions& options, Format format,
                     Terminal& terminal);
absl::Status Uncordon(CoordinatorClient& client, const FleetOptions& options, Format format,
                      Terminal& terminal);
absl::Status Drain(CoordinatorClient& client, const FleetOptions& options, Format format,
                   Terminal& terminal);

struct ReserveOptions {
  std::string name;
  std::vector<std::string> workers;  // "w1", or "w1/cuda:0" for one of its devices
  std::string queue;
  std::string label;  // "team=vision"
  std::string owner;
  std::string for_time;  // "2h"
  bool end = false;      // ends the reservation instead
};
absl::Status Reserve(CoordinatorClient& client, const ReserveOptions& options, absl::Time now,
                     Format format, Terminal& terminal);
absl::Status GetReservations(CoordinatorClient& client, Format format, Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_FLEET_H_
