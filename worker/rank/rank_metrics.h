// The metrics of a rank process. Every series carries the labels "job_name" and "rank", and the
// exposed times also "kind".
#ifndef MUSTER_WORKER_RANK_RANK_METRICS_H_
#define MUSTER_WORKER_RANK_RANK_METRICS_H_

#include <array>
#include <string>
#include <vector>

#include "base/metrics.h"
#include "parallel/train/trainer.h"

namespace muster::worker {

// Every family of RankMetrics, for docs/metrics.md.
std::vector<const metrics::Family*> RankMetricsCatalogue();

// Single-threaded. The registry must outlive it.
class RankMetrics {
 public:
  RankMetrics(metrics::Registry& registry, const std::string& job_name, int rank);

  // Utilizations are 0 where the device's peak is not known.
  void Step(const parallel::StepReport& report, double tokens_per_second,
            double model_flops_utilization, double hardware_flops_utilization);
  void Evaluation(const parallel::EvaluationReport& report);
  void Saved(const parallel::SavedCheckpoint& saved);
  void Restored(double seconds);
  void Damaged();
  void Memory(int64_t device_bytes, int64_t host_bytes);

 private:
  void AddExposed(const parallel::ExposedSeconds& exposed);

  metrics::Registry& registry_;
  const std::string job_name_;
  const int rank_;
  metrics::Counter& steps_;
  metrics::Counter& tokens_;
  metrics::Counter& skipped_steps_;
  metrics::Counter& exposed_communication_seconds_;
  // By parallel::Exposure and Collective; null until there has been such a wait.
  std::array<std::array<metrics::Counter*, parallel::kCollectives>, parallel::kExposures>
      exposed_seconds_{};
  metrics::Counter& gradient_bytes_;
  metrics::Counter& damaged_;
  metrics::Gauge& step_;
  metrics::Gauge& train_loss_;
  metrics::Gauge& validation_loss_;
  metrics::Gauge& gradient_norm_;
  metrics::Gauge& learning_rate_;
  metrics::Gauge& loss_scale_;
  metrics::Gauge& gradient_density_;
  metrics::Gauge& residual_norm_;
  metrics::Gauge& tokens_per_second_;
  metrics::Gauge& model_flops_utilization_;
  metrics::Gauge& hardware_flops_utilization_;
  metrics::Gauge& checkpoint_bytes_;
  metrics::Gauge& device_bytes_;
  metrics::Gauge& host_bytes_;
  metrics::Gauge& restore_seconds_;
  metrics::Histogram& step_seconds_;
  metrics::Histogram& checkpoint_seconds_;
  metrics::Histogram& evaluation_seconds_;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_RANK_METRICS_H_
