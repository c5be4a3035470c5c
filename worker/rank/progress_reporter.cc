#include "worker/rank/progress_reporter.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace muster::worker {
namespace {

constexpr size_t kThroughputSteps = 20;
// Points of the loss curve that users see, over a whole run.
constexpr int64_t kLossPoints = 256;
// A report carries the last points of the curve: enough for a daemon or coordinator that was away
// for a while, and more of the young ones for jobs that make hundreds of steps between two reports.
constexpr int kLossPointsPerReport = 64;
constexpr int kYoungLossPointsPerReport = 512;
constexpr absl::Duration kYoungLossPoint = absl::Seconds(30);
// Runs of more than kLineForEveryStep steps print one line for this many of them.
constexpr int64_t kLineEverySteps = 10;
constexpr int64_t kLineForEveryStep = 100;
constexpr char kTraining[] = "training";
constexpr char kMeasuring[] = "measuring";

}  // namespace

void PrintLine(const std::string& line) {
  std::fputs(line.c_str(), stdout);
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

ProgressReporter::ProgressReporter(const v1::RankAssignment& assignment, StopSignals& signals,
                                   const ProgressSinks& sinks, const std::string& metrics_address)
    : assignment_(assignment), signals_(signals), sinks_(sinks) {
  progress_.set_metrics_address(metrics_address);
}

void ProgressReporter::OnMeasuring() {
  if (progress_.phase() == kMeasuring) return;
  if (!std::exchange(measured_, true)) {
    const std::string& cache = assignment_.cache_directory();
    PrintLine(absl::StrCat("measuring how to multiply matrices fastest: 20 to 30 s for a new model",
                           cache.empty() ? "" : absl::StrCat(", kept for later ranks in ", cache)));
  }
  OnPhase(kMeasuring);
}

void ProgressReporter::OnRestored(int64_t step, int64_t consumed_samples) {
  progress_.set_step(step);
  progress_.set_consumed_samples(consumed_samples);
  Publish(/*now=*/true);
}

void ProgressReporter::OnPhase(absl::string_view phase) {
  if (phase == kTraining) signals_.TrainingStarts();
  progress_.set_phase(std::string(phase));
  SetMemory();
  Publish(/*now=*/true);
}

// The coordinator counts a phase that reads differently as progress, and a rank without progress
// for its progress timeout as hanging.
void ProgressReporter::OnProgress(absl::string_view phase, double fraction) {
  OnPhase(absl::StrFormat("%s %.1f %%", phase, 100 * fraction));
}

kernels::Trace* ProgressReporter::BeginStep(int64_t step) {
  return sinks_.profiler.BeginStep(step);
}

void ProgressReporter::OnStep(const parallel::StepReport& report) {
  sinks_.profiler.EndStep(report.step, report.seconds);
  if (progress_.phase() == kMeasuring) progress_.set_phase(kTraining);
  const Throughput throughput = AddToThroughput(report);
  SetStep(report, throughput);
  SetTimes(report);
  sinks_.metrics.Step(report, throughput.tokens_per_second, throughput.model_flops_utilization,
                      throughput.hardware_flops_utilization);
  AddLossPoint(report);
  PrintStep(report, throughput);
  // By the end of the first step libraries have taken the memory that they need. Its report also
  // proves that the job trains, so it goes out at once.
  if (first_step_) SetMemory();
  Publish(first_step_);
  first_step_ = false;
}

ProgressReporter::Throughput ProgressReporter::AddToThroughput(const parallel::StepReport& report) {
  recent_.emplace_back(report.tokens, report.seconds);
  if (recent_.size() > kThroughputSteps) recent_.pop_front();
  double tokens = 0, seconds = 0;
  for (const auto& [step_tokens, step_seconds] : recent_) {
    tokens += static_cast<double>(step_tokens);
    seconds += step_seconds;
  }
  // Masked tokens are not trained on, but take the same arithmetic.
  const v1::EngineSpec& engine = assignment_.spec().engine();
  const double all_tokens =
      static_cast<double>(recent_.size()) *
      static_cast<double>(engine.training().global_batch() * engine.model().sequence_length());
  return {.tokens_per_second = seconds > 0 ? tokens / seconds : 0,
          .model_flops_utilization =
              arithmetic_.Utilization(arithmetic_.model_flops, all_tokens, seconds),
          .hardware_flops_utilization =
              arithmetic_.Utilization(arithmetic_.hardware_flops, all_tokens, seconds)};
}

void ProgressReporter::SetStep(const parallel::StepReport& report, const Throughput& throughput) {
  progress_.set_step(report.step);
  progress_.set_train_loss(report.loss);
  progress_.set_tokens_per_second(throughput.tokens_per_second);
  progress_.set_step_seconds(report.seconds);
  progress_.set_learning_rate(report.learning_rate);
  progress_.set_gradient_norm(report.gradient_norm);
  progress_.set_consumed_samples(report.consumed_samples);
  progress_.set_exposed_communication_seconds(report.exposed_communication_seconds);
  progress_.set_model_flops_utilization(throughput.model_flops_utilization);
  progress_.set_hardware_flops_utilization(throughput.hardware_flops_utilization);
}

void ProgressReporter::SetTimes(const parallel::StepReport& report) {
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

void ProgressReporter::PrintStep(const parallel::StepReport& report, const Throughput& throughput) {
  const int64_t steps = assignment_.spec().engine().training().steps();
  const int64_t every = steps > kLineForEveryStep ? kLineEverySteps : 1;
  if (!first_step_ && report.step % every != 0 && report.step != steps && !report.skipped) return;
  const double mfu = throughput.model_flops_utilization;
  PrintLine(absl::StrFormat(
      "step %d/%d  loss %.5f  grad norm %.4f  lr %.3e  %.0f tokens/s  %.3f s/step%s%s", report.step,
      steps, report.loss, report.gradient_norm, report.learning_rate, throughput.tokens_per_second,
      report.seconds, mfu > 0 ? absl::StrFormat("  MFU %.1f %%", 100 * mfu) : std::string(),
      report.skipped ? absl::StrFormat("  skipped: overflow at loss scale %g", report.loss_scale)
                     : std::string()));
}

void ProgressReporter::AddLossPoint(const parallel::StepReport& report) {
  if (assignment_.rank() != 0) return;
  const v1::TrainingSpec& training = assignment_.spec().engine().training();
  const int64_t steps = training.steps();
  const int64_t stride = (steps + kLossPoints - 1) / kLossPoints;
  const int64_t evaluate_every = training.evaluate_every();
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

void ProgressReporter::OnEvaluation(const parallel::EvaluationReport& report) {
  progress_.set_validation_loss(report.loss);
  progress_.set_validation_step(report.step);
  sinks_.metrics.Evaluation(report);
  PrintLine(absl::StrFormat("step %d  validation loss %.5f nats/token  (%d tokens, %.1f s)",
                            report.step, report.loss, report.tokens, report.seconds));
  Publish(/*now=*/true);
  if (assignment_.rank() != 0) return;
  v1::Evaluation evaluation;
  evaluation.set_step(report.step);
  evaluation.set_loss(report.loss);
  evaluation.set_tokens(report.tokens);
  sinks_.client.Notify(evaluation);
}

void ProgressReporter::OnSaved(const parallel::SavedCheckpoint& saved) {
  progress_.set_last_saved_step(saved.id.step);
  sinks_.metrics.Saved(saved);
  Publish(/*now=*/false);
  if (assignment_.rank() != 0) return;
  v1::CheckpointRecord record;
  record.set_step(saved.id.step);
  record.set_epoch(saved.id.epoch.value());
  record.set_membership(saved.id.membership);
  record.set_path(saved.result.directory);
  record.set_bytes(saved.result.bytes);
  record.set_manifest_checksum(saved.result.manifest_checksum);
  record.set_seconds(saved.seconds);
  record.set_consumed_samples(saved.consumed_samples);
  sinks_.client.Commit(record);
  PrintLine(absl::StrFormat("step %d  saved %.1f MB in %.2f s to %s", saved.id.step,
                            static_cast<double>(saved.result.bytes) * 1e-6, saved.seconds,
                            saved.result.directory));
}

void ProgressReporter::OnDamaged(const parallel::CheckpointId& id, const absl::Status& why) {
  sinks_.metrics.Damaged();
  sinks_.logger.Warning(
      "checkpoint is damaged and skipped",
      {{"step", id.step}, {"epoch", id.epoch.value()}, {"reason", why.ToString()}});
  v1::DamagedCheckpoint damaged;
  for (const v1::CheckpointRecord& record : assignment_.restore()) {
    if (record.step() == id.step && record.epoch() == id.epoch.value()) {
      *damaged.mutable_checkpoint() = record;
    }
  }
  damaged.set_reason(std::string(why.message()));
  sinks_.client.Notify(damaged);
}

void ProgressReporter::OnRemoved(const parallel::CheckpointId& id) {
  v1::RemovedCheckpoint removed;
  removed.set_step(id.step);
  removed.set_epoch(id.epoch.value());
  removed.set_membership(id.membership);
  sinks_.client.Notify(removed);
}

void ProgressReporter::OnWarning(const absl::Status& status) {
  sinks_.logger.Warning(status.ToString());
}

int64_t ProgressReporter::CommittedStep() { return sinks_.client.last_committed_step(); }

bool ProgressReporter::StopRequested() {
  return signals_.stop_requested() || sinks_.client.stop_requested();
}

void ProgressReporter::SetMemory() {
  if (device_ == nullptr) return;
  v1::RankMemory& memory = *progress_.mutable_memory();
  memory.set_device_bytes(device_->allocated_bytes());
  memory.set_host_bytes(device_->host_allocated_bytes());
  sinks_.metrics.Memory(memory.device_bytes(), memory.host_bytes());
  if (device_->kind() != kernels::DeviceKind::kCuda) return;
  const auto of_device = device_->Memory();
  if (!of_device.ok()) return;
  memory.set_used_bytes(of_device->total - of_device->free);
  memory.set_total_bytes(of_device->total);
}

void ProgressReporter::Publish(bool now) {
  sinks_.exit.SetProgress(progress_);
  if (now) {
    sinks_.client.ReportNow(progress_);
  } else {
    sinks_.client.Report(progress_);
  }
}

}  // namespace muster::worker
