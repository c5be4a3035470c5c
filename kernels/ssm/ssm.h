// Ops of Mamba-2 (Dao and Gu, "Transformers are SSMs", arXiv 2405.21060): the causal depthwise
// convolution, the selective state-space scan (SSD) and the gated RMS norm.
//
// Shapes: T tokens = B samples x S positions, H heads of width P, G groups of heads (H / G heads
// share B and C), N state columns, W channels, K taps of the convolution. "act" is the compute
// type; parameters, states, step sizes and sums are fp32. Tensors of activations may be column
// slices of the rows that the input projection wrote (z | x | B | C | dt): dense columns, any row
// stride.
//
// Packed documents: `documents` [B,S] i32 is the position at which the document of each token
// begins, or empty. Position p of a sample counts from `first_position`. The convolution reads no
// token of another document, and the state is zero in front of a document's first token.
//
// Requires (CHECKed): shapes agree, dtypes as stated; on a CUDA device P and N are at most 256, a
// chunk of backward has at most 1024 positions, and a group of the norm at most 16384 columns. Host
// tensors are fp32.
// Determinism: the same inputs give the same bits, whatever the number of threads.
#ifndef MUSTER_KERNELS_SSM_SSM_H_
#define MUSTER_KERNELS_SSM_SSM_H_

#include <cstdint>
#include <limits>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// y[t,w] = silu(bias[w] + sum over k of weight[w,k] x[t - (K-1) + k, w]).
struct CausalConvArgs {
  Tensor x;          // [B,S,W] act
  Tensor weight;     // [W,K] fp32, K in [2, 4]
  Tensor bias;       // [W] fp32
  Tensor halo;       // [B,K-1,W] act: the inputs in front of the first position; empty: zeros
  Tensor documents;  // [B,S] i32 or empty
  int64_t first_position = 0;
  Tensor y;  // [B,S,W] act
};
void CausalConvForward(Stream& stream, const CausalConvArgs& args);

// The value in front of SiLU is computed again from `forward`, whose y is not read.
struct CausalConvBackwardArgs {
  CausalConvArgs forward;
  Tensor dy;       // [B,S,W] act
  Tensor dx;       // [B,S,W] act, written; may alias dy
  Tensor d_halo;   // [B,K-1,W] fp32, written; or empty
  Tensor dweight;  // [W,K] fp32 +=
  Tensor dbias;    // [W] fp32 +=
};
void CausalConvBackward(Stream& stream, const CausalConvBackwardArgs& args);

// Per head h of group g, with step_t = clamp(softplus(dt_t + dt_bias), step_min, step_max) and
// A = -exp(a_log):
//   state_t = exp(step_t A) state_{t-1} + step_t x_t (outer) B_t     [P,N], fp32
//   y_t     = state_t C_t + D x_t
struct SsdArgs {
  Tensor x;              // [B,S,H,P] act
  Tensor dt;             // [B,S,H] act
  Tensor b, c;           // [B,S,G,N] act
  Tensor dt_bias;        // [H] fp32
  Tensor a_log;          // [H] fp32
  Tensor d;              // [H] fp32
  Tensor initial_state;  // [B,H,P,N] fp32 or empty (zero)
  Tensor documents;      // [B,S] i32 or empty
  int64_t first_position = 0;
  float step_min = 0;
  float step_max = std::numeric_limits<float>::infinity();
  int64_t chunk = 128;  // positions between two stored states
  Tensor y;             // [B,S,H,P] act, written
  Tensor states;  // [B,ceil(S/chunk),H,P,N] flattened to [B,ceil(S/chunk),H,P*N], act or fp32,
                  // written: the state in front of each chunk, for backward; empty: not kept. The
                  // state itself stays in fp32.
  Tensor final_state;  // [B,H,P,N] fp32, written; or empty
  Tensor decay;        // [B,H] fp32: of SsdForwardStates and SsdBackwardStates, written
};
void SsdForward(Stream& stream, const SsdArgs& args);

// `forward` as in the forward pass, with its `states`; y and final_state are not read.
struct SsdBackwardArgs {
  SsdArgs forward;
  Tensor dy;               // [B,S,H,P] act
  Tensor d_final_state;    // [B,H,P,N] fp32 or empty (zero)
  Tensor dx;               // [B,S,H,P] act, written
  Tensor ddt;              // [B,S,H] act, written
  Tensor db, dc;           // [B,S,G,N] act, written
  Tensor d_dt_bias;        // [H] fp32 +=
  Tensor d_a_log;          // [H] fp32 +=
  Tensor dd;               // [H] fp32 +=
  Tensor d_initial_state;  // [B,H,P,N] fp32, written; or empty
  Tensor d_states;         // as forward.states: memory of SsdBackwardStates, SsdBackwardInputs
};
void SsdBackward(Stream& stream, const SsdBackwardArgs& args);

