#include "cli/coordinator_client.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/network.h"
#include "base/status_macros.h"
#include "muster/v1/admin_service.grpc.pb.h"
#include "muster/v1/job_service.grpc.pb.h"
#include "security/credentials.h"

namespace muster::cli {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(20);
constexpr absl::Duration kArrayTimeout = absl::Minutes(2);  // of ten thousand tasks
constexpr absl::Duration kBackupTimeout = absl::Minutes(10);
constexpr absl::Duration kRetryFirst = absl::Milliseconds(100);
constexpr absl::Duration kRetryMax = absl::Seconds(2);
constexpr int kPageSize = 500;
constexpr int kThreadsMax = 32;  // threads that wait for answers of ranks

// The address itself, read from its file when it is "file:PATH".
absl::StatusOr<std::string> Resolve(const Endpoint& endpoint) {
  if (!absl::StartsWith(endpoint.address, "file:")) return endpoint.address;
  const std::string path = endpoint.address.substr(5);
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line) || absl::StripAsciiWhitespace(line).empty()) {
    return absl::UnavailableError(
        absl::StrCat("no coordinator address in ", path, " (from ", endpoint.origin, ")"));
  }
  return std::string(absl::StripAsciiWhitespace(line));
}

class GrpcClient : public CoordinatorClient {
 public:
  explicit GrpcClient(Endpoint endpoint) : endpoint_(std::move(endpoint)) {}

  absl::StatusOr<v1::SubmitResponse> Submit(const v1::SubmitRequest& request,
                                            absl::Duration patience) override {
    return Patiently(patience, [&] {
      return Call<v1::SubmitResponse>(&v1::JobService::Stub::Submit, request, kCallTimeout);
    });
  }

  absl::StatusOr<v1::SubmitJobsResponse> SubmitJobs(const v1::SubmitJobsRequest& request,
                                                    absl::Duration patience) override {
    // A coordinator that stops says of some of the jobs that it is not there any more.
    std::optional<v1::SubmitJobsResponse> some;
    const absl::StatusOr<v1::SubmitJobsResponse> all =
        Patiently(patience, [&]() -> absl::StatusOr<v1::SubmitJobsResponse> {
          ASSIGN_OR_RETURN(v1::SubmitJobsResponse response,
                           Call<v1::SubmitJobsResponse>(&v1::JobService::Stub::SubmitJobs, request,
                                                        kArrayTimeout));
          for (const v1::SubmitJobsResult& result : response.results()) {
            if (result.code() != grpc::StatusCode::UNAVAILABLE) continue;
            some = std::move(response);
            return absl::UnavailableError("");
          }
          return response;
        });
    return all.ok() || !some.has_value() ? all : *some;
  }

  absl::StatusOr<v1::SubmitArrayResponse> SubmitArray(const v1::SubmitArrayRequest& request,
                                                      absl::Duration patience) override {
    return Patiently(patience, [&] {
      return Call<v1::SubmitArrayResponse>(&v1::JobService::Stub::SubmitArray, request,
                                           kArrayTimeout);
    });
  }

  absl::StatusOr<v1::ChangeArrayResponse> ChangeArray(
      const v1::ChangeArrayRequest& request) override {
    return Call<v1::ChangeArrayResponse>(&v1::JobService::Stub::ChangeArray, request,
                                         kArrayTimeout);
  }

  absl::StatusOr<v1::Job> GetJob(const std::string& name) override {
    v1::GetJobRequest request;
    request.set_name(name);
    return Call<v1::Job>(&v1::JobService::Stub::GetJob, request, kCallTimeout);
  }

  absl::StatusOr<v1::Job> CancelJob(const std::string& name) override {
    v1::CancelJobRequest request;
    request.set_name(name);
    return Call<v1::Job>(&v1::JobService::Stub::CancelJob, request, kCallTimeout);
  }

  absl::StatusOr<v1::Job> ChangeJob(JobChange change,
                                    const v1::ChangeJobRequest& request) override {
    using Stub = v1::JobService::Stub;
    switch (change) {
      case JobChange::kPreempt:
        return Call<v1::Job>(&Stub::PreemptJob, request, kCallTimeout);
      case JobChange::kSuspend:
        return Call<v1::Job>(&Stub::SuspendJob, request, kCallTimeout);
      case JobChange::kResume:
        return Call<v1::Job>(&Stub::ResumeJob, request, kCallTimeout);
      case JobChange::kHold:
        return Call<v1::Job>(&Stub::HoldJob, request, kCallTimeout);
      case JobChange::kRelease:
        return Call<v1::Job>(&Stub::ReleaseJob, request, kCallTimeout);
      case JobChange::kRequeue:
        return Call<v1::Job>(&Stub::RequeueJob, request, kCallTimeout);
    }
    return absl::InternalError("no such change of a job");
  }

