// One block an SM, and a tile of 128 x 256 at a time: a producer warp keeps four stages of 64
// tokens on their way through the copy engine, and two warpgroups multiply 64 x 256 each. Both
// operands stand in memory as they are multiplied: 64 columns of a token side by side (wgmma's
// MN-major form). Two blocks form a cluster, have tiles above each other and share what comes of x.
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
#include "kernels/gemm/weight_gradient.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kTileColumns = 256;
constexpr int kDepth = 64;      // tokens of a stage
constexpr int kBox = 64;        // columns of a box: 128 bytes, a row of the swizzle
constexpr int kGroupRows = 64;  // of a warpgroup
constexpr int kBoxBytes = kBox * kDepth * 2;
constexpr int kColumnBoxes = kTileColumns / kBox;
constexpr int kStages = 4;
constexpr int kCluster = 2;  // blocks above each other
constexpr int kAlignment = 1024;

constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kStageBytes = (kGroups + kColumnBoxes) * kBoxBytes;
constexpr int kWarps = kGroups * kWarpgroup / kWarp;
constexpr int kSharedBytes = kStages * (kStageBytes + 2 * 8) + kWarps * 8 + kAlignment;
constexpr int kThreads = (kGroups + 1) * kWarpgroup;

struct Params {
  int rows, columns;  // of dw
  int depth_blocks;
  int cluster_rows, tile_columns;  // tiles of clusters
  int tiles;
  int group;  // rows of such tiles taken together
  bool accumulate;
  float* out;
  float2* squares;  // [kSquareParts] or null
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

using Turn = hopper::Turn<kStages>;

struct Shared {
  uint32_t stages, full, empty;  // addresses
  double* sums;                  // of the warps

  __device__ uint32_t A(int stage) const { return stages + stage * kStageBytes; }
  __device__ uint32_t B(int stage) const { return A(stage) + kGroups * kBoxBytes; }
  __device__ uint32_t Full(int stage) const { return full + stage * 8; }
  __device__ uint32_t Empty(int stage) const { return empty + stage * 8; }
};

// In groups of rows, columns by columns within a group, so that those of one moment form a block
// and find each other's operands in the L2 cache.
struct Tile {
  int row, column;  // in tiles of blocks

  __device__ Tile(const Params& p, int index, int rank) {
    const int in_group = p.group * p.tile_columns;
    const int above = index / in_group * p.group;
    const int height = min(p.group, p.cluster_rows - above);
    const int at = index % in_group;
    row = (above + at % height) * kCluster + rank;
    column = at / height;
  }
};

__device__ void Produce(const CUtensorMap& a, const CUtensorMap& b, const Params& p,
                        const Shared& shared, int rank) {
  constexpr uint16_t kBoth = (1 << kCluster) - 1;
  Turn turn;
  for (int index = blockIdx.x / kCluster; index < p.tiles; index += gridDim.x / kCluster) {
    const Tile tile(p, index, rank);
    const int row = tile.row * kGroups * kGroupRows;
    const int column = tile.column * kTileColumns + rank * kTileColumns / 2;
    for (int k = 0; k < p.depth_blocks; ++k, turn.Next()) {
      hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
      const uint32_t full = shared.Full(turn.stage);
      hopper::ArriveExpecting(full, kStageBytes);
#pragma unroll
      for (int box = 0; box < kGroups; ++box) {
        hopper::LoadBox(&a, row + box * kBox, k * kDepth, shared.A(turn.stage) + box * kBoxBytes,
                        full);
      }
      const uint32_t right = shared.B(turn.stage) + rank * (kColumnBoxes / 2) * kBoxBytes;
#pragma unroll
      for (int box = 0; box < kColumnBoxes / 2; ++box) {
        hopper::LoadBoxInto(kBoth, &b, column + box * kBox, k * kDepth, right + box * kBoxBytes,
                            full);
      }
    }
  }
}

template <typename T>
struct Consumer {
  const Params& p;
  const Shared& shared;
  int rank;
  int group;  // this warpgroup
  Turn turn;
  int released = 0;  // the stage that comes free next
  double squares = 0;

