#include "coordinator/rpc/job_service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/schema.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/collectives_call.h"
#include "coordinator/rpc/requests.h"
#include "coordinator/rpc/status.h"
#include "coordinator/rpc/streams.h"
#include "coordinator/shell.h"
#include "muster/v1/job_service.grpc.pb.h"
#include "proto/spec/spec.h"

namespace muster::coordinator {
namespace {

absl::StatusOr<int> PageSize(int asked) {
  if (asked < 0 || asked > kPageSizeMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("page_size: ", asked, " is not in 0 to ", kPageSizeMax));
  }
  return asked == 0 ? kPageSizeDefault : asked;
}

// A page token is "<kind><position>". The kind says which listing it is of, so that a token of
// another listing is refused.
absl::Status TokenError() {
  return absl::InvalidArgumentError(
      "page_token: not from a page of this listing; start again without one");
}

// 0 when there is no token.
absl::StatusOr<uint64_t> Position(const std::string& token, char kind) {
  uint64_t position = 0;
  if (token.empty()) return position;
  if (token[0] != kind || !absl::SimpleAtoi(token.substr(1), &position) || position == 0) {
    return TokenError();
  }
  return position;
}

class JobService : public v1::JobService::CallbackService {
 public:
  JobService(Shell& shell, Slots& slots, std::string version)
      : shell_(shell), slots_(slots), version_(std::move(version)) {}

  grpc::ServerUnaryReactor* Submit(grpc::CallbackServerContext* context,
                                   const v1::SubmitRequest* request,
                                   v1::SubmitResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    v1::JobSpec spec = request->spec();
    spec::ApplyDefaults(spec);
    if (const absl::Status valid = Check(*request, spec); !valid.ok()) {
      return Finish(reactor, "Submit", valid);
    }
    if (request->validate_only()) {
      response->mutable_job()->set_name(spec.name());
      response->mutable_job()->set_steps(spec.engine().training().steps());
      *response->mutable_job()->mutable_spec() = std::move(spec);
      return Finish(reactor, "Submit", absl::OkStatus());
    }
    absl::StatusOr<Slots::Slot> slot = slots_.Take(SlotKind::kCall, context->peer());
    if (!slot.ok()) return Finish(reactor, "Submit", slot.status());
    shell_.Submit(
        std::move(spec), request->request_id(), ActorOf(context->peer()),
        [this, reactor, response, slot = std::move(slot)](absl::StatusOr<JobReply> reply) {
          if (reply.ok()) {
            *response->mutable_job() = std::move(reply->job);
            response->set_existed(reply->existed);
          }
          Finish(reactor, "Submit", reply.status());
        });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext* context,
                                   const v1::GetJobRequest* request, v1::Job* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    if (const absl::Status named = CheckJobName(request->name()); !named.ok()) {
      return Finish(reactor, "GetJob", named);
    }
    const absl::StatusOr<std::shared_ptr<const v1::Job>> job = shell_.GetJob(request->name());
    if (job.ok()) *response = **job;
    return Finish(reactor, "GetJob", job.status());
  }

  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context,
                                     const v1::ListJobsRequest* request,
                                     v1::ListJobsResponse* response) override {
    return Finish(context->DefaultReactor(), "ListJobs", PageOfJobs(*request, *response));
  }

  grpc::ServerUnaryReactor* CancelJob(grpc::CallbackServerContext* context,
                                      const v1::CancelJobRequest* request,
                                      v1::Job* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    if (const absl::Status named = CheckJobName(request->name()); !named.ok()) {
      return Finish(reactor, "CancelJob", named);
    }
    absl::StatusOr<Slots::Slot> slot = slots_.Take(SlotKind::kCall, context->peer());
    if (!slot.ok()) return Finish(reactor, "CancelJob", slot.status());
    shell_.Cancel(
        request->name(), ActorOf(context->peer()),
        [this, reactor, response, slot = std::move(slot)](absl::StatusOr<JobReply> reply) {
          if (reply.ok()) *response = std::move(reply->job);
          Finish(reactor, "CancelJob", reply.status());
        });
    return reactor;
  }

