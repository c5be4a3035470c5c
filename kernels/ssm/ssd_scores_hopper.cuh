// The gradient of C and of the scores C B' of the state-space scan (ssd_hopper.cuh), and what they
// add to the gradient of step A.
//
// A block takes a chunk of a sample and a share of the heads of a group, over which both gradients
// are summed in the registers of two warpgroups, which own 64 positions t each. For each head, with
// W_ts = e^(a_t - a_s) step_s:
//   dP = dY X', dCB += dP W, M = dP W CB, r_t = sum of row t of M - sum of its column t,
//   dC_t += e^(a_t) H' dy_t, q_t = e^(a_t) <dy_t, H C_t>;
// and in the end dC += dCB B. Sums of rows and columns are of the same fp32 numbers, so that what
// they have in common cancels. Bytes: x, dy and the states, once in a
// pass.
#ifndef MUSTER_KERNELS_SSM_SSD_SCORES_HOPPER_CUH_
#define MUSTER_KERNELS_SSM_SSD_SCORES_HOPPER_CUH_

#include "kernels/ssm/ssd_hopper.cuh"

namespace muster::kernels::cuda::ssd {

// What the backward kernels leave for each chunk of each head: rows of kChunk fp32, then sums by
// warp.
enum Term {
  kPairs,   // r_t + q_t
  kBehind,  // e_s = e^(a_end - a_s) step_s <x_s, G B_s>
  kInner,   // the gradient of step_s, but for that of step A
  kTermRows
};
constexpr int kWarpsOfBlock = 8;                    // that multiply
constexpr int kExitDot = kTermRows * kChunk;        // <G, H>, by warp
constexpr int kSkipDot = kExitDot + kWarpsOfBlock;  // <dy, x>, by warp
constexpr int kTerms = kSkipDot + kWarpsOfBlock;

template <typename T>
struct GradientParams {
  const float* factors;
  Borders borders;
  const float* d;
  SsdView<T> dx;
  HeadSlices all;
  int width, groups, chunks, shares, samples;
  int column;  // the first of this pass; those after the first add to dx
  int64_t positions;
  float* terms;  // [B * chunks * H * slices, kTerms] of this pass
  T* scores;     // [shares, B * chunks, G, kChunk, kChunk]: dCB
  float* dc;     // [shares, B, S, G, N], N of a tile
  float* db;     // likewise

  // Of the i-th slice of all heads.
  __device__ float* Terms(const HeadShare& at, int i) const {
    const int64_t chunk = static_cast<int64_t>(at.b) * chunks + at.chunk;
    return terms + (chunk * all.heads * all.slices + i) * kTerms;
  }
  __device__ int64_t Scores(const HeadShare& at, int share) const {
    return ((static_cast<int64_t>(share) * samples + at.b) * chunks + at.chunk) * groups + at.group;
  }
  // Of position t in dc and db, divided by the number of columns.
  __device__ int64_t Row(const HeadShare& at, int share, int64_t t) const {
    return ((static_cast<int64_t>(share) * samples + at.b) * positions + t) * groups + at.group;
  }
};

template <int P, int N>
struct ScoresLayout {
  static constexpr int kThreads = 3 * kWarpgroup;
  static constexpr int kInputBytes = kChunk * P * 2;  // x; the same of dy
  static constexpr int kStateBytes = P * N * 2;
  static constexpr int kStageBytes = 2 * kInputBytes + kStateBytes;
  static constexpr int kGroupBytes = kChunk * N * 2;                          // B; the same of C
  static constexpr int kScoreBytes = (kGroupRows + kChunk) * kGroupRows * 4;  // C B', where seen
  static constexpr int kScaleBytes = 3 * kFactorBytes;  // kSum, kShifted, kEntry
  // Sums of columns by warp, and of rows, of a head; of some heads at a time.
  static constexpr int kSumBytes = (kWarpsOfBlock + 1) * kChunk * 4;
  static constexpr int kSumStages = 3;
  static constexpr int Bytes(int stages) {
    return kAlignment + 2 * kGroupBytes + kScoreBytes + kSumStages * kSumBytes +
           stages * (kStageBytes + kScaleBytes) + (2 * stages + 2 * kSumStages + 1) * 8;
  }
  static constexpr int kStages = Bytes(2) <= 232448 ? 2 : 1;
  static constexpr int kSharedBytes = Bytes(kStages);
};

#if MUSTER_WARPGROUP

template <int P, int N>
struct ScoresShared {
  using Layout = ScoresLayout<P, N>;
  uint32_t start;

