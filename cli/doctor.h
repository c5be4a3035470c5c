// `muster doctor`: whether this machine is fit to run a worker or a coordinator. Facts are gathered
// apart from what is said about them, so that tests can make up machines.
#ifndef MUSTER_CLI_DOCTOR_H_
#define MUSTER_CLI_DOCTOR_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/network.h"
#include "cli/output.h"
#include "security/accounts.h"
#include "security/tls_files.h"

namespace muster::cli {

// What a machine is like. Sizes are in bytes.
struct MachineFacts {
  // GPUs and what ranks on them load.
  absl::StatusOr<std::string> driver = absl::NotFoundError("no driver");  // its version
  int cuda = 0;  // that the driver supports, 13000 for 13.0
  int gpus = 0;
  std::map<std::string, absl::Status> libraries;  // by name

  // Limits; -1 = none.
  int64_t open_files_max = -1;
  int64_t locked_memory_max = -1;

  absl::StatusOr<int64_t> shared_memory = 0;  // size of /dev/shm, which can be written to

  // The disk under the directory that was asked about.
  std::string directory;
  absl::StatusOr<absl::Duration> sync = absl::ZeroDuration();  // median of writes of 4 KiB
  int64_t disk_free = 0;
  int64_t disk_size = 0;

  bool clock_synchronized = true;
  std::string host;
  std::vector<std::string> host_addresses;  // of its own name; empty: not found
  std::string outside_address;              // at which others reach it; empty: none

  // What was asked about; empty and absent: nothing. Ports, each with why it cannot be listened on.
  std::string ports;
  std::map<int, absl::Status> taken_ports;
  // That the kernel gives to outgoing connections, both ends included.
  PortRange ephemeral_ports;
  std::optional<absl::StatusOr<std::map<std::string, security::Validity>>> tls;  // by flag
  std::string job_user;                                                          // --job-user
  absl::Status job_user_state;  // whether a daemon of this user may run ranks so
  absl::Time now;

  // Absent: none was named.
  std::optional<absl::StatusOr<std::string>> coordinator;  // its version
  std::string coordinator_address;
  std::string version;  // of this program
};

struct DoctorOptions {
  std::string directory;             // whose disk is timed, by writing to it
  std::string ports;                 // "7600,9070,20000-20999": to listen on; empty: none
  security::TlsFiles tls;            // none: not looked at
  security::JobUserPolicy job_user;  // none: not looked at
};

// Looks at this machine. What needs the coordinator is left to the caller. kInvalidArgument:
// `ports` is no such list.
absl::StatusOr<MachineFacts> GatherFacts(const DoctorOptions& options);

struct Finding {
  enum class Level { kOk, kWarning, kError } level;
  std::string check;   // one word
  std::string found;   // what is
  std::string remedy;  // how to mend it; empty when all is well
};

// One finding for each check, in a fixed order.
std::vector<Finding> Examine(const MachineFacts& facts);

// Prints them. kFailedPrecondition when one is an error.
absl::Status Report(const std::vector<Finding>& findings, Format format, Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_DOCTOR_H_
