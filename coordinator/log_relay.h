// Relays requests for bytes of a rank's log to the daemon that has the log, and its replies back.
#ifndef MUSTER_COORDINATOR_LOG_RELAY_H_
#define MUSTER_COORDINATOR_LOG_RELAY_H_

#include <cstdint>
#include <map>
#include <memory>

#include "base/loop.h"
#include "coordinator/core/core.h"
#include "coordinator/pending_calls.h"
#include "coordinator/sessions.h"

namespace muster::coordinator {

// Thread: the loop that the core runs on. Everything that it is given outlives it.
class LogRelay {
 public:
  LogRelay(const Core& core, Sessions& sessions, PendingCalls& calls, Loop& loop)
      : core_(core), sessions_(sessions), calls_(calls), loop_(loop) {}

  // Sends `request` to the worker that has the log; `request.request` is filled in here. Answers
  // `call` once the reply is in `*reply`. kNotFound: nothing is known of that attempt.
  // kUnavailable: the worker is not connected, disconnects, or does not reply within
  // kLogReplyTimeout. Other codes are the daemon's.
  void Ask(v1::LogRequest request, CallId call, std::shared_ptr<v1::LogReply> reply);
  // A reply that nobody waits for is ignored.
  void OnReply(SessionId session, v1::LogReply reply);
  void OnSessionClosed(SessionId session);

 private:
  struct Waiting {
    SessionId session;
    CallId call;
    std::shared_ptr<v1::LogReply> reply;
  };

  const Core& core_;
  Sessions& sessions_;
  PendingCalls& calls_;
  Loop& loop_;
  uint64_t next_request_ = 1;
  std::map<uint64_t, Waiting> waiting_;  // by LogRequest.request
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_LOG_RELAY_H_
