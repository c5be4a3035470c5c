#include "coordinator/scheduler/waiting_queue.h"

#include <utility>

namespace muster::coordinator {

WaitingJob AtSize(const WaitingJob& job, int32_t ranks) {
  WaitingJob out = job;
  out.ranks = ranks;
  out.sizes.clear();
  out.traffic_of_largest.clear();
  if (job.sizes.empty()) return out;
  out.traffic.clear();
  const double share = static_cast<double>(ranks) / job.sizes.back();
  const auto scaled = [&](int32_t number) {
    return static_cast<int32_t>(int64_t{number} * ranks / job.sizes.back());
  };
  int32_t data_stride = job.sizes.back();  // axes with a larger one are behind the data axis
  for (const AxisTraffic& axis : job.traffic_of_largest) {
    if (axis.axis == v1::MESH_AXIS_DATA) data_stride = axis.stride;
  }
  for (AxisTraffic axis : job.traffic_of_largest) {
    if (axis.axis == v1::MESH_AXIS_DATA) {
      const double before = axis.degree;
      axis.degree = scaled(axis.degree);
      if (axis.degree < 2) continue;
      // A ring all-reduce sends 2 (n - 1) / n of the gradient.
      axis.bytes *= (axis.degree - 1.0) / axis.degree / ((before - 1) / before);
    } else {
      if (axis.stride > data_stride) axis.stride = scaled(axis.stride);
      if (job.traffic_known) axis.bytes /= share;  // each replica has more samples
    }
    if (axis.axis == v1::MESH_AXIS_TENSOR) out.stride = axis.stride;
    out.traffic.push_back(axis);
  }
  return out;
}

}  // namespace muster::coordinator
