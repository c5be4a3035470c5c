#include "coordinator/sessions.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/limits.h"

namespace muster::coordinator {

absl::StatusOr<SessionId> Sessions::Add(std::shared_ptr<SessionStream> stream) {
  MutexLock lock(&mutex_);
  RETURN_IF_ERROR(refusal_);
  if (streams_.size() >= kSessionsMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("more than ", kSessionsMax, " daemons are connected"));
  }
  const SessionId session(next_++);
  streams_.emplace(session, std::move(stream));
  metrics_.Sessions(streams_.size());
  return session;
}

bool Sessions::Remove(SessionId session) {
  MutexLock lock(&mutex_);
  if (streams_.erase(session) == 0) return false;
  metrics_.Sessions(streams_.size());
  return true;
}

bool Sessions::Send(SessionId session, v1::FromCoordinator message) {
  const std::shared_ptr<SessionStream> stream = Find(session);
  if (stream == nullptr) return false;
  message.set_cluster_id(leader_.cluster_id);
  message.set_history_id(leader_.history_id);
  message.set_leader_term(leader_.term);
  stream->Send(std::move(message));
  return true;
}

void Sessions::Close(SessionId session, const absl::Status& status) {
  if (const auto stream = Find(session)) stream->Close(status);
}

void Sessions::Refuse(const absl::Status& status) {
  MutexLock lock(&mutex_);
  refusal_ = status;
}

void Sessions::CloseAll(const absl::Status& status) {
  std::map<SessionId, std::shared_ptr<SessionStream>> streams;
  {
    MutexLock lock(&mutex_);
    streams = streams_;
  }
  for (const auto& [id, stream] : streams) stream->Close(status);
}

std::shared_ptr<SessionStream> Sessions::Find(SessionId session) {
  MutexLock lock(&mutex_);
  const auto found = streams_.find(session);
  return found == streams_.end() ? nullptr : found->second;
}

}  // namespace muster::coordinator
