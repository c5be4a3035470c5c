#include "worker/rank/rank_metrics.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace muster::worker {
namespace {

using metrics::Family;
using metrics::Kind;

// Families hold vectors, and globals must not have constructors, hence functions.
const std::vector<absl::string_view>& Labels() {
  static const auto& labels = *new std::vector<absl::string_view>{"job_name", "rank"};
  return labels;
}
const std::vector<absl::string_view>& KindLabels() {
  static const auto& labels =
      *new std::vector<absl::string_view>{"job_name", "rank", "kind", "collective"};
  return labels;
}
const std::vector<double>& SecondsBuckets() {
  static const auto& buckets = *new std::vector<double>{
      0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300};
  return buckets;
}

struct Families {
  Family steps{Kind::kCounter, "muster_rank_steps_total",
               "Optimizer steps finished by this process.", Labels()};
  Family tokens{Kind::kCounter, "muster_rank_tokens_total",
                "Unmasked tokens trained on in these steps, by all ranks together.", Labels()};
  Family skipped{Kind::kCounter, "muster_rank_skipped_steps_total",
                 "Of these, steps whose fp16 gradients overflowed: they changed no weight.",
                 Labels()};
  Family exposed{Kind::kCounter, "muster_rank_exposed_communication_seconds_total",
                 "Time in which a step waited for collectives that backward did not hide.",
                 Labels()};
  Family exposed_by_kind{Kind::kCounter, "muster_rank_exposed_seconds_total",
                         "Time in which the rank's device computed nothing, waiting for gradients, "
                         "parameters, the tensor, context or pipeline group, or at the end of a "
                         "step for the slowest rank; by the collective that it waited in.",
                         KindLabels()};
  Family gradient_bytes{Kind::kCounter, "muster_rank_gradient_bytes_total",
                        "Bytes sent by this rank to reduce gradients.", Labels()};
  Family gradient_density{Kind::kGauge, "muster_rank_gradient_density",
                          "Share of the elements of compressed gradients that the last step sent; "
                          "1 without compression.",
                          Labels()};
  Family residual_norm{Kind::kGauge, "muster_rank_gradient_residual_norm",
                       "Norm of what compression has kept back on this rank so far.", Labels()};
  Family damaged{Kind::kCounter, "muster_rank_damaged_checkpoints_total",
                 "Checkpoints found damaged and skipped while restoring.", Labels()};
  Family step{Kind::kGauge, "muster_rank_step", "Last optimizer step finished.", Labels()};
  Family train_loss{Kind::kGauge, "muster_rank_train_loss",
                    "Loss of the last step in nats per token, mean over the global batch.",
                    Labels()};
  Family validation_loss{Kind::kGauge, "muster_rank_validation_loss",
                         "Loss of the last evaluation in nats per token.", Labels()};
  Family gradient_norm{Kind::kGauge, "muster_rank_gradient_norm",
                       "Global gradient norm of the last step, before clipping.", Labels()};
  Family learning_rate{Kind::kGauge, "muster_rank_learning_rate", "Learning rate of the last step.",
                       Labels()};
  Family loss_scale{Kind::kGauge, "muster_rank_loss_scale",
                    "What fp16 multiplied the loss of the last step by; 1 in other precisions.",
                    Labels()};
  Family tokens_per_second{Kind::kGauge, "muster_rank_tokens_per_second",
                           "Tokens per second of all ranks over the last steps.", Labels()};
  Family mfu{Kind::kGauge, "muster_rank_model_flops_utilization",
             "Arithmetic of the model over the last steps as a share of what all devices could do "
             "at best by their data sheet, 0 to 1; 0 where that is not known.",
             Labels()};
  Family hfu{Kind::kGauge, "muster_rank_hardware_flops_utilization",
             "The same with what recomputation repeats.", Labels()};
  Family checkpoint_bytes{Kind::kGauge, "muster_rank_checkpoint_bytes",
                          "Size of the last checkpoint written; rank 0 only.", Labels()};
  Family checkpoint_disk_free{Kind::kGauge, "muster_rank_checkpoint_disk_free_bytes",
                              "Bytes that were free where the last checkpoint was written, after "
                              "it; rank 0 only.",
                              Labels()};
  Family device_bytes{Kind::kGauge, "muster_rank_device_memory_bytes",
                      "Memory of its device that the engine has taken.", Labels()};
  Family host_bytes{
      Kind::kGauge, "muster_rank_host_memory_bytes",
      "Memory of the host that the engine has taken beside its device's: batches, numbers "
      "of steps, what is offloaded.",
      Labels()};
  Family restore_seconds{Kind::kGauge, "muster_rank_restore_seconds",
                         "Time that restoring took at the start of this process.", Labels()};
  Family step_seconds{Kind::kHistogram, "muster_rank_step_duration_seconds",
                      "Duration of an optimizer step.", Labels(), SecondsBuckets()};
  Family checkpoint_seconds{Kind::kHistogram, "muster_rank_checkpoint_save_duration_seconds",
                            "Duration of a save, from its start until all is durable.", Labels(),
                            SecondsBuckets()};
  Family evaluation_seconds{Kind::kHistogram, "muster_rank_evaluation_duration_seconds",
                            "Duration of an evaluation.", Labels(), SecondsBuckets()};
};

const Families& All() {
  static const Families& families = *new Families();
  return families;
}

std::vector<std::string> Values(const std::string& job_name, int rank) {
  return {job_name, absl::StrCat(rank)};
}

}  // namespace

