// The kernel of attention_forward_hopper.cu: FlashAttention (arXiv 2307.08691, 2407.08608) for
// heads of 64 on Hopper.
//
// One block runs on each multiprocessor and walks over items: three times 64 queries that share
// keys. A producer warp loads tiles of keys and values into a ring of stages by TMA, from the
// diagonal down, and queries one item ahead. Three warpgroups own 64 queries each. In a step, a
// warpgroup starts the MMAs of its queries with the next keys, starts those of the last step's
// probabilities with their values, and while these run turns the new scores into probabilities,
// which stay in registers as the left operand of the next step. The items follow each other without
// a gap: the last values of one are multiplied beside the first keys of the next.
//
// Warpgroups take turns to start MMAs, so that the exponentials of one run while the MMAs of
// another do: 5 to 15 % faster on an H200 than without turns.
//
// Speed depends on how few other instructions are issued between the MMAs, with which they share
// the register file. So the softmax keeps a reference in place of the maximum: a power of two that
// no score so far exceeds. Scores far below it are no problem, since bf16 probabilities and fp32
// sums are as precise at any scale, and sign bits tell whether any score exceeds it.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_FORWARD_HOPPER_CUH_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_FORWARD_HOPPER_CUH_

#include <cuda.h>
#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/attention/attention_problem.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/warpgroup.cuh"

namespace muster::kernels::cuda::forward {

constexpr int kWidth = 64;
constexpr int kGroups = 3;      // warpgroups that multiply
constexpr int kGroupRows = 64;  // queries of one
constexpr int kKeys = 128;      // of a tile
constexpr int kStages = 3;      // of keys, and of values
constexpr int kSlots = 2;       // for queries: the current ones and the next
constexpr int kItems = 4;       // described in shared memory at a time
constexpr int kWarpRows = 16;
constexpr int kWarpgroup = 128;
constexpr int kThreads = (kGroups + 1) * kWarpgroup;
constexpr int kRowBytes = kWidth * 2;  // a row of the swizzle
constexpr int kKeyBytes = kKeys * kRowBytes;
constexpr int kQueryBytes = kGroupRows * kRowBytes;
constexpr int kItemBytes = 48;
constexpr int kBarriers = 4 * kStages + 2 * kSlots * kGroups;
constexpr int kAlignment = 1024;
constexpr int kSharedBytes = (kSlots + 1) * kGroups * kQueryBytes + 2 * kStages * kKeyBytes +
                             kItems * kGroups * kItemBytes + kBarriers * 8 + kAlignment;

struct View {};  // TMA has the tensors
using Problem = AttentionProblem<View>;

#if MUSTER_WARPGROUP

constexpr int kProducerRegisters = 32;
constexpr int kConsumerRegisters = 160;

constexpr int kScoreTiles = kKeys / 8;
constexpr int kOutTiles = kWidth / 8;
constexpr int kKeySteps = kKeys / 16;
constexpr int kWidthSteps = kWidth / 16;

using Turn = hopper::Turn<kStages>;

// Starts to write a box, as a commit of its own.
__device__ inline void StoreBox(const CUtensorMap* map, int head, int row, int batch,
                                uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(0), "r"(head), "r"(row), "r"(batch), "r"(shared)
      : "memory");
}
// Waits until this thread's stores have read shared memory, which may then be overwritten.
__device__ inline void AwaitStores() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void StoreMatrices(uint32_t row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
// Arrives at hopper::NamedBarrier without waiting.
__device__ inline void NamedArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void StoreInts(uint32_t at, int4 x) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}
__device__ inline int4 LoadInts(uint32_t at) {
  int4 x;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}

// Addresses in shared memory.
struct Shared {
  uint32_t start;

