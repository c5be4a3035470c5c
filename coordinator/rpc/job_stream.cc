#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/pull_stream.h"
#include "coordinator/rpc/streams.h"
#include "proto/job_state.h"

namespace muster::coordinator {
namespace {

class JobStream : public PullStream<v1::Job> {
 public:
  JobStream(Shell& shell, absl::StatusOr<Permit> permit)
      : PullStream(shell, "WatchJob", std::move(permit)) {}

 private:
  absl::Status OnOpen(const std::shared_ptr<const v1::Job>& job) override {
    id_ = job->id();
    return absl::OkStatus();
  }

  Step Next(v1::Job* message, absl::Status* status) override {
    if (last_ != nullptr && IsFinal(last_->state())) return Step::kEnd;
    if (pausing_) return Step::kWait;
    const std::shared_ptr<const v1::Job> job = shell().published().Find(id_);
    if (job == nullptr) {
      *status = absl::NotFoundError(absl::StrCat("job ", id_, " is no longer kept"));
      return Step::kEnd;
    }
    if (job == last_) return Step::kWait;
    last_ = job;
    *message = *job;
    pausing_ = true;
    shell().watch_loop().PostAfter(kWatchJobInterval, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) static_cast<JobStream&>(*self).EndPause();
    });
    return Step::kSend;
  }

  void EndPause() {
    pausing_ = false;
    Pump();
  }

  std::string id_;
  std::shared_ptr<const v1::Job> last_;
  bool pausing_ = false;  // kWatchJobInterval has not passed since the last message
};

}  // namespace

grpc::ServerWriteReactor<v1::Job>* StartJobStream(Shell& shell, const v1::GetJobRequest& request,
                                                  absl::StatusOr<Permit> permit) {
  const auto stream = std::make_shared<JobStream>(shell, std::move(permit));
  stream->Begin(request.name());
  return stream.get();
}

}  // namespace muster::coordinator
