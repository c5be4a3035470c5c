#include "worker/rank/rank_run.h"

#include <unistd.h>
#include <csignal>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <deque>
#include <iostream>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/file_system.h"
#include "base/log.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "base/network.h"
#include "base/status_macros.h"
#include "muster/v1/rank.pb.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/flight_recorder.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/comm/peer_failure.h"
#include "parallel/comm/tcp_socket.h"
#include "parallel/train/failure.h"
#include "worker/rank/agreement.h"
#include "worker/rank/arithmetic.h"
#include "worker/rank/balance.h"
#include "worker/rank/daemon_client.h"
#include "worker/rank/engine_setup.h"
#include "worker/rank/failure_deadline.h"
#include "worker/rank/hosts.h"
#include "worker/rank/job_plan.h"
#include "worker/rank/profiler.h"
#include "worker/rank/rank_metrics.h"
#include "worker/rank/shared_files.h"

namespace muster::worker {
namespace {

// The last commit and notices must reach the daemon, which keeps them; without them the work since
// the commit before would count as lost. Devices are held meanwhile, hence a bound.
constexpr absl::Duration kFlushTimeout = absl::Minutes(10);
// Of an exit for which nothing but the report is left to say.
constexpr absl::Duration kFailureFlushTimeout = absl::Seconds(5);
// For a device to come back from collectives that have failed. Peers that lose a rank thus end well
// before the daemon's grace does.
constexpr absl::Duration kFailureGrace = absl::Seconds(1);
// For the verdict on the last checkpoint, on which the last pruning depends.
constexpr absl::Duration kVerdictTimeout = absl::Seconds(15);
// For a file that another host has written to be seen on a network file system that caches.
constexpr absl::Duration kSharedFilePatience = absl::Seconds(5);
constexpr size_t kThroughputSteps = 20;
// Of the curve that users see; a report carries the end of it, enough for a daemon or coordinator
// that was away for a while, and for jobs that make hundreds of steps between two reports.
constexpr int64_t kLossPoints = 256;
constexpr int kLossPointsPerReport = 64;
constexpr int kYoungLossPointsPerReport = 512;
constexpr absl::Duration kYoungLossPoint = absl::Seconds(30);
constexpr int64_t kLineEverySteps = 10;  // of runs with more than a hundred steps
// Phases that end by themselves.
constexpr char kTraining[] = "training";
constexpr char kMeasuring[] = "measuring";

// Writes exit.pb exactly once, whichever thread ends the process.
class ExitReporter {
 public:
  explicit ExitReporter(std::string run_directory) : run_directory_(std::move(run_directory)) {}

  void SetProgress(const v1::RankProgress& progress) {
    MutexLock lock(&mutex_);
    progress_ = progress;
  }
  // `peer`: the rank that could not be reached, if that is why.
  void Write(v1::Cause cause, const std::string& message, std::optional<int> peer = std::nullopt) {
    MutexLock lock(&mutex_);
    if (written_) return;
    written_ = true;
    if (run_directory_.empty()) return;
    v1::RankExitReport report;
    report.set_cause(cause);
    report.set_message(message);
    if (peer.has_value()) report.set_peer(*peer);
    *report.mutable_progress() = progress_;
    const absl::Status status =
        PosixFileSystem()->WriteAtomically(run_directory_ + "/exit.pb", report.SerializeAsString());
    if (!status.ok()) std::cerr << "exit report: " << status << std::endl;
  }
  [[noreturn]] void EndProcess(v1::Cause cause, const std::string& message, int code,
                               std::optional<int> peer = std::nullopt) {
    Write(cause, message, peer);
    std::fflush(nullptr);
    _exit(code);
  }

 private:
  const std::string run_directory_;
  Mutex mutex_;
  bool written_ ABSL_GUARDED_BY(mutex_) = false;
  v1::RankProgress progress_ ABSL_GUARDED_BY(mutex_);
};

// Turns SIGTERM and SIGINT into a wish to stop at the next step boundary, or into an immediate end
// while there is no such boundary.
class SignalWatcher {
 public:
  explicit SignalWatcher(ExitReporter& exit) : exit_(exit) {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGTERM);
    sigaddset(&signals_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
    thread_ = std::thread([this] { Run(); });
  }
  ~SignalWatcher() {
    ending_ = true;
    // Wakes the thread; blocked everywhere, so it reaches sigwait.
    pthread_kill(thread_.native_handle(), SIGTERM);
    thread_.join();
  }
  bool stop_requested() const { return stop_; }
  // From now on a step boundary will come.
  void TrainingStarts() { training_ = true; }
  // No more of them: only deliveries are left.
  void TrainingEnds() { training_ = false; }