  __device__ uint32_t Q(int slot, int group) const {
    return start + (slot * kGroups + group) * kQueryBytes;
  }
  __device__ uint32_t Out(int group, int warp) const {
    return Q(kSlots, group) + warp * kWarpRows * kRowBytes;
  }
  __device__ uint32_t K(int stage) const { return Out(kGroups, 0) + stage * kKeyBytes; }
  __device__ uint32_t V(int stage) const { return K(kStages + stage); }
  // What a warpgroup does for an item, twelve words: first query (below 0: no more items), head,
  // sample, 0; begin and end of the tiles of keys that are loaded, and of those that the warpgroup
  // sees; begin and end of those that all its queries see whole, 0, 0.
  __device__ uint32_t Item(uint32_t item, int group) const {
    return V(kStages) + (item % kItems * kGroups + group) * kItemBytes;
  }
  __device__ uint32_t Barrier(int i) const {
    return V(kStages) + kItems * kGroups * kItemBytes + i * 8;
  }
  __device__ uint32_t KFull(int stage) const { return Barrier(stage); }
  __device__ uint32_t KEmpty(int stage) const { return Barrier(kStages + stage); }
  __device__ uint32_t VFull(int stage) const { return Barrier(2 * kStages + stage); }
  __device__ uint32_t VEmpty(int stage) const { return Barrier(3 * kStages + stage); }
  __device__ uint32_t QFull(uint32_t item, int group) const {
    return Barrier(4 * kStages + item % kSlots * kGroups + group);
  }
  __device__ uint32_t QEmpty(uint32_t item, int group) const {
    return Barrier(4 * kStages + (kSlots + item % kSlots) * kGroups + group);
  }
};

// The order of items: the same tile of all key heads, then the next tile. Under a causal mask tiles
// with the most work come first, and every other round of blocks goes backwards, so that all blocks
// get about the same work. A tile takes 64 queries of each head that shares the keys, then the next
// 64, so that its three warpgroups see about the same keys.
struct Schedule {
  int round = 0;

  __device__ int Item() const {
    const auto blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
  }
};

// Called by one warp.
__device__ inline void Produce(const CUtensorMap& q, const CUtensorMap& k, const CUtensorMap& v,
                               const Problem& d, int tiles, const Shared& shared) {
  const int lane = threadIdx.x % kWarp;
  const int sharers = d.heads / d.key_heads;
  const int pairs = d.batch * d.key_heads, items = tiles * pairs;
  const auto tile_of = [](int key) { return (key + kKeys - 1) / kKeys; };
  Turn turn;
  uint32_t sent = 0;  // items
  for (Schedule at; at.round * static_cast<int>(gridDim.x) < items; ++at.round) {
    const int item = at.Item();
    if (item >= items) continue;
    const int pair = item % pairs, key_head = pair % d.key_heads, b = pair / d.key_heads;
    const int tile = d.causal ? tiles - 1 - item / pairs : item / pairs;
    // Lane 2 g looks at the first query of warpgroup g, the next one at its last.
    const int part = tile * kGroups + lane / 2, head = key_head * sharers + part % sharers;
    const int row = part / sharers * kGroupRows;
    const int first = d.FirstKey(b, row + lane % 2 * (kGroupRows - 1));
    const int keys = d.causal ? min(d.keys, row + kGroupRows) : d.keys;
    const int end = row < d.queries ? tile_of(keys) : 0;
    const int begin = min(first / kKeys, end);
    const int whole_begin = __shfl_down_sync(0xffffffffu, tile_of(first), 1);
    const int whole_end = (d.causal ? min(d.keys, row + 1) : d.keys) / kKeys;
    const int all_begin = __shfl_sync(0xffffffffu, begin, 0);
    int all_end = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      all_end = max(all_end, __shfl_sync(0xffffffffu, end, 2 * g));
    }
    const auto send_queries = [&] {
      if (lane % 2 == 0 && lane < 2 * kGroups) {
        const int group = lane / 2;
        hopper::WaitBarrier(shared.QEmpty(sent, group), (sent / kSlots & 1) ^ 1);
        const uint32_t to = shared.Item(sent, group), full = shared.QFull(sent, group);
        StoreInts(to, {row, head, b, 0});
        StoreInts(to + 16, {all_begin, all_end, max(begin, all_begin), end});
        StoreInts(to + 32, {whole_begin, whole_end, 0, 0});
        if (all_begin < all_end) {
          hopper::ArriveExpecting(full, kQueryBytes);
          hopper::LoadHeadBox(&q, head, row, b, shared.Q(sent % kSlots, group), full);
        } else {
          hopper::Arrive(full);
        }
      }
      __syncwarp();
      ++sent;
    };
    if (all_begin >= all_end) send_queries();
#pragma unroll 1
    for (int j = all_end - 1; j >= all_begin; --j, turn.Next()) {
      const auto send = [&](const CUtensorMap& map, uint32_t to, uint32_t full, uint32_t empty) {
        if (lane != 0) return;
        hopper::WaitBarrier(empty, turn.parity ^ 1);
        hopper::ArriveExpecting(full, kKeyBytes);
        hopper::LoadHeadBox(&map, key_head, j * kKeys, b, to, full);
      };
      send(k, shared.K(turn.stage), shared.KFull(turn.stage), shared.KEmpty(turn.stage));
      __syncwarp();
      if (j == all_end - 1) send_queries();
      send(v, shared.V(turn.stage), shared.VFull(turn.stage), shared.VEmpty(turn.stage));
    }
  }
  if (lane < kGroups) {
    hopper::WaitBarrier(shared.QEmpty(sent, lane), (sent / kSlots & 1) ^ 1);
    StoreInts(shared.Item(sent, lane), {-1, 0, 0, 0});
    hopper::Arrive(shared.QFull(sent, lane));
  }
}