std::vector<const Family*> RankMetricsCatalogue() {
  const Families& f = All();
  return {&f.steps,
          &f.tokens,
          &f.skipped,
          &f.step,
          &f.train_loss,
          &f.validation_loss,
          &f.gradient_norm,
          &f.learning_rate,
          &f.loss_scale,
          &f.tokens_per_second,
          &f.mfu,
          &f.hfu,
          &f.step_seconds,
          &f.exposed,
          &f.exposed_by_kind,
          &f.gradient_bytes,
          &f.gradient_density,
          &f.residual_norm,
          &f.checkpoint_seconds,
          &f.checkpoint_bytes,
          &f.checkpoint_disk_free,
          &f.device_bytes,
          &f.host_bytes,
          &f.restore_seconds,
          &f.damaged,
          &f.evaluation_seconds};
}

RankMetrics::RankMetrics(metrics::Registry& r, const std::string& job_name, int rank)
    : registry_(r),
      job_name_(job_name),
      rank_(rank),
      steps_(r.GetCounter(All().steps, Values(job_name, rank))),
      tokens_(r.GetCounter(All().tokens, Values(job_name, rank))),
      skipped_steps_(r.GetCounter(All().skipped, Values(job_name, rank))),
      exposed_communication_seconds_(r.GetCounter(All().exposed, Values(job_name, rank))),
      gradient_bytes_(r.GetCounter(All().gradient_bytes, Values(job_name, rank))),
      damaged_(r.GetCounter(All().damaged, Values(job_name, rank))),
      step_(r.GetGauge(All().step, Values(job_name, rank))),
      train_loss_(r.GetGauge(All().train_loss, Values(job_name, rank))),
      validation_loss_(r.GetGauge(All().validation_loss, Values(job_name, rank))),
      gradient_norm_(r.GetGauge(All().gradient_norm, Values(job_name, rank))),
      learning_rate_(r.GetGauge(All().learning_rate, Values(job_name, rank))),
      loss_scale_(r.GetGauge(All().loss_scale, Values(job_name, rank))),
      gradient_density_(r.GetGauge(All().gradient_density, Values(job_name, rank))),
      residual_norm_(r.GetGauge(All().residual_norm, Values(job_name, rank))),
      tokens_per_second_(r.GetGauge(All().tokens_per_second, Values(job_name, rank))),
      model_flops_utilization_(r.GetGauge(All().mfu, Values(job_name, rank))),
      hardware_flops_utilization_(r.GetGauge(All().hfu, Values(job_name, rank))),
      checkpoint_bytes_(r.GetGauge(All().checkpoint_bytes, Values(job_name, rank))),
      device_bytes_(r.GetGauge(All().device_bytes, Values(job_name, rank))),
      host_bytes_(r.GetGauge(All().host_bytes, Values(job_name, rank))),
      restore_seconds_(r.GetGauge(All().restore_seconds, Values(job_name, rank))),
      step_seconds_(r.GetHistogram(All().step_seconds, Values(job_name, rank))),
      checkpoint_seconds_(r.GetHistogram(All().checkpoint_seconds, Values(job_name, rank))),
      evaluation_seconds_(r.GetHistogram(All().evaluation_seconds, Values(job_name, rank))) {}