 private:
  void Run() {
    for (;;) {
      int signal = 0;
      sigwait(&signals_, &signal);
      if (ending_) return;
      if (stop_ || !training_) {
        exit_.EndProcess(
            v1::CAUSE_PREEMPTED,
            absl::StrCat("ended at once on signal ", signal, stop_ ? ", the second one" : ""),
            kExitStopped);
      }
      stop_ = true;
    }
  }

  ExitReporter& exit_;
  sigset_t signals_;
  std::atomic<bool> ending_ = false;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> training_ = false;
  std::thread thread_;  // last: starts when everything above exists
};

void PrintLine(const std::string& line) {
  std::fputs(line.c_str(), stdout);
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

// What the trainer says, passed on to the daemon, the metrics and the log.
class Reporter : public parallel::TrainerHooks {
 public:
  Reporter(const v1::RankAssignment& assignment, DaemonClient& client, SignalWatcher& signals,
           ExitReporter& exit, RankMetrics& metrics, Profiler& profiler, Logger& logger,
           const std::string& metrics_address)
      : assignment_(assignment),
        client_(client),
        signals_(signals),
        exit_(exit),
        metrics_(metrics),
        profiler_(profiler),
        logger_(logger) {
    progress_.set_metrics_address(metrics_address);
  }

  // Before the first step.
  void SetArithmetic(const Arithmetic& arithmetic) { arithmetic_ = arithmetic; }

  void OnPhase(absl::string_view phase) override {
    if (phase == kTraining) signals_.TrainingStarts();
    progress_.set_phase(std::string(phase));
    SetMemory();
    Publish(/*now=*/true);
  }

  // The coordinator counts a phase that reads differently as progress, and none for its progress
  // timeout as a hang.
  void OnProgress(absl::string_view phase, double fraction) override {
    OnPhase(absl::StrFormat("%s %.1f %%", phase, 100 * fraction));
  }

  kernels::Trace* BeginStep(int64_t step) override { return profiler_.BeginStep(step); }

  // In the middle of a step, which takes so much longer.
  void Measuring() {
    if (progress_.phase() == kMeasuring) return;
    if (!std::exchange(measured_, true)) {
      const std::string& cache = assignment_.cache_directory();
      PrintLine(
          absl::StrCat("measuring how to multiply matrices fastest: 20 to 30 s for a new model",
                       cache.empty() ? "" : absl::StrCat(", kept for later ranks in ", cache)));
    }
    OnPhase(kMeasuring);
  }

  void OnStep(const parallel::StepReport& report) override {
    profiler_.EndStep(report.step, report.seconds);
    if (progress_.phase() == kMeasuring) progress_.set_phase(kTraining);
    recent_.push_back({report.tokens, report.seconds});
    if (recent_.size() > kThroughputSteps) recent_.pop_front();
    double tokens = 0, seconds = 0;
    for (const auto& [step_tokens, step_seconds] : recent_) {
      tokens += static_cast<double>(step_tokens);
      seconds += step_seconds;
    }
    const double tokens_per_second = seconds > 0 ? tokens / seconds : 0;
    progress_.set_step(report.step);
    progress_.set_train_loss(report.loss);
    progress_.set_tokens_per_second(tokens_per_second);
    progress_.set_step_seconds(report.seconds);
    progress_.set_learning_rate(report.learning_rate);
    progress_.set_gradient_norm(report.gradient_norm);
    progress_.set_consumed_samples(report.consumed_samples);
    progress_.set_exposed_communication_seconds(report.exposed_communication_seconds);
    SetTimes(report);
    // Masked tokens take the same arithmetic.
    const v1::EngineSpec& engine = assignment_.spec().engine();
    const double all_tokens =
        static_cast<double>(recent_.size()) *
        static_cast<double>(engine.training().global_batch() * engine.model().sequence_length());
    const double mfu = arithmetic_.Utilization(arithmetic_.model_flops, all_tokens, seconds);
    const double hfu = arithmetic_.Utilization(arithmetic_.hardware_flops, all_tokens, seconds);
    progress_.set_model_flops_utilization(mfu);
    progress_.set_hardware_flops_utilization(hfu);
    metrics_.Step(report, tokens_per_second, mfu, hfu);
    const int64_t steps = assignment_.spec().engine().training().steps();
    AddLossPoint(report, steps);
    const int64_t every = steps > 100 ? kLineEverySteps : 1;
    if (first_step_ || report.step % every == 0 || report.step == steps || report.skipped) {
      PrintLine(absl::StrFormat(
          "step %d/%d  loss %.5f  grad norm %.4f  lr %.3e  %.0f tokens/s  "
          "%.3f s/step%s%s",
          report.step, steps, report.loss, report.gradient_norm, report.learning_rate,
          tokens_per_second, report.seconds,
          mfu > 0 ? absl::StrFormat("  MFU %.1f %%", 100 * mfu) : std::string(),
          report.skipped
              ? absl::StrFormat("  skipped: overflow at loss scale %g", report.loss_scale)
              : std::string()));
    }
    // The first one proves that training runs; libraries have taken what they need by then.
    if (first_step_) SetMemory();
    Publish(first_step_);
    first_step_ = false;
  }

  void OnEvaluation(const parallel::EvaluationReport& report) override {
    progress_.set_validation_loss(report.loss);
    progress_.set_validation_step(report.step);
    metrics_.Evaluation(report);
    PrintLine(absl::StrFormat("step %d  validation loss %.5f nats/token  (%d tokens, %.1f s)",
                              report.step, report.loss, report.tokens, report.seconds));
    Publish(/*now=*/true);
    if (assignment_.rank() != 0) return;
    v1::Evaluation evaluation;
    evaluation.set_step(report.step);
    evaluation.set_loss(report.loss);
    evaluation.set_tokens(report.tokens);
    client_.Notify(evaluation);
  }

  void OnSaved(const parallel::SavedCheckpoint& saved) override {
    progress_.set_last_saved_step(saved.id.step);
    metrics_.Saved(saved);
    Publish(/*now=*/false);
    if (assignment_.rank() != 0) return;
    v1::CheckpointRecord record;
    record.set_step(saved.id.step);
    record.set_epoch(saved.id.epoch.value());
    record.set_path(saved.result.directory);
    record.set_bytes(saved.result.bytes);
    record.set_manifest_checksum(saved.result.manifest_checksum);
    record.set_seconds(saved.seconds);
    record.set_consumed_samples(saved.consumed_samples);
    client_.Commit(record);
    PrintLine(absl::StrFormat("step %d  saved %.1f MB in %.2f s to %s", saved.id.step,
                              static_cast<double>(saved.result.bytes) * 1e-6, saved.seconds,
                              saved.result.directory));
  }

  void OnDamaged(const parallel::CheckpointId& id, const absl::Status& why) override {
    metrics_.Damaged();
    logger_.Warning("checkpoint is damaged and skipped",
                    {{"step", id.step}, {"epoch", id.epoch.value()}, {"reason", why.ToString()}});
    v1::DamagedCheckpoint damaged;
    for (const v1::CheckpointRecord& record : assignment_.restore()) {
      if (record.step() == id.step && record.epoch() == id.epoch.value()) {
        *damaged.mutable_checkpoint() = record;
      }
    }
    damaged.set_reason(std::string(why.message()));
    client_.Notify(damaged);
  }

  void OnRemoved(const parallel::CheckpointId& id) override {
    v1::RemovedCheckpoint removed;
    removed.set_step(id.step);
    removed.set_epoch(id.epoch.value());
    client_.Notify(removed);
  }

  void OnWarning(const absl::Status& status) override { logger_.Warning(status.ToString()); }

  int64_t CommittedStep() override { return client_.last_committed_step(); }
  bool StopRequested() override { return signals_.stop_requested() || client_.stop_requested(); }

  // What has been taken is told from now on. The device must outlive the last call of a hook.
  void Allocated(kernels::Device& device) { device_ = &device; }

  // A restored job shows where it goes on, before its first step.
  void Restored(int64_t step, int64_t consumed_samples) {
    progress_.set_step(step);
    progress_.set_consumed_samples(consumed_samples);
    Publish(/*now=*/true);
  }

 private:
  void SetMemory() {
    if (device_ == nullptr) return;
    v1::RankMemory& memory = *progress_.mutable_memory();
    memory.set_device_bytes(device_->allocated_bytes());
    memory.set_host_bytes(device_->host_allocated_bytes());
    metrics_.Memory(memory.device_bytes(), memory.host_bytes());
    if (device_->kind() != kernels::DeviceKind::kCuda) return;
    const auto of_device = device_->Memory();
    if (!of_device.ok()) return;
    memory.set_used_bytes(of_device->total - of_device->free);
    memory.set_total_bytes(of_device->total);
  }

  void SetTimes(const parallel::StepReport& report) {
    v1::StepTimes& times = *progress_.mutable_times();
    times.set_step(report.step);
    times.set_step_seconds(report.seconds);
    times.set_gradients_seconds(report.exposed.of(parallel::Exposure::kGradients));
    times.set_parameters_seconds(report.exposed.of(parallel::Exposure::kParameters));
    times.set_tensor_seconds(report.exposed.of(parallel::Exposure::kTensor));
    times.set_context_seconds(report.exposed.of(parallel::Exposure::kContext));
    times.set_pipeline_seconds(report.exposed.of(parallel::Exposure::kPipeline));
    times.set_slowest_seconds(report.exposed.of(parallel::Exposure::kSlowest));
    times.set_all_reduce_seconds(report.exposed.of(parallel::Collective::kAllReduce));
    times.set_reduce_scatter_seconds(report.exposed.of(parallel::Collective::kReduceScatter));
    times.set_all_gather_seconds(report.exposed.of(parallel::Collective::kAllGather));
    times.set_all_to_all_seconds(report.exposed.of(parallel::Collective::kAllToAll));
    times.set_broadcast_seconds(report.exposed.of(parallel::Collective::kBroadcast));
    times.set_send_receive_seconds(report.exposed.of(parallel::Collective::kSendReceive));
  }

  void AddLossPoint(const parallel::StepReport& report, int64_t steps) {
    if (assignment_.rank() != 0) return;
    const int64_t stride = (steps + kLossPoints - 1) / kLossPoints;
    const int64_t evaluate_every = assignment_.spec().engine().training().evaluate_every();
    const bool evaluated = evaluate_every > 0 && report.step % evaluate_every == 0;
    if (report.step != 1 && report.step != steps && report.step % stride != 0 && !evaluated) return;
    const absl::Time now = absl::Now();
    while (progress_.losses_size() >= kLossPointsPerReport &&
           (progress_.losses_size() >= kYoungLossPointsPerReport ||
            now - loss_times_.front() > kYoungLossPoint)) {
      progress_.mutable_losses()->DeleteSubrange(0, 1);
      loss_times_.pop_front();
    }
    loss_times_.push_back(now);
    v1::LossPoint* point = progress_.add_losses();
    point->set_step(report.step);
    point->set_train_loss(report.loss);
  }

  void Publish(bool now) {
    exit_.SetProgress(progress_);
    if (now) {
      client_.ReportNow(progress_);
    } else {
      client_.Report(progress_);
    }
  }

  const v1::RankAssignment& assignment_;
  DaemonClient& client_;
  SignalWatcher& signals_;
  ExitReporter& exit_;
  RankMetrics& metrics_;
  Profiler& profiler_;
  Logger& logger_;
  kernels::Device* device_ = nullptr;
  v1::RankProgress progress_;
  std::deque<absl::Time> loss_times_;  // of progress_.losses()
  std::deque<std::pair<int64_t, double>> recent_;
  Arithmetic arithmetic_;
  bool first_step_ = true;
  bool measured_ = false;
};

// Leaves what this rank's collectives were doing in the run directory, once.
class FlightRecord {
 public:
  FlightRecord(std::string run_directory, Logger& logger)
      : directory_(run_directory),
        path_(run_directory.empty() ? "" : run_directory + "/collectives.log"),
        logger_(logger),
        recorder_(std::make_shared<parallel::FlightRecorder>()) {}

  const std::shared_ptr<parallel::FlightRecorder>& recorder() const { return recorder_; }

  // Leaves a record with this number, and removes the one before. One thread.
  void Answer(uint64_t number) {
    if (directory_.empty()) return;
    const auto files = PosixFileSystem();
    const std::string path = absl::StrCat(directory_, "/collectives-", number, ".pb");
    const absl::Status written =
        files->WriteAtomically(path, RecordOf(*recorder_).SerializeAsString());
    if (!written.ok()) {
      logger_.Warning("no record of collectives", {{"reason", written.ToString()}});
      return;
    }
    if (!answer_.empty()) files->RemoveFile(answer_).IgnoreError();
    answer_ = path;
  }

  // From any thread.
  void Dump() {
    {
      MutexLock lock(&mutex_);
      if (dumped_) return;
      dumped_ = true;
    }
    const std::string calls = recorder_->Dump();
    if (calls.empty()) return;
    absl::Status written;
    if (!path_.empty()) written = PosixFileSystem()->WriteAtomically(path_, calls);
    logger_.Error("collectives of this rank",
                  {{"unfinished", recorder_->Unfinished()},
                   {"record", written.ok() ? path_ : written.ToString()}});
  }

 private:
  static v1::CollectiveRecord RecordOf(const parallel::FlightRecorder& recorder) {
    using State = parallel::FlightRecorder::State;
    v1::CollectiveRecord record;
    SetTime(absl::Now(), *record.mutable_time());
    for (const parallel::FlightRecorder::Call& call : recorder.Calls()) {
      v1::Collective& collective = *record.add_collectives();
      collective.set_group(call.group);
      collective.set_path(call.path);
      collective.set_number(static_cast<int64_t>(call.number));
      collective.set_operation(call.operation);
      collective.set_dtype(kernels::Name(call.dtype));
      collective.set_elements(call.elements);
      collective.set_bytes(call.bytes());
      collective.set_peer(call.peer);
      SetTime(call.enqueued, *collective.mutable_enqueued());
      collective.set_state(call.state == State::kUnfinished ? v1::COLLECTIVE_STATE_UNFINISHED
                           : call.state == State::kFinished ? v1::COLLECTIVE_STATE_FINISHED
                                                            : v1::COLLECTIVE_STATE_FAILED);
    }
    return record;
  }
  static void SetTime(absl::Time time, google::protobuf::Timestamp& to) {
    const absl::Duration since = time - absl::UnixEpoch();
    const int64_t seconds = absl::ToInt64Seconds(since);
    to.set_seconds(seconds);
    to.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(since - absl::Seconds(seconds))));
  }

