// What the kernels of the state-space scan by wgmma and TMA share (ssd_hopper.h).
//
// A sequence is cut into chunks of kChunk positions. With a_t the sum of step A over a chunk's
// positions up to t, state H in front of it and gradient G of the state behind it, for s <= t:
//   y_t  = sum over s of <C_t, B_s> e^(a_t - a_s) step_s x_s + e^(a_t) H C_t + D x_t
//   H'   = e^(a_end) H + sum over s of e^(a_end - a_s) step_s x_s (outer) B_s
// PrepareKernel leaves, for each chunk of each head, the factors of which these are made (Factor).
// Where a document begins inside a chunk, factors that would pass its border are zero, and Borders
// say which pairs of positions belong together.
//
// A block multiplies tiles of P rows of a head's state by N of its columns (SsdTiles). A head that
// is wider is cut into slices of P, which share its steps: everything but x, y and the state is a
// sum over them. States with more than N columns take a pass over N of them after the other, which
// add up in y and dx. What a tile has beyond the edges of a head or a state is read as zero and not
// written.
//
// Tiles in shared memory are slabs of 64 columns, as TMA swizzles them (warpgroup.cuh). T is bf16
// or fp16.
#ifndef MUSTER_KERNELS_SSM_SSD_HOPPER_CUH_
#define MUSTER_KERNELS_SSM_SSD_HOPPER_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/warpgroup.cuh"
#include "kernels/ssm/ssd_problem.cuh"

namespace muster::kernels::cuda::ssd {

constexpr int kChunk = 128;
constexpr int kGroupRows = 64;  // of a chunk, by a warpgroup
constexpr int kSlab = 64;       // columns
constexpr int kRowBytes = kSlab * 2;
constexpr int kWarpRows = 16;
constexpr int kWarpgroup = 128;
constexpr int kAlignment = 1024;
constexpr int kEights = 1024;  // bytes of eight rows of a slab
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kExponentMin = -160;  // a step's

// Factors of a chunk of a head: kFactors rows of kChunk fp32.
enum Factor {
  kSum,      // a_t log2 e
  kShifted,  // kSum - log2 step: e^(a_t - a_s) step_s = exp2(kSum_t - kShifted_s)
  kEntry,    // e^(a_t): of the state in front of the chunk, in position t
  kExit,     // e^(a_end - a_s): of position s, in the state behind the chunk
  kStep,     // 0 past the end of the sequence
  kFactors
};
constexpr int kFactorBytes = kChunk * 4;

// Two rows of kChunk i32 of a chunk of a sample: the first position of the chunk that position t
// sees, -1 when it sees the state in front of the chunk as well; and the position of the next
// document, kChunk when there is none in the chunk.
struct Borders {
  const int32_t* data;  // [B, chunks, 2, kChunk] or null: no documents

  __device__ const int32_t* First(int64_t chunk) const { return data + chunk * 2 * kChunk; }
  __device__ const int32_t* Next(int64_t chunk) const { return First(chunk) + kChunk; }
};

// Of a chunk of a head: index into arrays of chunks of heads.
template <typename T>
__device__ inline int64_t ChunkOfHead(const SsdProblem<T>& p, int64_t chunk, int64_t h) {
  return chunk * p.heads + h;  // `chunk` counts over samples
}

// A block of kChunk threads takes a chunk of kHeadsOfPrepare heads.
constexpr int kHeadsOfPrepare = 4;
template <typename T>
__global__ void __launch_bounds__(kChunk)
    PrepareKernel(const __grid_constant__ SsdProblem<T> p, float* factors, int32_t* borders);

// Heads, each cut into `slices`.
struct HeadSlices {
  int heads, slices;

  // Of the slice that is the i-th of all: its head, and its first row of the head's state.
  __device__ int Head(int i) const { return slices == 1 ? i : i / slices; }
  template <int P>
  __device__ int Row(int i) const {
    return slices == 1 ? 0 : i % slices * P;
  }
};

// The slices of the heads of one group that a block takes in a chunk of a sample.
struct HeadShare {
  int group, chunk, b, begin, end;

