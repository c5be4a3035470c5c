// Building blocks of the CUDA ops: 16-byte packs, conversions to and from fp32, sums in a fixed
// order. Device code only.
#ifndef MUSTER_KERNELS_CUDA_PACK_CUH_
#define MUSTER_KERNELS_CUDA_PACK_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "base/check.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

constexpr int kWarp = 32;

// N elements, moved by one instruction when they make 16 bytes. 16-bit elements stay in pairs, in
// 32-bit registers, from the load to the conversion; one by one they would take twice the
// registers.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  static constexpr bool kPairs = sizeof(T) == 2 && N % 2 == 0;
  using Word = std::conditional_t<kPairs, uint32_t, T>;
  Word words[kPairs ? N / 2 : N];

  // Element i in fp32. Requires: i is known at compile time (an unrolled loop).
  __device__ float operator[](int i) const;
  __device__ void Set(int i, T x);
};
template <typename T>
constexpr int kPackSize = 16 / static_cast<int>(sizeof(T));

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float ToFloat(__half x) { return __half2float(x); }

template <typename T>
__device__ inline T FromFloat(float x);
template <>
__device__ inline float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}

template <typename T, int N>
__device__ inline float Pack<T, N>::operator[](int i) const {
  if constexpr (!kPairs) {
    return ToFloat(words[i]);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    // bf16 is the upper half of fp32.
    const uint32_t pair = words[i / 2];
    return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
  } else {
    const uint32_t pair = words[i / 2];
    return __half2float(__ushort_as_half(static_cast<uint16_t>(i % 2 == 0 ? pair : pair >> 16)));
  }
}

template <typename T, int N>
__device__ inline void Pack<T, N>::Set(int i, T x) {
  if constexpr (!kPairs) {
    words[i] = x;
  } else {
    uint16_t bits;
    memcpy(&bits, &x, sizeof(bits));
    const uint32_t pair = words[i / 2];
    words[i / 2] = i % 2 == 0 ? (pair & 0xffff0000u) | bits : (pair & 0xffffu) | bits << 16;
  }
}

// 16-bit integers of a pack. Requires: i is known at compile time.
template <int N>
__device__ inline uint32_t Bits16(const Pack<uint16_t, N>& pack, int i) {
  if constexpr (!Pack<uint16_t, N>::kPairs) {
    return pack.words[i];
  } else {
    return i % 2 == 0 ? pack.words[i / 2] & 0xffffu : pack.words[i / 2] >> 16;
  }
}
// Requires: the pack was zero here.
template <int N>
__device__ inline void SetBits16(Pack<uint16_t, N>& pack, int i, uint32_t bits) {
  if constexpr (!Pack<uint16_t, N>::kPairs) {
    pack.words[i] = static_cast<uint16_t>(bits);
  } else {
    pack.words[i / 2] |= i % 2 == 0 ? bits : bits << 16;
  }
}

template <int N, typename T>
__device__ inline Pack<T, N> LoadPack(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <int N, typename T>
__device__ inline void StorePack(T* p, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(p) = pack;
}

// Starts to copy 16 bytes from device to shared memory without registers in between (cp.async);
// both addresses are aligned. A thread sees its own copies after WaitCopies; `n` is how many of its
// latest groups may still be in flight.
__device__ inline void CopyAsync16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global));
}
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;"); }
template <int n>
__device__ inline void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

template <typename T, int N>
__device__ inline void ToFloats(const Pack<T, N>& pack, float (&out)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = pack[i];
}

// Pairs, because the conversion to 16 bits takes two at once.
template <typename T, int N>
__device__ inline Pack<T, N> FromFloats(const float (&in)[N]) {
  Pack<T, N> pack;
  if constexpr (Pack<T, N>::kPairs) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(in[i], in[i + 1]);
        memcpy(&pack.words[i / 2], &pair, sizeof(pair));
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(in[i], in[i + 1]);
        memcpy(&pack.words[i / 2], &pair, sizeof(pair));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) pack.words[i] = FromFloat<T>(in[i]);
  }
  return pack;
}

template <int N, typename T>
__device__ inline void LoadFloats(const T* p, float (&out)[N]) {
  ToFloats(LoadPack<N>(p), out);
}

// Sum (or maximum) over a warp; every lane gets it.
template <typename T>
__device__ inline T WarpSum(T x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}
__device__ inline float WarpMax(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

// Sum (or maximum) over a block of whole warps; every thread gets it. `shared` holds 32 values and
// may be reused after the next barrier.
template <typename T>
__device__ inline T BlockSum(T x, T* shared) {
  x = WarpSum(x);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  return WarpSum(lane < static_cast<int>(blockDim.x) / kWarp ? shared[lane] : T{0});
}
__device__ inline float BlockMax(float x, float* shared) {
  x = WarpMax(x);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  return WarpMax(lane < static_cast<int>(blockDim.x) / kWarp ? shared[lane] : -INFINITY);
}

// A vector of any floating-point type that is read as fp32. For small parameters that stay in the
// cache.
struct FloatVector {
  const void* data;
  DType dtype;
  __device__ float operator[](int64_t i) const {
    if (dtype == DType::kF32) return static_cast<const float*>(data)[i];
    if (dtype == DType::kBF16) return ToFloat(static_cast<const __nv_bfloat16*>(data)[i]);
    return ToFloat(static_cast<const __half*>(data)[i]);
  }
  // Requires: 16-byte aligned, i a multiple of N.
  template <int N>
  __device__ void Load(int64_t i, float (&out)[N]) const {
    if (dtype == DType::kF32) {
      LoadFloats<N>(static_cast<const float*>(data) + i, out);
    } else if (dtype == DType::kBF16) {
      LoadFloats<N>(static_cast<const __nv_bfloat16*>(data) + i, out);
    } else {
      LoadFloats<N>(static_cast<const __half*>(data) + i, out);
    }
  }
};
inline FloatVector AsFloatVector(const Tensor& tensor) { return {tensor.data(), tensor.dtype()}; }

inline bool Aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
inline bool Aligned16(const Tensor& tensor) { return Aligned16(tensor.data()); }

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls f(T{}) with the element type of `dtype`: fp32, bf16 or fp16.
template <typename F>
void DispatchFloat(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f(float{});
    case DType::kBF16:
      return f(__nv_bfloat16{});
    case DType::kF16:
      return f(__half{});
    default:
      CHECK(false) << "not a floating-point dtype: " << Name(dtype);
  }
}

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_CUDA_PACK_CUH_
