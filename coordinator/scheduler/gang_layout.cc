#include "coordinator/scheduler/gang_layout.h"

#include <algorithm>

#include "base/check.h"

namespace muster::coordinator {

double WeightOf(v1::MeshAxis axis) {
  switch (axis) {
    case v1::MESH_AXIS_TENSOR:
      return 100;
    case v1::MESH_AXIS_CONTEXT:
      return 30;
    case v1::MESH_AXIS_DATA:
      return 10;
    default:
      return 1;
  }
}

GangLayout::GangLayout(const WaitingJob& job, bool by_group) {
  const bool grouped = job.group > 1 && job.ranks % job.group == 0 &&
                       job.ranks % (int64_t{job.group} * job.stride) == 0;
  group_ = grouped ? job.group : 1;
  stride_ = grouped ? job.stride : 1;
  for (const AxisTraffic& axis : job.traffic) {
    if (axis.degree > 1 && job.ranks % (int64_t{axis.degree} * axis.stride) == 0) {
      axes_.push_back(axis);
    }
  }
  if (job.traffic.empty()) {
    const auto add = [this](v1::MeshAxis axis, int32_t degree, int32_t stride) {
      if (degree > 1) axes_.push_back({axis, degree, stride, WeightOf(axis)});
    };
    add(v1::MESH_AXIS_TENSOR, group_, stride_);
    add(v1::MESH_AXIS_DATA, stride_, 1);
    add(v1::MESH_AXIS_DATA, job.ranks / (group_ * stride_), group_ * stride_);
  }
  ranks_.reserve(static_cast<size_t>(job.ranks));
  if (by_group) {
    for (int32_t group = 0; group < job.ranks / group_; ++group) {
      const int32_t first = group / stride_ * (stride_ * group_) + group % stride_;
      for (int32_t i = 0; i < group_; ++i) ranks_.push_back(first + i * stride_);
    }
  } else {
    for (int32_t rank = 0; rank < job.ranks; ++rank) ranks_.push_back(rank);
  }
  positions_.resize(ranks_.size());
  for (size_t position = 0; position < ranks_.size(); ++position) {
    positions_[static_cast<size_t>(ranks_[position])] = static_cast<int32_t>(position);
  }
}

std::vector<int64_t> GangLayout::Blocks(int64_t smallest) const {
  std::vector<int64_t> sizes = {smallest};
  const auto grow = [&sizes](int64_t size) {
    if (size > sizes.back() && size % sizes.back() == 0) sizes.push_back(size);
  };
  grow(group_);
  std::vector<AxisTraffic> rest;
  for (const AxisTraffic& axis : axes_) {
    if (group_ == 1 || axis.stride != stride_ || axis.degree != group_) rest.push_back(axis);
  }
  std::sort(rest.begin(), rest.end(),
            [](const AxisTraffic& a, const AxisTraffic& b) { return a.stride < b.stride; });
  int64_t size = group_;
  for (const AxisTraffic& axis : rest) grow(size *= axis.degree);
  const int64_t ranks = static_cast<int64_t>(ranks_.size());
  while (sizes.size() > 1 && ranks % sizes.back() != 0) sizes.pop_back();
  grow(ranks);
  CHECK_EQ(sizes.back(), ranks);
  return sizes;
}

}  // namespace muster::coordinator