  __device__ uint32_t C() const { return start; }
  __device__ uint32_t B() const { return start + Layout::kGroupBytes; }
  __device__ uint32_t X(int stage) const {
    return start + 2 * Layout::kGroupBytes + stage * Layout::kStageBytes;
  }
  __device__ uint32_t Dy(int stage) const { return X(stage) + Layout::kInputBytes; }
  __device__ uint32_t State(int stage) const { return Dy(stage) + Layout::kInputBytes; }
  // Of a thread of the warpgroup that starts at `first`: block j of eight columns.
  __device__ uint32_t Score(int first, int j) const {
    return X(Layout::kStages) + first * kGroupRows * 4 +
           (j * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
  }
  __device__ uint32_t ColumnSums(int stage, int warp) const {
    return X(Layout::kStages) + Layout::kScoreBytes + stage * Layout::kSumBytes + warp * kChunk * 4;
  }
  __device__ uint32_t RowSums(int stage) const { return ColumnSums(stage, kWarpsOfBlock); }
  __device__ uint32_t Scale(int stage) const {
    return ColumnSums(Layout::kSumStages, 0) + stage * Layout::kScaleBytes;
  }
  __device__ uint32_t Full(int stage) const { return Scale(Layout::kStages) + stage * 8; }
  __device__ uint32_t Empty(int stage) const { return Full(Layout::kStages + stage); }
  __device__ uint32_t GroupFull() const { return Empty(Layout::kStages); }
  __device__ uint32_t SumsFull(int stage) const { return GroupFull() + 8 + stage * 8; }
  __device__ uint32_t SumsEmpty(int stage) const { return SumsFull(Layout::kSumStages + stage); }
};

// Starts to load B and C of a chunk.
template <typename Shared>
__device__ inline void LoadGroup(const CUtensorMap& b, const CUtensorMap& c, const Shared& shared,
                                 const HeadShare& at, int first_column, int slabs) {
  hopper::ArriveExpecting(shared.GroupFull(), 2 * Shared::Layout::kGroupBytes);
  for (int slab = 0; slab < slabs; ++slab) {
    const uint32_t offset = slab * kChunk * kRowBytes;
    const int column = first_column + slab * kSlab;
    hopper::LoadHeadBox(&c, column, at.group, at.chunk * kChunk, at.b, shared.C() + offset,
                        shared.GroupFull());
    hopper::LoadHeadBox(&b, column, at.group, at.chunk * kChunk, at.b, shared.B() + offset,
                        shared.GroupFull());
  }
}

template <typename T, int P, int N>
__device__ inline void ProduceScores(const CUtensorMap& x, const CUtensorMap& dy,
                                     const CUtensorMap& b, const CUtensorMap& c,
                                     const CUtensorMap& states, const GradientParams<T>& p,
                                     const ScoresShared<P, N>& shared, const HeadShare& at) {
  using Layout = ScoresLayout<P, N>;
  LoadGroup(b, c, shared, at, p.column, N / kSlab);
  const int64_t chunk = static_cast<int64_t>(at.b) * p.chunks + at.chunk;
  hopper::Turn<Layout::kStages> turn;
  for (int i = at.begin; i < at.end; ++i, turn.Next()) {
    const int h = p.all.Head(i), row = p.all.template Row<P>(i);
    const int64_t head = chunk * p.all.heads + h;
    const uint32_t full = shared.Full(turn.stage);
    hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
    hopper::ArriveExpecting(full, Layout::kStageBytes + Layout::kScaleBytes);
    for (int slab = 0; slab < P / kSlab; ++slab) {
      const uint32_t offset = slab * kChunk * kRowBytes;
      hopper::LoadHeadBox(&dy, row + slab * kSlab, h, at.chunk * kChunk, at.b,
                          shared.Dy(turn.stage) + offset, full);
      hopper::LoadHeadBox(&x, row + slab * kSlab, h, at.chunk * kChunk, at.b,
                          shared.X(turn.stage) + offset, full);
    }
    for (int slab = 0; slab < N / kSlab; ++slab) {
      hopper::LoadHeadBox(&states, p.column + slab * kSlab, 0, row, static_cast<int>(head),
                          shared.State(turn.stage) + slab * P * kRowBytes, full);
    }
    hopper::LoadBytes(p.factors + head * (kFactors * kChunk), Layout::kScaleBytes,
                      shared.Scale(turn.stage), full);
  }
}

// A warp beside the producer: r_t + q_t of slice after slice, from the sums of the warps that
// multiply.
template <typename T, int P, int N>
__device__ inline void CollectTerms(const GradientParams<T>& p, const ScoresShared<P, N>& shared,
                                    const HeadShare& at) {
  using Layout = ScoresLayout<P, N>;
  const int lane = threadIdx.x % 32;
  hopper::Turn<Layout::kSumStages> turn;
  for (int of = at.begin; of < at.end; ++of, turn.Next()) {
    hopper::WaitBarrier(shared.SumsFull(turn.stage), turn.parity);
    float* const to = p.Terms(at, of) + kPairs * kChunk + lane;
#pragma unroll
    for (int i = 0; i < kChunk / 32; ++i) {
      const int column = (i * 32 + lane) * 4;
      float sum = LoadFloat(shared.RowSums(turn.stage) + column);
      // The lower warpgroup's warps see the lower columns alone.
      for (int w = i * 32 < kGroupRows ? 0 : 4; w < kWarpsOfBlock; ++w) {
        sum -= LoadFloat(shared.ColumnSums(turn.stage, w) + column);
      }
      to[i * 32] = sum;
    }
    __syncwarp();
    if (lane == 0) hopper::Arrive(shared.SumsEmpty(turn.stage));
  }
}

// The sums over a warp's rows of eight columns: a lane has `sums` of columns 8 (i / 2) + 2 (lane %
// 4) + i % 2, and gets that of one i, 0 to 7 by its lane / 4.
__device__ inline float SumOfColumn(float (&sums)[8]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = (lane & (half * 4)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float mine = upper ? sums[i + half] : sums[i];
      const float other = upper ? sums[i] : sums[i + half];
      sums[i] = mine + __shfl_xor_sync(0xffffffffu, other, half * 4);
    }
  }
  return sums[0];
}

// A warpgroup that owns rows [kFirst, kFirst + 64) of a chunk and sees columns [0, kFirst + 64).
template <typename T, int P, int N, int kFirst>
struct ScoresConsumer {
  using Layout = ScoresLayout<P, N>;
  static constexpr int kBlocks = (kFirst + kGroupRows) / 8;
  static constexpr uint32_t kRowOffset = kFirst * kRowBytes;

