// Our GEMMs of 16-bit matrices for Hopper's tensor cores, with fused epilogues: the MLP's
// activation, RoPE, the residual stream. They are for shapes where cuBLASLt's GEMM, with or without
// a pass behind it, takes longer; the caller measures that (LinearPlans::RunFastest).
#ifndef MUSTER_KERNELS_GEMM_GEMM_HOPPER_H_
#define MUSTER_KERNELS_GEMM_GEMM_HOPPER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

// The epilogue of p = a op(b). p, with the bias, is rounded to 16 bits first, so that the result is
// the one of a separate pass.
enum class Fused {
  kNone,            // out = p + bias
  kGelu,            // out = p + bias, activation = gelu(out)
  kRelu2,           // out = p + bias, activation = max(out, 0)^2
  kSwiglu,          // out = [gate, up] = p + bias, activation = silu(gate) up
  kGeluGradient,    // out = p gelu'(pre), activation = gelu(pre), column_sums of out
  kRelu2Gradient,   // out = p 2 max(pre, 0), activation = max(pre, 0)^2
  kSwigluGradient,  // out = [d_gate, d_up] of p by pre = [gate, up], activation = silu(gate) up
  kResidual,        // out = p + bias, plus pre
  kRotary64,        // out = p + bias, with its first heads, of 64 columns, rotated
  kRotary128,       // the same with heads of 128 columns
};

struct HopperGemm {
  Fused fused = Fused::kNone;
  // True: b is [N,K], as weights are in forward. False: b is [K,N], as they are in backward. kGelu,
  // kRelu2, kSwiglu, kResidual and kRotary* require true, the gradients false.
  bool transpose_b = true;
  Tensor a;                // [T,K] bf16 or fp16
  Tensor b;                // N is 2F with kSwiglu, F with kSwigluGradient
  Tensor bias;             // [N] or empty; not with the gradients
  Tensor pre;              // kGeluGradient, kRelu2Gradient, kResidual [T,N], kSwigluGradient [T,2F]
  Tensor out;              // [T,N]; kSwigluGradient [T,2F], which may alias pre
  Tensor activation;       // [T,N], SwiGLU [T,F]; may be empty with the gradients
  Tensor column_sums;      // [N] fp32 or empty; kGeluGradient only
  bool accumulate = true;  // column_sums
  // kRotary*: RotaryTable's table, [S,D] fp32; row t of the result is rotated by its row t mod S.
  Tensor rotary;
  int64_t rotary_columns = 0;  // of the heads that are rotated
};

// Whether RunHopperGemm can run this: the device and the build are Hopper's, the dtypes have 16
// bits, and every row starts at a multiple of 16 bytes.
bool HopperGemmServes(const CudaDevice& device, const HopperGemm& gemm);
int64_t HopperGemmScratchBytes(const HopperGemm& gemm);

// The same bits in every run. `scratch` has HopperGemmScratchBytes. Requires: HopperGemmServes.
absl::Status RunHopperGemm(CudaStream& stream, const HopperGemm& gemm, void* scratch);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_GEMM_GEMM_HOPPER_H_
