// Rotary position embedding (Su et al., arXiv 2104.09864). kernels/README.md: conventions of all
// ops.
#ifndef MUSTER_KERNELS_ATTENTION_ROTARY_H_
#define MUSTER_KERNELS_ATTENTION_ROTARY_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// Llama 3's stretching of low frequencies (Llama 3.1's reference code): wavelengths beyond
// original_context / low_frequency_factor are stretched by `factor`, those below original_context /
// high_frequency_factor stay as they are, and in between the factor is interpolated linearly in the
// inverse wavelength. factor 1: off.
struct RotaryScaling {
  float factor = 1;
  float low_frequency_factor = 1;
  float high_frequency_factor = 4;
  int64_t original_context = 8192;
};
struct RotaryTableArgs {
  Tensor table;                // [S,D] fp32, written
  Tensor positions;            // [S] i32: position of row s; empty: first_position + s
  int64_t first_position = 0;  // without `positions`
  float theta = 10000;
  RotaryScaling scaling;
};
// Row s holds cos(a_0) .. cos(a_{D/2-1}), then sin(a_0) .. sin(a_{D/2-1}), where a_i is position(s)
// times theta^(-2i/D), stretched. D is even. Angles are computed in double.
void RotaryTable(Stream& stream, const RotaryTableArgs& args);
// Rotates each pair (x_i, x_{i+D/2}) of every head by the angle a_i of its row of the table, in
// place. This is the order of pairs that Hugging Face's weights are stored for. `inverse` rotates
// back, which is the backward pass. x [B,S,heads,D] act with strides (the last dimension is dense),
// so one call can take the query and the key heads of packed QKV; table [S,D].
void Rotary(Stream& stream, Tensor x, Tensor table, bool inverse);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_ATTENTION_ROTARY_H_
