// MMAs of 16-bit tiles by a warpgroup, straight from shared memory (wgmma, sm_90a): the tensor
// cores' full speed on Hopper, of which a warp alone (tensor_core.cuh) reaches some 60 %. They are
// asynchronous: FenceWgmma, MMAs, CommitWgmma, and WaitWgmma before sums or operands are accessed
// again. All warps of the group execute the same. Device code only.
//
// Tiles consist of slabs of 64 columns. A row of a slab is 128 bytes, whose eight 16-byte words are
// permuted by row % 8 (the 128-byte swizzle of PTX ISA, "Asynchronous warpgroup matrix shared
// memory layout"). Slabs start at multiples of 1024 bytes. Warp w of a group holds rows 16 w to 16
// w + 15 of the left operand and of the sums, as in m16n8k16.
#ifndef MUSTER_KERNELS_CUDA_WARPGROUP_CUH_
#define MUSTER_KERNELS_CUDA_WARPGROUP_CUH_

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/hopper.cuh"

namespace muster::kernels::cuda {

// wgmma exists in code for sm_90a alone; elsewhere its users are never launched.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MUSTER_WARPGROUP 1
#else
#define MUSTER_WARPGROUP 0
#endif

// The descriptor of a matrix: eight rows of 128 bytes are contiguous, and the next eight follow
// `eights` bytes further; a transposed right operand of more than 64 columns has its next slab
// after `slabs` bytes.
__device__ inline uint64_t MatrixAt(const void* start, int slabs, int eights) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(start));
  return (at & 0x3ffffu) >> 4 | static_cast<uint64_t>(slabs >> 4) << 16 |
         static_cast<uint64_t>(eights >> 4) << 32 | uint64_t{1} << 62;
}

// After WaitWgmma, for sums that are read and operands in registers: keeps the compiler from moving
// their uses in front of it, and from reusing their registers before.
template <typename Word, int kN>
__device__ inline void FenceRegisters([[maybe_unused]] Word (&words)[kN][4]) {
#if MUSTER_WARPGROUP
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<Word, float>) {
        asm volatile("" : "+f"(words[n][i])::"memory");
      } else {
        asm volatile("" : "+r"(words[n][i])::"memory");
      }
    }
  }
#endif
}

// The left operand: 64 x 16 in shared memory, or 16 x 16 in the registers of each warp.
struct TileOperand {
  static constexpr bool kRegisters = false;
  uint64_t tile;
};
struct RegisterOperand {
  static constexpr bool kRegisters = true;
  const uint32_t (&words)[4];
};

// c (+)= a b, with b [16, 8 kN]. In shared memory b is stored as [8 kN, 16], or with kTranspose as
// [16, 8 kN].
#if MUSTER_WARPGROUP
// clang-format off
#define MUSTER_SUMS(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define MUSTER_WGMMA_64(type)                                                             \
  if constexpr (Operand::kRegisters) {                                                            \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "                           \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "            \
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "            \
        "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"                                           \
        : MUSTER_SUMS(0), MUSTER_SUMS(1), MUSTER_SUMS(2), MUSTER_SUMS(3), MUSTER_SUMS(4),         \
          MUSTER_SUMS(5), MUSTER_SUMS(6), MUSTER_SUMS(7)                                          \
        : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "l"(b),             \
          "r"(add), "n"(kTranspose ? 1 : 0));                                                     \
  } else {                                                                                        \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "                           \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "            \
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "            \
        "%32, %33, p, 1, 1, 0, %35;\n}\n"                                                         \
        : MUSTER_SUMS(0), MUSTER_SUMS(1), MUSTER_SUMS(2), MUSTER_SUMS(3), MUSTER_SUMS(4),         \
          MUSTER_SUMS(5), MUSTER_SUMS(6), MUSTER_SUMS(7)                                          \
        : "l"(a.tile), "l"(b), "r"(add), "n"(kTranspose ? 1 : 0));                                \
  }
#define MUSTER_WGMMA_128(type)                                                            \
  if constexpr (Operand::kRegisters) {                                                            \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " "                          \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "            \
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "             \
        "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "             \
        "%62, %63}, "                                                                             \
        "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"                                           \
        : MUSTER_SUMS(0), MUSTER_SUMS(1), MUSTER_SUMS(2), MUSTER_SUMS(3), MUSTER_SUMS(4),         \
          MUSTER_SUMS(5), MUSTER_SUMS(6), MUSTER_SUMS(7), MUSTER_SUMS(8), MUSTER_SUMS(9),         \
          MUSTER_SUMS(10), MUSTER_SUMS(11), MUSTER_SUMS(12), MUSTER_SUMS(13), MUSTER_SUMS(14),    \
          MUSTER_SUMS(15)                                                                         \
        : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "l"(b),             \
          "r"(add), "n"(kTranspose ? 1 : 0));                                                     \
  } else {                                                                                        \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " "                          \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "            \
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "             \
        "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "             \
        "%62, %63}, "                                                                             \
        "%64, %65, p, 1, 1, 0, %67;\n}\n"                                                         \
        : MUSTER_SUMS(0), MUSTER_SUMS(1), MUSTER_SUMS(2), MUSTER_SUMS(3), MUSTER_SUMS(4),         \
          MUSTER_SUMS(5), MUSTER_SUMS(6), MUSTER_SUMS(7), MUSTER_SUMS(8), MUSTER_SUMS(9),         \
          MUSTER_SUMS(10), MUSTER_SUMS(11), MUSTER_SUMS(12), MUSTER_SUMS(13), MUSTER_SUMS(14),    \
          MUSTER_SUMS(15)                                                                         \
        : "l"(a.tile), "l"(b), "r"(add), "n"(kTranspose ? 1 : 0));                                \
  }
// clang-format on
#endif
template <typename T, bool kTranspose, typename Operand, int kN>
__device__ inline void GroupMultiplyAdd([[maybe_unused]] float (&c)[kN][4],
                                        [[maybe_unused]] const Operand& a,
                                        [[maybe_unused]] uint64_t b, [[maybe_unused]] int add) {
#if MUSTER_WARPGROUP
  static_assert(kN == 8 || kN == 16);
  constexpr bool kBF16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (kBF16 && kN == 8) {
    MUSTER_WGMMA_64("bf16")
  } else if constexpr (kBF16) {
    MUSTER_WGMMA_128("bf16")
  } else if constexpr (kN == 8) {
    MUSTER_WGMMA_64("f16")
  } else {
    MUSTER_WGMMA_128("f16")
  }
#endif
}
#undef MUSTER_WGMMA_64
#undef MUSTER_WGMMA_128
#undef MUSTER_SUMS

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_CUDA_WARPGROUP_CUH_
