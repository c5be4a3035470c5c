#include "parallel/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/device/range.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/tensor.h"
#include "parallel/checkpoint/crc32c.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/train/failure.h"
#include "parallel/train/memory.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

Tensor Floats(kernels::Buffer& buffer, int64_t first, int64_t count) {
  return Tensor(static_cast<float*>(buffer.data()) + first, DType::kF32, {count});
}

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Losses are added in the order of the micro-batches, in double, so that every rank and every
// number of ranks gets the same bits.
double Total(const float* values, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += values[i];
  return total;
}

}  // namespace

Trainer::Trainer(const TrainerOptions& options, const Model& model, kernels::Device& device,
                 MeshGroups& groups, const Sampler& training, const Sampler* validation,
                 FileSystem& files, TrainerHooks& hooks)
    : options_(options),
      model_(model),
      device_(device),
      groups_(groups),
      world_(groups.world()),
      training_(training),
      validation_(validation),
      files_(files),
      hooks_(hooks),
      gradient_groups_(GradientGroupsOf(place())),
      layout_(model.parameters(), LayoutOptionsOf(place())) {}

Trainer::~Trainer() {
  // Work under way still refers to what is destroyed next. Its errors have been seen by Run().
  for (kernels::Stream* stream : streams()) stream->Synchronize().IgnoreError();
  if (shared_memory_ != nullptr && !ended_well_) shared_memory_->Abandon();
  shared_memory_.reset();
}

std::vector<kernels::Stream*> Trainer::streams() const {
  std::vector<kernels::Stream*> streams;
  kernels::Stream* const exchange = exchange_ == nullptr ? nullptr : exchange_->stream.get();
  kernels::Stream* const tensor = tensor_stream_ == nullptr ? nullptr : &tensor_stream_->stream();
  for (kernels::Stream* stream :
       {communication_.get(), gathering_.get(), exchange, tensor, compute_.get()}) {
    if (stream != nullptr) streams.push_back(stream);
  }
  return streams;
}

TrainerPlace Trainer::place() const {
  return {.options = options_,
          .model = model_,
          .mesh = groups_.mesh(),
          .coordinate = groups_.coordinate(),
          .zero_shards = groups_.shard().size(),
          .sequence_length = training_.sequence_length(),
          .validation_samples = validation_ == nullptr ? 0 : validation_->samples_per_epoch(),
          .workspace = workspace_.empty() ? nullptr : &workspace_};
}

MemoryUse Trainer::PredictedMemory() const { return PredictMemory(place(), device_.kind()); }

int64_t Trainer::global_micro_batches() const { return GlobalMicroBatches(place()); }
int64_t Trainer::micro_batches() const { return MicroBatches(place()); }
int Trainer::together() const {
  if (options_.zero < 2) return 1;
  // A shard group that cuts through the ranks of a sequence has no whole number of data-parallel
  // ranks, nor need it divide them; the order of the sum is then another one anyway.
  const int shards = groups_.shard().size(), context = groups_.mesh().degree(Axis::kContext);
  return shards % context == 0 ? shards / context : 1;
}
int64_t Trainer::step_values() const { return StepValues(place()); }

bool Trainer::reports_loss() const {
  return groups_.coordinate()[Axis::kTensor] == 0 &&
         groups_.coordinate()[Axis::kPipeline] + 1 == groups_.mesh().degree(Axis::kPipeline);
}

bool Trainer::SpeaksFor(const Parameter& parameter) const {
  if (parameter.duplicate) return false;
  if (parameter.sharing == TensorSharing::kShared) return parameter.first_sharer;
  return parameter.sharing == TensorSharing::kSharded || groups_.coordinate()[Axis::kTensor] == 0;
}

int64_t Trainer::GradientBytesSent() {
  Communicator& whole = gradient_group();
  const bool counted = &whole == &groups_.shard() || &whole == &groups_.replicate();
  return groups_.shard().bytes_sent() + groups_.replicate().bytes_sent() +
         (counted ? 0 : whole.bytes_sent());
}

int64_t Trainer::state_bytes() const {
  const FlatBuffersOptions& storage = flat_->options();
  const int64_t shared =
      storage.share_gradients ? FlatBuffers::Room(layout_, model_.parameters(), storage).bytes : 0;
  return FlatBuffers::Bytes(layout_, storage) + shared +
         GradientCompressor::StateBytes(options_.compression, layout_);
}

