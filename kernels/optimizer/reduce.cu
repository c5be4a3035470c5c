// Sums in a fixed order: each block adds a strided share, a second kernel adds the blocks' results
// in block order. The number of blocks depends on the device and the shape only, so the same input
// gives the same bits. Bytes: the input once; partial results are under 1 % of it.
#include <algorithm>
#include <vector>

#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/gemm/weight_gradient.h"
#include "kernels/ops_cuda.h"
#include "kernels/optimizer/square_parts.h"

namespace muster::kernels::cuda {
namespace {

// ---- over rows ----------------------------------------------------------------------------------

constexpr int kColumnWarps = 8;
constexpr int kRowsInFlight = 8;
// Of one AddPartials block: few columns, so that there are blocks for all multiprocessors.
constexpr int kPartialColumns = 16;
constexpr int kPartialRows = 64;

// Block (x, y): packs of N columns [x * 32, +32) of rows y, y + gridDim.y, ... taken
// kRowsInFlight at a time by each warp.
template <typename T, int N>
__global__ void __launch_bounds__(kColumnWarps* kWarp)
    ColumnSumKernel(const T* x, int64_t rows, int64_t columns, float* partial) {
  __shared__ float shared[kColumnWarps][kWarp * N];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kWarp + lane) * N;
  float sum[N] = {};
  if (column < columns) {
    constexpr int64_t kStep = kColumnWarps * kRowsInFlight;
    for (int64_t row = blockIdx.y * kStep + warp; row < rows; row += gridDim.y * kStep) {
      Pack<T, N> packs[kRowsInFlight];
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        const int64_t at = row + r * kColumnWarps;
        packs[r] = at < rows ? LoadPack<N>(x + at * columns + column) : Pack<T, N>{};
      }
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += packs[r][i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) shared[warp][i * kWarp + lane] = sum[i];
  __syncthreads();
  for (int j = threadIdx.x; j < kWarp * N; j += blockDim.x) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kColumnWarps; ++w) total += shared[w][j];
    const int64_t at = (static_cast<int64_t>(blockIdx.x) * kWarp + j % kWarp) * N + j / kWarp;
    if (at < columns) partial[blockIdx.y * columns + at] = total;
  }
}

__global__ void __launch_bounds__(kPartialColumns* kPartialRows)
    AddPartialsKernel(const float* partial, int64_t partials, int64_t columns, bool accumulate,
                      float* first, float* second, float* third, bool accumulate_third) {
  __shared__ float shared[kPartialRows][kPartialColumns + 1];
  const int lane = threadIdx.x % kPartialColumns;
  const int row = threadIdx.x / kPartialColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kPartialColumns + lane;
  const int64_t of_two = second == nullptr ? columns : 2 * columns;
  const int64_t stride = third == nullptr ? of_two : of_two + columns;
  // A warp adds up a column of the tile in the end. What the sum is added to is not the kernel in
  // front's, but of those before it, which are done.
  const int warp = threadIdx.x / kWarp, rows = threadIdx.x % kWarp;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kPartialColumns + warp;
  float* out = nullptr;
  float before = 0;
  if (warp < kPartialColumns && rows == 0 && at < stride) {
    out = at < columns ? first + at : at < of_two ? second + (at - columns) : third + (at - of_two);
    if (at < of_two ? accumulate : accumulate_third) before = *out;
  }
  WaitForKernelInFront();
  LetNextKernelBegin();
  float sum = 0;
  if (column < stride) {
#pragma unroll 8
    for (int64_t p = row; p < partials; p += kPartialRows) sum += partial[p * stride + column];
  }
  shared[row][lane] = sum;
  __syncthreads();
  static_assert(kPartialRows == 2 * kWarp);
  if (warp >= kPartialColumns) return;
  const float total = WarpSum(shared[rows][warp] + shared[rows + kWarp][warp]);
  if (out != nullptr) *out = before + total;
}

