#include "parallel/model/model.h"

#include <utility>

#include "base/check.h"

namespace muster::parallel {

using kernels::DType;

Model::Model(ModelDescription description, Shape shape,
             std::unique_ptr<ParameterRegistry> parameters,
             std::vector<std::unique_ptr<Block>> blocks, int64_t flops_per_token)
    : description_(std::move(description)),
      shape_(shape),
      parameters_(std::move(parameters)),
      blocks_(std::move(blocks)),
      flops_per_token_(flops_per_token) {}

Workspace Model::TakeWorkspace(kernels::Arena& arena, const BatchShape& shape) const {
  CHECK_LE(shape.sequence, shape_.sequence_max);
  const int64_t tokens = shape.tokens();
  Workspace workspace;
  Flow& flow = workspace.flow;
  flow.shape = shape;
  flow.tokens = arena.Take("inputs", DType::kI32, {tokens});
  flow.targets = arena.Take("inputs", DType::kI32, {tokens});
  for (const auto& block : blocks_) workspace.saved.push_back(block->TakeSaved(arena, shape));
  flow.branch_storage = arena.Take("scratch", shape.activation, {tokens, shape_.hidden});
  flow.d_hidden = arena.Take("scratch", shape.activation, {tokens, shape_.hidden});
  const int64_t mark = arena.Mark();
  for (size_t i = 0; i < blocks_.size(); ++i) {
    arena.ReleaseTo(mark);
    blocks_[i]->TakeScratch(arena, shape, *workspace.saved[i]);
  }
  return workspace;
}

void Model::Forward(const Pass& pass, Workspace& workspace) const {
  workspace.flow.branch = kernels::Tensor();
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (pass.gate != nullptr) pass.gate->Acquire(static_cast<int>(i), /*backward=*/false);
    blocks_[i]->Forward(pass, workspace.flow, *workspace.saved[i]);
    if (pass.gate != nullptr) pass.gate->Release(static_cast<int>(i), /*backward=*/false);
  }
}

void Model::Backward(const Pass& pass, Workspace& workspace) const {
  CHECK(pass.gradients != nullptr);
  for (size_t i = blocks_.size(); i-- > 0;) {
    if (pass.gate != nullptr) pass.gate->Acquire(static_cast<int>(i), /*backward=*/true);
    blocks_[i]->Backward(pass, workspace.flow, *workspace.saved[i]);
    if (pass.gate != nullptr) pass.gate->Release(static_cast<int>(i), /*backward=*/true);
  }
}

}  // namespace muster::parallel