  const GradientParams<T>& p;
  const ScoresShared<P, N>& shared;
  const HeadShare& at;
  int lane, warp, row;        // row: of this thread; it has row + 8, too
  int first_low, first_high;  // the first positions that its rows see
  bool bordered;
  float scores[kBlocks][4];  // the gradient of C B'
  float dc[N / 8][4];

  __device__ __forceinline__ ScoresConsumer(const GradientParams<T>& p,
                                            const ScoresShared<P, N>& shared, const HeadShare& at)
      : p(p), shared(shared), at(at) {
    lane = threadIdx.x % 32;
    warp = threadIdx.x / 32 - 4;
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

  __device__ __forceinline__ void KeepScores() {
    float cb[kBlocks][4];
    Clear(cb);
    hopper::FenceWgmma();
    MultiplyRows<T, N / 16>(cb, shared.C() + kRowOffset, kChunk, shared.B(), kChunk, false);
    hopper::CommitWgmma();
    hopper::WaitWgmma<0>();
    FenceRegisters(cb);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared.Score(kFirst, j)),
                   "f"(cb[j][0]), "f"(cb[j][1]), "f"(cb[j][2]), "f"(cb[j][3])
                   : "memory");
    }
  }

  // Adds to the gradient of the scores; leaves the sums of columns in shared memory, and those of
  // this thread's rows in `rows`.
  template <bool kBordered>
  __device__ __forceinline__ void Weigh(const float (&dp)[kBlocks][4], uint32_t scale,
                                        int sum_stage, float (&rows)[2]) {
    const float low = LoadFloat(scale + kSum * kFactorBytes + row * 4);
    const float high = LoadFloat(scale + kSum * kFactorBytes + (row + 8) * 4);
    const uint32_t shifted = scale + kShifted * kFactorBytes + lane % 4 * 8;
    const uint32_t to =
        shared.ColumnSums(sum_stage, warp) + (lane / 8 * 8 + lane / 4 % 2 + lane % 4 * 2) * 4;
    float columns[8];
    rows[0] = rows[1] = 0;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const float2 by = LoadFloatPair(shifted + j * 32);
      float cb[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(cb[0]), "=f"(cb[1]), "=f"(cb[2]), "=f"(cb[3])
                   : "r"(shared.Score(kFirst, j)));
      const int column = j * 8 + lane % 4 * 2;
      float exponent[4] = {low - by.x, low - by.y, high - by.x, high - by.y};
      float m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int s = column + i % 2, t = row + i / 2 * 8;
        bool seen = true;
        if (j * 8 >= kFirst) seen = s <= t;
        if constexpr (kBordered) seen = seen && s >= (i < 2 ? first_low : first_high);
        if (!seen) exponent[i] = -INFINITY;
        const float d = dp[j][i] * Exp2(exponent[i]);
        scores[j][i] += d;
        m[i] = d * cb[i];
        rows[i / 2] += m[i];
      }
      columns[j % 4 * 2] = m[0] + m[2];
      columns[j % 4 * 2 + 1] = m[1] + m[3];
      if (j % 4 == 3) StoreFloat(to + j / 4 * 32 * 4, SumOfColumn(columns));
    }
  }

  // dC and q_t from the state in front of the chunk; adds q_t to `rows`.
  __device__ __forceinline__ void AddEntry(int stage, float (&rows)[2]) {
    const float low = LoadFloat(shared.Scale(stage) + kEntry * kFactorBytes + row * 4);
    const float high = LoadFloat(shared.Scale(stage) + kEntry * kFactorBytes + (row + 8) * 4);
    float entry[P / 8][4];  // H C_t
    Clear(entry);
    hopper::FenceWgmma();
    MultiplyRows<T, N / 16>(entry, shared.C() + kRowOffset, kChunk, shared.State(stage), P, false);
    hopper::CommitWgmma();
    uint32_t dy[P / 16][4];  // times e^(a_t)
#pragma unroll
    for (int i = 0; i < P / 16; ++i) {
      LoadStraight(shared.Dy(stage) + i / 4 * kChunk * kRowBytes, row - lane / 4, i % 4 * 16,
                   dy[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = Unpack<T>(dy[i][j]);
        const float by = j % 2 == 0 ? low : high;
        dy[i][j] = PackPair<T>(x.x * by, x.y * by);
      }
    }
    hopper::FenceWgmma();
    MultiplyColumns<T, P / 16>(dc, dy, shared.State(stage), P, true);
    hopper::CommitWgmma();
    hopper::WaitWgmma<1>();
    FenceRegisters(entry);
    // The operand of columns 16 i has those of tiles 2 i and 2 i + 1.
#pragma unroll
    for (int i = 0; i < P / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = Unpack<T>(dy[i][j]);
        const int tile = 2 * i + j / 2, half = j % 2;
        rows[half] += entry[tile][2 * half] * x.x + entry[tile][2 * half + 1] * x.y;
      }
    }
    hopper::WaitWgmma<0>();
    FenceRegisters(dc);
    FenceRegisters(dy);
  }

  // Hands the sums of rows, and those of columns that Weigh stored, to CollectTerms.
  __device__ __forceinline__ void HandOver(int sum_stage, const float (&rows)[2]) {
    const float low = SumOfQuad(rows[0]), high = SumOfQuad(rows[1]);
    if (lane % 4 == 0) {
      StoreFloat(shared.RowSums(sum_stage) + row * 4, low);
      StoreFloat(shared.RowSums(sum_stage) + (row + 8) * 4, high);
    }
    __syncwarp();
    if (lane == 0) hopper::Arrive(shared.SumsFull(sum_stage));
  }

  __device__ __forceinline__ void Finish(int share) {
    uint32_t words[kBlocks / 2][4];
#pragma unroll
    for (int i = 0; i < kBlocks / 2; ++i) {
      PackTiles<T>(scores[2 * i], scores[2 * i + 1], words[i]);
    }
    hopper::FenceWgmma();
    MultiplyColumns<T, kBlocks / 2>(dc, words, shared.B(), kChunk, true);
    hopper::CommitWgmma();
    T* const to = p.scores + p.Scores(at, share) * (kChunk * kChunk);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        *reinterpret_cast<uint32_t*>(to + (row + half * 8) * kChunk + j * 8 + lane % 4 * 2) =
            words[j / 2][j % 2 * 2 + half];
      }
    }
    hopper::WaitWgmma<0>();
    FenceRegisters(words);
    FenceRegisters(dc);
    StoreSums(p.dc, share, dc);
  }

  __device__ __forceinline__ void StoreSums(float* to, int share, const float (&sums)[N / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t t = static_cast<int64_t>(at.chunk) * kChunk + row + half * 8;
      if (t >= p.positions) continue;
      float* const own = to + p.Row(at, share, t) * N + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        *reinterpret_cast<float2*>(own + j * 8) = {sums[j][2 * half], sums[j][2 * half + 1]};
      }
    }
  }

  __device__ __forceinline__ void Run() {
    hopper::WaitBarrier(shared.GroupFull(), 0);
    KeepScores();
    Clear(scores);
    Clear(dc);
    hopper::Turn<Layout::kStages> turn;
    hopper::Turn<Layout::kSumStages> sums;
#pragma unroll 1
    for (int i = at.begin; i < at.end; ++i, turn.Next(), sums.Next()) {
      hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
      float rows[2];
      {
        float dp[kBlocks][4];
        Clear(dp);
        hopper::FenceWgmma();
        MultiplyRows<T, P / 16>(dp, shared.Dy(turn.stage) + kRowOffset, kChunk,
                                shared.X(turn.stage), kChunk, false);
        hopper::CommitWgmma();
        hopper::WaitWgmma<0>();
        FenceRegisters(dp);
        hopper::WaitBarrier(shared.SumsEmpty(sums.stage), sums.parity ^ 1);
        if (bordered) {
          Weigh<true>(dp, shared.Scale(turn.stage), sums.stage, rows);
        } else {
          Weigh<false>(dp, shared.Scale(turn.stage), sums.stage, rows);
        }
      }
      AddEntry(turn.stage, rows);
      __syncwarp();
      if (lane == 0) hopper::Arrive(shared.Empty(turn.stage));
      HandOver(sums.stage, rows);
    }
    Finish(blockIdx.x % p.shares);
  }
};

