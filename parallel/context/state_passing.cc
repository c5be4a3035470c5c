#include "parallel/context/state_passing.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "base/check.h"
#include "kernels/memory/memory.h"
#include "kernels/ssm/ssm.h"
#include "parallel/context/methods.h"
#include "parallel/context/sequence_layout.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;

using Place = SequenceLayout::Place;

// Of [2B,rows,columns]: one segment of every sequence, `count` rows from `begin` on, and `n`
// columns from `first` on.
Tensor Rows(const Tensor& of, int late, int64_t begin, int64_t count, int64_t first, int64_t n) {
  const int64_t at = late * of.stride(0) + begin * of.stride(1) + first;
  return Tensor(static_cast<char*>(of.data()) + at * SizeOf(of.dtype()), of.dtype(),
                {of.dim(0) / 2, count, n}, {2 * of.stride(0), of.stride(1), 1});
}

// What a halo of `reach` rows takes from the segments in front of it, each `length` long: calls
// f(how many segments in front, first row of the halo, rows), the nearest first.
void ForReached(int64_t reach, int64_t length,
                absl::FunctionRef<void(int front, int64_t begin, int64_t rows)> f) {
  for (int front = 1; reach > 0; ++front) {
    const int64_t rows = std::min(reach, length);
    reach -= rows;
    f(front, reach, rows);
  }
}

}  // namespace

Tensor OfHeads(const Tensor& of, int axis, int64_t first, int64_t count) {
  CHECK(of.contiguous() && first >= 0 && first + count <= of.dim(axis)) << of.ToString();
  std::array<int64_t, Tensor::kRankMax> shape{};
  int64_t of_head = 1;  // numbers
  for (int i = 0; i < of.rank(); ++i) {
    shape[i] = i == axis ? count : of.dim(i);
    if (i != axis) of_head *= of.dim(i);
  }
  char* const data = static_cast<char*>(of.data()) + first * of_head * SizeOf(of.dtype());
  switch (of.rank()) {
    case 2:
      return Tensor(data, of.dtype(), {shape[0], shape[1]});
    case 3:
      return Tensor(data, of.dtype(), {shape[0], shape[1], shape[2]});
    default:
      CHECK_EQ(of.rank(), 4);
      return Tensor(data, of.dtype(), {shape[0], shape[1], shape[2], shape[3]});
  }
}

int64_t ForwardBytes(const ScanShape& shape) {
  const int64_t left = shape.heads * (shape.width * shape.state + 1) * SizeOf(DType::kF32);
  const int64_t halo = (shape.taps - 1) * shape.channels * SizeOf(shape.activation);
  return (shape.ranks - 1) * shape.segments() * (halo + left);
}

int64_t BackwardBytes(const ScanShape& shape) {
  ScanShape sums = shape;
  sums.activation = DType::kF32;
  return ForwardBytes(sums);
}

int64_t StatePassing::LeftElements() const {
  return shape_.segments() * shape_.heads * (shape_.width * shape_.state + 1);
}

void StatePassing::TakeSaved(Arena& arena, const char* category, Saved& saved) const {
  saved.halo = arena.Take(category, shape_.activation,
                          {shape_.segments(), shape_.taps - 1, shape_.channels});
}

void StatePassing::TakeScratch(Arena& arena, Saved& saved) const {
  const int64_t rows = shape_.segments() * (shape_.taps - 1);
  saved.tails = arena.Take("scratch", shape_.activation, {shape_.ranks, rows, shape_.channels});
  saved.d_halos = arena.Take("scratch", DType::kF32, {shape_.ranks, rows, shape_.channels});
  saved.left = arena.Take("scratch", DType::kF32, {shape_.ranks, LeftElements()});
  saved.ends = arena.Take("scratch", DType::kF32,
                          {shape_.segments(), shape_.heads, shape_.width, shape_.state});
}

Tensor StatePassing::PartOf(const Tensor& halos, int rank) const {
  return halos.Rows(rank, 1).Reshape({shape_.segments(), shape_.taps - 1, shape_.channels});
}

