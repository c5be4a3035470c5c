// The kernels of attention_backward_hopper.cu: the backward of FlashAttention-2 (arXiv 2307.08691)
// with MMAs by warpgroups and copies beside them as in FlashAttention-3 (arXiv 2407.08608).
//
// A block takes one tile of keys and values after the other and passes over the queries that see
// it, of all heads that share the keys. A producer thread loads tiles of queries and of dout ahead
// of two warpgroups, which own half of the keys each. Scores are computed transposed, so that
// probabilities and their gradients are, in the registers that hold them, operands of the GEMMs for
// dv and dk:
//   S' = K Q', P' = exp2(S' - lse), dP' = V dO', dV += P' dO, dS' = P' (dP' - delta),
//   dK += dS' Q, dQ += dS K.
// For dQ, both warpgroups write dS to shared memory, and a round later, when the other one's dS has
// long arrived, each computes half of the columns of dQ. Blocks add to dQ in memory as they come,
// in any order.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_BACKWARD_HOPPER_CUH_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_BACKWARD_HOPPER_CUH_

#include <cuda.h>
#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/attention/attention_problem.cuh"
#include "kernels/attention/attention_workspace.h"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/warpgroup.cuh"

namespace muster::kernels::cuda::backward {

constexpr int kWidth = 64;
constexpr int kQueries = kAttentionBackwardQueries;  // of a tile
constexpr int kKeys = 128;                           // of a tile; a warpgroup owns half
constexpr int kGroups = 2;
constexpr int kGroupKeys = kKeys / kGroups;
constexpr int kGroupThreads = 128;
constexpr int kGroupWarps = kGroupThreads / 32;
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
// kThreads start with 168 registers each, which are then redistributed.
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

constexpr int kStages = 4;  // tiles of queries and of dout in flight
constexpr int kSlots = 2;   // for keys and values: the current ones and the next
constexpr int kTileBytes = kQueries * kWidth * 2;
constexpr int kStatisticBytes = kQueries * 4;
constexpr int kStageBytes = 2 * kTileBytes + 2 * kStatisticBytes;
constexpr int kKeyBytes = kKeys * kWidth * 2;
constexpr int kScoreBytes = kQueries * kKeys * 2;
constexpr int kAlignment = 1024;
constexpr int kBarrierBytes = 8 * (2 * kStages + 2 * kSlots + 2) + 4 * kSlots;
constexpr int kSharedBytes =
    kAlignment + kSlots * 2 * kKeyBytes + kStages * kStageBytes + 2 * kScoreBytes + kBarrierBytes;

template <typename T>
struct Params {
  AttentionProblem<HeadsView<T>> d;
  int query_tiles, key_tiles;
  int items;          // tiles of keys of all key heads of all samples
  int pairs_at_once;  // key heads of samples whose tiles are taken at a time
  int* next_item;     // 0 when blocks start
  // [batch, heads, query_tiles, 2, kQueries]: -lse in powers of two, and row sums of dout * out.
  // Queries past the end have -inf and 0.
  float* statistics;
  float* dq;  // [batch, heads, query_tiles, kQueries * kWidth], in the order of wgmma's sums

  // The index of a head's first tile of queries.
  __device__ int QueryTile(int b, int head) const { return (b * d.heads + head) * query_tiles; }
};

#if MUSTER_WARPGROUP

__device__ inline void StoreMatricesTransposed(uint32_t row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Tells the compiler that sums which start anew need no values before.
template <int kN>
__device__ inline void Forget(float (&c)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "=f"(c[n][i])::"memory");
  }
}
// Arrives without waiting for this thread's earlier accesses, so without waiting for sums that are
// being added to memory. For memory that only MMAs have read, which WaitWgmma has waited for.
__device__ inline void ArriveRelaxed(uint32_t barrier) {
  asm volatile("mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// c (+)= a b, for 32 columns of b, which is MN-major; a is in shared memory.
#define MUSTER_WGMMA_32(type)                                                                     \
  asm volatile(                                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                                 \
      " "                                                                                         \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "                  \
      "%16, %17, p, 1, 1, 0, 1;\n}\n"                                                             \
      : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), \
        "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), \
        "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3])                                \
      : "l"(a), "l"(b), "r"(add))
template <typename T>
__device__ inline void MultiplyAdd32(float (&c)[4][4], uint64_t a, uint64_t b, int add) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    MUSTER_WGMMA_32("bf16");
  } else {
    MUSTER_WGMMA_32("f16");
  }
}
#undef MUSTER_WGMMA_32

