#include "worker/rank/engine_setup.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "parallel/comm/peer_failure.h"
#include "parallel/mesh/mesh.h"
#include "parallel/pipeline/stages.h"
#include "parallel/plan/validate.h"
#include "parallel/train/failure.h"
#include "parallel/train/memory.h"
#include "proto/spec/spec.h"
#include "worker/rank/job_plan.h"

namespace muster::worker {
namespace {

using parallel::FailureDomain;
using parallel::Mark;

constexpr int64_t kBucketBytesCpu = 4 << 20;
constexpr int64_t kBucketBytesCuda = 64 << 20;  // measured: docs/benchmarks/h200-layouts.md

absl::Status Misconfigured(const std::string& message) {
  return Mark(absl::InvalidArgumentError(message), FailureDomain::kConfiguration);
}

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

// The parts of a stage as the spec gives them; the embedding and the head are blocks too.
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

}  // namespace

absl::StatusOr<std::unique_ptr<kernels::Device>> MakeDevice(const v1::RankAssignment& assignment,
                                                            std::function<void()> on_measuring) {
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
  options.on_measuring = std::move(on_measuring);
  auto device = kernels::MakeCudaDevice(ordinal, options);
  if (!device.ok()) {
    return Mark(Annotate(device.status(), absl::StrCat("resources.device: ", name)),
                absl::IsResourceExhausted(device.status()) ? FailureDomain::kMemory
                                                           : FailureDomain::kDevice);
  }
  return device;
}

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
  if (!mesh.ok()) return Misconfigured(absl::StrCat("engine.parallel: ", mesh.status().message()));
  return SplitRun{*mesh, layout.EffectiveShards()};
}

