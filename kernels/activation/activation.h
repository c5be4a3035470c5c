// Activations of the MLP as passes of their own; linear.h fuses them into GEMMs.
// kernels/README.md: conventions of all ops.
#ifndef MUSTER_KERNELS_ACTIVATION_ACTIVATION_H_
#define MUSTER_KERNELS_ACTIVATION_ACTIVATION_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// GELU, tanh form (Hendrycks and Gimpel, arXiv 1606.08415): y = gelu(x). act, any shape.
void GeluForward(Stream& stream, Tensor x, Tensor y);
// dx = dy * gelu'(x); dx may alias dy.
void GeluBackward(Stream& stream, Tensor x, Tensor dy, Tensor dx);

// Squared ReLU (So et al., arXiv 2109.08668): y = max(x, 0)^2. act, any shape.
void Relu2Forward(Stream& stream, Tensor x, Tensor y);
// dx = dy * 2 max(x, 0); dx may alias dy. `y`, unless empty, gets forward's output in the same
// bits.
void Relu2Backward(Stream& stream, Tensor x, Tensor dy, Tensor dx, Tensor y = Tensor());

// SwiGLU (Shazeer, arXiv 2002.05202): y = silu(gate) * up, [T,F]. packed [T,2F] act holds `gate` in
// columns [0,F) and `up` in [F,2F).
void SwigluForward(Stream& stream, Tensor packed, Tensor y);
// d_packed [T,2F] =; may alias packed. `y` [T,F], unless empty, gets forward's output in the same
// bits, for a caller that has not kept it; it may alias dy.
void SwigluBackward(Stream& stream, Tensor packed, Tensor dy, Tensor d_packed, Tensor y = Tensor());

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_ACTIVATION_ACTIVATION_H_
