#include "coordinator/core/slow_ranks.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace muster::coordinator {
namespace {

double Waiting(const v1::StepTimes& times) {
  return times.gradients_seconds() + times.parameters_seconds() + times.tensor_seconds() +
         times.context_seconds() + times.pipeline_seconds() + times.slowest_seconds();
}

// Of an even number of values the mean of the two in the middle. Requires: there are some.
double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace

void SlowRanks::Add(int rank, const v1::StepTimes& times, absl::Time now) {
  Times& known = ranks_[static_cast<size_t>(rank)];
  const double waiting = Waiting(times);
  const double computing = times.step_seconds() - waiting;
  if (times.step() <= known.last_step || !(waiting >= 0) || !(computing > 0)) return;
  begin_ = std::min(begin_, now);
  known.last_step = times.step();
  ++known.steps;
  known.computing += computing;
  waiting_ += waiting;
  total_ += times.step_seconds();
}

std::vector<SlowRank> SlowRanks::Judge(const std::vector<int32_t>& peers, absl::Time now) {
  std::map<int32_t, std::vector<double>> groups;  // mean seconds, by number of the peers
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const Times& times = ranks_[rank];
    if (times.steps >= kStepsMin) groups[peers[rank]].push_back(times.computing / times.steps);
  }
  std::map<int32_t, double> medians;
  for (auto& [number, values] : groups) medians[number] = Median(std::move(values));
  const bool waits = waiting_ >= kWaitingShare * total_;
  std::vector<SlowRank> slow;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    Times& times = ranks_[rank];
    double slowdown = 0;
    if (waits && times.steps >= kStepsMin) {
      slowdown = times.computing / times.steps / medians[peers[rank]];
    }
    times.slow_windows = slowdown > kSlowdown ? times.slow_windows + 1 : 0;
    times.steps = 0;
    times.computing = 0;
    if (times.slow_windows == kSlowWindows) {
      slow.push_back({static_cast<int32_t>(rank), slowdown});
    }
  }
  waiting_ = total_ = 0;
  begin_ = now;
  return slow;
}

std::vector<int32_t> PeersOf(const v1::JobSpec& spec, const std::vector<std::string>& models) {
  std::vector<int32_t> peers(models.size());
  std::iota(peers.begin(), peers.end(), 0);
  const v1::ParallelSpec& parallel = spec.engine().parallel();
  const std::map<v1::MeshAxis, int64_t> degrees = {
      {v1::MESH_AXIS_TENSOR, std::max(1, parallel.tensor())},
      {v1::MESH_AXIS_CONTEXT, std::max(1, parallel.context())},
      {v1::MESH_AXIS_DATA, std::max(1, parallel.data())},
      {v1::MESH_AXIS_PIPELINE, std::max(1, parallel.pipeline())}};
  std::vector<v1::MeshAxis> order;
  for (const int axis : parallel.order()) order.push_back(static_cast<v1::MeshAxis>(axis));
  if (order.empty()) {
    order = {v1::MESH_AXIS_TENSOR, v1::MESH_AXIS_CONTEXT, v1::MESH_AXIS_DATA,
             v1::MESH_AXIS_PIPELINE};
  }
  std::map<std::pair<int64_t, std::string>, int32_t> lowest;  // by work and model
  for (size_t rank = 0; rank < models.size(); ++rank) {
    int64_t stride = 1, work = 0;
    for (const v1::MeshAxis axis : order) {
      const auto degree = degrees.find(axis);
      if (degree == degrees.end()) return peers;
      const int64_t coordinate = static_cast<int64_t>(rank) / stride % degree->second;
      if (axis == v1::MESH_AXIS_TENSOR || axis == v1::MESH_AXIS_PIPELINE) {
        work += coordinate * stride;
      }
      stride *= degree->second;
    }
    if (stride != static_cast<int64_t>(models.size())) return peers;
    peers[rank] = lowest.try_emplace({work, models[rank]}, rank).first->second;
  }
  return peers;
}

}  // namespace muster::coordinator