  absl::StatusOr<v1::Job> ResizeJob(const v1::ResizeJobRequest& request) override {
    return Call<v1::Job>(&v1::JobService::Stub::ResizeJob, request, kCallTimeout);
  }

  absl::StatusOr<std::vector<v1::Job>> ListJobs(const std::string& label_selector) override {
    v1::ListJobsRequest request;
    request.set_label_selector(label_selector);
    return Pages<v1::Job, v1::ListJobsResponse>(
        &v1::JobService::Stub::ListJobs, std::move(request),
        [](v1::ListJobsResponse& page) { return page.mutable_jobs(); });
  }

  absl::StatusOr<std::vector<v1::Job>> ListJobSummaries(
      const std::string& label_selector) override {
    v1::ListJobsRequest request;
    request.set_label_selector(label_selector);
    request.set_summary(true);
    return Pages<v1::Job, v1::ListJobsResponse>(
        &v1::JobService::Stub::ListJobs, std::move(request),
        [](v1::ListJobsResponse& page) { return page.mutable_jobs(); });
  }

  absl::StatusOr<std::vector<v1::Job>> ListLiveJobs(size_t limit) override {
    v1::ListJobsRequest request;
    request.set_page_size(static_cast<int32_t>(std::min<size_t>(limit, kPageSize)));
    request.set_summary(true);
    request.set_live(true);
    ASSIGN_OR_RETURN(
        v1::ListJobsResponse page,
        Call<v1::ListJobsResponse>(&v1::JobService::Stub::ListJobs, request, kCallTimeout));
    return std::vector<v1::Job>(page.jobs().begin(), page.jobs().end());
  }

  absl::StatusOr<v1::GetUsageResponse> GetUsage(const v1::GetUsageRequest& request) override {
    return Call<v1::GetUsageResponse>(&v1::JobService::Stub::GetUsage, request, kCallTimeout);
  }

  absl::StatusOr<v1::GetRankMapsResponse> GetRankMaps(const std::string& name) override {
    v1::GetRankMapsRequest request;
    request.set_name(name);
    return Call<v1::GetRankMapsResponse>(&v1::JobService::Stub::GetRankMaps, request, kCallTimeout);
  }

  absl::StatusOr<v1::ExplainResponse> Explain(const v1::ExplainRequest& request) override {
    return Call<v1::ExplainResponse>(&v1::JobService::Stub::Explain, request, kCallTimeout);
  }

  absl::StatusOr<std::vector<v1::Worker>> ListWorkers() override {
    return Pages<v1::Worker, v1::ListWorkersResponse>(
        &v1::JobService::Stub::ListWorkers, v1::ListWorkersRequest(),
        [](v1::ListWorkersResponse& page) { return page.mutable_workers(); });
  }

  absl::StatusOr<std::vector<v1::Worker>> SampleWorkers() override {
    v1::ListWorkersRequest request;
    request.set_sampled(true);
    return Pages<v1::Worker, v1::ListWorkersResponse>(
        &v1::JobService::Stub::ListWorkers, std::move(request),
        [](v1::ListWorkersResponse& page) { return page.mutable_workers(); });
  }

  absl::StatusOr<std::vector<v1::Event>> ListEvents(const std::string& job) override {
    v1::ListEventsRequest request;
    request.set_job(job);
    return Pages<v1::Event, v1::ListEventsResponse>(
        &v1::JobService::Stub::ListEvents, std::move(request),
        [](v1::ListEventsResponse& page) { return page.mutable_events(); });
  }

  absl::StatusOr<v1::GetVersionResponse> GetVersion(absl::Duration timeout) override {
    return Call<v1::GetVersionResponse>(&v1::JobService::Stub::GetVersion, v1::GetVersionRequest(),
                                        timeout);
  }

  absl::Status RemoveWorker(const std::string& name) override {
    v1::RemoveWorkerRequest request;
    request.set_name(name);
    return CallAdmin<v1::RemoveWorkerResponse>(&v1::AdminService::Stub::RemoveWorker, request,
                                               kCallTimeout)
        .status();
  }