  const std::string directory_, path_;
  std::string answer_;
  Logger& logger_;
  const std::shared_ptr<parallel::FlightRecorder> recorder_;
  Mutex mutex_;
  bool dumped_ ABSL_GUARDED_BY(mutex_) = false;
};

// Where this rank listens and what the others call its place.
parallel::TcpOptions TcpOptionsOf(const v1::RankAssignment& assignment, Logger& logger) {
  const RankHost place = PlaceOf(assignment);
  parallel::TcpOptions options;
  options.address = place.address;
  options.ports = assignment.rank_ports();
  options.label = absl::StrCat(place.worker, " on host ", place.host);
  options.on_event = [&logger](const std::string& what) { logger.Warning(what); };
  return options;
}

// Says which hosts there are and what crosses between them.
void TellHosts(const std::vector<RankHost>& hosts, const parallel::Mesh& mesh,
               const kernels::Device& device) {
  if (HostCount(hosts) == 1) return;
  for (const std::string& line : HostTable(hosts)) PrintLine(line);
  std::vector<absl::string_view> axes;
  for (const parallel::Axis axis : AxesAcrossHosts(mesh, hosts)) axes.push_back(Name(axis));
  PrintLine(absl::StrCat("groups along ", absl::StrJoin(axes, ", "), " cross hosts",
                         device.kind() == kernels::DeviceKind::kCuda
                             ? ": their collectives go through NCCL, not through copy engines"
                             : ""));
}

// That every host has the same files, and who shares a directory of checkpoints: by rank, the
// lowest rank with the same one. Every rank gets the same status.
absl::StatusOr<std::vector<int>> CheckFiles(const v1::RankAssignment& assignment,
                                            const std::vector<RankHost>& hosts,
                                            parallel::Communicator& world, kernels::Device& device,
                                            FileSystem& files) {
  const v1::JobSpec& spec = assignment.spec();
  // The ranks of one worker see the same files.
  std::vector<Input> inputs;
  if (assignment.local_rank() == 0) {
    ASSIGN_OR_RETURN(inputs, DescribeInputs(spec, files));
  }
  RETURN_IF_ERROR(CheckInputs(world, device, hosts, inputs));
  if (!spec.has_checkpoint()) return std::vector<int>(hosts.size(), 0);
  const bool local = spec.checkpoint().storage() == v1::CHECKPOINT_STORAGE_LOCAL;
  const std::string directory =
      absl::StrCat(ResolvePath(spec, spec.checkpoint().path()), "/", assignment.job_id());
  ASSIGN_OR_RETURN(std::vector<int> groups,
                   GroupsByDirectory(world, device, files, hosts, directory, assignment.epoch(),
                                     local ? absl::ZeroDuration() : kSharedFilePatience));
  if (!local) RETURN_IF_ERROR(CheckShared(groups, hosts, directory));
  return groups;
}

// The rank that could not be reached, where that is why.
std::optional<int> PeerOf(const absl::Status& status) {
  const auto failure = parallel::PeerFailureOf(status);
  return failure.has_value() ? std::optional<int>(failure->rank) : std::nullopt;
}

absl::StatusOr<std::unique_ptr<parallel::Communicator>> Connect(
    const v1::RankAssignment& assignment, DaemonClient& client, kernels::Device& device,
    const FlightRecord& flight, FailureDeadline& deadline, Logger& logger) {
  const int rank = assignment.rank();
  const int size = assignment.world_size();
  absl::StatusOr<std::unique_ptr<parallel::Communicator>> communicator;
  if (size == 1) {
    communicator =
        std::move(parallel::MakeLocalCommunicators(1, parallel::TcpOptions().operation_timeout)[0]);
  } else if (device.kind() == kernels::DeviceKind::kCuda) {
    parallel::NcclOptions options = NcclOptionsOf(assignment.spec());
    options.host = TcpOptionsOf(assignment, logger);
    options.on_failure = [recorder = flight.recorder(), &deadline](const absl::Status& why) {
      recorder->Freeze();
      deadline.Arm(why);
    };
    communicator = parallel::MakeNcclCommunicator(client, rank, size, device, options);
  } else {
    communicator =
        parallel::MakeTcpCommunicator(client, rank, size, TcpOptionsOf(assignment, logger));
  }
  if (!communicator.ok()) {
    return parallel::Mark(Annotate(communicator.status(), "bootstrap"),
                          parallel::FailureDomain::kCommunication);
  }
  return parallel::FlightRecorder::Record(*std::move(communicator), flight.recorder());
}

double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct Ending {
  v1::Cause cause = v1::CAUSE_UNKNOWN;
  std::string message;
  int code = kExitFailed;
  std::optional<int> peer = std::nullopt;  // the rank that could not be reached
};

absl::StatusOr<Ending> Train(const v1::RankAssignment& given, DaemonClient& client,
                             Reporter& reporter, RankMetrics& metrics, Profiler& profiler,
                             const FlightRecord& flight, FailureDeadline& deadline,
                             Logger& logger) {
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  reporter.OnPhase(Balances(given.spec()) ? "balancing" : "starting");
  v1::RankAssignment assignment = given;
  std::string balance;
  ASSIGN_OR_RETURN(*assignment.mutable_spec(), BalancedSpec(given, client, balance));
  if (!balance.empty()) PrintLine(balance);
  // Of a worker whose cache was cleared while it ran.
  if (const std::string& cache = assignment.cache_directory(); !cache.empty()) {
    const absl::Status made = files->MakeDirectory(cache);
    if (!made.ok())
      reporter.OnWarning(Annotate(made, "what ranks measure is not kept for later ones"));
  }
  const auto starting = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(EngineSetup setup, SetUpEngine(assignment, *files, /*memory=*/std::nullopt,
                                                  [&reporter] { reporter.Measuring(); }));
  profiler.SetDevice(setup.device->kind());
  reporter.OnPhase("bootstrapping");
  const Arithmetic arithmetic =
      Arithmetic::Of(*setup.model, setup.device->name(), setup.options.precision,
                     assignment.spec().engine().training().precision() == v1::PRECISION_TF32,
                     assignment.world_size());
  reporter.SetArithmetic(arithmetic);
  const double opened = SecondsSince(starting);
  ASSIGN_OR_RETURN(auto communicator,
                   Connect(assignment, client, *setup.device, flight, deadline, logger));
  RETURN_IF_ERROR(CheckAgreement(*communicator, *setup.device, assignment.spec(),
                                 setup.training->fingerprint()));
  if (assignment.world_size() > 1) {
    auto hosts = GatherHosts(*communicator, *setup.device, PlaceOf(assignment));
    if (!hosts.ok()) {
      return parallel::Mark(Annotate(hosts.status(), "exchange of hosts"),
                            parallel::FailureDomain::kCommunication);
    }
    if (assignment.rank() == 0) TellHosts(*hosts, *setup.mesh, *setup.device);
    ASSIGN_OR_RETURN(setup.options.checkpoint_groups,
                     CheckFiles(assignment, *hosts, *communicator, *setup.device, *files));
  }
  const double met = SecondsSince(starting);
  auto groups = parallel::MeshGroups::Make(*setup.mesh, *communicator, setup.zero_shards);
  if (!groups.ok()) {
    return parallel::Mark(Annotate(groups.status(), "communicators of the mesh"),
                          parallel::FailureDomain::kCommunication);
  }
  if (assignment.world_size() > 1) {
    PrintLine(absl::StrFormat(
        "opened %s and the data in %.1f s, met the other ranks in %.1f s, made groups in %.1f s",
        setup.device->name(), opened, met - opened, SecondsSince(starting) - met));
  }
  reporter.OnPhase("allocating");
  const bool cuda = setup.device->kind() == kernels::DeviceKind::kCuda;
  PrintLine(absl::StrCat(
      "taking ",
      cuda ? absl::StrCat(BytesText(setup.memory.device_bytes()), " of ", setup.device->name(),
                          " and ", BytesText(setup.memory.host_bytes()), " of the host's memory")
           : absl::StrCat(BytesText(NeededBytes(setup.memory, setup.device->kind())),
                          " of memory")));
  const auto allocating = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(auto trainer, parallel::Trainer::Make(setup.options, *setup.model, *setup.device,
                                                         **groups, *setup.training,
                                                         setup.validation.get(), *files, reporter));
  reporter.Allocated(*setup.device);
  PrintLine(absl::StrFormat("took them in %.1f s", SecondsSince(allocating)));
  if (assignment.rank() == 0) {
    PrintLine(absl::StrFormat(
        "job %s epoch %d: %s with %.2f M parameters, %d ranks on %s, %.1f MB of state and %.1f MB "
        "of activations per rank, %.1f MB of state offloaded",
        assignment.job_id(), assignment.epoch(), setup.model->description().family,
        static_cast<double>(setup.model->parameters().elements()) * 1e-6, assignment.world_size(),
        setup.device->name(), static_cast<double>(trainer->state_bytes()) * 1e-6,
        static_cast<double>(trainer->arena().peak_bytes()) * 1e-6,
        static_cast<double>(trainer->host_state_bytes()) * 1e-6));
    PrintLine(arithmetic.ToText());
  }

  std::vector<parallel::RestoreCandidate> candidates;
  for (const v1::CheckpointRecord& record : assignment.restore()) {
    candidates.push_back({{JobId(assignment.job_id()), record.step(), Epoch(record.epoch())},
                          record.path(),
                          record.manifest_checksum()});
  }
  const auto start = std::chrono::steady_clock::now();
  RETURN_IF_ERROR(trainer->Restore(candidates));
  if (trainer->step() > 0) {
    metrics.Restored(SecondsSince(start));
    reporter.Restored(trainer->step(), trainer->consumed_samples());
    PrintLine(absl::StrFormat("restored step %d", trainer->step()));
  } else if (setup.initial_weights != nullptr) {
    reporter.OnPhase("loading");
    RETURN_IF_ERROR(
        trainer->Initialize([&](const std::string& name, const parallel::Box& box, float* out) {
          return setup.initial_weights->Read(name, box, out);
        }));
    if (assignment.rank() == 0) {
      PrintLine(absl::StrCat("began with the weights of ", setup.initial_weights->source()));
    }
  }

  ASSIGN_OR_RETURN(const parallel::Trainer::Outcome outcome, trainer->Run());
  if (trainer->LeadsDirectory() && assignment.spec().has_checkpoint()) {
    // Without a verdict in time the daemon goes on asking for it; only the pruning is left out.
    client.WaitCommitted(trainer->step(), kVerdictTimeout).IgnoreError();
    trainer->Prune();
  }
  if (outcome == parallel::Trainer::Outcome::kStopped) {
    return Ending{v1::CAUSE_PREEMPTED,
                  absl::StrFormat("asked to stop, ended after step %d", trainer->step()),
                  kExitStopped};
  }
  return Ending{v1::CAUSE_COMPLETED, absl::StrFormat("trained %d steps", trainer->step()),
                kExitCompleted};
}

// On the host of the daemon's own metrics, and on a port of --rank-ports from its end, where ranks
// that listen for their peers come last.
absl::StatusOr<std::unique_ptr<metrics::PrometheusServer>> StartMetrics(
    const v1::RankAssignment& assignment) {
  ASSIGN_OR_RETURN(const parallel::PortRange ports,
                   parallel::PortRange::Parse(assignment.rank_ports()));
  if (ports.first == 0) return metrics::PrometheusServer::Start(assignment.metrics_address());
  ASSIGN_OR_RETURN(HostPort at, ParseHostPort(assignment.metrics_address()));
  absl::Status failure;
  for (int port = ports.last - assignment.local_rank(); port >= ports.first; --port) {
    at.port = absl::StrCat(port);
    auto started = metrics::PrometheusServer::Start(at.ToString());
    if (started.ok()) return started;
    failure = started.status();
  }
  return failure;
}

absl::StatusOr<v1::RankAssignment> ReadAssignment(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string bytes, PosixFileSystem()->Read(path));
  v1::RankAssignment assignment;
  if (!assignment.ParseFromString(bytes) || assignment.job_id().empty() ||
      assignment.world_size() < 1 || assignment.rank() < 0 ||
      assignment.rank() >= assignment.world_size()) {
    return absl::InvalidArgumentError(path + " is not a valid rank assignment");
  }
  return assignment;
}

}  // namespace

