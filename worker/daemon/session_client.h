// The daemon's end of WorkerService.Session: dials the coordinator, keeps one stream at a time, and
// dials again when it ends.
#ifndef MUSTER_WORKER_DAEMON_SESSION_CLIENT_H_
#define MUSTER_WORKER_DAEMON_SESSION_CLIENT_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/rng.h"
#include "muster/v1/session.pb.h"
#include "security/tls_files.h"
#include "worker/daemon/core/events.h"
#include "worker/daemon/network.h"

namespace muster::worker {

struct SessionClientOptions {
  // HOST:PORT, or file:PATH of a file that holds it; read again before each dial, so a coordinator
  // that comes back on another port is found.
  std::string coordinator;
  // The daemon's certificate, which names it, and the authority of the coordinator's. Empty: no
  // TLS, and only a coordinator on loopback is dialled, since it tells this machine what to run.
  // Requires: passed security::CheckClientFiles.
  security::TlsFiles tls;
  std::string server_name;  // in the coordinator's certificate; empty: the host that is dialled
  bool insecure = false;    // without TLS dial other machines, too
  // Between dials: doubles from the first to the last, with a jitter of half its length, and starts
  // over after a session that was welcomed.
  absl::Duration backoff_initial = absl::Milliseconds(50);
  absl::Duration backoff_max = absl::Seconds(1);
  // A peer that leaves bytes unacknowledged (TCP user timeout) or a ping unanswered for this long
  // is given up. It is pinged after as much silence, so a connection that the peer does not know of
  // is noticed within twice this time.
  absl::Duration dead_peer_timeout = absl::Seconds(3);
  // How long one dial may take to connect; short, so that a mended network is noticed soon.
  absl::Duration connect_timeout = absl::Seconds(2);
  // Finds this worker's addresses for a dial to the coordinator at HOST:PORT. Called on a thread of
  // its own, since it may wait for DNS. Null: Hello has none.
  std::function<absl::StatusOr<WorkerAddress>(const std::string& coordinator)> locate;
};

struct SessionEvents {
  std::function<void(SessionId, const WorkerAddress&)> up;
  std::function<void(SessionId, v1::FromCoordinator)> message;
  std::function<void(SessionId, absl::Status)> down;  // always after up
};

// Methods are called, and call the events, on the loop's thread.
class SessionClient {
 public:
  virtual ~SessionClient() = default;
  static std::unique_ptr<SessionClient> Make(SessionClientOptions options, Loop& loop, Rng rng,
                                             std::shared_ptr<Logger> log, SessionEvents events);
  // Dials now, and again after each session, until Stop.
  virtual void Start() = 0;
  // Queues the message (OutgoingQueue); drops it when the session is not the current one. A session
  // whose queue is full ends, and is dialled again.
  virtual void Send(SessionId session, v1::FromWorker message) = 0;
  // Ends the session and dials again; `down` follows.
  virtual void Reconnect(SessionId session) = 0;
  // Ends the session and dialling, and waits for that. No event follows. For any thread but the
  // loop's.
  virtual void Stop() = 0;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_SESSION_CLIENT_H_