template <typename T>
struct Consumer {
  // A new reference exceeds the scores by a factor of 2^kMargin to 2^(kMargin + 1), so that later
  // scores seldom exceed it. fp16 has few powers of two to spare.
  static constexpr float kMargin = std::is_same_v<T, __nv_bfloat16> ? 12 : 3;

  const CUtensorMap& out;
  const Problem& d;
  const Shared& shared;
  int group;
  float scale2;  // of scores, to powers of two
  Turn k_turn = {}, v_turn = {};
  uint32_t item = ~0u;
  // The tiles of the item, as in Shared::Item; `tile` is the next one.
  int tile = 0, begin = 0, own_begin = 0, own_end = 0, whole_begin = 0, whole_end = 0;
  // Thread t owns rows 16 (t / 32) + t % 32 / 4 and that + 8 of its warpgroup's, as in wgmma.
  float s[kScoreTiles][4] = {};   // scores, then probabilities
  uint32_t p[kKeySteps][4] = {};  // probabilities of the last step, as a left operand
  float o[kOutTiles][4] = {};
  float reference[2] = {};            // of a row: powers of two
  float sum[2] = {}, factor[2] = {};  // of this thread's probabilities; of a new reference

  __device__ __forceinline__ void TakeTurn() { hopper::NamedBarrier(1 + group, 2 * kWarpgroup); }
  __device__ __forceinline__ void PassTurn() {
    NamedArrive(1 + (group + 1 == kGroups ? 0 : group + 1), 2 * kWarpgroup);
  }
  __device__ __forceinline__ static void Release(uint32_t barrier) {
    if (threadIdx.x % kWarp == 0) hopper::Arrive(barrier);
  }
  __device__ __forceinline__ void ReleaseKeys() {
    Release(shared.KEmpty(k_turn.stage));
    k_turn.Next();
  }
  __device__ __forceinline__ void ReleaseValues() {
    Release(shared.VEmpty(v_turn.stage));
    v_turn.Next();
  }
  // Called when all lanes have read what they need of the item.
  __device__ __forceinline__ void ReleaseQueries() {
    __syncwarp();
    Release(shared.QEmpty(item, group));
  }
  __device__ __forceinline__ void SkipKeys() {
    TakeTurn();
    hopper::WaitBarrier(shared.KFull(k_turn.stage), k_turn.parity);
    ReleaseKeys();
    PassTurn();
  }
  __device__ __forceinline__ void SkipValues() {
    hopper::WaitBarrier(shared.VFull(v_turn.stage), v_turn.parity);
    ReleaseValues();
  }
  // Skips tiles that this warpgroup does not see, down to `to`.
  __device__ __forceinline__ void Skip(int to) {
#pragma unroll 1
    for (; tile >= to; --tile) {
      SkipKeys();
      SkipValues();
    }
  }

