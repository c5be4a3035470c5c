// The gradients of x and B of the state-space scan (ssd_hopper.cuh), and terms of that of the step.
//
// A block takes a chunk of a sample and a share of the heads of a group. B C' is computed once and
// stays in the registers of two warpgroups, which own 64 positions s each; dB is summed there over
// the heads. For each head:
//   g_s = e^(a_end - a_s) G B_s + sum over t of <B_s, C_t> e^(a_t - a_s) dy_t
//   dx_s = step_s g_s + D dy_s, dB_s += e^(a_end - a_s) step_s G' x_s;
// and in the end dB += dCB' C, with dCB of ssd_scores_hopper.cuh. Bytes: x, dy, dx and the
// gradients of states, once in a pass, and the states once more, for <G, H>.
#ifndef MUSTER_KERNELS_SSM_SSD_INPUTS_HOPPER_CUH_
#define MUSTER_KERNELS_SSM_SSD_INPUTS_HOPPER_CUH_

#include "kernels/ssm/ssd_scores_hopper.cuh"

namespace muster::kernels::cuda::ssd {

template <int P, int N>
struct InputsLayout {
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kInputBytes = kChunk * P * 2;  // x, which dx replaces; the same of dy
  static constexpr int kStateBytes = P * N * 2;       // G; the same of H
  static constexpr int kStageBytes = 2 * kInputBytes + 2 * kStateBytes;
  static constexpr int kGroupBytes = kChunk * N * 2;  // B; the same of C
  static constexpr int kScaleBytes = kFactors * kFactorBytes;
  static constexpr int kScoreBytes = kChunk * kChunk * 2;  // dCB, in the place of x and dy
  static_assert(kScoreBytes <= 2 * kInputBytes);
  static constexpr int Bytes(int stages) {
    return kAlignment + 2 * kGroupBytes + stages * (kStageBytes + kScaleBytes) +
           (2 * stages + 1) * 8;
  }
  static constexpr int kStages = Bytes(2) <= 232448 ? 2 : 1;
  static constexpr int kSharedBytes = Bytes(kStages);
};

#if MUSTER_WARPGROUP

template <int P, int N>
struct InputsShared {
  using Layout = InputsLayout<P, N>;
  uint32_t start;

