#include "parallel/pipeline/executor.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

using kernels::Tensor;

std::vector<BlockRange> GradientGroups(const PipelineShape& shape, const Model& model, int rank) {
  std::vector<BlockRange> groups = model.parts();
  if (!SplitsBackward(shape) || rank + 1 < shape.stages) return groups;
  const int head = groups.back().end - 1;
  groups.back().end = head;
  groups.push_back({head, head + 1});
  return groups;
}

PipelineExecutor::PipelineExecutor(const PipelinePlan& plan, const Model& model,
                                   Communicator& group, kernels::Stream& compute)
    : plan_(plan),
      model_(model),
      group_(group),
      compute_(compute),
      rank_(group.rank()),
      split_(SplitsBackward(plan.shape)) {}

PipelineExecutor::~PipelineExecutor() {
  // Work in flight still refers to the buffers. Its errors have been returned.
  if (exchange_ != nullptr) exchange_->Synchronize().IgnoreError();
  if (offload_ != nullptr) {
    offload_->out->Synchronize().IgnoreError();
    offload_->in->Synchronize().IgnoreError();
  }
}

absl::StatusOr<std::unique_ptr<PipelineExecutor>> PipelineExecutor::Make(const PipelinePlan& plan,
                                                                         const Model& model,
                                                                         Communicator& group,
                                                                         kernels::Stream& compute,
                                                                         const Options& options) {
  if (group.size() != plan.shape.stages) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "a pipeline of %d stages over a group of %d ranks", plan.shape.stages, group.size()));
  }
  if (static_cast<int>(model.parts().size()) != plan.shape.chunks) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a pipeline of %d chunks per rank over a model of %d parts on this rank",
                        plan.shape.chunks, model.parts().size()));
  }
  if (SplitsBackward(plan.shape) && !model.shape().split_backward) {
    return absl::InvalidArgumentError(
        "schedule zero_bubble with a model that was not made for a backward in two parts");
  }
  std::unique_ptr<PipelineExecutor> executor(new PipelineExecutor(plan, model, group, compute));
  executor->meter_ = options.meter;
  if (options.replay) {
    CHECK(plan.shape.stages == 1 && plan.shape.chunks == 1);
    executor->replay_ = std::make_unique<kernels::Replay>(compute);
  }
  BufferPlan buffers = AssignBuffers(plan, executor->rank_);
  executor->steps_ = std::move(buffers.steps);
  executor->counts_ = std::move(buffers.counts);
  executor->inputs_.resize(executor->counts_.inputs);
  executor->outputs_.resize(executor->counts_.outputs);
  executor->gradients_.resize(executor->counts_.gradients);
  RETURN_IF_ERROR(executor->MakeEvents(options));
  return executor;
}

absl::Status PipelineExecutor::MakeEvents(const Options& options) {
  if (plan_.shape.stages == 1 || !options.overlap) return absl::OkStatus();
  kernels::Device& device = compute_.device();
  ASSIGN_OR_RETURN(exchange_, device.MakeStream({.threaded = true, .high_priority = true}));
  ASSIGN_OR_RETURN(computed_, device.MakeEvent());
  for (std::vector<Buffer>* buffers : {&inputs_, &outputs_, &gradients_}) {
    for (Buffer& buffer : *buffers) {
      ASSIGN_OR_RETURN(buffer.exchanged, device.MakeEvent());
    }
  }
  return absl::OkStatus();
}