  absl::StatusOr<v1::FleetResponse> Cordon(const v1::CordonRequest& request) override {
    return CallAdmin<v1::FleetResponse>(&v1::AdminService::Stub::Cordon, request, kCallTimeout);
  }
  absl::StatusOr<v1::FleetResponse> Uncordon(const v1::UncordonRequest& request) override {
    return CallAdmin<v1::FleetResponse>(&v1::AdminService::Stub::Uncordon, request, kCallTimeout);
  }
  absl::StatusOr<v1::FleetResponse> Forgive(const v1::ForgiveRequest& request) override {
    return CallAdmin<v1::FleetResponse>(&v1::AdminService::Stub::Forgive, request, kCallTimeout);
  }
  absl::StatusOr<v1::FleetResponse> Drain(const v1::DrainRequest& request) override {
    return CallAdmin<v1::FleetResponse>(&v1::AdminService::Stub::Drain, request, kCallTimeout);
  }
  absl::StatusOr<v1::FleetResponse> Reserve(const v1::ReserveRequest& request) override {
    return CallAdmin<v1::FleetResponse>(&v1::AdminService::Stub::Reserve, request, kCallTimeout);
  }
  absl::StatusOr<v1::FleetResponse> Unreserve(const v1::UnreserveRequest& request) override {
    return CallAdmin<v1::FleetResponse>(&v1::AdminService::Stub::Unreserve, request, kCallTimeout);
  }

  absl::StatusOr<v1::GetQueuesResponse> GetQueues() override {
    return Call<v1::GetQueuesResponse>(&v1::JobService::Stub::GetQueues, v1::GetQueuesRequest(),
                                       kCallTimeout);
  }

  absl::StatusOr<v1::QueuePolicy> GetQueuePolicy() override {
    return CallAdmin<v1::QueuePolicy>(&v1::AdminService::Stub::GetQueuePolicy,
                                      v1::GetQueuePolicyRequest(), kCallTimeout);
  }

  absl::StatusOr<v1::ApplyQueuesResponse> ApplyQueues(const v1::QueuePolicy& policy) override {
    v1::ApplyQueuesRequest request;
    *request.mutable_policy() = policy;
    return CallAdmin<v1::ApplyQueuesResponse>(&v1::AdminService::Stub::ApplyQueues, request,
                                              kCallTimeout);
  }

  absl::StatusOr<v1::BackupResponse> Backup() override {
    return CallAdmin<v1::BackupResponse>(&v1::AdminService::Stub::Backup, v1::BackupRequest(),
                                         kBackupTimeout);
  }

  absl::StatusOr<v1::CreateTokenResponse> CreateToken(
      const v1::CreateTokenRequest& request) override {
    return CallAdmin<v1::CreateTokenResponse>(&v1::AdminService::Stub::CreateToken, request,
                                              kCallTimeout);
  }
  absl::StatusOr<v1::ListTokensResponse> ListTokens() override {
    return CallAdmin<v1::ListTokensResponse>(&v1::AdminService::Stub::ListTokens,
                                             v1::ListTokensRequest(), kCallTimeout);
  }
  absl::StatusOr<v1::Token> RevokeToken(const std::string& id) override {
    v1::RevokeTokenRequest request;
    request.set_id(id);
    return CallAdmin<v1::Token>(&v1::AdminService::Stub::RevokeToken, request, kCallTimeout);
  }
  absl::StatusOr<std::vector<v1::AuditEntry>> ListAudit(
      const v1::ListAuditRequest& request) override {
    std::vector<v1::AuditEntry> all;
    v1::ListAuditRequest next = request;
    next.set_page_size(kPageSize);
    do {
      ASSIGN_OR_RETURN(
          v1::ListAuditResponse page,
          CallAdmin<v1::ListAuditResponse>(&v1::AdminService::Stub::ListAudit, next, kCallTimeout));
      for (v1::AuditEntry& entry : *page.mutable_entries()) all.push_back(std::move(entry));
      next.set_page_token(page.next_page_token());
    } while (!next.page_token().empty());
    return all;
  }

  absl::Status Snapshot(const std::function<bool(const v1::SnapshotChunk&)>& each) override {
    RETURN_IF_ERROR(Stub().status());
    return StreamOn<v1::SnapshotChunk>(*admin_, &v1::AdminService::Stub::Snapshot,
                                       v1::SnapshotRequest(), each);
  }

  absl::Status WatchJob(const std::string& name,
                        const std::function<bool(const v1::Job&)>& each) override {
    v1::GetJobRequest request;
    request.set_name(name);
    return Stream<v1::Job>(&v1::JobService::Stub::WatchJob, request, each);
  }

  absl::Status WatchEvents(const std::string& job, uint64_t after_sequence,
                           const std::function<bool(const v1::Event&)>& each) override {
    v1::WatchEventsRequest request;
    request.set_job(job);
    request.set_after_sequence(after_sequence);
    return Stream<v1::Event>(&v1::JobService::Stub::WatchEvents, request, each);
  }

