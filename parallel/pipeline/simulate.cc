#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/pipeline/schedule.h"

namespace muster::parallel {
namespace {

constexpr double kNever = -1;

bool EndsBackward(PipelineOp op) {
  return op == PipelineOp::kBackward || op == PipelineOp::kBackwardWeight;
}

// Times of events, by part and micro-batch.
class Times {
 public:
  explicit Times(const PipelinePlan& plan)
      : micro_batches_(plan.shape.micro_batches),
        times_(static_cast<size_t>(plan.parts()) * micro_batches_, kNever) {}
  double& at(int part, int micro_batch) {
    return times_[static_cast<size_t>(part) * micro_batches_ + micro_batch];
  }
  bool complete() const { return std::find(times_.begin(), times_.end(), kNever) == times_.end(); }

 private:
  int micro_batches_;
  std::vector<double> times_;
};

// Both sides of one message.
struct PostedMessage {
  const PipelineAction* send = nullptr;
  const PipelineAction* receive = nullptr;
  double sent = kNever;
  double received = kNever;
};

// Actions of one rank that run in order: all of them, or only computation, or only exchanges.
struct Queue {
  int rank = 0;
  std::vector<size_t> actions;  // indices into the rank's list
  size_t next = 0;
  double clock = 0;
  bool posted = false;  // the group at `next`
};

class Simulator {
 public:
  Simulator(const PipelinePlan& plan, const PipelineCosts& costs, ExchangeMode mode)
      : plan_(plan),
        costs_(costs),
        forward_(plan),
        backward_input_(plan),
        backward_weight_(plan),
        activation_(plan),
        gradient_(plan) {
    for (int rank = 0; rank < plan.shape.stages; ++rank) {
      Queue first = {.rank = rank}, second = {.rank = rank};
      for (size_t i = 0; i < plan.ranks[rank].size(); ++i) {
        const bool exchange = IsExchange(plan.ranks[rank][i].op);
        (exchange && mode == ExchangeMode::kOverlapped ? second : first).actions.push_back(i);
      }
      queues_.push_back(std::move(first));
      if (mode == ExchangeMode::kOverlapped) queues_.push_back(std::move(second));
      result_.ranks.emplace_back();
      for (const PipelineAction& action : plan.ranks[rank]) {
        result_.ranks.back().actions.push_back({action, kNever, kNever});
      }
    }
  }

  absl::StatusOr<PipelineSimulation> Run() {
    for (bool progress = true; progress;) {
      progress = false;
      for (Queue& queue : queues_) {
        while (queue.next < queue.actions.size()) {
          ASSIGN_OR_RETURN(const bool advanced, Advance(queue));
          if (!advanced) break;
          progress = true;
        }
      }
    }
    RETURN_IF_ERROR(CheckDeadlock());
    RETURN_IF_ERROR(CheckComplete());
    for (int rank = 0; rank < plan_.shape.stages; ++rank) CountBuffers(rank);
    for (const Queue& queue : queues_) result_.seconds = std::max(result_.seconds, queue.clock);
    return std::move(result_);
  }

 private:
  const PipelineAction& At(const Queue& queue, size_t index) const {
    return plan_.ranks[queue.rank][queue.actions[index]];
  }
  TimedAction& Timed(const Queue& queue, size_t index) {
    return result_.ranks[queue.rank].actions[queue.actions[index]];
  }
  std::string Describe(int rank, const PipelineAction& action) const {
    return absl::StrCat("rank ", rank, ", ", ToString(action));
  }

  double Cost(const PipelineAction& action, int part) const {
    const double factor = costs_.parts.empty() ? 1 : costs_.parts[part];
    switch (action.op) {
      case PipelineOp::kForward:
        return factor * costs_.forward;
      case PipelineOp::kBackward:
        return factor * (costs_.backward_input + costs_.backward_weight);
      case PipelineOp::kBackwardInput:
        return factor * costs_.backward_input;
      case PipelineOp::kBackwardWeight:
        return factor * costs_.backward_weight;
      default:
        return 0;
    }
  }