absl::StatusOr<parallel::ModelParallel> PartOf(const v1::JobSpec& spec,
                                               const parallel::PerAxis& coordinate) {
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
  part.deterministic = !engine.training().any_order();
  part.dropout = engine.training().dropout();
  return part;
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

v1::Cause CauseOf(const absl::Status& status) {
  if (const auto failure = parallel::PeerFailureOf(status); failure.has_value()) {
    return failure->kind == parallel::PeerFailure::Kind::kLost ? v1::CAUSE_NETWORK
                                                               : v1::CAUSE_LAUNCH;
  }
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

namespace {

// A GPU that is not empty, though it is this rank's alone.
std::string HeldByOthers(const kernels::DeviceMemory& memory) {
  const int64_t held = memory.total - memory.free - parallel::kCudaContextBytes;
  if (held < memory.total / 50) return "";
  return absl::StrFormat(" (other processes hold %s; nvidia-smi shows which)", BytesText(held));
}

}  // namespace

absl::Status CheckFits(const v1::RankAssignment& assignment, const parallel::MemoryUse& use,
                       const parallel::PerAxis& coordinate, kernels::DeviceKind kind,
                       const std::string& device, const kernels::DeviceMemory& memory,
                       std::optional<int64_t> host_there) {
  const int64_t needed = NeededBytes(use, kind);
  const int64_t there = MemoryThere(assignment, kind, memory);
  const std::string who =
      absl::StrFormat("rank %d (%s) needs ", assignment.rank(), coordinate.ToString());
  const std::string each = absl::StrFormat(" for each of the job's %d ranks on this machine",
                                           std::max(1, assignment.local_ranks()));
  std::string message;
  if (needed > there) {
    message = absl::StrFormat(
        "%s%s, and %s has %s%s: %s", who, BytesText(needed), device, BytesText(there),
        kind == kernels::DeviceKind::kCpu
            ? each
            : absl::StrFormat(" free of %s%s", BytesText(memory.total), HeldByOthers(memory)),
        use.ToString());
  } else if (host_there.has_value() && use.host_bytes() > *host_there) {
    // Pinned memory that is not there ends the process, or others of the machine.
    message =
        absl::StrFormat("%s%s of the host's memory, which has %s%s: %s", who,
                        BytesText(use.host_bytes()), BytesText(*host_there), each, use.HostText());
  } else {
    return absl::OkStatus();
  }
  const auto change = host_there.has_value() ? CheapestFit(assignment.spec(), there, *host_there)
                                             : CheapestFit(assignment.spec(), there);
  absl::StrAppend(&message, ". ", AdviceText(change));
  return Mark(absl::ResourceExhaustedError(message), FailureDomain::kMemory);
}

// A GPU is this rank's alone: what is free of it counts. The ranks on one host take their shares of
// it while others check, so there it is the total.
int64_t MemoryThere(const v1::RankAssignment& assignment, kernels::DeviceKind device,
                    const kernels::DeviceMemory& memory) {
  if (device == kernels::DeviceKind::kCpu) {
    return memory.total / std::max(1, assignment.local_ranks());
  }
  return memory.free + parallel::kCudaContextBytes;  // its context has been made by now
}

namespace {

// Of the host for each of the job's ranks on it; no value where the system does not say.
absl::StatusOr<std::optional<int64_t>> HostMemoryThere(const v1::RankAssignment& assignment) {
  const auto host = kernels::MakeCpuDevice(1)->Memory();
  if (absl::IsUnavailable(host.status())) return std::nullopt;
  if (!host.ok()) return host.status();
  return host->total / std::max(1, assignment.local_ranks());
}

// Whether what this rank will take is there.
absl::Status CheckMemory(const v1::RankAssignment& assignment, const EngineSetup& setup,
                         const parallel::PerAxis& coordinate,
                         std::optional<kernels::DeviceMemory> memory) {
  if (!memory.has_value()) {
    auto asked = setup.device->Memory();
    if (absl::IsUnavailable(asked.status())) return absl::OkStatus();
    if (!asked.ok()) return Mark(asked.status(), FailureDomain::kDevice);
    memory = *asked;
  }
  const kernels::DeviceKind kind = setup.device->kind();
  std::optional<int64_t> host;
  if (kind == kernels::DeviceKind::kCuda) {
    ASSIGN_OR_RETURN(host, HostMemoryThere(assignment));
  }
  return CheckFits(assignment, setup.memory, coordinate, kind, setup.device->name(), *memory, host);
}

}  // namespace

absl::StatusOr<EngineSetup> SetUpEngine(const v1::RankAssignment& given, FileSystem& files,
                                        std::optional<kernels::DeviceMemory> memory,
                                        std::function<void()> on_measuring) {
  // A spec that reaches a rank has its defaults; doing it again changes nothing.
  v1::RankAssignment assignment = given;
  spec::ApplyDefaults(*assignment.mutable_spec());
  if (absl::Status status = spec::Validate(assignment.spec()); !status.ok()) {
    return Mark(std::move(status), FailureDomain::kConfiguration);
  }
  if (assignment.world_size() != assignment.spec().resources().ranks()) {
    return Misconfigured(absl::StrFormat("resources.ranks: %d, but the rank was told of %d",
                                         assignment.spec().resources().ranks(),
                                         assignment.world_size()));
  }
  EngineSetup setup;
  ASSIGN_OR_RETURN(const SplitRun split, SplitOf(assignment.spec()));
  setup.mesh = split.mesh;
  setup.zero_shards = split.zero_shards;
  const parallel::PerAxis coordinate = setup.mesh->CoordinateOf(assignment.rank());
  ASSIGN_OR_RETURN(setup.device, MakeDevice(assignment, std::move(on_measuring)));
  ASSIGN_OR_RETURN(setup.model, BuildModel(assignment.spec(), coordinate));
  const v1::ModelSpec& model = assignment.spec().engine().model();
  if (!model.initialize_from().empty()) {
    ASSIGN_OR_RETURN(
        setup.initial_weights,
        InitialWeights::Open(files, ResolvePath(assignment.spec(), model.initialize_from()),
                             Describe(model)));
  }
  RETURN_IF_ERROR(OpenData(assignment.spec(), setup));
  if (assignment.spec().has_checkpoint()) {
    RETURN_IF_ERROR(CheckCheckpointPath(assignment, files));
  }
  setup.options = OptionsOf(assignment.spec());
  setup.options.job = JobId(assignment.job_id());
  setup.options.epoch = Epoch(assignment.epoch());
  setup.options.host_threads = std::max(1, assignment.threads());
  setup.memory = parallel::PredictMemory(
      {.options = setup.options,
       .model = *setup.model,
       .mesh = *setup.mesh,
       .coordinate = coordinate,
       .zero_shards = setup.zero_shards,
       .sequence_length = setup.training->sequence_length(),
       .validation_samples =
           setup.validation == nullptr ? 0 : setup.validation->samples_per_epoch()},
      setup.device->kind());
  RETURN_IF_ERROR(CheckMemory(assignment, setup, coordinate, memory));
  return setup;
}

}  // namespace muster::worker
