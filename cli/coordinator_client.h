// The coordinator as the commands see it: its address, and its API over gRPC. The one place of the
// client that knows gRPC.
#ifndef MUSTER_CLI_COORDINATOR_CLIENT_H_
#define MUSTER_CLI_COORDINATOR_CLIENT_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "muster/v1/job_service.pb.h"
#include "muster/v1/rank.pb.h"

namespace muster::cli {

// Where the coordinator is, and who said so.
struct Endpoint {
  std::string address;  // HOST:PORT, or file:PATH of a file that holds it
  std::string origin;   // "--coordinator", "$MUSTER_COORDINATOR" or the file of `muster local`
};

// --coordinator, else $MUSTER_COORDINATOR, else what `muster local up` wrote below `home`.
// kUnavailable when there is none: says what was looked for.
absl::StatusOr<Endpoint> FindCoordinator(const std::string& flag, const std::string& environment,
                                         const std::string& home);

// Blocking calls. Every error names the coordinator's address and where it came from when it could
// not be reached (kUnavailable); other codes are the coordinator's own. Single-threaded.
class CoordinatorClient {
 public:
  virtual ~CoordinatorClient() = default;

  // Repeats itself with the same request while the coordinator cannot be reached, up to
  // `patience`: the request id makes that safe.
  virtual absl::StatusOr<v1::SubmitResponse> Submit(const v1::SubmitRequest& request,
                                                    absl::Duration patience) = 0;
  virtual absl::StatusOr<v1::Job> GetJob(const std::string& name) = 0;
  virtual absl::StatusOr<std::vector<v1::Job>> ListJobs() = 0;
  virtual absl::StatusOr<v1::Job> CancelJob(const std::string& name) = 0;
  virtual absl::StatusOr<std::vector<v1::Worker>> ListWorkers() = 0;
  virtual absl::StatusOr<std::vector<v1::Event>> ListEvents(const std::string& job) = 0;
  virtual absl::StatusOr<v1::GetVersionResponse> GetVersion(absl::Duration timeout) = 0;

  // Streams: `each` is called for every item, on this thread; false ends the stream. They return
  // when the stream ends; kUnavailable when it broke. After kUnavailable the next call looks the
  // address up again.
  virtual absl::Status WatchJob(const std::string& name,
                                const std::function<bool(const v1::Job&)>& each) = 0;
  virtual absl::Status WatchEvents(const std::string& job, uint64_t after_sequence,
                                   const std::function<bool(const v1::Event&)>& each) = 0;
  virtual absl::Status GetLogs(const v1::GetLogsRequest& request,
                               const std::function<bool(const v1::LogChunk&)>& each) = 0;
  // What the collectives of ranks 0 to `ranks` - 1 are doing, asked of all of them at the same
  // time. kDeadlineExceeded: that rank did not answer within `timeout`.
  virtual std::vector<absl::StatusOr<v1::CollectiveRecord>> GetCollectives(
      const std::string& job, int ranks, absl::Duration timeout) = 0;

  static std::unique_ptr<CoordinatorClient> Connect(const Endpoint& endpoint);
};

}  // namespace muster::cli

#endif  // MUSTER_CLI_COORDINATOR_CLIENT_H_