PipelineExecutor::Memory PipelineExecutor::Take(const Model& model, const BufferCounts& counts,
                                                kernels::Arena& arena, const BatchShape& shape,
                                                const GradientOverlay* overlay) {
  Memory memory;
  CHECK(overlay == nullptr || (counts.workspaces.size() == 1 && counts.workspaces[0] == 1))
      << "micro-batches in flight would share the overlay of the gradients";
  memory.workspaces.resize(counts.workspaces.size());
  for (size_t chunk = 0; chunk < counts.workspaces.size(); ++chunk) {
    for (int i = 0; i < counts.workspaces[chunk]; ++i) {
      memory.workspaces[chunk].push_back(
          model.TakeSaved(arena, shape, model.parts()[chunk], overlay));
    }
  }
  const auto take = [&](std::vector<Tensor>& tensors, int count) {
    for (int i = 0; i < count; ++i) {
      tensors.push_back(
          arena.Take("stages", shape.activation, {model.HiddenRows(shape), model.shape().hidden}));
    }
  };
  take(memory.inputs, counts.inputs);
  take(memory.outputs, counts.outputs);
  take(memory.gradients, counts.gradients);
  const int64_t mark = arena.Mark();
  for (std::vector<Workspace>& of_chunk : memory.workspaces) {
    for (Workspace& workspace : of_chunk) {
      arena.ReleaseTo(mark);
      model.TakeScratch(arena, workspace);
    }
  }
  return memory;
}

absl::Status PipelineExecutor::AllocateOffload() {
  for (std::vector<Workspace>& of_chunk : workspaces_) {
    for (Workspace& workspace : of_chunk) {
      if (workspace.slots.copied() == 0) continue;
      kernels::Device& device = compute_.device();
      if (offload_ == nullptr) {
        ASSIGN_OR_RETURN(offload_, ActivationStreams::Make(device));
      }
      ASSIGN_OR_RETURN(workspace.offload,
                       ActivationOffload::Make(device, *offload_, workspace.slots));
    }
  }
  return absl::OkStatus();
}

int64_t PipelineExecutor::PlanMemory(const PipelinePlan& plan, const Model& model, int rank,
                                     kernels::Arena& arena, const BatchShape& shape,
                                     const GradientOverlay* overlay) {
  const Memory memory = Take(model, AssignBuffers(plan, rank).counts, arena, shape, overlay);
  int64_t offloaded = 0;
  for (const std::vector<Workspace>& of_chunk : memory.workspaces) {
    for (const Workspace& workspace : of_chunk) offloaded += workspace.slots.host_bytes();
  }
  return offloaded;
}

Tensor PipelineExecutor::TakeMemory(kernels::Arena& arena, const BatchShape& shape,
                                    const GradientOverlay* overlay) {
  Memory memory = Take(model_, counts_, arena, shape, overlay);
  workspaces_ = std::move(memory.workspaces);
  const auto give = [](const std::vector<Tensor>& tensors, std::vector<Buffer>& buffers) {
    for (size_t i = 0; i < tensors.size(); ++i) buffers[i].tensor = tensors[i];
  };
  give(memory.inputs, inputs_);
  give(memory.outputs, outputs_);
  give(memory.gradients, gradients_);
  return overlay == nullptr ? Tensor() : workspaces_[0][0].gradients;
}

void PipelineExecutor::SetPositions(const Tensor& positions) {
  for (std::vector<Workspace>& of_chunk : workspaces_) {
    for (Workspace& workspace : of_chunk) workspace.batch.positions = positions;
  }
}

// The blocks of a virtual stage without the head.
BlockRange PipelineExecutor::Trunk(int chunk) const {
  const BlockRange& part = model_.parts()[chunk];
  return {part.begin, part.end - (IsLastPart(chunk) ? 1 : 0)};
}

void PipelineExecutor::Await(Buffer& buffer) {
  if (!buffer.waiting) return;
  if (meter_ != nullptr) meter_->Begin(Exposure::kPipeline, Collective::kSendReceive, compute_);
  compute_.Wait(*buffer.exchanged);
  if (meter_ != nullptr) meter_->End(compute_);
  buffer.waiting = false;
}

// The output of a virtual stage: residual + branch.
void PipelineExecutor::Add(const ForwardState& state, Buffer& to) {
  Await(to);
  if (state.branch.empty()) {
    kernels::Copy(compute_, state.residual, to.tensor);
    return;
  }
  if (state.second_branch.empty()) {
    kernels::Add(compute_, state.residual, state.branch, to.tensor);
    return;
  }
  for (const int half : {0, 1}) {
    kernels::Add(compute_, SliceOf(state.residual, 2, half),
                 half == 0 ? state.branch : state.second_branch, SliceOf(to.tensor, 2, half));
  }
}

