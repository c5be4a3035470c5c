// Hopper's own instructions (sm_90a): barriers in shared memory, TMA (bulk copies of tensors),
// clusters and MMAs by warpgroups (wgmma). Device code only; see the PTX ISA, sections on mbarrier,
// cp.async.bulk.tensor and wgmma.
#ifndef MUSTER_KERNELS_CUDA_HOPPER_CUH_
#define MUSTER_KERNELS_CUDA_HOPPER_CUH_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace muster::kernels::cuda::hopper {

__device__ inline uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- barriers: 8 bytes of shared memory each ----------------------------------------------------

__device__ inline void InitBarrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised barriers visible to TMA and to the other blocks of a cluster.
__device__ inline void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives once; the phase then also waits for `bytes` from TMA.
__device__ inline void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives at the barrier with the same address in block `rank` of the cluster.
__device__ inline void ArriveAt(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
__device__ inline void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline bool TryWait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// Waits until the phase of this parity is complete.
__device__ inline void WaitBarrier(uint32_t barrier, uint32_t parity) {
#ifdef MUSTER_HOPPER_BOUNDED
  for (int i = 0; i < 2'000'000 && !TryWait(barrier, parity); ++i) {
  }
#else
  while (!TryWait(barrier, parity)) {
  }
#endif
}

// ---- clusters -----------------------------------------------------------------------------------

__device__ inline uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// A barrier of `threads` threads that use the same id (1 to 15).
__device__ inline void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- bulk tensor copies -------------------------------------------------------------------------

__device__ inline void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Starts to copy the box at (x, y) to `shared`; its bytes are counted at `barrier`.
__device__ inline void LoadBox(const CUtensorMap* map, int x, int y, uint32_t shared,
                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
// The same for one head of a sample (DescribeHeads), from column `column` on.
__device__ inline void LoadHeadBox(const CUtensorMap* map, int column, int head, int row,
                                   int sample, uint32_t shared, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared),
      "l"(map), "r"(column), "r"(head), "r"(row), "r"(sample), "r"(barrier)
      : "memory");
}
// The same of the first columns.
__device__ inline void LoadHeadBox(const CUtensorMap* map, int head, int row, int sample,
                                   uint32_t shared, uint32_t barrier) {
  LoadHeadBox(map, 0, head, row, sample, shared, barrier);
}
// The same for `bytes` contiguous bytes, without a map; addresses and sizes are multiples of 16.
__device__ inline void LoadBytes(const void* from, uint32_t bytes, uint32_t shared,
                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// LoadBox to the same addresses in every block of the cluster whose bit is set in `blocks`.
__device__ inline void LoadBoxInto(uint16_t blocks, const CUtensorMap* map, int x, int y,
                                   uint32_t shared, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
      : "memory");
}

// ---- warpgroups ---------------------------------------------------------------------------------

template <int kRegisters>
__device__ inline void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A position in a ring of kStages stages, and the parity of the phase that its barriers are in.
template <int kStages>
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void Next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Keeps the compiler from moving reads of the sums in front of WaitWgmma.
__device__ inline void FenceSums(float (&d)[128]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The descriptor of a matrix in shared memory whose rows of 128 bytes are swizzled in groups of
// eight. K-major: a row holds 64 values of k; `stride` bytes from eight rows to the next eight.
// MN-major: a row holds 64 values of one k; `stride` bytes from eight values of k to the next,
// `leading` from 64 columns to the next 64.
__device__ inline uint64_t Operand(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) |
         static_cast<uint64_t>(leading >> 4) << 16 | static_cast<uint64_t>(stride >> 4) << 32 |
         kSwizzle128;
}

// Code for other devices than sm_90a has no wgmma; its kernels are never launched there.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MUSTER_HOPPER_ASM(...) asm volatile(__VA_ARGS__)
#else
#define MUSTER_HOPPER_ASM(...)
#endif
// In front of MMAs: registers that they read or add to have been written.
__device__ inline void FenceWgmma() { MUSTER_HOPPER_ASM("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void CommitWgmma() {
  MUSTER_HOPPER_ASM("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all but the last kPending commits are done.
template <int kPending>
__device__ inline void WaitWgmma() {
  MUSTER_HOPPER_ASM("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Makes what this thread wrote to shared memory (also by cp.async that it waited for) visible to
// wgmma and TMA behind the next barrier.
__device__ inline void FenceAsyncProxy() {
  MUSTER_HOPPER_ASM("fence.proxy.async.shared::cta;" ::: "memory");
}
#undef MUSTER_HOPPER_ASM

// The body of Multiply for one pair of input types.
#define MUSTER_WGMMA_64X256X16(types)                                                              \
  asm volatile(                                                                                    \
      "{\n"                                                                                        \
      ".reg .pred p;\n"                                                                            \
      "setp.ne.b32 p, %130, 0;\n"                                                                  \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." types                                         \
      " "                                                                                          \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "           \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "           \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "           \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
      "%111, "                                                                                     \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
      "%127}, "                                                                                    \
      "%128, %129, p, 1, 1, %132, %131;\n"                                                         \
      "}\n"                                                                                        \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), \
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), \
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), \
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), \
        "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),          \
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),        \
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),        \
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),        \
        "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])         \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMnMajorB)),       \
        "n"(static_cast<int>(kMnMajorA)))

// d = a b (+ d): a 64 x 16; b 16 x 256. Thread t of the warpgroup, lane l, holds rows
// 16 (t / 32) + l / 4 and that + 8 of columns 8j + 2 (l % 4) and the next: in d[4j], d[4j + 1] and
// d[4j + 2], d[4j + 3]. Asynchronous: `d` is not to be touched before WaitWgmma.
template <typename T, bool kMnMajorB, bool kMnMajorA = false>
__device__ inline void Multiply(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    MUSTER_WGMMA_64X256X16("bf16.bf16");
  } else {
    MUSTER_WGMMA_64X256X16("f16.f16");
  }
}
#undef MUSTER_WGMMA_64X256X16

}  // namespace muster::kernels::cuda::hopper

#endif  // MUSTER_KERNELS_CUDA_HOPPER_CUH_
