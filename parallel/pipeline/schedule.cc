#include "parallel/pipeline/schedule.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"

namespace muster::parallel {
namespace {

// The begins of the groups of micro-batches, and the end of the last one. A remainder is spread
// over the first groups: as a group of its own, fewer micro-batches than stages would stall the
// pipeline or end in a deadlock.
std::vector<int> GroupBoundaries(const PipelineShape& shape) {
  const int size = shape.group > 0 ? shape.group : std::min(shape.stages, shape.micro_batches);
  const int groups = shape.micro_batches / size;
  std::vector<int> boundaries = {0};
  for (int i = 0; i < groups; ++i) {
    boundaries.push_back(boundaries.back() + shape.micro_batches / groups +
                         (i < shape.micro_batches % groups ? 1 : 0));
  }
  return boundaries;
}

struct Compute {
  PipelineOp op;
  int chunk;
  int micro_batch;
};

std::vector<Compute> GPipeOrder(const PipelineShape& shape) {
  std::vector<Compute> order;
  for (int i = 0; i < shape.micro_batches; ++i) order.push_back({PipelineOp::kForward, 0, i});
  for (int i = 0; i < shape.micro_batches; ++i) order.push_back({PipelineOp::kBackward, 0, i});
  return order;
}

// `warm_up` forwards, then one forward and one backward in turn, then the remaining backwards.
std::vector<Compute> WarmUpThenPairs(const std::vector<std::pair<int, int>>& forwards,
                                     const std::vector<std::pair<int, int>>& backwards,
                                     size_t warm_up) {
  std::vector<Compute> order;
  size_t forward = 0;
  const auto add_forward = [&] {
    if (forward == forwards.size()) return;
    order.push_back({PipelineOp::kForward, forwards[forward].first, forwards[forward].second});
    ++forward;
  };
  while (forward < warm_up) add_forward();
  for (const auto& [chunk, micro_batch] : backwards) {
    add_forward();
    order.push_back({PipelineOp::kBackward, chunk, micro_batch});
  }
  return order;
}

// (chunk, micro-batch) in forward order; one chunk is plain 1F1B.
std::vector<Compute> InterleavedOrder(const PipelineShape& shape, int rank) {
  std::vector<std::pair<int, int>> forwards, backwards;
  const std::vector<int> groups = GroupBoundaries(shape);
  for (size_t g = 0; g + 1 < groups.size(); ++g) {
    for (int chunk = 0; chunk < shape.chunks; ++chunk) {
      for (int i = groups[g]; i < groups[g + 1]; ++i) {
        forwards.emplace_back(chunk, i);
        backwards.emplace_back(shape.chunks - 1 - chunk, i);
      }
    }
  }
  const int distance = shape.stages - rank - 1;
  const int warm_up = shape.chunks == 1 ? distance : 2 * distance + (shape.chunks - 1) * groups[1];
  return WarmUpThenPairs(forwards, backwards,
                         std::min(forwards.size(), static_cast<size_t>(warm_up)));
}

std::vector<Compute> ZeroBubbleOrder(const PipelineShape& shape, int rank) {
  std::vector<Compute> order;
  int forward = 0, weight = 0;
  const auto add_forward = [&] {
    if (forward < shape.micro_batches) order.push_back({PipelineOp::kForward, 0, forward++});
  };
  while (forward < std::min(shape.stages - rank - 1, shape.micro_batches)) add_forward();
  for (int i = 0; i < shape.micro_batches; ++i) {
    add_forward();
    order.push_back({PipelineOp::kBackwardInput, 0, i});
    if (i >= rank) order.push_back({PipelineOp::kBackwardWeight, 0, weight++});
  }
  while (weight < shape.micro_batches) {
    order.push_back({PipelineOp::kBackwardWeight, 0, weight++});
  }
  return order;
}

std::vector<Compute> ComputeOrder(const PipelineShape& shape, int rank) {
  switch (shape.schedule) {
    case PipelineSchedule::kGPipe:
      return GPipeOrder(shape);
    case PipelineSchedule::kZeroBubble:
      if (SplitsBackward(shape)) return ZeroBubbleOrder(shape, rank);
      break;
    case PipelineSchedule::kOneForwardOneBackward:
    case PipelineSchedule::kInterleaved:
      break;
  }
  return InterleavedOrder(shape, rank);
}

struct Message {
  int time;
  bool gradient;
  int micro_batch;
  int part;  // the part that computed it