namespace {

absl::Status CheckPipeline(const TrainerPlace& place) {
  const PipelineShape shape = PipelineShapeOf(place);
  RETURN_IF_ERROR(Validate(shape));
  if (shape.chunks > 1 && shape.stages == 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d chunks of the model on each rank, but one pipeline stage: chunks are "
                        "for pipelines of 2 stages and more",
                        shape.chunks));
  }
  return absl::OkStatus();
}

absl::Status CheckCompression(const TrainerOptions& options) {
  const CompressionOptions& compression = options.compression;
  if (compression.method == CompressionMethod::kNone) return absl::OkStatus();
  if (options.zero >= 2) {
    return absl::InvalidArgumentError(
        absl::StrFormat("gradient compression keeps what it does not send, for whole gradients, "
                        "which stage %d of ZeRO does not have; use zero 0 or 1",
                        options.zero));
  }
  if (options.gradient_wire != DType::kF32) {
    return absl::InvalidArgumentError("gradient compression sends fp32, not 16-bit gradients");
  }
  if (options.precision == Precision::kFp16) {
    return absl::InvalidArgumentError(
        "gradient compression would keep residuals in units of fp16's changing loss scale; use "
        "bf16");
  }
  if (!(compression.density > 0 && compression.density <= 1) || !(compression.momentum >= 0) ||
      compression.momentum >= 1 || compression.warmup_steps < 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "gradient compression: density %g must be above 0 and at most 1, momentum %g at least 0 "
        "and less than 1, warmup_steps %d not negative",
        compression.density, compression.momentum, compression.warmup_steps));
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const TrainerOptions& options, const Model& model,
                          const kernels::Device& device, MeshGroups& groups,
                          const Sampler& training) {
  const int data = groups.mesh().degree(Axis::kData);
  if (options.steps <= 0 || options.micro_batch <= 0 || options.global_batch <= 0 ||
      options.global_batch % (options.micro_batch * data) != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("global_batch %d must be a positive multiple of micro_batch (%d) x "
                        "data-parallel ranks (%d), and steps (%d) positive",
                        options.global_batch, options.micro_batch, data, options.steps));
  }
  if (training.sequence_length() > model.shape().sequence_max) {
    return absl::InvalidArgumentError(
        absl::StrFormat("samples of %d tokens are longer than the model's context %d",
                        training.sequence_length(), model.shape().sequence_max));
  }
  if (!options.checkpoint_root.empty() &&
      (options.checkpoint_every <= 0 || options.checkpoint_keep <= 0)) {
    return absl::InvalidArgumentError("checkpoint every_steps and keep must be positive");
  }
  const Model::Shape& shape = model.shape();
  if (groups.mesh().degree(Axis::kTensor) != shape.tensor_size) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the model was cut for %d tensor-parallel ranks, but the mesh has %d",
                        shape.tensor_size, groups.mesh().degree(Axis::kTensor)));
  }
  const int64_t tokens = options.micro_batch * training.sequence_length();
  if (shape.sequence_parallel && tokens % shape.tensor_size != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "sequence parallelism: micro_batch (%d) x sequence_length (%d) = %d tokens do not divide "
        "into the rows of %d tensor-parallel ranks",
        options.micro_batch, training.sequence_length(), tokens, shape.tensor_size));
  }
  if (options.zero < 0 || options.zero > 3) {
    return absl::InvalidArgumentError(
        absl::StrFormat("ZeRO has stages 0 to 3, not %d", options.zero));
  }
  if (options.zero == 0 && groups.shard().size() > 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "stage 0 of ZeRO shards nothing, but its group has %d ranks", groups.shard().size()));
  }
  if (options.precision != Precision::kFp32 && device.kind() != kernels::DeviceKind::kCuda) {
    return absl::InvalidArgumentError(
        "the host's kernels compute in fp32: other precisions need a CUDA device");
  }
  const int context = groups.mesh().degree(Axis::kContext);
  if (model.shape().context_size != context || training.sequence_length() % (2 * context) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "samples of %d tokens over %d context-parallel ranks, with a model cut for %d: the ranks "
        "must be the same, and the samples a multiple of two chunks per rank (%d)",
        training.sequence_length(), context, model.shape().context_size, 2 * context));
  }
  RETURN_IF_ERROR(CheckCompression(options));
  if (!(options.offload_optimizer >= 0 && options.offload_optimizer <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a share of %g of the optimizer's state cannot be offloaded; 0 to 1",
                        options.offload_optimizer));
  }
  return CheckPipeline({.options = options,
                        .model = model,
                        .mesh = groups.mesh(),
                        .sequence_length = training.sequence_length()});
}

}  // namespace

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Make(const TrainerOptions& options,
                                                       const Model& model, kernels::Device& device,
                                                       MeshGroups& groups, const Sampler& training,
                                                       const Sampler* validation, FileSystem& files,
                                                       TrainerHooks& hooks) {
  RETURN_IF_ERROR(
      Mark(CheckOptions(options, model, device, groups, training), FailureDomain::kConfiguration));
  std::unique_ptr<Trainer> trainer(
      new Trainer(options, model, device, groups, training, validation, files, hooks));
  absl::Status status = trainer->Allocate();
  if (!status.ok()) {
    const bool memory = status.code() == absl::StatusCode::kResourceExhausted;
    return Mark(std::move(status), memory ? FailureDomain::kMemory : FailureDomain::kUnknown);
  }
  RETURN_IF_ERROR(trainer->ShareSaving());
  return trainer;
}

