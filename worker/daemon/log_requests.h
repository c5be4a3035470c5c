// Answers the coordinator's requests for what ranks leave in their run directories: logs, records
// of collectives, traces of steps.
#ifndef MUSTER_WORKER_DAEMON_LOG_REQUESTS_H_
#define MUSTER_WORKER_DAEMON_LOG_REQUESTS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "base/file_system.h"
#include "muster/v1/session.pb.h"
#include "worker/daemon/core/daemon_core.h"

namespace muster::worker {

// Thread: the core's. `core` must outlive it.
class LogRequests {
 public:
  // `worker` is for messages.
  LogRequests(std::string attempts_directory, std::string worker, DaemonCore& core);

  // Reads the part of the log that is asked for, at most kLogReplyBytesMax bytes; with
  // `collectives` that record and with `profile` that trace, both of which the rank is asked for
  // if they are not there: the answer is then empty, and the coordinator asks again. A failure is
  // in the reply's status, with the rank and the worker.
  v1::LogReply Answer(const v1::LogRequest& request);

 private:
  v1::LogReply AnswerLog(const v1::LogRequest& request) const;
  v1::LogReply AnswerCollectives(const v1::LogRequest& request);
  v1::LogReply AnswerProfile(const v1::LogRequest& request) const;
  // Asks the rank for the trace by a file in its run directory (worker/rank/profiler.h).
  absl::Status AskForProfile(const v1::LogRequest& request, const std::string& run_directory) const;
  std::string RunDirectory(const RankKey& key) const;
  v1::LogReply Refuse(const v1::LogRequest& request, const char* what,
                      const absl::Status& why) const;

  const std::string attempts_directory_;
  const std::string worker_;
  DaemonCore& core_;
  const std::unique_ptr<FileSystem> files_ = PosixFileSystem();
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_LOG_REQUESTS_H_
