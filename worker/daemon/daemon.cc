#include "worker/daemon/daemon.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "worker/daemon/limits.h"
#include "worker/daemon/log_files.h"
#include "worker/daemon/machine.h"
#include "worker/daemon/metrics.h"
#include "worker/daemon/proc.h"
#include "worker/daemon/run_files.h"

namespace muster::worker {
namespace {

constexpr absl::Duration kMeasureLogsEvery = absl::Seconds(10);
constexpr absl::Duration kKillPatience = absl::Seconds(5);
constexpr size_t kGpuErrorsMax = 4;  // that a rank's end tells of

absl::Status CheckOptions(const DaemonOptions& options) {
  const bool plain = std::all_of(options.name.begin(), options.name.end(), [](char c) {
    return absl::ascii_islower(static_cast<unsigned char>(c)) ||
           absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '-' || c == '.';
  });
  if (options.name.empty() || options.name.size() > 63 || !plain) {
    return absl::InvalidArgumentError(absl::StrCat("worker name '", options.name.substr(0, 80),
                                                   "' is not 1-63 characters of [a-z0-9-.]"));
  }
  if (options.slots < 0 || options.slots > 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat("slots: ", options.slots, " is not between 0 and 4096"));
  }
  if (options.coordinator.empty()) {
    return absl::InvalidArgumentError("no coordinator address was given");
  }
  const bool plain_id = std::all_of(options.host_id.begin(), options.host_id.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '.' || c == '_';
  });
  if (options.host_id.size() > 64 || !plain_id) {
    return absl::InvalidArgumentError(absl::StrCat("--host-id: '", options.host_id.substr(0, 80),
                                                   "' is not 1-64 characters of [A-Za-z0-9._-]"));
  }
  // A flag that names nothing of this machine is a mistake; a missing route may come.
  if (!options.address.address.empty() || !options.address.interface.empty()) {
    RETURN_IF_ERROR(FindAddress(NetworkView::OfThisMachine(), options.address, "").status());
  }
  return absl::OkStatus();
}

std::string LowerName(const std::string& enum_name, size_t prefix) {
  return absl::AsciiStrToLower(enum_name.substr(prefix));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(DaemonOptions options, const Clock& clock,
                                                      metrics::Registry& metrics,
                                                      std::shared_ptr<Logger> log) {
  RETURN_IF_ERROR(CheckOptions(options));
  ASSIGN_OR_RETURN(std::unique_ptr<StateDirectory> state,
                   StateDirectory::Open(options.state_directory));
  ASSIGN_OR_RETURN(const auto records, state->ReadRecords());
  std::unique_ptr<Daemon> daemon(
      new Daemon(std::move(options), clock, metrics, std::move(log), std::move(state)));
  DaemonOutput recovered;
  ASSIGN_OR_RETURN(daemon->core_,
                   DaemonCore::Recover(daemon->Config(), records, daemon->Now(), &recovered));
  RETURN_IF_ERROR(CheckPortRange(daemon->options_.rank_ports, daemon->devices_));
  Daemon* const self = daemon.get();
  self->loop_ = std::make_unique<ThreadLoop>(clock);
  self->host_ = ProcessHost::Start(
      {self->state_->attempts(), self->options_.shim_binary, self->options_.rank_binary,
       self->options_.rank_command, self->options_.log, self->options_.name},
      clock, self->log_, [self](DaemonEvent event) { self->Post(std::move(event)); });
  self->loop_->Post([self, recovered = std::move(recovered)]() mutable {
    self->CarryOut(std::move(recovered));
    self->UpdateGauges();
    self->MeasureLogs();
    self->host_->Prune(self->core_->HeldDirectories());
  });
  if (!self->gpu_names_.empty()) {
    self->gpu_watch_ = GpuWatch::Start(self->options_.gpus->library, [self](GpuError error) {
      self->loop_->Post([self, error = std::move(error)] { self->OnGpuError(error); });
    });
  }
  ASSIGN_OR_RETURN(self->server_, RankServer::Start(self->socket(), [self](DaemonEvent event) {
                     self->Post(std::move(event));
                   }));
  SessionEvents events;
  events.up = [self](SessionId session, const WorkerAddress& own) {
    self->metrics_.GetCounter(kDials).Increment();
    self->Handle(SessionUp{session, own.address, own.outside_address});
  };
  events.message = [self](SessionId session, v1::FromCoordinator message) {
    self->OnMessage(session, std::move(message));
  };
  events.down = [self](SessionId session, absl::Status) { self->Handle(SessionDown{session}); };
  SessionClientOptions session;
  session.coordinator = self->options_.coordinator;
  session.locate = [choice = self->options_.address](const std::string& coordinator) {
    return FindAddress(NetworkView::OfThisMachine(), choice, coordinator);
  };
  self->session_ =
      SessionClient::Make(std::move(session), *self->loop_, Rng(self->incarnation_.value()),
                          self->log_, std::move(events));
  self->loop_->Post([self] { self->session_->Start(); });
  return daemon;
}

Daemon::Daemon(DaemonOptions options, const Clock& clock, metrics::Registry& metrics,
               std::shared_ptr<Logger> log, std::unique_ptr<StateDirectory> state)
    : options_(std::move(options)),
      clock_(clock),
      metrics_(metrics),
      log_(std::move(log)),
      // Later starts get larger numbers, as long as the wall clock does not go back.
      incarnation_(static_cast<uint64_t>(absl::ToUnixMicros(clock.Now()))),
      state_(std::move(state)) {}

Daemon::~Daemon() {
  if (session_ != nullptr) session_->Stop();
  // The loop goes first, so that no event is handled while its targets go away.
  if (loop_ != nullptr) loop_->Stop();
  session_.reset();
  server_.reset();
  gpu_watch_.reset();
  host_.reset();
}

DaemonCoreConfig Daemon::Config() {
  DaemonCoreConfig config;
  config.hello.set_worker(options_.name);
  config.hello.set_boot_id(BootId());
  config.hello.set_host(HostName());
  config.hello.set_pid(::getpid());
  config.hello.set_host_id(options_.host_id.empty() ? BootId() : options_.host_id);
  config.hello.set_version(options_.version);
  config.hello.set_metrics_address(options_.metrics_address);
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
      gpu_names_[device.uuid()] = device.name();
    }
    ranks_max = std::max(ranks_max, static_cast<int>(report.devices.size()));
  }
  devices_ = config.hello.devices_size();
  config.incarnation = incarnation_;
  config.rank_socket = state_->socket();
  config.attempts_directory = state_->attempts();
  config.cache_directory = state_->cache();
  // Who may scrape the daemon may scrape its ranks.
  const std::string& metrics = options_.metrics_address;
  if (!metrics.empty()) {
    config.rank_metrics_address = absl::StrCat(metrics.substr(0, metrics.rfind(':')), ":0");
  }
  config.threads_per_slot = std::max(1, UsableCpus() / std::max(1, ranks_max));
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
  Notification handled;
  loop_->Post([&handled] { handled.Notify(); });
  handled.WaitForNotification();
}