absl::Status PipelineExecutor::Load(const BufferedAction& step, MicroBatchClient& client) {
  const int chunk = step.action.chunk;
  ModelBatch& batch = workspaces_[chunk][step.workspace].batch;
  if (!model_.shape().documents && !model_.shape().dropout) {
    if (!IsFirstPart(chunk) && !IsLastPart(chunk)) return absl::OkStatus();
    return client.Load(step.action.micro_batch, batch);
  }
  if (chunk == 0) return client.Load(step.action.micro_batch, batch);
  const ModelBatch& loaded = workspaces_[0][step.loaded].batch;
  batch.tokens = loaded.tokens;
  batch.targets = loaded.targets;
  batch.documents = loaded.documents;
  batch.sample = loaded.sample;
  return absl::OkStatus();
}

absl::Status PipelineExecutor::Forward(const BufferedAction& step, const Pass& pass,
                                       MicroBatchClient& client) {
  const int chunk = step.action.chunk, micro_batch = step.action.micro_batch;
  Workspace& workspace = workspaces_[chunk][step.workspace];
  ForwardState& state = workspace.forward;
  RETURN_IF_ERROR(Load(step, client));
  if (!IsFirstPart(chunk)) {
    Await(inputs_[step.input]);
    state.residual = inputs_[step.input].tensor;
  }
  state.branch = Tensor();
  state.second_branch = Tensor();
  if (!step.head_in_forward) {
    model_.Forward(pass, workspace, Trunk(chunk));
    Add(state, outputs_[step.output]);
    return absl::OkStatus();
  }
  head_gradients_ = &client.BeginGradients(HeadGroup(chunk), micro_batch);
  Pass with_gradients = pass;
  with_gradients.gradients = head_gradients_;
  ModelForward(with_gradients, chunk, step.workspace);
  client.OnLosses(micro_batch, state.losses);
  return absl::OkStatus();
}

// A recording depends on what the pass refers to, and on the memory of the workspace.
bool PipelineExecutor::Replayed(const Pass& pass, bool backward, Workspace& workspace,
                                absl::FunctionRef<void(const Pass& pass)> work) {
  uint32_t scale = 0;
  static_assert(sizeof(scale) == sizeof(pass.loss_scale));
  std::memcpy(&scale, &pass.loss_scale, sizeof(scale));
  const auto address = [](const void* p) {
    return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(p));
  };
  const kernels::Replay::Key key = {backward,
                                    address(&workspace),
                                    address(&pass.weights),
                                    address(pass.gradients),
                                    address(pass.dynamic_loss_scale),
                                    address(workspace.backward.d_hidden.data()),
                                    scale,
                                    pass.overwrite_gradients,
                                    pass.dropout_seed.has_value(),
                                    pass.dropout_seed.value_or(0)};
  Pass quiet = pass;
  quiet.listener = nullptr;
  const States before = {workspace.forward, workspace.backward};
  const bool called = replay_->Run(key, [&] {
    workspace.forward = before.forward;
    workspace.backward = before.backward;
    work(quiet);
  });
  if (called) {
    replayed_[key] = {workspace.forward, workspace.backward};
    return true;
  }
  const auto after = replayed_.find(key);
  CHECK(after != replayed_.end());
  workspace.forward = after->second.forward;
  workspace.backward = after->second.backward;
  return false;
}

void PipelineExecutor::ModelForward(const Pass& pass, int chunk, int index) {
  Workspace& workspace = workspaces_[chunk][index];
  const BlockRange& part = model_.parts()[chunk];
  const auto work = [&](const Pass& pass) { model_.Forward(pass, workspace, part); };
  if (!Replays(pass)) return work(pass);
  Replayed(pass, /*backward=*/false, workspace, work);
}