// Addresses in shared memory.
struct Shared {
  uint32_t start;

  __device__ uint32_t K(uint32_t slot) const { return start + slot * 2 * kKeyBytes; }
  __device__ uint32_t V(uint32_t slot) const { return K(slot) + kKeyBytes; }
  __device__ uint32_t Q(uint32_t stage) const { return K(kSlots) + stage * 2 * kTileBytes; }
  __device__ uint32_t Dout(uint32_t stage) const { return Q(stage) + kTileBytes; }
  __device__ uint32_t Scores(uint32_t buffer) const { return Q(kStages) + buffer * kScoreBytes; }
  __device__ uint32_t Base(uint32_t stage) const { return Scores(2) + stage * 2 * kStatisticBytes; }
  __device__ uint32_t Delta(uint32_t stage) const { return Base(stage) + kStatisticBytes; }
  __device__ uint32_t Full(uint32_t stage) const { return Base(kStages) + stage * 8; }
  __device__ uint32_t Empty(uint32_t stage) const { return Full(kStages) + stage * 8; }
  __device__ uint32_t KeysFull(uint32_t slot) const { return Full(2 * kStages) + slot * 8; }
  __device__ uint32_t KeysEmpty(uint32_t slot) const { return KeysFull(kSlots) + slot * 8; }
  __device__ uint32_t ScoresFull(uint32_t buffer) const {
    return KeysFull(2 * kSlots) + buffer * 8;
  }
  __device__ uint32_t Item(uint32_t slot) const { return ScoresFull(2) + slot * 4; }
};

// A tile of keys.
struct Work {
  int tile, key_head, batch;
  int first, rounds;  // the first tile of queries that sees it; tiles of queries of all heads

  // Tiles with the most queries come first, a few heads at a time, whose data stay in the L2 cache.
  template <typename T>
  __device__ Work(const Params<T>& p, int item) {
    const int batch_items = p.pairs_at_once * p.key_tiles;
    const int begin = item / batch_items * p.pairs_at_once, at = item % batch_items;
    const int now = min(p.pairs_at_once, p.d.key_heads * p.d.batch - begin);
    const int pair = begin + at % now;
    tile = at / now;
    key_head = pair % p.d.key_heads;
    batch = pair / p.d.key_heads;
    first = p.d.causal ? tile * (kKeys / kQueries) : 0;
    rounds = (p.query_tiles - first) * (p.d.heads / p.d.key_heads);
  }
};

// Called by one thread. Item p.items or later marks the end.
template <typename T>
__device__ inline void Produce(const CUtensorMap& q, const CUtensorMap& dout, const CUtensorMap& k,
                               const CUtensorMap& v, const Params<T>& p, const Shared& shared) {
  const int group = p.d.heads / p.d.key_heads;
  uint32_t total = 0;
  for (uint32_t items = 0;; ++items) {
    const int item = atomicAdd(p.next_item, 1);
    const uint32_t slot = items % kSlots;
    hopper::WaitBarrier(shared.KeysEmpty(slot), items / kSlots % 2 ^ 1);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared.Item(slot)), "r"(item) : "memory");
    if (item >= p.items) {
      hopper::Arrive(shared.KeysFull(slot));
      return;
    }
    const Work work(p, item);
    hopper::ArriveExpecting(shared.KeysFull(slot), 2 * kKeyBytes);
    hopper::LoadHeadBox(&k, work.key_head, work.tile * kKeys, work.batch, shared.K(slot),
                        shared.KeysFull(slot));
    hopper::LoadHeadBox(&v, work.key_head, work.tile * kKeys, work.batch, shared.V(slot),
                        shared.KeysFull(slot));
    const int end = (work.key_head + 1) * group;
    for (int head = end - group; head < end; ++head) {
      const float* statistics =
          p.statistics +
          static_cast<int64_t>(p.QueryTile(work.batch, head) + work.first) * (2 * kQueries);
      for (int tile = work.first; tile < p.query_tiles; ++tile, ++total) {
        const uint32_t stage = total % kStages;
        hopper::WaitBarrier(shared.Empty(stage), total / kStages % 2 ^ 1);
        hopper::ArriveExpecting(shared.Full(stage), kStageBytes);
        hopper::LoadHeadBox(&q, head, tile * kQueries, work.batch, shared.Q(stage),
                            shared.Full(stage));
        hopper::LoadHeadBox(&dout, head, tile * kQueries, work.batch, shared.Dout(stage),
                            shared.Full(stage));
        hopper::LoadBytes(statistics, 2 * kStatisticBytes, shared.Base(stage), shared.Full(stage));
        statistics += 2 * kQueries;
      }
    }
  }
}