// ---- events -------------------------------------------------------------------------------------

void Daemon::Post(DaemonEvent event) {
  loop_->Post([this, event = std::move(event)]() mutable { Handle(std::move(event)); });
}

void Daemon::Handle(DaemonEvent event) {
  if (failed_) return;
  if (auto* exited = std::get_if<RankExited>(&event);
      exited != nullptr && ending_ranks_ && exited->exit.signal() != 0) {
    exited->exit.set_cause(v1::CAUSE_PREEMPTED);
    exited->exit.set_message(
        absl::StrCat("worker ", options_.name, " was stopped along with its ranks"));
  }
  if (auto* exited = std::get_if<RankExited>(&event)) NameGpu(*exited);
  DaemonOutput output = core_->Handle(event, Now());
  Note(event);
  CarryOut(std::move(output));
  UpdateGauges();
}

void Daemon::OnGpuError(const GpuError& error) {
  metrics_.GetCounter(kGpuErrors, {error.uuid, absl::StrCat(error.xid)}).Increment();
  log_->Error("a GPU failed", {{"worker", options_.name}, {"why", error.message}});
  const auto device = gpu_names_.find(error.uuid);
  if (device == gpu_names_.end()) return;  // not offered
  std::vector<std::string>& errors = gpu_errors_[device->second];
  // One fault often reports itself a hundred times.
  if (std::count(errors.begin(), errors.end(), error.message) == 0 &&
      errors.size() < kGpuErrorsMax) {
    errors.push_back(error.message);
  }
  if (error.lost) {
    Handle(DeviceFailed{device->second,
                        absl::StrCat(error.message, "; then restart the daemon of this worker")});
  }
}

