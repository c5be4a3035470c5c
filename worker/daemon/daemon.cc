#include "worker/daemon/daemon.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/mutex.h"
#include "base/proc.h"
#include "base/status_macros.h"
#include "worker/daemon/log_files.h"
#include "worker/daemon/machine.h"
#include "worker/daemon/metrics.h"
#include "worker/daemon/proc.h"
#include "worker/daemon/run_files.h"

namespace muster::worker {
namespace {

constexpr absl::Duration kProbesEvery = absl::Seconds(1);
constexpr absl::Duration kMeasureDiskEvery = absl::Seconds(10);
// From SIGKILL until a daemon that ends its ranks no longer waits for them.
constexpr absl::Duration kKillPatience = absl::Seconds(5);

// "CAUSE_CRASH" without its prefix, in lower case, for labels of metrics.
std::string LowerName(const std::string& enum_name, size_t prefix) {
  return absl::AsciiStrToLower(enum_name.substr(prefix));
}

uint64_t SystemSeed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(DaemonOptions options, const Clock& clock,
                                                      metrics::Registry& metrics,
                                                      std::shared_ptr<Logger> log, Probes* probes) {
  RETURN_IF_ERROR(CheckOptions(options));
  ASSIGN_OR_RETURN(std::unique_ptr<StateDirectory> state,
                   StateDirectory::Open(options.state_directory));
  if (options.user.any()) RETURN_IF_ERROR(state->OpenToUsers());
  ASSIGN_OR_RETURN(const auto records, state->ReadRecords());
  std::unique_ptr<Daemon> daemon(
      new Daemon(std::move(options), clock, metrics, std::move(log), std::move(state), probes));
  DaemonOutput recovered;
  DaemonCoreConfig config = daemon->Config(/*upgraded=*/!records.empty());
  const DaemonOptions& own = daemon->options_;
  RETURN_IF_ERROR(
      spec::ApplyTopology(own.topology, own.topology_file, *config.hello.mutable_devices()));
  ASSIGN_OR_RETURN(daemon->core_, DaemonCore::Recover(config, records, daemon->Now(), &recovered));
  RETURN_IF_ERROR(CheckPortRange(daemon->options_.rank_ports, daemon->devices_));
  daemon->log_requests_ = std::make_unique<LogRequests>(daemon->state_->attempts(),
                                                        daemon->options_.name, *daemon->core_);
  RETURN_IF_ERROR(daemon->StartServices(std::move(recovered)));
  return daemon;
}

// Counters exist from the start: rates and alerts need a first sample.
void Daemon::StartCounters() {
  for (const metrics::Family* family :
       {&kRankStarts, &kReattached, &kRefusals, &kSessions, &kDials}) {
    metrics_.GetCounter(*family);
  }
  for (int cause = v1::CAUSE_COMPLETED; cause <= v1::Cause_MAX; ++cause) {
    if (!v1::Cause_IsValid(cause)) continue;
    metrics_.GetCounter(
        kRankExits, {LowerName(v1::Cause_Name(static_cast<v1::Cause>(cause)), sizeof("CAUSE"))});
  }
}

absl::Status Daemon::StartServices(DaemonOutput recovered) {
  StartCounters();
  loop_ = std::make_unique<ThreadLoop>(clock_);
  OutputQueue::Parts outputs;
  outputs.write = [this](const std::vector<DaemonRecord>& records) { return Write(records); };
  outputs.carry = [this](DaemonAction action) {
    std::visit([this](auto& a) { Carry(std::move(a)); }, action);
  };
  outputs.failed = [this](const absl::Status& status) { OnWriteFailed(status); };
  outputs_ = std::make_unique<OutputQueue>(*loop_, std::move(outputs));
  server_ =
      RankServer::Make(state_->attempts(), [this](DaemonEvent event) { Post(std::move(event)); });
  ProcessHostOptions host;
  host.attempts_directory = state_->attempts();
  host.shim_binary = options_.shim_binary;
  host.rank_binary = options_.rank_binary;
  host.rank_log_format = options_.rank_log_format;
  host.command = options_.rank_command;
  host.log = options_.log;
  host.files = options_.files;
  host.user = options_.user;
  host.users_directory = state_->users();
  host.serve_user = [this](uid_t uid, gid_t gid) {
    return server_->ListenForUser(state_->users(), uid, gid);
  };
  host.worker = options_.name;
  if (gpu_memory_ != nullptr) {
    host.device_bytes = [this](const std::string& device) {
      return gpu_memory_->UsedBytes(device);
    };
  }
  host_ = ProcessHost::Start(std::move(host), clock_, log_,
                             [this](DaemonEvent event) { Post(std::move(event)); });
  loop_->Post([this, recovered = std::move(recovered)]() mutable {
    outputs_->Add(std::move(recovered));
    UpdateGauges();
    MeasureDisk();
    MeasureCertificates();
    TellProbes();
    host_->Prune(core_->HeldDirectories());
  });
  if (device_errors_.has_gpus()) {
    gpu_sampler_ = GpuSampler::Start(options_.gpus->library, clock_, metrics_);
    gpu_watch_ = GpuWatch::Start(options_.gpus->library, [this](GpuError error) {
      loop_->Post([this, error = std::move(error)] { OnGpuError(error); });
    });
  }
  RETURN_IF_ERROR(server_->Listen(socket()));
  SessionEvents events;
  events.up = [this](SessionId session, const WorkerAddress& own) {
    metrics_.GetCounter(kDials).Increment();
    Handle(SessionUp{session, own.address, own.outside_address});
  };
  events.message = [this](SessionId session, v1::FromCoordinator message) {
    OnMessage(session, std::move(message));
  };
  events.down = [this](SessionId session, absl::Status) { Handle(SessionDown{session}); };
  SessionClientOptions session;
  session.coordinator = options_.coordinator;
  session.tls = options_.tls;
  session.server_name = options_.tls_server_name;
  session.insecure = options_.insecure;
  session.locate = [choice = options_.address](const std::string& coordinator) {
    return FindAddress(NetworkView::OfThisMachine(), choice, coordinator);
  };
  session_ =
      SessionClient::Make(std::move(session), *loop_, Rng(SystemSeed()), log_, std::move(events));
  loop_->Post([this] { session_->Start(); });
  return absl::OkStatus();
}

Daemon::Daemon(DaemonOptions options, const Clock& clock, metrics::Registry& metrics,
               std::shared_ptr<Logger> log, std::unique_ptr<StateDirectory> state, Probes* probes)
    : options_(std::move(options)),
      clock_(clock),
      metrics_(metrics),
      log_(std::move(log)),
      probes_(probes),
      state_(std::move(state)),
      device_errors_(options_.name) {}

Daemon::~Daemon() {
  if (session_ != nullptr) session_->Stop();
  // The loop goes first, so that no event is handled while its targets go away.
  if (loop_ != nullptr) loop_->Stop();
  outputs_.reset();
  session_.reset();
  gpu_watch_.reset();
  host_.reset();  // uses the server
  server_.reset();
  gpu_memory_.reset();
}

DaemonCoreConfig Daemon::Config(bool upgraded) {
  DaemonCoreConfig config;
  config.hello.set_worker(options_.name);
  config.hello.set_boot_id(BootId());
  config.hello.set_host(HostName());
  config.hello.set_pid(::getpid());
  config.hello.set_host_id(options_.host_id.empty() ? BootId() : options_.host_id);
  config.hello.set_version(options_.version);
  config.hello.set_metrics_address(options_.metrics_address);
  for (const auto* labels : {&options_.topology.labels, &options_.labels}) {
    for (const auto& [name, value] : *labels) (*config.hello.mutable_labels())[name] = value;
  }
  for (v1::Device& device : CpuSlots(options_.slots)) {
    *config.hello.add_devices() = std::move(device);
  }
  int ranks_max = options_.slots;
  if (options_.gpus.has_value()) {
    const GpuReport report = DiscoverGpus(*options_.gpus);
    for (const std::string& warning : report.warnings) {
      log_->Warning("a GPU needs attention", {{"worker", options_.name}, {"why", warning}});
    }
    for (const v1::Device& device : report.devices) {
      log_->Info("found a GPU", {{"device", device.name()},
                                 {"model", device.model()},
                                 {"uuid", device.uuid()},
                                 {"driver", report.driver},
                                 {"usable", device.unusable().empty()}});
      *config.hello.add_devices() = device;
      device_errors_.AddGpu(device);
      // From the start, so that a rate sees the first error.
      for (const uint64_t xid : KnownXids()) {
        metrics_.GetCounter(kGpuErrors, {device.uuid(), absl::StrCat(xid)});
      }
    }
    if (!report.devices.empty()) {
      gpu_memory_ = GpuMemory::Open(options_.gpus->library, report.devices);
    }
    ranks_max = std::max(ranks_max, static_cast<int>(report.devices.size()));
  }
  devices_ = config.hello.devices_size();
  config.new_identity = absl::StrFormat("%016x%016x", SystemSeed(), SystemSeed());
  // A state directory of an earlier version has no identity yet; its daemons took the wall clock.
  if (upgraded) {
    config.first_incarnation = Incarnation(static_cast<uint64_t>(absl::ToUnixMicros(clock_.Now())));
  }
  config.rank_socket = state_->socket();
  config.attempts_directory = state_->attempts();
  config.cache_directory = state_->cache();
  // Who may scrape the daemon may scrape its ranks.
  absl::string_view metrics = options_.metrics_address;
  if (!metrics.empty()) {
    absl::ConsumePrefix(&metrics, "https://");
    config.rank_metrics_address = absl::StrCat(metrics.substr(0, metrics.rfind(':')), ":0");
  }
  if (const metrics::ServerTls& tls = options_.metrics_tls; !tls.certificate.empty()) {
    if (options_.user.user.empty()) {
      config.rank_metrics_tls.set_certificate(tls.certificate);
      config.rank_metrics_tls.set_key(tls.key);
      config.rank_metrics_tls.set_client_authorities(tls.client_authorities);
    } else {
      // The daemon's key is not for the accounts of jobs.
      config.rank_metrics_address = "127.0.0.1:0";
    }
  }
  config.threads_per_slot = std::max(1, UsableCpus() / std::max(1, ranks_max));
  config.mps = options_.mps;
  config.rank_ports = options_.rank_ports;
  config.stop_grace = options_.stop_grace;
  return config;
}

void Daemon::EndRanks() {
  Notification marked;
  loop_->Post([this, &marked] {
    ending_ranks_ = true;
    marked.Notify();
  });
  marked.WaitForNotification();
  host_->EndAll(options_.stop_grace, kKillPatience);
  // The exits are handled, made durable and told to the coordinator.
  for (int turn = 0; turn < 2; ++turn) {
    Notification handled;
    loop_->Post([&handled] { handled.Notify(); });
    handled.WaitForNotification();
    outputs_->AwaitWritten();
  }
}

// ---- events -------------------------------------------------------------------------------------

void Daemon::Post(DaemonEvent event) {
  loop_->Post([this, event = std::move(event)]() mutable { Handle(std::move(event)); });
}

void Daemon::Handle(DaemonEvent event) {
  if (failed_) return;
  if (auto* exited = std::get_if<RankExited>(&event); exited != nullptr) {
    if (ending_ranks_ && exited->exit.signal() != 0) {
      exited->exit.set_cause(v1::CAUSE_PREEMPTED);
      exited->exit.set_message(
          absl::StrCat("worker ", options_.name, " was stopped along with its ranks"));
    }
    device_errors_.Explain(core_->DeviceOf(exited->rank), exited->exit);
  }
  DaemonOutput output = core_->Handle(event, Now());
  CountAndLog(event);
  outputs_->Add(std::move(output));
  UpdateGauges();
}

void Daemon::OnGpuError(const GpuError& error) {
  metrics_.GetCounter(kGpuErrors, {error.uuid, absl::StrCat(error.xid)}).Increment();
  log_->Error("a GPU failed", {{"worker", options_.name}, {"why", error.message}});
  const std::optional<std::string> device = device_errors_.Add(error);
  if (device.has_value() && error.lost) {
    Handle(DeviceFailed{*device,
                        absl::StrCat(error.message, "; then restart the daemon of this worker")});
  }
}

void Daemon::CountAndLog(const DaemonEvent& event) {
  if (const auto* started = std::get_if<RankStarted>(&event)) {
    const bool found_again = attaching_.erase(started->rank) > 0;
    if (!found_again) device_errors_.Clear(core_->DeviceOf(started->rank));
    metrics_.GetCounter(found_again ? kReattached : kRankStarts).Increment();
    log_->Info(found_again ? "found a rank again" : "started a rank",
               {{"job", started->rank.attempt.job.value()},
                {"epoch", started->rank.attempt.epoch.value()},
                {"rank", started->rank.rank},
                {"pid", started->pid}});
  } else if (const auto* exited = std::get_if<RankExited>(&event)) {
    attaching_.erase(exited->rank);
    const std::optional<v1::RankExit> exit = core_->ExitOf(exited->rank);
    if (!exit.has_value()) return;
    const std::string cause = LowerName(v1::Cause_Name(exit->cause()), sizeof("CAUSE"));
    metrics_.GetCounter(kRankExits, {cause}).Increment();
    log_->Info("a rank ended", {{"job", exited->rank.attempt.job.value()},
                                {"epoch", exited->rank.attempt.epoch.value()},
                                {"rank", exited->rank.rank},
                                {"cause", cause},
                                {"why", exit->message()}});
  } else if (const auto* prepared = std::get_if<AttemptPrepared>(&event)) {
    if (prepared->status.ok()) return;
    metrics_.GetCounter(kRefusals).Increment();
    log_->Warning("refused an attempt", {{"job", prepared->attempt.job.value()},
                                         {"epoch", prepared->attempt.epoch.value()},
                                         {"why", prepared->status.ToString()}});
  } else if (const auto* not_started = std::get_if<RankNotStarted>(&event)) {
    attaching_.erase(not_started->rank);
    if (not_started->why.ok()) return;
    metrics_.GetCounter(kRefusals).Increment();
    log_->Warning("could not start a rank", {{"job", not_started->rank.attempt.job.value()},
                                             {"epoch", not_started->rank.attempt.epoch.value()},
                                             {"rank", not_started->rank.rank},
                                             {"why", not_started->why.ToString()}});
  }
}

void Daemon::OnMessage(SessionId session, v1::FromCoordinator message) {
  if (message.has_log() || message.has_collectives() || message.has_profile()) {
    v1::FromWorker reply;
    reply.set_incarnation(core_->incarnation().value());
    if (message.has_log()) {
      *reply.mutable_log() = log_requests_->Answer(message.log());
    } else if (message.has_collectives()) {
      *reply.mutable_collectives() = log_requests_->Answer(message.collectives());
    } else {
      *reply.mutable_profile() = log_requests_->Answer(message.profile());
    }
    session_->Send(session, std::move(reply));
    return;
  }
  if (message.has_welcome()) {
    metrics_.GetCounter(kSessions).Increment();
    log_->Info("the coordinator welcomed this worker",
               {{"cluster", message.cluster_id()},
                {"history", message.history_id()},
                {"leader_term", static_cast<int64_t>(message.leader_term())}});
  }
  Handle(CoordinatorMessage{session, std::move(message)});
}

// ---- actions ------------------------------------------------------------------------------------

absl::Status Daemon::Write(const std::vector<DaemonRecord>& records) {
  const absl::Duration start = clock_.Monotonic();
  RETURN_IF_ERROR(state_->Write(records));
  metrics_.GetHistogram(kPersistSeconds).Observe(absl::ToDoubleSeconds(clock_.Monotonic() - start));
  return absl::OkStatus();
}

void Daemon::OnWriteFailed(const absl::Status& status) {
  failed_ = true;
  log_->Error("the daemon's state cannot be made durable; stopping (ranks train on)",
              {{"error", status.ToString()}});
  if (options_.on_fatal) options_.on_fatal(status);
}

void Daemon::Carry(StartRank action) { host_->Carry(std::move(action)); }

void Daemon::Carry(ReassignRank action) { host_->Carry(std::move(action)); }
void Daemon::Carry(AttachRank action) {
  attaching_.insert(action.rank);
  host_->Carry(std::move(action));
}

void Daemon::Carry(SendToCoordinator action) {
  session_->Send(action.session, std::move(action.message));
}

void Daemon::Carry(Reconnect action) {
  log_->Warning("leaving a session", {{"why", action.reason}});
  session_->Reconnect(action.session);
}

void Daemon::Carry(ArmTimer action) {
  const uint64_t timer = ++timer_;
  loop_->PostAfter(std::max(absl::ZeroDuration(), action.at - Now()), [this, timer] {
    if (timer == timer_) Handle(TimerFired{});
  });
}

// ---- metrics ------------------------------------------------------------------------------------

void Daemon::UpdateGauges() {
  const DaemonSummary summary = core_->Summary();
  metrics_.GetGauge(kSlots).Set(summary.slots);
  metrics_.GetGauge(kSlotsUsed).Set(summary.slots_used);
  metrics_.GetGauge(kAttempts).Set(summary.attempts);
  metrics_.GetGauge(kSessionUp).Set(summary.session_welcomed ? 1 : 0);
  metrics_.GetGauge(kCommitsPending).Set(summary.commits_pending);
  metrics_.GetGauge(kKeyValuePending).Set(summary.key_value_pending);
  for (int state = v1::RANK_STATE_ASSIGNED; state <= v1::RANK_STATE_RELEASED; ++state) {
    const auto rank_state = static_cast<v1::RankState>(state);
    const auto count = summary.ranks.find(rank_state);
    metrics_.GetGauge(kRanks, {LowerName(v1::RankState_Name(rank_state), sizeof("RANK_STATE"))})
        .Set(count == summary.ranks.end() ? 0 : count->second);
  }
}

void Daemon::TellProbes() {
  if (probes_ == nullptr) return;
  probes_->Turned();
  if (core_->Summary().session_welcomed) {
    probes_->Ready();
  } else {
    probes_->NotReady(
        absl::StrCat("no session with the coordinator ", options_.coordinator, "; ranks train on"));
  }
  loop_->PostAfter(kProbesEvery, [this] { TellProbes(); });
}

void Daemon::MeasureDisk() {
  namespace fs = std::filesystem;
  int64_t bytes = 0;
  std::error_code error;
  for (fs::directory_iterator attempt(state_->attempts(), error), end; !error && attempt != end;
       attempt.increment(error)) {
    std::error_code inner;
    for (fs::directory_iterator rank(attempt->path(), inner); !inner && rank != end;
         rank.increment(inner)) {
      bytes += LogBytesKept(rank->path().string() + kLogDirectory);
    }
  }
  metrics_.GetGauge(kLogBytes).Set(static_cast<double>(bytes));
  std::error_code unknown;
  const fs::space_info disk = fs::space(state_->path(), unknown);
  if (!unknown) {
    metrics_.GetGauge(kStateDiskFree).Set(static_cast<double>(disk.available));
    metrics_.GetGauge(kStateDisk).Set(static_cast<double>(disk.capacity));
  }
  loop_->PostAfter(kMeasureDiskEvery, [this] { MeasureDisk(); });
}

void Daemon::MeasureCertificates() {
  for (const auto& [flag, validity] :
       security::ReadValidities(options_.tls, "", options_.metrics_tls.Files())) {
    metrics_.GetGauge(kCertificateBegin, {flag})
        .Set(absl::ToDoubleSeconds(validity.not_before - absl::UnixEpoch()));
    metrics_.GetGauge(kCertificateEnd, {flag})
        .Set(absl::ToDoubleSeconds(validity.not_after - absl::UnixEpoch()));
  }
  loop_->PostAfter(kMeasureDiskEvery, [this] { MeasureCertificates(); });
}

}  // namespace muster::worker