  // The descriptor of a matrix in shared memory (hopper::Operand) from its low word; the high words
  // of all matrices here are the same.
  __device__ __forceinline__ static uint32_t Low(uint32_t address) {
    return (address & 0x3ffff) >> 4 | 1u << 16;
  }
  __device__ __forceinline__ static uint64_t Describe(uint32_t low) {
    uint64_t matrix;
    asm("mov.b64 %0, {%1, %2};" : "=l"(matrix) : "r"(low), "r"(1024u >> 4 | 1u << 30));
    return matrix;
  }
  // These start s = scores of the next tile of keys, and o += p times values.
  __device__ __forceinline__ void BeginScores() {
    hopper::WaitBarrier(shared.KFull(k_turn.stage), k_turn.parity);
    const uint32_t a = Low(shared.Q(item % kSlots, group)), b = Low(shared.K(k_turn.stage));
    hopper::FenceWgmma();
#pragma unroll
    for (int k = 0; k < kWidthSteps; ++k) {
      GroupMultiplyAdd<T, false>(s, TileOperand{Describe(a + k * 2)}, Describe(b + k * 2), k > 0);
    }
    hopper::CommitWgmma();
  }
  __device__ __forceinline__ void BeginValues() {
    hopper::WaitBarrier(shared.VFull(v_turn.stage), v_turn.parity);
    const uint32_t b = Low(shared.V(v_turn.stage));
    hopper::FenceWgmma();
#pragma unroll
    for (int k = 0; k < kKeySteps; ++k) {
      GroupMultiplyAdd<T, true>(o, RegisterOperand{p[k]}, Describe(b + k * 128), 1);
    }
    hopper::CommitWgmma();
  }
  __device__ __forceinline__ void AwaitValues() {
    hopper::WaitWgmma<0>();
    FenceRegisters(o);
    FenceRegisters(p);
  }

  // A bit mask: bit 2 j + i is set where this thread's column 8 j + i, i < 2, is before x.
  __device__ __forceinline__ static uint32_t ColumnsBefore(int x) {
    const int n = max(0, (x >> 3) * 2 + min(x & 7, 2));
    return n >= 32 ? ~0u : (1u << n) - 1;
  }
  // Sets scores to -inf where a query does not see a key of the tile.
  __device__ __forceinline__ void Mask() {
    if (tile >= whole_begin && tile < whole_end) return;
    const int4 at = LoadInts(shared.Item(item, group));
    const int lane = threadIdx.x % kWarp;
    const int column = tile * kKeys + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = at.x + threadIdx.x % kWarpgroup / kWarp * kWarpRows + h * 8 + lane / 4;
      const int end = (d.causal ? min(d.keys, row + 1) : d.keys) - column;
      uint32_t seen = ColumnsBefore(end);
      if (d.documents != nullptr) seen &= ~ColumnsBefore(d.FirstKey(at.z, row) - column);
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
        if (!(seen >> (2 * j) & 1)) s[j][2 * h] = -INFINITY;
        if (!(seen >> (2 * j + 1) & 1)) s[j][2 * h + 1] = -INFINITY;
      }
    }
  }

  // The largest score of a row in the first kTiles of 8 columns.
  template <int kTiles>
  __device__ __forceinline__ float Most(int h) const {
    float most = -INFINITY;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) most = fmaxf(most, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    return fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
  }
  // Sets the first reference of each row. The row's first tile holds a key that it sees, if any
  // does: its own with causal, else the last one. The largest of a few scores suffices if one of
  // them is of a key that the row sees; Raise corrects for the others.
  __device__ __forceinline__ void Refer() {
    float most[2] = {Most<kScoreTiles / 4>(0), Most<kScoreTiles / 4>(1)};
    if (__any_sync(0xffffffffu, fminf(most[0], most[1]) == -INFINITY)) {
      most[0] = Most<kScoreTiles>(0);
      most[1] = Most<kScoreTiles>(1);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] = most[h] == -INFINITY ? 0.f : ceilf(most[h] * scale2) + kMargin;
    }
  }
  // Raises references where s, which holds the reference minus the score, is below 0.
  __device__ __forceinline__ void Raise() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float least = INFINITY;
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
        least = fminf(least, fminf(s[j][2 * h], s[j][2 * h + 1]));
      }
      least = fminf(least, __shfl_xor_sync(0xffffffffu, least, 1));
      least = fminf(least, __shfl_xor_sync(0xffffffffu, least, 2));
      const float by = least < 0 ? ceilf(-least) + kMargin : 0.f;
      reference[h] += by;
      factor[h] = Exp2(-by);
      sum[h] *= factor[h];
