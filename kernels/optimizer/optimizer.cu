// The end of a step: clip coefficient and AdamW, with every scalar in device memory.
// AdamW moves 30 bytes a parameter: parameter, m and v are read and written, the gradient is read,
// and the 16-bit copy written; 28 bytes when the copy is the upper half of the parameter.
#include "kernels/cuda/elementwise.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/step_math.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {
namespace {

__global__ void ClipKernel(const float* square_sum, float clip_norm, float* norm,
                           StepScalars* scalars) {
  const float value = sqrtf(square_sum[0]);
  norm[0] = value;
  const bool finite = isfinite(value);
  scalars->skip = finite ? 0 : 1;
  scalars->gradient_scale = clip_norm > 0 && finite ? fminf(1.f, clip_norm / (value + 1e-6f)) : 1.f;
}

__global__ void PrepareStepKernel(const PrepareStepArgs args, const float* values) {
  PrepareStepOn(args, values);
}

// The arithmetic of AdamWStep (simd/loops.h): nothing is fused, so that parameters which the host
// updates (ZeRO-Offload) have the same bits.
struct AdamWUpdate {
  float beta1, beta2, epsilon, weight_decay;

  template <int N>
  __device__ void Apply(const StepScalars& s, const float (&gradient)[N], float (&p)[N],
                        float (&m)[N], float (&v)[N]) const {
    const float step_size = __fdiv_rn(s.learning_rate, s.beta1_correction);
    const float v_scale = __fdiv_rn(1.f, __fsqrt_rn(s.beta2_correction));
    const float decay_scale = __fsub_rn(1.f, __fmul_rn(s.learning_rate, weight_decay));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float g = __fmul_rn(gradient[j], s.gradient_scale);
      m[j] = __fadd_rn(__fmul_rn(beta1, m[j]), __fmul_rn(1.f - beta1, g));
      v[j] = __fadd_rn(__fmul_rn(beta2, v[j]), __fmul_rn(1.f - beta2, __fmul_rn(g, g)));
      const float denominator = __fadd_rn(__fmul_rn(__fsqrt_rn(v[j]), v_scale), epsilon);
      p[j] = __fsub_rn(__fmul_rn(decay_scale, p[j]),
                       __fdiv_rn(__fmul_rn(step_size, m[j]), denominator));
    }
  }
};

// SplitMaster and JoinMaster (optimizer.h) in registers.
__device__ inline uint32_t Quieted(uint32_t bits) {
  return (bits & 0x7fffffffu) > 0x7f800000u ? (bits & 0x80000000u) | 0x7fc00000u : bits;
}
__device__ inline uint32_t UpperHalf(uint32_t bits) { return (bits + 0x8000u) >> 16; }

template <int N>
__device__ inline void LoadMaster(const uint16_t* upper, const uint16_t* lower, float (&out)[N]) {
  const Pack<uint16_t, N> high = LoadPack<N>(upper), low = LoadPack<N>(lower);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint32_t bits = Bits16(low, i);
    out[i] = __uint_as_float((Bits16(high, i) - (bits >> 15)) << 16 | bits);
  }
}

// `lower` may be nullptr.
template <int N>
__device__ inline void StoreMaster(const float (&in)[N], uint16_t* upper, uint16_t* lower) {
  Pack<uint16_t, N> high{}, low{};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint32_t bits = Quieted(__float_as_uint(in[i]));
    SetBits16(high, i, UpperHalf(bits));
    SetBits16(low, i, bits & 0xffffu);
  }
  StorePack<N>(upper, high);
  if (lower != nullptr) StorePack<N>(lower, low);
}

template <typename C>
struct AdamWElements {
  AdamWUpdate update;
  float* parameter;
  const float* gradient;
  float* m;
  float* v;
  C* copy;  // or nullptr
  const StepScalars* scalars;

  template <int N>
  __device__ void Apply(int64_t i) const {
    const StepScalars s = *scalars;
    if (s.skip != 0) return;
    float p[N], g[N], m1[N], v1[N];
    LoadFloats<N>(parameter + i, p);
    LoadFloats<N>(gradient + i, g);
    LoadFloats<N>(m + i, m1);
    LoadFloats<N>(v + i, v1);
    update.Apply<N>(s, g, p, m1, v1);
    StorePack<N>(m + i, FromFloats<float>(m1));
    StorePack<N>(v + i, FromFloats<float>(v1));
    StorePack<N>(parameter + i, FromFloats<float>(p));
    if (copy == nullptr) return;
    if constexpr (std::is_same_v<C, __nv_bfloat16>) {
      StoreMaster<N>(p, reinterpret_cast<uint16_t*>(copy) + i, nullptr);
    } else {
      StorePack<N>(copy + i, FromFloats<C>(p));
    }
  }
};

