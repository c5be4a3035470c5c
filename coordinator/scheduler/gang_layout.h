// The order in which the ranks of a gang take slots, and who sends to whom.
#ifndef MUSTER_COORDINATOR_SCHEDULER_GANG_LAYOUT_H_
#define MUSTER_COORDINATOR_SCHEDULER_GANG_LAYOUT_H_

#include <cstdint>
#include <vector>

#include "coordinator/scheduler/waiting_queue.h"

namespace muster::coordinator {

// Positions 0 to ranks - 1 are the ranks in the order in which they take slots: tensor group by
// tensor group, the groups in order of their lowest ranks. In the order of the mesh that is the
// default, neighbouring positions differ in the tensor coordinate first, then in context, data and
// pipeline.
class GangLayout {
 public:
  // False `by_group`: positions are ranks.
  GangLayout(const WaitingJob& job, bool by_group);

  int32_t RankAt(int32_t position) const { return ranks_[static_cast<size_t>(position)]; }
  // Those of more than one rank, as of WaitingJob::traffic; the tensor group and one ring over the
  // groups where that is empty.
  const std::vector<AxisTraffic>& axes() const { return axes_; }
  // Sizes of blocks of positions: `smallest`, a tensor group, and with every further axis of the
  // mesh those times its degree, up to the whole gang. Ascending; each divides the next.
  std::vector<int64_t> Blocks(int64_t smallest) const;

  // Calls `each(from, to)` with the positions of every rank and of the next one in its ring along
  // the axis.
  template <typename Each>
  void EachHop(const AxisTraffic& axis, Each each) const {
    const int32_t size = axis.stride * axis.degree;
    for (int32_t position = 0; position < static_cast<int32_t>(ranks_.size()); ++position) {
      const int32_t rank = ranks_[static_cast<size_t>(position)];
      const bool last = rank / axis.stride % axis.degree == axis.degree - 1;
      const int32_t next = last ? rank + axis.stride - size : rank + axis.stride;
      each(position, positions_[static_cast<size_t>(next)]);
    }
  }

 private:
  std::vector<int32_t> ranks_;      // by position
  std::vector<int32_t> positions_;  // by rank
  std::vector<AxisTraffic> axes_;
  int32_t group_ = 1;
  int32_t stride_ = 1;
};

// Bytes, relative to each other, for jobs whose traffic is not known.
double WeightOf(v1::MeshAxis axis);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_GANG_LAYOUT_H_
