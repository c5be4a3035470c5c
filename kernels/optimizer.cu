// The tail of a step: clip coefficient and AdamW, with every scalar in device memory.
// AdamW moves 30 bytes a parameter: parameter, m, v both ways, the gradient in, the 16-bit copy
// out.
#include "kernels/elementwise.cuh"
#include "kernels/ops_cuda.h"
#include "kernels/step_math.h"

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

// Parts [kFirst, kFirst + kCount) as SumAsTree adds them, in registers: their number is known.
template <int kFirst, int kCount, int N, typename T>
__device__ void SumTree(const T* in, int64_t n, float (&sum)[N]) {
  if constexpr (kCount == 1) {
    LoadFloats<N>(in + kFirst * n, sum);
  } else {
    constexpr int kLeft = kCount > 4 ? 4 : kCount > 2 ? 2 : 1;
    float right[N];
    SumTree<kFirst, kLeft>(in, n, sum);
    SumTree<kFirst + kLeft, kCount - kLeft>(in, n, right);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += right[j];
  }
}

// kParts 0: any number of them.
template <int kParts, typename T, typename O>
struct SumPartsElements {
  static_assert(kParts <= 8);
  const T* in;
  O* out;
  int64_t n;
  int64_t parts;

  template <int N>
  __device__ void Apply(int64_t i) const {
    float sum[N];
    if constexpr (kParts > 0) {
      SumTree<0, kParts>(in + i, n, sum);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sum[j] = SumAsTree(parts, [&](int64_t part) { return ToFloat(in[part * n + i + j]); });
      }
    }
    StorePack<N>(out + i, FromFloats<O>(sum));
  }
};

template <int kParts, typename T, typename O>
void LaunchSumParts(CudaStream& stream, const T* in, O* out, int64_t n, int64_t parts) {
  // Where the second part is aligned all are.
  Elementwise<kPackSize<T>>(stream, "SumParts", n, {in, in + n, out},
                            SumPartsElements<kParts, T, O>{in, out, n, parts});
}

template <typename T, typename O>
void SumPartsTo(CudaStream& stream, const T* in, O* out, int64_t n, int64_t parts) {
  switch (parts) {
    case 2:
      return LaunchSumParts<2>(stream, in, out, n, parts);
    case 3:
      return LaunchSumParts<3>(stream, in, out, n, parts);
    case 4:
      return LaunchSumParts<4>(stream, in, out, n, parts);
    case 8:
      return LaunchSumParts<8>(stream, in, out, n, parts);
    default:
      return LaunchSumParts<0>(stream, in, out, n, parts);
  }
}

template <typename C>
struct AdamWElements {
  float* parameter;
  const float* gradient;
  float* m;
  float* v;
  C* copy;  // or nullptr
  float beta1, beta2, epsilon, weight_decay;
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
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float scaled = g[j] * s.gradient_scale;
      m1[j] = beta1 * m1[j] + (1.f - beta1) * scaled;
      v1[j] = beta2 * v1[j] + (1.f - beta2) * scaled * scaled;
      const float m_hat = m1[j] / s.beta1_correction;
      const float v_hat = v1[j] / s.beta2_correction;
      p[j] -= s.learning_rate * (m_hat / (sqrtf(v_hat) + epsilon) + weight_decay * p[j]);
    }
    StorePack<N>(m + i, FromFloats<float>(m1));
    StorePack<N>(v + i, FromFloats<float>(v1));
    StorePack<N>(parameter + i, FromFloats<float>(p));
    if (copy != nullptr) StorePack<N>(copy + i, FromFloats<C>(p));
  }
};

template <typename C>
void Launch(CudaStream& stream, const AdamWArgs& args, C* copy) {
  Elementwise<4>(
      stream, "AdamW", args.parameter.elements(),
      {args.parameter.data(), args.gradient.data(), args.m.data(), args.v.data(), copy},
      AdamWElements<C>{args.parameter.f32(), args.gradient.f32(), args.m.f32(), args.v.f32(), copy,
                       args.beta1, args.beta2, args.epsilon, args.weight_decay, args.scalars});
}

}  // namespace

void ClipCoefficient(Stream& stream, Tensor square_sum, float clip_norm, Tensor norm,
                     StepScalars* scalars) {
  CudaStream& cuda = CudaStream::Of(stream);
  ClipKernel<<<1, 1, 0, cuda.handle()>>>(square_sum.f32(), clip_norm, norm.f32(), scalars);
  cuda.CheckLaunch("ClipCoefficient");
}

void SumParts(Stream& stream, Tensor in, Tensor out) {
  CudaStream& cuda = CudaStream::Of(stream);
  const int64_t n = out.elements(), parts = in.elements() / n;
  DispatchFloat(in.dtype(), [&](auto tag) {
    using T = decltype(tag);
    if (out.dtype() == DType::kF32) {
      SumPartsTo(cuda, in.as<T>(), out.f32(), n, parts);
    } else {
      SumPartsTo(cuda, in.as<T>(), out.as<T>(), n, parts);
    }
  });
}

void PrepareStep(Stream& stream, const PrepareStepArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  PrepareStepKernel<<<1, 1, 0, cuda.handle()>>>(args, args.values.f32());
  cuda.CheckLaunch("PrepareStep");
}

void AdamW(Stream& stream, const AdamWArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.copy.empty()) return Launch<__nv_bfloat16>(cuda, args, nullptr);
  DispatchFloat(args.copy.dtype(), [&](auto tag) {
    using C = decltype(tag);
    Launch<C>(cuda, args, args.copy.as<C>());
  });
}

}  // namespace muster::kernels::cuda
