// Activations of the MLP in fp32 registers: the same arithmetic in a pass of its own and in the
// epilogue of a GEMM. Device code only.
//
// GELU, tanh form: y = x s with s = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3), since
// (1 + tanh u) / 2 = sigmoid(2u). y' = s + x s (1 - s) 2u'. For 16-bit tensors with the fast
// exponential: its error (about 1e-6 relative) is far under a rounding of outputs.
// SwiGLU of gate g and up u, with s = sigmoid(g): y = g s u, du = dy g s, dg = dy u s (1 + g (1 -
// s)).
#ifndef MUSTER_KERNELS_ACTIVATION_ACTIVATION_CUH_
#define MUSTER_KERNELS_ACTIVATION_ACTIVATION_CUH_

#include <type_traits>

namespace muster::kernels::cuda {

constexpr float kTwoRootTwoOverPi = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;
constexpr float kLog2E = 1.4426950408889634f;

// 1 / (1 + 2^x); exactly 0 or 1 where it saturates.
__device__ inline float SigmoidOfPower(float x) {
  float power, sigmoid;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.f + power));
  return sigmoid;
}

__device__ inline float FastSigmoid(float x) { return SigmoidOfPower(-kLog2E * x); }

// T is the element type of the tensor.
template <typename T>
__device__ inline float GeluSigmoid(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return 1.f / (1.f + expf(-kTwoRootTwoOverPi * x * (1.f + kGeluCubic * x * x)));
  }
  constexpr float kLinear = -kTwoRootTwoOverPi * kLog2E;
  return SigmoidOfPower(x * (kLinear + kLinear * kGeluCubic * x * x));
}

template <typename T>
__device__ inline float Gelu(float x) {
  return x * GeluSigmoid<T>(x);
}

// gelu'(x); `y` becomes gelu(x).
template <typename T>
__device__ inline float GeluSlope(float x, float& y) {
  const float s = GeluSigmoid<T>(x);
  const float twice_u_gradient = kTwoRootTwoOverPi + 3.f * kTwoRootTwoOverPi * kGeluCubic * x * x;
  y = x * s;
  return s + y * (1.f - s) * twice_u_gradient;
}

__device__ inline float Relu2(float x) { return fmaxf(x, 0.f) * fmaxf(x, 0.f); }
// The slope of Relu2 at x.
__device__ inline float Relu2Slope(float x) { return 2.f * fmaxf(x, 0.f); }

__device__ inline float Swiglu(float gate, float up) { return up * (gate * FastSigmoid(gate)); }

// Replaces gate, up and dy by d_gate, d_up and y.
__device__ inline void SwigluGradient(float& gate, float& up, float& dy) {
  const float s = FastSigmoid(gate);
  const float d_gate = dy * up * s * (1.f + gate * (1.f - s));
  const float d_up = dy * gate * s;
  dy = up * (gate * s);  // with the bits of the forward pass
  up = d_up;
  gate = d_gate;
}

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_ACTIVATION_ACTIVATION_CUH_
