// The outputs of the state-space scan from the states in front of chunks (ssd_hopper.cuh).
//
// A block takes a chunk of a sample and a share of the heads of a group. C B' is computed once, in
// fp32, and stays in the registers of two warpgroups, which own 64 positions each; a producer
// thread loads x and the state of head after head. Positions of the upper half are not multiplied
// for the lower one, which comes before them. Bytes: x, the states and y, once in a pass.
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

template <typename T>
struct OutputParams {
  const float* factors;
  Borders borders;
  const float* d;
  SsdView<T> y;
  int64_t positions;
  HeadSlices all;
  int width, groups, chunks, shares;
  int column;  // the first of this pass; those after the first add to y
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

template <typename T, int P, int N>
__device__ inline void ProduceOutputs(const CUtensorMap& x, const CUtensorMap& b,
                                      const CUtensorMap& c, const CUtensorMap& states,
                                      const OutputParams<T>& p, const OutputShared<P, N>& shared,
                                      const HeadShare& at) {
  using Layout = OutputLayout<P, N>;
  hopper::ArriveExpecting(shared.GroupFull(), 2 * Layout::kGroupBytes);
  for (int slab = 0; slab < N / kSlab; ++slab) {
    const uint32_t offset = slab * kChunk * kRowBytes;
    const int column = p.column + slab * kSlab;
    hopper::LoadHeadBox(&c, column, at.group, at.chunk * kChunk, at.b, shared.C() + offset,
                        shared.GroupFull());
    hopper::LoadHeadBox(&b, column, at.group, at.chunk * kChunk, at.b, shared.B() + offset,
                        shared.GroupFull());
  }
  const int64_t chunk = static_cast<int64_t>(at.b) * p.chunks + at.chunk;
  hopper::Turn<Layout::kStages> turn;
  for (int i = at.begin; i < at.end; ++i, turn.Next()) {
    const int h = p.all.Head(i), row = p.all.template Row<P>(i);
    const int64_t head = chunk * p.all.heads + h;
    const uint32_t full = shared.Full(turn.stage);
    hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
    hopper::ArriveExpecting(full, Layout::kStageBytes + Layout::kScaleBytes);
    for (int slab = 0; slab < P / kSlab; ++slab) {
      hopper::LoadHeadBox(&x, row + slab * kSlab, h, at.chunk * kChunk, at.b,
                          shared.X(turn.stage) + slab * kChunk * kRowBytes, full);
    }
    for (int slab = 0; slab < N / kSlab; ++slab) {
      hopper::LoadHeadBox(&states, p.column + slab * kSlab, 0, row, static_cast<int>(head),
                          shared.State(turn.stage) + slab * P * kRowBytes, full);
    }
    hopper::LoadBytes(p.factors + head * (kFactors * kChunk), Layout::kScaleBytes,
                      shared.Scale(turn.stage), full);
  }
}

// A warpgroup that owns rows [kFirst, kFirst + 64) of a chunk and sees columns [0, kFirst + 64).
template <typename T, int P, int N, int kFirst>
struct OutputConsumer {
  using Layout = OutputLayout<P, N>;
  static constexpr int kBlocks = (kFirst + kGroupRows) / 8;  // of eight columns

  const OutputParams<T>& p;
  const OutputShared<P, N>& shared;
  const HeadShare& at;
  int lane, row;              // of this thread; it has row + 8, too
  int first_low, first_high;  // the first positions that its rows see
  bool bordered;              // a document begins in the chunk
  float cb[kBlocks][4];
  uint32_t probabilities[kBlocks / 2][4];

