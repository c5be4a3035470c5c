#include "coordinator/core/traffic.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "coordinator/scheduler/gang_layout.h"
#include "proto/spec/spec.h"

namespace muster::coordinator {
namespace {

// What a ring all-reduce of `bytes` sends from each of n ranks.
double AllReduce(double bytes, double n) { return 2 * bytes * (n - 1) / n; }

double BytesAlong(v1::MeshAxis axis, const v1::JobSpec& spec) {
  const v1::ModelSpec& model = spec.engine().model();
  const v1::TrainingSpec& training = spec.engine().training();
  const v1::ParallelSpec& parallel = spec.engine().parallel();
  const double tensor = std::max(1, parallel.tensor());
  const double context = std::max(1, parallel.context());
  const double data = std::max(1, parallel.data());
  const double stages = std::max(1, parallel.pipeline());
  const bool half =
      training.precision() == v1::PRECISION_BF16 || training.precision() == v1::PRECISION_FP16;
  const double width = half ? 2 : 4;  // bytes of an activation
  const spec::LayerTotals totals = spec::TotalsOf(model);
  const double hidden = model.hidden();
  const double table = static_cast<double>(model.vocab()) * hidden;  // an embedding, or a head
  const double samples = static_cast<double>(training.global_batch()) / data;
  // A rank's share of a step.
  const double tokens = samples * model.sequence_length() / context;
  const double states = tokens * hidden * width;  // hidden states
  switch (axis) {
    case v1::MESH_AXIS_TENSOR:
      return AllReduce(2 * static_cast<double>(totals.layers) / stages * states, tensor);
    case v1::MESH_AXIS_CONTEXT: {
      const double keys = 3 * tokens * static_cast<double>(totals.key_columns) * width;
      // Forward and backward, of either chunk of a sequence.
      const double scans = 2 * 2 * samples * static_cast<double>(totals.state_numbers) * 4;
      return (keys + scans) / stages / tensor * (context - 1);
    }
    case v1::MESH_AXIS_DATA: {
      const double parameters =
          (static_cast<double>(totals.weights) + static_cast<double>(totals.tables) * table) /
          stages / tensor;
      const double gradient = training.gradient_reduction() == v1::GRADIENT_REDUCTION_BF16 ? 2 : 4;
      if (parallel.zero() == 0) return AllReduce(parameters * gradient, data);
      // Gradients are scattered and parameters gathered; in ZeRO-3 for both passes of a
      // micro-batch.
      const double passes = parallel.zero() < 3
                                ? 1
                                : 2 * std::max(1.0, samples / static_cast<double>(std::max<int64_t>(
                                                                  1, training.micro_batch())));
      return parameters * (gradient + passes * width) * (data - 1) / data;
    }
    default: {
      // Both ways over each boundary between the chunks of layers; the ends have one neighbour.
      const double chunks = std::max(1, parallel.pipeline_chunks());
      const double shared = parallel.sequence() ? tensor : 1;
      // The ends exchange the gradient of a table that both have.
      const double tied = totals.tables == 1 ? 2 * table * 4 / tensor / stages : 0;
      return 2 * states / shared * (stages * chunks - 1) / stages + tied;
    }
  }
}

int32_t DegreeOf(v1::MeshAxis axis, const v1::ParallelSpec& parallel) {
  switch (axis) {
    case v1::MESH_AXIS_TENSOR:
      return std::max(1, parallel.tensor());
    case v1::MESH_AXIS_CONTEXT:
      return std::max(1, parallel.context());
    case v1::MESH_AXIS_DATA:
      return std::max(1, parallel.data());
    case v1::MESH_AXIS_PIPELINE:
      return std::max(1, parallel.pipeline());
    default:
      return 1;
  }
}

}  // namespace

void AddTraffic(const v1::JobSpec& spec, WaitingJob& job) {
  const v1::ParallelSpec& parallel = spec.engine().parallel();
  std::vector<v1::MeshAxis> order;
  for (const int axis : parallel.order()) order.push_back(static_cast<v1::MeshAxis>(axis));
  if (order.empty()) {
    order = {v1::MESH_AXIS_TENSOR, v1::MESH_AXIS_CONTEXT, v1::MESH_AXIS_DATA,
             v1::MESH_AXIS_PIPELINE};
  }
  job.traffic_known = spec.has_engine() && spec.engine().model().hidden() > 0;
  int64_t stride = 1;
  for (const v1::MeshAxis axis : order) {
    const int32_t degree = DegreeOf(axis, parallel);
    if (degree > 1 && stride <= job.ranks) {
      job.traffic.push_back({axis, degree, static_cast<int32_t>(stride),
                             job.traffic_known ? BytesAlong(axis, spec) : WeightOf(axis)});
    }
    stride *= degree;
  }
  if (stride == job.ranks) return;
  job.traffic.clear();
  job.traffic_known = false;
}

}  // namespace muster::coordinator
