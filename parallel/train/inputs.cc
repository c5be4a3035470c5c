#include "parallel/train/inputs.h"

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace muster::parallel {
namespace {

using kernels::DType;

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

absl::Status CheckBatch(const TrainerInputs& inputs) {
  const TrainerOptions& options = inputs.options;
  const int64_t sequence = inputs.training.sequence_length();
  const int data = inputs.data_size(), context = inputs.context_size();
  if (options.steps <= 0 || options.micro_batch <= 0 || options.global_batch <= 0 ||
      options.global_batch % (options.micro_batch * data) != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("global_batch %d must be a positive multiple of micro_batch (%d) x "
                        "data-parallel ranks (%d), and steps (%d) positive",
                        options.global_batch, options.micro_batch, data, options.steps));
  }
  const Model::Shape& shape = inputs.model.shape();
  if (sequence > shape.sequence_max) {
    return absl::InvalidArgumentError(
        absl::StrFormat("samples of %d tokens are longer than the model's context %d", sequence,
                        shape.sequence_max));
  }
  const int64_t tokens = options.micro_batch * sequence;
  if (shape.sequence_parallel && tokens % shape.tensor_size != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "sequence parallelism: micro_batch (%d) x sequence_length (%d) = %d tokens do not divide "
        "into the rows of %d tensor-parallel ranks",
        options.micro_batch, sequence, tokens, shape.tensor_size));
  }
  if (shape.context_size != context) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d context-parallel ranks, with a model that was cut for %d", context,
                        shape.context_size));
  }
  if (context > 1 && sequence % (2 * context) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "samples of %d tokens over %d context-parallel ranks: they must be a multiple of two "
        "chunks per rank (%d)",
        sequence, context, 2 * context));
  }
  return absl::OkStatus();
}

absl::Status CheckMethods(const TrainerInputs& inputs) {
  const TrainerOptions& options = inputs.options;
  if (!options.checkpoint_root.empty() &&
      (options.checkpoint_every <= 0 || options.checkpoint_keep <= 0)) {
    return absl::InvalidArgumentError("checkpoint every_steps and keep must be positive");
  }
  const int tensor = inputs.groups.mesh().degree(Axis::kTensor);
  if (tensor != inputs.model.shape().tensor_size) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the model was cut for %d tensor-parallel ranks, but the mesh has %d",
                        inputs.model.shape().tensor_size, tensor));
  }
  if (options.zero < 0 || options.zero > 3) {
    return absl::InvalidArgumentError(
        absl::StrFormat("ZeRO has stages 0 to 3, not %d", options.zero));
  }
  const int shards = inputs.groups.shard().size();
  if (options.zero == 0 && shards > 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("stage 0 of ZeRO shards nothing, but its group has %d ranks", shards));
  }
  if (options.precision != Precision::kFp32 && inputs.device.kind() != kernels::DeviceKind::kCuda) {
    return absl::InvalidArgumentError(
        "the host's kernels compute in fp32: other precisions need a CUDA device");
  }
  if (!(options.offload_optimizer >= 0 && options.offload_optimizer <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a share of %g of the optimizer's state cannot be offloaded; 0 to 1",
                        options.offload_optimizer));
  }
  return CheckCompression(options);
}

}  // namespace

absl::Status TrainerInputs::Check() const {
  RETURN_IF_ERROR(CheckBatch(*this));
  RETURN_IF_ERROR(CheckMethods(*this));
  return CheckPipeline(place());
}

TrainerPlace TrainerInputs::place() const {
  return {.options = options,
          .model = model,
          .mesh = groups.mesh(),
          .coordinate = groups.coordinate(),
          .zero_shards = groups.shard().size(),
          .sequence_length = training.sequence_length(),
          .validation_samples = validation == nullptr ? 0 : validation->samples_per_epoch()};
}

int TrainerInputs::ranks_summed_first() const {
  if (options.zero < 2) return 1;
  // A shard group that cuts through the ranks of a sequence has no whole number of data-parallel
  // ranks, nor need it divide them. The order of the sum is then another one anyway.
  const int shards = groups.shard().size(), context = context_size();
  return shards % context == 0 ? shards / context : 1;
}

bool TrainerInputs::reports_loss() const {
  return groups.coordinate()[Axis::kTensor] == 0 &&
         groups.coordinate()[Axis::kPipeline] + 1 == groups.mesh().degree(Axis::kPipeline);
}

bool TrainerInputs::Owns(const Parameter& parameter) const {
  if (parameter.duplicate) return false;
  if (parameter.sharing == TensorSharing::kShared) return parameter.first_sharer;
  return parameter.sharing == TensorSharing::kSharded || groups.coordinate()[Axis::kTensor] == 0;
}

kernels::Tensor Floats(kernels::Buffer& buffer, int64_t first, int64_t count) {
  return kernels::Tensor(static_cast<float*>(buffer.data()) + first, DType::kF32, {count});
}

}  // namespace muster::parallel