  // kNever when an input of the action does not exist yet.
  double ReadyAt(const PipelineAction& action, int part) {
    const int i = action.micro_batch;
    switch (action.op) {
      case PipelineOp::kForward:
        return part == 0 ? 0 : activation_.at(part, i);
      case PipelineOp::kBackward:
      case PipelineOp::kBackwardInput: {
        if (part == plan_.parts() - 1) return forward_.at(part, i);
        if (forward_.at(part, i) == kNever || gradient_.at(part, i) == kNever) return kNever;
        return std::max(forward_.at(part, i), gradient_.at(part, i));
      }
      case PipelineOp::kBackwardWeight:
        return backward_input_.at(part, i);
      case PipelineOp::kReduceGradients: {
        double ready = 0;
        for (int j = 0; j < plan_.shape.micro_batches; ++j) {
          if (backward_weight_.at(part, j) == kNever) return kNever;
          ready = std::max(ready, backward_weight_.at(part, j));
        }
        return ready;
      }
      case PipelineOp::kSendActivation:
        return forward_.at(part, i);
      case PipelineOp::kSendGradient:
        return backward_input_.at(part, i);
      case PipelineOp::kReceiveActivation:
      case PipelineOp::kReceiveGradient:
        return 0;
    }
    return kNever;
  }