void Daemon::NameGpu(RankExited& exited) {
  const std::string device = core_->DeviceOf(exited.rank);
  std::vector<std::string> parts;
  if (!exited.exit.message().empty()) parts.push_back(exited.exit.message());
  if (const auto found = gpu_errors_.find(device); found != gpu_errors_.end()) {
    parts.insert(parts.end(), found->second.begin(), found->second.end());
    gpu_errors_.erase(found);
  }
  if (exited.exit.code() == 0 && exited.exit.signal() == 0) return;
  // A rank that has not come as far as its device cannot know.
  const auto gpu = std::find_if(gpu_names_.begin(), gpu_names_.end(),
                                [&](const auto& entry) { return entry.second == device; });
  if (gpu != gpu_names_.end() && !absl::StrContains(absl::StrJoin(parts, ""), gpu->first)) {
    parts.push_back(absl::StrCat(device, " of worker ", options_.name, " is ", gpu->first));
  }
  exited.exit.set_message(absl::StrJoin(parts, "; "));
}

// Counts and logs what people want to know of.
void Daemon::Note(const DaemonEvent& event) {
  if (const auto* started = std::get_if<RankStarted>(&event)) {
    const bool found_again = attaching_.erase(started->rank) > 0;
    if (!found_again) gpu_errors_.erase(core_->DeviceOf(started->rank));
    metrics_.GetCounter(found_again ? kReattached : kRankStarts).Increment();
    log_->Info(found_again ? "found a rank again" : "started a rank",
               {{"rank", ToString(started->rank)}, {"pid", started->pid}});
  } else if (const auto* exited = std::get_if<RankExited>(&event)) {
    attaching_.erase(exited->rank);
    const std::optional<v1::RankExit> exit = core_->ExitOf(exited->rank);
    if (!exit.has_value()) return;
    const std::string cause = LowerName(v1::Cause_Name(exit->cause()), sizeof("CAUSE"));
    metrics_.GetCounter(kRankExits, {cause}).Increment();
    log_->Info("a rank ended",
               {{"rank", ToString(exited->rank)}, {"cause", cause}, {"why", exit->message()}});
  } else if (const auto* prepared = std::get_if<AttemptPrepared>(&event)) {
    if (prepared->status.ok()) return;
    metrics_.GetCounter(kRefusals).Increment();
    log_->Warning("refused an attempt",
                  {{"attempt", ToString(prepared->attempt)}, {"why", prepared->status.ToString()}});
  } else if (const auto* not_started = std::get_if<RankNotStarted>(&event)) {
    attaching_.erase(not_started->rank);
    if (not_started->why.ok()) return;
    metrics_.GetCounter(kRefusals).Increment();
    log_->Warning("could not start a rank",
                  {{"rank", ToString(not_started->rank)}, {"why", not_started->why.ToString()}});
  }
}

void Daemon::OnMessage(SessionId session, v1::FromCoordinator message) {
  if (message.has_log()) {
    v1::FromWorker reply;
    reply.set_incarnation(incarnation_.value());
    *reply.mutable_log() =
        message.log().has_profile() ? ReadProfileFor(message.log()) : ReadLogFor(message.log());
    session_->Send(session, std::move(reply));
    return;
  }
  if (message.has_welcome()) {
    metrics_.GetCounter(kSessions).Increment();
    log_->Info("the coordinator welcomed this worker",
               {{"cluster", message.cluster_id()},
                {"leader_term", static_cast<int64_t>(message.leader_term())}});
  }
  Handle(CoordinatorMessage{session, std::move(message)});
}

v1::LogReply Daemon::ReadCollectivesFor(const v1::LogRequest& request) {
  v1::LogReply reply;
  reply.set_request(request.request());
  reply.set_end(true);
  const RankKey key{{JobId(request.job_id()), Epoch(request.epoch())}, request.rank()};
  const auto record = PosixFileSystem()->Read(absl::StrCat(
      state_->attempts(), "/", RunDirectoryName(key), CollectivesFile(request.collectives())));
  if (record.ok()) {
    reply.set_data(*record);
    return reply;
  }
  const absl::Status asked = core_->AskForCollectives(key, request.collectives());
  if (!asked.ok()) {
    reply.set_status_code(static_cast<int>(asked.code()));
    reply.set_status_message(absl::StrCat("collectives of ", ToString(key), " on worker ",
                                          options_.name, ": ", std::string(asked.message())));
  }
  return reply;
}

