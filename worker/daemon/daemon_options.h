// What a worker daemon is told when it starts: the flags of muster-worker.
#ifndef MUSTER_WORKER_DAEMON_DAEMON_OPTIONS_H_
#define MUSTER_WORKER_DAEMON_DAEMON_OPTIONS_H_

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/metrics.h"
#include "muster/v1/rank.pb.h"
#include "proto/spec/topology_file.h"
#include "security/accounts.h"
#include "security/tls_files.h"
#include "worker/daemon/gpus.h"
#include "worker/daemon/job_files.h"
#include "worker/daemon/log_files.h"
#include "worker/daemon/network.h"

namespace muster::worker {

struct DaemonOptions {
  std::string name;         // 1-63 characters of [a-z0-9-.], unique in the cluster
  std::string coordinator;  // SessionClientOptions::coordinator
  security::TlsFiles tls;   // SessionClientOptions::tls, and what follows
  std::string tls_server_name;
  bool insecure = false;
  std::string state_directory;
  int slots = 1;  // CPU slots
  // Where to look for GPUs; no value: none are offered.
  std::optional<GpuOptions> gpus;
  bool mps = false;  // DaemonCoreConfig::mps
  std::string version;
  std::string metrics_address;     // told to the coordinator: PrometheusServer::address()
  metrics::ServerTls metrics_tls;  // of that server, and of ranks
  AddressChoice address;
  std::string rank_ports;                     // "20000-20999"; empty = any
  std::string host_id;                        // v1::Hello.host_id; empty = the machine's boot id
  std::map<std::string, std::string> labels;  // v1::Hello.labels, before those of the file
  std::string topology_file;                  // where `topology` was read, for messages
  spec::MachineTopology topology = {};        // of the file; its labels give way to `labels`
  std::string shim_binary;
  std::string rank_binary;
  std::string rank_log_format;  // ProcessHostOptions::rank_log_format
  // ProcessHostOptions::command.
  std::function<std::vector<std::string>(const v1::RankAssignment&)> rank_command;
  LogLimits log;
  JobFilePolicy files;
  security::JobUserPolicy user;
  absl::Duration stop_grace = absl::Seconds(10);
  // Called once, on the daemon's loop, for a failure that the daemon cannot go on from.
  std::function<void(absl::Status)> on_fatal;
};

// kInvalidArgument names the flag and what it allows. Ports are checked later, against the devices
// that are found (CheckPortRange).
absl::Status CheckOptions(const DaemonOptions& options);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_DAEMON_OPTIONS_H_
