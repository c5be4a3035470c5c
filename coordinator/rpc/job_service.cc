#include "coordinator/rpc/job_service.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/schema.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/collectives_call.h"
#include "coordinator/rpc/gate.h"
#include "coordinator/rpc/label_selector.h"
#include "coordinator/rpc/owned_messages.h"
#include "coordinator/rpc/requests.h"
#include "coordinator/rpc/status.h"
#include "coordinator/rpc/streams.h"
#include "coordinator/rpc/usage.h"
#include "coordinator/shell.h"
#include "muster/v1/job_service.grpc.pb.h"
#include "proto/spec/array.h"
#include "proto/spec/deadline.h"
#include "proto/spec/spec.h"

namespace muster::coordinator {
namespace {

class JobService : public v1::JobService::CallbackService {
 public:
  JobService(Shell& shell, Gate& gate, std::string version)
      : shell_(shell), gate_(gate), version_(std::move(version)) {
    SetMessageAllocatorFor_Submit(&submissions_);
    SetMessageAllocatorFor_SubmitJobs(&batches_);
  }

  grpc::ServerUnaryReactor* Submit(grpc::CallbackServerContext* context,
                                   const v1::SubmitRequest* request,
                                   v1::SubmitResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    v1::JobSpec spec = std::move(*Submissions::RequestOf(*context).mutable_spec());
    spec::ApplyDefaults(spec);
    const absl::StatusOr<Admitted> caller =
        gate_.Admit(*context, "JobService.Submit", spec.name(), spec.queue());
    if (!caller.ok()) return Finish(reactor, "Submit", caller.status());
    if (const absl::Status valid = Check(*request, spec); !valid.ok()) {
      if (!request->validate_only()) gate_.Audit(*caller, valid);
      return Finish(reactor, "Submit", valid);
    }
    if (request->validate_only()) {
      if (absl::Status fixed = spec::FixDeadline(spec, shell_.clock().Now()); !fixed.ok()) {
        return Finish(reactor, "Submit", fixed);
      }
      response->mutable_job()->set_name(spec.name());
      response->mutable_job()->set_steps(spec.engine().training().steps());
      *response->mutable_job()->mutable_spec() = spec;
    }
    absl::StatusOr<Slots::Slot> slot = gate_.TakeSlot(SlotKind::kCall, *caller);
    if (!slot.ok()) return Finish(reactor, "Submit", slot.status());
    if (request->validate_only()) {
      CheckInCore("Submit", std::move(spec), reactor, *std::move(slot));
      return reactor;
    }
    shell_.Submit(
        std::move(spec), request->request_id(), *caller,
        [this, reactor, response, slot = std::move(slot)](absl::StatusOr<JobReply> reply) {
          if (reply.ok()) {
            *response->mutable_job() = std::move(reply->job);
            response->set_existed(reply->existed);
          }
          Finish(reactor, "Submit", reply.status());
        });
    return reactor;
  }

  grpc::ServerUnaryReactor* SubmitJobs(grpc::CallbackServerContext* context,
                                       const v1::SubmitJobsRequest* request,
                                       v1::SubmitJobsResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller = gate_.Admit(*context, "JobService.SubmitJobs");
    if (!caller.ok()) return Finish(reactor, "SubmitJobs", caller.status());
    if (const absl::Status valid = Check(*request); !valid.ok()) {
      gate_.Audit(*caller, valid);
      return Finish(reactor, "SubmitJobs", valid);
    }
    // Each answer has a place of its own; the last one to come ends the call.
    const int jobs = request->jobs_size();
    auto missing = std::make_shared<std::atomic<int>>(jobs);
    for (int i = 0; i < jobs; ++i) response->add_results();
    for (int i = 0; i < jobs; ++i) {
      SubmitOneOf(*caller, *Batches::RequestOf(*context).mutable_jobs(i),
                  [this, reactor, missing,
                   result = response->mutable_results(i)](absl::StatusOr<JobReply> reply) {
                    if (reply.ok()) {
                      *result->mutable_accepted()->mutable_job() = std::move(reply->job);
                      result->mutable_accepted()->set_existed(reply->existed);
                    } else {
                      const grpc::Status status = ToGrpc(reply.status());
                      result->set_code(status.error_code());
                      result->set_message(status.error_message());
                    }
                    if (missing->fetch_sub(1) == 1) {
                      Finish(reactor, "SubmitJobs", absl::OkStatus());
                    }
                  });
    }
    return reactor;
  }

