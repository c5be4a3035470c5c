// Pipeline schedules as data: pure functions from (schedule, stages, micro-batches, chunks) to one
// action list per rank, a simulator that proves things about such lists, and a picture of them.
// No kernels, no threads, no clock.
//
// A model is cut into stages x chunks contiguous parts (virtual stages), numbered in forward order;
// part `chunk * stages + rank` runs on `rank`. A rank runs, per micro-batch and chunk, a forward
// and a backward (or backward-input and backward-weight), and exchanges activations and their
// gradients with the ranks of the parts before and behind.
//
//   GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards. Keeps M activations.
//   1F1B (Narayanan et al., PipeDream-Flush, arXiv 2006.09503): P - r - 1 forwards to warm up, then
//     pairs of one forward and one backward. Keeps P - r activations, the same bubble.
//   Interleaved 1F1B (Narayanan et al., arXiv 2104.04473): V chunks per rank, walked in groups of G
//     micro-batches; 2 (P - r - 1) + (V - 1) G forwards to warm up. The bubble is V times smaller,
//     the messages are V times as many.
//   Zero-bubble H1 (Qi et al., arXiv 2401.10241): backward is split into the gradient of the input,
//     which the part in front waits for, and that of the weights, which no rank waits for and rank
//     r delays by r micro-batches to fill its idle time. Keeps P activations on every rank, or what
//     the gradient of the weights needs in their place.
//
// With times F, B = I + W per micro-batch and rank, M micro-batches (at least P when
// interleaved or zero-bubble), a step takes
//   GPipe, 1F1B:  M (F + B) + (P - 1) (F + B)
//   interleaved:  M (F + B) + (P - 1) (F + B) / V
//   zero-bubble:  M (F + B) + (P - 1) (F + I - W)
//
// In all of them each chunk's backwards run in the order of the micro-batches, so gradients are
// summed in the same order as without a pipeline.
#ifndef MUSTER_PARALLEL_PIPELINE_SCHEDULE_H_
#define MUSTER_PARALLEL_PIPELINE_SCHEDULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {

enum class PipelineSchedule : uint8_t { kGPipe, kOneForwardOneBackward, kInterleaved, kZeroBubble };
// "gpipe", "1f1b", "interleaved", "zero_bubble": the names of the job spec.
const char* Name(PipelineSchedule schedule);

struct PipelineShape {
  PipelineSchedule schedule = PipelineSchedule::kOneForwardOneBackward;
  int stages = 1;  // ranks along the pipeline axis
  int micro_batches = 1;
  int chunks = 1;  // parts of the model per rank; > 1 with kInterleaved only
  // With kInterleaved: micro-batches that pass one chunk before the next chunk runs, from stages to
  // micro_batches; 0 = min(stages, micro_batches). Larger groups switch chunks less often and keep
  // more activations. A remainder is spread over the groups.
  int group = 0;
};
// kInvalidArgument names the number that is wrong, and what it may be.
absl::Status Validate(const PipelineShape& shape);
// Whether backward is two actions: with zero-bubble, except on one stage, which never waits.
bool SplitsBackward(const PipelineShape& shape);

enum class PipelineOp : uint8_t {
  kForward,
  kBackward,        // gradients of input and weights
  kBackwardInput,   // of the input only
  kBackwardWeight,  // of the weights only
  kSendActivation,
  kReceiveActivation,
  kSendGradient,
  kReceiveGradient,
  // Every micro-batch of the chunk has added its gradients, so they may be reduced over the
  // data-parallel ranks while other chunks (or other ranks) still compute.
  kReduceGradients,
};
inline bool IsExchange(PipelineOp op) {
  return op >= PipelineOp::kSendActivation && op <= PipelineOp::kReceiveGradient;
}

inline bool IsBackward(PipelineOp op) {
  return op == PipelineOp::kBackward || op == PipelineOp::kBackwardInput;
}

struct PipelineAction {
  PipelineOp op = PipelineOp::kForward;
  int chunk = 0;         // of this rank
  int micro_batch = -1;  // -1 with kReduceGradients
  int peer = -1;         // exchanges: the other rank; this rank itself when stages is 1
  // Exchanges that follow each other with the same number run together, so that neither side has to
  // go first (Communicator::GroupBegin). Numbers grow along the list.
  int group = -1;

  friend bool operator==(const PipelineAction& a, const PipelineAction& b) {
    return a.op == b.op && a.chunk == b.chunk && a.micro_batch == b.micro_batch &&
           a.peer == b.peer && a.group == b.group;
  }
};
std::string ToString(const PipelineAction& action);  // "forward of micro-batch 3, chunk 0"

struct PipelinePlan {
  PipelineShape shape;
  std::vector<std::vector<PipelineAction>> ranks;

  int Part(int rank, int chunk) const { return chunk * shape.stages + rank; }
  int parts() const { return shape.stages * shape.chunks; }
};

// The order of exchanges is that of a run in which every action takes one unit of time (with
// chunks, a backward takes two, as it usually does) and a result is sent when it is complete. Both
// sides of a pair have the same order, and exchanges at the same time are one group, which gives
// the fused send/receive of 1F1B. Requires: Validate(shape) is ok.
PipelinePlan MakePipelinePlan(const PipelineShape& shape);

struct PipelineCosts {
  // Times of one micro-batch through one part.
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
  double message = 0;
  // A factor for each part (uneven stages), in forward order; empty = 1.
  std::vector<double> parts;
};

struct TimedAction {
  PipelineAction action;
  double begin = 0;
  double end = 0;
};

struct PipelineSimulation {
  struct Rank {
    std::vector<TimedAction> actions;  // in list order
    double busy = 0;                   // computing
    // The most micro-batches (of one chunk each) at once:
    int activations = 0;  // forward begun, backward not finished: workspaces
    int inputs = 0;       // activation arrived (or begun, on the first part), backward not finished
    int gradients = 0;    // gradient arrived or made, and not yet sent on: buffers of d_hidden
  };
  std::vector<Rank> ranks;
  double seconds = 0;  // until the last rank has finished
  int64_t messages = 0;

  // Idle time over computing time of all ranks: (P - 1) / M for GPipe and 1F1B.
  double bubble() const;
};

enum class ExchangeMode : uint8_t {
  // Exchanges run on the compute stream in list order, and both sides wait for each other. This is
  // the strictest mode: a schedule that ends in it ends on every backend.
  kInline,
  // Exchanges run on a stream of their own in list order; computation waits only for what it reads.
  kOverlapped,
};

// Runs the lists. kFailedPrecondition, with the ranks and actions concerned: a deadlock; a send
// without its receive; an action before the one it needs; an action that is missing or there twice.
absl::StatusOr<PipelineSimulation> Simulate(const PipelinePlan& plan,
                                            const PipelineCosts& costs = {},
                                            ExchangeMode mode = ExchangeMode::kInline);

// One line per rank, time from left to right, one column per unit of the shortest action: "F2" is
// the forward of micro-batch 2, B backward, I and W its two parts; with chunks a letter follows
// ("F2b" is chunk 1); '-' continues an action and '.' is idle time. 1F1B with P = 2, M = 2:
//   rank 0 | F0 F1 .. B0 .. B1
//   rank 1 | .. F0 B0 F1 B1 ..
// and a last line with the bubble and the activations kept per rank. `simulation` is of `plan`.
std::string Draw(const PipelinePlan& plan, const PipelineSimulation& simulation);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_PIPELINE_SCHEDULE_H_