// The scan where a sample is one segment of a longer sequence. What a segment leaves behind is
// linear in the state in front of it,
//   final_state = decay initial_state + (final_state from a zero state),
// with `decay` all exp(step_t A) of the segment multiplied, 0 if a document begins in it. So each
// direction runs in two calls with the same arguments, and between them the segments tell each
// other the little that depends on all of them (SsdPassStates):
//   SsdForwardStates    final_state from a zero state, and decay; reads no initial_state
//   SsdForwardOutputs   y and `states`, from initial_state
//   SsdBackwardStates   d_initial_state of a zero d_final_state, and decay; reads no d_final_state
//   SsdBackwardInputs   all other gradients, from d_final_state
// Together they compute what SsdForward and SsdBackward do, rounded differently. On a CUDA device
// the second call corrects what the first has stored for each chunk by initial_state (or
// d_final_state) times the decays in between, as far as these are above 2^-40. Between the calls
// `states` and `d_states` belong to the op; neither may be empty.
void SsdForwardStates(Stream& stream, const SsdArgs& args);
void SsdForwardOutputs(Stream& stream, const SsdArgs& args);
void SsdBackwardStates(Stream& stream, const SsdBackwardArgs& args);
void SsdBackwardInputs(Stream& stream, const SsdBackwardArgs& args);

// From what every segment leaves behind a zero state, the state in front of each own segment; with
// `reverse` from the gradients in front of segments those behind them. Sums have the order of the
// segments, on whatever rank they are.
//
// Each of B sequences has 2c segments, of which rank r has segment r and then segment 2c - 1 - r: a
// rank's samples 2i and 2i + 1 are its two segments of sequence i.
struct SsdPassArgs {
  Tensor states;  // [c,2B,H,P*N] fp32, dense but for the first dimension
  Tensor decays;  // [c,2B,H] fp32, likewise
  int rank = 0;
  bool reverse = false;
  Tensor own;  // [2B,H,P,N] fp32, written
};
void SsdPassStates(Stream& stream, const SsdPassArgs& args);

// Cuts `documents` [B,S] i32 of whole sequences into this rank's segments (SsdPassArgs) [2B,S/2c],
// with positions that count from the beginning of each segment.
struct SegmentDocumentsArgs {
  Tensor documents;
  int rank = 0;
  Tensor own;  // written
};
void SegmentDocuments(Stream& stream, const SegmentDocumentsArgs& args);

// RMS norm (arXiv 1910.07467) over each of `groups` equal slices of a row, with a SiLU gate in
// front of the norm (the default of Mamba-2) or behind it:
//   out = norm(y silu(z)) gamma,  or  out = norm(y) gamma silu(z).
//
// Where several ranks have columns of one group, each computes its part of the sums over a row
// (GatedRmsNormSums, GatedRmsNormBackwardSums); these are added up and handed in as `sums`. Where
// all columns are of one group and a GEMM sums over them, the norm's factor of a row may follow
// that instead: GatedRmsNormUnscaled, the GEMM, and RmsScaleRows once the sums have been added up.
struct GatedRmsNormArgs {
  Tensor y;      // [T,W] act
  Tensor z;      // [T,W] act
  Tensor gamma;  // [W] fp32
  Tensor out;    // [T,W] act, written
  Tensor rstd;   // [T,groups] fp32, written
  int64_t groups = 1;
  // Of all ranks: the sums over each row and group [T,groups] fp32, any row stride, and the width
  // of a group. Empty and 0: this rank has all columns.
  Tensor sums;
  int64_t group_width = 0;
  bool norm_before_gate = false;
  float epsilon = 1e-5f;
};
void GatedRmsNormForward(Stream& stream, const GatedRmsNormArgs& args);
// Writes args.sums: squares of what the norm reads. `out` and `rstd` are not used.
void GatedRmsNormSums(Stream& stream, const GatedRmsNormArgs& args);
// Writes `out` without the factor 1 / sqrt(mean of squares + epsilon), and args.sums as
// GatedRmsNormSums does. Requires: the gate is in front of the norm. `rstd` is not used.
void GatedRmsNormUnscaled(Stream& stream, const GatedRmsNormArgs& args);

// rstd = 1 / sqrt(sums / width + epsilon) for all rows, and rows [first, first + R) of some [T,C]
// times theirs.
struct RmsScaleRowsArgs {
  Tensor sums;  // [T] fp32, of all ranks
  Tensor rstd;  // [T] fp32, written
  int64_t width = 0;
  float epsilon = 1e-5f;
  Tensor rows;  // [R,C] act, in place; may be empty
  int64_t first = 0;
};
void RmsScaleRows(Stream& stream, const RmsScaleRowsArgs& args);

struct GatedRmsNormBackwardArgs {
  GatedRmsNormArgs forward;  // `out` is not read; `sums` are those of GatedRmsNormBackwardSums
  Tensor dout;               // [T,W] act
  Tensor dy;                 // [T,W] act, written; may alias dout
  Tensor dz;                 // [T,W] act, written
  Tensor dgamma;             // [W] fp32 +=
  // [T,W] act or empty: the output of GatedRmsNormUnscaled, which GatedRmsNormBackwardSums then
  // reads instead of y, z and gamma, and which GatedRmsNormBackward writes with the factor.
  // Requires: `sums` are given and the gate is in front of the norm.
  Tensor out = Tensor();
};
void GatedRmsNormBackward(Stream& stream, const GatedRmsNormBackwardArgs& args);
// Writes args.forward.sums: of what the norm reads, times its output's gradient. Reads y, z, gamma
// and dout only, or dout and `out`.
void GatedRmsNormBackwardSums(Stream& stream, const GatedRmsNormBackwardArgs& args);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_SSM_SSM_H_
