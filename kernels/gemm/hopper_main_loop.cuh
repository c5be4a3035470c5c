// The main loop of our GEMMs for Hopper: out = epilogue(a b) in tiles of 128 x 256, with 16-bit
// operands and fp32 sums. Used by gemm_hopper.cu and weight_gradient_hopper.cu, which differ in how
// their operands lie in memory and in their epilogues.
//
// One block runs on each multiprocessor and takes one tile after the other. A producer warp keeps
// four stages of 64 values of k on their way through TMA; two warpgroups multiply 64 x 256 each.
// Two blocks form a cluster: they have tiles above each other, and each loads half of the columns'
// operand for both.
//
// An epilogue may run beside the next tile's MMAs: it is given the sums of a complete tile, keeps
// what it needs of them in registers, and is called kParts times between the steps of the next
// tile.
#ifndef MUSTER_KERNELS_GEMM_HOPPER_MAIN_LOOP_CUH_
#define MUSTER_KERNELS_GEMM_HOPPER_MAIN_LOOP_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/pack.cuh"

namespace muster::kernels::cuda::hopper_gemm {

constexpr int kWarpgroup = 128;
constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kThreads = (kGroups + 1) * kWarpgroup;
constexpr int kWarps = kGroups * kWarpgroup / kWarp;  // that multiply
constexpr int kTileRows = 128;
constexpr int kTileColumns = 256;
constexpr int kDepth = 64;  // values of k in a stage: 128 bytes, a row of the swizzle
constexpr int kStages = 4;
constexpr int kCluster = 2;
constexpr int kBoxBytes = 64 * kDepth * 2;
constexpr int kTileABytes = kTileRows * kDepth * 2;
constexpr int kHalfBBytes = kTileColumns / 2 * kDepth * 2;
constexpr int kStageBytes = kTileABytes + 2 * kHalfBBytes;
constexpr int kAlignment = 1024;

// Shared memory of a kernel whose epilogue takes `epilogue_bytes` of it.
constexpr int SharedBytes(int epilogue_bytes) {
  return kStages * (kStageBytes + 2 * 8) + epilogue_bytes + kAlignment;
}

// The tiles of a problem. A tile of a cluster is kCluster tiles above each other.
struct Grid {
  int depth_blocks;                       // steps of kDepth
  int cluster_rows, tile_columns, tiles;  // tiles of clusters
  int group;                              // rows of such tiles that are taken together
};

constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

using Turn = hopper::Turn<kStages>;

struct Shared {
  uint32_t stages, full, empty;  // addresses
  char* epilogue;                // its memory

  __device__ uint32_t A(int stage) const { return stages + stage * kStageBytes; }
  __device__ uint32_t B(int stage) const { return A(stage) + kTileABytes; }
  __device__ uint32_t Full(int stage) const { return full + stage * 8; }
  __device__ uint32_t Empty(int stage) const { return empty + stage * 8; }
};

// Tiles are taken in groups of rows, and column by column within a group, so that the tiles that
// run at one moment form a block and find each other's operands in the L2 cache.
struct Tile {
  int row, column;  // in tiles of blocks

  __device__ Tile(const Grid& grid, int index, int rank) {
    const int in_group = grid.group * grid.tile_columns;
    const int first = index / in_group * grid.group;
    const int height = min(grid.group, grid.cluster_rows - first);
    const int at = index % in_group;
    row = (first + at % height) * kCluster + rank;
    column = at / height;
  }
};

// By one thread. `a` and `b` describe boxes of kDepth columns by kTileRows (b: kTileColumns / 2)
// rows where they are K-major, and of 64 columns by kDepth rows where they are MN-major.
template <typename Epilogue>
__device__ void Produce(const CUtensorMap& a, const CUtensorMap& b,
                        const typename Epilogue::Params& p, const Shared& shared, int rank) {
  constexpr uint16_t kBoth = (1 << kCluster) - 1;
  Turn turn;
  for (int index = blockIdx.x / kCluster; index < p.grid.tiles; index += gridDim.x / kCluster) {
    const Tile tile(p.grid, index, rank);
    const int row = tile.row * kTileRows;
    const int column = Epilogue::FirstColumn(p, tile, rank);
    for (int k = 0; k < p.grid.depth_blocks; ++k, turn.Next()) {
      hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
      const uint32_t full = shared.Full(turn.stage);
      hopper::ArriveExpecting(full, kStageBytes);
      if constexpr (Epilogue::kMnMajorA) {
#pragma unroll
        for (int box = 0; box < kGroups; ++box) {
          hopper::LoadBox(&a, row + box * 64, k * kDepth, shared.A(turn.stage) + box * kBoxBytes,
                          full);
        }
      } else {
        hopper::LoadBox(&a, k * kDepth, row, shared.A(turn.stage), full);
      }
      const uint32_t to = shared.B(turn.stage) + rank * kHalfBBytes;
      if constexpr (Epilogue::kMnMajorB) {
        hopper::LoadBoxInto(kBoth, &b, column, k * kDepth, to, full);
        hopper::LoadBoxInto(kBoth, &b, column + 64, k * kDepth, to + kBoxBytes, full);
      } else {
        hopper::LoadBoxInto(kBoth, &b, k * kDepth, column, to, full);
      }
    }
  }
}

// A warpgroup that multiplies.
template <typename T, typename Epilogue>
struct Consumer {
  const typename Epilogue::Params& p;
  const Shared& shared;
  uint32_t a_offset;  // of this warpgroup's rows in a stage
  Turn turn;
  int released = 0;  // the stage that is given back next