struct AdamWOnHalves {
  AdamWUpdate update;
  uint16_t* upper;
  uint16_t* lower;
  const float* gradient;
  float* m;
  float* v;
  const StepScalars* scalars;

  template <int N>
  __device__ void Apply(int64_t i) const {
    const StepScalars s = *scalars;
    if (s.skip != 0) return;
    float p[N], g[N], m1[N], v1[N];
    LoadMaster<N>(upper + i, lower + i, p);
    LoadFloats<N>(gradient + i, g);
    LoadFloats<N>(m + i, m1);
    LoadFloats<N>(v + i, v1);
    update.Apply<N>(s, g, p, m1, v1);
    StorePack<N>(m + i, FromFloats<float>(m1));
    StorePack<N>(v + i, FromFloats<float>(v1));
    StoreMaster<N>(p, upper + i, lower + i);
  }
};

struct SplitElements {
  const float* master;
  uint16_t* upper;
  uint16_t* lower;  // or nullptr
  template <int N>
  __device__ void Apply(int64_t i) const {
    float x[N];
    LoadFloats<N>(master + i, x);
    StoreMaster<N>(x, upper + i, lower == nullptr ? nullptr : lower + i);
  }
};

struct JoinElements {
  const uint16_t* upper;
  const uint16_t* lower;
  float* master;
  template <int N>
  __device__ void Apply(int64_t i) const {
    float x[N];
    LoadMaster<N>(upper + i, lower + i, x);
    StorePack<N>(master + i, FromFloats<float>(x));
  }
};

constexpr int kHalves = 8;  // 16 bytes of either half

template <typename C>
void Launch(CudaStream& stream, const AdamWArgs& args, C* copy) {
  Elementwise<4>(stream, "AdamW", args.parameter.elements(),
                 {args.parameter.data(), args.gradient.data(), args.m.data(), args.v.data(), copy},
                 AdamWElements<C>{{args.beta1, args.beta2, args.epsilon, args.weight_decay},
                                  args.parameter.f32(),
                                  args.gradient.f32(),
                                  args.m.f32(),
                                  args.v.f32(),
                                  copy,
                                  args.scalars});
}

}  // namespace

void ClipCoefficient(Stream& stream, Tensor square_sum, float clip_norm, Tensor norm,
                     StepScalars* scalars) {
  CudaStream& cuda = CudaStream::Of(stream);
  ClipKernel<<<1, 1, 0, cuda.handle()>>>(square_sum.f32(), clip_norm, norm.f32(), scalars);
  cuda.CheckLaunch("ClipCoefficient");
}

void PrepareStep(Stream& stream, const PrepareStepArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  PrepareStepKernel<<<1, 1, 0, cuda.handle()>>>(args, args.values.f32());
  cuda.CheckLaunch("PrepareStep");
}

void AdamW(Stream& stream, const AdamWArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (!args.lower.empty()) {
    auto *upper = args.copy.as<uint16_t>(), *lower = args.lower.as<uint16_t>();
    return Elementwise<kHalves>(
        cuda, "AdamW", args.m.elements(),
        {upper, lower, args.gradient.data(), args.m.data(), args.v.data()},
        AdamWOnHalves{{args.beta1, args.beta2, args.epsilon, args.weight_decay},
                      upper,
                      lower,
                      args.gradient.f32(),
                      args.m.f32(),
                      args.v.f32(),
                      args.scalars});
  }
  if (args.copy.empty()) return Launch<__nv_bfloat16>(cuda, args, nullptr);
  DispatchFloat(args.copy.dtype(), [&](auto tag) {
    using C = decltype(tag);
    Launch<C>(cuda, args, args.copy.as<C>());
  });
}

void SplitMaster(Stream& stream, Tensor master, Tensor upper, Tensor lower) {
  auto* low = lower.empty() ? nullptr : lower.as<uint16_t>();
  Elementwise<kHalves>(CudaStream::Of(stream), "SplitMaster", master.elements(),
                       {master.data(), upper.data(), low},
                       SplitElements{master.f32(), upper.as<uint16_t>(), low});
}

void JoinMaster(Stream& stream, Tensor upper, Tensor lower, Tensor master) {
  Elementwise<kHalves>(CudaStream::Of(stream), "JoinMaster", master.elements(),
                       {upper.data(), lower.data(), master.data()},
                       JoinElements{upper.as<uint16_t>(), lower.as<uint16_t>(), master.f32()});
}

}  // namespace muster::kernels::cuda
