// Dropout: y = x * mask / (1 - p). The mask is computed where it is needed (dropout_mask.h). A warp
// takes a row, so that its sample and position are looked up once, and each thread packs of it.
// Bytes: [R,C] read and written once. A Philox block per four columns takes some 100 instructions,
// which in 16 bits last about as long as the memory traffic.
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/random/dropout.h"
#include "kernels/random/dropout_mask.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kRows = 8;  // of a block

template <typename T>
struct Data {
  const T* x;
  T* out;
  const uint32_t* sample;
  const int32_t* positions;
  int64_t rows, columns, sequence, first_row;
  DropoutMask mask;
};

// kPacks: rows begin at 16 bytes and are whole packs of N.
template <typename T, int N, bool kPacks>
__global__ void __launch_bounds__(kRows* kWarp) DropoutKernel(const Data<T> d) {
  static_assert(N % 4 == 0, "whole Philox blocks");
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.y;
  if (row >= d.rows) return;
  const int64_t token = d.first_row + row;
  const int64_t of_sample = token / d.sequence;
  const int64_t index = token - of_sample * d.sequence;
  const auto position = static_cast<uint32_t>(d.positions == nullptr ? index : d.positions[index]);
  const uint64_t sample =
      (d.sample[0] | static_cast<uint64_t>(d.sample[1]) << 32) + static_cast<uint64_t>(of_sample);
  const T* const x = d.x + row * d.columns;
  T* const out = d.out + row * d.columns;
  for (int64_t i = threadIdx.x * N; i < d.columns; i += kWarp * N) {
    float values[N];
    if constexpr (kPacks) {
      LoadFloats<N>(x + i, values);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) values[j] = i + j < d.columns ? ToFloat(x[i + j]) : 0.f;
    }
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      float factors[4];
      d.mask.Factors(sample, position, static_cast<uint32_t>((i + j) / 4), factors);
#pragma unroll
      for (int k = 0; k < 4; ++k) values[j + k] *= factors[k];
    }
    if constexpr (kPacks) {
      StorePack<N>(out + i, FromFloats<T>(values));
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (i + j < d.columns) out[i + j] = FromFloat<T>(values[j]);
      }
    }
  }
}

template <typename T>
void Run(CudaStream& stream, const DropoutArgs& args) {
  const Data<T> d{args.x.as<T>(),
                  args.out.as<T>(),
                  args.sample.as<uint32_t>(),
                  args.positions.empty() ? nullptr : args.positions.as<int32_t>(),
                  args.x.dim(0),
                  args.x.dim(1),
                  args.sequence,
                  args.first_row,
                  DropoutMask::Make(args.probability, args.seed, args.site)};
  const auto blocks = static_cast<unsigned>(CeilDiv(d.rows, kRows));
  const dim3 threads(kWarp, kRows);
  constexpr int N = kPackSize<T>;
  if (Aligned16(args.x) && Aligned16(args.out) && d.columns % N == 0) {
    DropoutKernel<T, N, true><<<blocks, threads, 0, stream.handle()>>>(d);
  } else {
    DropoutKernel<T, 4, false><<<blocks, threads, 0, stream.handle()>>>(d);
  }
  stream.CheckLaunch("Dropout");
}

}  // namespace

void Dropout(Stream& stream, const DropoutArgs& args) {
  if (args.x.elements() == 0) return;
  DispatchFloat(args.x.dtype(),
                [&](auto tag) { Run<decltype(tag)>(CudaStream::Of(stream), args); });
}

}  // namespace muster::kernels::cuda
