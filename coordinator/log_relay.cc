#include "coordinator/log_relay.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/limits.h"

namespace muster::coordinator {

void LogRelay::Ask(v1::LogRequest request, CallId call, std::shared_ptr<v1::LogReply> reply) {
  const absl::StatusOr<WorkerId> worker =
      core_.LogHolder(JobId(request.job_id()), Epoch(request.epoch()), request.rank());
  if (!worker.ok()) return calls_.Answer(call, worker.status());
  const uint64_t number = next_request_++;
  request.set_request(number);
  const std::string log = absl::StrCat("the log of rank ", request.rank(), " of job ",
                                       request.job_id(), " is on worker ", worker->value());
  const std::optional<SessionId> session = core_.SessionOf(*worker);
  v1::FromCoordinator message;
  *message.mutable_log() = std::move(request);
  if (!session.has_value() || !sessions_.Send(*session, std::move(message))) {
    return calls_.Answer(call, absl::UnavailableError(absl::StrCat(
                                   log, ", which is not connected; see `muster get workers`")));
  }
  waiting_[number] = {*session, call, std::move(reply)};
  loop_.PostAfter(kLogReplyTimeout, [this, number, log] {
    const auto waiting = waiting_.extract(number);
    if (waiting.empty()) return;
    calls_.Answer(waiting.mapped().call,
                  absl::UnavailableError(absl::StrCat(log, ", which did not answer within ",
                                                      absl::FormatDuration(kLogReplyTimeout))));
  });
}

void LogRelay::OnReply(SessionId session, v1::LogReply reply) {
  const auto found = waiting_.find(reply.request());
  if (found == waiting_.end() || found->second.session != session) return;
  const Waiting waiting = std::move(found->second);
  waiting_.erase(found);
  if (reply.status_code() != 0) {
    return calls_.Answer(
        waiting.call,
        absl::Status(static_cast<absl::StatusCode>(reply.status_code()), reply.status_message()));
  }
  *waiting.reply = std::move(reply);
  calls_.Answer(waiting.call, JobReply{});
}

void LogRelay::OnSessionClosed(SessionId session) {
  for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
    if (waiting->second.session != session) {
      ++waiting;
      continue;
    }
    const CallId call = waiting->second.call;
    waiting = waiting_.erase(waiting);
    calls_.Answer(call,
                  absl::UnavailableError("the worker that holds the log has disconnected; retry"));
  }
}

}  // namespace muster::coordinator
