// Sums of the contributions of several ranks, as one binary tree over the ranks, in registers.
// Bytes: every part once, the sum once.
#include "kernels/peers/sum_parts.h"

#include "kernels/cuda/elementwise.cuh"
#include "kernels/optimizer/reduce.h"
#include "kernels/optimizer/step_math.h"

namespace muster::kernels::cuda {
namespace {

// Where the parts of n elements are: behind each other, except part `own` if that is not negative.
template <typename T>
struct Parts {
  const T* in;
  int64_t n;
  const T* mine = nullptr;
  int own = -1;

  __device__ const T* of(int64_t part) const { return part == own ? mine : in + part * n; }
};

// Parts [kFirst, kFirst + kCount) as SumAsTree adds them, in registers: their number is known.
template <int kFirst, int kCount, int N, typename T>
__device__ void SumTree(const Parts<T>& parts, int64_t i, float (&sum)[N]) {
  if constexpr (kCount == 1) {
    LoadFloats<N>(parts.of(kFirst) + i, sum);
  } else {
    constexpr int kLeft = kCount > 4 ? 4 : kCount > 2 ? 2 : 1;
    float right[N];
    SumTree<kFirst, kLeft>(parts, i, sum);
    SumTree<kFirst + kLeft, kCount - kLeft>(parts, i, right);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += right[j];
  }
}

// kParts 0: any number of them.
template <int kParts, typename T, typename O>
struct SumPartsElements {
  static_assert(kParts <= 8);
  Parts<T> parts;
  O* out;
  int64_t count;

  template <int N>
  __device__ void Apply(int64_t i) const {
    float sum[N];
    if constexpr (kParts > 0) {
      SumTree<0, kParts>(parts, i, sum);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sum[j] = SumAsTree(count, [&](int64_t part) { return ToFloat(parts.of(part)[i + j]); });
      }
    }
    StorePack<N>(out + i, FromFloats<O>(sum));
  }
};

template <int kParts, typename T, typename O>
void LaunchSumParts(CudaStream& stream, const Parts<T>& parts, O* out, int64_t count) {
  // Where the second part is aligned all of `in` are.
  Elementwise<kPackSize<T>>(stream, "SumParts", parts.n,
                            {parts.in, parts.in + parts.n, parts.mine, out},
                            SumPartsElements<kParts, T, O>{parts, out, count});
}

template <typename T, typename O>
void SumPartsTo(CudaStream& stream, const Parts<T>& parts, O* out, int64_t count) {
  switch (count) {
    case 2:
      return LaunchSumParts<2>(stream, parts, out, count);
    case 3:
      return LaunchSumParts<3>(stream, parts, out, count);
    case 4:
      return LaunchSumParts<4>(stream, parts, out, count);
    case 8:
      return LaunchSumParts<8>(stream, parts, out, count);
    default:
      return LaunchSumParts<0>(stream, parts, out, count);
  }
}

}  // namespace

void SumParts(Stream& stream, Tensor in, Tensor out) {
  CudaStream& cuda = CudaStream::Of(stream);
  const int64_t n = out.elements(), parts = in.elements() / n;
  DispatchFloat(in.dtype(), [&](auto tag) {
    using T = decltype(tag);
    if (out.dtype() == DType::kF32) {
      SumPartsTo(cuda, Parts<T>{in.as<T>(), n}, out.f32(), parts);
    } else {
      SumPartsTo(cuda, Parts<T>{in.as<T>(), n}, out.as<T>(), parts);
    }
  });
}

void SumPartsWithOwn(Stream& stream, Tensor in, Tensor mine, int own, Tensor out) {
  const int64_t n = out.elements(), parts = in.elements() / n;
  CHECK(in.contiguous() && mine.contiguous() && out.contiguous() && parts * n == in.elements() &&
        mine.elements() == n && mine.dtype() == in.dtype() && out.dtype() == in.dtype() &&
        own >= 0 && own < parts);
  DispatchFloat(in.dtype(), [&](auto tag) {
    using T = decltype(tag);
    SumPartsTo(CudaStream::Of(stream), Parts<T>{in.as<T>(), n, mine.as<T>(), own}, out.as<T>(),
               parts);
  });
}

}  // namespace muster::kernels::cuda