template <typename T, int N>
void LaunchColumnSum(CudaStream& stream, const Tensor& x, const Tensor& out, bool accumulate,
                     float* partial) {
  const int64_t rows = x.dim(0);
  const int64_t columns = x.dim(1);
  const int64_t column_blocks = CeilDiv(columns, kWarp * N);
  const int64_t blocks = ColumnSumBlocks(stream.cuda_device(), rows, column_blocks);
  const dim3 grid(static_cast<unsigned>(column_blocks), static_cast<unsigned>(blocks));
  ColumnSumKernel<T, N>
      <<<grid, kColumnWarps * kWarp, 0, stream.handle()>>>(x.as<T>(), rows, columns, partial);
  stream.CheckLaunch("ColumnSum");
  AddPartials(stream, partial, blocks, columns, accumulate, out.f32(), nullptr);
}

// ---- over everything ----------------------------------------------------------------------------

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
  // Nothing is left over of an infinite sum.
  *out = {rounded, isfinite(rounded) ? static_cast<float>(sum - rounded) : 0.f};
}

// In double: a sum of 10^9 squares keeps fp32's full precision.
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

// As many as fit a kernel's arguments.
constexpr int kPieces = 240;
struct Pieces {
  const float* x[kPieces];
  int64_t n[kPieces];
};
static_assert(sizeof(Pieces) + sizeof(double*) <= 4096);

// A block a piece.
__global__ void __launch_bounds__(kSumThreads)
    SumPiecesKernel(const __grid_constant__ Pieces pieces, double* partial) {
  __shared__ double shared[kWarp];
  const float* const x = pieces.x[blockIdx.x];
  const int64_t n = pieces.n[blockIdx.x];
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

void AddPartials(CudaStream& stream, const float* partial, int64_t partials, int64_t columns,
                 bool accumulate, float* first, float* second, float* third,
                 bool accumulate_third) {
  const int64_t sums = columns * (1 + (second != nullptr ? 1 : 0) + (third != nullptr ? 1 : 0));
  LaunchOverlapped(stream, AddPartialsKernel, CeilDiv(sums, kPartialColumns),
                   kPartialColumns * kPartialRows, 0, partial, partials, columns, accumulate, first,
                   second, third, accumulate_third);
  stream.CheckLaunch("AddPartials");
}

int64_t ColumnSumBlocks(const CudaDevice& device, int64_t rows, int64_t column_blocks) {
  const int64_t wanted = CeilDiv(int64_t{8} * device.multiprocessors(), column_blocks);
  return std::clamp<int64_t>(CeilDiv(rows, kColumnWarps * kRowsInFlight), 1, wanted);
}

int64_t ColumnSumScratchBytes(const CudaDevice& device, int64_t rows, int64_t columns) {
  // Narrow packs make the most column blocks, hence the fewest row blocks; wide ones the most.
  const int64_t widest = kPackSize<__nv_bfloat16> * kWarp;
  return ColumnSumBlocks(device, rows, CeilDiv(columns, widest)) * columns *
         static_cast<int64_t>(sizeof(float));
}

void ColumnSum(CudaStream& stream, const Tensor& x, const Tensor& out, bool accumulate,
               void* scratch) {
  DispatchFloat(x.dtype(), [&](auto tag) {
    using T = decltype(tag);
    auto* partial = static_cast<float*>(scratch);
    if (Aligned16(x) && x.dim(1) % kPackSize<T> == 0) {
      LaunchColumnSum<T, kPackSize<T>>(stream, x, out, accumulate, partial);
    } else {
      LaunchColumnSum<T, 1>(stream, x, out, accumulate, partial);
    }
  });
}

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
  for (int first = 0; first < count; first += kPieces) {
    const int here = std::min(kPieces, count - first);
    Pieces pieces;
    for (int i = 0; i < here; ++i) {
      pieces.x[i] = of[first + i].f32();
      pieces.n[i] = of[first + i].elements();
    }
    SumPiecesKernel<<<here, kSumThreads, 0, cuda.handle()>>>(pieces, partial + first);
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
