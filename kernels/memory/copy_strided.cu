// Copies, casts and additions between tensors of any strides.
// Neighbouring dimensions without gaps on both sides are merged, so a call has as few dimensions as
// its strides allow. A thread moves one pack of the last dimension where both sides are dense in
// it and every row is aligned, a single element otherwise. Bytes: read + written once, `to` read
// as well when it is added to.
#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Sizes and strides in elements, the last dimension in packs.
template <typename From, typename To>
struct Data {
  const From* from;
  To* to;
  int64_t packs;
  int64_t size[Tensor::kRankMax];
  int64_t from_stride[Tensor::kRankMax];
  int64_t to_stride[Tensor::kRankMax];
};

// Index: 32 bits where they suffice, since a division of 64 bits costs as much as the access.
template <typename From, typename To, int N, bool kAccumulate, typename Index>
__global__ void __launch_bounds__(kThreads) CopyKernel(const Data<From, To> d) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (thread >= d.packs) return;
  auto rest = static_cast<Index>(thread);
  int64_t from = 0, to = 0;
#pragma unroll
  for (int i = Tensor::kRankMax - 1; i > 0; --i) {
    const auto size = static_cast<Index>(d.size[i]);
    const Index at = rest % size;
    rest /= size;
    from += at * d.from_stride[i];
    to += at * d.to_stride[i];
  }
  from += rest * d.from_stride[0];
  to += rest * d.to_stride[0];
  const Pack<From, N> loaded = LoadPack<N>(d.from + from);
  if constexpr (std::is_same_v<From, To> && !kAccumulate) {
    StorePack<N>(d.to + to, loaded);
  } else {
    float x[N];
    ToFloats(loaded, x);
    if constexpr (kAccumulate) {
      float sum[N];
      LoadFloats<N>(d.to + to, sum);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] += sum[i];
    }
    StorePack<N>(d.to + to, FromFloats<To>(x));
  }
}

struct Dimension {
  int64_t size, from_stride, to_stride;
};

// The same elements in as few dimensions as possible, at the end of the array; the others have
// size 1.
std::array<Dimension, Tensor::kRankMax> Merged(const Tensor& from, const Tensor& to) {
  std::array<Dimension, Tensor::kRankMax> merged;
  merged.fill({1, 0, 0});
  int first = Tensor::kRankMax;  // the dimension that was added last
  for (int i = from.rank() - 1; i >= 0; --i) {
    if (from.dim(i) == 1) continue;
    if (first < Tensor::kRankMax) {
      Dimension& inner = merged[first];
      if (from.stride(i) == inner.size * inner.from_stride &&
          to.stride(i) == inner.size * inner.to_stride) {
        inner.size *= from.dim(i);
        continue;
      }
    }
    merged[--first] = {from.dim(i), from.stride(i), to.stride(i)};
  }
  return merged;
}

template <typename From, typename To, int N>
void Launch(CudaStream& stream, const Tensor& from, const Tensor& to, bool accumulate,
            const std::array<Dimension, Tensor::kRankMax>& dimensions) {
  Data<From, To> d{from.as<From>(), to.as<To>(), 1, {}, {}, {}};
  for (int i = 0; i < Tensor::kRankMax; ++i) {
    const int64_t width = i == Tensor::kRankMax - 1 ? N : 1;
    d.size[i] = dimensions[i].size / width;
    d.from_stride[i] = dimensions[i].from_stride * width;
    d.to_stride[i] = dimensions[i].to_stride * width;
    d.packs *= d.size[i];
  }
  const auto blocks = static_cast<unsigned>(CeilDiv(d.packs, kThreads));
  const auto launch = [&](auto kernel) { kernel<<<blocks, kThreads, 0, stream.handle()>>>(d); };
  const bool narrow = d.packs <= UINT32_MAX;
  if (accumulate) {
    launch(narrow ? CopyKernel<From, To, N, true, uint32_t>
                  : CopyKernel<From, To, N, true, uint64_t>);
  } else {
    launch(narrow ? CopyKernel<From, To, N, false, uint32_t>
                  : CopyKernel<From, To, N, false, uint64_t>);
  }
}

}  // namespace

void CopyStrided(Stream& stream, Tensor from, Tensor to, bool accumulate) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (from.elements() == 0) return;
  const std::array<Dimension, Tensor::kRankMax> dimensions = Merged(from, to);
  DispatchFloat(from.dtype(), [&](auto a) {
    DispatchFloat(to.dtype(), [&](auto b) {
      using From = decltype(a);
      using To = decltype(b);
      // Packs by the narrower type; the wider one takes two accesses.
      constexpr int N = std::max(kPackSize<From>, kPackSize<To>);
      const Dimension& last = dimensions.back();
      bool packs = last.from_stride == 1 && last.to_stride == 1 && last.size % N == 0 &&
                   Aligned16(from) && Aligned16(to);
      for (int i = 0; i + 1 < Tensor::kRankMax; ++i) {
        packs = packs && dimensions[i].from_stride % N == 0 && dimensions[i].to_stride % N == 0;
      }
      if (packs) {
        Launch<From, To, N>(cuda, from, to, accumulate, dimensions);
      } else {
        Launch<From, To, 1>(cuda, from, to, accumulate, dimensions);
      }
    });
  });
  cuda.CheckLaunch("CopyStrided");
}

}  // namespace muster::kernels::cuda