int RunRank(const std::string& path) {
  const absl::StatusOr<v1::RankAssignment> assignment = ReadAssignment(path);
  if (!assignment.ok()) {
    std::cerr << "muster-rank: " << assignment.status().message() << std::endl;
    return kExitUsage;
  }
  parallel::SetNcclEnvironment(
      {.address = assignment->address(), .host_id = assignment->host_id()});
  ExitReporter exit(assignment->run_directory());
  SignalWatcher signals(exit);
  const std::shared_ptr<Logger> logger = Logger::ToStderr(LogLevel::kInfo);

  std::unique_ptr<metrics::Registry> discard = metrics::DiscardRegistry();
  std::unique_ptr<metrics::PrometheusServer> server;
  if (!assignment->metrics_address().empty()) {
    auto started = StartMetrics(*assignment);
    if (started.ok()) {
      server = *std::move(started);
    } else {
      logger->Warning("no metrics endpoint", {{"reason", started.status().ToString()}});
    }
  }
  RankMetrics rank_metrics(server ? server->registry() : *discard, assignment->job_name(),
                           assignment->rank());

  FlightRecord flight(assignment->run_directory(), *logger);
  DaemonClientOptions options = DaemonClientOptions::From(*assignment);
  options.on_aborted = [&exit, &flight](const absl::Status& why) {
    flight.Dump();
    exit.EndProcess(v1::CAUSE_CANCELLED,
                    absl::StrCat("the attempt is over: ", std::string(why.message())),
                    kExitStopped);
  };
  options.on_collectives = [&flight](uint64_t number) { flight.Answer(number); };
  auto client = DaemonClient::Make(std::move(options));
  if (!client.ok()) {
    exit.Write(v1::CAUSE_LAUNCH, client.status().ToString());
    return kExitFailed;
  }
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  Profiler profiler(*files, assignment->run_directory(), assignment->rank(),
                    absl::StrFormat("rank %d, %s, %s", assignment->rank(), assignment->device(),
                                    assignment->worker()),
                    flight.recorder());
  Reporter reporter(*assignment, **client, signals, exit, rank_metrics, profiler, *logger,
                    server ? server->address() : "");
  logger->Info("rank starts", {{"job", assignment->job_id()},
                               {"epoch", assignment->epoch()},
                               {"rank", assignment->rank()},
                               {"world_size", assignment->world_size()},
                               {"pid", static_cast<int64_t>(getpid())},
                               {"metrics", server ? server->address() : ""}});

  FailureDeadline deadline(kFailureGrace, [&exit, &flight](const absl::Status& why) {
    const std::string message(why.message());
    const v1::Cause cause = PeerOf(why).has_value() ? CauseOf(why) : v1::CAUSE_COMMUNICATION;
    exit.Write(cause, message, PeerOf(why));
    flight.Dump();
    exit.EndProcess(cause, message, kExitFailed, PeerOf(why));
  });
  const absl::StatusOr<Ending> trained =
      Train(*assignment, **client, reporter, rank_metrics, profiler, flight, deadline, *logger);
  deadline.Disarm();
  Ending ending;
  if (trained.ok()) {
    ending = *trained;
  } else {
    ending.cause = CauseOf(trained.status());
    ending.message = std::string(trained.status().message());
    ending.peer = PeerOf(trained.status());
    flight.Dump();
    logger->Error("rank failed", {{"status", trained.status().ToString()}});
  }
  signals.TrainingEnds();
  PrintLine(ending.message);
  const absl::Status flushed =
      (*client)->Flush(trained.ok() ? kFlushTimeout : kFailureFlushTimeout);
  if (!flushed.ok())
    logger->Warning("not everything was delivered", {{"reason", flushed.ToString()}});
  // Not by way of destructors: the metrics server alone takes seconds to stop, and the device is
  // free only when the process is gone.
  exit.EndProcess(ending.cause, ending.message, ending.code, ending.peer);
}

}  // namespace muster::worker