  grpc::ServerUnaryReactor* PreemptJob(grpc::CallbackServerContext* context,
                                     const v1::ChangeJobRequest* request,
                                     v1::Job* response) override {
    return ChangeJob(context, "PreemptJob", ChangeJobEvent::Change::kPreempt, *request, response);
  }
  grpc::ServerUnaryReactor* SuspendJob(grpc::CallbackServerContext* context,
                                     const v1::ChangeJobRequest* request,
                                     v1::Job* response) override {
    return ChangeJob(context, "SuspendJob", ChangeJobEvent::Change::kSuspend, *request, response);
  }
  grpc::ServerUnaryReactor* ResumeJob(grpc::CallbackServerContext* context,
                                     const v1::ChangeJobRequest* request,
                                     v1::Job* response) override {
    return ChangeJob(context, "ResumeJob", ChangeJobEvent::Change::kRelease, *request, response);
  }
  grpc::ServerUnaryReactor* HoldJob(grpc::CallbackServerContext* context,
                                     const v1::ChangeJobRequest* request,
                                     v1::Job* response) override {
    return ChangeJob(context, "HoldJob", ChangeJobEvent::Change::kHold, *request, response);
  }
  grpc::ServerUnaryReactor* ReleaseJob(grpc::CallbackServerContext* context,
                                     const v1::ChangeJobRequest* request,
                                     v1::Job* response) override {
    return ChangeJob(context, "ReleaseJob", ChangeJobEvent::Change::kRelease, *request, response);
  }
  grpc::ServerUnaryReactor* RequeueJob(grpc::CallbackServerContext* context,
                                     const v1::ChangeJobRequest* request,
                                     v1::Job* response) override {
    return ChangeJob(context, "RequeueJob", ChangeJobEvent::Change::kRequeue, *request, response);
  }