  absl::Status GetLogs(const v1::GetLogsRequest& request,
                       const std::function<bool(const v1::LogChunk&)>& each) override {
    return Stream<v1::LogChunk>(&v1::JobService::Stub::GetLogs, request, each);
  }

  absl::Status GetProfile(const v1::GetProfileRequest& request,
                          const std::function<bool(const v1::ProfileChunk&)>& each) override {
    return Stream<v1::ProfileChunk>(&v1::JobService::Stub::GetProfile, request, each);
  }

  std::vector<absl::StatusOr<v1::CollectiveRecord>> GetCollectives(
      const std::string& job, int ranks, absl::Duration timeout) override {
    std::vector<absl::StatusOr<v1::CollectiveRecord>> records(static_cast<size_t>(ranks),
                                                              absl::UnknownError("was not asked"));
    const auto stub = Stub();
    if (!stub.ok()) {
      std::fill(records.begin(), records.end(), stub.status());
      return records;
    }
    v1::GetCollectivesRequest request;
    request.set_name(job);
    std::atomic<int> next = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < std::min(ranks, kThreadsMax); ++i) {
      threads.emplace_back([&, request]() mutable {
        for (int rank = next++; rank < ranks; rank = next++) {
          request.set_rank(rank);
          records[static_cast<size_t>(rank)] = CollectivesOf(**stub, request, timeout);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return records;
  }

 private:
  // Calls again while the coordinator cannot be reached, for up to `patience`.
  template <typename Attempt>
  static auto Patiently(absl::Duration patience, Attempt attempt) -> decltype(attempt()) {
    const absl::Time give_up = absl::Now() + patience;
    for (absl::Duration pause = kRetryFirst;; pause = std::min(pause * 2, kRetryMax)) {
      auto response = attempt();
      const bool lost = response.status().code() == absl::StatusCode::kUnavailable ||
                        response.status().code() == absl::StatusCode::kDeadlineExceeded;
      if (!lost || absl::Now() + pause > give_up) return response;
      absl::SleepFor(pause);
    }
  }
  // Thread: any.
  absl::StatusOr<v1::CollectiveRecord> CollectivesOf(v1::JobService::Stub& stub,
                                                     const v1::GetCollectivesRequest& request,
                                                     absl::Duration timeout) const {
    grpc::ClientContext context;
    Authorize(context);
    context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    v1::GetCollectivesResponse response;
    const grpc::Status status = stub.GetCollectives(&context, request, &response);
    if (status.ok()) return std::move(*response.mutable_record());
    if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
      return absl::DeadlineExceededError(
          absl::StrCat("no answer within ", absl::FormatDuration(timeout),
                       "; its process may be stopped, or its machine out of reach"));
    }
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  }

  absl::StatusOr<v1::JobService::Stub*> Stub() {
    if (stub_ != nullptr) return stub_.get();
    ASSIGN_OR_RETURN(address_, Resolve(endpoint_));
    RETURN_IF_ERROR(CheckLink());
    grpc::ChannelArguments arguments;
    if (!endpoint_.server_name.empty()) {
      arguments.SetString(GRPC_SSL_TARGET_NAME_OVERRIDE_ARG, endpoint_.server_name);
    }
    // Coordinators are dialled directly, not through a proxy for the web.
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetMaxReceiveMessageSize(-1);
    // Finds a restarted coordinator soon: by default gRPC waits a second, then longer.
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
    // Without it a new channel to the same address inherits the back-off of the one before.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel =
        grpc::CreateCustomChannel(address_,
                                  endpoint_.tls.any() ? security::ChannelCredentials(endpoint_.tls)
                                                      : grpc::InsecureChannelCredentials(),
                                  arguments);
    stub_ = v1::JobService::NewStub(channel);
    admin_ = v1::AdminService::NewStub(channel);
    return stub_.get();
  }

  // A token is not told to a network that can read along.
  absl::Status CheckLink() const {
    if (endpoint_.tls.any()) return security::CheckClientFiles(endpoint_.tls, absl::Now());
    const absl::StatusOr<HostPort> parsed = ParseHostPort(address_);
    const bool here =
        parsed.ok() && (IsLoopbackAddress(parsed->host) || parsed->host == "localhost");
    if (endpoint_.token.empty() || here) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "a token is not sent to ", address_,
        " without TLS: give --tls-ca, the authority of the coordinator's certificate"));
  }