  __device__ __forceinline__ OutputConsumer(const OutputParams<T>& p,
                                            const OutputShared<P, N>& shared, const HeadShare& at)
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
      if (j % 2 == 1) PackTiles<T>(weighed[0], weighed[1], probabilities[j / 2]);
    }
  }

  // y = sum + D x, or += sum, through shared memory.
  __device__ __forceinline__ void Store(const CUtensorMap& y, const float (&sum)[P / 8][4], int i,
                                        int stage) {
    const int warp_row = row - lane / 4;
    const int h = p.all.Head(i), column = p.all.template Row<P>(i);
    const float d = p.column == 0 ? p.d[h] : 0;
    if (lane == 0) AwaitStores();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < P / 8; ++j) {
      const uint32_t slab = j / 8 * kChunk * kRowBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = row + half * 8;
        const float2 x = Unpack<T>(LoadWord(PairAt(shared.X(stage) + slab, own, j % 8, lane % 4)));
        float left = sum[j][2 * half] + d * x.x, right = sum[j][2 * half + 1] + d * x.y;
        if (p.column > 0) {
          const int64_t t = static_cast<int64_t>(at.chunk) * kChunk + own;
          const int of_head = column + j * 8 + lane % 4 * 2;
          if (t < p.positions && of_head < p.width) {
            const float2 before = LoadPair(p.y.At(at.b, t, h) + of_head);
            left += before.x;
            right += before.y;
          }
        }
        StoreWord(PairAt(shared.Y() + slab, own, j % 8, lane % 4), PackPair<T>(left, right));
      }
    }
    hopper::FenceAsyncProxy();
    __syncwarp();
    if (lane != 0) return;
    for (int slab = 0; slab < P / kSlab; ++slab) {
      StoreHeadBox(&y, column + slab * kSlab, h, at.chunk * kChunk + warp_row, at.b,
                   shared.Y() + slab * kChunk * kRowBytes + warp_row * kRowBytes);
    }
  }

  __device__ __forceinline__ void Run(const CUtensorMap& y) {
    constexpr uint32_t kRowOffset = kFirst * kRowBytes;
    hopper::WaitBarrier(shared.GroupFull(), 0);
    Clear(cb);
    hopper::FenceWgmma();
    MultiplyRows<T, N / 16>(cb, shared.C() + kRowOffset, kChunk, shared.B(), kChunk, false);
    hopper::CommitWgmma();
    hopper::WaitWgmma<0>();
    FenceRegisters(cb);
    hopper::Turn<Layout::kStages> turn;
#pragma unroll 1
    for (int i = at.begin; i < at.end; ++i, turn.Next()) {
      hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
      const uint32_t scale = shared.Scale(turn.stage);
      float sum[P / 8][4];
      Clear(sum);
      hopper::FenceWgmma();
      MultiplyRows<T, N / 16>(sum, shared.C() + kRowOffset, kChunk, shared.State(turn.stage), P,
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
      MultiplyColumns<T, kBlocks / 2>(sum, probabilities, shared.X(turn.stage), kChunk, true);
      hopper::CommitWgmma();
      hopper::WaitWgmma<0>();
      FenceRegisters(sum);
      FenceRegisters(probabilities);
      Store(y, sum, i, turn.stage);
      __syncwarp();
      if (lane == 0) hopper::Arrive(shared.Empty(turn.stage));
    }
    if (lane == 0) AwaitStoresDone();
  }
};

#endif  // MUSTER_WARPGROUP

// Boxes of x, B and C have kChunk rows, those of y kWarpRows, those of the states P.
template <typename T, int P, int N>
__global__ void __launch_bounds__((OutputLayout<P, N>::kThreads), 1)
    OutputKernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap b,
                 const __grid_constant__ CUtensorMap c, const __grid_constant__ CUtensorMap states,
                 const __grid_constant__ CUtensorMap y, const __grid_constant__ OutputParams<T> p) {
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
  const HeadShare at(p.all, p.groups, p.chunks, p.shares);
  if (threadIdx.x < kWarpgroup) {
    hopper::GiveRegisters<kProducerRegisters>();
    if (threadIdx.x == 0) ProduceOutputs<T, P, N>(x, b, c, states, p, shared, at);
  } else if (threadIdx.x < 2 * kWarpgroup) {
    hopper::TakeRegisters<kConsumerRegisters>();
    OutputConsumer<T, P, N, 0>(p, shared, at).Run(y);
  } else {
    hopper::TakeRegisters<kConsumerRegisters>();
    OutputConsumer<T, P, N, kGroupRows>(p, shared, at).Run(y);
  }
#endif
}

}  // namespace muster::kernels::cuda::ssd

#endif  // MUSTER_KERNELS_SSM_SSD_FORWARD_HOPPER_CUH_
