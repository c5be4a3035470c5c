#include "worker/rank/engine_setup.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "parallel/mesh/mesh.h"
#include "parallel/pipeline/stages.h"
#include "parallel/plan/validate.h"
#include "parallel/train/failure.h"
#include "proto/spec/spec.h"

namespace muster::worker {
namespace {

using parallel::FailureDomain;
using parallel::Mark;

constexpr int64_t kBucketBytesCpu = 4 << 20;
constexpr int64_t kBucketBytesCuda = 64 << 20;

absl::Status Misconfigured(const std::string& message) {
  return Mark(absl::InvalidArgumentError(message), FailureDomain::kConfiguration);
}

absl::StatusOr<std::unique_ptr<kernels::Device>> MakeDevice(const v1::RankAssignment& assignment) {
  if (assignment.spec().resources().device() != v1::DEVICE_KIND_CUDA) {
    return kernels::MakeCpuDevice(std::max(1, assignment.threads()));
  }
  int ordinal = 0;
  const std::string& name = assignment.device();
  if (!absl::StartsWith(name, "cuda:") || !absl::SimpleAtoi(name.substr(5), &ordinal)) {
    return Misconfigured(absl::StrCat(
        "resources.device: the job wants cuda, but the rank was given the device '", name, "'"));
  }
  kernels::CudaOptions options;
  options.tf32 = assignment.spec().engine().training().precision() == v1::PRECISION_TF32;
  options.plan_cache = assignment.cache_directory();
  auto device = kernels::MakeCudaDevice(ordinal, options);
  if (!device.ok()) return Annotate(device.status(), absl::StrCat("resources.device: ", name));
  return device;
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

// Opens the sources of one list of the spec; `field` is its name there.
absl::StatusOr<std::vector<parallel::SampleSource>> OpenSources(
    const v1::JobSpec& spec, const google::protobuf::RepeatedPtrField<v1::DataSource>& list,
    const std::string& field, std::vector<std::unique_ptr<parallel::IndexedDataset>>& datasets) {
  std::vector<parallel::SampleSource> sources;
  for (int i = 0; i < list.size(); ++i) {
    auto dataset = parallel::IndexedDataset::Open(ResolvePath(spec, list[i].path()));
    if (!dataset.ok()) {
      return Mark(Annotate(dataset.status(), absl::StrFormat("%s[%d].path", field, i)),
                  FailureDomain::kData);
    }
    sources.push_back({dataset->get(), list[i].weight()});
    datasets.push_back(*std::move(dataset));
  }
  return sources;
}

absl::Status OpenData(const v1::JobSpec& spec, EngineSetup& setup) {
  const v1::DataSpec& data = spec.engine().data();
  parallel::SamplerOptions options;
  options.sequence_length = spec.engine().model().sequence_length();
  options.vocab = spec.engine().model().vocab();
  options.seed = spec.engine().training().seed();
  ASSIGN_OR_RETURN(auto training,
                   OpenSources(spec, data.train(), "engine.data.train", setup.datasets));
  auto sampler = parallel::Sampler::Training(std::move(training), options);
  if (!sampler.ok()) {
    return Mark(Annotate(sampler.status(), "engine.data.train"), FailureDomain::kData);
  }
  setup.training = std::make_unique<parallel::Sampler>(*std::move(sampler));
  if (data.validation().empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(auto validation,
                   OpenSources(spec, data.validation(), "engine.data.validation", setup.datasets));
  sampler = parallel::Sampler::Evaluation(std::move(validation), options);
  if (!sampler.ok()) {
    return Mark(Annotate(sampler.status(), "engine.data.validation"), FailureDomain::kData);
  }
  setup.validation = std::make_unique<parallel::Sampler>(*std::move(sampler));
  return absl::OkStatus();
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

absl::Status CheckLayout(const v1::RankAssignment& assignment, EngineSetup& setup) {
  const v1::EngineSpec& engine = assignment.spec().engine();
  parallel::Layout layout;
  layout.negotiable = {parallel::Axis::kData, parallel::Axis::kPipeline, parallel::Axis::kContext,
                       parallel::Axis::kTensor};
  layout.degrees[parallel::Axis::kData] = engine.parallel().data();
  layout.degrees[parallel::Axis::kPipeline] = engine.parallel().pipeline();
  layout.degrees[parallel::Axis::kContext] = engine.parallel().context();
  layout.pipeline_chunks = engine.parallel().pipeline_chunks();
  layout.degrees[parallel::Axis::kTensor] = engine.parallel().tensor();
  layout.sequence_parallel = engine.parallel().sequence();
  layout.zero = engine.parallel().zero();
  layout.zero_shards = engine.parallel().zero_shards();
  layout.global_batch = engine.training().global_batch();
  layout.micro_batch = engine.training().micro_batch();
  if (engine.training().gradient_compression().has_top_k()) {
    layout.top_k_density = engine.training().gradient_compression().top_k().density();
  }
  layout.sign_compression = engine.training().gradient_compression().has_sign();
  parallel::ModelSize model;
  model.layers = engine.model().layers();
  model.heads = engine.model().heads();
  model.kv_heads = engine.model().kv_heads();
  model.sequence = engine.model().sequence_length();
  if (absl::Status status = parallel::Validate(layout, model, {.ranks = assignment.world_size()});
      !status.ok()) {
    return Mark(std::move(status), FailureDomain::kConfiguration);
  }
  auto mesh = parallel::Mesh::Make({.degrees = layout.degrees}, assignment.world_size());
  if (!mesh.ok()) return Misconfigured(absl::StrCat("engine.parallel: ", mesh.status().message()));
  setup.mesh = *mesh;
  setup.zero_shards = layout.EffectiveShards();
  return absl::OkStatus();
}

// The part of the model that a rank holds.
absl::StatusOr<std::unique_ptr<parallel::Model>> BuildModel(const v1::RankAssignment& assignment,
                                                            const parallel::Mesh& mesh) {
  const v1::EngineSpec& engine = assignment.spec().engine();
  const v1::ParallelSpec& split = engine.parallel();
  const parallel::ModelDescription description = Describe(engine.model());
  const parallel::PerAxis coordinate = mesh.CoordinateOf(assignment.rank());
  parallel::ModelParallel part;
  if (split.pipeline() > 1) {
    auto parts = parallel::StageParts(description, split.pipeline(), split.pipeline_chunks(),
                                      coordinate[parallel::Axis::kPipeline]);
    if (!parts.ok()) {
      return Mark(Annotate(parts.status(), "engine.parallel.pipeline"),
                  FailureDomain::kConfiguration);
    }
    part = *std::move(parts);
  }
  part.context_size = split.context();
  part.context_method = MethodOf(split.context_method());
  part.tensor_rank = coordinate[parallel::Axis::kTensor];
  part.tensor_size = mesh.degree(parallel::Axis::kTensor);
  part.sequence_parallel = split.sequence();
  part.split_backward = split.pipeline_schedule() == v1::PIPELINE_SCHEDULE_ZERO_BUBBLE;
  if (engine.training().recompute() == v1::RECOMPUTE_SELECTIVE) {
    part.recompute = parallel::Recompute::kSelective;
  } else if (engine.training().recompute() == v1::RECOMPUTE_FULL) {
    part.recompute = parallel::Recompute::kFull;
  }
  auto model = parallel::MakeModel(description, part);
  if (!model.ok()) {
    return Mark(Annotate(model.status(), "engine.model"), FailureDomain::kConfiguration);
  }
  return model;
}

// A file written and removed again proves what permissions only promise.
absl::Status CheckCheckpointPath(const v1::RankAssignment& assignment, FileSystem& files) {
  const std::string root = ResolvePath(assignment.spec(), assignment.spec().checkpoint().path());
  const std::string directory = absl::StrCat(root, "/", assignment.job_id());
  const std::string probe =
      absl::StrFormat("%s/.writable.e%d.rank-%d", directory, assignment.epoch(), assignment.rank());
  absl::Status status = files.MakeDirectory(directory);
  if (status.ok()) status = files.WriteAtomically(probe, "");
  if (status.ok()) status = files.RemoveFile(probe);
  return Mark(Annotate(status, absl::StrCat("checkpoint.path: ", root, " is not writable")),
              FailureDomain::kStorage);
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

parallel::TrainerOptions MakeOptions(const v1::RankAssignment& assignment) {
  const v1::JobSpec& spec = assignment.spec();
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
        spec.resources().device() == v1::DEVICE_KIND_CUDA ? kBucketBytesCuda : kBucketBytesCpu;
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
  options.compression = CompressionOf(training.gradient_compression());
  options.verify_every = training.verify_every();
  options.zero = spec.engine().parallel().zero();
  options.pipeline_schedule = ScheduleOf(spec.engine().parallel().pipeline_schedule());
  options.reshard_after_forward = spec.engine().parallel().reshard_after_forward();
  options.evaluate_every = training.evaluate_every();
  options.evaluate_samples = training.evaluate_samples();
  if (spec.has_checkpoint()) {
    options.checkpoint_root = ResolvePath(spec, spec.checkpoint().path());
    options.checkpoint_every = spec.checkpoint().every_steps();
    options.checkpoint_keep = spec.checkpoint().keep();
  }
  options.job = JobId(assignment.job_id());
  options.epoch = Epoch(assignment.epoch());
  return options;
}

}  // namespace

parallel::ModelDescription Describe(const v1::ModelSpec& spec) {
  parallel::ModelDescription description;
  description.sizes = {{"layers", spec.layers()},
                       {"hidden", spec.hidden()},
                       {"heads", spec.heads()},
                       {"vocab", spec.vocab()},
                       {"sequence_length", spec.sequence_length()}};
  if (spec.family() != v1::MODEL_FAMILY_LLAMA) {
    description.family = "gpt2";
    return description;
  }
  description.family = "llama";
  description.sizes["kv_heads"] = spec.kv_heads();
  description.sizes["ffn"] = spec.ffn();
  description.flags["tied"] = spec.tied();
  description.numbers["norm_epsilon"] = spec.norm_epsilon();
  description.numbers["rope_theta"] = spec.rope_theta();
  if (spec.has_rope_scaling()) {
    const v1::RopeScalingSpec& scaling = spec.rope_scaling();
    description.sizes["rope_original_context"] = scaling.original_context();
    description.numbers["rope_factor"] = scaling.factor();
    description.numbers["rope_low_frequency_factor"] = scaling.low_frequency_factor();
    description.numbers["rope_high_frequency_factor"] = scaling.high_frequency_factor();
  }
  return description;
}

v1::Cause CauseOf(const absl::Status& status) {
  switch (parallel::DomainOf(status)) {
    case FailureDomain::kData:
      return v1::CAUSE_DATA;
    case FailureDomain::kStorage:
      return v1::CAUSE_STORAGE;
    case FailureDomain::kMemory:
      return v1::CAUSE_OUT_OF_MEMORY;
    case FailureDomain::kCommunication:
      return v1::CAUSE_COMMUNICATION;
    case FailureDomain::kNumeric:
      return v1::CAUSE_NUMERIC;
    case FailureDomain::kConfiguration:
      return v1::CAUSE_USER_ERROR;
    case FailureDomain::kDevice:
      return v1::CAUSE_DEVICE;
    case FailureDomain::kUnknown:
      break;
  }
  return v1::CAUSE_UNKNOWN;
}

std::string ResolvePath(const v1::JobSpec& spec, const std::string& path) {
  if (absl::StartsWith(path, "/") || spec.working_directory().empty()) return path;
  return absl::StrCat(spec.working_directory(), "/", path);
}

absl::StatusOr<EngineSetup> SetUpEngine(const v1::RankAssignment& given, FileSystem& files) {
  // A spec that reaches a rank has its defaults; doing it again changes nothing.
  v1::RankAssignment assignment = given;
  spec::ApplyDefaults(*assignment.mutable_spec());
  if (absl::Status status = spec::Validate(assignment.spec()); !status.ok()) {
    return Mark(std::move(status), FailureDomain::kConfiguration);
  }
  EngineSetup setup;
  RETURN_IF_ERROR(CheckLayout(assignment, setup));
  auto device = MakeDevice(assignment);
  if (!device.ok()) return Mark(device.status(), FailureDomain::kDevice);
  setup.device = *std::move(device);
  ASSIGN_OR_RETURN(setup.model, BuildModel(assignment, *setup.mesh));
  RETURN_IF_ERROR(OpenData(assignment.spec(), setup));
  if (assignment.spec().has_checkpoint()) {
    RETURN_IF_ERROR(CheckCheckpointPath(assignment, files));
  }
  setup.options = MakeOptions(assignment);
  return setup;
}

}  // namespace muster::worker