  __device__ __forceinline__ void Multiply(float (&sums)[128], bool first) {
    hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
    const uint32_t a = shared.A(turn.stage) + group * kBoxBytes;
    const uint32_t b = shared.B(turn.stage);
    hopper::FenceWgmma();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      const uint64_t left = hopper::Operand(a + k * 2048, kBoxBytes, 1024);
      const uint64_t right = hopper::Operand(b + k * 2048, kBoxBytes, 1024);
      hopper::Multiply<T, true, true>(sums, left, right, !first || k > 0);
    }
    hopper::CommitWgmma();
    turn.Next();
  }
  // The oldest stage that has not been, in both blocks.
  __device__ __forceinline__ void Release() {
    const uint32_t lane = threadIdx.x % kWarp;
    if (lane < kCluster) hopper::ArriveAt(shared.Empty(released), lane);
    released = released + 1 == kStages ? 0 : released + 1;
  }

  // The sums of a tile to dw, of which a quad of lanes writes 32 bytes of a row.
  __device__ __forceinline__ void Write(const Tile& tile, float (&sums)[128]) {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
    const int row = (tile.row * kGroups + group) * kGroupRows + thread / kWarp * 16 + lane / 4;
    const int column = tile.column * kTileColumns + lane % 4 * 2;
    float* const out = p.out + static_cast<int64_t>(row) * p.columns + column;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + h * 8 >= p.rows) continue;
      float* const of_row = out + static_cast<int64_t>(h) * 8 * p.columns;
      float square = 0;
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        constexpr int kTogether = 8;  // reads on their way
        float2 before[kTogether] = {};
        if (p.accumulate) {
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            const int j = part * kTogether + i;
            if (column + j * 8 < p.columns) {
              before[i] = *reinterpret_cast<const float2*>(of_row + j * 8);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int j = part * kTogether + i;
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
      // 64 squares in fp32, whose range is that of the sum, and the rest in double.
      squares += square;
    }
  }

  // One pair a block, and zeros in the place of blocks that there are not.
  __device__ __forceinline__ void LeaveSquares() {
    if (p.squares == nullptr) return;
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      squares += __shfl_xor_sync(0xffffffffu, squares, distance);
    }
    const int thread = threadIdx.x - kWarpgroup;
    if (thread % kWarp == 0) shared.sums[thread / kWarp] = squares;
    hopper::NamedBarrier(15, kGroups * kWarpgroup);
    if (thread != 0) return;
    double sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += shared.sums[warp];
    const auto rounded = static_cast<float>(sum);
    p.squares[blockIdx.x] = {rounded, isfinite(rounded) ? static_cast<float>(sum - rounded) : 0.f};
    for (int part = blockIdx.x + gridDim.x; part < kSquareParts; part += gridDim.x) {
      p.squares[part] = {0.f, 0.f};
    }
  }

  __device__ __forceinline__ void Run() {
    float sums[128];
    for (int index = blockIdx.x / kCluster; index < p.tiles; index += gridDim.x / kCluster) {
      const Tile tile(p, index, rank);
      for (int k = 0; k < p.depth_blocks; ++k) {
        Multiply(sums, k == 0);
        if (k == 0) continue;
        hopper::WaitWgmma<1>();
        Release();
      }
      hopper::WaitWgmma<0>();
      hopper::FenceSums(sums);
      Release();
      Write(tile, sums);
    }
    LeaveSquares();
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    HopperWeightGradientGemmKernel(const __grid_constant__ CUtensorMap a,
                                   const __grid_constant__ CUtensorMap b, const Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  const uint32_t skip = -hopper::SharedAddress(unaligned) & (kAlignment - 1);
  Shared shared;
  shared.stages = hopper::SharedAddress(unaligned) + skip;
  shared.full = shared.stages + kStages * kStageBytes;
  shared.empty = shared.full + kStages * 8;
  shared.sums = reinterpret_cast<double*>(unaligned + skip + kStages * (kStageBytes + 2 * 8));
  const auto rank = static_cast<int>(hopper::ClusterRank());
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::InitBarrier(shared.Full(stage), 1);
      hopper::InitBarrier(shared.Empty(stage), kCluster * kWarps);
    }
    hopper::FenceBarrierInit();
    hopper::PrefetchMap(&a);
    hopper::PrefetchMap(&b);
  }
  hopper::ClusterSync();
  if (threadIdx.x < kWarpgroup) {
    hopper::GiveRegisters<kProducerRegisters>();
    if (threadIdx.x == 0) Produce(a, b, p, shared, rank);
    hopper::ClusterSync();
  } else {
    hopper::TakeRegisters<kConsumerRegisters>();
    const int group = threadIdx.x / kWarpgroup - 1;
    Consumer<T>{p, shared, rank, group}.Run();
    // Nobody leaves while another block may still write here.
    hopper::ClusterSync();
  }