#pragma unroll
      for (int j = 0; j < kScoreTiles; ++j) {
        s[j][2 * h] += by;
        s[j][2 * h + 1] += by;
      }
    }
  }
  // Turns scores into probabilities in units of 2^reference. True: o must be multiplied by
  // `factor`.
  __device__ __forceinline__ bool Softmax(bool first) {
    Mask();
    if (first) Refer();
    uint32_t above[4] = {};
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] = fmaf(s[j][i], -scale2, reference[i / 2]);
      above[j % 4] |= __float_as_uint(s[j][0]) | __float_as_uint(s[j][1]);
      above[j % 4] |= __float_as_uint(s[j][2]) | __float_as_uint(s[j][3]);
    }
    const uint32_t signs = above[0] | above[1] | above[2] | above[3];
    const bool raise = __any_sync(0xffffffffu, static_cast<int>(signs) < 0);
    if (raise) Raise();
#pragma unroll
    for (int j = 0; j < kScoreTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] = Exp2(-s[j][i]);
      sum[0] += s[j][0] + s[j][1];
      sum[1] += s[j][2] + s[j][3];
    }
    return raise;
  }
  __device__ __forceinline__ void Round() {
#pragma unroll
    for (int k = 0; k < kKeySteps; ++k) {
      p[k][0] = PackPair<T>(s[2 * k][0], s[2 * k][1]);
      p[k][1] = PackPair<T>(s[2 * k][2], s[2 * k][3]);
      p[k][2] = PackPair<T>(s[2 * k + 1][0], s[2 * k + 1][1]);
      p[k][3] = PackPair<T>(s[2 * k + 1][2], s[2 * k + 1][3]);
    }
  }

  __device__ __forceinline__ void Reset() {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o[n][i] = 0;
    }
    sum[0] = sum[1] = reference[0] = reference[1] = 0;
  }
  // Writes a warp's rows of item `of` through its own shared memory and TMA, which leaves out rows
  // past the end.
  __device__ __forceinline__ void Write(uint32_t of) {
    const int4 at = LoadInts(shared.Item(of, group));
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kWarpgroup / kWarp;
    const int row0 = at.x + warp * kWarpRows;
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = sum[h] + __shfl_xor_sync(0xffffffffu, sum[h], 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      // The sum is 0 only where the row sees no key.
      const bool empty = total == 0;
      inverse[h] = empty ? 0.f : __fdividef(1.f, total);
      const int row = row0 + h * 8 + lane / 4;
      if (lane % 4 == 0 && row < d.queries) {
        d.lse[d.Statistic(at.z, at.y, row)] =
            empty ? -INFINITY : 0.6931471805599453f * (reference[h] + __log2f(total));
      }
    }
    const uint32_t tile_at = shared.Out(group, warp);
    if (lane == 0) AwaitStores();
    __syncwarp();
    // Lane l gives the address of row l % 16 in the left (l < 16) or right of two tiles of columns.
    const int of_row = lane % 16, right = lane / 16;
#pragma unroll
    for (int n = 0; n < kOutTiles; n += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = PackPair<T>(o[n + i / 2][2 * (i % 2)] * inverse[i % 2],
                               o[n + i / 2][2 * (i % 2) + 1] * inverse[i % 2]);
      }
      StoreMatrices(tile_at + of_row * kRowBytes + ((n + right) ^ of_row % 8) * 16, words);
    }
    hopper::FenceAsyncProxy();
    __syncwarp();
    if (lane == 0 && row0 < d.queries) StoreBox(&out, at.y, row0, at.z, tile_at);
  }

  // Goes to the next item. False: there are no more.
  __device__ __forceinline__ bool NextItem() {
    ++item;
    hopper::WaitBarrier(shared.QFull(item, group), item / kSlots & 1);
    const uint32_t at = shared.Item(item, group);
    const int4 tiles = LoadInts(at + 16), whole = LoadInts(at + 32);
    begin = tiles.x;
    tile = tiles.y - 1;
    own_begin = tiles.z;
    own_end = tiles.w;
    whole_begin = whole.x;
    whole_end = whole.y;
    return LoadInts(at).x >= 0;
  }

  // Runs items one after the other without a gap, as long as this warpgroup sees the first or
  // second tile of keys that is loaded for each. Returns whether there is an item to continue with.
  __device__ __forceinline__ bool RunItems() {
    TakeTurn();
    BeginScores();
    PassTurn();
    hopper::WaitWgmma<0>();
    FenceRegisters(s);
    ReleaseKeys();
    if (tile == own_begin) ReleaseQueries();
    Softmax(/*first=*/true);
    Round();
    --tile;
    bool more = true, begun = false;  // `item` is already the one after the one in o
#pragma unroll 1
    for (;; --tile) {
      bool first = false;
      if (tile < own_begin) {
        if (tile >= begin) break;
        more = NextItem();
        begun = true;
        if (!more || own_begin >= own_end || tile > own_end) break;
        first = true;
      }
      // The values of a skipped tile must be released after those of the tile before.
      const bool skip = tile >= own_end;
      if (skip) {
        SkipKeys();
        --tile;
      }
      TakeTurn();
      BeginScores();
      BeginValues();
      PassTurn();
      hopper::WaitWgmma<1>();
      FenceRegisters(s);
      ReleaseKeys();
      if (first) {
        AwaitValues();
        Write(item - 1);
        Reset();
        begun = false;
      }
      if (tile == own_begin) ReleaseQueries();
      const bool raised = Softmax(first);
      FenceRegisters(s);
      // The exponentials should run beside the MMAs, but the compiler moves the wait in front of
      // them unless a branch depends on their sum. The sum is never below 0.
      if (static_cast<int>(__float_as_uint(sum[0]) | __float_as_uint(sum[1])) < 0) __nanosleep(0);
      AwaitValues();
      ReleaseValues();
      if (skip) SkipValues();
      if (raised) {
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[n][i] *= factor[i / 2];
        }
      }
      Round();
    }
    BeginValues();
    AwaitValues();
    ReleaseValues();
    Write(begun ? item - 1 : item);
    if (begun) return more;
    Skip(begin);
    return NextItem();
  }

  __device__ __forceinline__ void Run() {
    if (group == kGroups - 1) PassTurn();
    bool more = NextItem();
    while (more) {
      Skip(max(own_end, begin));
      Reset();
      if (own_begin < own_end) {
        more = RunItems();
      } else {
        Skip(begin);
        Write(item);
        ReleaseQueries();
        more = NextItem();
      }
    }
    if (threadIdx.x % kWarp == 0) AwaitStores();
  }
};

