// The merge of two partial results of attention (attention.h). Bytes: out is read and written once,
// partial_out and both lse are read once, lse is written.
//
// A group of neighbouring lanes, as many as a row has packs, takes one (token, head). Groups follow
// the order of the rows in memory, so that the accesses of a warp are contiguous. All lanes of a
// group read lse before the first of them writes it.
#include <algorithm>

#include "kernels/attention/attention.h"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
struct View {
  T* data;
  int64_t batch_stride, row_stride, head_stride;
};
template <typename T>
View<T> ViewOf(const Tensor& t) {
  return {t.as<T>(), t.stride(0), t.stride(1), t.stride(2)};
}

template <typename Out, typename Partial>
struct Data {
  View<Out> out;
  View<const Partial> partial;
  float* lse;
  const float* partial_lse;
  int64_t rows;  // (token, head)
  int sequence, heads, width;
  int lanes;  // of a group: a power of two up to a warp
};

template <typename Out, typename Partial, int N>
__global__ void __launch_bounds__(kThreads) MergeKernel(const Data<Out, Partial> d) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = thread / d.lanes;
  const int lane = static_cast<int>(thread % d.lanes);
  const bool inside = row < d.rows;
  const int64_t token = (inside ? row : 0) / d.heads;
  const int64_t head = (inside ? row : 0) % d.heads;
  const int64_t b = token / d.sequence, s = token % d.sequence;
  float* const lse = d.lse + (b * d.heads + head) * d.sequence + s;
  const float mine = *lse;
  const float other = d.partial_lse[(b * d.heads + head) * d.sequence + s];
  const float most = fmaxf(mine, other);
  const bool merges = inside && most != -INFINITY;  // rows without any key stay as they are
  const float merged = most + log1pf(expf(-fabsf(mine - other)));
  const float keep = expf(mine - merged), add = expf(other - merged);
  Out* const out =
      d.out.data + b * d.out.batch_stride + s * d.out.row_stride + head * d.out.head_stride;
  const Partial* const partial = d.partial.data + b * d.partial.batch_stride +
                                 s * d.partial.row_stride + head * d.partial.head_stride;
  __syncwarp();  // every lane has read lse
  if (!merges) return;
  for (int i = lane * N; i < d.width; i += d.lanes * N) {
    float x[N], y[N];
    LoadFloats<N>(out + i, x);
    LoadFloats<N>(partial + i, y);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = keep * x[j] + add * y[j];
    StorePack<N>(out + i, FromFloats<Out>(x));
  }
  if (lane == 0) *lse = merged;
}

template <typename Out, typename Partial>
void Launch(CudaStream& stream, const AttentionMergeArgs& args) {
  const Tensor &out = args.out, &partial = args.partial_out;
  Data<Out, Partial> d{ViewOf<Out>(out),
                       ViewOf<const Partial>(partial),
                       args.lse.f32(),
                       args.partial_lse.f32(),
                       out.dim(0) * out.dim(1) * out.dim(2),
                       static_cast<int>(out.dim(1)),
                       static_cast<int>(out.dim(2)),
                       static_cast<int>(out.dim(3)),
                       1};
  // Packs by the narrower type; the wider one takes two accesses.
  constexpr int N = std::max(kPackSize<Out>, kPackSize<Partial>);
  bool packs = d.width % N == 0 && Aligned16(out) && Aligned16(partial);
  for (int i = 0; i < 3; ++i) {
    packs = packs && out.stride(i) % N == 0 && partial.stride(i) % N == 0;
  }
  const int width = packs ? N : 1;
  while (d.lanes < kWarp && d.lanes * width < d.width) d.lanes *= 2;
  const auto blocks = static_cast<unsigned>(CeilDiv(d.rows * d.lanes, kThreads));
  if (packs) {
    MergeKernel<Out, Partial, N><<<blocks, kThreads, 0, stream.handle()>>>(d);
  } else {
    MergeKernel<Out, Partial, 1><<<blocks, kThreads, 0, stream.handle()>>>(d);
  }
  stream.CheckLaunch("AttentionMerge");
}

}  // namespace

void AttentionMerge(Stream& stream, const AttentionMergeArgs& args) {
  if (args.out.elements() == 0) return;
  DispatchFloat(args.out.dtype(), [&](auto a) {
    DispatchFloat(args.partial_out.dtype(),
                  [&](auto b) { Launch<decltype(a), decltype(b)>(CudaStream::Of(stream), args); });
  });
}

}  // namespace muster::kernels::cuda