absl::Status Trainer::Allocate() {
  const kernels::StreamOptions beside = {.threaded = true, .high_priority = true};
  ASSIGN_OR_RETURN(compute_, device_.MakeStream());
  ASSIGN_OR_RETURN(communication_, device_.MakeStream(beside));
  ASSIGN_OR_RETURN(gathering_, device_.MakeStream(beside));
  if (options_.overlap && context_size() > 1) {
    ASSIGN_OR_RETURN(exchange_, ContextOverlap::Make(device_));
  }
  if (options_.overlap && model_.shape().tensor_overlap != TensorOverlap::kNone) {
    ASSIGN_OR_RETURN(tensor_stream_, TensorStream::Make(device_, model_.shape().tensor_size));
  }
  FlatBuffersOptions storage = StorageOptionsOf(place());
  storage.seed = options_.seed;
  storage.shard = groups_.shard().rank();
  ASSIGN_OR_RETURN(flat_,
                   FlatBuffers::Make(device_, *compute_, model_.parameters(), layout_, storage));
  OptimizerOptions optimizing;
  optimizing.adamw = options_.optimizer;
  optimizing.schedule = options_.schedule;
  if (options_.precision == Precision::kFp16) optimizing.loss_scaling = options_.loss_scaling;
  optimizing.norm.counted = [this](const Parameter& parameter) { return SpeaksFor(parameter); };
  optimizing.norm.with_gemms = SumsWithProducts(place(), device_.kind());
  ASSIGN_OR_RETURN(optimizer_, Optimizer::Make(*flat_, device_, *compute_, optimizing));
  if (options_.compression.method != CompressionMethod::kNone) {
    ASSIGN_OR_RETURN(compressor_, GradientCompressor::Make(options_.compression, *flat_,
                                                           gradient_group(), *compute_));
    ASSIGN_OR_RETURN(residual_square_, device_.Allocate(sizeof(float)));
  }
  if (storage.host_buckets > 0) {
    ASSIGN_OR_RETURN(offload_, OptimizerOffload::Make(*flat_, *optimizer_, device_,
                                                      std::max(1, options_.offload_threads)));
  }
  MakeMeter();
  if (tensor_stream_ != nullptr) tensor_stream_->Measure(meter_.get());
  if (exchange_ != nullptr) exchange_->meter = meter_.get();
  if (model_.shape().kv_group >= 0) {
    ASSIGN_OR_RETURN(
        sharers_, groups_.Along({Axis::kTensor})
                      .Split(model_.shape().kv_group, groups_.coordinate()[Axis::kTensor], "kv"));
  }
  RETURN_IF_ERROR(MakeReducers());
  ASSIGN_OR_RETURN(
      gatherer_, ParameterGatherer::Make(*flat_, *metered_gather_, *reducers_.front(),
                                         model_.parts(), *compute_, *gathering_, options_.overlap));
  gatherer_->Measure(*meter_);
  RETURN_IF_ERROR(AllocatePipeline());

  const int64_t slots = ValueSlots(place());
  ASSIGN_OR_RETURN(values_, device_.Allocate(slots * static_cast<int64_t>(sizeof(float))));
  ASSIGN_OR_RETURN(host_values_, device_.AllocateHost(slots * static_cast<int64_t>(sizeof(float))));
  RETURN_IF_ERROR(AllocateFlights());
  RETURN_IF_ERROR(CompareWithDense());
  gradient_bytes_ = GradientBytesSent();
  RETURN_IF_ERROR(ShareMemory());
  Publish();
  return absl::OkStatus();
}

