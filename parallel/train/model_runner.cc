#include "parallel/train/model_runner.h"

#include <cstdint>

#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/train/memory.h"

namespace muster::parallel {

using kernels::DType;
using kernels::Tensor;

absl::StatusOr<std::unique_ptr<ModelRunner>> ModelRunner::Make(const TrainerInputs& inputs,
                                                               RankMemory& memory,
                                                               MeteredGroups& groups,
                                                               GradientReduction& gradients,
                                                               bool record) {
  std::unique_ptr<ModelRunner> runner(new ModelRunner(inputs, memory, groups));
  RETURN_IF_ERROR(runner->Allocate(gradients, record));
  return runner;
}

absl::Status ModelRunner::Allocate(GradientReduction& gradients, bool record) {
  const Model& model = inputs_.model;
  const bool overlap = inputs_.options.overlap;
  if (overlap && inputs_.context_size() > 1) {
    ASSIGN_OR_RETURN(context_stream_, ContextOverlap::Make(inputs_.device));
    context_stream_->meter = &groups_.meter;
  }
  if (overlap && model.shape().tensor_overlap != TensorOverlap::kNone) {
    ASSIGN_OR_RETURN(tensor_stream_, TensorStream::Make(inputs_.device, model.shape().tensor_size));
    tensor_stream_->Measure(&groups_.meter);
  }
  ASSIGN_OR_RETURN(gatherer_, ParameterGatherer::Make(
                                  memory_.flat(), *groups_.gather, gradients.front(), model.parts(),
                                  memory_.compute(), memory_.gathering(), overlap));
  gatherer_->Measure(groups_.meter);
  const PipelinePlan plan = MakePipelinePlan(PipelineShapeOf(inputs_.place()));
  ASSIGN_OR_RETURN(executor_, PipelineExecutor::Make(
                                  plan, model, *groups_.pipeline, memory_.compute(),
                                  {.overlap = overlap, .meter = &groups_.meter, .replay = record}));
  RETURN_IF_ERROR(memory_.TakeWorkspace(*executor_));
  RETURN_IF_ERROR(executor_->AllocateOffload());
  return AllocatePositions();
}

absl::Status ModelRunner::AllocatePositions() {
  if (inputs_.context_size() == 1) return absl::OkStatus();
  std::vector<int32_t> positions = ContextPositions(inputs_.training.sequence_length(),
                                                    inputs_.context_rank(), inputs_.context_size());
  const auto size = static_cast<int64_t>(positions.size());
  ASSIGN_OR_RETURN(positions_,
                   inputs_.device.Allocate(size * static_cast<int64_t>(sizeof(int32_t))));
  const Tensor on_device(positions_->data(), DType::kI32, {size});
  kernels::Copy(memory_.compute(), Tensor(positions.data(), DType::kI32, {size}), on_device);
  executor_->SetPositions(on_device);
  return memory_.compute().Synchronize();
}

std::vector<kernels::Stream*> ModelRunner::streams() const {
  std::vector<kernels::Stream*> streams = {&memory_.communication(), &memory_.gathering()};
  if (context_stream_ != nullptr) streams.push_back(context_stream_->stream.get());
  if (tensor_stream_ != nullptr) streams.push_back(&tensor_stream_->stream());
  streams.push_back(&memory_.compute());
  return streams;
}

Pass ModelRunner::MakePass(kernels::Trace* trace) {
  Pass pass = {memory_.compute(), memory_.flat().parameter_views()};
  pass.gate = gatherer_.get();
  pass.tensor = groups_.tensor.get();
  pass.tensor_stream = tensor_stream_.get();
  pass.context = groups_.context.get();
  pass.context_overlap = context_stream_.get();
  pass.trace = trace;
  return pass;
}

// Of 2 x ranks chunks of a sequence, rank r has chunks r and 2 x ranks - 1 - r, so that causal
// attention is the same work on all ranks.
void ModelRunner::CopyTokens(const Tensor& whole, const Tensor& local) {
  const int64_t ranks = inputs_.context_size(), rank = inputs_.context_rank();
  if (ranks == 1) {
    kernels::Copy(memory_.compute(), whole, local);
    return;
  }
  const int64_t size = inputs_.training.sequence_length() / (2 * ranks);
  for (int64_t sample = 0; sample < inputs_.options.micro_batch; ++sample) {
    const int64_t from = sample * 2 * ranks, to = sample * 2;
    kernels::Copy(memory_.compute(), whole.Rows((from + rank) * size, size),
                  local.Rows(to * size, size));
    kernels::Copy(memory_.compute(), whole.Rows((from + 2 * ranks - 1 - rank) * size, size),
                  local.Rows((to + 1) * size, size));
  }
}

void ModelRunner::PublishWeights() {
  memory_.flat().RefreshCopies(memory_.compute());
  gatherer_->AllUpdated();
}

}  // namespace muster::parallel