__device__ inline float2 LoadPair(uint32_t at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
  return x;
}
// LoadMatrices<false>, from an address in shared memory.
__device__ inline void LoadRows(uint32_t at, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(at));
}

// A warpgroup that multiplies. The rows of its sums are its keys: thread t, lane l, holds rows
// 16 (t / 32) + l / 4 and that + 8, columns 8 j + 2 (l % 4) and the next.
template <typename T>
struct Consumer {
  const Params<T>& p;
  const Shared& shared;
  int group, thread, warp, lane;
  int first_key = 0;   // of this warpgroup
  uint32_t total = 0;  // rounds so far
  uint32_t items = 0;  // so far

  uint32_t k[4][4], v[4][4];  // as left operands, by steps of 16 columns
  float dk[8][4], dv[8][4];
  float s[8][4], dp[8][4], dq[4][4];
  uint32_t probabilities[4][4], scores[4][4];  // rounded; `scores` holds the gradients of scores

  __device__ __forceinline__ Consumer(const Params<T>& p, const Shared& shared)
      : p(p), shared(shared) {
    group = threadIdx.x / kGroupThreads - 1;
    thread = threadIdx.x % kGroupThreads;
    warp = thread / 32;
    lane = thread % 32;
  }

  // Starts the scores and the gradients of probabilities, both transposed: rows are keys.
  __device__ __forceinline__ void BeginScores(uint32_t stage) {
    Forget(s);
    Forget(dp);
    const uint64_t q = hopper::Operand(shared.Q(stage), 16, 1024);
    const uint64_t dout = hopper::Operand(shared.Dout(stage), 16, 1024);
    hopper::FenceWgmma();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      GroupMultiplyAdd<T, false>(s, RegisterOperand{k[i]}, q + i * 2, i > 0);
    }
    hopper::CommitWgmma();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      GroupMultiplyAdd<T, false>(dp, RegisterOperand{v[i]}, dout + i * 2, i > 0);
    }
    hopper::CommitWgmma();
  }
  // Starts sum += words tile.
  __device__ __forceinline__ void BeginSum(const uint32_t (&words)[4][4], uint32_t tile,
                                           float (&sum)[8][4]) {
    const uint64_t right = hopper::Operand(tile, 16, 1024);
    hopper::FenceWgmma();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      GroupMultiplyAdd<T, true>(sum, RegisterOperand{words[i]}, right + i * 128, 1);
    }
    hopper::CommitWgmma();
  }
  // Starts half of the columns of dq, over all keys of the block.
  __device__ __forceinline__ void BeginQueryGradient() {
    const uint64_t left = hopper::Operand(shared.Scores((Shares() - 1) % 2), 16, 1024);
    const uint64_t right = hopper::Operand(shared.K(items % kSlots) + group * 64, 16, 1024);
    Forget(dq);
    hopper::FenceWgmma();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      MultiplyAdd32<T>(dq, left + i / 4 * (kTileBytes / 16) + i % 4 * 2, right + i * 128, i > 0);
    }
    hopper::CommitWgmma();
  }
  // Adds four neighbours at a time, in the order in which threads hold them.
  __device__ __forceinline__ void AddQueryGradient(int tile) {
    float* const to = p.dq + static_cast<int64_t>(tile) * (kQueries * kWidth) +
                      (group * 4 * kGroupThreads + thread) * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                       to + j * kGroupThreads * 4),
                   "f"(dq[j][0]), "f"(dq[j][1]), "f"(dq[j][2]), "f"(dq[j][3])
                   : "memory");
    }
  }

  __device__ __forceinline__ static void Pack(const float (&c)[8][4], uint32_t (&words)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i][0] = PackPair<T>(c[2 * i][0], c[2 * i][1]);
      words[i][1] = PackPair<T>(c[2 * i][2], c[2 * i][3]);
      words[i][2] = PackPair<T>(c[2 * i + 1][0], c[2 * i + 1][1]);
      words[i][3] = PackPair<T>(c[2 * i + 1][2], c[2 * i + 1][3]);
    }
  }

  __device__ __forceinline__ void Probabilities(int query, float scale2) {
    const uint32_t base = shared.Base(total % kStages) + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 b = LoadPair(base + j * 32);
      s[j][0] = Exp2(fmaf(s[j][0], scale2, b.x));
      s[j][1] = Exp2(fmaf(s[j][1], scale2, b.y));
      s[j][2] = Exp2(fmaf(s[j][2], scale2, b.x));
      s[j][3] = Exp2(fmaf(s[j][3], scale2, b.y));
    }
    if ((p.d.causal && query < first_key + kGroupKeys - 1) || first_key + kGroupKeys > p.d.keys) {
      const int key = first_key + warp * 16 + lane / 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int own = key + i / 2 * 8, column = query + j * 8 + lane % 4 * 2 + i % 2;
          if ((p.d.causal && column < own) || own >= p.d.keys) s[j][i] = 0;
        }
      }
    }
  }
  __device__ __forceinline__ void Scores() {
    const uint32_t delta = shared.Delta(total % kStages) + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 d = LoadPair(delta + j * 32);
      dp[j][0] = s[j][0] * (dp[j][0] - d.x);
      dp[j][1] = s[j][1] * (dp[j][1] - d.y);
      dp[j][2] = s[j][2] * (dp[j][2] - d.x);
      dp[j][3] = s[j][3] * (dp[j][3] - d.y);
    }
    Pack(dp, scores);
  }
  // How often scores were shared: once a round, and zeros before each item.
  __device__ __forceinline__ uint32_t Shares() const { return total + items + 1; }

  // Writes the gradients of scores, as rows of queries, for both warpgroups.
  __device__ __forceinline__ void ShareScores() {
    const uint32_t buffer = Shares() % 2;
    const uint32_t row = shared.Scores(buffer) + group * kTileBytes +
                         (lane / 16 * 8 + lane % 8) * 128 +
                         ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) StoreMatricesTransposed(row + i * 2048, scores[i]);
    Publish(buffer);
  }
  __device__ __forceinline__ void ShareZeros() {
    const uint32_t buffer = (total + items) % 2;
    const uint32_t at = shared.Scores(buffer) + (group * kGroupThreads + thread) * 64;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at + i * 16), "r"(0)
                   : "memory");
    }
    Publish(buffer);
  }
  __device__ __forceinline__ void Publish(uint32_t buffer) {
    hopper::FenceAsyncProxy();
    __syncwarp();
    if (lane == 0) hopper::Arrive(shared.ScoresFull(buffer));
  }
  // Waits for what both warpgroups shared last.
  __device__ __forceinline__ void AwaitScores() {
    const uint32_t last = Shares() - 1;
    hopper::WaitBarrier(shared.ScoresFull(last % 2), last / 2 % 2);
  }

  __device__ __forceinline__ void Run() {
    const float scale2 = p.d.scale * kLog2E;
    while (true) {
      hopper::WaitBarrier(shared.KeysFull(items % kSlots), items / kSlots % 2);
      int item;
      asm volatile("ld.shared.b32 %0, [%1];"
                   : "=r"(item)
                   : "r"(shared.Item(items % kSlots))
                   : "memory");
      if (item >= p.items) return;
      const Work work(p, item);
      first_key = work.tile * kKeys + group * kGroupKeys;
      const int row = group * kGroupKeys + warp * 16 + lane % 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t at = row * 128 + ((2 * i + lane / 16) ^ row % 8) * 16;
        LoadRows(shared.K(items % kSlots) + at, k[i]);
        LoadRows(shared.V(items % kSlots) + at, v[i]);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dk[j][i] = dv[j][i] = 0;
      }
      Loop(work, scale2);
      Store(dv, 1.f, p.d.dv.Head(work.batch, work.key_head), p.d.dv.row_stride);
      Store(dk, p.d.scale, p.d.dk.Head(work.batch, work.key_head), p.d.dk.row_stride);
      hopper::FenceAsyncProxy();
      __syncwarp();
      if (lane == 0) hopper::Arrive(shared.KeysEmpty(items % kSlots));
      ++items;
    }
  }

  __device__ __forceinline__ void Loop(const Work& work, float scale2) {
    int tile = work.first;
    int row = p.QueryTile(work.batch, work.key_head * (p.d.heads / p.d.key_heads));
    int before = row + tile;
    ShareZeros();
#pragma unroll 1
    for (int round = 0; round < work.rounds; ++round) {
      hopper::WaitBarrier(shared.Full(total % kStages), total / kStages % 2);
      BeginScores(total % kStages);
      // The MMAs of the last round are done, and its stage can be released.
      hopper::WaitWgmma<2>();
      FenceRegisters(probabilities);
      FenceRegisters(scores);
      if (round > 0 && lane == 0) ArriveRelaxed(shared.Empty((total + kStages - 1) % kStages));
      // These are the scores of the last round, or zeros in the first.
      AwaitScores();
      BeginQueryGradient();
      hopper::WaitWgmma<2>();
      FenceRegisters(s);
      Probabilities(tile * kQueries, scale2);
      Pack(s, probabilities);
      BeginSum(probabilities, shared.Dout(total % kStages), dv);
      hopper::WaitWgmma<2>();
      FenceRegisters(dp);
      Scores();
      hopper::WaitWgmma<1>();
      FenceRegisters(dq);
      BeginSum(scores, shared.Q(total % kStages), dk);
      ShareScores();
      // These additions come after the fence in ShareScores, which would wait for them.
      AddQueryGradient(before);
      before = row + tile;
      if (++tile == p.query_tiles) {
        tile = work.first;
        row += p.query_tiles;
      }
      ++total;
    }
    AwaitScores();
    BeginQueryGradient();
    hopper::WaitWgmma<0>();
    FenceRegisters(probabilities);
    FenceRegisters(scores);
    FenceRegisters(dq);
    FenceRegisters(dk);
    FenceRegisters(dv);
    AddQueryGradient(before);
    if (lane == 0) ArriveRelaxed(shared.Empty((total + kStages - 1) % kStages));
  }

  // Writes a warp's rows through its own rows of the tile of V.
  __device__ __forceinline__ void Store(const float (&sum)[8][4], float factor, T* head,
                                        int64_t pitch) {
    const int own = group * kGroupKeys + warp * 16;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = own + h * 8 + lane / 4;
        const uint32_t at =
            shared.V(items % kSlots) + row * 128 + (j ^ row % 8) * 16 + lane % 4 * 4;
        const uint32_t word = PackPair<T>(sum[j][2 * h] * factor, sum[j][2 * h + 1] * factor);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = own + i * 4 + lane / 8, chunk = lane % 8;
      uint4 x;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "r"(shared.V(items % kSlots) + row * 128 + (chunk ^ row % 8) * 16));
      const int key = first_key + row - group * kGroupKeys;
      if (key < p.d.keys) *reinterpret_cast<uint4*>(head + key * pitch + chunk * 8) = x;
    }
  }
};

