#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/pull_stream.h"
#include "coordinator/rpc/streams.h"
#include "proto/job_state.h"

namespace muster::coordinator {
namespace {

// Reads one rank's log through its worker, kLogChunkBytes at a time. With `follow` it goes on with
// the log of the next attempt when that of an attempt is closed, and ends with the job.
class LogStream : public PullStream<v1::LogChunk> {
 public:
  LogStream(Shell& shell, const v1::GetLogsRequest& request, absl::StatusOr<Permit> permit)
      : PullStream(shell, "GetLogs", std::move(permit)),
        request_(request),
        epoch_(request.epoch()) {}

 private:
  absl::Status OnOpen(const std::shared_ptr<const v1::Job>& job) override {
    id_ = job->id();
    RETURN_IF_ERROR(CheckRank(*job, request_.rank()));
    if (request_.tail_bytes() < 0)
      return absl::InvalidArgumentError(
          absl::StrCat("tail_bytes: ", request_.tail_bytes(), " is negative"));
    if (epoch_ > job->epoch()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "epoch: ", epoch_, " of job ", id_, " is not there yet; the newest is ", job->epoch()));
    }
    if (job->epoch() == 0 && !request_.follow()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job ", id_, " has not started; `muster explain ", job->name(), "` says why it waits"));
    }
    if (request_.has_since() && request_.tail_bytes() > 0) {
      return absl::InvalidArgumentError("since: not with tail_bytes");
    }
    if (epoch_ == 0) epoch_ = job->epoch();
    offset_ = -request_.tail_bytes();
    by_time_ = request_.has_since();
    return absl::OkStatus();
  }

  Step Next(v1::LogChunk* message, absl::Status* status) override {
    if (asking_ || pausing_) return Step::kWait;
    if (reply_.has_value()) {
      const absl::StatusOr<v1::LogReply> reply = *std::exchange(reply_, std::nullopt);
      if (!reply.ok()) return AfterError(reply.status(), status);
      by_time_ = false;  // from here on the offset tells
      at_end_ = reply->end();
      closed_ = reply->closed() && reply->end();
      offset_ = reply->offset() + static_cast<int64_t>(reply->data().size());
      if (!reply->data().empty()) {
        message->set_epoch(epoch_);
        message->set_rank(request_.rank());
        message->set_offset(reply->offset());
        message->set_data(reply->data());
        *message->mutable_marks() = reply->marks();
        return Step::kSend;
      }
    }
    if (!at_end_) return Ask();
    if (!request_.follow()) return Step::kEnd;
    if (!closed_) return AskAgainAfter(kLogFollowInterval);
    return AfterClosed();
  }

  // What follows when the attempt's log will not grow any more, or does not exist.
  Step AfterClosed() {
    if (request_.epoch() != 0) return Step::kEnd;
    const std::shared_ptr<const v1::Job> job = shell().published().Find(id_);
    if (job == nullptr) return Step::kEnd;
    if (job->epoch() > epoch_) {
      epoch_ = job->epoch();
      offset_ = 0;
      by_time_ = false;
      closed_ = false;
      return Ask();
    }
    return IsFinal(job->state()) ? Step::kEnd : Step::kWait;
  }

  // What follows when the worker's answer was an error.
  Step AfterError(const absl::Status& why, absl::Status* status) {
    const std::shared_ptr<const v1::Job> job = shell().published().Find(id_);
    const bool retryable = absl::IsUnavailable(why) || absl::IsNotFound(why);
    if (!request_.follow() || !retryable || job == nullptr) {
      *status = why;
      return Step::kEnd;
    }
    if (request_.epoch() == 0 && job->epoch() > epoch_) {
      at_end_ = closed_ = true;
      return AfterClosed();
    }
    if (IsFinal(job->state())) {
      *status = why;
      return Step::kEnd;
    }
    return AskAgainAfter(kLogRetryInterval);
  }

  Step Ask() {
    if (epoch_ == 0) {  // no attempt yet; the stream wakes when the job changes
      at_end_ = closed_ = true;
      return AfterClosed();
    }
    asking_ = true;
    at_end_ = false;
    v1::LogRequest ask;
    ask.set_job_id(id_);
    ask.set_epoch(epoch_);
    ask.set_rank(request_.rank());
    if (by_time_) {
      *ask.mutable_since() = request_.since();
    } else {
      ask.set_offset(offset_);
    }
    ask.set_length_max(kLogChunkBytes);
    shell().AskRank<v1::LogRequest, v1::LogReply>(
        std::move(ask), [self = shared_from_this()](absl::StatusOr<v1::LogReply> reply) {
          auto& stream = static_cast<LogStream&>(*self);
          stream.Post([reply = std::move(reply)](PullStream& base) mutable {
            auto& log = static_cast<LogStream&>(base);
            log.asking_ = false;
            log.reply_ = std::move(reply);
            log.Pump();
          });
        });
    return Step::kWait;
  }

  Step AskAgainAfter(absl::Duration delay) {
    pausing_ = true;
    at_end_ = false;
    shell().watch_loop().PostAfter(delay, [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self == nullptr) return;
      auto& log = static_cast<LogStream&>(*self);
      log.pausing_ = false;
      log.Pump();
    });
    return Step::kWait;
  }

  const v1::GetLogsRequest request_;
  std::string id_;
  uint64_t epoch_;        // of the attempt whose log is read; 0 = none has started
  int64_t offset_ = 0;    // of the next byte to ask for
  bool by_time_ = false;  // instead, the first byte that is as young as was asked for
  bool asking_ = false;   // a worker was asked and has not answered
  bool pausing_ = false;  // until the next question to the worker
  bool at_end_ = false;   // the last answer reached the end that the log had then
  bool closed_ = false;   // the rank has exited and its whole log was read
  std::optional<absl::StatusOr<v1::LogReply>> reply_;  // the answer, until Next() takes it
};

}  // namespace

grpc::ServerWriteReactor<v1::LogChunk>* StartLogStream(Shell& shell,
                                                       const v1::GetLogsRequest& request,
                                                       absl::StatusOr<Permit> permit) {
  const auto stream = std::make_shared<LogStream>(shell, request, std::move(permit));
  stream->Begin(request.name());
  return stream.get();
}

}  // namespace muster::coordinator
