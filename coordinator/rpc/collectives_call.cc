#include "coordinator/rpc/collectives_call.h"

#include <memory>
#include <random>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/requests.h"
#include "coordinator/rpc/status.h"
#include "proto/spec/names.h"

namespace muster::coordinator {
namespace {

// Records stay in the ranks' run directories, also while the coordinator restarts, so that a count
// that starts with the process could name a record of an earlier call.
uint64_t NewRecordNumber() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32 | device()) | 1;
}

// Asks the rank's worker every kLogFollowInterval until the record is there. Owns itself until
// OnDone. Thread: gRPC calls On...() on threads of its own; everything else runs on the watch loop.
class CollectivesCall : public grpc::ServerUnaryReactor,
                        public std::enable_shared_from_this<CollectivesCall> {
 public:
  CollectivesCall(Shell& shell, const v1::GetCollectivesRequest& request,
                  v1::GetCollectivesResponse& response, absl::StatusOr<Permit> permit)
      : shell_(shell), rank_(request.rank()), response_(response), permit_(std::move(permit)) {}

  void Begin(const std::string& job) {
    self_ = shared_from_this();
    if (!permit_.ok()) {
      return Post([](CollectivesCall& call) { call.End(call.permit_.status()); });
    }
    if (const absl::Status named = CheckJobName(job); !named.ok()) {
      return Post([named](CollectivesCall& call) { call.End(named); });
    }
    Post([found = shell_.GetJob(job)](CollectivesCall& call) {
      const absl::Status opened = found.ok() ? call.Open(**found) : found.status();
      if (!opened.ok()) return call.End(opened);
      call.Ask();
    });
  }

  void OnCancel() override {
    Post([](CollectivesCall& call) { call.End(absl::CancelledError("the client went away")); });
  }
  void OnDone() override {
    shell_.watch_loop().Post([self = std::move(self_)]() mutable { self.reset(); });
  }

 private:
  template <typename Work>
  void Post(Work work) {
    shell_.watch_loop().Post(
        [self = shared_from_this(), work = std::move(work)]() mutable { work(*self); });
  }

  absl::Status Open(const v1::Job& job) {
    RETURN_IF_ERROR(CheckRank(job, rank_));
    if (job.state() != v1::JOB_STATE_RUNNING) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job ", job.id(), " is ", spec::EnumName(job.state()), ": no rank of it runs"));
    }
    if (!job.spec().has_engine()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "job ", job.id(), " runs a command of its own; collectives are recorded by the engine"));
    }
    ask_.set_job_id(job.id());
    ask_.set_epoch(job.epoch());
    ask_.set_rank(rank_);
    ask_.set_number(NewRecordNumber());
    // PostAfter ends the call even when no reply comes; the call is gone by then otherwise.
    shell_.watch_loop().PostAfter(kCollectivesTimeout, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) {
        self->End(absl::DeadlineExceededError(absl::StrCat(
            "rank ", self->rank_, " left no record of its collectives within ",
            absl::FormatDuration(kCollectivesTimeout), "; its process may be stopped")));
      }
    });
    return absl::OkStatus();
  }

  void Ask() {
    if (finished_) return;
    if (shell_.draining()) {
      return End(absl::UnavailableError("the coordinator is stopping; retry"));
    }
    shell_.AskRank<v1::CollectivesRequest, v1::CollectivesReply>(
        ask_, [self = shared_from_this()](absl::StatusOr<v1::CollectivesReply> reply) {
          self->Post([reply = std::move(reply)](CollectivesCall& call) mutable {
            call.OnReply(std::move(reply));
          });
        });
  }

  void OnReply(absl::StatusOr<v1::CollectivesReply> reply) {
    if (finished_) return;
    if (!reply.ok()) return End(reply.status());
    if (reply->has_record()) {
      response_.set_epoch(ask_.epoch());
      *response_.mutable_record() = std::move(*reply->mutable_record());
      return End(absl::OkStatus());
    }
    shell_.watch_loop().PostAfter(kLogFollowInterval, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->Ask();
    });
  }

  void End(const absl::Status& status) {
    if (std::exchange(finished_, true)) return;
    shell_.metrics().RpcDone("GetCollectives", absl::StatusCodeToString(status.code()));
    Finish(ToGrpc(status));
  }

  Shell& shell_;
  const int32_t rank_;
  v1::GetCollectivesResponse& response_;  // gRPC's, until OnDone
  const absl::StatusOr<Permit> permit_;
  std::shared_ptr<CollectivesCall> self_;  // until OnDone
  v1::CollectivesRequest ask_;
  bool finished_ = false;
};

}  // namespace

grpc::ServerUnaryReactor* StartCollectivesCall(Shell& shell,
                                               const v1::GetCollectivesRequest& request,
                                               v1::GetCollectivesResponse& response,
                                               absl::StatusOr<Permit> permit) {
  const auto call = std::make_shared<CollectivesCall>(shell, request, response, std::move(permit));
  call->Begin(request.name());
  return call.get();
}

}  // namespace muster::coordinator
