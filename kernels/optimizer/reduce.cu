// Sums over whole tensors in a fixed order: each block sums a strided share, and a second kernel
// adds the blocks' results in block order. The number of blocks depends on the device and the shape
// alone, so the same input gives the same bits. Bytes: the input once.
#include "kernels/optimizer/reduce.h"

#include <algorithm>
#include <vector>

#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/optimizer/square_parts.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kSumThreads = 512;
constexpr int kSumPacksInFlight = 4;

struct Identity {
  __device__ double operator()(float x) const { return x; }
};
struct Square {
  __device__ double operator()(float x) const { return static_cast<double>(x) * x; }
};

__device__ inline void StoreSum(double sum, double* out) { *out = sum; }
__device__ inline void StoreSum(double sum, float2* out) {
  const auto rounded = static_cast<float>(sum);
  // An infinite sum has no remainder.
  *out = {rounded, isfinite(rounded) ? static_cast<float>(sum - rounded) : 0.f};
}

// The sum is taken in double, so that one of 10^9 squares keeps fp32's full precision.
template <typename F, typename Out>
__global__ void __launch_bounds__(kSumThreads)
    SumKernel(const float* x, int64_t n, bool packs_allowed, Out* partial) {
  __shared__ double shared[kWarp];
  const F f;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kSumThreads;
  const int64_t packs = packs_allowed ? n / 4 : 0;
  double sum = 0;
  for (int64_t p = thread; p < packs; p += threads * kSumPacksInFlight) {
    Pack<float, 4> values[kSumPacksInFlight];
#pragma unroll
    for (int k = 0; k < kSumPacksInFlight; ++k) {
      const int64_t at = p + k * threads;
      values[k] = at < packs ? LoadPack<4>(x + at * 4) : Pack<float, 4>{};
    }
#pragma unroll
    for (int k = 0; k < kSumPacksInFlight; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += f(values[k][i]);
    }
  }
  for (int64_t i = packs * 4 + thread; i < n; i += threads) sum += f(x[i]);
  sum = BlockSum(sum, shared);
  if (threadIdx.x == 0) StoreSum(sum, partial + blockIdx.x);
}

// The tensors of one launch: as many as fit into a kernel's arguments.
constexpr int kTensors = 240;
struct Tensors {
  const float* x[kTensors];
  int64_t n[kTensors];
};
static_assert(sizeof(Tensors) + sizeof(double*) <= 4096);

// One block per tensor.
__global__ void __launch_bounds__(kSumThreads)
    SumTensorsKernel(const __grid_constant__ Tensors tensors, double* partial) {
  __shared__ double shared[kWarp];
  const float* const x = tensors.x[blockIdx.x];
  const int64_t n = tensors.n[blockIdx.x];
  const Square square;
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < n; i += kSumThreads) sum += square(x[i]);
  sum = BlockSum(sum, shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// `out` is one fp32, or a pair of them (SumSquaresPair).
__global__ void __launch_bounds__(kSumThreads)
    AddSumsKernel(const double* partial, int partials, float* out, bool pair, bool accumulate) {
  __shared__ double shared[kWarp];
  double sum = 0;
  for (int i = threadIdx.x; i < partials; i += kSumThreads) sum += partial[i];
  sum = BlockSum(sum, shared);
  if (threadIdx.x != 0) return;
  if (accumulate) sum += out[0];
  if (accumulate && pair) sum += out[1];
  float2 rounded;
  StoreSum(sum, &rounded);
  out[0] = rounded.x;
  if (pair) out[1] = rounded.y;
}

template <typename F>
void LaunchSum(Stream& stream, const char* op, const Tensor& x, const Tensor& out, bool pair,
               bool accumulate) {
  CudaStream& cuda = CudaStream::Of(stream);
  const int64_t n = x.elements();
  const int64_t per_block = int64_t{kSumThreads} * 4 * kSumPacksInFlight;
  const auto blocks = static_cast<int>(std::clamp<int64_t>(
      CeilDiv(n, per_block), 1, int64_t{4} * cuda.cuda_device().multiprocessors()));
  auto* partial = static_cast<double*>(cuda.Scratch(blocks * sizeof(double)));
  if (partial == nullptr) return;
  SumKernel<F><<<blocks, kSumThreads, 0, cuda.handle()>>>(x.f32(), n, Aligned16(x), partial);
  cuda.CheckLaunch(op);
  AddSumsKernel<<<1, kSumThreads, 0, cuda.handle()>>>(partial, blocks, out.f32(), pair, accumulate);
  cuda.CheckLaunch(op);
}

}  // namespace

void Sum(Stream& stream, Tensor x, Tensor out, bool accumulate) {
  LaunchSum<Identity>(stream, "Sum", x, out, /*pair=*/false, accumulate);
}

void SumSquares(Stream& stream, Tensor x, Tensor out, bool accumulate) {
  LaunchSum<Square>(stream, "SumSquares", x, out, /*pair=*/false, accumulate);
}

void SumSquaresPair(Stream& stream, Tensor x, Tensor out, bool accumulate) {
  LaunchSum<Square>(stream, "SumSquaresPair", x, out, /*pair=*/true, accumulate);
}

void SumPairs(Stream& stream, Tensor pairs, Tensor out, bool accumulate) {
  LaunchSum<Identity>(stream, "SumPairs", pairs, out, /*pair=*/true, accumulate);
}

void SumSquaresPair(Stream& stream, const std::vector<Tensor>& of, Tensor out, bool accumulate) {
  CudaStream& cuda = CudaStream::Of(stream);
  const auto count = static_cast<int>(of.size());
  auto* partial = static_cast<double*>(cuda.Scratch(std::max(count, 1) * sizeof(double)));
  if (partial == nullptr) return;
  for (int first = 0; first < count; first += kTensors) {
    const int here = std::min(kTensors, count - first);
    Tensors tensors;
    for (int i = 0; i < here; ++i) {
      tensors.x[i] = of[first + i].f32();
      tensors.n[i] = of[first + i].elements();
    }
    SumTensorsKernel<<<here, kSumThreads, 0, cuda.handle()>>>(tensors, partial + first);
    cuda.CheckLaunch("SumSquaresPair");
  }
  AddSumsKernel<<<1, kSumThreads, 0, cuda.handle()>>>(partial, count, out.f32(), /*pair=*/true,
                                                      accumulate);
  cuda.CheckLaunch("SumSquaresPair");
}

void SquareParts(CudaStream& stream, const Tensor& x, const Tensor& squares) {
  auto* const pairs = reinterpret_cast<float2*>(squares.data());
  SumKernel<Square><<<kSquareParts, kSumThreads, 0, stream.handle()>>>(x.f32(), x.elements(),
                                                                       Aligned16(x), pairs);
  stream.CheckLaunch("SquareParts");
}

}  // namespace muster::kernels::cuda