  __device__ uint32_t C() const { return start; }
  __device__ uint32_t B() const { return start + Layout::kGroupBytes; }
  __device__ uint32_t X(int stage) const {
    return start + 2 * Layout::kGroupBytes + stage * Layout::kStageBytes;
  }
  __device__ uint32_t Dy(int stage) const { return X(stage) + Layout::kInputBytes; }
  __device__ uint32_t Gradient(int stage) const { return Dy(stage) + Layout::kInputBytes; }
  __device__ uint32_t State(int stage) const { return Gradient(stage) + Layout::kStateBytes; }
  __device__ uint32_t Scale(int stage) const {
    return X(Layout::kStages) + stage * Layout::kScaleBytes;
  }
  __device__ uint32_t Full(int stage) const { return Scale(Layout::kStages) + stage * 8; }
  __device__ uint32_t Empty(int stage) const { return Full(Layout::kStages + stage); }
  __device__ uint32_t GroupFull() const { return Empty(Layout::kStages); }
};

template <typename T, int P, int N>
__device__ inline void ProduceInputs(const CUtensorMap& x, const CUtensorMap& dy,
                                     const CUtensorMap& b, const CUtensorMap& c,
                                     const CUtensorMap& gradients, const CUtensorMap& states,
                                     const CUtensorMap& scores, const GradientParams<T>& p,
                                     const InputsShared<P, N>& shared, const HeadShare& at) {
  using Layout = InputsLayout<P, N>;
  LoadGroup(b, c, shared, at, p.column, N / kSlab);
  const int64_t chunk = static_cast<int64_t>(at.b) * p.chunks + at.chunk;
  hopper::Turn<Layout::kStages> turn;
  for (int i = at.begin; i < at.end; ++i, turn.Next()) {
    const int h = p.all.Head(i), first_row = p.all.template Row<P>(i);
    const int64_t head = chunk * p.all.heads + h;
    const uint32_t full = shared.Full(turn.stage);
    hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
    hopper::ArriveExpecting(full, Layout::kStageBytes + Layout::kScaleBytes);
    for (int slab = 0; slab < N / kSlab; ++slab) {
      const int column = p.column + slab * kSlab;
      hopper::LoadHeadBox(&gradients, column, 0, first_row, static_cast<int>(head),
                          shared.Gradient(turn.stage) + slab * P * kRowBytes, full);
      hopper::LoadHeadBox(&states, column, 0, first_row, static_cast<int>(head),
                          shared.State(turn.stage) + slab * P * kRowBytes, full);
    }
    for (int slab = 0; slab < P / kSlab; ++slab) {
      const uint32_t offset = slab * kChunk * kRowBytes;
      hopper::LoadHeadBox(&x, first_row + slab * kSlab, h, at.chunk * kChunk, at.b,
                          shared.X(turn.stage) + offset, full);
      hopper::LoadHeadBox(&dy, first_row + slab * kSlab, h, at.chunk * kChunk, at.b,
                          shared.Dy(turn.stage) + offset, full);
    }
    hopper::LoadBytes(p.factors + head * (kFactors * kChunk), Layout::kScaleBytes,
                      shared.Scale(turn.stage), full);
  }
  hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
  hopper::ArriveExpecting(shared.Full(turn.stage), Layout::kScoreBytes);
  const int row = static_cast<int>(p.Scores(at, blockIdx.x % p.shares) * kChunk);
  for (int slab = 0; slab < kChunk / kSlab; ++slab) {
    hopper::LoadBox(&scores, slab * kSlab, row, shared.X(turn.stage) + slab * kChunk * kRowBytes,
                    shared.Full(turn.stage));
  }
}

// A warpgroup that owns rows [kFirst, kFirst + 64) of a chunk and is seen by positions from kFirst
// on.
template <typename T, int P, int N, int kFirst>
struct InputsConsumer {
  using Layout = InputsLayout<P, N>;
  static constexpr int kBlocks = (kChunk - kFirst) / 8;
  static constexpr uint32_t kRowOffset = kFirst * kRowBytes;

  const GradientParams<T>& p;
  const InputsShared<P, N>& shared;
  const HeadShare& at;
  int lane, warp, row;      // row: of this thread; it has row + 8, too
  int next_low, next_high;  // the first positions that do not see its rows
  bool bordered;
  float bc[kBlocks][4];
  float db[N / 8][4];
  uint32_t probabilities[kBlocks / 2][4];

  __device__ __forceinline__ InputsConsumer(const GradientParams<T>& p,
                                            const InputsShared<P, N>& shared, const HeadShare& at)
      : p(p), shared(shared), at(at) {
    lane = threadIdx.x % 32;
    warp = threadIdx.x / 32 - 4;
    row = kFirst + threadIdx.x / 32 % 4 * kWarpRows + lane / 4;
    next_low = next_high = kChunk;
    bordered = false;
    if (p.borders.data != nullptr) {
      const int64_t chunk = static_cast<int64_t>(at.b) * p.chunks + at.chunk;
      next_low = p.borders.Next(chunk)[row];
      next_high = p.borders.Next(chunk)[row + 8];
      bordered = p.borders.First(chunk)[kChunk - 1] >= 0;
    }
  }

