// The outputs of the state-space scan from the states in front of chunks (ssd_hopper.cuh).
//
// A block takes a chunk of a sample and a share of the heads of a group. C B' is computed once, in
// fp32, and stays in the registers of two warpgroups, which own 64 positions each; a producer
// thread loads x and the state of head after head. Positions of the upper half are not multiplied
// for the lower one, which comes before them. Bytes: x, the states and y, once.
#ifndef MUSTER_KERNELS_SSM_SSD_FORWARD_HOPPER_CUH_
#define MUSTER_KERNELS_SSM_SSD_FORWARD_HOPPER_CUH_

#include "kernels/ssm/ssd_hopper.cuh"

namespace muster::kernels::cuda::ssd {

template <int P, int N>
struct OutputLayout {
  static constexpr int kStages = 3;
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kInputBytes = kChunk * P * 2;  // x; the same of y
  static constexpr int kStateBytes = P * N * 2;
  static constexpr int kStageBytes = kInputBytes + kStateBytes;
  static constexpr int kGroupBytes = kChunk * N * 2;    // B; the same of C
  static constexpr int kScaleBytes = 3 * kFactorBytes;  // kSum, kShifted, kEntry
  static constexpr int kSharedBytes = kAlignment + 2 * kGroupBytes + kInputBytes +
                                      kStages * (kStageBytes + kScaleBytes) + (2 * kStages + 1) * 8;
};

struct OutputParams {
  const float* factors;
  Borders borders;
  const float* d;
  int heads, groups, chunks, shares;
};

#if MUSTER_WARPGROUP

template <int P, int N>
struct OutputShared {
  using Layout = OutputLayout<P, N>;
  uint32_t start;

  __device__ uint32_t C() const { return start; }
  __device__ uint32_t B() const { return start + Layout::kGroupBytes; }
  __device__ uint32_t X(int stage) const {
    return start + 2 * Layout::kGroupBytes + stage * Layout::kStageBytes;
  }
  __device__ uint32_t State(int stage) const { return X(stage) + Layout::kInputBytes; }
  __device__ uint32_t Y() const { return X(Layout::kStages); }
  __device__ uint32_t Scale(int stage) const {
    return Y() + Layout::kInputBytes + stage * Layout::kScaleBytes;
  }
  __device__ uint32_t Full(int stage) const { return Scale(Layout::kStages) + stage * 8; }
  __device__ uint32_t Empty(int stage) const { return Full(Layout::kStages + stage); }
  __device__ uint32_t GroupFull() const { return Empty(Layout::kStages); }
};

template <int P, int N>
__device__ inline void ProduceOutputs(const CUtensorMap& x, const CUtensorMap& b,
                                      const CUtensorMap& c, const CUtensorMap& states,
                                      const OutputParams& p, const OutputShared<P, N>& shared,
                                      const HeadShare& at) {
  using Layout = OutputLayout<P, N>;
  hopper::ArriveExpecting(shared.GroupFull(), 2 * Layout::kGroupBytes);
  for (int slab = 0; slab < N / kSlab; ++slab) {
    const uint32_t offset = slab * kChunk * kRowBytes;
    const int column = at.group * (N / kSlab) + slab;
    hopper::LoadHeadBox(&c, column, at.chunk * kChunk, at.b, shared.C() + offset,
                        shared.GroupFull());
    hopper::LoadHeadBox(&b, column, at.chunk * kChunk, at.b, shared.B() + offset,
                        shared.GroupFull());
  }
  const int64_t chunk = static_cast<int64_t>(at.b) * p.chunks + at.chunk;
  hopper::Turn<Layout::kStages> turn;
  for (int h = at.begin; h < at.end; ++h, turn.Next()) {
    const uint32_t full = shared.Full(turn.stage);
    hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
    hopper::ArriveExpecting(full, Layout::kStageBytes + Layout::kScaleBytes);
    for (int slab = 0; slab < P / kSlab; ++slab) {
      hopper::LoadHeadBox(&x, h * (P / kSlab) + slab, at.chunk * kChunk, at.b,
                          shared.X(turn.stage) + slab * kChunk * kRowBytes, full);
    }
    for (int slab = 0; slab < N / kSlab; ++slab) {
      hopper::LoadBox(&states, slab * kSlab, static_cast<int>((chunk * p.heads + h) * P),
                      shared.State(turn.stage) + slab * P * kRowBytes, full);
    }
    hopper::LoadBytes(p.factors + (chunk * p.heads + h) * (kFactors * kChunk), Layout::kScaleBytes,
                      shared.Scale(turn.stage), full);
  }
}

// A warpgroup that owns rows [kFirst, kFirst + 64) of a chunk and sees columns [0, kFirst + 64).
template <int P, int N, int kFirst>
struct OutputConsumer {
  using Layout = OutputLayout<P, N>;
  static constexpr int kBlocks = (kFirst + kGroupRows) / 8;  // of eight columns