  // Issues the MMAs of one stage.
  __device__ __forceinline__ void Multiply(float (&sums)[128], bool first) {
    hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
    const uint32_t a = shared.A(turn.stage) + a_offset;
    const uint32_t b = shared.B(turn.stage);
    hopper::FenceWgmma();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      const uint64_t left = Epilogue::kMnMajorA ? hopper::Operand(a + k * 2048, kBoxBytes, 1024)
                                                : hopper::Operand(a + k * 32, 16, 1024);
      const uint64_t right = Epilogue::kMnMajorB ? hopper::Operand(b + k * 2048, kBoxBytes, 1024)
                                                 : hopper::Operand(b + k * 32, 16, 1024);
      hopper::Multiply<T, Epilogue::kMnMajorB, Epilogue::kMnMajorA>(sums, left, right,
                                                                    !first || k > 0);
    }
    hopper::CommitWgmma();
    turn.Next();
  }
  // Gives the oldest stage back to the producers of both blocks.
  __device__ __forceinline__ void Release() {
    const uint32_t lane = threadIdx.x % kWarp;
    if (lane < kCluster) hopper::ArriveAt(shared.Empty(released), lane);
    released = released + 1 == kStages ? 0 : released + 1;
  }

  // The steps of a tile, and between them the epilogue of the tile before: part i behind the steps
  // up to (i + 1) / kParts of all.
  template <int kPart>
  __device__ __forceinline__ void Steps(int done, float (&sums)[128], Epilogue& epilogue) {
    if constexpr (kPart < Epilogue::kParts) {
      const int until = p.grid.depth_blocks * (kPart + 1) / Epilogue::kParts;
      for (; done < until; ++done) {
        Multiply(sums, done == 0);
        if (done == 0) continue;
        hopper::WaitWgmma<1>();
        Release();
      }
      epilogue.template Do<kPart>();
      Steps<kPart + 1>(done, sums, epilogue);
    }
  }

  __device__ __forceinline__ void Run(int rank) {
    float sums[128];
    Epilogue epilogue(p, shared.epilogue);
    for (int index = blockIdx.x / kCluster; index < p.grid.tiles; index += gridDim.x / kCluster) {
      const Tile tile(p.grid, index, rank);
      Steps<0>(0, sums, epilogue);
      epilogue.Begin(tile);
      hopper::WaitWgmma<0>();
      hopper::FenceSums(sums);
      Release();
      epilogue.Take(tile, sums);
    }
    epilogue.Finish();
  }
};

// The body of a kernel of kThreads threads, SharedBytes(Epilogue's) and clusters of kCluster
// blocks. An Epilogue, one object a thread of the warpgroups that multiply, has
//   Params              a struct with a Grid `grid`
//   kMnMajorA, kMnMajorB  whether an operand's rows in memory are values of one k ([K,M], [K,N]) or
//                       of one row or column of the result ([M,K], [N,K])
//   kParts              how many parts its work beside the next tile has, at least 1
//   FirstColumn(p, tile, rank)  where block `rank` of the cluster finds its half of b's columns
//   Epilogue(p, memory) `memory`: its shared memory
//   Do<kPart>()         part kPart of the tile that was taken last, if any
//   Begin(tile)         after the last part, while the last MMAs of `tile` run
//   Take(tile, sums)    `tile` is complete: sums as hopper::Multiply leaves them
//   Finish()            after the last tile: its parts have not been done
template <typename T, typename Epilogue>
__device__ __forceinline__ void RunMainLoop([[maybe_unused]] const CUtensorMap& a,
                                            [[maybe_unused]] const CUtensorMap& b,
                                            [[maybe_unused]] const typename Epilogue::Params& p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  const uint32_t skip = -hopper::SharedAddress(unaligned) & (kAlignment - 1);
  Shared shared;
  shared.stages = hopper::SharedAddress(unaligned) + skip;
  shared.full = shared.stages + kStages * kStageBytes;
  shared.empty = shared.full + kStages * 8;
  shared.epilogue = unaligned + skip + kStages * (kStageBytes + 2 * 8);
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
    if (threadIdx.x == 0) Produce<Epilogue>(a, b, p, shared, rank);
    hopper::ClusterSync();
  } else {
    hopper::TakeRegisters<kConsumerRegisters>();
    const uint32_t warpgroup = threadIdx.x / kWarpgroup - 1;
    Consumer<T, Epilogue>{p, shared, warpgroup * (kTileABytes / kGroups)}.Run(rank);
    // A block stays until the other one has written here for the last time.
    hopper::ClusterSync();
  }
#endif
}

}  // namespace muster::kernels::cuda::hopper_gemm

#endif  // MUSTER_KERNELS_GEMM_HOPPER_MAIN_LOOP_CUH_