  // Neighbouring blocks share a chunk's B and C.
  __device__ HeadShare(HeadSlices all, int groups, int chunks, int shares) {
    const int share = blockIdx.x % shares, of_group = all.heads / groups * all.slices;
    group = blockIdx.x / shares % groups;
    chunk = blockIdx.x / shares / groups % chunks;
    b = blockIdx.x / shares / groups / chunks;
    begin = group * of_group + share * of_group / shares;
    end = group * of_group + (share + 1) * of_group / shares;
  }
};

// Of kernels of one warpgroup that loads and two that multiply.
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

#if MUSTER_WARPGROUP

// ---- shared memory ------------------------------------------------------------------------------

__device__ inline float LoadFloat(uint32_t at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
  return x;
}
__device__ inline float2 LoadFloatPair(uint32_t at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
  return x;
}
__device__ inline void StoreFloat(uint32_t at, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
__device__ inline uint32_t LoadWord(uint32_t at) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at));
  return x;
}
__device__ inline void StoreWord(uint32_t at, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
template <typename T>
__device__ inline float2 Unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  } else {
    __half2 halves;
    memcpy(&halves, &pair, sizeof(halves));
    return __half22float2(halves);
  }
}
// Two neighbouring values in global memory.
template <typename T>
__device__ inline float2 LoadPair(const T* at) {
  return Unpack<T>(*reinterpret_cast<const uint32_t*>(at));
}
// Where a row of a slab has the pair of columns 8 * eight + 2 * pair and the next.
__device__ inline uint32_t PairAt(uint32_t slab, int row, int eight, int pair) {
  return slab + row * kRowBytes + ((eight ^ (row % 8)) * 16) + pair * 4;
}
template <bool kTranspose>
__device__ inline void LoadFragments(uint32_t at, uint32_t (&words)[4]) {
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(at));
  }
}
// The left operand of a warp whose 16 rows are columns of a slab, from column `column` on, and
// whose 16 columns are its rows, from row `row` on.
__device__ inline void LoadTransposed(uint32_t slab, int row, int column, uint32_t (&words)[4]) {
  const int lane = threadIdx.x % 32;
  const int from = row + lane / 16 * 8 + lane % 8, eight = column / 8 + lane / 8 % 2;
  LoadFragments<true>(slab + from * kRowBytes + (eight ^ (from % 8)) * 16, words);
}
// The same of 16 rows from `row` on and 16 columns from `column` on.
__device__ inline void LoadStraight(uint32_t slab, int row, int column, uint32_t (&words)[4]) {
  const int lane = threadIdx.x % 32;
  const int from = row + lane % 16, eight = column / 8 + lane / 16;
  LoadFragments<false>(slab + from * kRowBytes + (eight ^ (from % 8)) * 16, words);
}

// ---- copies -------------------------------------------------------------------------------------

// Starts to store a box by TMA, as a commit of its own. What lies outside of the tensor is left
// out.
__device__ inline void StoreHeadBox(const CUtensorMap* map, int column, int head, int row,
                                    int sample, uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(column), "r"(head), "r"(row), "r"(sample), "r"(shared)
      : "memory");
}
// Waits until this thread's stores have read shared memory.
__device__ inline void AwaitStores() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void AwaitStoresDone() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---- registers ----------------------------------------------------------------------------------

template <int kN>
__device__ inline void Clear(float (&c)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] = 0;
  }
}
// Rows lane / 4 and that + 8 of a warp's sums times a factor each.
template <int kN>
__device__ inline void ScaleRows(float (&c)[kN][4], float low, float high) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    c[n][0] *= low;
    c[n][1] *= low;
    c[n][2] *= high;
    c[n][3] *= high;
  }
}
// Two neighbouring tiles of sums as a left operand.
template <typename T>
__device__ inline void PackTiles(const float (&left)[4], const float (&right)[4],
                                 uint32_t (&words)[4]) {
  words[0] = PackPair<T>(left[0], left[1]);
  words[1] = PackPair<T>(left[2], left[3]);
  words[2] = PackPair<T>(right[0], right[1]);
  words[3] = PackPair<T>(right[2], right[3]);
}
__device__ inline float SumOfQuad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// ---- MMAs ---------------------------------------------------------------------------------------

// Operands of the next 16 values of k: columns of a K-major tile (whose slabs have `rows` rows), or
// rows of an MN-major one. In units of descriptors, 16 bytes.
__device__ inline uint32_t KMajorStep(int i, int rows) {
  return i / 4 * (rows * kRowBytes / 16) + i % 4 * 2;
}
constexpr uint32_t kMnMajorStep = 16 * kRowBytes / 16;

// c (+)= a b', kSteps of 16: rows of both are K-major tiles; slabs have a_rows and b_rows rows.
template <typename T, int kSteps, int kN>
__device__ inline void MultiplyRows(float (&c)[kN][4], uint32_t a, int a_rows, uint32_t b,
                                    int b_rows, bool add) {
  const uint64_t left = hopper::Operand(a, 16, kEights), right = hopper::Operand(b, 16, kEights);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    GroupMultiplyAdd<T, false>(c, TileOperand{left + KMajorStep(i, a_rows)},
                               right + KMajorStep(i, b_rows), add || i > 0);
  }
}
// c (+)= a b, a in registers and b an MN-major tile whose slabs have b_rows rows.
template <typename T, int kSteps, int kN>
__device__ inline void MultiplyColumns(float (&c)[kN][4], const uint32_t (&a)[kSteps][4],
                                       uint32_t b, int b_rows, bool add) {
  const uint64_t right = hopper::Operand(b, b_rows * kRowBytes, kEights);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    GroupMultiplyAdd<T, true>(c, RegisterOperand{a[i]}, right + i * kMnMajorStep, add || i > 0);
  }
}
#endif  // MUSTER_WARPGROUP

}  // namespace muster::kernels::cuda::ssd

#endif  // MUSTER_KERNELS_SSM_SSD_HOPPER_CUH_
