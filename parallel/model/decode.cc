#include "parallel/model/decode.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/arena.h"
#include "kernels/device/range.h"
#include "kernels/tensor.h"
#include "parallel/model/model.h"

namespace muster::parallel {

using kernels::DType;

absl::StatusOr<std::unique_ptr<BlockState>> Block::TakeState(kernels::Arena&,
                                                             const DecodeShape&) const {
  return absl::UnimplementedError(absl::StrCat(name(), ": it keeps nothing of the tokens so far"));
}

void Block::Decode(const Pass& pass, const ModelBatch& batch, ForwardState& state, Saved& saved,
                   BlockState&) const {
  Forward(pass, batch, state, saved);
}

absl::Status Model::CheckDecode() const {
  if (shape_.tensor_size > 1) {
    return absl::UnimplementedError(
        absl::StrCat("the model was cut for a tensor-parallel group of ", shape_.tensor_size,
                     " ranks; decoding takes one"));
  }
  if (shape_.documents) {
    return absl::UnimplementedError("the model keeps documents apart; a text is one document");
  }
  kernels::Arena sizes;
  for (const auto& block : blocks_) {
    RETURN_IF_ERROR(block->TakeState(sizes, {.batch = 1, .context = 1}).status());
  }
  return absl::OkStatus();
}

bool Model::limits_text() const {
  return std::any_of(blocks_.begin(), blocks_.end(),
                     [](const auto& block) { return block->limits_text(); });
}

DecodeState Model::TakeDecodeState(kernels::Arena& arena, const DecodeShape& shape) const {
  CHECK(!limits_text() || shape.context <= shape_.sequence_max)
      << "texts of " << shape.context << " tokens";
  DecodeState state;
  for (const auto& block : blocks_) {
    absl::StatusOr<std::unique_ptr<BlockState>> own = block->TakeState(arena, shape);
    CHECK_OK(own);
    state.blocks.push_back(*std::move(own));
  }
  return state;
}

Workspace Model::TakeDecodeWorkspace(kernels::Arena& arena, const BatchShape& shape) const {
  CHECK_LE(shape.sequence, shape_.sequence_max);
  // A block reads what the one in front of it has left and writes into memory of the next, so three
  // of them are in use.
  constexpr int kSlots = 3;
  Workspace workspace;
  ModelBatch& batch = workspace.batch;
  batch.shape = shape;
  batch.tokens = arena.Take("inputs", DType::kI32, {shape.tokens()});
  if (shape_.rotary_width > 0) {
    batch.rotary = arena.Take("inputs", DType::kF32, {shape.sequence, shape_.rotary_width});
  }
  int64_t bytes = 0;  // of a slot
  for (const auto& block : blocks_) {
    kernels::Arena sizes;
    block->TakeSaved(sizes, shape);
    bytes = std::max(bytes, sizes.Mark());
  }
  const int64_t base = arena.Mark();
  for (int i = 0; i < static_cast<int>(blocks_.size()); ++i) {
    arena.ReleaseTo(base);
    arena.Take("activations", DType::kU8, {i % kSlots * bytes});
    workspace.saved.push_back(blocks_[i]->TakeSaved(arena, shape));
  }
  arena.ReleaseTo(base);
  arena.Take("activations", DType::kU8, {kSlots * bytes});
  TakeScratch(arena, workspace);
  return workspace;
}

void Model::Decode(const Pass& pass, Workspace& workspace, DecodeState& state) const {
  const kernels::Range decode(pass.stream, "decode", pass.trace);
  ModelBatch& batch = workspace.batch;
  const int64_t count = batch.shape.sequence;
  CHECK(pass.head == HeadMode::kLogits);
  CHECK_EQ(state.blocks.size(), blocks_.size());
  CHECK_EQ(workspace.saved.size(), blocks_.size());
  workspace.forward.branch = kernels::Tensor();
  batch.first_position = state.length;
  batch.logits_begin = count - 1;
  batch.logits_step = count;
  WriteRotaryTable(pass, batch);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const kernels::Range shown(pass.stream, blocks_[i]->name(), pass.trace);
    workspace.forward.next_sum = i + 1 < blocks_.size()
                                     ? blocks_[i + 1]->SumStorage(*workspace.saved[i + 1])
                                     : kernels::Tensor();
    blocks_[i]->Decode(pass, batch, workspace.forward, *workspace.saved[i], *state.blocks[i]);
  }
  state.length += count;
}

}  // namespace muster::parallel
