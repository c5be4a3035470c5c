// Layer norm (Ba et al., arXiv 1607.06450) and RMS norm (Zhang and Sennrich, arXiv 1910.07467),
// fused with the residual addition in front of them. kernels/README.md: conventions of all ops.
#ifndef MUSTER_KERNELS_NORM_NORM_H_
#define MUSTER_KERNELS_NORM_NORM_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// x = residual + branch, written to `sum`, or x = residual where `branch` is empty.
// y = (x - mean) * rstd * gamma + beta, where rstd = 1 / sqrt(variance + epsilon).
struct LayerNormForwardArgs {
  Tensor residual;  // [T,C] act
  Tensor branch;    // [T,C] act or empty
  Tensor sum;       // [T,C] act or empty; may alias residual
  Tensor gamma;     // [C]
  Tensor beta;      // [C]
  Tensor y;         // [T,C] act
  Tensor mean;      // [T] fp32
  Tensor rstd;      // [T] fp32
  float epsilon = 1e-5f;
};
void LayerNormForward(Stream& stream, const LayerNormForwardArgs& args);

struct LayerNormBackwardArgs {
  Tensor dy;      // [T,C] act
  Tensor x;       // [T,C] act: the input of the norm, which is forward's `sum`
  Tensor gamma;   // [C]
  Tensor mean;    // [T]
  Tensor rstd;    // [T]
  Tensor dx;      // [T,C] act +=: it already holds the gradient that flows along the residual
  Tensor dgamma;  // [C] fp32 +=
  Tensor dbeta;   // [C] fp32 +=
  // [C] fp32 += or empty: the column sums of the resulting dx. They are the gradient of the bias of
  // the layer whose output was added to the residual stream in front of x.
  Tensor dx_sums;
  // False: dgamma and dbeta are overwritten, so that they need not be zeroed first.
  bool accumulate = true;
  bool accumulate_dx_sums = true;
};
void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args);

// x as above; rstd = 1 / sqrt(mean(x^2) + epsilon), y = x * rstd * gamma.
struct RmsNormForwardArgs {
  Tensor residual;  // [T,C] act
  Tensor branch;    // [T,C] act or empty
  Tensor sum;       // [T,C] act or empty; may alias residual
  Tensor gamma;     // [C]
  Tensor y;         // [T,C] act
  Tensor rstd;      // [T] fp32
  float epsilon = 1e-5f;
};
void RmsNormForward(Stream& stream, const RmsNormForwardArgs& args);

struct RmsNormBackwardArgs {
  Tensor dy;      // [T,C] act
  Tensor x;       // [T,C] act: the input of the norm, which is forward's `sum`
  Tensor gamma;   // [C]
  Tensor rstd;    // [T]
  Tensor dx;      // [T,C] act +=, as in layer norm
  Tensor dgamma;  // [C] fp32 +=
  bool accumulate = true;
};
void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_NORM_NORM_H_
