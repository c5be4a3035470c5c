// Relays requests for what a rank leaves at its worker (its log, collectives, traces of steps) to
// the daemon that has it, and the replies back.
#ifndef MUSTER_COORDINATOR_LOG_RELAY_H_
#define MUSTER_COORDINATOR_LOG_RELAY_H_

#include <cstdint>
#include <map>
#include <variant>

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

  // Sends `request` to the worker that has the rank's log; `request.request` is filled in here.
  // Answers `call` with the reply. kNotFound: nothing is known of that attempt. kUnavailable: the
  // worker is not connected, disconnects, or does not reply within kLogReplyTimeout. Other codes
  // are the daemon's.
  void Ask(v1::LogRequest request, PendingCall<v1::LogReply> call);
  void Ask(v1::CollectivesRequest request, PendingCall<v1::CollectivesReply> call);
  void Ask(v1::ProfileRequest request, PendingCall<v1::ProfileReply> call);

  // True when `message` is a reply to Ask. One that nobody waits for, or of another kind than what
  // was asked for, is ignored.
  bool TakeReply(SessionId session, v1::FromWorker& message);
  void OnSessionClosed(SessionId session);

 private:
  using AnyCall = std::variant<PendingCall<v1::LogReply>, PendingCall<v1::CollectivesReply>,
                               PendingCall<v1::ProfileReply>>;
  struct Waiting {
    SessionId session;
    AnyCall call;
  };

  // Fills in and sends the request `put(message)` of that rank.
  template <typename Request, typename Reply, typename Put>
  void Send(Request request, PendingCall<Reply> call, Put put);
  template <typename Reply>
  void OnReply(SessionId session, Reply reply);
  void Fail(const AnyCall& call, const absl::Status& status);

  const Core& core_;
  Sessions& sessions_;
  PendingCalls& calls_;
  Loop& loop_;
  uint64_t next_request_ = 1;
  std::map<uint64_t, Waiting> waiting_;  // by the number in the request
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_LOG_RELAY_H_
