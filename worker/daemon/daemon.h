// The worker daemon, put together: the core on its loop, and around it the state directory, the
// process host, the session with the coordinator and the socket of the ranks.
//
// Whatever the core decides is carried out in order, records first. When a record cannot be made
// durable the daemon stops (ranks train on): it never goes on with a state that it could forget.
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
#include "worker/daemon/daemon_core.h"
#include "worker/daemon/gpu_watch.h"
#include "worker/daemon/gpus.h"
#include "worker/daemon/network.h"
#include "worker/daemon/process_host.h"
#include "worker/daemon/rank_server.h"
#include "worker/daemon/session_client.h"
#include "worker/daemon/state_directory.h"

namespace muster::worker {

struct DaemonOptions {
  std::string name;         // 1-63 characters of [a-z0-9-.], unique in the cluster
  std::string coordinator;  // SessionClientOptions::coordinator
  std::string state_directory;
  int slots = 1;  // CPU slots
  // Where to look for GPUs; unset: none are offered.
  std::optional<GpuOptions> gpus;
  std::string version;
  std::string metrics_address;  // told to the coordinator
  AddressChoice address;
  std::string rank_ports;  // "20000-20999"; empty = any
  std::string host_id;     // v1::Hello.host_id; empty = the machine's boot id
  std::string shim_binary;
  std::string rank_binary;
  // ProcessHostOptions::command.
  std::function<std::vector<std::string>(const v1::RankAssignment&)> rank_command;
  LogLimits log;
  absl::Duration stop_grace = absl::Seconds(10);
  // A failure that the daemon cannot go on from; called once, on its loop.
  std::function<void(absl::Status)> on_fatal;
};

class Daemon {
 public:
  // kInvalidArgument, or what StateDirectory::Open and RankServer::Start return; kDataLoss for
  // records that cannot be read.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(DaemonOptions options, const Clock& clock,
                                                       metrics::Registry& metrics,
                                                       std::shared_ptr<Logger> log);
  // Stops; ranks train on and are found again by the next daemon on the state directory.
  ~Daemon();

  // Ends every rank: SIGTERM, `stop_grace`, SIGKILL. For --stop-ranks-on-exit.
  void EndRanks();

  const std::string& socket() const { return state_->socket(); }
  const std::string& state_directory() const { return state_->path(); }

 private:
  Daemon(DaemonOptions options, const Clock& clock, metrics::Registry& metrics,
         std::shared_ptr<Logger> log, std::unique_ptr<StateDirectory> state);
  DaemonCoreConfig Config();
  absl::Time Now() const { return absl::UnixEpoch() + clock_.Monotonic(); }

  void Post(DaemonEvent event);
  void Handle(DaemonEvent event);
  void Note(const DaemonEvent& event);
  void OnGpuError(const GpuError& error);
  // The GPU's error belongs to how the rank ended.
  void NameGpu(RankExited& exited);
  void CarryOut(DaemonOutput output);
  void Carry(PrepareAttempt action) { host_->Carry(std::move(action)); }
  void Carry(StartRank action);
  void Carry(AttachRank action);
  void Carry(SignalRank action) { host_->Carry(std::move(action)); }
  void Carry(VerifyRelease action) { host_->Carry(std::move(action)); }
  void Carry(AttemptForgotten action) { host_->Prune(core_->HeldDirectories()); }
  void Carry(SendToCoordinator action);
  void Carry(ReplyToRank action) { server_->Reply(std::move(action)); }
  void Carry(Reconnect action);
  void Carry(ArmTimer action);
  void OnMessage(SessionId session, v1::FromCoordinator message);
  v1::LogReply ReadLogFor(const v1::LogRequest& request);
  v1::LogReply ReadCollectivesFor(const v1::LogRequest& request);
  // Asks the rank for the trace, through a file in its run directory, until it is there.
  v1::LogReply ReadProfileFor(const v1::LogRequest& request) const;
  void UpdateGauges();
  void MeasureLogs();

  const DaemonOptions options_;
  const Clock& clock_;
  metrics::Registry& metrics_;
  const std::shared_ptr<Logger> log_;
  const Incarnation incarnation_;
  // Destroyed from the last up: first what posts events, then the loop, then what events use.
  std::unique_ptr<StateDirectory> state_;
  std::unique_ptr<DaemonCore> core_;              // on the loop
  std::set<RankKey> attaching_;                   // on the loop
  std::map<std::string, std::string> gpu_names_;  // "cuda:0" by UUID
  int devices_ = 0;                               // offered: ranks that may run at a time
  // On the loop: what befell a device since a rank was started on it, by its name.
  std::map<std::string, std::vector<std::string>> gpu_errors_;
  uint64_t timer_ = 0;         // on the loop: the newest one armed
  bool failed_ = false;        // on the loop
  bool ending_ranks_ = false;  // on the loop
  std::unique_ptr<ThreadLoop> loop_;
  std::unique_ptr<GpuWatch> gpu_watch_;
  std::unique_ptr<ProcessHost> host_;
  std::unique_ptr<RankServer> server_;
  std::unique_ptr<SessionClient> session_;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_DAEMON_H_
