#include "worker/rank/engine_spec.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/attention/head_width.h"
#include "kernels/ssm/ssd_workspace.h"
#include "parallel/pipeline/stages.h"
#include "parallel/plan/validate.h"
#include "parallel/train/failure.h"
#include "proto/spec/spec.h"

namespace muster::worker {
namespace {

using parallel::FailureDomain;
using parallel::Mark;

constexpr int64_t kBucketBytesCpu = 4 << 20;
constexpr int64_t kBucketBytesCuda =
    64 << 20;  // measured: docs/decisions/0010-gradient-buckets-of-64-mib.md

parallel::TensorOverlap OverlapOf(v1::TensorOverlap overlap) {
  switch (overlap) {
    case v1::TENSOR_OVERLAP_NONE:
      return parallel::TensorOverlap::kNone;
    case v1::TENSOR_OVERLAP_CHUNKED:
      return parallel::TensorOverlap::kChunked;
    case v1::TENSOR_OVERLAP_HALVES:
      return parallel::TensorOverlap::kHalves;
    default:
      return parallel::TensorOverlap::kBackward;
  }
}

parallel::ContextMethod MethodOf(v1::ContextMethod method) {
  switch (method) {
    case v1::CONTEXT_METHOD_ALL_GATHER:
      return parallel::ContextMethod::kAllGather;
    case v1::CONTEXT_METHOD_ALL_TO_ALL:
      return parallel::ContextMethod::kAllToAll;
    default:
      return parallel::ContextMethod::kRing;
  }
}

parallel::Schedule MakeSchedule(const v1::TrainingSpec& training) {
  parallel::Schedule schedule;
  schedule.peak = training.optimizer().adamw().lr();
  const auto decaying = [&](parallel::Decay decay, const v1::DecaySpec& spec) {
    schedule.decay = decay;
    schedule.warmup_steps = spec.warmup_steps();
    schedule.minimum = spec.min_lr();
    schedule.decay_steps = spec.decay_steps() > 0 ? spec.decay_steps() : training.steps();
  };
  switch (training.schedule().kind_case()) {
    case v1::ScheduleSpec::kCosine:
      decaying(parallel::Decay::kCosine, training.schedule().cosine());
      break;
    case v1::ScheduleSpec::kLinear:
      decaying(parallel::Decay::kLinear, training.schedule().linear());
      break;
    default:
      schedule.warmup_steps = training.schedule().constant().warmup_steps();
  }
  return schedule;
}

parallel::Axis AxisOf(int axis) {
  switch (axis) {
    case v1::MESH_AXIS_DATA:
      return parallel::Axis::kData;
    case v1::MESH_AXIS_CONTEXT:
      return parallel::Axis::kContext;
    case v1::MESH_AXIS_TENSOR:
      return parallel::Axis::kTensor;
    default:
      return parallel::Axis::kPipeline;
  }
}

parallel::Precision PrecisionOf(v1::Precision precision) {
  switch (precision) {
    case v1::PRECISION_BF16:
      return parallel::Precision::kBf16;
    case v1::PRECISION_FP16:
      return parallel::Precision::kFp16;
    case v1::PRECISION_TF32:
      return parallel::Precision::kTf32;
    default:
      return parallel::Precision::kFp32;
  }
}

parallel::PipelineSchedule ScheduleOf(v1::PipelineSchedule schedule) {
  switch (schedule) {
    case v1::PIPELINE_SCHEDULE_GPIPE:
      return parallel::PipelineSchedule::kGPipe;
    case v1::PIPELINE_SCHEDULE_INTERLEAVED:
      return parallel::PipelineSchedule::kInterleaved;
    case v1::PIPELINE_SCHEDULE_ZERO_BUBBLE:
      return parallel::PipelineSchedule::kZeroBubble;
    default:
      return parallel::PipelineSchedule::kOneForwardOneBackward;
  }
}

parallel::CompressionOptions CompressionOf(const v1::GradientCompressionSpec& spec) {
  parallel::CompressionOptions options;
  if (spec.has_top_k()) {
    options.method = parallel::CompressionMethod::kTopK;
    options.density = spec.top_k().density();
    options.warmup_steps = spec.top_k().warmup_steps();
    options.momentum = spec.top_k().momentum();
  } else if (spec.has_sign()) {
    options.method = parallel::CompressionMethod::kSign;
  }
  options.min_elements = spec.min_elements();
  options.exclude.assign(spec.exclude().begin(), spec.exclude().end());
  return options;
}

// The block ranges of `stage` as pipeline_blocks gives them, one for each of its model chunks. The
// embedding is a block before the first of them and the head one behind the last.
std::vector<parallel::BlockRange> PartsOf(const v1::ParallelSpec& split, int stage) {
  std::vector<parallel::BlockRange> parts;
  const auto& blocks = split.pipeline_blocks();
  int begin = 0;
  for (int i = 0; i < blocks.size(); ++i) {
    const int end = begin + blocks[i] + (i == 0 ? 1 : 0) + (i + 1 == blocks.size() ? 1 : 0);
    if (i % split.pipeline() == stage) parts.push_back({begin, end});
    begin = end;
  }
  return parts;
}

absl::Status Misconfigured(const std::string& message) {
  return Mark(absl::InvalidArgumentError(message), FailureDomain::kConfiguration);
}

int HeadWidth(const v1::ModelSpec& model) {
  if (model.head_width() > 0) return model.head_width();
  return std::max(1, model.hidden() / std::max(1, model.heads()));
}

// The kernels of the job's attention, by the type of its activations.
absl::StatusOr<kernels::AttentionPath> AttentionPathOf(const v1::JobSpec& spec) {
  kernels::DType activations = kernels::DType::kF32;
  switch (PrecisionOf(spec.engine().training().precision())) {
    case parallel::Precision::kBf16:
      activations = kernels::DType::kBF16;
      break;
    case parallel::Precision::kFp16:
      activations = kernels::DType::kF16;
      break;
    default:
      break;
  }
  return kernels::AttentionPathOf(DeviceKindOf(spec), activations,
                                  HeadWidth(spec.engine().model()));
}

// Refuses heads that no attention kernel of the job's device takes.
absl::Status CheckHeadWidth(const v1::JobSpec& spec) {
  const v1::ModelSpec& model = spec.engine().model();
  if (model.heads() == 0) return absl::OkStatus();  // no attention
  const auto path = AttentionPathOf(spec);
  if (path.ok()) return absl::OkStatus();
  return Misconfigured(model.head_width() > 0
                           ? absl::StrCat("engine.model.head_width: ", path.status().message())
                           : absl::StrCat("engine.model.heads: with ", model.heads(),
                                          " heads of hidden ", model.hidden(), ", ",
                                          path.status().message()));
}

// Whether GEMMs run on tensor cores as 16-bit products.
bool IsNarrow(v1::Precision precision) {
  return precision == v1::PRECISION_BF16 || precision == v1::PRECISION_FP16;
}

std::string AttentionWarning(const v1::JobSpec& spec) {
  if (spec.engine().model().heads() == 0) return "";  // no attention
  const auto path = AttentionPathOf(spec);
  if (!path.ok() || !IsNarrow(spec.engine().training().precision()) ||
      *path != kernels::AttentionPath::kCudaCores) {
    return "";
  }
  return absl::StrCat("engine.model.heads: heads are ", HeadWidth(spec.engine().model()),
                      " columns wide; unless cuDNN takes them, attention runs on CUDA cores, which "
                      "is several times slower than heads of up to ",
                      kernels::kTensorCoreHeadWidthMax, " columns, a multiple of ",
                      kernels::kTensorCoreHeadWidthStep);
}

std::string ScanWarning(const v1::JobSpec& spec) {
  const v1::ModelSpec& model = spec.engine().model();
  if (!model.has_mamba() || DeviceKindOf(spec) != kernels::DeviceKind::kCuda) return "";
  const int64_t width = model.mamba().head_width(), state = model.mamba().state();
  std::string what;
  if (!IsNarrow(spec.engine().training().precision())) {
    what = "engine.training.precision: without bf16 or fp16";
  } else if (!kernels::SsdIsFused(width, kernels::kSsdColumnsStep)) {
    what = absl::StrCat("engine.model.mamba.head_width: with ", width, " columns");
  } else if (!kernels::SsdIsFused(kernels::kSsdColumnsStep, state)) {
    what = absl::StrCat("engine.model.mamba.state: with ", state, " columns");
  } else {
    return "";
  }
  return absl::StrCat(what,
                      " the state-space scan runs on CUDA cores, tens of times slower than in bf16 "
                      "or fp16 with a head width and a state that are multiples of ",
                      kernels::kSsdColumnsStep);
}

}  // namespace

kernels::DeviceKind DeviceKindOf(const v1::JobSpec& spec) {
  return spec.resources().device() == v1::DEVICE_KIND_CUDA ? kernels::DeviceKind::kCuda
                                                           : kernels::DeviceKind::kCpu;
}

std::string ResolvePath(const v1::JobSpec& spec, const std::string& path) {
  if (absl::StartsWith(path, "/") || spec.working_directory().empty()) return path;
  return absl::StrCat(spec.working_directory(), "/", path);
}

absl::StatusOr<SplitRun> SplitOf(const v1::JobSpec& spec) {
  const parallel::Layout layout = spec::LayoutOf(spec);
  const int ranks = spec.resources().ranks();
  if (absl::Status status =
          parallel::Validate(layout, spec::SizeOf(spec.engine().model()), {.ranks = ranks});
      !status.ok()) {
    return Mark(std::move(status), FailureDomain::kConfiguration);
  }
  parallel::MeshOptions options = {.degrees = layout.degrees};
  const v1::ParallelSpec& split = spec.engine().parallel();
  for (int i = 0; i < split.order_size(); ++i) options.order[i] = AxisOf(split.order(i));
  auto mesh = parallel::Mesh::Make(options, ranks);
  if (!mesh.ok()) {
    return Mark(Annotate(mesh.status(), "engine.parallel"), FailureDomain::kConfiguration);
  }
  return SplitRun{*mesh, layout.EffectiveShards()};
}

absl::StatusOr<parallel::ModelParallel> PartOf(const v1::JobSpec& spec,
                                               const parallel::PerAxis& coordinate) {
  RETURN_IF_ERROR(CheckHeadWidth(spec));
  const v1::EngineSpec& engine = spec.engine();
  const v1::ParallelSpec& split = engine.parallel();
  parallel::ModelParallel part;
  if (split.pipeline() > 1 && !split.pipeline_blocks().empty()) {
    part.parts = PartsOf(split, coordinate[parallel::Axis::kPipeline]);
  } else if (split.pipeline() > 1) {
    auto parts =
        parallel::StageParts(Describe(engine.model()), split.pipeline(), split.pipeline_chunks(),
                             coordinate[parallel::Axis::kPipeline]);
    if (!parts.ok()) {
      return Mark(Annotate(parts.status(), "engine.parallel.pipeline"),
                  FailureDomain::kConfiguration);
    }
    part = *std::move(parts);
  }
  part.context_size = split.context();
  part.context_method = MethodOf(split.context_method());
  part.scan_method = split.scan_method() == v1::SCAN_METHOD_ALL_TO_ALL
                         ? parallel::ScanMethod::kAllToAll
                         : parallel::ScanMethod::kStatePassing;
  part.documents = spec.engine().data().separate_documents();
  part.offload_activations = spec.engine().parallel().offload().activations();
  part.tensor_rank = coordinate[parallel::Axis::kTensor];
  part.tensor_size = split.tensor();
  part.tensor_weights.assign(split.tensor_shares().begin(), split.tensor_shares().end());
  part.sequence_parallel = split.sequence();
  part.tensor_overlap = OverlapOf(split.tensor_overlap());
  part.split_backward = split.pipeline_schedule() == v1::PIPELINE_SCHEDULE_ZERO_BUBBLE;
  if (engine.training().recompute() == v1::RECOMPUTE_SELECTIVE) {
    part.recompute = parallel::Recompute::kSelective;
  } else if (engine.training().recompute() == v1::RECOMPUTE_FULL) {
    part.recompute = parallel::Recompute::kFull;
  }
  part.recompute_blocks = engine.training().recompute_blocks();
  if (engine.training().recompute_rest() == v1::RECOMPUTE_SELECTIVE) {
    part.recompute_rest = parallel::Recompute::kSelective;
  }
  part.deterministic = !engine.training().any_order();
  part.dropout = engine.training().dropout();
  return part;
}

std::vector<std::string> KernelWarnings(const v1::JobSpec& spec) {
  std::vector<std::string> warnings;
  for (std::string warning : {AttentionWarning(spec), ScanWarning(spec)}) {
    if (!warning.empty()) warnings.push_back(std::move(warning));
  }
  return warnings;
}

absl::StatusOr<std::unique_ptr<parallel::Model>> BuildModel(const v1::JobSpec& spec,
                                                            const parallel::PerAxis& coordinate) {
  ASSIGN_OR_RETURN(const parallel::ModelParallel part, PartOf(spec, coordinate));
  auto model = parallel::MakeModel(Describe(spec.engine().model()), part);
  if (!model.ok()) {
    return Mark(Annotate(model.status(), "engine.model"), FailureDomain::kConfiguration);
  }
  return model;
}

parallel::TrainerOptions OptionsOf(const v1::JobSpec& spec) {
  const v1::TrainingSpec& training = spec.engine().training();
  const v1::AdamWSpec& adamw = training.optimizer().adamw();
  parallel::TrainerOptions options;
  options.steps = training.steps();
  options.global_batch = training.global_batch();
  options.micro_batch = training.micro_batch();
  options.seed = training.seed();
  options.optimizer.beta1 = adamw.betas(0);
  options.optimizer.beta2 = adamw.betas(1);
  options.optimizer.epsilon = adamw.eps();
  options.optimizer.weight_decay = adamw.weight_decay();
  options.optimizer.clip_norm = adamw.clip_norm();
  options.schedule = MakeSchedule(training);
  options.bucket_bytes = spec.engine().parallel().bucket_bytes();
  if (options.bucket_bytes <= 0) {
    options.bucket_bytes =
        DeviceKindOf(spec) == kernels::DeviceKind::kCuda ? kBucketBytesCuda : kBucketBytesCpu;
  }
  options.precision = PrecisionOf(training.precision());
  if (training.has_loss_scale()) {
    options.loss_scaling.dynamic = true;
    options.loss_scaling.initial = static_cast<float>(training.loss_scale().initial());
    options.loss_scaling.growth_interval = training.loss_scale().growth_interval();
    options.loss_scaling.hysteresis = training.loss_scale().hysteresis();
  }
  if (training.gradient_reduction() == v1::GRADIENT_REDUCTION_BF16) {
    options.gradient_wire = kernels::DType::kBF16;
  }
  options.chain_micro_batches = training.any_order();
  options.compression = CompressionOf(training.gradient_compression());
  options.verify_every = training.verify_every();
  options.offload_optimizer = spec.engine().parallel().offload().optimizer();
  options.zero = spec.engine().parallel().zero();
  options.pipeline_schedule = ScheduleOf(spec.engine().parallel().pipeline_schedule());
  options.reshard_after_forward = spec.engine().parallel().reshard_after_forward();
  options.copy_engines = spec.engine().parallel().copy_engines();
  options.nccl_thread_blocks = spec.engine().parallel().nccl_ctas();
  options.resident_elements = spec.engine().parallel().resident_elements();
  options.evaluate_every = training.evaluate_every();
  options.evaluate_samples = training.evaluate_samples();
  if (spec.has_checkpoint()) {
    options.checkpoint_root = ResolvePath(spec, spec.checkpoint().path());
    options.checkpoint_every = spec.checkpoint().every_steps();
    options.checkpoint_keep = spec.checkpoint().keep();
  }
  return options;
}

parallel::NcclOptions NcclOptionsOf(const v1::JobSpec& spec) {
  parallel::NcclOptions options;
  options.thread_blocks_max = spec.engine().parallel().nccl_ctas();
  return options;
}

}  // namespace muster::worker
