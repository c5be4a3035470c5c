// How the tokens of a sequence are spread over the ranks of a context-parallel group: in equal
// segments, of which a rank holds one (contiguous) or two (zigzag: segment r and segment 2c - 1 -
// r, so that causal attention is the same work on every rank). A rank has its segments in the order
// of the sequence. What converts between a rank's tokens and whole sequences asks this type where
// segments are (methods.h: HeadMessages; state_passing.cc; ContextPositions).
#ifndef MUSTER_PARALLEL_CONTEXT_SEQUENCE_LAYOUT_H_
#define MUSTER_PARALLEL_CONTEXT_SEQUENCE_LAYOUT_H_

#include <cstdint>
#include <vector>

namespace muster::parallel {

class SequenceLayout {
 public:
  // A segment's place: the rank that has it, and which of the rank's segments it is.
  struct Place {
    int rank, nth;
    friend bool operator==(const Place&, const Place&) = default;
  };

  static SequenceLayout Contiguous(int ranks) { return {ranks, 1}; }
  static SequenceLayout Zigzag(int ranks) { return {ranks, 2}; }

  int ranks() const { return ranks_; }
  int segments_of_rank() const { return of_rank_; }
  int segments() const { return ranks_ * of_rank_; }

  Place PlaceOf(int segment) const {
    return segment < ranks_ ? Place{segment, 0} : Place{2 * ranks_ - 1 - segment, 1};
  }
  int SegmentAt(Place place) const {
    return place.nth == 0 ? place.rank : 2 * ranks_ - 1 - place.rank;
  }
  // The positions in the whole sequence of a rank's tokens, in the order it holds them. Requires:
  // `sequence` is a multiple of segments().
  std::vector<int32_t> Positions(int64_t sequence, int rank) const;

 private:
  SequenceLayout(int ranks, int of_rank) : ranks_(ranks), of_rank_(of_rank) {}

  int ranks_, of_rank_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_CONTEXT_SEQUENCE_LAYOUT_H_