  grpc::ServerUnaryReactor* SubmitArray(grpc::CallbackServerContext* context,
                                        const v1::SubmitArrayRequest* request,
                                        v1::SubmitArrayResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    std::vector<v1::JobSpec> tasks(request->tasks().begin(), request->tasks().end());
    for (v1::JobSpec& task : tasks) spec::ApplyDefaults(task);
    const v1::JobSpec none;
    const v1::JobSpec& first = tasks.empty() ? none : tasks[0];
    absl::StatusOr<Admitted> caller =
        gate_.Admit(*context, "JobService.SubmitArray",
                    first.array_task().array().substr(0, kNameBytesMax), first.queue());
    // Tasks may be for different queues.
    for (size_t i = 1; i < tasks.size() && caller.ok(); ++i) {
      if (tasks[i].queue() == tasks[i - 1].queue()) continue;
      caller = gate_.Admit(*context, "JobService.SubmitArray",
                           first.array_task().array().substr(0, kNameBytesMax), tasks[i].queue());
    }
    if (!caller.ok()) return Finish(reactor, "SubmitArray", caller.status());
    if (const absl::Status valid = Check(*request, tasks); !valid.ok()) {
      if (!request->validate_only()) gate_.Audit(*caller, valid);
      return Finish(reactor, "SubmitArray", valid);
    }
    if (request->validate_only()) {
      for (size_t i = 0; i < tasks.size(); ++i) {
        const absl::Status fixed = spec::FixDeadline(tasks[i], shell_.clock().Now());
        if (!fixed.ok()) {
          return Finish(
              reactor, "SubmitArray",
              absl::Status(fixed.code(), absl::StrCat("task ", i, ": ", fixed.message())));
        }
      }
      response->mutable_array()->set_array(first.array_task().array());
      response->mutable_array()->set_tasks(request->tasks_size());
    }
    absl::StatusOr<Slots::Slot> slot = gate_.TakeSlot(SlotKind::kCall, *caller);
    if (!slot.ok()) return Finish(reactor, "SubmitArray", slot.status());
    if (request->validate_only()) {
      CheckInCore("SubmitArray", std::move(tasks[0]), reactor, *std::move(slot));
      return reactor;
    }
    shell_.SubmitArray(
        std::move(tasks), request->request_id(), *caller,
        [this, reactor, response, slot = std::move(slot)](absl::StatusOr<JobReply> reply) {
          if (reply.ok()) {
            *response->mutable_array() = std::move(reply->array);
            response->set_existed(reply->existed);
          }
          Finish(reactor, "SubmitArray", reply.status());
        });
    return reactor;
  }