#endif  // MUSTER_WARPGROUP

// `tiles`: of queries. `out` in boxes of kWarpRows, `q` of kGroupRows, `k` and `v` of kKeys.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    HopperAttentionForwardKernel(const __grid_constant__ CUtensorMap q,
                                 const __grid_constant__ CUtensorMap k,
                                 const __grid_constant__ CUtensorMap v,
                                 const __grid_constant__ CUtensorMap out, const Problem d,
                                 int tiles) {
#if MUSTER_WARPGROUP
  extern __shared__ char unaligned[];
  const uint32_t start = hopper::SharedAddress(unaligned);
  const Shared shared = {(start + kAlignment - 1) / kAlignment * kAlignment};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::InitBarrier(shared.KFull(stage), 1);
      hopper::InitBarrier(shared.VFull(stage), 1);
      hopper::InitBarrier(shared.KEmpty(stage), kGroups * kWarpgroup / kWarp);
      hopper::InitBarrier(shared.VEmpty(stage), kGroups * kWarpgroup / kWarp);
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      for (int group = 0; group < kGroups; ++group) {
        hopper::InitBarrier(shared.QFull(slot, group), 1);
        hopper::InitBarrier(shared.QEmpty(slot, group), kWarpgroup / kWarp);
      }
    }
    hopper::FenceBarrierInit();
    hopper::PrefetchMap(&q);
    hopper::PrefetchMap(&k);
    hopper::PrefetchMap(&v);
    hopper::PrefetchMap(&out);
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    hopper::GiveRegisters<kProducerRegisters>();
    if (threadIdx.x < kWarp) Produce(q, k, v, d, tiles, shared);
  } else {
    hopper::TakeRegisters<kConsumerRegisters>();
    const int group = threadIdx.x / kWarpgroup - 1;
    Consumer<T>{out, d, shared, group, d.scale * kLog2E}.Run();
  }
#endif
}

}  // namespace muster::kernels::cuda::forward

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_FORWARD_HOPPER_CUH_