  const OutputParams& p;
  const OutputShared<P, N>& shared;
  const HeadShare& at;
  int lane, row;              // of this thread; it has row + 8, too
  int first_low, first_high;  // the first positions that its rows see
  bool bordered;              // a document begins in the chunk
  float cb[kBlocks][4];
  uint32_t probabilities[kBlocks / 2][4];

  __device__ __forceinline__ OutputConsumer(const OutputParams& p, const OutputShared<P, N>& shared,
                                            const HeadShare& at)
      : p(p), shared(shared), at(at) {
    lane = threadIdx.x % 32;
    row = kFirst + threadIdx.x / 32 % 4 * kWarpRows + lane / 4;
    first_low = first_high = -1;
    bordered = false;
    if (p.borders.data != nullptr) {
      const int32_t* const first =
          p.borders.First(static_cast<int64_t>(at.b) * p.chunks + at.chunk);
      first_low = first[row];
      first_high = first[row + 8];
      bordered = first[kChunk - 1] >= 0;
    }
  }

  // C B' e^(a_t - a_s) step_s, rounded.
  template <bool kBordered>
  __device__ __forceinline__ void Weigh(uint32_t scale) {
    const float low = LoadFloat(scale + kSum * kFactorBytes + row * 4);
    const float high = LoadFloat(scale + kSum * kFactorBytes + (row + 8) * 4);
    const uint32_t shifted = scale + kShifted * kFactorBytes + lane % 4 * 8;
    float weighed[2][4];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float2 by = LoadFloatPair(shifted + j * 32);
      const int column = j * 8 + lane % 4 * 2;
      float exponent[4] = {low - by.x, low - by.y, high - by.x, high - by.y};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int s = column + i % 2, t = row + i / 2 * 8;
        bool seen = true;
        if (j * 8 >= kFirst) seen = s <= t;
        if constexpr (kBordered) seen = seen && s >= (i < 2 ? first_low : first_high);
        if (!seen) exponent[i] = -INFINITY;
        weighed[j % 2][i] = cb[j][i] * Exp2(exponent[i]);
      }
      if (j % 2 == 1) PackTiles(weighed[0], weighed[1], probabilities[j / 2]);
    }
  }

  // y = sum + D x, through shared memory.
  __device__ __forceinline__ void Store(const CUtensorMap& y, const float (&sum)[P / 8][4], int h,
                                        int stage) {
    const int warp_row = row - lane / 4;
    const float d = p.d[h];
    if (lane == 0) AwaitStores();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < P / 8; ++j) {
      const uint32_t slab = j / 8 * kChunk * kRowBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = row + half * 8;
        const float2 x = Unpack(LoadWord(PairAt(shared.X(stage) + slab, own, j % 8, lane % 4)));
        StoreWord(PairAt(shared.Y() + slab, own, j % 8, lane % 4),
                  PackPair<T>(sum[j][2 * half] + d * x.x, sum[j][2 * half + 1] + d * x.y));
      }
    }
    hopper::FenceAsyncProxy();
    __syncwarp();
    if (lane != 0) return;
    for (int slab = 0; slab < P / kSlab; ++slab) {
      StoreHeadBox(&y, h * (P / kSlab) + slab, at.chunk * kChunk + warp_row, at.b,
                   shared.Y() + slab * kChunk * kRowBytes + warp_row * kRowBytes);
    }
  }

  __device__ __forceinline__ void Run(const CUtensorMap& y) {
    constexpr uint32_t kRowOffset = kFirst * kRowBytes;
    hopper::WaitBarrier(shared.GroupFull(), 0);
    Clear(cb);
    hopper::FenceWgmma();
    MultiplyRows<N / 16>(cb, shared.C() + kRowOffset, kChunk, shared.B(), kChunk, false);
    hopper::CommitWgmma();
    hopper::WaitWgmma<0>();
    FenceRegisters(cb);
    hopper::Turn<Layout::kStages> turn;
#pragma unroll 1
    for (int h = at.begin; h < at.end; ++h, turn.Next()) {
      hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
      const uint32_t scale = shared.Scale(turn.stage);
      float sum[P / 8][4];
      Clear(sum);
      hopper::FenceWgmma();
      MultiplyRows<N / 16>(sum, shared.C() + kRowOffset, kChunk, shared.State(turn.stage), P,
                           false);
      hopper::CommitWgmma();
      if (bordered) {
        Weigh<true>(scale);
      } else {
        Weigh<false>(scale);
      }
      hopper::WaitWgmma<0>();
      FenceRegisters(sum);
      ScaleRows(sum, LoadFloat(scale + kEntry * kFactorBytes + row * 4),
                LoadFloat(scale + kEntry * kFactorBytes + (row + 8) * 4));
      hopper::FenceWgmma();
      MultiplyColumns<kBlocks / 2>(sum, probabilities, shared.X(turn.stage), kChunk, true);
      hopper::CommitWgmma();
      hopper::WaitWgmma<0>();
      FenceRegisters(sum);
      FenceRegisters(probabilities);
      Store(y, sum, h, turn.stage);
      __syncwarp();
      if (lane == 0) hopper::Arrive(shared.Empty(turn.stage));
    }
    if (lane == 0) AwaitStoresDone();
  }
};