void StatePassing::PassInputs(const Call& call, const std::vector<Channels>& inputs,
                              const Saved& saved) const {
  CHECK_EQ(call.group.size(), shape_.ranks);
  const SequenceLayout layout = SequenceLayout::Zigzag(shape_.ranks);
  const int rank = call.group.rank();
  const int64_t reach = shape_.taps - 1, length = inputs.front().positions.dim(1);
  const int64_t tail = std::min(reach, length);
  const Tensor own = PartOf(saved.tails, rank);
  for (const Channels& some : inputs) {
    const int64_t n = some.positions.dim(2);
    for (const int late : {0, 1}) {
      kernels::CopyStrided(call.stream, Rows(some.positions, late, length - tail, tail, 0, n),
                           Rows(own, late, reach - tail, tail, some.first, n));
    }
  }
  call.group.AllGather(call.stream, saved.tails);
  // In front of a sequence there are zeros.
  if (rank * length < reach) kernels::Zero(call.stream, saved.halo);
  for (const int late : {0, 1}) {
    const int segment = layout.SegmentAt({rank, late});
    ForReached(reach, length, [&](int front, int64_t begin, int64_t rows) {
      if (segment < front) return;
      const Place from = layout.PlaceOf(segment - front);
      kernels::CopyStrided(
          call.stream,
          Rows(PartOf(saved.tails, from.rank), from.nth, reach - rows, rows, 0, shape_.channels),
          Rows(saved.halo, late, begin, rows, 0, shape_.channels));
    });
  }
}

Tensor StatePassing::OwnHaloGradient(const Call& call, const Saved& saved) const {
  return PartOf(saved.d_halos, call.group.rank());
}

// The work of the caller that comes last overlaps with this exchange.
void StatePassing::PassInputGradients(const Call& call, const std::vector<Channels>& gradients,
                                      const Saved& saved) const {
  kernels::Event* const arrived =
      call.overlap != nullptr && call.beside_last ? call.overlap->returned[0].get() : nullptr;
  context::StartExchange(
      call, arrived, [&](kernels::Stream& stream) { call.group.AllGather(stream, saved.d_halos); });
  if (call.beside_last) call.beside_last();
  context::AwaitExchange(call, arrived, Collective::kAllGather);
  const SequenceLayout layout = SequenceLayout::Zigzag(shape_.ranks);
  const int64_t reach = shape_.taps - 1, length = gradients.front().positions.dim(1);
  for (const int late : {0, 1}) {
    const int segment = layout.SegmentAt({call.group.rank(), late});
    ForReached(reach, length, [&](int behind, int64_t begin, int64_t rows) {
      if (segment + behind >= layout.segments()) return;
      const Place from = layout.PlaceOf(segment + behind);
      for (const Channels& some : gradients) {
        const int64_t n = some.positions.dim(2);
        kernels::CopyStrided(
            call.stream,
            Rows(PartOf(saved.d_halos, from.rank), from.nth, begin, rows, some.first, n),
            Rows(some.positions, late, length - rows, rows, 0, n), /*accumulate=*/true);
      }
    });
  }
}

Tensor StatePassing::OwnStates(const Call& call, const Saved& saved) const {
  return Tensor(saved.left.Rows(call.group.rank(), 1).data(), DType::kF32,
                {shape_.segments(), shape_.heads, shape_.width, shape_.state});
}

Tensor StatePassing::OwnDecays(const Call& call, const Saved& saved) const {
  return Tensor(OwnStates(call, saved).f32() + saved.ends.elements(), DType::kF32,
                {shape_.segments(), shape_.heads});
}

// In backward, the work of the caller that comes first overlaps with this exchange.
void StatePassing::PassStates(const Call& call, bool reverse, const Saved& saved) const {
  const bool beside = reverse && call.beside_first;
  kernels::Event* const arrived =
      call.overlap != nullptr && beside ? call.overlap->arrived[0].get() : nullptr;
  context::StartExchange(
      call, arrived, [&](kernels::Stream& stream) { call.group.AllGather(stream, saved.left); });
  if (beside) call.beside_first();
  context::AwaitExchange(call, arrived, Collective::kAllGather);
  const int64_t of_rank = LeftElements(), size = shape_.width * shape_.state;
  const int64_t segments = shape_.segments();
  float* const states = saved.left.f32();
  float* const decays = states + saved.ends.elements();
  std::vector<int64_t> parts = shape_.parts;
  if (parts.empty()) parts = {shape_.heads};
  int64_t first = 0;
  for (const int64_t heads : parts) {
    kernels::SsdPassArgs args;
    args.states = Tensor(states + segments * first * size, DType::kF32,
                         {shape_.ranks, segments, heads, size}, {of_rank, heads * size, size, 1});
    args.decays = Tensor(decays + segments * first, DType::kF32, {shape_.ranks, segments, heads},
                         {of_rank, heads, 1});
    args.rank = call.group.rank();
    args.reverse = reverse;
    args.own = OfHeads(saved.ends, 1, first, heads);
    kernels::SsdPassStates(call.stream, args);
    first += heads;
  }
}

}  // namespace muster::parallel
