// Rotary position embedding. The table: a thread computes one pair, with angles in double as on the
// host. The rotation, in place: a thread takes a pack of the first half of a head and the same pack
// of the second half, for kHeads heads, so that it reads their cosines and sines once. Bytes:
// [B,S,heads,D] read and written once; the table stays in the cache.
#include <algorithm>
#include <cmath>

#include "kernels/attention/rotary.h"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 4;

__global__ void __launch_bounds__(kThreads)
    TableKernel(float* table, const int32_t* positions, int64_t first_position, double theta,
                RotaryScaling scaling, int64_t rows, int64_t half) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (thread >= rows * half) return;
  const int64_t row = thread / half;
  const int64_t i = thread % half;
  double frequency = pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(2 * half));
  if (scaling.factor != 1) {
    const double low = scaling.low_frequency_factor;
    const double turns =
        static_cast<double>(scaling.original_context) * frequency / 6.283185307179586;
    const double keep = fmin(fmax((turns - low) / (scaling.high_frequency_factor - low), 0.0), 1.0);
    frequency = keep * frequency + (1 - keep) * frequency / scaling.factor;
  }
  const int64_t position = positions == nullptr ? first_position + row : positions[row];
  double sine, cosine;
  sincos(static_cast<double>(position) * frequency, &sine, &cosine);
  table[row * 2 * half + i] = static_cast<float>(cosine);
  table[row * 2 * half + half + i] = static_cast<float>(sine);
}

template <typename T>
struct Data {
  T* x;
  const float* table;
  int64_t batch_stride, row_stride, head_stride;
  int64_t tokens;
  int sequence, heads, half;
  float sign;
};

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) RotateKernel(const Data<T> d) {
  const int packs = d.half / N;
  const int groups = (d.heads + kHeads - 1) / kHeads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t token = thread / (packs * groups);
  if (token >= d.tokens) return;
  const int rest = static_cast<int>(thread % (packs * groups));
  const int i = rest % packs * N;
  const int head = rest / packs * kHeads;
  const int64_t row = token % d.sequence;
  float cosine[N], sine[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    cosine[j] = d.table[row * 2 * d.half + i + j];
    sine[j] = d.sign * d.table[row * 2 * d.half + d.half + i + j];
  }
  T* const x =
      d.x + token / d.sequence * d.batch_stride + row * d.row_stride + head * d.head_stride + i;
  Pack<T, N> a[kHeads], b[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (head + h >= d.heads) continue;
    a[h] = LoadPack<N>(x + h * d.head_stride);
    b[h] = LoadPack<N>(x + h * d.head_stride + d.half);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (head + h >= d.heads) continue;
    float first[N], second[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      first[j] = a[h][j] * cosine[j] - b[h][j] * sine[j];
      second[j] = b[h][j] * cosine[j] + a[h][j] * sine[j];
    }
    StorePack<N>(x + h * d.head_stride, FromFloats<T>(first));
    StorePack<N>(x + h * d.head_stride + d.half, FromFloats<T>(second));
  }
}

template <typename T>
void Rotate(CudaStream& stream, const Tensor& x, const Tensor& table, bool inverse) {
  const Data<T> d{x.as<T>(),
                  table.f32(),
                  x.stride(0),
                  x.stride(1),
                  x.stride(2),
                  x.dim(0) * x.dim(1),
                  static_cast<int>(x.dim(1)),
                  static_cast<int>(x.dim(2)),
                  static_cast<int>(x.dim(3) / 2),
                  inverse ? -1.f : 1.f};
  const auto launch = [&](auto kernel, int width) {
    const int64_t threads = d.tokens * (d.half / width) * CeilDiv(d.heads, kHeads);
    kernel<<<static_cast<unsigned>(CeilDiv(threads, kThreads)), kThreads, 0, stream.handle()>>>(d);
  };
  constexpr int N = kPackSize<T>;
  if (Aligned16(x) && d.half % N == 0 && d.batch_stride % N == 0 && d.row_stride % N == 0 &&
      d.head_stride % N == 0) {
    launch(RotateKernel<T, N>, N);
  } else {
    launch(RotateKernel<T, 1>, 1);
  }
  stream.CheckLaunch("Rotary");
}

}  // namespace

void RotaryTable(Stream& stream, const RotaryTableArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  const int64_t rows = args.table.dim(0);
  const int64_t half = args.table.dim(1) / 2;
  if (rows * half == 0) return;
  TableKernel<<<static_cast<unsigned>(CeilDiv(rows * half, kThreads)), kThreads, 0,
                cuda.handle()>>>(args.table.f32(),
                                 args.positions.empty() ? nullptr : args.positions.as<int32_t>(),
                                 args.first_position, args.theta, args.scaling, rows, half);
  cuda.CheckLaunch("RotaryTable");
}

void Rotary(Stream& stream, Tensor x, Tensor table, bool inverse) {
  if (x.elements() == 0) return;
  DispatchFloat(x.dtype(), [&](auto tag) {
    Rotate<decltype(tag)>(CudaStream::Of(stream), x, table, inverse);
  });
}

}  // namespace muster::kernels::cuda