void PipelineExecutor::ModelBackward(const Pass& pass, int chunk, int index) {
  Workspace& workspace = workspaces_[chunk][index];
  const BlockRange& part = model_.parts()[chunk];
  const auto work = [&](const Pass& pass) { model_.Backward(pass, workspace, part); };
  if (!Replays(pass)) return work(pass);
  Replayed(pass, /*backward=*/true, workspace, work);
  if (pass.listener == nullptr) return;
  for (ParameterId id = 0; id < model_.parameters().size(); ++id) pass.listener->GradientReady(id);
}

absl::Status PipelineExecutor::Backward(const BufferedAction& step, const Pass& pass,
                                        MicroBatchClient& client) {
  const int chunk = step.action.chunk, micro_batch = step.action.micro_batch;
  Workspace& workspace = workspaces_[chunk][step.workspace];
  BackwardState& state = workspace.backward;
  Buffer& gradient = gradients_[step.gradient];
  Await(gradient);
  state.d_hidden = gradient.tensor;
  state.d_hidden_summed = false;
  Pass with_gradients = pass;
  with_gradients.gradients =
      step.head_in_forward ? head_gradients_ : &client.BeginGradients(chunk, micro_batch);
  if (IsLastPart(chunk) && !step.head_in_forward) Head(step, with_gradients, client);
  ModelBackward(with_gradients, chunk, step.workspace);
  client.EndGradients(chunk, micro_batch);
  return absl::OkStatus();
}

void PipelineExecutor::Head(const BufferedAction& step, const Pass& with_gradients,
                            MicroBatchClient& client) {
  const int chunk = step.action.chunk;
  Workspace& workspace = workspaces_[chunk][step.workspace];
  // The head computes gradients in its Forward, in scratch memory that the next forward uses.
  workspace.forward.residual = outputs_[step.output].tensor;
  workspace.forward.branch = Tensor();
  workspace.forward.second_branch = Tensor();
  const BlockRange& part = model_.parts()[chunk];
  model_.Forward(with_gradients, workspace, {part.end - 1, part.end});
  client.OnLosses(step.action.micro_batch, workspace.forward.losses);
}

// The head's gradients are computed at once, because their operands are scratch of its Forward.
void PipelineExecutor::BackwardInput(const BufferedAction& step, const Pass& pass,
                                     MicroBatchClient& client) {
  const int chunk = step.action.chunk, micro_batch = step.action.micro_batch;
  Workspace& workspace = workspaces_[chunk][step.workspace];
  Buffer& gradient = gradients_[step.gradient];
  Await(gradient);
  workspace.backward.d_hidden = gradient.tensor;
  workspace.backward.d_hidden_summed = false;
  if (IsLastPart(chunk)) {
    const int group = HeadGroup(chunk);
    Pass with_gradients = pass;
    with_gradients.gradients =
        step.head_in_forward ? head_gradients_ : &client.BeginGradients(group, micro_batch);
    if (!step.head_in_forward) Head(step, with_gradients, client);
    const BlockRange& part = model_.parts()[chunk];
    model_.Backward(with_gradients, workspace, {part.end - 1, part.end});
    client.EndGradients(group, micro_batch);
  }
  model_.BackwardInput(pass, workspace, Trunk(chunk));
}

void PipelineExecutor::BackwardWeights(const BufferedAction& step, const Pass& pass,
                                       MicroBatchClient& client) {
  const int chunk = step.action.chunk, micro_batch = step.action.micro_batch;
  Pass with_gradients = pass;
  with_gradients.gradients = &client.BeginGradients(chunk, micro_batch);
  model_.BackwardWeights(with_gradients, workspaces_[chunk][step.workspace], Trunk(chunk));
  client.EndGradients(chunk, micro_batch);
}