v1::LogReply Daemon::ReadLogFor(const v1::LogRequest& request) {
  if (request.collectives() != 0) return ReadCollectivesFor(request);
  v1::LogReply reply;
  reply.set_request(request.request());
  const RankKey key{{JobId(request.job_id()), Epoch(request.epoch())}, request.rank()};
  const std::string run_directory = absl::StrCat(state_->attempts(), "/", RunDirectoryName(key));
  // Looked at before the log: bytes written before the exit are then seen.
  const bool closed = ReadShimExit(run_directory).has_value();
  const int64_t length = request.length_max() > 0
                             ? std::min(request.length_max(), kLogReplyBytesMax)
                             : kLogReplyBytesMax;
  absl::StatusOr<LogPiece> piece = ReadLog(run_directory + kLogDirectory, request.offset(), length);
  if (!piece.ok()) {
    const bool soon = core_->Holds(key.attempt) && !closed;  // it has not written yet
    if (soon && absl::IsNotFound(piece.status())) {
      reply.set_end(true);
      return reply;
    }
    reply.set_status_code(static_cast<int>(piece.status().code()));
    reply.set_status_message(absl::StrCat("log of ", ToString(key), " on worker ", options_.name,
                                          ": ", std::string(piece.status().message())));
    return reply;
  }
  reply.set_offset(piece->offset);
  reply.set_end(piece->end);
  reply.set_closed(closed);
  *reply.mutable_data() = std::move(piece->data);
  return reply;
}

v1::LogReply Daemon::ReadProfileFor(const v1::LogRequest& request) const {
  v1::LogReply reply;
  reply.set_request(request.request());
  const RankKey key{{JobId(request.job_id()), Epoch(request.epoch())}, request.rank()};
  const std::string run_directory = absl::StrCat(state_->attempts(), "/", RunDirectoryName(key));
  const auto refuse = [&](const absl::Status& why) {
    reply.set_status_code(static_cast<int>(why.code()));
    reply.set_status_message(absl::StrCat("profile of ", ToString(key), " on worker ",
                                          options_.name, ": ", std::string(why.message())));
    return reply;
  };
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  const v1::ProfileSteps& steps = request.profile();
  const std::string trace = run_directory + ProfileTraceFile(steps.first_step(), steps.steps());
  const std::string failure = run_directory + ProfileFailureFile(steps.first_step(), steps.steps());
  // Looked at before the trace: one that is left just before the exit is then seen.
  const bool exited = ReadShimExit(run_directory).has_value();
  if (files->Exists(trace)) {
    const absl::StatusOr<int64_t> found = files->Size(trace);
    if (!found.ok()) return refuse(found.status());
    const int64_t size = *found;
    const int64_t offset = std::clamp<int64_t>(request.offset(), 0, size);
    const int64_t length =
        std::min({size - offset, kLogReplyBytesMax,
                  request.length_max() > 0 ? request.length_max() : kLogReplyBytesMax});
    absl::StatusOr<std::string> data = files->ReadRange(trace, offset, length);
    if (!data.ok()) return refuse(data.status());
    reply.set_offset(offset);
    reply.set_end(offset + length == size);
    reply.set_closed(true);
    *reply.mutable_data() = *std::move(data);
    return reply;
  }
  if (const absl::StatusOr<std::string> why = files->Read(failure); why.ok()) {
    return refuse(absl::FailedPreconditionError(*why));
  }
  if (exited || !core_->Holds(key.attempt)) {
    return refuse(
        absl::FailedPreconditionError("the rank has ended without recording these steps"));
  }
  const std::string wanted = request.profile().SerializeAsString();
  const std::string path = run_directory + kProfileRequestFile;
  const absl::StatusOr<std::string> asked = files->Read(path);
  if (!asked.ok() || *asked != wanted) {
    if (const absl::Status status = files->WriteAtomically(path, wanted); !status.ok()) {
      return refuse(status);
    }
  }
  reply.set_end(true);
  return reply;
}

// ---- actions ------------------------------------------------------------------------------------

void Daemon::CarryOut(DaemonOutput output) {
  if (!output.records.empty()) {
    const absl::Duration start = clock_.Monotonic();
    const absl::Status status = state_->Write(output.records);
    if (!status.ok()) {
      failed_ = true;
      log_->Error("the daemon's state cannot be made durable; stopping (ranks train on)",
                  {{"error", status.ToString()}});
      if (options_.on_fatal) options_.on_fatal(status);
      return;
    }
    metrics_.GetHistogram(kPersistSeconds)
        .Observe(absl::ToDoubleSeconds(clock_.Monotonic() - start));
  }
  for (DaemonAction& action : output.actions) {
    std::visit([this](auto& a) { Carry(std::move(a)); }, action);
  }
}

void Daemon::Carry(StartRank action) { host_->Carry(std::move(action)); }

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
  metrics_.GetGauge(kSlots).Set(options_.slots);
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

void Daemon::MeasureLogs() {
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
  loop_->PostAfter(kMeasureLogsEvery, [this] { MeasureLogs(); });
}

}  // namespace muster::worker