  void Authorize(grpc::ClientContext& context) const {
    if (!endpoint_.token.empty()) {
      context.AddMetadata("authorization", absl::StrCat("Bearer ", endpoint_.token));
    }
    if (!endpoint_.traceparent.empty()) {
      context.AddMetadata("traceparent", endpoint_.traceparent);
    }
  }

  absl::Status AsStatus(const grpc::Status& status) {
    if (status.ok()) return absl::OkStatus();
    const auto code = static_cast<absl::StatusCode>(status.error_code());
    if (code == absl::StatusCode::kDeadlineExceeded) {
      stub_.reset();
      return absl::DeadlineExceededError(absl::StrCat("the coordinator at ", address_, " (from ",
                                                      endpoint_.origin,
                                                      ") did not answer in time"));
    }
    if (code != absl::StatusCode::kUnavailable) return {code, status.error_message()};
    stub_.reset();
    return absl::UnavailableError(absl::StrCat(
        "no answer from the coordinator at ", address_, " (from ", endpoint_.origin,
        "): ", status.error_message(),
        endpoint_.tls.any() ? "; it must speak TLS, with a certificate of --tls-ca for this host"
                            : "; where it speaks TLS, give --tls-ca and --tls-cert, --tls-key or a "
                              "token"));
  }

  template <typename Response, typename Method, typename Request>
  absl::StatusOr<Response> Call(Method method, const Request& request, absl::Duration timeout) {
    ASSIGN_OR_RETURN(v1::JobService::Stub * stub, Stub());
    return CallOn<Response>(*stub, method, request, timeout);
  }

  template <typename Response, typename Method, typename Request>
  absl::StatusOr<Response> CallAdmin(Method method, const Request& request,
                                     absl::Duration timeout) {
    RETURN_IF_ERROR(Stub().status());
    return CallOn<Response>(*admin_, method, request, timeout);
  }

  template <typename Response, typename Service, typename Method, typename Request>
  absl::StatusOr<Response> CallOn(Service& stub, Method method, const Request& request,
                                  absl::Duration timeout) {
    grpc::ClientContext context;
    Authorize(context);
    context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    Response response;
    const absl::Status status = AsStatus((stub.*method)(&context, request, &response));
    if (!status.ok()) return status;
    return response;
  }

  template <typename Item, typename Response, typename Method, typename Request, typename Items>
  absl::StatusOr<std::vector<Item>> Pages(Method method, Request request, Items items) {
    std::vector<Item> all;
    request.set_page_size(kPageSize);
    do {
      ASSIGN_OR_RETURN(Response page, Call<Response>(method, request, kCallTimeout));
      for (Item& item : *items(page)) all.push_back(std::move(item));
      request.set_page_token(page.next_page_token());
    } while (!request.page_token().empty());
    return all;
  }

  template <typename Item, typename Method, typename Request>
  absl::Status Stream(Method method, const Request& request,
                      const std::function<bool(const Item&)>& each) {
    ASSIGN_OR_RETURN(v1::JobService::Stub * stub, Stub());
    return StreamOn<Item>(*stub, method, request, each);
  }

  template <typename Item, typename Service, typename Method, typename Request>
  absl::Status StreamOn(Service& stub, Method method, const Request& request,
                        const std::function<bool(const Item&)>& each) {
    grpc::ClientContext context;
    Authorize(context);
    const auto reader = (stub.*method)(&context, request);
    Item item;
    while (reader->Read(&item)) {
      if (each(item)) continue;
      context.TryCancel();
      reader->Finish();
      return absl::OkStatus();
    }
    return AsStatus(reader->Finish());
  }

  const Endpoint endpoint_;
  std::string address_;
  std::unique_ptr<v1::JobService::Stub> stub_;
  std::unique_ptr<v1::AdminService::Stub> admin_;  // on the same channel; set with stub_
};

}  // namespace

absl::StatusOr<Endpoint> FindCoordinator(const std::string& flag, const std::string& environment,
                                         const std::string& home) {
  if (!flag.empty()) return Endpoint{flag, "--coordinator", {}, "", ""};
  if (!environment.empty()) return Endpoint{environment, "$MUSTER_COORDINATOR", {}, "", ""};
  const std::string path = home + "/local/coordinator/address";
  if (std::ifstream(path).good()) return Endpoint{"file:" + path, path, {}, "", ""};
  return absl::UnavailableError(
      absl::StrCat("no coordinator: --coordinator and $MUSTER_COORDINATOR are not set and ", path,
                   " does not exist; `muster local up` starts a cluster on this machine"));
}

std::unique_ptr<CoordinatorClient> CoordinatorClient::Connect(const Endpoint& endpoint) {
  return std::make_unique<GrpcClient>(endpoint);
}

}  // namespace muster::cli