  grpc::ServerUnaryReactor* ChangeArray(grpc::CallbackServerContext* context,
                                        const v1::ChangeArrayRequest* request,
                                        v1::ChangeArrayResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller =
        gate_.Admit(*context, "JobService.ChangeArray", request->name().substr(0, kNameBytesMax));
    if (!caller.ok()) return Finish(reactor, "ChangeArray", caller.status());
    absl::Status valid = CheckJobName(request->name());
    std::optional<ChangeJobEvent::Change> change;
    if (valid.ok()) valid = ReadChange(request->change(), change);
    if (!valid.ok()) {
      gate_.Audit(*caller, valid);
      return Finish(reactor, "ChangeArray", valid);
    }
    absl::StatusOr<Slots::Slot> slot = gate_.TakeSlot(SlotKind::kCall, *caller);
    if (!slot.ok()) return Finish(reactor, "ChangeArray", slot.status());
    // The core knows whose tasks they are, and decides.
    shell_.ChangeArray(
        request->name(), change, request->reason(), *caller,
        [this, reactor, response, slot = std::move(slot)](absl::StatusOr<JobReply> reply) {
          if (reply.ok()) *response->mutable_array() = std::move(reply->array);
          Finish(reactor, "ChangeArray", reply.status());
        });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext* context,
                                   const v1::GetJobRequest* request, v1::Job* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller =
        gate_.Admit(*context, "JobService.GetJob", request->name());
    if (!caller.ok()) return Finish(reactor, "GetJob", caller.status());
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
    const absl::Status may = gate_.Admit(*context, "JobService.ListJobs").status();
    return Finish(context->DefaultReactor(), "ListJobs",
                  may.ok() ? PageOfJobs(*request, *response) : may);
  }

  grpc::ServerUnaryReactor* CancelJob(grpc::CallbackServerContext* context,
                                      const v1::CancelJobRequest* request,
                                      v1::Job* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller =
        gate_.Admit(*context, "JobService.CancelJob", request->name());
    if (!caller.ok()) return Finish(reactor, "CancelJob", caller.status());
    absl::Status named = CheckJobName(request->name());
    if (named.ok()) named = shell_.GetJob(request->name()).status();
    if (!named.ok()) {
      gate_.Audit(*caller, named);
      return Finish(reactor, "CancelJob", named);
    }
    absl::StatusOr<Slots::Slot> slot = gate_.TakeSlot(SlotKind::kCall, *caller);
    if (!slot.ok()) return Finish(reactor, "CancelJob", slot.status());
    // The core knows whose job it is, and decides.
    shell_.Cancel(
        request->name(), *caller,
        [this, reactor, response, slot = std::move(slot)](absl::StatusOr<JobReply> reply) {
          if (reply.ok()) *response = std::move(reply->job);
          Finish(reactor, "CancelJob", reply.status());
        });
    return reactor;
  }

  grpc::ServerUnaryReactor* PreemptJob(grpc::CallbackServerContext* context,
                                       const v1::ChangeJobRequest* request,
                                       v1::Job* response) override {
    return ChangeJob(context, "JobService.PreemptJob", ChangeJobEvent::Change::kPreempt, *request,
                     response);
  }
  grpc::ServerUnaryReactor* ResizeJob(grpc::CallbackServerContext* context,
                                      const v1::ResizeJobRequest* request,
                                      v1::Job* response) override {
    return ChangeJob(context, "JobService.ResizeJob", ChangeJobEvent::Change::kResize, *request,
                     response, request->ranks());
  }
  grpc::ServerUnaryReactor* SuspendJob(grpc::CallbackServerContext* context,
                                       const v1::ChangeJobRequest* request,
                                       v1::Job* response) override {
    return ChangeJob(context, "JobService.SuspendJob", ChangeJobEvent::Change::kSuspend, *request,
                     response);
  }
  grpc::ServerUnaryReactor* ResumeJob(grpc::CallbackServerContext* context,
                                      const v1::ChangeJobRequest* request,
                                      v1::Job* response) override {
    return ChangeJob(context, "JobService.ResumeJob", ChangeJobEvent::Change::kRelease, *request,
                     response);
  }
  grpc::ServerUnaryReactor* HoldJob(grpc::CallbackServerContext* context,
                                    const v1::ChangeJobRequest* request,
                                    v1::Job* response) override {
    return ChangeJob(context, "JobService.HoldJob", ChangeJobEvent::Change::kHold, *request,
                     response);
  }
  grpc::ServerUnaryReactor* ReleaseJob(grpc::CallbackServerContext* context,
                                       const v1::ChangeJobRequest* request,
                                       v1::Job* response) override {
    return ChangeJob(context, "JobService.ReleaseJob", ChangeJobEvent::Change::kRelease, *request,
                     response);
  }
  grpc::ServerUnaryReactor* RequeueJob(grpc::CallbackServerContext* context,
                                       const v1::ChangeJobRequest* request,
                                       v1::Job* response) override {
    return ChangeJob(context, "JobService.RequeueJob", ChangeJobEvent::Change::kRequeue, *request,
                     response);
  }

