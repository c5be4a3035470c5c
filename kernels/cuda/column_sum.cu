// Sums over rows in a fixed order: each block sums a strided share of the rows, and a second kernel
// adds the blocks' results in block order. The number of blocks depends on the device and the shape
// alone, so the same input gives the same bits. Bytes: the input once; partial results are under
// 1 % of it.
#include "kernels/cuda/column_sum.cuh"

#include <algorithm>

#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/pack.cuh"

namespace muster::kernels::cuda {
namespace {

constexpr int kColumnWarps = 8;
constexpr int kRowsInFlight = 8;
// The tile of an AddPartials block has few columns, so that there are blocks for all
// multiprocessors.
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
  // In the end a warp adds up a column of the tile. What the sum is added to was written by kernels
  // before the previous one, which are done, so it is read before the wait.
  const int warp = threadIdx.x / kWarp, rows = threadIdx.x % kWarp;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kPartialColumns + warp;
  float* out = nullptr;
  float before = 0;
  if (warp < kPartialColumns && rows == 0 && at < stride) {
    out = at < columns ? first + at : at < of_two ? second + (at - columns) : third + (at - of_two);
    if (at < of_two ? accumulate : accumulate_third) before = *out;
  }
  WaitForPreviousKernel();
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

}  // namespace muster::kernels::cuda
