// Weight gradients on the main loop of hopper_main_loop.cuh. k counts tokens, and both operands lie
// in memory with 64 columns of a token side by side (wgmma's MN-major form).
//
// Each thread squares what it writes. A block adds up its own tiles and leaves one pair.
#include "kernels/gemm/weight_gradient_hopper.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "base/status_macros.h"
#include "kernels/cuda/cluster_launch.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/device/cuda_status.h"
#include "kernels/gemm/hopper_main_loop.cuh"
#include "kernels/optimizer/reduce.h"

namespace muster::kernels::cuda {
namespace {

using hopper_gemm::kCluster;
using hopper_gemm::kDepth;
using hopper_gemm::kGroups;
using hopper_gemm::kThreads;
using hopper_gemm::kTileColumns;
using hopper_gemm::kTileRows;
using hopper_gemm::kWarpgroup;
using hopper_gemm::kWarps;
using hopper_gemm::Tile;

constexpr int kSharedBytes = hopper_gemm::SharedBytes(kWarps * 8);

struct GradientParams {
  hopper_gemm::Grid grid;
  int rows, columns;  // of dw
  bool accumulate;
  float* out;
  float2* squares;  // [kSquareParts] or null
};

struct GradientEpilogue {
  using Params = GradientParams;
  static constexpr bool kMnMajorA = true, kMnMajorB = true;
  static constexpr int kParts = 1;

  const Params& p;
  double* const warp_squares;
  double squares = 0;

  __device__ __forceinline__ GradientEpilogue(const Params& params, char* memory)
      : p(params), warp_squares(reinterpret_cast<double*>(memory)) {}

  __device__ __forceinline__ static int FirstColumn(const Params& /*p*/, const Tile& tile,
                                                    int rank) {
    return tile.column * kTileColumns + rank * (kTileColumns / 2);
  }
  template <int kPart>
  __device__ __forceinline__ void Do() {}  // Take does everything
  __device__ __forceinline__ void Begin(const Tile& /*tile*/) {}

  // Writes or adds the tile to dw; four lanes write 32 bytes of a row.
  __device__ __forceinline__ void Take(const Tile& tile, const float (&sums)[128]) {
    const int group = threadIdx.x / kWarpgroup - 1;
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
    const int row =
        (tile.row * kGroups + group) * (kTileRows / kGroups) + thread / kWarp * 16 + lane / 4;
    const int column = tile.column * kTileColumns + lane % 4 * 2;
    float* const out = p.out + static_cast<int64_t>(row) * p.columns + column;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + h * 8 >= p.rows) continue;
      float* const of_row = out + static_cast<int64_t>(h) * 8 * p.columns;
      float square = 0;
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        constexpr int kReads = 8;  // in flight
        float2 before[kReads] = {};
        if (p.accumulate) {
#pragma unroll
          for (int i = 0; i < kReads; ++i) {
            const int j = part * kReads + i;
            if (column + j * 8 < p.columns) {
              before[i] = *reinterpret_cast<const float2*>(of_row + j * 8);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kReads; ++i) {
          const int j = part * kReads + i;
          float2 value = {sums[4 * j + 2 * h], sums[4 * j + 2 * h + 1]};
          if (p.accumulate) {
            value.x += before[i].x;
            value.y += before[i].y;
          }
          if (column + j * 8 >= p.columns) continue;
          *reinterpret_cast<float2*>(of_row + j * 8) = value;
          square = fmaf(value.x, value.x, square);
          square = fmaf(value.y, value.y, square);
        }
      }
      // 64 squares are added in fp32, which has the range of the sum, and the rest in double.
      squares += square;
    }
  }

  // Leaves one pair a block, and zeros in the places of blocks that do not exist.
  __device__ __forceinline__ void Finish() {
    if (p.squares == nullptr) return;
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      squares += __shfl_xor_sync(0xffffffffu, squares, distance);
    }
    const int thread = threadIdx.x - kWarpgroup;
    if (thread % kWarp == 0) warp_squares[thread / kWarp] = squares;
    hopper::NamedBarrier(15, kGroups * kWarpgroup);
    if (thread != 0) return;
    double sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += warp_squares[warp];
    const auto rounded = static_cast<float>(sum);
    p.squares[blockIdx.x] = {rounded, isfinite(rounded) ? static_cast<float>(sum - rounded) : 0.f};
    for (int part = blockIdx.x + gridDim.x; part < kSquareParts; part += gridDim.x) {
      p.squares[part] = {0.f, 0.f};
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    HopperWeightGradientGemmKernel(const __grid_constant__ CUtensorMap a,
                                   const __grid_constant__ CUtensorMap b, const GradientParams p) {
  hopper_gemm::RunMainLoop<T, GradientEpilogue>(a, b, p);
}

// Rows of tiles in a group (hopper_gemm::Grid), as even as possible, so that the tiles that run at
// one moment form about a square.
int RowsOfGroup(int cluster_rows, int clusters) {
  const int groups = std::max(1, static_cast<int>(std::lround(cluster_rows / std::sqrt(clusters))));
  return (cluster_rows + groups - 1) / groups;
}

template <typename T>
absl::Status Launch(CudaStream& stream, const HopperWeightGradient& gradient) {
  const auto kernel = HopperWeightGradientGemmKernel<T>;
  CUtensorMap a, b;
  RETURN_IF_ERROR(DescribeBoxes(gradient.dy, kDepth, a));
  RETURN_IF_ERROR(DescribeBoxes(gradient.x, kDepth, b));
  GradientParams p;
  p.rows = static_cast<int>(gradient.dw.dim(0));
  p.columns = static_cast<int>(gradient.dw.dim(1));
  p.grid.depth_blocks = static_cast<int>(CeilDiv(gradient.dy.dim(0), kDepth));
  p.grid.cluster_rows = static_cast<int>(CeilDiv(p.rows, kCluster * kTileRows));
  p.grid.tile_columns = static_cast<int>(CeilDiv(p.columns, kTileColumns));
  p.grid.tiles = p.grid.cluster_rows * p.grid.tile_columns;
  p.accumulate = gradient.accumulate;
  p.out = gradient.dw.f32();
  p.squares = reinterpret_cast<float2*>(gradient.squares.data());
  const int clusters = std::min({p.grid.tiles, stream.cuda_device().multiprocessors() / kCluster,
                                 static_cast<int>(kSquareParts) / kCluster});
  p.grid.group = RowsOfGroup(p.grid.cluster_rows, clusters);
  return CudaStatus(
      LaunchClusters(stream, kernel, clusters, kCluster, kThreads, kSharedBytes, a, b, p),
      "weight gradient");
}

}  // namespace

bool HopperWeightGradientServes(const CudaDevice& device, const HopperWeightGradient& gradient) {
  const auto is_aligned = [](const Tensor& matrix) {
    return Aligned16(matrix) && matrix.dim(1) % 8 == 0 && matrix.dim(0) < (int64_t{1} << 30);
  };
  return HasWarpgroups(device) && gradient.dy.dtype() != DType::kF32 && is_aligned(gradient.dy) &&
         is_aligned(gradient.x) &&
         reinterpret_cast<uintptr_t>(gradient.dw.data()) % sizeof(float2) == 0;
}

absl::Status RunHopperWeightGradient(CudaStream& stream, const HopperWeightGradient& gradient) {
  return gradient.dy.dtype() == DType::kBF16 ? Launch<__nv_bfloat16>(stream, gradient)
                                             : Launch<__half>(stream, gradient);
}

}  // namespace muster::kernels::cuda
