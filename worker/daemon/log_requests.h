// Answers the coordinator's requests for what ranks leave in their run directories: logs, records
// of collectives, traces of steps.
#ifndef MUSTER_WORKER_DAEMON_LOG_REQUESTS_H_
#define MUSTER_WORKER_DAEMON_LOG_REQUESTS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "muster/v1/session.pb.h"
#include "worker/daemon/core/daemon_core.h"
#include "worker/daemon/rank_files.h"

namespace muster::worker {

// Thread: the core's. `core` must outlive it.
class LogRequests {
 public:
  // `worker` is for messages.
  LogRequests(std::string attempts_directory, std::string worker, DaemonCore& core);

  // Reads the part of the log that is asked for, at most kLogReplyBytesMax bytes. A failure is in
  // the reply's status, with the rank and the worker, here and below.
  v1::LogReply Answer(const v1::LogRequest& request) const;
  // The record, at most kCollectivesBytesMax bytes. The rank is asked for one that is not there;
  // the answer is then empty, and the coordinator asks again.
  v1::CollectivesReply Answer(const v1::CollectivesRequest& request);
  // As for a log, of the trace. The rank is asked for one that is not there.
  v1::ProfileReply Answer(const v1::ProfileRequest& request) const;

 private:
  absl::StatusOr<v1::CollectiveRecord> ReadCollectives(const RankFiles& files,
                                                       const std::string& name) const;
  // Asks the rank for the trace by a file in its run directory (worker/rank/profiler.h).
  absl::Status AskForProfile(const v1::ProfileSteps& steps, const RankFiles& files) const;
  std::string RunDirectory(const RankKey& key) const;

  const std::string attempts_directory_;
  const std::string worker_;
  DaemonCore& core_;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_LOG_REQUESTS_H_
