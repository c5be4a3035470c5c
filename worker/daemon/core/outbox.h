// Where the parts of the daemon's core put what one event makes them do, and the session that
// carries their messages.
#ifndef MUSTER_WORKER_DAEMON_CORE_OUTBOX_H_
#define MUSTER_WORKER_DAEMON_CORE_OUTBOX_H_

#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/ids.h"
#include "worker/daemon/core/events.h"

namespace muster::worker {

// Thread: the core's.
class Outbox {
 public:
  // Every message carries it. To be called before the first Send.
  void SetIncarnation(Incarnation incarnation) { incarnation_ = incarnation; }

  // Begins to collect into `output` for an event at `now`, until End. The methods below that add
  // to the output may be called only in between.
  void Begin(absl::Time now, DaemonOutput* output);
  void End() { output_ = nullptr; }
  absl::Time now() const { return now_; }

  // The session: open from its SessionUp, and welcomed once the coordinator has answered Hello.
  // Before that nothing but Hello may be sent.
  void OpenSession(SessionId session);
  void CloseSession();
  void SetWelcomed() { welcomed_ = true; }
  const std::optional<SessionId>& session() const { return session_; }
  bool welcomed() const { return welcomed_; }

  void Write(std::string name, std::optional<std::string> value);
  template <typename Action>
  void Act(Action action) {
    output_->actions.push_back(std::move(action));
  }
  // Requires: a session is open.
  void Send(v1::FromWorker message);
  // Answers a rank's call; does nothing for CallId(), whose caller is gone.
  void Reply(CallId call, RankResponse response);
  void Fail(CallId call, absl::Status status);

 private:
  Incarnation incarnation_;
  std::optional<SessionId> session_;
  bool welcomed_ = false;
  absl::Time now_;
  DaemonOutput* output_ = nullptr;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_CORE_OUTBOX_H_
