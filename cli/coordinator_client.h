// The coordinator for the commands: its address, and its API. Only coordinator_client.cc uses gRPC.
#ifndef MUSTER_CLI_COORDINATOR_CLIENT_H_
#define MUSTER_CLI_COORDINATOR_CLIENT_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "muster/v1/admin_service.pb.h"
#include "muster/v1/job_service.pb.h"
#include "muster/v1/rank.pb.h"
#include "security/tls_files.h"

namespace muster::cli {

// Where the coordinator is, and where that is written.
struct Endpoint {
  std::string address;      // HOST:PORT, or file:PATH of a file that holds it
  std::string origin;       // "--coordinator", "$MUSTER_COORDINATOR" or the file of `muster local`
  security::TlsFiles tls;   // none: no TLS
  std::string server_name;  // in the coordinator's certificate; empty: the host of the address
  std::string token;        // empty: none. Sent over TLS, and to this machine without
  std::string traceparent = {};  // sent along with every call; empty: none
};

// --coordinator, else $MUSTER_COORDINATOR, else the address that `muster local up` wrote below
// `home`. kUnavailable: there is none; the message says where it was looked for.
absl::StatusOr<Endpoint> FindCoordinator(const std::string& flag, const std::string& environment,
                                         const std::string& home);

// Blocking calls. kUnavailable and kDeadlineExceeded name the coordinator's address and where it is
// written; other codes are the coordinator's (job_service.proto). Single-threaded.
class CoordinatorClient {
 public:
  virtual ~CoordinatorClient() = default;

  // Retries while the coordinator cannot be reached, for up to `patience`. The request id prevents
  // that this makes two jobs.
  virtual absl::StatusOr<v1::SubmitResponse> Submit(const v1::SubmitRequest& request,
                                                    absl::Duration patience) = 0;
  // As Submit, of at most 1,000 jobs. Their answers are in the reply.
  virtual absl::StatusOr<v1::SubmitJobsResponse> SubmitJobs(const v1::SubmitJobsRequest& request,
                                                            absl::Duration patience) = 0;
  // As Submit.
  virtual absl::StatusOr<v1::SubmitArrayResponse> SubmitArray(const v1::SubmitArrayRequest& request,
                                                              absl::Duration patience) = 0;
  virtual absl::StatusOr<v1::ChangeArrayResponse> ChangeArray(
      const v1::ChangeArrayRequest& request) = 0;
  virtual absl::StatusOr<v1::Job> GetJob(const std::string& name) = 0;
  // Those whose labels match ListJobsRequest.label_selector.
  virtual absl::StatusOr<std::vector<v1::Job>> ListJobs(const std::string& label_selector) = 0;
  // The same without what grows with their ranks and steps.
  virtual absl::StatusOr<std::vector<v1::Job>> ListJobSummaries(
      const std::string& label_selector) = 0;
  // Of jobs that have not ended, and without what grows with their ranks and steps; at most
  // `limit`, the newest.
  virtual absl::StatusOr<std::vector<v1::Job>> ListLiveJobs(size_t limit) = 0;
  virtual absl::StatusOr<v1::Job> CancelJob(const std::string& name) = 0;
  // How a user changes when a job runs: an RPC each, of JobService.
  enum class JobChange { kPreempt, kSuspend, kResume, kHold, kRelease, kRequeue };
  virtual absl::StatusOr<v1::Job> ChangeJob(JobChange change,
                                            const v1::ChangeJobRequest& request) = 0;
  virtual absl::StatusOr<v1::Job> ResizeJob(const v1::ResizeJobRequest& request) = 0;
  virtual absl::StatusOr<v1::GetQueuesResponse> GetQueues() = 0;
  virtual absl::StatusOr<v1::QueuePolicy> GetQueuePolicy() = 0;
  virtual absl::StatusOr<v1::ApplyQueuesResponse> ApplyQueues(const v1::QueuePolicy& policy) = 0;
  virtual absl::StatusOr<v1::ExplainResponse> Explain(const v1::ExplainRequest& request) = 0;
  virtual absl::StatusOr<std::vector<v1::Worker>> ListWorkers() = 0;
  // As of the last second or two.
  virtual absl::StatusOr<std::vector<v1::Worker>> SampleWorkers() = 0;
  virtual absl::StatusOr<v1::GetUsageResponse> GetUsage(const v1::GetUsageRequest& request) = 0;
  virtual absl::StatusOr<v1::GetRankMapsResponse> GetRankMaps(const std::string& name) = 0;
  virtual absl::StatusOr<std::vector<v1::Event>> ListEvents(const std::string& job) = 0;
  virtual absl::StatusOr<v1::GetVersionResponse> GetVersion(absl::Duration timeout) = 0;
  virtual absl::Status RemoveWorker(const std::string& name) = 0;
  virtual absl::StatusOr<v1::FleetResponse> Cordon(const v1::CordonRequest& request) = 0;
  virtual absl::StatusOr<v1::FleetResponse> Uncordon(const v1::UncordonRequest& request) = 0;
  virtual absl::StatusOr<v1::FleetResponse> Forgive(const v1::ForgiveRequest& request) = 0;
  virtual absl::StatusOr<v1::FleetResponse> Drain(const v1::DrainRequest& request) = 0;
  virtual absl::StatusOr<v1::FleetResponse> Reserve(const v1::ReserveRequest& request) = 0;
  virtual absl::StatusOr<v1::FleetResponse> Unreserve(const v1::UnreserveRequest& request) = 0;
  virtual absl::StatusOr<v1::BackupResponse> Backup() = 0;
  virtual absl::StatusOr<v1::CreateTokenResponse> CreateToken(
      const v1::CreateTokenRequest& request) = 0;
  virtual absl::StatusOr<v1::ListTokensResponse> ListTokens() = 0;
  virtual absl::StatusOr<v1::Token> RevokeToken(const std::string& id) = 0;
  // All pages.
  virtual absl::StatusOr<std::vector<v1::AuditEntry>> ListAudit(
      const v1::ListAuditRequest& request) = 0;
  // Calls `each` for every chunk, on this thread, until it returns false or the stream ends.
  virtual absl::Status Snapshot(const std::function<bool(const v1::SnapshotChunk&)>& each) = 0;

  // Streams: call `each` for every item, on this thread, until it returns false or the stream ends.
  // kUnavailable: the stream broke; the next call reads the address again.
  virtual absl::Status WatchJob(const std::string& name,
                                const std::function<bool(const v1::Job&)>& each) = 0;
  virtual absl::Status WatchEvents(const std::string& job, uint64_t after_sequence,
                                   const std::function<bool(const v1::Event&)>& each) = 0;
  virtual absl::Status GetLogs(const v1::GetLogsRequest& request,
                               const std::function<bool(const v1::LogChunk&)>& each) = 0;
  virtual absl::Status GetProfile(const v1::GetProfileRequest& request,
                                  const std::function<bool(const v1::ProfileChunk&)>& each) = 0;
  // The recorded collectives of ranks 0 to `ranks` - 1, by rank. All are asked at the same time.
  // kDeadlineExceeded: that rank did not answer within `timeout`.
  virtual std::vector<absl::StatusOr<v1::CollectiveRecord>> GetCollectives(
      const std::string& job, int ranks, absl::Duration timeout) = 0;

  static std::unique_ptr<CoordinatorClient> Connect(const Endpoint& endpoint);
};

}  // namespace muster::cli

#endif  // MUSTER_CLI_COORDINATOR_CLIENT_H_
