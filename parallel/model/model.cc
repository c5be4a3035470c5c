#include "parallel/model/model.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kernels/device/range.h"

namespace muster::parallel {

using kernels::DType;

void Block::BackwardInput(const Pass&, const ModelBatch&, BackwardState&, Saved&) const {
  CHECK(false) << "the backward of block " << name() << " cannot be split";
}

void Block::BackwardWeights(const Pass&, const ModelBatch&, BackwardState&, Saved&) const {
  CHECK(false) << "the backward of block " << name() << " cannot be split";
}

Model::Model(ModelDescription description, Shape shape,
             std::unique_ptr<ParameterRegistry> parameters,
             std::vector<std::unique_ptr<Block>> blocks, FlopsPerToken flops_per_token,
             std::vector<BlockRange> parts)
    : description_(std::move(description)),
      shape_(shape),
      parameters_(std::move(parameters)),
      blocks_(std::move(blocks)),
      flops_per_token_(flops_per_token),
      parts_(std::move(parts)) {
  if (parts_.empty()) parts_ = {{0, static_cast<int>(blocks_.size())}};
}

bool Model::offloads() const {
  return std::any_of(blocks_.begin(), blocks_.end(),
                     [](const auto& block) { return block->offloads(); });
}

Workspace Model::TakeWorkspace(kernels::Arena& arena, const BatchShape& shape,
                               const GradientOverlay* overlay) const {
  const BlockRange all = {0, static_cast<int>(blocks_.size())};
  Workspace workspace = TakeSaved(arena, shape, all, overlay);
  workspace.backward.d_hidden =
      arena.Take("scratch", shape.activation, {HiddenRows(shape), shape_.hidden});
  TakeScratch(arena, workspace);
  return workspace;
}

Workspace Model::TakeSaved(kernels::Arena& arena, const BatchShape& shape, BlockRange range,
                           const GradientOverlay* overlay) const {
  CHECK_LE(shape.sequence * shape_.context_size, shape_.sequence_max);
  CHECK(!shape_.sequence_parallel || shape.tokens() % shape_.tensor_size == 0)
      << shape.tokens() << " tokens over " << shape_.tensor_size << " ranks";
  const int64_t tokens = shape.tokens();
  Workspace workspace;
  workspace.first_block = range.begin;
  workspace.batch.shape = shape;
  workspace.batch.tokens = arena.Take("inputs", DType::kI32, {tokens});
  workspace.batch.targets = arena.Take("inputs", DType::kI32, {tokens});
  if (shape_.rotary_width > 0) {
    workspace.batch.rotary =
        arena.Take("inputs", DType::kF32, {shape.sequence, shape_.rotary_width});
  }
  if (shape_.documents) {
    workspace.batch.documents =
        arena.Take("inputs", DType::kI32, {shape.batch, shape.sequence * shape_.context_size});
  }
  if (shape_.dropout) workspace.batch.sample = arena.Take("inputs", DType::kI32, {2});
  if (overlay != nullptr) {
    TakeSharing(arena, *overlay, range, workspace);
    return workspace;
  }
  ActivationSlots& slots = workspace.slots;
  for (int i = range.begin; i < range.end; ++i) {
    if (!blocks_[i]->offloads()) continue;
    kernels::Arena size;
    blocks_[i]->TakeSaved(size, shape);
    if (slots.count() == 0) slots.first = i;
    CHECK_EQ(i, slots.first + slots.count()) << "blocks that offload follow each other";
    slots.bytes.push_back(size.Mark());
  }
  int64_t base = 0;  // offset of the slots
  for (int i = range.begin; i < range.end; ++i) {
    if (!slots.Covers(i)) {
      workspace.saved.push_back(blocks_[i]->TakeSaved(arena, shape));
      continue;
    }
    const int index = i - slots.first;
    if (index == 0) base = arena.Mark();
    arena.ReleaseTo(base);
    if (const int slot = index % ActivationSlots::kSlots; slot > 0) {
      arena.Take("activations", DType::kU8, {slots.slot_offset(slot)});
    }
    workspace.saved.push_back(blocks_[i]->TakeSaved(arena, shape));
    // The next block takes memory behind the slots, unless it offloads too.
    arena.ReleaseTo(base);
    slots.slots =
        arena.Take("activations", DType::kU8, {slots.slot_offset(ActivationSlots::kSlots)});
  }
  return workspace;
}

// Backward frees activations and writes gradients from the last block to the first. Both lie in
// that order, with the activations offset as far as the gradients of every block need.
void Model::TakeSharing(kernels::Arena& arena, const GradientOverlay& overlay, BlockRange range,
                        Workspace& workspace) const {
  CHECK_EQ(static_cast<int>(overlay.ends.size()), range.end - range.begin);
  const BatchShape& shape = workspace.batch.shape;
  kernels::Arena sizes;
  int64_t apart = 0;
  for (int i = range.end; i-- > range.begin;) {
    CHECK(!blocks_[i]->offloads()) << blocks_[i]->name();
    apart = std::max(apart, overlay.ends[i - range.begin] - sizes.Mark());
    blocks_[i]->TakeSaved(sizes, shape);
  }
  const int64_t begin = arena.Mark();
  const kernels::Tensor front = arena.Take("gradients", DType::kU8, {apart});
  workspace.saved.resize(range.end - range.begin);
  for (int i = range.end; i-- > range.begin;) {
    workspace.saved[i - range.begin] = blocks_[i]->TakeSaved(arena, shape);
  }
  // Taken even when it is empty, so that all ranks of a tensor group make the same takes.
  const int64_t rest = overlay.bytes - (arena.Mark() - begin);
  arena.Take("gradients", DType::kU8, {std::max<int64_t>(rest, 0)});
  workspace.gradients = kernels::Tensor(front.data(), DType::kU8, {overlay.bytes});
}

void Model::TakeScratch(kernels::Arena& arena, Workspace& workspace) const {
  ModelBatch& batch = workspace.batch;
  batch.branch_storage =
      arena.Take("scratch", batch.shape.activation, {batch.shape.tokens(), shape_.hidden});
  if (shape_.sequence_parallel && shape_.tensor_overlap != TensorOverlap::kNone) {
    batch.gathered =
        arena.Take("scratch", batch.shape.activation, {batch.shape.tokens(), shape_.hidden});
  }
  if (shape_.sums_hidden_gradient) {
    workspace.backward.d_hidden_sums = arena.Take("scratch", DType::kF32, {shape_.hidden});
  }
  const int64_t mark = arena.Mark();
  for (size_t i = 0; i < workspace.saved.size(); ++i) {
    arena.ReleaseTo(mark);
    blocks_[workspace.first_block + i]->TakeScratch(arena, batch.shape, *workspace.saved[i]);
  }
}

void Model::Forward(const Pass& pass, Workspace& workspace) const {
  const int blocks = static_cast<int>(blocks_.size());
  workspace.forward.branch = kernels::Tensor();
  workspace.forward.second_branch = kernels::Tensor();
  Forward(pass, workspace, {0, blocks});
}

void Model::Backward(const Pass& pass, Workspace& workspace) const {
  Backward(pass, workspace, {0, static_cast<int>(blocks_.size())});
}

void Model::Forward(const Pass& pass, Workspace& workspace, BlockRange range) const {
  const kernels::Range forward(pass.stream, "forward", pass.trace);
  CHECK(shape_.tensor_size == 1 ||
        (pass.tensor != nullptr && pass.tensor->size() == shape_.tensor_size))
      << "the model was cut for a tensor-parallel group of " << shape_.tensor_size;
  WriteRotaryTable(pass, workspace.batch);
  for (int i = range.begin; i < range.end; ++i) {
    const bool gradients =
        pass.head == HeadMode::kLossAndGradient && blocks_[i]->AddsGradientsInForward();
    const BlockWork work = gradients ? BlockWork::kForwardAndGradients : BlockWork::kForward;
    if (pass.gate != nullptr) pass.gate->Acquire(i, work);
    const kernels::Range shown(pass.stream, blocks_[i]->name(), pass.trace);
    const bool offloads = workspace.offload != nullptr && workspace.slots.Covers(i);
    if (offloads) workspace.offload->BeforeForward(pass.stream, i);
    const bool followed = i + 1 < range.end;
    workspace.forward.next_sum =
        followed ? blocks_[i + 1]->SumStorage(*workspace.saved[i + 1 - workspace.first_block])
                 : kernels::Tensor();
    // With offloaded activations, the memory of the next block may not be free yet.
    workspace.forward.await_next_sum = nullptr;
    if (followed && workspace.offload != nullptr && workspace.slots.Covers(i + 1)) {
      workspace.forward.await_next_sum = [&workspace, &pass, next = i + 1] {
        workspace.offload->BeforeForward(pass.stream, next);
      };
    }
    const std::vector<ParameterId> begins = followed && workspace.slots.copied() == 0
                                                ? blocks_[i + 1]->BeginsWith()
                                                : std::vector<ParameterId>();
    const bool ahead = !begins.empty() && (pass.gate == nullptr || pass.gate->AcquireEarly(begins));
    workspace.forward.next = ahead ? blocks_[i + 1].get() : nullptr;
    workspace.forward.next_saved =
        ahead ? workspace.saved[i + 1 - workspace.first_block].get() : nullptr;
    blocks_[i]->Forward(pass, workspace.batch, workspace.forward,
                        *workspace.saved[i - workspace.first_block]);
    if (offloads && pass.head == HeadMode::kLossAndGradient) {
      workspace.offload->AfterForward(pass.stream, i);
    }
    if (pass.gate != nullptr) pass.gate->Release(i, work);
  }
}

// Written in every pass, which costs little, so that it always fits the positions at hand.
void Model::WriteRotaryTable(const Pass& pass, const ModelBatch& batch) const {
  if (shape_.rotary_width == 0) return;
  kernels::RotaryTableArgs args;
  args.table = batch.rotary;
  args.positions = batch.positions;
  args.first_position = batch.first_position;
  args.theta = static_cast<float>(shape_.rope_theta);
  args.scaling = shape_.rope_scaling;
  kernels::RotaryTable(pass.stream, args);
}

template <typename Run>
void Model::BackwardThrough(const Pass& pass, Workspace& workspace, BlockRange range,
                            BlockWork work, Run run) const {
  const kernels::Range backward(pass.stream, "backward", pass.trace);
  for (int i = range.end; i-- > range.begin;) {
    // Forward has acquired the memory of these gradients, and they are in it.
    const BlockWork of_block =
        blocks_[i]->AddsGradientsInForward() ? BlockWork::kBackwardInput : work;
    if (pass.gate != nullptr) pass.gate->Acquire(i, of_block);
    const kernels::Range shown(pass.stream, blocks_[i]->name(), pass.trace);
    workspace.backward.more_behind = i > range.begin;
    run(i, *workspace.saved[i - workspace.first_block]);
    if (pass.gate != nullptr) pass.gate->Release(i, of_block);
  }
}

void Model::Backward(const Pass& pass, Workspace& workspace, BlockRange range) const {
  CHECK(pass.gradients != nullptr);
  CHECK(workspace.slots.copied() == 0 || workspace.offload != nullptr)
      << "activations have been overwritten";
  BackwardThrough(pass, workspace, range, BlockWork::kBackward, [&](int i, Block::Saved& saved) {
    const bool offloads = workspace.offload != nullptr && workspace.slots.Covers(i);
    if (offloads) workspace.offload->BeforeBackward(pass.stream, i);
    blocks_[i]->Backward(pass, workspace.batch, workspace.backward, saved);
    if (offloads) workspace.offload->AfterBackward(pass.stream, i);
  });
}

void Model::BackwardInput(const Pass& pass, Workspace& workspace, BlockRange range) const {
  CHECK(shape_.split_backward);
  BackwardThrough(pass, workspace, range, BlockWork::kBackwardInput,
                  [&](int i, Block::Saved& saved) {
                    blocks_[i]->BackwardInput(pass, workspace.batch, workspace.backward, saved);
                  });
}

void Model::BackwardWeights(const Pass& pass, Workspace& workspace, BlockRange range) const {
  CHECK(shape_.split_backward && pass.gradients != nullptr);
  BackwardThrough(pass, workspace, range, BlockWork::kBackwardWeights,
                  [&](int i, Block::Saved& saved) {
                    blocks_[i]->BackwardWeights(pass, workspace.batch, workspace.backward, saved);
                  });
}

}  // namespace muster::parallel
