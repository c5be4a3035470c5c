#include "parallel/context/sequence_layout.h"

#include "base/check.h"

namespace muster::parallel {

std::vector<int32_t> SequenceLayout::Positions(int64_t sequence, int rank) const {
  CHECK(sequence % segments() == 0 && rank >= 0 && rank < ranks_)
      << sequence << " tokens, rank " << rank << " of " << ranks_;
  const int64_t length = sequence / segments();
  std::vector<int32_t> positions;
  for (int nth = 0; nth < of_rank_; ++nth) {
    const int64_t begin = SegmentAt({rank, nth}) * length;
    for (int64_t i = 0; i < length; ++i) positions.push_back(static_cast<int32_t>(begin + i));
  }
  return positions;
}

}  // namespace muster::parallel
