#include <vector>

#include "base/check.h"
#include "parallel/context/methods.h"

namespace muster::parallel::context {
namespace {

using kernels::Tensor;

Tensor View(const Tensor& of, int64_t offset, std::initializer_list<int64_t> shape,
            std::initializer_list<int64_t> strides) {
  return Tensor(static_cast<char*>(of.data()) + offset * SizeOf(of.dtype()), of.dtype(), shape,
                strides);
}

}  // namespace

// The nth segments of all ranks are neighbours in the sequence.
HeadMessages::HeadMessages(const SequenceLayout& layout, int64_t batch, int64_t sequence)
    : batch_(batch), chunk_(sequence / layout.segments()), ranks_(layout.ranks()) {
  for (int nth = 0; nth < layout.segments_of_rank(); ++nth) {
    std::vector<int>& places = places_.emplace_back();
    for (int rank = 0; rank < ranks_; ++rank) {
      places.push_back(layout.SegmentAt({rank, nth}) - nth * ranks_);
    }
  }
}

void HeadMessages::ForHeads(const Tensor& mine, const Share& share, const Packing& packing,
                            int64_t column,
                            absl::FunctionRef<void(const Tensor& mine, const Tensor& message)> work,
                            int nth) const {
  const int64_t width = mine.dim(3), repeats = Repeats(mine.dim(2), share.count);
  const int64_t owners = ranks_ / repeats, part = chunk_ * packing.columns;
  const auto of_rank = static_cast<int64_t>(places_.size());
  for (int64_t i = 0; i < of_rank * batch_; ++i) {
    const int64_t begin = i / of_rank * mine.stride(0) + i % of_rank * chunk_ * mine.stride(1) +
                          share.first * mine.stride(2);
    for (int64_t repeat = 0; repeat < repeats; ++repeat) {
      if (nth >= 0 && repeat != nth) continue;
      work(View(mine, begin, {owners, chunk_, share.taken, width},
                {share.count * mine.stride(2), mine.stride(1), mine.stride(2), 1}),
           View(packing.parts, (i * ranks_ + repeat) * part + column,
                {owners, chunk_, share.taken, width}, {repeats * part, packing.columns, width, 1}));
    }
  }
}

std::vector<AllToAllItem> HeadMessages::FromParts(const Tensor& parts, const Tensor& whole) const {
  std::vector<AllToAllItem> items = Items(parts, whole);
  for (size_t i = 0; i < items.size(); ++i) items[i].out_places = places_[i % places_.size()];
  return items;
}

std::vector<AllToAllItem> HeadMessages::ToParts(const Tensor& whole, const Tensor& parts) const {
  std::vector<AllToAllItem> items = Items(whole, parts);
  for (size_t i = 0; i < items.size(); ++i) items[i].in_places = places_[i % places_.size()];
  return items;
}

std::vector<AllToAllItem> HeadMessages::Items(const Tensor& in, const Tensor& out) const {
  CHECK_EQ(in.elements(), out.elements());
  const int64_t count = static_cast<int64_t>(places_.size()) * batch_,
                elements = in.elements() / count;
  const auto half = [&](const Tensor& of, int64_t i) {
    return of.Reshape({count, elements}).Rows(i, 1);
  };
  std::vector<AllToAllItem> items;
  for (int64_t i = 0; i < count; ++i) items.push_back({half(in, i), half(out, i)});
  return items;
}

}  // namespace muster::parallel::context