  friend bool operator<(const Message& a, const Message& b) {
    return std::tie(a.time, a.gradient, a.micro_batch, a.part) <
           std::tie(b.time, b.gradient, b.micro_batch, b.part);
  }
};

// Simulates the run that decides the order of exchanges: when each action starts and what is sent
// when.
class UnitRun {
 public:
  explicit UnitRun(const PipelineShape& shape)
      : shape_(shape),
        parts_(shape.stages * shape.chunks),
        forward_end_(static_cast<size_t>(parts_) * shape.micro_batches, kNever),
        backward_end_(forward_end_) {
    for (int rank = 0; rank < shape.stages; ++rank) orders_.push_back(ComputeOrder(shape, rank));
    starts_.resize(orders_.size());
    std::vector<int> clocks(orders_.size(), 0);
    for (bool progress = true; progress;) {
      progress = false;
      for (size_t rank = 0; rank < orders_.size(); ++rank) {
        while (Advance(rank, clocks[rank])) progress = true;
      }
    }
    for (size_t rank = 0; rank < orders_.size(); ++rank) {
      CHECK_EQ(starts_[rank].size(), orders_[rank].size()) << "the order of rank " << rank;
    }
    std::sort(messages_.begin(), messages_.end());
  }

  const std::vector<Compute>& order(int rank) const { return orders_[rank]; }
  const std::vector<int>& starts(int rank) const { return starts_[rank]; }
  const std::vector<Message>& messages() const { return messages_; }

 private:
  static constexpr int kNever = -1;

  int& End(std::vector<int>& ends, int part, int micro_batch) const {
    return ends[static_cast<size_t>(part) * shape_.micro_batches + micro_batch];
  }

  int Duration(PipelineOp op) const {
    return op == PipelineOp::kBackward && shape_.chunks > 1 ? 2 : 1;
  }

  // Runs the next action of `rank` if the times of its inputs are known.
  bool Advance(size_t rank, int& clock) {
    const size_t next = starts_[rank].size();
    if (next == orders_[rank].size()) return false;
    const auto& [op, chunk, micro_batch] = orders_[rank][next];
    const int part = chunk * shape_.stages + static_cast<int>(rank);
    int ready = 0;
    if (op == PipelineOp::kForward) {
      if (part > 0) ready = End(forward_end_, part - 1, micro_batch);
    } else if (End(forward_end_, part, micro_batch) == kNever) {
      return false;
    } else if (op != PipelineOp::kBackwardWeight && part + 1 < parts_) {
      ready = End(backward_end_, part + 1, micro_batch);
    }
    if (ready == kNever) return false;
    const int start = std::max(clock, ready);
    starts_[rank].push_back(start);
    clock = start + Duration(op);
    if (op == PipelineOp::kForward) {
      End(forward_end_, part, micro_batch) = clock;
      if (part + 1 < parts_) messages_.push_back({clock, false, micro_batch, part});
    } else if (op != PipelineOp::kBackwardWeight) {
      End(backward_end_, part, micro_batch) = clock;
      if (part > 0) messages_.push_back({clock, true, micro_batch, part});
    }
    return true;
  }

