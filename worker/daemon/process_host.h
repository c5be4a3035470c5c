// Starts, finds again, signals and reaps the rank processes of this machine, each under a shim
// (shim.h). All of its state can be rebuilt from the run directories, so a daemon may die at any
// instruction.
#ifndef MUSTER_WORKER_DAEMON_PROCESS_HOST_H_
#define MUSTER_WORKER_DAEMON_PROCESS_HOST_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "security/accounts.h"
#include "worker/daemon/core/events.h"
#include "worker/daemon/job_files.h"
#include "worker/daemon/log_files.h"

namespace muster::worker {

struct ProcessHostOptions {
  std::string attempts_directory;
  std::string shim_binary;  // run as `BINARY shim ...`
  std::string rank_binary;
  std::string rank_log_format;  // --log-format of the rank program; empty: its default
  // What a rank runs; empty = {rank_binary, "--assignment", RUN_DIR/assignment.pb}, or of a job
  // with a command {shim_binary, "command", RUN_DIR/assignment.pb}.
  std::function<std::vector<std::string>(const v1::RankAssignment&)> command;
  LogLimits log;
  JobFilePolicy files;
  security::JobUserPolicy user;
  // Where accounts of ranks have their directories: STATE/users.
  std::string users_directory;
  // Makes the socket of the daemon for ranks of this account, if there is none yet, and returns its
  // path. Called on the host's thread.
  std::function<absl::StatusOr<std::string>(uid_t uid, gid_t gid)> serve_user;
  std::string worker;  // for messages
  // The bytes in use of a device ("cuda:0"), by whomever; no value where that is not known. Called
  // on the host's thread.
  std::function<std::optional<int64_t>(const std::string& device)> device_bytes;
  // For so long the driver may take to give a device's memory back once the rank has ended.
  absl::Duration device_patience = absl::Seconds(50);
};

// Owns one thread. Methods may be called from any thread and return at once, but for EndAll;
// answers are events, handed to `post` on the host's thread. The end of a process is seen through
// its pidfd, within milliseconds.
class ProcessHost {
 public:
  virtual ~ProcessHost() = default;
  // `post` gets AttemptPrepared, RankStarted, RankNotStarted, RankExited, RankReassigned,
  // ReleaseProven and, when the memory of a rank's device does not come back, DeviceFailed.
  static std::unique_ptr<ProcessHost> Start(ProcessHostOptions options, const Clock& clock,
                                            std::shared_ptr<Logger> log,
                                            std::function<void(DaemonEvent)> post);

  virtual void Carry(PrepareAttempt action) = 0;
  virtual void Carry(StartRank action) = 0;
  virtual void Carry(AttachRank action) = 0;
  virtual void Carry(ReassignRank action) = 0;
  virtual void Carry(SignalRank action) = 0;
  virtual void Carry(VerifyRelease action) = 0;
  // Removes the oldest attempt directories beyond kAttemptsKept; never one named in `held`.
  virtual void Prune(std::set<std::string> held) = 0;
  // SIGTERM to every rank that runs, SIGKILL after `grace`; returns when none is left, or after
  // `grace` and `patience` more.
  virtual void EndAll(absl::Duration grace, absl::Duration patience) = 0;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_PROCESS_HOST_H_
