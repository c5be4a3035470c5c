// The worker daemon, put together: the core on its loop, and around it the state directory, the
// process host, the session with the coordinator and the socket of the ranks.
//
// What the core decides is carried out in order, records first (OutputQueue). When a record cannot
// be made durable the daemon stops, while its ranks train on: it never goes on with a state that it
// could forget.
#ifndef MUSTER_WORKER_DAEMON_DAEMON_H_
#define MUSTER_WORKER_DAEMON_DAEMON_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/metrics.h"
#include "base/probes.h"
#include "worker/daemon/core/daemon_core.h"
#include "worker/daemon/daemon_options.h"
#include "worker/daemon/device_errors.h"
#include "worker/daemon/gpu_memory.h"
#include "worker/daemon/gpu_sampler.h"
#include "worker/daemon/gpu_watch.h"
#include "worker/daemon/log_requests.h"
#include "worker/daemon/output_queue.h"
#include "worker/daemon/process_host.h"
#include "worker/daemon/rank_server.h"
#include "worker/daemon/session_client.h"
#include "worker/daemon/state_directory.h"

namespace muster::worker {

class Daemon {
 public:
  // `probes`, when there are some, outlive the daemon, whose start and sessions they are told.
  // kInvalidArgument, or what StateDirectory::Open and RankServer::Listen return; kDataLoss for
  // records that cannot be read.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(DaemonOptions options, const Clock& clock,
                                                       metrics::Registry& metrics,
                                                       std::shared_ptr<Logger> log,
                                                       Probes* probes = nullptr);
  // Stops; ranks train on and are found again by the next daemon on the state directory.
  ~Daemon();

  // Ends every rank: SIGTERM, `stop_grace`, SIGKILL. For --stop-ranks-on-exit.
  void EndRanks();

  const std::string& socket() const { return state_->socket(); }
  const std::string& state_directory() const { return state_->path(); }

 private:
  Daemon(DaemonOptions options, const Clock& clock, metrics::Registry& metrics,
         std::shared_ptr<Logger> log, std::unique_ptr<StateDirectory> state, Probes* probes);
  // Starts the loop and everything that posts to it, and carries out what the core asked for first.
  absl::Status StartServices(DaemonOutput recovered);
  void StartCounters();
  // What the core is told. Looks for devices.
  // `upgraded`: the state directory has records.
  DaemonCoreConfig Config(bool upgraded);
  absl::Time Now() const { return absl::UnixEpoch() + clock_.Monotonic(); }

  void Post(DaemonEvent event);
  void Handle(DaemonEvent event);
  void CountAndLog(const DaemonEvent& event);
  void OnGpuError(const GpuError& error);
  // On the thread of outputs_.
  absl::Status Write(const std::vector<DaemonRecord>& records);
  void OnWriteFailed(const absl::Status& status);
  void Carry(PrepareAttempt action) { host_->Carry(std::move(action)); }
  void Carry(StartRank action);
  void Carry(AttachRank action);
  void Carry(ReassignRank action);
  void Carry(SignalRank action) { host_->Carry(std::move(action)); }
  void Carry(VerifyRelease action) { host_->Carry(std::move(action)); }
  void Carry(AttemptForgotten action) { host_->Prune(core_->HeldDirectories()); }
  void Carry(SendToCoordinator action);
  void Carry(ReplyToRank action) { server_->Reply(std::move(action)); }
  void Carry(Reconnect action);
  void Carry(ArmTimer action);
  void OnMessage(SessionId session, v1::FromCoordinator message);
  void UpdateGauges();
  // Every second.
  void TellProbes();
  void MeasureDisk();
  void MeasureCertificates();

  const DaemonOptions options_;
  const Clock& clock_;
  metrics::Registry& metrics_;
  const std::shared_ptr<Logger> log_;
  Probes* const probes_;  // may be null
  // Destroyed from the last up: first what posts events, then the loop, then what events use. Those
  // marked * are used on the loop only, once it runs.
  std::unique_ptr<StateDirectory> state_;
  std::unique_ptr<DaemonCore> core_;           // *
  std::unique_ptr<LogRequests> log_requests_;  // *
  DeviceErrors device_errors_;                 // *
  std::set<RankKey> attaching_;                // * ranks that may be found again
  int devices_ = 0;                            // offered: ranks that may run at a time
  uint64_t timer_ = 0;                         // * number of the newest timer
  bool failed_ = false;                        // * a record could not be made durable
  bool ending_ranks_ = false;                  // * EndRanks was called
  std::unique_ptr<ThreadLoop> loop_;
  std::unique_ptr<OutputQueue> outputs_;  // *
  std::unique_ptr<GpuWatch> gpu_watch_;
  std::unique_ptr<GpuMemory> gpu_memory_;  // used on the host's thread
  std::unique_ptr<GpuSampler> gpu_sampler_;
  std::unique_ptr<RankServer> server_;
  std::unique_ptr<ProcessHost> host_;  // uses server_
  std::unique_ptr<SessionClient> session_;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_DAEMON_H_