// Gradients are summed on one stream, whatever the group; the tensor group works beside them.
absl::Status Trainer::TakeMemoryForSums() {
  const SumBytes bytes = SumBytesOf(place(), layout_, device_.kind());
  const auto take = [&](int64_t size, std::unique_ptr<kernels::Buffer>& buffer) -> absl::Status {
    if (size == 0) return absl::OkStatus();
    ASSIGN_OR_RETURN(buffer, device_.Allocate(size));
    return absl::OkStatus();
  };
  const auto use = [](Communicator& group, const std::unique_ptr<kernels::Buffer>& buffer) {
    if (PeerMemory* const peers = group.peer_memory(); peers != nullptr) {
      peers->UseForSums(buffer == nullptr ? Tensor()
                                          : Tensor(buffer->data(), DType::kU8, {buffer->bytes()}));
    }
  };
  const auto wait = [](Communicator& group, bool in_warp) {
    if (PeerMemory* const peers = group.peer_memory(); peers != nullptr) peers->WaitInWarp(in_warp);
  };
  RETURN_IF_ERROR(take(bytes.gradients, gradient_sums_));
  RETURN_IF_ERROR(take(bytes.tensor, tensor_sums_));
  use(groups_.shard(), gradient_sums_);
  use(groups_.replicate(), gradient_sums_);
  use(groups_.Along({Axis::kTensor}), tensor_sums_);
  const bool chunked = model_.shape().tensor_overlap == TensorOverlap::kChunked;
  wait(groups_.Along({Axis::kTensor}), options_.waits_in_warp || chunked);
  wait(groups_.Along({Axis::kContext}), options_.waits_in_warp);
  return absl::OkStatus();
}

absl::Status Trainer::ShareMemory() {
  PeerMemory* const peers = world_.peer_memory();
  if (!options_.copy_engines || peers == nullptr) return absl::OkStatus();
  std::vector<Tensor> memory = flat_->Exchanged();
  uint64_t buckets = 0;
  for (const FlatLayout::Bucket& bucket : layout_.buckets()) {
    buckets = buckets * 31 + static_cast<uint64_t>(bucket.range.size());
  }
  ShareOptions options;
  options.least_bytes = options_.copy_engines_least_bytes;
  options.layouts.assign(memory.size(), buckets);
  memory.push_back(arena_.memory());
  options.layouts.push_back(arena_.layout());
  auto shared = peers->Share(memory, options);
  if (shared.ok()) {
    shared_memory_ = *std::move(shared);
    return TakeMemoryForSums();
  }
  if (!absl::IsUnavailable(shared.status())) return shared.status();
  // All of them go on without.
  hooks_.OnWarning(
      Annotate(shared.status(),
               "collectives go through NCCL alone (parallel.copy_engines is without effect)"));
  return absl::OkStatus();
}

