// Products of 16-bit matrices on Hopper's tensor cores with what follows them: the MLP's
// activation, RoPE, the residual stream. For where a library's product, or one and a pass of its
// own, take longer. The caller measures (LinearPlans::RunFastest).
#ifndef MUSTER_KERNELS_GEMM_GEMM_HOPPER_H_
#define MUSTER_KERNELS_GEMM_GEMM_HOPPER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

// What follows the product p = a op(b), rounded to 16 bits first, as where it is a pass of its own.
enum class Fused {
  kNone,            // out = p + bias
  kGelu,            // out = p + bias, activation = gelu(out)
  kSwiglu,          // out = [gate, up] = p + bias, activation = silu(gate) up
  kGeluGradient,    // out = p gelu'(pre), activation = gelu(pre), column_sums of out
  kSwigluGradient,  // out = [d_gate, d_up] of p by pre = [gate, up], activation = silu(gate) up
  kResidual,        // out = p + bias, plus pre
  kRotary64,        // out = p + bias with its leading heads, of 64 columns, turned
  kRotary128,       // the same with heads of 128
};

struct HopperGemm {
  Fused fused = Fused::kNone;
  // Whether b is [N,K], weights as they are forward, or [K,N], as they are backward. kGelu and
  // kSwiglu, kResidual and kRotary* come with the first alone, the gradients with the second.
  bool transpose_b = true;
  Tensor a;                // [T,K] bf16 or fp16
  Tensor b;                // N is 2F with kSwiglu, F with kSwigluGradient
  Tensor bias;             // [N] or empty; not with the gradients
  Tensor pre;              // kGeluGradient, kResidual [T,N], kSwigluGradient [T,2F]
  Tensor out;              // [T,N]; kSwigluGradient [T,2F], which may alias pre
  Tensor activation;       // [T,N], SwiGLU [T,F]; empty: not wanted (gradients only)
  Tensor column_sums;      // [N] fp32 or empty; kGeluGradient only
  bool accumulate = true;  // column_sums
  // kRotary*: RotaryTable's, [S,D] fp32; row t of the product is turned by row t mod S.
  Tensor rotary;
  int64_t rotary_columns = 0;  // of the heads that are turned
};

// Whether RunHopperGemm serves this one: the device and the build are Hopper's, the types 16 bits
// and every row starts at a multiple of 16 bytes.
bool HopperGemmServes(const CudaDevice& device, const HopperGemm& gemm);
int64_t HopperGemmScratchBytes(const HopperGemm& gemm);

// The same bits in every run. Uses `scratch`, HopperGemmScratchBytes of it. Requires:
// HopperGemmServes.
absl::Status RunHopperGemm(CudaStream& stream, const HopperGemm& gemm, void* scratch);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_GEMM_GEMM_HOPPER_H_
