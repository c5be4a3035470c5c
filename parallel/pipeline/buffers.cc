#include "parallel/pipeline/buffers.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/check.h"

namespace muster::parallel {
namespace {

// Hands out the lowest free index, and counts the most that were in use at once.
class IndexPool {
 public:
  int Acquire() {
    const auto free = std::find(used_.begin(), used_.end(), false);
    const int index = static_cast<int>(free - used_.begin());
    if (free == used_.end()) used_.push_back(false);
    used_[index] = true;
    return index;
  }
  void Release(int index) {
    CHECK(used_[index]);
    used_[index] = false;
  }
  int size() const { return static_cast<int>(used_.size()); }

 private:
  std::vector<bool> used_;
};

bool IsCompute(PipelineOp op) { return op <= PipelineOp::kBackwardWeight; }

}  // namespace

BufferPlan AssignBuffers(const PipelinePlan& plan, int rank) {
  BufferPlan buffers;
  const std::vector<PipelineAction>& actions = plan.ranks[rank];
  std::vector<IndexPool> workspaces(plan.shape.chunks);
  IndexPool inputs, outputs, gradients;
  std::map<std::pair<int, int>, BufferedAction> open;  // by virtual stage and micro-batch
  // Buffers that a group sends are free after the group, not for its own receives.
  std::vector<std::pair<IndexPool*, int>> sending;
  int group = -1;
  for (size_t i = 0; i < actions.size(); ++i) {
    const PipelineAction& action = actions[i];
    if (action.op == PipelineOp::kReduceGradients) continue;
    if (action.group != group) {
      for (const auto& [pool, index] : sending) pool->Release(index);
      sending.clear();
      group = action.group;
    }
    BufferedAction& step = open[{action.chunk, action.micro_batch}];
    const int part = plan.Part(rank, action.chunk);
    const bool first = part == 0, last = part + 1 == plan.parts();
    step.action = action;
    switch (action.op) {
      case PipelineOp::kReceiveActivation:
        step.input = inputs.Acquire();
        break;
      case PipelineOp::kForward: {
        step.workspace = workspaces[action.chunk].Acquire();
        // The first virtual stage's backward is the last one, so its workspace outlives the others.
        step.loaded = open[{0, action.micro_batch}].workspace;
        const auto next = std::find_if(actions.begin() + static_cast<int64_t>(i) + 1, actions.end(),
                                       [](const PipelineAction& a) { return IsCompute(a.op); });
        step.head_in_forward = last && IsBackward(next->op) && next->chunk == action.chunk &&
                               next->micro_batch == action.micro_batch;
        if (!step.head_in_forward) step.output = outputs.Acquire();
        break;
      }
      case PipelineOp::kReceiveGradient:
        step.gradient = gradients.Acquire();
        break;
      case PipelineOp::kBackward:
      case PipelineOp::kBackwardInput:
        if (last) step.gradient = gradients.Acquire();
        break;
      default:
        break;
    }
    buffers.steps.push_back(step);
    if (action.op == PipelineOp::kSendActivation) sending.emplace_back(&outputs, step.output);
    if (action.op == PipelineOp::kBackward || action.op == PipelineOp::kBackwardWeight) {
      workspaces[action.chunk].Release(step.workspace);
    }
    if (IsBackward(action.op)) {
      if (!first) inputs.Release(step.input);
      if (last && step.output >= 0) outputs.Release(step.output);
      if (first) gradients.Release(step.gradient);
    }
    if (action.op == PipelineOp::kSendGradient) sending.emplace_back(&gradients, step.gradient);
  }
  for (const IndexPool& pool : workspaces) buffers.counts.workspaces.push_back(pool.size());
  buffers.counts.inputs = inputs.size();
  buffers.counts.outputs = outputs.size();
  buffers.counts.gradients = gradients.size();
  return buffers;
}

}  // namespace muster::parallel