#endif  // MUSTER_WARPGROUP

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    HopperAttentionBackwardKernel(const __grid_constant__ CUtensorMap q,
                                  const __grid_constant__ CUtensorMap dout,
                                  const __grid_constant__ CUtensorMap k,
                                  const __grid_constant__ CUtensorMap v,
                                  const __grid_constant__ Params<T> p) {
#if MUSTER_WARPGROUP
  extern __shared__ char unaligned[];
  const Shared shared{(hopper::SharedAddress(unaligned) + kAlignment - 1) & ~(kAlignment - 1u)};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::InitBarrier(shared.Full(stage), 1);
      hopper::InitBarrier(shared.Empty(stage), kGroups * kGroupWarps);
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      hopper::InitBarrier(shared.KeysFull(slot), 1);
      hopper::InitBarrier(shared.KeysEmpty(slot), kGroups * kGroupWarps);
    }
    for (int buffer = 0; buffer < 2; ++buffer) {
      hopper::InitBarrier(shared.ScoresFull(buffer), kGroups * kGroupWarps);
    }
    hopper::FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    hopper::GiveRegisters<kProducerRegisters>();
    if (threadIdx.x == 0) Produce(q, dout, k, v, p, shared);
  } else {
    hopper::TakeRegisters<kConsumerRegisters>();
    Consumer<T>(p, shared).Run();
  }
