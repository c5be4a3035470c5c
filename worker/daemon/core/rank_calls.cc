#include "worker/daemon/core/rank_calls.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "worker/daemon/core/limits.h"

namespace muster::worker {
namespace {

bool SameNotice(const v1::RankNotice& a, const v1::RankNotice& b) {
  return a.SerializeAsString() == b.SerializeAsString();
}

}  // namespace

void RankCalls::Put(CallId call, const v1::PutRequest& request) {
  if (request.key().size() > kKeyBytesMax || request.value().size() > kValueBytesMax) {
    return outbox_.Fail(call, absl::InvalidArgumentError(absl::StrCat(
                                  "a bootstrap key has at most ", kKeyBytesMax,
                                  " bytes and its value ", kValueBytesMax, "; got ",
                                  request.key().size(), " and ", request.value().size())));
  }
  const size_t bytes = request.key().size() + request.value().size();
  if (key_value_pending() >= kKeyValueCallsMax || put_bytes_ + bytes > kKeyValueBytesMax) {
    return outbox_.Fail(call, absl::UnavailableError("too many bootstrap calls wait; try again"));
  }
  put_bytes_ += bytes;
  const uint64_t id = next_request_++;
  PendingPut& pending = puts_[id];
  pending.call = call;
  pending.put.set_request(id);
  pending.put.set_job_id(request.identity().job_id());
  pending.put.set_epoch(request.identity().epoch());
  pending.put.set_membership(request.identity().membership());
  pending.put.set_key(request.key());
  pending.put.set_value(request.value());
  if (outbox_.welcomed()) SendPut(pending);
}

void RankCalls::Get(CallId call, const v1::GetRequest& request) {
  if (request.key().size() > kKeyBytesMax) {
    return outbox_.Fail(
        call, absl::InvalidArgumentError(absl::StrCat("a bootstrap key has at most ", kKeyBytesMax,
                                                      " bytes; got ", request.key().size())));
  }
  if (key_value_pending() >= kKeyValueCallsMax) {
    return outbox_.Fail(call, absl::UnavailableError("too many bootstrap calls wait; try again"));
  }
  const GetKey key(KeyOf(request.identity()), request.key());
  PendingGet& pending = gets_[key];
  pending.calls.insert(call);
  if (pending.request != 0) return;
  pending.request = next_request_++;
  pending.membership = request.identity().membership();
  if (outbox_.welcomed()) SendGet(key, pending);
}

void RankCalls::Notify(CallId call, const v1::NotifyRequest& request) {
  if (const size_t bytes = request.ByteSizeLong(); bytes > kCheckpointBytesMax) {
    return outbox_.Fail(
        call, absl::InvalidArgumentError(absl::StrCat("a notice has at most ", kCheckpointBytesMax,
                                                      " bytes; got ", bytes)));
  }
  PendingNotice pending{call, {}};
  v1::RankNotice& notice = pending.notice;
  notice.set_job_id(request.identity().job_id());
  notice.set_epoch(request.identity().epoch());
  notice.set_rank(request.identity().rank());
  switch (request.kind_case()) {
    case v1::NotifyRequest::kDamaged:
      *notice.mutable_damaged() = request.damaged();
      break;
    case v1::NotifyRequest::kRemoved:
      *notice.mutable_removed() = request.removed();
      break;
    case v1::NotifyRequest::kEvaluation:
      *notice.mutable_evaluation() = request.evaluation();
      break;
    case v1::NotifyRequest::KIND_NOT_SET:
      return outbox_.Fail(call, absl::InvalidArgumentError("the notice is empty"));
  }
  for (auto& [request_id, known] : notices_) {
    if (known.call != CallId() || !SameNotice(known.notice, notice)) continue;
    known.call = call;
    return;
  }
  if (notices_.size() >= kNoticesMax) {
    return outbox_.Fail(call, absl::UnavailableError("too many notices wait; try again"));
  }
  const uint64_t id = next_request_++;
  const PendingNotice& kept = notices_[id] = std::move(pending);
  if (outbox_.welcomed()) SendNotice(id, kept);
}

void RankCalls::Cancel(CallId call) {
  for (auto put = puts_.begin(); put != puts_.end(); ++put) {
    if (put->second.call != call) continue;
    ErasePut(put);
    break;
  }
  for (auto& [key, pending] : gets_) pending.calls.erase(call);
  for (auto& [request, pending] : notices_) {
    if (pending.call == call) pending.call = CallId();
  }
}

void RankCalls::EndAttempt(const AttemptKey& key, absl::string_view why) {
  End(key, absl::AbortedError(absl::StrCat(ToString(key), " ", why)));
}

void RankCalls::EndMembership(const AttemptKey& key) {
  End(key, absl::UnavailableError(absl::StrCat(ToString(key), " has a new membership")));
}

void RankCalls::End(const AttemptKey& key, const absl::Status& status) {
  for (auto put = puts_.begin(); put != puts_.end();) {
    if (KeyOf(put->second.put) == key) {
      outbox_.Fail(put->second.call, status);
      put = ErasePut(put);
    } else {
      ++put;
    }
  }
  for (auto get = gets_.begin(); get != gets_.end();) {
    if (get->first.first == key) {
      for (const CallId call : get->second.calls) outbox_.Fail(call, status);
      get = gets_.erase(get);
    } else {
      ++get;
    }
  }
}

void RankCalls::SendAll() {
  for (const auto& [request, pending] : puts_) SendPut(pending);
  for (const auto& [key, pending] : gets_) SendGet(key, pending);
  for (const auto& [request, pending] : notices_) SendNotice(request, pending);
}

void RankCalls::Answer(const v1::KeyValueReply& reply) {
  const absl::Status status(static_cast<absl::StatusCode>(reply.status_code()),
                            reply.status_message());
  if (auto notice = notices_.find(reply.request()); notice != notices_.end()) {
    outbox_.Reply(notice->second.call, v1::NotifyResponse());
    notices_.erase(notice);
    return;
  }
  if (auto put = puts_.find(reply.request()); put != puts_.end()) {
    if (status.ok()) {
      outbox_.Reply(put->second.call, v1::PutResponse());
    } else {
      outbox_.Fail(put->second.call, status);
    }
    ErasePut(put);
    return;
  }
  for (auto get = gets_.begin(); get != gets_.end(); ++get) {
    if (get->second.request != reply.request()) continue;
    for (const CallId call : get->second.calls) {
      if (status.ok()) {
        v1::GetResponse response;
        response.set_value(reply.value());
        outbox_.Reply(call, std::move(response));
      } else {
        outbox_.Fail(call, status);
      }
    }
    gets_.erase(get);
    return;
  }
}

std::vector<AttemptKey> RankCalls::KeyValueAttempts() const {
  std::vector<AttemptKey> keys;
  for (const auto& [request, pending] : puts_) keys.push_back(KeyOf(pending.put));
  for (const auto& [key, pending] : gets_) keys.push_back(key.first);
  return keys;
}

std::map<uint64_t, RankCalls::PendingPut>::iterator RankCalls::ErasePut(
    std::map<uint64_t, PendingPut>::iterator put) {
  put_bytes_ -= put->second.put.key().size() + put->second.put.value().size();
  return puts_.erase(put);
}

void RankCalls::SendPut(const PendingPut& put) {
  v1::FromWorker message;
  *message.mutable_put() = put.put;
  outbox_.Send(std::move(message));
}

void RankCalls::SendGet(const GetKey& key, const PendingGet& get) {
  v1::FromWorker message;
  message.mutable_get()->set_request(get.request);
  message.mutable_get()->set_job_id(key.first.job.value());
  message.mutable_get()->set_epoch(key.first.epoch.value());
  message.mutable_get()->set_membership(get.membership);
  message.mutable_get()->set_key(key.second);
  outbox_.Send(std::move(message));
}

void RankCalls::SendNotice(uint64_t request, const PendingNotice& pending) {
  v1::FromWorker notice;
  *notice.mutable_notice() = pending.notice;
  outbox_.Send(std::move(notice));
  v1::FromWorker get;
  get.mutable_get()->set_request(request);
  get.mutable_get()->set_job_id(pending.notice.job_id());
  get.mutable_get()->set_epoch(pending.notice.epoch());
  outbox_.Send(std::move(get));
}

}  // namespace muster::worker
