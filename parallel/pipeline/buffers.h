// Which buffer each action of a rank uses, so that a step needs as few of them as its schedule
// allows. Pure.
#ifndef MUSTER_PARALLEL_PIPELINE_BUFFERS_H_
#define MUSTER_PARALLEL_PIPELINE_BUFFERS_H_

#include <vector>

#include "parallel/pipeline/schedule.h"

namespace muster::parallel {

// One action and the indices of the buffers that it uses; -1: none.
struct BufferedAction {
  PipelineAction action;
  int workspace = -1;  // of the action's chunk
  int loaded = -1;     // workspace of the first chunk, same micro-batch
  // Tensors that are exchanged: of the chunk's input, its output, and the gradient of either.
  int input = -1, output = -1, gradient = -1;
  bool head_in_forward = false;  // last virtual stage: its backward comes next
};

// The most buffers that are in use at once.
struct BufferCounts {
  std::vector<int> workspaces;  // by chunk
  int inputs = 0, outputs = 0, gradients = 0;
};

struct BufferPlan {
  std::vector<BufferedAction> steps;  // in list order, without kReduceGradients
  BufferCounts counts;
};

// Walks the rank's list once, in the order of a step, and gives each action the lowest free index.
// Requires: a plan that Simulate() accepts.
BufferPlan AssignBuffers(const PipelinePlan& plan, int rank);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_PIPELINE_BUFFERS_H_