  grpc::ServerUnaryReactor* Explain(grpc::CallbackServerContext* context,
                                    const v1::ExplainRequest* request,
                                    v1::ExplainResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::StatusOr<ExplainQuery> about = QueryOf(*request);
    if (!about.ok()) return Finish(reactor, "Explain", about.status());
    absl::StatusOr<Slots::Slot> slot = slots_.Take(SlotKind::kCall, context->peer());
    if (!slot.ok()) return Finish(reactor, "Explain", slot.status());
    shell_.Explain(*std::move(about), [this, reactor, response, slot = std::move(slot)](
                                          absl::StatusOr<Explained> explained) {
      if (explained.ok()) {
        *response->mutable_job() = std::move(explained->job);
        if (explained->waiting.has_value()) *response->mutable_waiting() = *explained->waiting;
        for (v1::Placement& placement : explained->placements) {
          *response->add_placements() = std::move(placement);
        }
      }
      Finish(reactor, "Explain", explained.status());
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetQueues(grpc::CallbackServerContext* context,
                                      const v1::GetQueuesRequest*,
                                      v1::GetQueuesResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::StatusOr<Slots::Slot> slot = slots_.Take(SlotKind::kCall, context->peer());
    if (!slot.ok()) return Finish(reactor, "GetQueues", slot.status());
    shell_.GetQueues([this, reactor, response, slot = std::move(slot)](
                         absl::StatusOr<std::vector<v1::QueueStatus>> queues) {
      if (queues.ok()) {
        for (v1::QueueStatus& queue : *queues) *response->add_queues() = std::move(queue);
      }
      Finish(reactor, "GetQueues", queues.status());
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* ListWorkers(grpc::CallbackServerContext* context,
                                        const v1::ListWorkersRequest* request,
                                        v1::ListWorkersResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    absl::StatusOr<Slots::Slot> slot = slots_.Take(SlotKind::kCall, context->peer());
    if (!slot.ok()) return Finish(reactor, "ListWorkers", slot.status());
    shell_.ListWorkers([this, reactor, request, response,
                        slot = std::move(slot)](absl::StatusOr<std::vector<v1::Worker>> workers) {
      Finish(reactor, "ListWorkers",
             workers.ok() ? PageOfWorkers(*request, *std::move(workers), *response)
                          : workers.status());
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* ListEvents(grpc::CallbackServerContext* context,
                                       const v1::ListEventsRequest* request,
                                       v1::ListEventsResponse* response) override {
    return Finish(context->DefaultReactor(), "ListEvents", PageOfEvents(*request, *response));
  }

  grpc::ServerWriteReactor<v1::Event>* WatchEvents(grpc::CallbackServerContext* context,
                                                   const v1::WatchEventsRequest* request) override {
    return StartEventStream(shell_, *request, slots_.Take(SlotKind::kWatcher, context->peer()));
  }

  grpc::ServerWriteReactor<v1::Job>* WatchJob(grpc::CallbackServerContext* context,
                                              const v1::GetJobRequest* request) override {
    return StartJobStream(shell_, *request, slots_.Take(SlotKind::kWatcher, context->peer()));
  }

  grpc::ServerWriteReactor<v1::LogChunk>* GetLogs(grpc::CallbackServerContext* context,
                                                  const v1::GetLogsRequest* request) override {
    return StartLogStream(shell_, *request, slots_.Take(SlotKind::kFollower, context->peer()));
  }

  grpc::ServerUnaryReactor* GetCollectives(grpc::CallbackServerContext* context,
                                           const v1::GetCollectivesRequest* request,
                                           v1::GetCollectivesResponse* response) override {
    return StartCollectivesCall(shell_, *request, *response,
                                slots_.Take(SlotKind::kFollower, context->peer()));
  }

  grpc::ServerWriteReactor<v1::ProfileChunk>* GetProfile(
      grpc::CallbackServerContext* context, const v1::GetProfileRequest* request) override {
    return StartProfileStream(shell_, *request, slots_.Take(SlotKind::kFollower, context->peer()));
  }

  grpc::ServerUnaryReactor* GetVersion(grpc::CallbackServerContext* context,
                                       const v1::GetVersionRequest*,
                                       v1::GetVersionResponse* response) override {
    response->set_version(version_);
    response->set_cluster_id(shell_.cluster_id());
    return Finish(context->DefaultReactor(), "GetVersion", absl::OkStatus());
  }

 private:
  grpc::ServerUnaryReactor* ChangeJob(grpc::CallbackServerContext* context, const char* method,
                                      ChangeJobEvent::Change change,
                                      const v1::ChangeJobRequest& request, v1::Job* response) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    if (const absl::Status named = CheckJobName(request.name()); !named.ok()) {
      return Finish(reactor, method, named);
    }
    absl::StatusOr<Slots::Slot> slot = slots_.Take(SlotKind::kCall, context->peer());
    if (!slot.ok()) return Finish(reactor, method, slot.status());
    shell_.ChangeJob(
        request.name(), change, request.reason(), ActorOf(context->peer()),
        [this, reactor, method, response, slot = std::move(slot)](absl::StatusOr<JobReply> reply) {
          if (reply.ok()) *response = std::move(reply->job);
          Finish(reactor, method, reply.status());
        });
    return reactor;
  }

  static absl::Status Check(const v1::SubmitRequest& request, const v1::JobSpec& spec) {
    if (request.request_id().size() > kRequestIdBytesMax) {
      return absl::InvalidArgumentError(absl::StrCat("request_id: ", request.request_id().size(),
                                                     " bytes, at most ", kRequestIdBytesMax,
                                                     " are possible"));
    }
    return spec::Validate(spec);
  }

  static absl::StatusOr<ExplainQuery> QueryOf(const v1::ExplainRequest& request) {
    switch (request.about_case()) {
      case v1::ExplainRequest::kName:
        RETURN_IF_ERROR(CheckJobName(request.name()));
        return ExplainQuery(request.name());
      case v1::ExplainRequest::kSpec: {
        v1::JobSpec spec = request.spec();
        spec::ApplyDefaults(spec);
        RETURN_IF_ERROR(spec::Validate(spec));
        return ExplainQuery(std::move(spec));
      }
      case v1::ExplainRequest::ABOUT_NOT_SET:
        break;
    }
    return absl::InvalidArgumentError("name or spec: one of them is required");
  }

  absl::Status PageOfJobs(const v1::ListJobsRequest& request, v1::ListJobsResponse& response) {
    ASSIGN_OR_RETURN(const int size, PageSize(request.page_size()));
    ASSIGN_OR_RETURN(const uint64_t before, Position(request.page_token(), 'j'));
    const std::vector<PublishedState::Row> rows =
        shell_.published().List(before, static_cast<size_t>(size) + 1);
    size_t bytes = 0;
    uint64_t last = 0;
    for (const PublishedState::Row& row : rows) {
      bytes += row.job->ByteSizeLong();
      if (response.jobs_size() == size || (last != 0 && bytes > kPageBytesMax)) {
        response.set_next_page_token(absl::StrCat("j", last));
        break;
      }
      *response.add_jobs() = *row.job;
      last = row.submit_sequence;
    }
    return absl::OkStatus();
  }

  static absl::Status PageOfWorkers(const v1::ListWorkersRequest& request,
                                    std::vector<v1::Worker> workers,
                                    v1::ListWorkersResponse& response) {
    ASSIGN_OR_RETURN(const int size, PageSize(request.page_size()));
    const std::string& token = request.page_token();
    if (!token.empty() && token[0] != 'w') return TokenError();
    std::sort(workers.begin(), workers.end(),
              [](const v1::Worker& a, const v1::Worker& b) { return a.name() < b.name(); });
    size_t bytes = 0;
    for (v1::Worker& worker : workers) {
      if (!token.empty() && worker.name() <= token.substr(1)) continue;
      bytes += worker.ByteSizeLong();
      const int found = response.workers_size();
      if (found == size || (found > 0 && bytes > kPageBytesMax)) {
        response.set_next_page_token(absl::StrCat("w", response.workers(found - 1).name()));
        break;
      }
      *response.add_workers() = std::move(worker);
    }
    return absl::OkStatus();
  }

  absl::Status PageOfEvents(const v1::ListEventsRequest& request,
                            v1::ListEventsResponse& response) {
    ASSIGN_OR_RETURN(const int size, PageSize(request.page_size()));
    ASSIGN_OR_RETURN(const uint64_t after, Position(request.page_token(), 'e'));
    absl::Status bad;
    uint64_t last = after;
    size_t bytes = 0;
    int rows = 0;
    bool more = false;
    RETURN_IF_ERROR(shell_.store().Scan(Table::kEvents, schema::EventKey(after + 1),
                                        schema::EventKey(shell_.published().last_event() + 1),
                                        [&](const std::string& key, const std::string& value) {
                                          more = response.events_size() == size ||
                                                 bytes > kPageBytesMax ||
                                                 rows++ == kEventRowsPerPageMax;
                                          if (more) return false;
                                          v1::Event event;
                                          bad = schema::Parse(Table::kEvents, key, value, event);
                                          if (!bad.ok()) return false;
                                          last = event.sequence();
                                          if (IsAbout(event, request.job())) {
                                            bytes += value.size();
                                            *response.add_events() = std::move(event);
                                          }
                                          return true;
                                        }));
    if (more) response.set_next_page_token(absl::StrCat("e", last));
    return bad;
  }

  grpc::ServerUnaryReactor* Finish(grpc::ServerUnaryReactor* reactor, const char* method,
                                   const absl::Status& status) {
    shell_.metrics().RpcDone(method, absl::StatusCodeToString(status.code()));
    reactor->Finish(ToGrpc(status));
    return reactor;
  }

  Shell& shell_;
  Slots& slots_;
  const std::string version_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeJobService(Shell& shell, Slots& slots,
                                              const std::string& version) {
  return std::make_unique<JobService>(shell, slots, version);
}

}  // namespace muster::coordinator