// All ranks decide alike, since all of them get everything: through the world, whose communicator
// is connected in any case.
absl::StatusOr<std::vector<int64_t>> Trainer::AlignWorkspaces() {
  const std::string mine = absl::StrJoin(arena_.pieces(), " ");
  ASSIGN_OR_RETURN(const std::vector<std::string> sums,
                   GatherTexts(world_, *compute_, absl::StrCat(Crc32c(mine), " ", mine.size())));
  const auto first_of_group = [&](int rank) {
    PerAxis coordinate = groups_.mesh().CoordinateOf(rank);
    coordinate[Axis::kTensor] = 0;
    return groups_.mesh().RankOf(coordinate);
  };
  bool alike = true;
  for (int rank = 0; rank < world_.size(); ++rank) {
    alike = alike && sums[rank] == sums[first_of_group(rank)];
  }
  if (alike) return std::vector<int64_t>();
  ASSIGN_OR_RETURN(const std::vector<std::string> texts, GatherTexts(world_, *compute_, mine));
  std::vector<std::vector<int64_t>> group;
  for (int rank = 0; rank < world_.size(); ++rank) {
    if (first_of_group(rank) != first_of_group(world_.rank())) continue;
    std::vector<int64_t>& pieces = group.emplace_back();
    for (const absl::string_view number : absl::StrSplit(texts[rank], ' ')) {
      if (!absl::SimpleAtoi(number, &pieces.emplace_back())) {
        return absl::InternalError(absl::StrCat("rank ", rank, " sent \"", number, "\" as bytes"));
      }
    }
  }
  std::vector<int64_t> most = MostOfEach(group);
  if (most.empty()) {
    hooks_.OnWarning(absl::UnavailableError(
        "the shares of this tensor group are too uneven for memory in the same places: its "
        "collectives go through NCCL (parallel.copy_engines is without effect on them)"));
  }
  return most;
}

absl::Status Trainer::AllocatePipeline() {
  // Alone, a step is the same kernels every time. Shards of ZeRO 2 and 3 rotate, and offloaded
  // buckets are waited for, inside a pass; how much of a gradient is sent changes by step.
  if (options_.record && device_.kind() == kernels::DeviceKind::kCuda && world_.size() == 1 &&
      options_.zero < 2 && flat_->options().host_buckets == 0 && compressor_ == nullptr) {
    replay_ = std::make_unique<kernels::Replay>(*compute_);
  }
  const PipelinePlan plan = MakePipelinePlan(PipelineShapeOf(place()));
  ASSIGN_OR_RETURN(executor_, PipelineExecutor::Make(plan, model_, *metered_pipeline_, *compute_,
                                                     {.overlap = options_.overlap,
                                                      .meter = meter_.get(),
                                                      .replay = replay_ != nullptr}));
  const BatchShape shape = BatchShapeOf(place());
  GradientOverlay room;
  const bool shares = flat_->options().share_gradients;
  if (shares) room = FlatBuffers::Room(layout_, model_.parameters(), flat_->options());
  executor_->TakeMemory(arena_, shape, shares ? &room : nullptr);
  if (AlignsWorkspaces(place(), device_.kind())) {
    ASSIGN_OR_RETURN(workspace_, AlignWorkspaces());
    if (!workspace_.empty()) {
      arena_.PadTo(workspace_);
      executor_->TakeMemory(arena_, shape, shares ? &room : nullptr);
    }
  }
  RETURN_IF_ERROR(Annotate(
      arena_.Commit(device_),
      absl::StrFormat("activations of micro_batch %d x %d tokens take %.1f MB", shape.batch,
                      shape.sequence, static_cast<double>(arena_.peak_bytes()) * 1e-6)));
  const Tensor gradients = executor_->TakeMemory(arena_, shape, shares ? &room : nullptr);
  if (shares) flat_->SetGradientOverlay(gradients);
  RETURN_IF_ERROR(executor_->AllocateOffload());
  RETURN_IF_ERROR(AllocatePositions());
  return AllocateShared();
}

void Trainer::MakeMeter() {
  flights_.resize(StepsUnderWay(device_.kind()));
  meter_ = std::make_unique<ExposureMeter>(device_, *compute_, static_cast<int>(flights_.size()));
  metered_world_ = meter_->Around(world_, Exposure::kSlowest);
  metered_gather_ = meter_->Around(groups_.gather(), Exposure::kParameters);
  metered_tensor_ = meter_->Around(groups_.Along({Axis::kTensor}), Exposure::kTensor);
  metered_context_ = meter_->Around(groups_.Along({Axis::kContext}), Exposure::kContext);
  metered_pipeline_ = meter_->Around(groups_.Along({Axis::kPipeline}), Exposure::kPipeline);
}