  // B C' e^(a_t - a_s), rounded.
  template <bool kBordered>
  __device__ __forceinline__ void Weigh(uint32_t scale) {
    const float low = LoadFloat(scale + kSum * kFactorBytes + row * 4);
    const float high = LoadFloat(scale + kSum * kFactorBytes + (row + 8) * 4);
    const uint32_t sums = scale + kSum * kFactorBytes + kFirst * 4 + lane % 4 * 8;
    float weighed[2][4];
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float2 sum = LoadFloatPair(sums + j * 32);
      const int column = kFirst + j * 8 + lane % 4 * 2;
      float exponent[4] = {sum.x - low, sum.y - low, sum.x - high, sum.y - high};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = column + i % 2, s = row + i / 2 * 8;
        bool seen = true;
        if (j * 8 < kGroupRows) seen = s <= t;
        if constexpr (kBordered) seen = seen && t < (i < 2 ? next_low : next_high);
        if (!seen) exponent[i] = -INFINITY;
        weighed[j % 2][i] = bc[j][i] * Exp2(exponent[i]);
      }
      if (j % 2 == 1) PackTiles<T>(weighed[0], weighed[1], probabilities[j / 2]);
    }
  }

  // x e^(a_end - a_s) step_s, rounded, as a left operand.
  __device__ __forceinline__ void ScaleInput(int stage, float low, float high,
                                             uint32_t (&words)[P / 16][4]) {
#pragma unroll
    for (int i = 0; i < P / 16; ++i) {
      LoadStraight(shared.X(stage) + i / 4 * kChunk * kRowBytes, row - lane / 4, i % 4 * 16,
                   words[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = Unpack<T>(words[i][j]);
        const float by = j % 2 == 0 ? low : high;
        words[i][j] = PackPair<T>(x.x * by, x.y * by);
      }
    }
  }

  // This thread's part of <x_s, sum_s>.
  __device__ __forceinline__ void DotInput(int stage, const float (&sum)[P / 8][4],
                                           float (&dot)[2]) {
    dot[0] = dot[1] = 0;
#pragma unroll
    for (int j = 0; j < P / 8; ++j) {
      const uint32_t slab = shared.X(stage) + j / 8 * kChunk * kRowBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 x = Unpack<T>(LoadWord(PairAt(slab, row + half * 8, j % 8, lane % 4)));
        dot[half] += sum[j][2 * half] * x.x + sum[j][2 * half + 1] * x.y;
      }
    }
  }

  // This warp's part of <G, H>: both tiles have the same order.
  __device__ __forceinline__ float DotStates(int stage) {
    float dot = 0;
#pragma unroll
    for (int i = 0; i < P * N * 2 / 16 / (2 * kWarpgroup); ++i) {
      const uint32_t offset = (i * 2 * kWarpgroup + warp * 32 + lane) * 16;
      uint32_t g[4], h[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(g[0]), "=r"(g[1]), "=r"(g[2]), "=r"(g[3])
                   : "r"(shared.Gradient(stage) + offset));
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(h[0]), "=r"(h[1]), "=r"(h[2]), "=r"(h[3])
                   : "r"(shared.State(stage) + offset));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = Unpack<T>(g[j]), y = Unpack<T>(h[j]);
        dot += x.x * y.x + x.y * y.y;
      }
    }
    return WarpSum(dot);
  }

  // Stores dx through the place of x, and the terms of the gradient of the step.
  __device__ __forceinline__ void Store(const CUtensorMap& dx, const float (&sum)[P / 8][4],
                                        float step_low, float step_high, float (&behind)[2], int i,
                                        int stage) {
    float* const terms = p.Terms(at, i);
    const int h = p.all.Head(i), column = p.all.template Row<P>(i);
    const float d = p.column == 0 ? p.d[h] : 0;
    float inner[2] = {0, 0}, skip = 0;
#pragma unroll
    for (int j = 0; j < P / 8; ++j) {
      const uint32_t slab = j / 8 * kChunk * kRowBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t offset = PairAt(slab, row + half * 8, j % 8, lane % 4);
        const float2 x = Unpack<T>(LoadWord(shared.X(stage) + offset));
        const float2 dy = Unpack<T>(LoadWord(shared.Dy(stage) + offset));
        const float left = sum[j][2 * half], right = sum[j][2 * half + 1];
        inner[half] += left * x.x + right * x.y;
        skip += dy.x * x.x + dy.y * x.y;
        const float step = half == 0 ? step_low : step_high;
        float2 gradient = {step * left + d * dy.x, step * right + d * dy.y};
        if (p.column > 0) {
          const int64_t t = static_cast<int64_t>(at.chunk) * kChunk + row + half * 8;
          const int of_head = column + j * 8 + lane % 4 * 2;
          if (t < p.positions && of_head < p.width) {
            const float2 before = LoadPair(p.dx.At(at.b, t, h) + of_head);
            gradient.x += before.x;
            gradient.y += before.y;
          }
        }
        StoreWord(shared.X(stage) + offset, PackPair<T>(gradient.x, gradient.y));
      }
    }
    hopper::FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) {
      const int warp_row = row - lane / 4;
      for (int slab = 0; slab < P / kSlab; ++slab) {
        StoreHeadBox(&dx, column + slab * kSlab, h, at.chunk * kChunk + warp_row, at.b,
                     shared.X(stage) + slab * kChunk * kRowBytes + warp_row * kRowBytes);
      }
    }
    const float dot = DotStates(stage);
    skip = WarpSum(skip);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      inner[half] = SumOfQuad(inner[half]);
      behind[half] = SumOfQuad(behind[half]);
      if (lane % 4 != 0) continue;
      terms[kInner * kChunk + row + half * 8] = inner[half];
      terms[kBehind * kChunk + row + half * 8] = behind[half] * (half == 0 ? step_low : step_high);
    }
    if (lane == 0) {
      terms[kExitDot + warp] = dot;
      terms[kSkipDot + warp] = skip;
      AwaitStores();
    }
  }

  __device__ __forceinline__ void Slice(const CUtensorMap& dx, int i, int stage) {
    const uint32_t scale = shared.Scale(stage);
    const float exit_low = LoadFloat(scale + kExit * kFactorBytes + row * 4);
    const float exit_high = LoadFloat(scale + kExit * kFactorBytes + (row + 8) * 4);
    const float step_low = LoadFloat(scale + kStep * kFactorBytes + row * 4);
    const float step_high = LoadFloat(scale + kStep * kFactorBytes + (row + 8) * 4);
    float sum[P / 8][4];
    Clear(sum);
    hopper::FenceWgmma();
    MultiplyRows<T, N / 16>(sum, shared.B() + kRowOffset, kChunk, shared.Gradient(stage), P, false);
    hopper::CommitWgmma();
    if (bordered) {
      Weigh<true>(scale);
    } else {
      Weigh<false>(scale);
    }
    hopper::WaitWgmma<0>();
    FenceRegisters(sum);
    ScaleRows(sum, exit_low, exit_high);
    float behind[2];
    DotInput(stage, sum, behind);
    hopper::FenceWgmma();
    MultiplyColumns<T, kBlocks / 2>(sum, probabilities, shared.Dy(stage) + kRowOffset, kChunk,
                                    true);
    hopper::CommitWgmma();
    hopper::WaitWgmma<0>();
    FenceRegisters(sum);
    FenceRegisters(probabilities);
    uint32_t input[P / 16][4];
    ScaleInput(stage, exit_low * step_low, exit_high * step_high, input);
    hopper::FenceWgmma();
    MultiplyColumns<T, P / 16>(db, input, shared.Gradient(stage), P, true);
    hopper::CommitWgmma();
    Store(dx, sum, step_low, step_high, behind, i, stage);
    hopper::WaitWgmma<0>();
    FenceRegisters(db);
    FenceRegisters(input);
  }

  __device__ __forceinline__ void Finish(int stage) {
    uint32_t words[kBlocks / 2][4];
#pragma unroll
    for (int i = 0; i < kBlocks / 2; ++i) {
      LoadTransposed(shared.X(stage) + kFirst / kSlab * kChunk * kRowBytes, kFirst + i * 16,
                     threadIdx.x / 32 % 4 * kWarpRows, words[i]);
    }
    hopper::FenceWgmma();
    MultiplyColumns<T, kBlocks / 2>(db, words, shared.C() + kRowOffset, kChunk, true);
    hopper::CommitWgmma();
    hopper::WaitWgmma<0>();
    FenceRegisters(words);
    FenceRegisters(db);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t t = static_cast<int64_t>(at.chunk) * kChunk + row + half * 8;
      if (t >= p.positions) continue;
      float* const to = p.db + p.Row(at, blockIdx.x % p.shares, t) * N + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        *reinterpret_cast<float2*>(to + j * 8) = {db[j][2 * half], db[j][2 * half + 1]};
      }
    }
  }

  __device__ __forceinline__ void Run(const CUtensorMap& dx) {
    hopper::WaitBarrier(shared.GroupFull(), 0);
    Clear(bc);
    Clear(db);
    hopper::FenceWgmma();
    MultiplyRows<T, N / 16>(bc, shared.B() + kRowOffset, kChunk, shared.C() + kRowOffset, kChunk,
                            false);
    hopper::CommitWgmma();
    hopper::WaitWgmma<0>();
    FenceRegisters(bc);
    hopper::Turn<Layout::kStages> turn;
#pragma unroll 1
    for (int i = at.begin; i < at.end; ++i, turn.Next()) {
      hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
      Slice(dx, i, turn.stage);
      __syncwarp();
      if (lane == 0) hopper::Arrive(shared.Empty(turn.stage));
    }
    hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
    Finish(turn.stage);
    if (lane == 0) AwaitStoresDone();
  }
};