#endif  // MUSTER_WARPGROUP

// Boxes of x, B and C have kChunk rows, those of y kWarpRows, those of the states P.
template <int P, int N>
__global__ void __launch_bounds__((OutputLayout<P, N>::kThreads), 1)
    OutputKernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap b,
                 const __grid_constant__ CUtensorMap c, const __grid_constant__ CUtensorMap states,
                 const __grid_constant__ CUtensorMap y, const __grid_constant__ OutputParams p) {
#if MUSTER_WARPGROUP
  using Layout = OutputLayout<P, N>;
  extern __shared__ char unaligned[];
  const OutputShared<P, N> shared{(hopper::SharedAddress(unaligned) + kAlignment - 1) &
                                  ~(kAlignment - 1u)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Layout::kStages; ++stage) {
      hopper::InitBarrier(shared.Full(stage), 1);
      hopper::InitBarrier(shared.Empty(stage), 8);  // warps that multiply
    }
    hopper::InitBarrier(shared.GroupFull(), 1);
    hopper::FenceBarrierInit();
  }
  __syncthreads();
  const HeadShare at(p.heads, p.groups, p.chunks, p.shares);
  if (threadIdx.x < kWarpgroup) {
    hopper::GiveRegisters<kProducerRegisters>();
    if (threadIdx.x == 0) ProduceOutputs(x, b, c, states, p, shared, at);
  } else if (threadIdx.x < 2 * kWarpgroup) {
    hopper::TakeRegisters<kConsumerRegisters>();
    OutputConsumer<P, N, 0>(p, shared, at).Run(y);
  } else {
    hopper::TakeRegisters<kConsumerRegisters>();
    OutputConsumer<P, N, kGroupRows>(p, shared, at).Run(y);
  }
#endif
}

}  // namespace muster::kernels::cuda::ssd

#endif  // MUSTER_KERNELS_SSM_SSD_FORWARD_HOPPER_CUH_
