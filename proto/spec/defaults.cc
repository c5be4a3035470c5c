#include <algorithm>

#include "google/protobuf/util/time_util.h"
#include "proto/spec/elastic.h"
#include "proto/spec/families/family.h"
#include "proto/spec/presets.h"
#include "proto/spec/spec.h"

namespace muster::spec {
namespace {

using google::protobuf::Duration;
using google::protobuf::util::TimeUtil;

constexpr int32_t kPriority = 50;
constexpr int64_t kPreemptionGraceSeconds = 60;
constexpr int64_t kMinRuntimeSeconds = 30;
constexpr int64_t kGrowAfterSeconds = 300;
constexpr double kWeight = 1.0;
constexpr double kWeightDecay = 0.1;
constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.95;
constexpr double kEps = 1e-8;
constexpr double kClipNorm = 1.0;
constexpr int32_t kKeep = 2;
constexpr int64_t kResidentElements = 100'000;
constexpr double kLossScale = 65536;
constexpr int32_t kGrowthInterval = 1000;
constexpr int32_t kHysteresis = 2;
constexpr int64_t kCompressedElementsMin = 1024;
constexpr int32_t kMaxFailures = 3;
// The least work of a half-batch for which tensor_overlap is `halves`: its tokens x hidden x hidden
// / tensor, to which the FLOPs of a rank's GEMMs are proportional. Measured in
// docs/decisions/0006-half-batches-hide-tensor-collectives.md: with 2^31 half-batches are 4 %
// slower, with 2^32 1 % faster, and with more work faster still.
constexpr double kHalfBatchWorkMin = 4294967296;
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

void DefaultModel(v1::ModelSpec& model) {
  if (const v1::ModelSpec* preset = FindPreset(model.preset()); preset != nullptr) {
    // Given fields replace the preset's. rope_scaling is replaced as a whole, not field by field.
    v1::ModelSpec whole = *preset;
    const SpecFamily* const family = FindSpecFamily(preset->family());
    if (family->fit_preset != nullptr) family->fit_preset(model, whole);
    if (model.has_rope_scaling()) whole.clear_rope_scaling();
    whole.MergeFrom(model);
    model = whole;
  }
  const SpecFamily* const family = FindSpecFamily(model.family());
  if (family != nullptr) family->set_defaults(model);
}

void DefaultTraining(v1::TrainingSpec& training) {
  if (training.precision() == v1::PRECISION_UNSPECIFIED) training.set_precision(v1::PRECISION_FP32);
  if (training.recompute() == v1::RECOMPUTE_UNSPECIFIED) training.set_recompute(v1::RECOMPUTE_NONE);
  if (training.recompute_rest() == v1::RECOMPUTE_UNSPECIFIED) {
    training.set_recompute_rest(v1::RECOMPUTE_NONE);
  }
  if (training.gradient_reduction() == v1::GRADIENT_REDUCTION_UNSPECIFIED) {
    training.set_gradient_reduction(v1::GRADIENT_REDUCTION_FP32);
  }
  if (training.has_gradient_compression()) {
    v1::GradientCompressionSpec& compression = *training.mutable_gradient_compression();
    if (compression.exclude().empty()) {
      compression.add_exclude("embedding.*");
      compression.add_exclude("head.*");
    }
    if (!compression.has_min_elements()) compression.set_min_elements(kCompressedElementsMin);
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

// Half-batches where Validate accepts them and they save time. Needs the other defaults of model,
// training and pipeline.
v1::TensorOverlap DefaultTensorOverlap(const v1::EngineSpec& engine, v1::DeviceKind device) {
  const v1::ParallelSpec& parallel = engine.parallel();
  const int64_t tensor = parallel.tensor(), half_batch = engine.training().micro_batch() / 2;
  if (device != v1::DEVICE_KIND_CUDA || tensor < 2 || parallel.context() < 1 ||
      half_batch * 2 != engine.training().micro_batch() ||
      parallel.pipeline_schedule() == v1::PIPELINE_SCHEDULE_ZERO_BUBBLE) {
    return v1::TENSOR_OVERLAP_BACKWARD;
  }
  const __int128 tokens =
      static_cast<__int128>(half_batch) * engine.model().sequence_length() / parallel.context();
  if (parallel.sequence() && tokens % tensor != 0) return v1::TENSOR_OVERLAP_BACKWARD;
  const double hidden = engine.model().hidden();
  const double work = static_cast<double>(tokens) * hidden * hidden / static_cast<double>(tensor);
  return work >= kHalfBatchWorkMin ? v1::TENSOR_OVERLAP_HALVES : v1::TENSOR_OVERLAP_BACKWARD;
}

void DefaultRestart(v1::RestartSpec& restart) {
  if (!restart.has_max_failures()) restart.set_max_failures(kMaxFailures);
  v1::BackoffSpec& backoff = *restart.mutable_backoff();
  // A given initial or max moves the default of the other one, so that giving only one is never
  // refused.
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
  if (resources.has_rank_range() && resources.ranks() == 0) {
    resources.set_ranks(resources.rank_range().max());
  }
  // An absent engine stays absent: Validate reports it.
  if (spec.has_engine()) {
    v1::EngineSpec& engine = *spec.mutable_engine();
    if (engine.has_data()) {
      DefaultSources(engine.mutable_data()->mutable_train());
      DefaultSources(engine.mutable_data()->mutable_validation());
    }
    if (engine.has_model()) DefaultModel(*engine.mutable_model());
    if (engine.has_training()) DefaultTraining(*engine.mutable_training());
    v1::ParallelSpec& parallel = *engine.mutable_parallel();
    DefaultPipeline(parallel);
    if (parallel.tensor() == 0) parallel.set_tensor(1);
    if (parallel.context() == 0) parallel.set_context(1);
    if (parallel.context_method() == v1::CONTEXT_METHOD_UNSPECIFIED) {
      parallel.set_context_method(v1::CONTEXT_METHOD_RING);
    }
    if (parallel.scan_method() == v1::SCAN_METHOD_UNSPECIFIED) {
      parallel.set_scan_method(v1::SCAN_METHOD_STATE_PASSING);
    }
    if (parallel.tensor_overlap() == v1::TENSOR_OVERLAP_UNSPECIFIED) {
      parallel.set_tensor_overlap(DefaultTensorOverlap(engine, resources.device()));
    }
    if (parallel.balance() == v1::BALANCE_UNSPECIFIED) {
      parallel.set_balance(v1::BALANCE_ESTIMATED);
    }
    if (parallel.data() == 0 && IsElastic(spec)) {
      // Of the largest size. Where there is none, Validate reports it.
      parallel.set_data(1);
      const std::vector<int32_t> sizes = SizesOf(spec);
      if (!sizes.empty()) {
        parallel.set_data(AtSize(spec, sizes.back()).engine().parallel().data());
      }
    }
    if (parallel.data() == 0) {
      // The ranks divided by the other degrees; where these do not divide them, Validate reports
      // it.
      const __int128 others =
          static_cast<__int128>(parallel.pipeline()) * parallel.context() * parallel.tensor();
      const bool divides = others > 0 && others <= resources.ranks() &&
                           resources.ranks() % static_cast<int32_t>(others) == 0;
      parallel.set_data(divides ? resources.ranks() / static_cast<int32_t>(others)
                                : resources.ranks());
    }
    if (!parallel.has_reshard_after_forward()) parallel.set_reshard_after_forward(true);
    if (!parallel.has_copy_engines()) parallel.set_copy_engines(true);
    if (!parallel.has_resident_elements()) parallel.set_resident_elements(kResidentElements);
  }
  if (spec.has_checkpoint() && spec.checkpoint().keep() == 0)
    spec.mutable_checkpoint()->set_keep(kKeep);
  if (spec.has_checkpoint() && spec.checkpoint().storage() == v1::CHECKPOINT_STORAGE_UNSPECIFIED) {
    spec.mutable_checkpoint()->set_storage(v1::CHECKPOINT_STORAGE_SHARED);
  }
  DefaultRestart(*spec.mutable_restart());
  v1::PreemptionSpec& preemption = *spec.mutable_preemption();
  if (!preemption.has_grace()) {
    *preemption.mutable_grace() = TimeUtil::SecondsToDuration(kPreemptionGraceSeconds);
  }
  if (!preemption.has_grow_after() && IsElastic(spec)) {
    *preemption.mutable_grow_after() = TimeUtil::SecondsToDuration(kGrowAfterSeconds);
  }
  if (!preemption.has_min_runtime()) {
    *preemption.mutable_min_runtime() = TimeUtil::SecondsToDuration(kMinRuntimeSeconds);
  }
}

}  // namespace muster::spec