#endif  // MUSTER_WARPGROUP

// Boxes of x, dy, B, C and the scores have kChunk rows, those of dx kWarpRows, those of the states
// and their gradients P.
template <typename T, int P, int N>
__global__ void __launch_bounds__((InputsLayout<P, N>::kThreads), 1)
    InputsKernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap dy,
                 const __grid_constant__ CUtensorMap b, const __grid_constant__ CUtensorMap c,
                 const __grid_constant__ CUtensorMap gradients,
                 const __grid_constant__ CUtensorMap states,
                 const __grid_constant__ CUtensorMap scores, const __grid_constant__ CUtensorMap dx,
                 const __grid_constant__ GradientParams<T> p) {
#if MUSTER_WARPGROUP
  using Layout = InputsLayout<P, N>;
  extern __shared__ char unaligned[];
  const InputsShared<P, N> shared{(hopper::SharedAddress(unaligned) + kAlignment - 1) &
                                  ~(kAlignment - 1u)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Layout::kStages; ++stage) {
      hopper::InitBarrier(shared.Full(stage), 1);
      hopper::InitBarrier(shared.Empty(stage), kWarpsOfBlock);
    }
    hopper::InitBarrier(shared.GroupFull(), 1);
    hopper::FenceBarrierInit();
  }
  __syncthreads();
  const HeadShare at(p.all, p.groups, p.chunks, p.shares);
  if (threadIdx.x < kWarpgroup) {
    hopper::GiveRegisters<kProducerRegisters>();
    if (threadIdx.x == 0)
      ProduceInputs<T, P, N>(x, dy, b, c, gradients, states, scores, p, shared, at);
  } else if (threadIdx.x < 2 * kWarpgroup) {
    hopper::TakeRegisters<kConsumerRegisters>();
    InputsConsumer<T, P, N, 0>(p, shared, at).Run(dx);
  } else {
    hopper::TakeRegisters<kConsumerRegisters>();
    InputsConsumer<T, P, N, kGroupRows>(p, shared, at).Run(dx);
  }
#endif
}

}  // namespace muster::kernels::cuda::ssd

#endif  // MUSTER_KERNELS_SSM_SSD_INPUTS_HOPPER_CUH_
