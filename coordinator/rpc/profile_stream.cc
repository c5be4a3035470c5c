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
#include "proto/spec/names.h"

namespace muster::coordinator {
namespace {

// Reads one rank's trace of some steps through its worker, kLogChunkBytes at a time. With `wait` it
// asks again until the rank has recorded them.
class ProfileStream : public PullStream<v1::ProfileChunk> {
 public:
  ProfileStream(Shell& shell, const v1::GetProfileRequest& request, absl::StatusOr<Permit> permit)
      : PullStream(shell, "GetProfile", std::move(permit)), request_(request) {}

 private:
  absl::Status OnOpen(const std::shared_ptr<const v1::Job>& job) override {
    id_ = job->id();
    epoch_ = job->epoch();
    const v1::ProfileSteps& asked = request_.steps();
    RETURN_IF_ERROR(CheckRank(*job, request_.rank()));
    if (asked.steps() < 1 || asked.steps() > kProfileStepsMax) {
      return absl::InvalidArgumentError(absl::StrCat("steps.steps: ", asked.steps(),
                                                     " is out of range; 1 to ", kProfileStepsMax));
    }
    if (asked.first_step() < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("steps.first_step: ", asked.first_step(), " is below 1"));
    }
    if (!job->spec().has_engine()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job ", id_, " runs a command of its own; profiles are recorded by the engine"));
    }
    // Not first_step + steps, which could overflow.
    if (asked.first_step() > job->steps() - asked.steps() + 1) {
      return absl::FailedPreconditionError(absl::StrCat("job ", id_, " ends at step ", job->steps(),
                                                        ", before ", asked.steps(), " steps from ",
                                                        asked.first_step(), " on"));
    }
    if (job->state() != v1::JOB_STATE_RUNNING) {
      return absl::FailedPreconditionError(absl::StrCat("job ", id_, " is ",
                                                        spec::EnumName(job->state()),
                                                        "; only one that trains has a profile"));
    }
    return absl::OkStatus();
  }

  Step Next(v1::ProfileChunk* message, absl::Status* status) override {
    if (asking_ || pausing_) return Step::kWait;
    if (!reply_.has_value()) return at_end_ ? Step::kEnd : Ask();
    absl::StatusOr<v1::ProfileReply> reply = *std::exchange(reply_, std::nullopt);
    if (!reply.ok()) return AfterError(reply.status(), status);
    if (!reply->recorded()) {
      if (!request_.wait()) return Step::kEnd;
      return AttemptGoesOn(status) ? AskAgainAfter(kLogFollowInterval) : Step::kEnd;
    }
    at_end_ = reply->end();
    offset_ = reply->offset() + static_cast<int64_t>(reply->data().size());
    if (reply->data().empty()) return at_end_ ? Step::kEnd : AskAgainAfter(kLogFollowInterval);
    *message->mutable_data() = std::move(*reply->mutable_data());
    return Step::kSend;
  }

  // False, with the status: no rank of the attempt will record anything any more.
  bool AttemptGoesOn(absl::Status* status) {
    const std::shared_ptr<const v1::Job> job = shell().published().Find(id_);
    if (job != nullptr && job->epoch() == epoch_ && !IsFinal(job->state())) return true;
    *status = absl::FailedPreconditionError(
        absl::StrCat("job ", job == nullptr ? id_ : job->name(), ": the attempt ended before rank ",
                     request_.rank(), " had recorded its steps; see muster describe job ",
                     job == nullptr ? id_ : job->name()));
    return false;
  }

  // What follows when the worker's answer was an error.
  Step AfterError(const absl::Status& why, absl::Status* status) {
    if (!request_.wait() || !absl::IsUnavailable(why)) {
      *status = why;
      return Step::kEnd;
    }
    return AttemptGoesOn(status) ? AskAgainAfter(kLogRetryInterval) : Step::kEnd;
  }

  Step Ask() {
    asking_ = true;
    v1::ProfileRequest ask;
    ask.set_job_id(id_);
    ask.set_epoch(epoch_);
    ask.set_rank(request_.rank());
    *ask.mutable_steps() = request_.steps();
    ask.set_offset(offset_);
    ask.set_length_max(kLogChunkBytes);
    shell().AskRank<v1::ProfileRequest, v1::ProfileReply>(
        std::move(ask), [self = shared_from_this()](absl::StatusOr<v1::ProfileReply> reply) {
          auto& stream = static_cast<ProfileStream&>(*self);
          stream.Post([reply = std::move(reply)](PullStream& base) mutable {
            auto& profile = static_cast<ProfileStream&>(base);
            profile.asking_ = false;
            profile.reply_ = std::move(reply);
            profile.Pump();
          });
        });
    return Step::kWait;
  }

  Step AskAgainAfter(absl::Duration delay) {
    pausing_ = true;
    shell().watch_loop().PostAfter(delay, [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self == nullptr) return;
      auto& profile = static_cast<ProfileStream&>(*self);
      profile.pausing_ = false;
      profile.Pump();
    });
    return Step::kWait;
  }

  const v1::GetProfileRequest request_;
  std::string id_;
  uint64_t epoch_ = 0;    // of the attempt that is traced
  int64_t offset_ = 0;    // of the next byte to ask for
  bool asking_ = false;   // a worker was asked and has not answered
  bool pausing_ = false;  // until the next question to the worker
  bool at_end_ = false;   // the whole trace was read
  std::optional<absl::StatusOr<v1::ProfileReply>> reply_;  // the answer, until Next() takes it
};

}  // namespace

grpc::ServerWriteReactor<v1::ProfileChunk>* StartProfileStream(Shell& shell,
                                                               const v1::GetProfileRequest& request,
                                                               absl::StatusOr<Permit> permit) {
  const auto stream = std::make_shared<ProfileStream>(shell, request, std::move(permit));
  stream->Begin(request.name());
  return stream.get();
}

}  // namespace muster::coordinator