#endif  // MUSTER_WARPGROUP

// Boxes have kChunk rows, those of the states P.
template <typename T, int P, int N>
__global__ void __launch_bounds__((ScoresLayout<P, N>::kThreads), 1)
    ScoresKernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap dy,
                 const __grid_constant__ CUtensorMap b, const __grid_constant__ CUtensorMap c,
                 const __grid_constant__ CUtensorMap states,
                 const __grid_constant__ GradientParams<T> p) {
#if MUSTER_WARPGROUP
  using Layout = ScoresLayout<P, N>;
  extern __shared__ char unaligned[];
  const ScoresShared<P, N> shared{(hopper::SharedAddress(unaligned) + kAlignment - 1) &
                                  ~(kAlignment - 1u)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Layout::kStages; ++stage) {
      hopper::InitBarrier(shared.Full(stage), 1);
      hopper::InitBarrier(shared.Empty(stage), kWarpsOfBlock);
    }
    for (int stage = 0; stage < Layout::kSumStages; ++stage) {
      hopper::InitBarrier(shared.SumsFull(stage), kWarpsOfBlock);
      hopper::InitBarrier(shared.SumsEmpty(stage), 1);
    }
    hopper::InitBarrier(shared.GroupFull(), 1);
    hopper::FenceBarrierInit();
  }
  __syncthreads();
  const HeadShare at(p.all, p.groups, p.chunks, p.shares);
  if (threadIdx.x < kWarpgroup) {
    hopper::GiveRegisters<kProducerRegisters>();
    if (threadIdx.x == 0) ProduceScores<T, P, N>(x, dy, b, c, states, p, shared, at);
    if (threadIdx.x / 32 == 1) CollectTerms<T, P, N>(p, shared, at);
  } else if (threadIdx.x < 2 * kWarpgroup) {
    hopper::TakeRegisters<kConsumerRegisters>();
    ScoresConsumer<T, P, N, 0>(p, shared, at).Run();
  } else {
    hopper::TakeRegisters<kConsumerRegisters>();
    ScoresConsumer<T, P, N, kGroupRows>(p, shared, at).Run();
  }
#endif
}

}  // namespace muster::kernels::cuda::ssd

#endif  // MUSTER_KERNELS_SSM_SSD_SCORES_HOPPER_CUH_
