#include <algorithm>

#include "google/protobuf/util/time_util.h"
#include "proto/spec/spec.h"

namespace muster::spec {
namespace {

using google::protobuf::Duration;
using google::protobuf::util::TimeUtil;

constexpr int32_t kPriority = 50;
constexpr double kWeight = 1.0;
constexpr double kWeightDecay = 0.1;
constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;
constexpr double kEps = 1e-8;
constexpr double kClipNorm = 1.0;
constexpr int32_t kKeep = 2;
constexpr double kLossScale = 65536;
constexpr int32_t kGrowthInterval = 1000;
constexpr int32_t kHysteresis = 2;
constexpr int32_t kMaxFailures = 3;
constexpr int64_t kBackoffInitialSeconds = 1;
constexpr int64_t kBackoffMaxSeconds = 60;

void DefaultSources(google::protobuf::RepeatedPtrField<v1::DataSource>* sources) {
  for (v1::DataSource& source : *sources) {
    if (!source.has_weight()) source.set_weight(kWeight);
  }
}

void DefaultPipeline(v1::ParallelSpec& parallel) {
  if (parallel.pipeline() == 0) parallel.set_pipeline(1);
  if (parallel.pipeline_schedule() == v1::PIPELINE_SCHEDULE_UNSPECIFIED) {
    parallel.set_pipeline_schedule(parallel.pipeline_chunks() > 1
                                       ? v1::PIPELINE_SCHEDULE_INTERLEAVED
                                       : v1::PIPELINE_SCHEDULE_1F1B);
  }
  if (parallel.pipeline_chunks() == 0) {
    const bool interleaved = parallel.pipeline_schedule() == v1::PIPELINE_SCHEDULE_INTERLEAVED;
    parallel.set_pipeline_chunks(interleaved ? 2 : 1);
  }
}

void DefaultTraining(v1::TrainingSpec& training) {
  if (training.precision() == v1::PRECISION_UNSPECIFIED) training.set_precision(v1::PRECISION_FP32);
  if (training.gradient_reduction() == v1::GRADIENT_REDUCTION_UNSPECIFIED) {
    training.set_gradient_reduction(v1::GRADIENT_REDUCTION_FP32);
  }
  if (training.has_loss_scale() || training.precision() == v1::PRECISION_FP16) {
    v1::LossScaleSpec& scale = *training.mutable_loss_scale();
    if (!scale.has_initial()) scale.set_initial(kLossScale);
    if (!scale.has_growth_interval()) scale.set_growth_interval(kGrowthInterval);
    if (!scale.has_hysteresis()) scale.set_hysteresis(kHysteresis);
  }
  if (training.optimizer().has_adamw()) {
    v1::AdamWSpec& adamw = *training.mutable_optimizer()->mutable_adamw();
    if (!adamw.has_weight_decay()) adamw.set_weight_decay(kWeightDecay);
    if (adamw.betas().empty()) {
      adamw.add_betas(kBeta1);
      adamw.add_betas(kBeta2);
    }
    if (!adamw.has_eps()) adamw.set_eps(kEps);
    if (!adamw.has_clip_norm()) adamw.set_clip_norm(kClipNorm);
  }
  v1::ScheduleSpec& schedule = *training.mutable_schedule();
  if (schedule.kind_case() == v1::ScheduleSpec::KIND_NOT_SET) schedule.mutable_constant();
}

void DefaultRestart(v1::RestartSpec& restart) {
  if (!restart.has_max_failures()) restart.set_max_failures(kMaxFailures);
  v1::BackoffSpec& backoff = *restart.mutable_backoff();
  // A lone initial or max moves the other's default, so that one of them alone is never refused.
  const Duration initial = TimeUtil::SecondsToDuration(kBackoffInitialSeconds);
  const Duration max = TimeUtil::SecondsToDuration(kBackoffMaxSeconds);
  if (!backoff.has_initial()) {
    *backoff.mutable_initial() =
        backoff.has_max() && backoff.max() < initial ? backoff.max() : initial;
  }
  if (!backoff.has_max()) {
    *backoff.mutable_max() = max < backoff.initial() ? backoff.initial() : max;
  }
}

}  // namespace

void ApplyDefaults(v1::JobSpec& spec) {
  if (spec.queue().empty()) spec.set_queue("default");
  if (!spec.has_priority()) spec.set_priority(kPriority);
  v1::ResourceSpec& resources = *spec.mutable_resources();
  if (resources.device() == v1::DEVICE_KIND_UNSPECIFIED) {
    resources.set_device(v1::DEVICE_KIND_CPU);
  }
  // An absent engine stays absent, for Validate to name.
  if (spec.has_engine()) {
    v1::EngineSpec& engine = *spec.mutable_engine();
    if (engine.has_data()) {
      DefaultSources(engine.mutable_data()->mutable_train());
      DefaultSources(engine.mutable_data()->mutable_validation());
    }
    if (engine.has_training()) DefaultTraining(*engine.mutable_training());
    v1::ParallelSpec& parallel = *engine.mutable_parallel();
    DefaultPipeline(parallel);
    if (parallel.context() == 0) parallel.set_context(1);
    if (parallel.context_method() == v1::CONTEXT_METHOD_UNSPECIFIED) {
      parallel.set_context_method(v1::CONTEXT_METHOD_RING);
    }
    if (parallel.data() == 0) {
      // What the other degrees leave; where they do not divide the ranks, Validate says so.
      const int64_t others = int64_t{parallel.pipeline()} * parallel.context();
      const bool divides = others > 0 && resources.ranks() % others == 0;
      parallel.set_data(divides ? static_cast<int32_t>(resources.ranks() / others)
                                : resources.ranks());
    }
    if (!parallel.has_reshard_after_forward()) parallel.set_reshard_after_forward(true);
  }
  if (spec.has_checkpoint() && spec.checkpoint().keep() == 0)
    spec.mutable_checkpoint()->set_keep(kKeep);
  DefaultRestart(*spec.mutable_restart());
}

}  // namespace muster::spec
