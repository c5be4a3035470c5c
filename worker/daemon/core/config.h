// What the daemon's core is told once, when it is made.
#ifndef MUSTER_WORKER_DAEMON_CORE_CONFIG_H_
#define MUSTER_WORKER_DAEMON_CORE_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "base/ids.h"
#include "muster/v1/session.pb.h"

namespace muster::worker {

struct DaemonCoreConfig {
  // Who this daemon is and what it offers: all but cluster_id, history_id, leader_term, identity,
  // protocol_version and observed. The core changes its addresses and what is unusable of its
  // devices.
  v1::Hello hello;
  // Both are used by the first daemon of a state directory; later ones take the stored identity and
  // the stored incarnation plus 1.
  std::string new_identity;
  Incarnation first_incarnation = Incarnation(1);
  // Copied into each RankAssignment.
  std::string rank_socket;
  std::string cache_directory;     // where ranks keep what later ranks can use
  std::string attempts_directory;  // run directories are ATTEMPTS/<job id>.e<epoch>/rank-<n>
  int32_t threads_per_slot = 1;    // for a spec that asks for 0 threads
  bool mps = false;                // ranks that share a GPU are clients of its MPS server
  std::string rank_metrics_address = "127.0.0.1:0";  // HOST:0, each rank gets a port of its own
  v1::MetricsTls rank_metrics_tls;                   // empty: plain HTTP
  std::string rank_ports;                            // "20000-20999"; empty = any

  // Until Welcome says otherwise.
  absl::Duration heartbeat_interval = absl::Milliseconds(500);
  // Progress alone (steps, loss) is reported at most this often; state changes at once.
  absl::Duration progress_interval = absl::Milliseconds(200);
  // A session without Welcome for this long is dropped and dialled again.
  absl::Duration welcome_timeout = absl::Seconds(5);
  // A checkpoint commit without a verdict is sent again this often.
  absl::Duration commit_resend_interval = absl::Seconds(5);
  // From SIGTERM to SIGKILL when Desired does not say.
  absl::Duration stop_grace = absl::Seconds(10);
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_CORE_CONFIG_H_