  grpc::ServerUnaryReactor* Explain(grpc::CallbackServerContext* context,
                                    const v1::ExplainRequest* request,
                                    v1::ExplainResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller =
        gate_.Admit(*context, "JobService.Explain", request->name());
    if (!caller.ok()) return Finish(reactor, "Explain", caller.status());
    absl::StatusOr<ExplainQuery> about = QueryOf(*request);
    if (!about.ok()) return Finish(reactor, "Explain", about.status());
    absl::StatusOr<Slots::Slot> slot = gate_.TakeSlot(SlotKind::kCall, *caller);
    if (!slot.ok()) return Finish(reactor, "Explain", slot.status());
    shell_.Explain(*std::move(about), [this, reactor, response, slot = std::move(slot)](
                                          absl::StatusOr<Explained> explained) {
      if (explained.ok()) {
        *response->mutable_job() = std::move(explained->job);
        if (explained->waiting.has_value()) *response->mutable_waiting() = *explained->waiting;
        if (explained->deadline.has_value()) *response->mutable_deadline() = *explained->deadline;
        if (explained->array.has_value()) *response->mutable_array() = *explained->array;
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
    const absl::StatusOr<Admitted> caller = gate_.Admit(*context, "JobService.GetQueues");
    if (!caller.ok()) return Finish(reactor, "GetQueues", caller.status());
    absl::StatusOr<Slots::Slot> slot = gate_.TakeSlot(SlotKind::kCall, *caller);
    if (!slot.ok()) return Finish(reactor, "GetQueues", slot.status());
    shell_.GetQueues([this, reactor, response,
                      slot = std::move(slot)](absl::StatusOr<v1::GetQueuesResponse> queues) {
      if (queues.ok()) *response = std::move(*queues);
      Finish(reactor, "GetQueues", queues.status());
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* ListWorkers(grpc::CallbackServerContext* context,
                                        const v1::ListWorkersRequest* request,
                                        v1::ListWorkersResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller = gate_.Admit(*context, "JobService.ListWorkers");
    if (!caller.ok()) return Finish(reactor, "ListWorkers", caller.status());
    absl::StatusOr<Slots::Slot> slot = gate_.TakeSlot(SlotKind::kCall, *caller);
    if (!slot.ok()) return Finish(reactor, "ListWorkers", slot.status());
    if (request->sampled()) {
      return Finish(reactor, "ListWorkers",
                    PageOfWorkers(*request, *shell_.published().workers(), *response));
    }
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
    const absl::Status may =
        gate_.Admit(*context, "JobService.ListEvents", request->job()).status();
    return Finish(context->DefaultReactor(), "ListEvents",
                  may.ok() ? PageOfEvents(*request, *response) : may);
  }

  grpc::ServerWriteReactor<v1::Event>* WatchEvents(grpc::CallbackServerContext* context,
                                                   const v1::WatchEventsRequest* request) override {
    return StartEventStream(
        shell_, *request,
        gate_.Open(*context, "JobService.WatchEvents", SlotKind::kWatcher, request->job()));
  }

  grpc::ServerWriteReactor<v1::Job>* WatchJob(grpc::CallbackServerContext* context,
                                              const v1::GetJobRequest* request) override {
    return StartJobStream(
        shell_, *request,
        gate_.Open(*context, "JobService.WatchJob", SlotKind::kWatcher, request->name()));
  }

  grpc::ServerWriteReactor<v1::LogChunk>* GetLogs(grpc::CallbackServerContext* context,
                                                  const v1::GetLogsRequest* request) override {
    return StartLogStream(
        shell_, *request,
        gate_.Open(*context, "JobService.GetLogs", SlotKind::kFollower, request->name()));
  }

  grpc::ServerUnaryReactor* GetCollectives(grpc::CallbackServerContext* context,
                                           const v1::GetCollectivesRequest* request,
                                           v1::GetCollectivesResponse* response) override {
    return StartCollectivesCall(
        shell_, *request, *response,
        gate_.Open(*context, "JobService.GetCollectives", SlotKind::kFollower, request->name()));
  }

  grpc::ServerWriteReactor<v1::ProfileChunk>* GetProfile(
      grpc::CallbackServerContext* context, const v1::GetProfileRequest* request) override {
    return StartProfileStream(
        shell_, *request,
        gate_.Open(*context, "JobService.GetProfile", SlotKind::kFollower, request->name()));
  }

  grpc::ServerUnaryReactor* GetUsage(grpc::CallbackServerContext* context,
                                     const v1::GetUsageRequest* request,
                                     v1::GetUsageResponse* response) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller =
        gate_.Admit(*context, "JobService.GetUsage", request->job().substr(0, kNameBytesMax));
    if (!caller.ok()) return Finish(reactor, "GetUsage", caller.status());
    v1::GetUsageRequest asked = *request;
    if (const absl::Status valid = CheckUsage(asked); !valid.ok()) {
      return Finish(reactor, "GetUsage", valid);
    }
    absl::StatusOr<Slots::Slot> slot = gate_.TakeSlot(SlotKind::kCall, *caller);
    if (!slot.ok()) return Finish(reactor, "GetUsage", slot.status());
    shell_.Usage([this, reactor, response, asked = std::move(asked),
                  slot = std::move(slot)](absl::StatusOr<OpenUsage> open) {
      if (!open.ok()) {
        Finish(reactor, "GetUsage", open.status());
        return;
      }
      absl::StatusOr<v1::GetUsageResponse> usage = SumUsage(shell_.store(), *open, asked);
      const absl::Status summed = usage.status();
      if (summed.ok()) *response = *std::move(usage);
      Finish(reactor, "GetUsage", summed);
    });
    return reactor;
  }

  grpc::ServerUnaryReactor* GetRankMaps(grpc::CallbackServerContext* context,
                                        const v1::GetRankMapsRequest* request,
                                        v1::GetRankMapsResponse* response) override {
    const absl::Status may =
        gate_.Admit(*context, "JobService.GetRankMaps", request->name().substr(0, kNameBytesMax))
            .status();
    return Finish(context->DefaultReactor(), "GetRankMaps",
                  may.ok() ? RankMaps(request->name(), *response) : may);
  }

  grpc::ServerUnaryReactor* GetVersion(grpc::CallbackServerContext* context,
                                       const v1::GetVersionRequest*,
                                       v1::GetVersionResponse* response) override {
    const absl::StatusOr<Admitted> caller = gate_.Admit(*context, "JobService.GetVersion");
    if (caller.ok()) {
      response->set_version(version_);
      response->set_cluster_id(shell_.cluster_id());
      if (gate_.asks()) response->set_caller(caller->principal.ToString());
      for (const security::Grant& grant : caller->principal.grants) {
        response->add_roles(security::ToString(grant));
      }
    }
    return Finish(context->DefaultReactor(), "GetVersion", caller.status());
  }

 private:
  // `rule`: the RPC's, "JobService.PreemptJob".
  template <typename Request>
  grpc::ServerUnaryReactor* ChangeJob(grpc::CallbackServerContext* context, const char* rule,
                                      ChangeJobEvent::Change change, const Request& request,
                                      v1::Job* response, int32_t ranks = 0) {
    const char* const method = rule + sizeof("JobService.") - 1;
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const absl::StatusOr<Admitted> caller =
        gate_.Admit(*context, rule, request.name().substr(0, kNameBytesMax));
    if (!caller.ok()) return Finish(reactor, method, caller.status());
    absl::Status named = CheckJobName(request.name());
    if (named.ok()) named = shell_.GetJob(request.name()).status();
    if (!named.ok()) {
      gate_.Audit(*caller, named);
      return Finish(reactor, method, named);
    }
    absl::StatusOr<Slots::Slot> slot = gate_.TakeSlot(SlotKind::kCall, *caller);
    if (!slot.ok()) return Finish(reactor, method, slot.status());
    // The core knows whose job it is, and decides.
    shell_.ChangeJob(
        request.name(), change, request.reason(), *caller,
        [this, reactor, method, response, slot = std::move(slot)](absl::StatusOr<JobReply> reply) {
          if (reply.ok()) *response = std::move(reply->job);
          Finish(reactor, method, reply.status());
        },
        ranks);
    return reactor;
  }

  // A job of SubmitJobs. `done` is called once.
  void SubmitOneOf(const Admitted& caller, v1::SubmitRequest& request, Done<JobReply> done) {
    v1::JobSpec spec = std::move(*request.mutable_spec());
    spec::ApplyDefaults(spec);
    const absl::StatusOr<Admitted> further =
        gate_.AdmitFurther(caller, spec.name().substr(0, kNameBytesMax), spec.queue());
    if (!further.ok()) return done(further.status());
    if (const absl::Status valid = Check(request, spec); !valid.ok()) {
      gate_.Audit(*further, valid);
      return done(valid);
    }
    absl::StatusOr<Slots::Slot> slot = gate_.TakeSlot(SlotKind::kCall, *further);
    if (!slot.ok()) return done(slot.status());
    shell_.Submit(std::move(spec), request.request_id(), *further,
                  [done = std::move(done), slot = *std::move(slot)](
                      absl::StatusOr<JobReply> reply) mutable { done(std::move(reply)); });
  }

  static absl::Status Check(const v1::SubmitJobsRequest& request) {
    if (request.jobs_size() < 1 || request.jobs_size() > kJobsPerCallMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("jobs: ", request.jobs_size(), ", 1 to ", kJobsPerCallMax,
                       " are possible; submit more in several calls"));
    }
    for (int i = 0; i < request.jobs_size(); ++i) {
      if (request.jobs(i).validate_only()) {
        return absl::InvalidArgumentError(
            absl::StrCat("jobs[", i, "].validate_only: is for Submit; leave it out"));
      }
    }
    return absl::OkStatus();
  }

  static absl::Status Check(const v1::SubmitRequest& request, const v1::JobSpec& spec) {
    if (request.request_id().size() > kRequestIdBytesMax) {
      return absl::InvalidArgumentError(absl::StrCat("request_id: ", request.request_id().size(),
                                                     " bytes, at most ", kRequestIdBytesMax,
                                                     " are possible"));
    }
    if (spec.has_array_task()) {
      return absl::InvalidArgumentError(
          "array_task: is for the tasks of SubmitArray; leave it out");
    }
    return spec::Validate(spec);
  }

  // Finishes the call once the core has said whether the spec's queue takes the job, and whether
  // the jobs that it waits for are known.
  void CheckInCore(const char* method, v1::JobSpec spec, grpc::ServerUnaryReactor* reactor,
                   Slots::Slot slot) {
    shell_.Explain(ExplainQuery(std::move(spec)), [this, method, reactor, slot = std::move(slot)](
                                                      absl::StatusOr<Explained> explained) {
      Finish(reactor, method, explained.status());
    });
  }

  static absl::Status ReadChange(v1::ArrayChange asked,
                                 std::optional<ChangeJobEvent::Change>& change) {
    switch (asked) {
      case v1::ARRAY_CHANGE_CANCEL:
        return absl::OkStatus();
      case v1::ARRAY_CHANGE_HOLD:
        change = ChangeJobEvent::Change::kHold;
        return absl::OkStatus();
      case v1::ARRAY_CHANGE_RELEASE:
        change = ChangeJobEvent::Change::kRelease;
        return absl::OkStatus();
      case v1::ARRAY_CHANGE_REQUEUE:
        change = ChangeJobEvent::Change::kRequeue;
        return absl::OkStatus();
      case v1::ARRAY_CHANGE_PREEMPT:
        change = ChangeJobEvent::Change::kPreempt;
        return absl::OkStatus();
      case v1::ARRAY_CHANGE_SUSPEND:
        change = ChangeJobEvent::Change::kSuspend;
        return absl::OkStatus();
      default:
        return absl::InvalidArgumentError(
            "change: cancel, hold, release, requeue, preempt or suspend; one of them is required");
    }
  }

  static absl::Status Check(const v1::SubmitArrayRequest& request,
                            const std::vector<v1::JobSpec>& tasks) {
    if (request.request_id().size() > kRequestIdBytesMax) {
      return absl::InvalidArgumentError(absl::StrCat("request_id: ", request.request_id().size(),
                                                     " bytes, at most ", kRequestIdBytesMax,
                                                     " are possible"));
    }
    RETURN_IF_ERROR(spec::ValidateArray(request.tasks()));
    for (size_t i = 0; i < tasks.size(); ++i) {
      const std::vector<spec::Problem> problems = spec::FindProblems(tasks[i]);
      if (problems.empty()) continue;
      return absl::InvalidArgumentError(
          absl::StrJoin(problems, "\n", [i](std::string* out, const spec::Problem& problem) {
            absl::StrAppend(out, "task ", i, ": ", problem.path, ": ", problem.message);
          }));
    }
    return absl::OkStatus();
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
    ASSIGN_OR_RETURN(const LabelSelector selector, LabelSelector::Parse(request.label_selector()));
    const std::vector<PublishedState::Row> rows = shell_.published().List(
        before, static_cast<size_t>(size) + 1,
        [&selector](const v1::JobSpec& spec) { return selector.Matches(spec.labels()); },
        request.summary(), request.live());
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

  // The id takes the place of the job's name.
  absl::Status CheckUsage(v1::GetUsageRequest& request) const {
    RETURN_IF_ERROR(CheckUsageRequest(request));
    if (request.job().empty()) return absl::OkStatus();
    RETURN_IF_ERROR(CheckJobName(request.job()));
    const auto job = shell_.published().Find(request.job());
    if (job == nullptr) return shell_.published().NotFound(request.job());
    request.set_job(job->id());
    return absl::OkStatus();
  }

  absl::Status RankMaps(const std::string& name, v1::GetRankMapsResponse& response) {
    RETURN_IF_ERROR(CheckJobName(name));
    const auto job = shell_.published().Find(name);
    if (job == nullptr) return shell_.published().NotFound(name);
    response.set_job_id(job->id());
    absl::Status bad;
    RETURN_IF_ERROR(
        shell_.store().Scan(Table::kAttempts, schema::Encode(schema::JobKey{JobId(job->id()), {0}}),
                            schema::Encode(schema::JobKey{JobId(job->id()), {job->epoch() + 1}}),
                            [&](const std::string& key, const std::string& value) {
                              v1::AttemptRow attempt;
                              bad = schema::Parse(Table::kAttempts, key, value, attempt);
                              if (!bad.ok()) return false;
                              v1::RankMap& map = *response.add_maps();
                              map.set_epoch(attempt.epoch());
                              *map.mutable_started() = attempt.started();
                              *map.mutable_placements() = attempt.placements();
                              return true;
                            }));
    return bad;
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

  using Submissions = OwnedMessages<v1::SubmitRequest, v1::SubmitResponse>;
  using Batches = OwnedMessages<v1::SubmitJobsRequest, v1::SubmitJobsResponse>;

  Shell& shell_;
  Gate& gate_;
  const std::string version_;
  Submissions submissions_;
  Batches batches_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeJobService(Shell& shell, Gate& gate,
                                              const std::string& version) {
  return std::make_unique<JobService>(shell, gate, version);
}

}  // namespace muster::coordinator