  absl::Status Finish(int rank, const PipelineAction& action, int part, double end) {
    const auto once = [&](double& time) {
      if (time != kNever) {
        return absl::FailedPreconditionError(absl::StrCat(Describe(rank, action), ": comes twice"));
      }
      time = end;
      return absl::OkStatus();
    };
    const int i = action.micro_batch;
    if (action.op == PipelineOp::kForward) return once(forward_.at(part, i));
    if (IsBackward(action.op)) RETURN_IF_ERROR(once(backward_input_.at(part, i)));
    if (EndsBackward(action.op)) RETURN_IF_ERROR(once(backward_weight_.at(part, i)));
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Advance(Queue& queue) {
    const PipelineAction& action = At(queue, queue.next);
    if (IsExchange(action.op)) return AdvanceGroup(queue);
    const int part = plan_.Part(queue.rank, action.chunk);
    const double ready = ReadyAt(action, part);
    if (ready == kNever) return false;
    TimedAction& timed = Timed(queue, queue.next);
    timed.begin = std::max(queue.clock, ready);
    timed.end = timed.begin + Cost(action, part);
    result_.ranks[queue.rank].busy += timed.end - timed.begin;
    queue.clock = timed.end;
    ++queue.next;
    RETURN_IF_ERROR(Finish(queue.rank, action, part, timed.end));
    return true;
  }

  size_t GroupEnd(const Queue& queue) const {
    size_t end = queue.next;
    const int group = At(queue, end).group;
    while (end < queue.actions.size() && IsExchange(At(queue, end).op) &&
           At(queue, end).group == group) {
      ++end;
    }
    return end;
  }

  absl::StatusOr<bool> AdvanceGroup(Queue& queue) {
    const size_t end = GroupEnd(queue);
    if (!queue.posted) {
      double begin = queue.clock;
      for (size_t i = queue.next; i < end; ++i) {
        const PipelineAction& action = At(queue, i);
        const double ready = ReadyAt(action, plan_.Part(queue.rank, action.chunk));
        if (ready == kNever) return false;
        begin = std::max(begin, ready);
      }
      for (size_t i = queue.next; i < end; ++i) {
        RETURN_IF_ERROR(Post(queue.rank, At(queue, i), begin));
        Timed(queue, i).begin = begin;
      }
      queue.posted = true;
      return true;
    }
    double done = queue.clock;
    for (size_t i = queue.next; i < end; ++i) {
      const double arrived = ArrivalOf(queue.rank, At(queue, i));
      if (arrived == kNever) return false;
      done = std::max(done, arrived);
    }
    for (size_t i = queue.next; i < end; ++i) Timed(queue, i).end = done;
    queue.clock = done;
    queue.next = end;
    queue.posted = false;
    return true;
  }

  // Posts one side of a message, and completes it if the other side is posted.
  absl::Status Post(int rank, const PipelineAction& action, double time) {
    const bool send =
        action.op == PipelineOp::kSendActivation || action.op == PipelineOp::kSendGradient;
    const std::pair<int, int> way =
        send ? std::make_pair(rank, action.peer) : std::make_pair(action.peer, rank);
    std::vector<PostedMessage>& posted = posted_[way];
    const size_t number = (send ? sent_ : received_)[way]++;
    if (posted.size() <= number) posted.resize(number + 1);
    PostedMessage& message = posted[number];
    (send ? message.send : message.receive) = &action;
    (send ? message.sent : message.received) = time;
    if (message.send == nullptr || message.receive == nullptr) return absl::OkStatus();
    return Deliver(way.first, way.second, message);
  }

  absl::Status Deliver(int from, int to, const PostedMessage& message) {
    const bool gradient = message.send->op == PipelineOp::kSendGradient;
    const int part = plan_.Part(to, message.receive->chunk);
    const int sender = plan_.Part(from, message.send->chunk);
    if (message.send->micro_batch != message.receive->micro_batch ||
        gradient != (message.receive->op == PipelineOp::kReceiveGradient) ||
        part != sender + (gradient ? -1 : 1)) {
      return absl::FailedPreconditionError(absl::StrCat(
          Describe(from, *message.send), " is matched with ", Describe(to, *message.receive)));
    }
    ++result_.messages;
    double& time = (gradient ? gradient_ : activation_).at(part, message.send->micro_batch);
    if (time != kNever) {
      return absl::FailedPreconditionError(
          absl::StrCat(Describe(from, *message.send), ": comes twice"));
    }
    time = std::max(message.sent, message.received) + costs_.message;
    return absl::OkStatus();
  }

  double ArrivalOf(int rank, const PipelineAction& action) {
    const int part = plan_.Part(rank, action.chunk), i = action.micro_batch;
    switch (action.op) {
      case PipelineOp::kSendActivation:
        return activation_.at(part + 1, i);
      case PipelineOp::kSendGradient:
        return gradient_.at(part - 1, i);
      case PipelineOp::kReceiveActivation:
        return activation_.at(part, i);
      default:
        return gradient_.at(part, i);
    }
  }

  absl::Status CheckDeadlock() const {
    std::vector<std::string> waiting;
    for (const Queue& queue : queues_) {
      if (queue.next < queue.actions.size()) {
        waiting.push_back(Describe(queue.rank, At(queue, queue.next)));
      }
    }
    if (waiting.empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("deadlock: nothing lets these go on: ", absl::StrJoin(waiting, "; ")));
  }

  absl::Status CheckComplete() const {
    if (!forward_.complete() || !backward_input_.complete() || !backward_weight_.complete()) {
      return absl::FailedPreconditionError(
          "some micro-batch has no forward or no backward on some part");
    }
    return absl::OkStatus();
  }

  // Counts in list order, as an executor hands out buffers.
  void CountBuffers(int rank) {
    PipelineSimulation::Rank& counts = result_.ranks[rank];
    int activations = 0, inputs = 0, gradients = 0;
    int sending = 0, group = -1;  // gradients of a group are sent together
    for (const PipelineAction& action : plan_.ranks[rank]) {
      const int part = plan_.Part(rank, action.chunk);
      const bool last = part == plan_.parts() - 1;
      const bool forward = action.op == PipelineOp::kForward;
      if (action.group != group) {
        gradients -= std::exchange(sending, 0);
        group = action.group;
      }
      activations += forward;
      inputs += (forward && part == 0) || action.op == PipelineOp::kReceiveActivation;
      gradients += (IsBackward(action.op) && last) || action.op == PipelineOp::kReceiveGradient;
      counts.activations = std::max(counts.activations, activations);
      counts.inputs = std::max(counts.inputs, inputs);
      counts.gradients = std::max(counts.gradients, gradients);
      activations -= EndsBackward(action.op);
      inputs -= EndsBackward(action.op);
      gradients -= IsBackward(action.op) && part == 0;
      sending += action.op == PipelineOp::kSendGradient;
    }
  }

  const PipelinePlan& plan_;
  const PipelineCosts& costs_;
  std::vector<Queue> queues_;
  Times forward_, backward_input_, backward_weight_;  // ends
  Times activation_, gradient_;                       // arrival times, by the part that reads them
  std::map<std::pair<int, int>, std::vector<PostedMessage>> posted_;
  std::map<std::pair<int, int>, size_t> sent_, received_;
  PipelineSimulation result_;
};

}  // namespace

double PipelineSimulation::bubble() const {
  double busy = 0;
  for (const Rank& rank : ranks) busy += rank.busy;
  return (seconds * static_cast<double>(ranks.size()) - busy) / busy;
}

absl::StatusOr<PipelineSimulation> Simulate(const PipelinePlan& plan, const PipelineCosts& costs,
                                            ExchangeMode mode) {
  CHECK_EQ(plan.ranks.size(), static_cast<size_t>(plan.shape.stages));
  CHECK(costs.parts.empty() || static_cast<int>(costs.parts.size()) == plan.parts())
      << costs.parts.size() << " costs for " << plan.parts() << " parts";
  return Simulator(plan, costs, mode).Run();
}

}  // namespace muster::parallel