#endif
}

// ---- before and after
// -------------------------------------------------------------------------

constexpr int kRowThreads = 256;
constexpr int kRowLanes = 8;
constexpr int kRowsOfBlock = kRowThreads / kRowLanes;

// Computes the statistics and zeroes dq. A block takes kRowsOfBlock queries of a head of a sample.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    PrepareAttentionBackwardKernel(const __grid_constant__ Params<T> p) {
  const int row = blockIdx.x * kRowsOfBlock + threadIdx.x / kRowLanes;
  const int head = blockIdx.y, b = blockIdx.z, lane = threadIdx.x % kRowLanes;
  const bool inside = row < p.d.queries;
  if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x == 0) *p.next_item = 0;
  float sum = 0;
  if (inside) {
    float x[8], y[8];
    LoadFloats<8>(p.d.out.Head(b, head) + row * p.d.out.row_stride + lane * 8, x);
    LoadFloats<8>(p.d.dout.Head(b, head) + row * p.d.dout.row_stride + lane * 8, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
  }
#pragma unroll
  for (int distance = kRowLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  const int64_t tile = p.QueryTile(b, head) + row / kQueries;
  if (lane == 0) {
    const float lse = inside ? p.d.lse[p.d.Statistic(b, head, row)] : -INFINITY;
    float* const to = p.statistics + tile * (2 * kQueries) + row % kQueries;
    to[0] = lse == -INFINITY ? -INFINITY : -lse * kLog2E;  // no key: no probabilities
    to[kQueries] = sum;
  }
  auto* const dq = reinterpret_cast<float4*>(p.dq + (tile * kQueries + row % kQueries) * kWidth);
  dq[lane] = dq[lane + kRowLanes] = {0, 0, 0, 0};
}

// Rounds dq to 16 bits and reorders it. A block takes a tile, a thread eight columns of two rows.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    FinishAttentionBackwardKernel(const __grid_constant__ Params<T> p) {
  const int head = blockIdx.y, b = blockIdx.z;
  const int64_t tile = p.QueryTile(b, head) + blockIdx.x;
  const float* const from = p.dq + tile * (kQueries * kWidth);
  const int part = threadIdx.x % 8, pair = threadIdx.x / 8;
  float x[2][8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 four = *reinterpret_cast<const float4*>(
        from + (part * kGroupThreads + pair / 8 * 32 + pair % 8 * 4 + i) * 4);
    x[0][2 * i] = four.x * p.d.scale;
    x[0][2 * i + 1] = four.y * p.d.scale;
    x[1][2 * i] = four.z * p.d.scale;
    x[1][2 * i + 1] = four.w * p.d.scale;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int query = blockIdx.x * kQueries + pair / 8 * 16 + pair % 8 + h * 8;
    if (query >= p.d.queries) continue;
    StorePack<8>(p.d.dq.Head(b, head) + query * p.d.dq.row_stride + part * 8, FromFloats<T>(x[h]));
  }
}

}  // namespace muster::kernels::cuda::backward

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_BACKWARD_HOPPER_CUH_
