#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "parallel/pipeline/schedule.h"

namespace muster::parallel {
namespace {

std::string Label(const PipelinePlan& plan, const PipelineAction& action) {
  const char* name = action.op == PipelineOp::kForward         ? "F"
                     : action.op == PipelineOp::kBackward      ? "B"
                     : action.op == PipelineOp::kBackwardInput ? "I"
                                                               : "W";
  std::string label = absl::StrCat(name, action.micro_batch);
  if (plan.shape.chunks > 26) return absl::StrCat(label, ".", action.chunk);
  if (plan.shape.chunks > 1) label += static_cast<char>('a' + action.chunk);
  return label;
}

}  // namespace

std::string Draw(const PipelinePlan& plan, const PipelineSimulation& simulation) {
  double unit = simulation.seconds;
  size_t width = 2;
  for (const PipelineSimulation::Rank& rank : simulation.ranks) {
    for (const TimedAction& timed : rank.actions) {
      if (timed.end > timed.begin && !IsExchange(timed.action.op)) {
        unit = std::min(unit, timed.end - timed.begin);
        width = std::max(width, Label(plan, timed.action).size());
      }
    }
  }
  const auto column = [&](double time) { return static_cast<size_t>(std::lround(time / unit)); };
  const size_t columns = column(simulation.seconds);
  const size_t rank_width = absl::StrCat(simulation.ranks.size() - 1).size();

  std::string picture;
  for (size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    std::string line(columns * (width + 1), ' ');
    for (size_t i = 0; i < columns; ++i) line.replace(i * (width + 1), width, width, '.');
    for (const TimedAction& timed : simulation.ranks[rank].actions) {
      if (IsExchange(timed.action.op) || timed.end <= timed.begin) continue;
      const size_t begin = column(timed.begin) * (width + 1);
      const size_t end = column(timed.end) * (width + 1) - 1;
      line.replace(begin, end - begin, end - begin, '-');
      std::string label = Label(plan, timed.action);
      label.resize(width, ' ');
      line.replace(begin, width, label);
    }
    while (!line.empty() && line.back() == ' ') line.pop_back();
    absl::StrAppendFormat(&picture, "rank %*d | %s\n", static_cast<int>(rank_width), rank, line);
  }
  std::vector<int> activations;
  for (const PipelineSimulation::Rank& rank : simulation.ranks) {
    activations.push_back(rank.activations);
  }
  absl::StrAppendFormat(&picture, "bubble %.1f %%, activations kept: %s\n",
                        100 * simulation.bubble(), absl::StrJoin(activations, " "));
  return picture;
}

}  // namespace muster::parallel