void RankMetrics::AddExposed(const parallel::ExposedSeconds& exposed) {
  for (int i = 0; i < parallel::kExposures; ++i) {
    for (int j = 0; j < parallel::kCollectives; ++j) {
      const auto kind = static_cast<parallel::Exposure>(i);
      const auto collective = static_cast<parallel::Collective>(j);
      const double seconds = exposed.at(kind, collective);
      if (seconds <= 0) continue;
      metrics::Counter*& counter = exposed_seconds_[i][j];
      if (counter == nullptr) {
        counter =
            &registry_.GetCounter(All().exposed_by_kind, {job_name_, absl::StrCat(rank_),
                                                          std::string(parallel::Name(kind)),
                                                          std::string(parallel::Name(collective))});
      }
      counter->Increment(seconds);
    }
  }
}

void RankMetrics::Step(const parallel::StepReport& report, double tokens_per_second,
                       double model_flops_utilization, double hardware_flops_utilization) {
  steps_.Increment();
  tokens_.Increment(static_cast<double>(report.tokens));
  if (report.skipped) skipped_steps_.Increment();
  loss_scale_.Set(report.loss_scale);
  exposed_communication_seconds_.Increment(report.exposed_communication_seconds);
  AddExposed(report.exposed);
  gradient_bytes_.Increment(static_cast<double>(report.gradient_bytes));
  gradient_density_.Set(report.gradient_density);
  residual_norm_.Set(report.residual_norm);
  step_.Set(static_cast<double>(report.step));
  train_loss_.Set(report.loss);
  gradient_norm_.Set(report.gradient_norm);
  learning_rate_.Set(report.learning_rate);
  tokens_per_second_.Set(tokens_per_second);
  model_flops_utilization_.Set(model_flops_utilization);
  hardware_flops_utilization_.Set(hardware_flops_utilization);
  step_seconds_.Observe(report.seconds);
}

void RankMetrics::Memory(int64_t device_bytes, int64_t host_bytes) {
  device_bytes_.Set(static_cast<double>(device_bytes));
  host_bytes_.Set(static_cast<double>(host_bytes));
}

void RankMetrics::Evaluation(const parallel::EvaluationReport& report) {
  validation_loss_.Set(report.loss);
  evaluation_seconds_.Observe(report.seconds);
}

void RankMetrics::Saved(const parallel::SavedCheckpoint& saved) {
  checkpoint_seconds_.Observe(saved.seconds);
  if (saved.result.bytes <= 0) return;
  checkpoint_bytes_.Set(static_cast<double>(saved.result.bytes));
  std::error_code unknown;
  const std::filesystem::space_info disk = std::filesystem::space(saved.result.directory, unknown);
  if (unknown) return;
  registry_.GetGauge(All().checkpoint_disk_free, Values(job_name_, rank_))
      .Set(static_cast<double>(disk.available));
}

void RankMetrics::Restored(double seconds) { restore_seconds_.Set(seconds); }

void RankMetrics::Damaged() { damaged_.Increment(); }

}  // namespace muster::worker