#endif
}

// Rows of tiles taken together, as even as possible, so that a wave of clusters is about square.
int RowsTogether(int cluster_rows, int clusters) {
  const int groups = std::max(1, static_cast<int>(std::lround(cluster_rows / std::sqrt(clusters))));
  return (cluster_rows + groups - 1) / groups;
}

template <typename T>
absl::Status Launch(CudaStream& stream, const HopperWeightGradient& gradient) {
  const auto kernel = HopperWeightGradientGemmKernel<T>;
  CUtensorMap a, b;
  RETURN_IF_ERROR(DescribeBoxes(gradient.dy, kDepth, a));
  RETURN_IF_ERROR(DescribeBoxes(gradient.x, kDepth, b));
  Params p;
  p.rows = static_cast<int>(gradient.dw.dim(0));
  p.columns = static_cast<int>(gradient.dw.dim(1));
  p.depth_blocks = static_cast<int>(CeilDiv(gradient.dy.dim(0), kDepth));
  p.cluster_rows = static_cast<int>(CeilDiv(p.rows, kCluster * kGroups * kGroupRows));
  p.tile_columns = static_cast<int>(CeilDiv(p.columns, kTileColumns));
  p.tiles = p.cluster_rows * p.tile_columns;
  p.accumulate = gradient.accumulate;
  p.out = gradient.dw.f32();
  p.squares = reinterpret_cast<float2*>(gradient.squares.data());
  const int clusters = std::min({p.tiles, stream.cuda_device().multiprocessors() / kCluster,
                                 static_cast<int>(kSquareParts) / kCluster});
  p.group = RowsTogether(p.cluster_rows, clusters);
  return CudaStatus(
      LaunchClusters(stream, kernel, clusters, kCluster, kThreads, kSharedBytes, a, b, p),
      "a weight gradient");
}

}  // namespace

bool HopperWeightGradientServes(const CudaDevice& device, const HopperWeightGradient& gradient) {
  const auto serves = [](const Tensor& matrix) {
    return Aligned16(matrix) && matrix.dim(1) % 8 == 0 && matrix.dim(0) < (int64_t{1} << 30);
  };
  return HasWarpgroups(device) && gradient.dy.dtype() != DType::kF32 && serves(gradient.dy) &&
         serves(gradient.x) &&
         reinterpret_cast<uintptr_t>(gradient.dw.data()) % sizeof(float2) == 0;
}

absl::Status RunHopperWeightGradient(CudaStream& stream, const HopperWeightGradient& gradient) {
  return gradient.dy.dtype() == DType::kBF16 ? Launch<__nv_bfloat16>(stream, gradient)
                                             : Launch<__half>(stream, gradient);
}

}  // namespace muster::kernels::cuda
