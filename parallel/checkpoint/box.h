// A box is a rectangular slice of a tensor, as offset and extent per dimension. Resharding is
// nothing but intersecting boxes. Pure functions; storage is row-major.
#ifndef MUSTER_PARALLEL_CHECKPOINT_BOX_H_
#define MUSTER_PARALLEL_CHECKPOINT_BOX_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::parallel {

// A scalar has no dimensions and one element.
struct Box {
  std::vector<int64_t> offset;
  std::vector<int64_t> extent;

  static Box Whole(const std::vector<int64_t>& shape);
  int64_t elements() const;
  // "[0:96, 32:64]".
  std::string ToString() const;
  friend bool operator==(const Box&, const Box&) = default;
};

// Whether `box` has the dimensions of `shape`, no negative number, and lies inside it.
bool Inside(const Box& box, const std::vector<int64_t>& shape);

// nullopt when they share no element. Requires: equal numbers of dimensions.
std::optional<Box> Intersect(const Box& a, const Box& b);

// Elements [begin, end) of the row-major storage of `box`, as boxes in order: at most
// 2 * dimensions - 1 of them. Each is contiguous in that storage. A rank describes its range of a
// flat bucket this way. Requires: 0 <= begin <= end <= box.elements().
std::vector<Box> FlatRangeToBoxes(const Box& box, int64_t begin, int64_t end);

// Copies `part` from the storage of box `from` to that of box `to`. Requires: `part` lies in both.
void CopyBox(const Box& part, int64_t element_bytes, const Box& from, const char* from_data,
             const Box& to, char* to_data);

// Whether `boxes` lie inside `shape` and share no element; if not, says which do.
std::optional<std::string> OverlapProblem(const std::vector<Box>& boxes,
                                          const std::vector<int64_t>& shape);

// Whether `boxes` cover `shape` exactly once; if not, says which two overlap, or how many elements
// are missing.
std::optional<std::string> TilingProblem(const std::vector<Box>& boxes,
                                         const std::vector<int64_t>& shape);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_CHECKPOINT_BOX_H_
