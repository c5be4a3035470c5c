// Linear layers: GEMMs with what surrounds them in a transformer fused in. kernels/README.md:
// conventions of all ops.
#ifndef MUSTER_KERNELS_GEMM_LINEAR_H_
#define MUSTER_KERNELS_GEMM_LINEAR_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// What follows y = x W^T + bias. kGelu, kRelu2 and kSwiglu (activation.h) write the pre-activation,
// rounded, to `pre`, which backward needs. kRotary (rotary.h) rotates the first heads of the
// rounded y.
enum class Epilogue { kNone, kGelu, kRelu2, kSwiglu, kRotary };

struct LinearForwardArgs {
  Tensor x;     // [T,K] act
  Tensor w;     // [N,K] act
  Tensor bias;  // [N] act or empty
  Tensor y;     // [T,N] act; [T,N/2] with kSwiglu
  Epilogue epilogue = Epilogue::kNone;
  Tensor pre;  // [T,N] act, with kGelu, kRelu2 and kSwiglu
  // kRotary: RotaryTable's table [S,D], with T a multiple of S, and how many heads of D columns of
  // y, counted from the first, are rotated.
  Tensor rotary = Tensor();
  int64_t rotary_heads = 0;
  // [T,N] act or empty, with kNone only: added to y, which it does not alias. On CUDA the sum may
  // be rounded once or twice.
  Tensor residual = Tensor();

  // The heads that kRotary rotates, as Rotary's x: [T/S,S,heads,D].
  Tensor RotaryHeads() const {
    const int64_t n = w.dim(0), rows = rotary.dim(0), depth = rotary.dim(1);
    return Tensor(y.data(), y.dtype(), {y.dim(0) / rows, rows, rotary_heads, depth},
                  {rows * n, n, depth, 1});
  }
};
void LinearForward(Stream& stream, const LinearForwardArgs& args);

// dx = dy W; dw += dy^T x; dbias += column sums of dy.
//
// Either gradient may be left out: without `dw` only dx is computed and x is not read; without `dx`
// only dw and dbias are, and the values of w are not read. Zero-bubble schedules call twice.
//
// The layer in front: where x = gelu(pre), passing `pre` multiplies dx by gelu'(pre), adds the
// column sums of that dx to pre_dbias (not with kRelu2), and with `recompute_x` writes x before it
// is used, for a forward that has not kept it. Where x = SwigluForward(packed), passing `packed`
// writes d_packed as SwigluBackward does; dx is then scratch, and recompute_x writes x, which may
// be dx. `packed` goes with a call without `dw` only. On CUDA these are fused where that measures
// faster.
struct LinearBackwardArgs {
  Tensor dy;   // [T,N] act
  Tensor x;    // [T,K] act; written with recompute_x; may be empty without dw
  Tensor w;    // [N,K] act
  Tensor dx;   // [T,K] act or empty; aliases no input, except x with `packed`
  Tensor pre;  // [T,K] act or empty
  // What x is of `pre`, where that is given: kGelu or kRelu2.
  Epilogue activation = Epilogue::kGelu;
  Tensor dw;         // [N,K] fp32 += or empty
  Tensor dbias;      // [N] fp32 += or empty; with dw only
  Tensor pre_dbias;  // [K] fp32 += or empty; with pre only
  bool recompute_x = false;
  // False: dw, dbias and pre_dbias are overwritten, so that they need not be zeroed first.
  bool accumulate = true;
  // True: dx += dy W. Goes with dx alone, and without `pre` and `packed`. On CUDA the sum may be
  // rounded once or twice.
  bool accumulate_dx = false;
  Tensor packed = Tensor();    // [T,2K] act or empty
  Tensor d_packed = Tensor();  // [T,2K] act, with `packed`, which it may alias
};
void LinearBackward(Stream& stream, const LinearBackwardArgs& args);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_GEMM_LINEAR_H_
