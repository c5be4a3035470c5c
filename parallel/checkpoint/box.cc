#include "parallel/checkpoint/box.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace muster::parallel {
namespace {

// The distance, in elements, between neighbours along each dimension.
std::vector<int64_t> Strides(const Box& box) {
  std::vector<int64_t> strides(box.extent.size());
  int64_t stride = 1;
  for (size_t d = strides.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= box.extent[d];
  }
  return strides;
}

// Appends boxes of the elements [begin, end) of a sub-box: the one whose first `depth` indices are
// fixed by `prefix`.
void Decompose(const Box& box, const std::vector<int64_t>& strides, Box& prefix, size_t depth,
               int64_t begin, int64_t end, std::vector<Box>& out) {
  if (begin == end) return;
  if (depth == box.extent.size()) {
    out.push_back(prefix);
    return;
  }
  const int64_t stride = strides[depth];
  const auto rows = [&](int64_t first, int64_t last) {
    if (first >= last) return;
    Box part = box;
    std::copy_n(prefix.offset.begin(), depth, part.offset.begin());
    std::fill_n(part.extent.begin(), depth, 1);
    part.offset[depth] = box.offset[depth] + first;
    part.extent[depth] = last - first;
    out.push_back(part);
  };
  const auto within = [&](int64_t row, int64_t from, int64_t to) {
    prefix.offset[depth] = box.offset[depth] + row;
    prefix.extent[depth] = 1;
    Decompose(box, strides, prefix, depth + 1, from, to, out);
  };
  const int64_t first = begin / stride, last = end / stride;
  if (first == last) return within(first, begin % stride, end % stride);
  const bool ragged = begin % stride != 0;
  if (ragged) within(first, begin % stride, stride);
  rows(ragged ? first + 1 : first, last);
  within(last, 0, end % stride);
}

}  // namespace

Box Box::Whole(const std::vector<int64_t>& shape) {
  return {std::vector<int64_t>(shape.size()), shape};
}

int64_t Box::elements() const {
  return std::accumulate(extent.begin(), extent.end(), int64_t{1}, std::multiplies<>());
}

std::string Box::ToString() const {
  std::string text = "[";
  for (size_t d = 0; d < extent.size(); ++d) {
    absl::StrAppend(&text, d == 0 ? "" : ", ", offset[d], ":", offset[d] + extent[d]);
  }
  return text + "]";
}

bool Inside(const Box& box, const std::vector<int64_t>& shape) {
  if (box.offset.size() != shape.size() || box.extent.size() != shape.size()) return false;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (box.offset[d] < 0 || box.extent[d] < 0 || box.offset[d] > shape[d] ||
        box.extent[d] > shape[d] - box.offset[d]) {
      return false;
    }
  }
  return true;
}

std::optional<Box> Intersect(const Box& a, const Box& b) {
  CHECK_EQ(a.extent.size(), b.extent.size());
  Box both = a;
  for (size_t d = 0; d < a.extent.size(); ++d) {
    const int64_t begin = std::max(a.offset[d], b.offset[d]);
    const int64_t end = std::min(a.offset[d] + a.extent[d], b.offset[d] + b.extent[d]);
    if (begin >= end) return std::nullopt;
    both.offset[d] = begin;
    both.extent[d] = end - begin;
  }
  return both;
}

std::vector<Box> FlatRangeToBoxes(const Box& box, int64_t begin, int64_t end) {
  CHECK(0 <= begin && begin <= end && end <= box.elements())
      << "[" << begin << ", " << end << ") of " << box.ToString();
  std::vector<Box> out;
  Box prefix = box;
  Decompose(box, Strides(box), prefix, 0, begin, end, out);
  return out;
}

void CopyBox(const Box& part, int64_t element_bytes, const Box& from, const char* from_data,
             const Box& to, char* to_data) {
  const size_t dims = part.extent.size();
  if (part.elements() == 0) return;
  const std::vector<int64_t> from_strides = Strides(from), to_strides = Strides(to);
  int64_t from_at = 0, to_at = 0;
  for (size_t d = 0; d < dims; ++d) {
    CHECK(part.offset[d] >= from.offset[d] && part.offset[d] >= to.offset[d]);
    from_at += (part.offset[d] - from.offset[d]) * from_strides[d];
    to_at += (part.offset[d] - to.offset[d]) * to_strides[d];
  }
  // Trailing dimensions that are whole in both boxes are contiguous: they are copied at once.
  size_t inner = dims;
  int64_t run = 1;
  while (inner > 0) {
    --inner;
    run *= part.extent[inner];
    if (part.extent[inner] != from.extent[inner] || part.extent[inner] != to.extent[inner]) break;
  }
  std::vector<int64_t> index(inner);
  for (;;) {
    std::memcpy(to_data + to_at * element_bytes, from_data + from_at * element_bytes,
                static_cast<size_t>(run * element_bytes));
    size_t d = inner;
    for (; d > 0; --d) {
      from_at += from_strides[d - 1];
      to_at += to_strides[d - 1];
      if (++index[d - 1] < part.extent[d - 1]) break;
      from_at -= index[d - 1] * from_strides[d - 1];
      to_at -= index[d - 1] * to_strides[d - 1];
      index[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

std::optional<std::string> OverlapProblem(const std::vector<Box>& boxes,
                                          const std::vector<int64_t>& shape) {
  for (const Box& box : boxes) {
    if (!Inside(box, shape)) return absl::StrCat(box.ToString(), " is not inside the tensor");
  }
  // Along the first dimension, a box can only overlap boxes that begin before it ends.
  std::vector<const Box*> sorted;
  for (const Box& box : boxes) sorted.push_back(&box);
  std::sort(sorted.begin(), sorted.end(),
            [](const Box* a, const Box* b) { return a->offset < b->offset; });
  for (size_t i = 0; i < sorted.size(); ++i) {
    for (size_t j = i + 1; j < sorted.size(); ++j) {
      const Box& a = *sorted[i];
      const Box& b = *sorted[j];
      if (!shape.empty() && b.offset[0] >= a.offset[0] + a.extent[0]) break;
      if (Intersect(a, b).has_value()) {
        return absl::StrCat(a.ToString(), " and ", b.ToString(), " overlap");
      }
    }
  }
  return std::nullopt;
}

std::optional<std::string> TilingProblem(const std::vector<Box>& boxes,
                                         const std::vector<int64_t>& shape) {
  if (auto problem = OverlapProblem(boxes, shape)) return problem;
  int64_t covered = 0;
  for (const Box& box : boxes) covered += box.elements();
  const int64_t wanted = Box::Whole(shape).elements();
  if (covered == wanted) return std::nullopt;
  return absl::StrCat(wanted - covered, " of ", wanted, " elements are in no chunk");
}

}  // namespace muster::parallel
