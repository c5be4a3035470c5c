// MMAs of 16-bit tiles on the tensor cores by one warp (mma.sync m16n8k16, sm_80 on), and loads of
// their operands from shared memory. Device code only.
//
// With g = lane / 4 and t = lane % 4, a lane holds (PTX ISA, "Matrix fragments for mma.m16n8k16"):
//   a [16,16]: words of the pairs (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8);
//   b [16,8]:  words of the pairs in column g, rows 2t and 2t + 8;
//   c [16,8]:  fp32 (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
// So two neighbouring c tiles, rounded to 16 bits, are one a operand of the next MMA.
#ifndef MUSTER_KERNELS_CUDA_TENSOR_CORE_CUH_
#define MUSTER_KERNELS_CUDA_TENSOR_CORE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace muster::kernels::cuda {

// Four 8 x 8 matrices of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8 (16
// bytes, aligned). Word j gets row g, columns 2t and 2t + 1 of matrix j, or of its transpose.
template <bool kTranspose>
__device__ inline void LoadMatrices(uint32_t (&words)[4], const void* row) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
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

// c += a b.
template <typename T>
__device__ inline void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                   uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// 2^x to about two units in the last place; 0 for -inf.
__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// kBytes (4 or 16) from device to shared memory (cp.async), or zeros where not `inside`, when the
// address is not read.
template <int kBytes>
__device__ inline void CopyAsyncOrZero(void* shared, const void* global, bool inside) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = inside ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global), "r"(bytes)
                 : "memory");
  }
}

// Rounded to 16 bits, `low` in the lower half.
template <typename T>
__device__ inline uint32_t PackPair(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&word, &pair, sizeof(word));
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_CUDA_TENSOR_CORE_CUH_