  const PipelineShape& shape_;
  const int parts_;
  std::vector<std::vector<Compute>> orders_;
  std::vector<std::vector<int>> starts_;
  std::vector<int> forward_end_, backward_end_;  // by part and micro-batch
  std::vector<Message> messages_;
};

// The actions of `rank` for `message`: none, the send, the receive, or both.
void AddExchange(const PipelineShape& shape, int rank, const Message& message,
                 std::vector<PipelineAction>& actions) {
  const int target = message.part + (message.gradient ? -1 : 1);
  const int from = message.part % shape.stages, to = target % shape.stages;
  if (from == rank) {
    actions.push_back({message.gradient ? PipelineOp::kSendGradient : PipelineOp::kSendActivation,
                       message.part / shape.stages, message.micro_batch, to, message.time});
  }
  if (to == rank) {
    actions.push_back(
        {message.gradient ? PipelineOp::kReceiveGradient : PipelineOp::kReceiveActivation,
         target / shape.stages, message.micro_batch, from, message.time});
  }
}

bool CompletesGradients(const PipelineShape& shape, const Compute& compute) {
  return compute.micro_batch == shape.micro_batches - 1 &&
         (compute.op == PipelineOp::kBackward || compute.op == PipelineOp::kBackwardWeight);
}

}  // namespace

const char* Name(PipelineSchedule schedule) {
  switch (schedule) {
    case PipelineSchedule::kGPipe:
      return "gpipe";
    case PipelineSchedule::kOneForwardOneBackward:
      return "1f1b";
    case PipelineSchedule::kInterleaved:
      return "interleaved";
    case PipelineSchedule::kZeroBubble:
      return "zero_bubble";
  }
  return "unknown";
}

std::string ToString(const PipelineAction& action) {
  constexpr const char* kNames[] = {"forward",
                                    "backward",
                                    "backward of the input",
                                    "backward of the weights",
                                    "send of the activation",
                                    "receive of the activation",
                                    "send of the gradient",
                                    "receive of the gradient",
                                    "reduction of the gradients"};
  std::string text = kNames[static_cast<size_t>(action.op)];
  if (action.micro_batch >= 0) absl::StrAppend(&text, " of micro-batch ", action.micro_batch);
  absl::StrAppend(&text, ", chunk ", action.chunk);
  if (action.peer >= 0) absl::StrAppend(&text, ", with rank ", action.peer);
  return text;
}

bool SplitsBackward(const PipelineShape& shape) {
  return shape.schedule == PipelineSchedule::kZeroBubble && shape.stages > 1;
}

absl::Status Validate(const PipelineShape& shape) {
  if (shape.stages < 1 || shape.micro_batches < 1 || shape.chunks < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a pipeline of %d stages, %d micro-batches and %d chunks per rank: each "
                        "must be at least 1",
                        shape.stages, shape.micro_batches, shape.chunks));
  }
  const bool interleaved = shape.schedule == PipelineSchedule::kInterleaved;
  if (shape.chunks > 1 && !interleaved) {
    return absl::InvalidArgumentError(
        absl::StrFormat("schedule %s runs one chunk per rank, not %d; interleaved runs several",
                        Name(shape.schedule), shape.chunks));
  }
  if (shape.group != 0 && !interleaved) {
    return absl::InvalidArgumentError(
        absl::StrFormat("schedule %s has no groups of micro-batches (group is %d)",
                        Name(shape.schedule), shape.group));
  }
  const int group_min = std::min(shape.stages, shape.micro_batches);
  if (shape.group != 0 && (shape.group < group_min || shape.group > shape.micro_batches)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "groups of %d micro-batches: with %d stages and %d micro-batches a group "
        "has %d to %d",
        shape.group, shape.stages, shape.micro_batches, group_min, shape.micro_batches));
  }
  return absl::OkStatus();
}

PipelinePlan MakePipelinePlan(const PipelineShape& shape) {
  CHECK_OK(Validate(shape));
  const UnitRun run(shape);
  PipelinePlan plan;
  plan.shape = shape;
  for (int rank = 0; rank < shape.stages; ++rank) {
    std::vector<PipelineAction> actions;
    const std::vector<Compute>& order = run.order(rank);
    size_t next = 0;
    const auto compute_before = [&](int time) {
      for (; next < order.size() && run.starts(rank)[next] < time; ++next) {
        actions.push_back({order[next].op, order[next].chunk, order[next].micro_batch});
        if (CompletesGradients(shape, order[next])) {
          actions.push_back({PipelineOp::kReduceGradients, order[next].chunk});
        }
      }
    };
    for (const Message& message : run.messages()) {
      compute_before(message.time);
      AddExchange(shape, rank, message, actions);
    }
    compute_before(std::numeric_limits<int>::max());
    plan.ranks.push_back(std::move(actions));
  }
  return plan;
}

}  // namespace muster::parallel