// Starts the exchanges of one group and returns the index behind it.
size_t PipelineExecutor::Exchange(size_t begin) {
  kernels::Stream& stream = exchange_ != nullptr ? *exchange_ : compute_;
  const auto buffer_of = [this](const BufferedAction& step) -> Buffer& {
    switch (step.action.op) {
      case PipelineOp::kSendActivation:
        return outputs_[step.output];
      case PipelineOp::kReceiveActivation:
        return inputs_[step.input];
      default:
        return gradients_[step.gradient];
    }
  };
  size_t end = begin;
  while (end < steps_.size() && IsExchange(steps_[end].action.op) &&
         steps_[end].action.group == steps_[begin].action.group) {
    ++end;
  }
  if (plan_.shape.stages == 1) {
    // One stage: the rank sends to itself, so sends and receives alternate.
    for (size_t i = begin; i + 1 < end; i += 2) {
      kernels::Copy(compute_, buffer_of(steps_[i]).tensor, buffer_of(steps_[i + 1]).tensor);
    }
    return end;
  }
  // Waits until what is sent has been computed, and until the buffers to receive into are not read.
  if (exchange_ != nullptr) {
    compute_.Record(*computed_);
    stream.Wait(*computed_);
  }
  group_.GroupBegin();
  for (size_t i = begin; i < end; ++i) {
    const PipelineAction& action = steps_[i].action;
    const Tensor tensor = buffer_of(steps_[i]).tensor;
    if (action.op == PipelineOp::kSendActivation || action.op == PipelineOp::kSendGradient) {
      group_.Send(stream, tensor, action.peer);
    } else {
      group_.Receive(stream, tensor, action.peer);
    }
  }
  group_.GroupEnd(stream);
  for (size_t i = begin; exchange_ != nullptr && i < end; ++i) {
    Buffer& buffer = buffer_of(steps_[i]);
    stream.Record(*buffer.exchanged);
    buffer.waiting = true;
  }
  return end;
}

absl::Status PipelineExecutor::RunStep(const Pass& pass, MicroBatchClient& client) {
  for (size_t i = 0; i < steps_.size();) {
    const BufferedAction& step = steps_[i];
    if (IsExchange(step.action.op)) {
      i = Exchange(i);
      continue;
    }
    switch (step.action.op) {
      case PipelineOp::kForward:
        RETURN_IF_ERROR(Forward(step, pass, client));
        break;
      case PipelineOp::kBackwardInput:
        BackwardInput(step, pass, client);
        break;
      case PipelineOp::kBackwardWeight:
        BackwardWeights(step, pass, client);
        break;
      default:
        RETURN_IF_ERROR(Backward(step, pass, client));
    }
    ++i;
  }
  for (std::vector<Buffer>* buffers : {&inputs_, &outputs_, &gradients_}) {
    for (Buffer& buffer : *buffers) Await(buffer);
  }
  return status();
}

absl::Status PipelineExecutor::RunForward(const Pass& pass, int micro_batches,
                                          MicroBatchClient& client) {
  const int stages = plan_.shape.stages;
  const int before = (rank_ + stages - 1) % stages, after = (rank_ + 1) % stages;
  // Without gradients nothing is needed after its forward, so one workspace and one buffer of each
  // virtual stage suffice.
  Tensor output;
  for (int i = 0; i < micro_batches; ++i) {
    for (int chunk = 0; chunk < plan_.shape.chunks; ++chunk) {
      Workspace& workspace = workspaces_[chunk].front();
      ForwardState& state = workspace.forward;
      RETURN_IF_ERROR(client.Load(i, workspace.batch));
      if (!IsFirstPart(chunk)) {
        state.residual = inputs_.front().tensor;
        if (stages == 1) {
          kernels::Copy(compute_, output, state.residual);
        } else {
          group_.Receive(compute_, state.residual, before);
        }
      }
      state.branch = Tensor();
      state.second_branch = Tensor();
      model_.Forward(pass, workspace, model_.parts()[chunk]);
      if (IsLastPart(chunk)) {
        client.OnLosses(i, state.losses);
        continue;
      }
      Add(state, outputs_.front());
      output = outputs_.front().tensor;
      if (stages > 1) group_.Send(compute_, output, after);
    }
  }
  return absl::OkStatus();
}

}  // namespace muster::parallel
