#include "worker/daemon/core/outbox.h"

#include "base/check.h"

namespace muster::worker {

void Outbox::Begin(absl::Time now, DaemonOutput* output) {
  now_ = now;
  output_ = output;
}

void Outbox::OpenSession(SessionId session) {
  session_ = session;
  welcomed_ = false;
}

void Outbox::CloseSession() {
  session_.reset();
  welcomed_ = false;
}

void Outbox::Write(std::string name, std::optional<std::string> value) {
  output_->records.push_back({std::move(name), std::move(value)});
}

void Outbox::Send(v1::FromWorker message) {
  CHECK(session_.has_value());
  message.set_incarnation(incarnation_.value());
  Act(SendToCoordinator{*session_, std::move(message)});
}

void Outbox::Reply(CallId call, RankResponse response) {
  if (call == CallId()) return;
  Act(ReplyToRank{call, std::move(response)});
}

void Outbox::Fail(CallId call, absl::Status status) {
  if (call == CallId()) return;
  Act(ReplyToRank{call, std::move(status)});
}

}  // namespace muster::worker