absl::Status Trainer::AllocateFlights() {
  const int64_t stride = StepOutcomeBytes();
  ASSIGN_OR_RETURN(flight_memory_,
                   device_.AllocateHost(stride * static_cast<int64_t>(flights_.size())));
  char* memory = static_cast<char*>(flight_memory_->data());
  for (Flight& flight : flights_) {
    flight.outcome = reinterpret_cast<kernels::StepOutcome*>(memory);
    flight.stop = reinterpret_cast<float*>(memory + sizeof(kernels::StepOutcome));
    flight.residual_square = flight.stop + 1;
    memory += stride;
    ASSIGN_OR_RETURN(flight.done, device_.MakeEvent());
    for (auto* event : {&flight.reducing, &flight.reduced}) {
      ASSIGN_OR_RETURN(*event, device_.MakeEvent(/*timing=*/true));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> Trainer::Agree(bool ok) {
  auto* value = static_cast<float*>(host_values_->data());
  *value = ok ? 1.0f : 0.0f;
  kernels::Copy(*compute_, Floats(*host_values_, 0, 1), Floats(*values_, 0, 1));
  if (world_.size() > 1) world_.AllReduce(*compute_, Floats(*values_, 0, 1), ReduceOp::kMin);
  kernels::Copy(*compute_, Floats(*values_, 0, 1), Floats(*host_values_, 0, 1));
  RETURN_IF_ERROR(Mark(compute_->Synchronize(), FailureDomain::kCommunication));
  return *value != 0.0f;
}

absl::Status Trainer::EnqueueStep() {
  trace_ = hooks_.BeginStep(enqueued_ + 1);
  const kernels::Range shown(*compute_, absl::StrCat("step ", enqueued_ + 1), trace_);
  if (enqueued_ == step_) collected_at_ = std::chrono::steady_clock::now();
  Flight& flight = flights_[enqueued_ % flights_.size()];
  const int64_t micro_batches = global_micro_batches();
  flight.outcome->tokens = -1;  // until the device has written it
  meter_->BeginStep(static_cast<int>(enqueued_ % flights_.size()));
  kernels::Zero(*compute_, Floats(*values_, 0, step_values()));
  RETURN_IF_ERROR(RunMicroBatches(flight));
  AddUnsent();
  if (offload_ != nullptr) {
    offload_->FetchGradients(
        *compute_, [this](int bucket) { return unsent_.empty() ? Reduced(bucket) : nullptr; });
  }
  unsent_.clear();
  if (compressor_ != nullptr) {
    compressor_->ResidualSquare(*compute_, Floats(*residual_square_, 0, 1));
    kernels::Copy(*compute_, Floats(*residual_square_, 0, 1),
                  Tensor(flight.residual_square, DType::kF32, {1}));
  }
  *flight.stop = hooks_.StopRequested() ? 1.0f : 0.0f;
  kernels::Copy(*compute_, Tensor(flight.stop, DType::kF32, {1}),
                Floats(*values_, 2 * micro_batches, 1));
  // Replicas have the same gradients: one of them speaks.
  if (groups_.replicate().rank() == 0) {
    optimizer_->SumSquares(*compute_,
                           Floats(*values_, 2 * micro_batches + 1 + 2 * world_.rank(), 2));
  }
  if (world_.size() > 1) {
    metered_world_->AllReduce(*compute_, Floats(*values_, 0, step_values()), ReduceOp::kSum);
  }
  meter_->EndStep();
  optimizer_->Prepare(*compute_, Floats(*values_, 0, step_values()), micro_batches, world_.size(),
                      static_cast<double>(options_.global_batch * training_.sequence_length()));
  optimizer_->CopyOutcome(*compute_, flight.outcome);
  compute_->Record(*flight.done);
  const kernels::Range update(*compute_, "update", trace_);
  if (offload_ != nullptr) offload_->Update(*compute_);
  if (replay_ == nullptr) {
    optimizer_->Update(*compute_, [this](int bucket) { gatherer_->Updated(bucket); });
  } else {
    replay_->Run({}, [this] { optimizer_->Update(*compute_, [](int) {}); });
    gatherer_->AllUpdated();
  }
  for (int bucket = flat_->options().host_buckets - 1; bucket >= 0; --bucket) {
    gatherer_->UpdatedBy(offload_->written(bucket), bucket);
  }
  ++enqueued_;
  trace_ = nullptr;  // which ends with its last step, and an evaluation is no part of one
  return absl::OkStatus();
}

absl::StatusOr<bool> Trainer::CollectStep() {
  const Flight& flight = flights_[step_ % flights_.size()];
  flight.done->Synchronize();
  RETURN_IF_ERROR(Mark(executor_->status(), FailureDomain::kCommunication));
  if (offload_ != nullptr) RETURN_IF_ERROR(Mark(offload_->status(), FailureDomain::kDevice));
  for (kernels::Stream* stream : streams()) {
    // A failed collective leaves nothing to be read.
    if (!stream->status().ok()) {
      return Mark(stream->Synchronize(), FailureDomain::kCommunication);
    }
  }
  const kernels::StepOutcome outcome = *flight.outcome;
  if (outcome.tokens < 0) {
    absl::Status status = compute_->Synchronize();
    if (status.ok()) status = absl::InternalError("the device has not run the step");
    return Mark(std::move(status), FailureDomain::kDevice);
  }
  const int64_t step = step_ + 1;
  if (outcome.tokens == 0) {
    return Mark(absl::DataLossError(absl::StrFormat(
                    "step %d (samples from %d): every token of the global batch is masked", step,
                    consumed_samples_)),
                FailureDomain::kData);
  }
  const bool scaling = options_.precision == Precision::kFp16 && options_.loss_scaling.dynamic;
  if (outcome.skipped != 0 && !(scaling && outcome.loss_scale > options_.loss_scaling.minimum)) {
    return Mark(
        absl::OutOfRangeError(absl::StrFormat(
            "step %d (samples %d to %d) on %s: loss %g, gradient norm %g%s; the update was not "
            "applied. Look at the learning rate, at the initial weights, or at the data of these "
            "samples",
            step, consumed_samples_, consumed_samples_ + options_.global_batch - 1, device_.name(),
            outcome.loss, outcome.gradient_norm, scaling ? " at the smallest loss scale" : "")),
        FailureDomain::kNumeric);
  }
  step_ = step;
  if (unsent_.empty()) unsent_memory_.reset();
  consumed_samples_ += options_.global_batch;

  StepReport report;
  report.step = step;
  report.loss = outcome.loss;
  report.gradient_norm = outcome.gradient_norm;
  report.learning_rate = outcome.learning_rate;
  const auto now = std::chrono::steady_clock::now();
  report.seconds = std::chrono::duration<double>(now - collected_at_).count();
  collected_at_ = now;
  if (world_.size() > 1) {
    report.exposed = meter_->Seconds(static_cast<int>((step - 1) % flights_.size()));
    report.exposed.at(Exposure::kGradients, reducers_.front()->collective()) +=
        flight.reduced->SecondsSince(*flight.reducing);
    report.exposed_communication_seconds = report.exposed.total();
  }
  report.tokens = static_cast<int64_t>(outcome.tokens);
  report.consumed_samples = consumed_samples_;
  report.skipped = outcome.skipped != 0;
  report.loss_scale = outcome.loss_scale;
  const int64_t gradient_bytes = GradientBytesSent();
  report.gradient_bytes = gradient_bytes - std::exchange(gradient_bytes_, gradient_bytes);
  if (compressor_ != nullptr) {
    report.gradient_density = flight.density;
    report.residual_norm = std::sqrt(static_cast<double>(*flight.residual_square));
  }
  hooks_.OnStep(report);
  return outcome.stop == 0;
}

bool Trainer::Boundary(int64_t step) const {
  return step == options_.steps || Verifies(step) ||
         (options_.evaluate_every > 0 && step % options_.evaluate_every == 0) ||
         (!options_.checkpoint_root.empty() && step % options_.checkpoint_every == 0);
}

absl::StatusOr<bool> Trainer::RunToBoundary() {
  // Every rank counts the same steps ahead, so all of them stop after the same one.
  const auto ahead = static_cast<int64_t>(flights_.size()) - 1;
  bool stop = false;
  for (bool draining = false; !draining || step_ < enqueued_;) {
    if (!draining) {
      RETURN_IF_ERROR(EnqueueStep());
      draining = Boundary(enqueued_);
    }
    while (enqueued_ - step_ > (draining ? 0 : ahead)) {
      ASSIGN_OR_RETURN(const bool go_on, CollectStep());
      if (!go_on) stop = draining = true;
      Prune();
    }
  }
  return !stop;
}

absl::StatusOr<double> Trainer::EvaluationLoss(int64_t samples, int64_t* tokens) {
  const int64_t batches = (samples + options_.micro_batch - 1) / options_.micro_batch;
  auto* host_values = static_cast<float*>(host_values_->data());
  kernels::Zero(*compute_, Floats(*values_, 0, 2 * batches));
  // Where forward is a collective, ranks without a batch of their own run an empty one.
  const int64_t rounds = (batches + data_size() - 1) / data_size();
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t j = round * data_size() + data_rank();
    if (j >= batches && options_.zero < 3) continue;
    std::vector<int64_t> indices;
    const int64_t end = std::min(samples, (j + 1) * options_.micro_batch);
    for (int64_t i = j * options_.micro_batch; i < end; ++i) indices.push_back(i);
    RETURN_IF_ERROR(EvaluateBatch(indices, j, batches));
  }
  if (world_.size() > 1) {
    world_.AllReduce(*compute_, Floats(*values_, 0, 2 * batches), ReduceOp::kSum);
  }
  kernels::Copy(*compute_, Floats(*values_, 0, 2 * batches), Floats(*host_values_, 0, 2 * batches));
  for (kernels::Stream* stream : streams()) {
    RETURN_IF_ERROR(Mark(stream->Synchronize(), FailureDomain::kCommunication));
  }
  const double counted = Total(host_values + batches, batches);
  *tokens = static_cast<int64_t>(counted);
  return Total(host_values, batches) / std::max(1.0, counted);
}

absl::Status Trainer::Evaluate() {
  if (validation_ == nullptr || evaluated_step_ == step_) return absl::OkStatus();
  hooks_.OnPhase("evaluating");
  const Stopwatch watch;
  int64_t samples = validation_->samples_per_epoch();
  if (options_.evaluate_samples > 0) samples = std::min(samples, options_.evaluate_samples);
  EvaluationReport report;
  report.step = step_;
  ASSIGN_OR_RETURN(report.loss, EvaluationLoss(samples, &report.tokens));
  report.seconds = watch.seconds();
  evaluated_step_ = step_;
  hooks_.OnEvaluation(report);
  return absl::OkStatus();
}

absl::Status Trainer::StartLoader() {
  BatchLoaderOptions loading;
  loading.global_batch = options_.global_batch;
  loading.micro_batch = options_.micro_batch;
  loading.rank = data_rank();
  loading.ranks = data_size();
  loading.together = together();
  loading.documents = model_.shape().documents;
  loading.first_sample = consumed_samples_;
  ASSIGN_OR_RETURN(loader_, BatchLoader::Start(training_, device_, loading));
  return absl::OkStatus();
}

absl::StatusOr<Trainer::Outcome> Trainer::Run() {
  RETURN_IF_ERROR(Mark(StartLoader(), FailureDomain::kMemory));
  enqueued_ = step_;
  hooks_.OnPhase("training");
  while (step_ < options_.steps) {
    ASSIGN_OR_RETURN(const bool go_on, RunToBoundary());
    const bool last = step_ == options_.steps;
    const bool evaluate =
        last || (options_.evaluate_every > 0 && step_ % options_.evaluate_every == 0);
    const bool stop = !go_on && !last;
    const bool save =
        !options_.checkpoint_root.empty() &&
        (last || step_ % options_.checkpoint_every == 0 || (stop && options_.checkpoint_on_stop));
    if (offload_ != nullptr) offload_->Join(*compute_);
    if (Verifies(step_)) RETURN_IF_ERROR(Verify());
    // Saving first: an evaluation may be long, and the steps should count by then.
    if (save) RETURN_IF_ERROR(Save());
    if (stop) {
      ended_well_ = true;
      return Outcome::kStopped;
    }
    if (evaluate) RETURN_IF_ERROR(Evaluate());
    Prune();
    if ((save || evaluate) && !last) hooks_.OnPhase("training");
  }
  // A job that was restored at its last step still owes the evaluation.
  RETURN_IF_ERROR(Evaluate());
  hooks_.OnPhase("finished");
  ended_well_ = true;
  return Outcome::kFinished;
}

}  // namespace muster::parallel
