// Every op of the engine. Each is enqueued on a stream and runs on that stream's device: the host
// implementation stands in <op>_cpu.cc, the CUDA one in <op>.cu, the choice in dispatch.cc.
//
// Shapes: T tokens (batch x sequence, flattened), B batch, S sequence, C width, V vocabulary
// padded, H heads, G key/value heads, D head width, K/N inputs/outputs of a linear layer. Weights
// are [out, in] row-major. Statistics, losses and gradients of parameters are fp32; a
// "+=" after a name says that the op adds to what is there.
// Requires (CHECKed, they are our own invariants): shapes agree, dtypes as stated, tensors
// contiguous unless strides are mentioned. "act" is fp32, bf16 or fp16, one of them per call.
// Determinism: every op gives the same bits for the same inputs, whatever the number of threads.
#ifndef MUSTER_KERNELS_OPS_H_
#define MUSTER_KERNELS_OPS_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// ---- memory ----
void Zero(Stream& stream, Tensor out);
void Copy(Stream& stream, Tensor from, Tensor to);  // same dtype and elements; host/device any
void Cast(Stream& stream, Tensor from, Tensor to);  // between fp32, bf16, fp16
// y += alpha * x, fp32.
void Axpy(Stream& stream, float alpha, Tensor x, Tensor y);
void Scale(Stream& stream, float alpha, Tensor x);
// to = from, or to += from with `accumulate` (summed in fp32, rounded once), element by element.
// Same shape, any strides (backwards, too), no overlap; act on both sides, also two different ones.
void CopyStrided(Stream& stream, Tensor from, Tensor to, bool accumulate = false);
// out = a + b, act, any shape; may alias either.
void Add(Stream& stream, Tensor a, Tensor b, Tensor out);

// ---- embedding (GPT-2: token + learned position) ----
// out[t] = wte[tokens[t]] + wpe[t % S]. tokens [T] i32 in [0, V), or -1: no row of wte, which
// another rank holds (ShardTokens); wte [V,C], wpe [S,C] or empty.
void EmbeddingForward(Stream& stream, Tensor tokens, Tensor wte, Tensor wpe, int64_t sequence,
                      Tensor out);
// Where every token of a table of `vocab` rows occurs, for EmbeddingBackward: it depends on the
// tokens alone, so forward can call it. groups [2,T] i32: the tokens in ascending order, with all
// that are not in [0, vocab) last and as `vocab`, and where they stand in `tokens`, those that are
// equal in ascending order. T < 2^30.
void GroupTokens(Stream& stream, Tensor tokens, int64_t vocab, Tensor groups);
// d_wte += , d_wpe += (either may be empty; the groups may be without d_wte, whose rows they are
// of). Each row is summed in a fixed order that the tokens and T give: no atomics.
void EmbeddingBackward(Stream& stream, Tensor groups, Tensor dout, int64_t sequence, Tensor d_wte,
                       Tensor d_wpe);
// out[t] = tokens[t] - first where that is in [0, count), else -1. i32, [T].
void ShardTokens(Stream& stream, Tensor tokens, int64_t first, int64_t count, Tensor out);

// ---- layer norm, with the residual addition in front of it fused ----
// x = residual + branch when `branch` is given (x is written to
// `sum`), else x = residual. y = (x - mean) * rstd * gamma + beta; mean, rstd [T] fp32.
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
  Tensor x;       // [T,C] act: the normalised input (sum)
  Tensor gamma;   // [C]
  Tensor mean;    // [T]
  Tensor rstd;    // [T]
  Tensor dx;      // [T,C] act; += : the gradient that flows along the residual is already there
  Tensor dgamma;  // [C] fp32 +=
  Tensor dbeta;   // [C] fp32 +=
  // [C] fp32 += or empty: the sums of the new dx's columns, which are the gradient of the bias of
  // whatever was added to the residual stream in front of x.
  Tensor dx_sums;
  // False: dgamma and dbeta are overwritten, so that nobody has to zero them first.
  bool accumulate = true;
  bool accumulate_dx_sums = true;
};
void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args);

// ---- RMS norm (Zhang and Sennrich, arXiv 1910.07467), the residual addition fused likewise ----
// x = residual + branch as above; rstd = 1 / sqrt(mean(x^2) + epsilon), y = x * rstd * gamma.
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
  Tensor x;       // [T,C] act: the normalised input (sum)
  Tensor gamma;   // [C]
  Tensor rstd;    // [T]
  Tensor dx;      // [T,C] act; +=, as in layer norm
  Tensor dgamma;  // [C] fp32 +=
  bool accumulate = true;
};
void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args);

// ---- rotary position embedding (Su et al., arXiv 2104.09864) ----
// Llama 3's stretching of the lower frequencies (Llama 3.1's reference code): wavelengths beyond
// original_context / low_frequency_factor are stretched by `factor`, those below original_context /
// high_frequency_factor stay, in between linearly in the inverse wavelength. factor 1: off.
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
// Row s: cos(a_0) .. cos(a_{D/2-1}), sin(a_0) .. sin(a_{D/2-1}), with a_i = position(s) times
// theta^(-2i/D), stretched. D is even. Angles in double.
void RotaryTable(Stream& stream, const RotaryTableArgs& args);
// Rotates each pair (x_i, x_{i+D/2}) of every head by the angle a_i of its row of the table, in
// place: the halves form that Hugging Face's weights are stored for. `inverse` rotates back, which
// is the backward pass. x [B,S,heads,D] act with strides (dense last dimension), so one call can
// take the query and the key heads of packed QKV; table [S,D].
void Rotary(Stream& stream, Tensor x, Tensor table, bool inverse);

// ---- SwiGLU (Shazeer, arXiv 2002.05202) ----
// packed [T,2F] act: the gate in columns [0,F), `up` in [F,2F). y = silu(gate) * up, [T,F].
void SwigluForward(Stream& stream, Tensor packed, Tensor y);
// d_packed [T,2F] = ; may alias packed. `y`, unless empty, is written again with the bits of
// Forward, for who has not kept it; it may alias dy.
void SwigluBackward(Stream& stream, Tensor packed, Tensor dy, Tensor d_packed, Tensor y = Tensor());

// ---- linear ----
// y = epilogue(x W^T + bias). kGelu and kSwiglu also write the pre-activation, rounded, to `pre`
// (kept for backward); kSwiglu applies SwigluForward to it. kRotary rounds, then turns heads of y
// as Rotary does.
enum class Epilogue { kNone, kGelu, kSwiglu, kRotary };
struct LinearForwardArgs {
  Tensor x;     // [T,K] act
  Tensor w;     // [N,K] act
  Tensor bias;  // [N] act or empty
  Tensor y;     // [T,N] act; [T,N/2] with kSwiglu
  Epilogue epilogue = Epilogue::kNone;
  Tensor pre;  // [T,N] act, with kGelu and kSwiglu
  // kRotary: the table, [S,D] with T a multiple of S, and how many of the heads of D columns of y
  // are turned: the first ones.
  Tensor rotary = Tensor();
  int64_t rotary_heads = 0;
  // [T,N] act or empty, with kNone only: added to y, which it does not alias. On CUDA the sum may
  // be rounded once or twice.
  Tensor residual = Tensor();

  // What kRotary turns: those heads as Rotary's x, [T/S,S,heads,D].
  Tensor RotaryHeads() const {
    const int64_t n = w.dim(0), rows = rotary.dim(0), depth = rotary.dim(1);
    return Tensor(y.data(), y.dtype(), {y.dim(0) / rows, rows, rotary_heads, depth},
                  {rows * n, n, depth, 1});
  }
};
void LinearForward(Stream& stream, const LinearForwardArgs& args);
// dx = dy W (then times gelu'(pre) when `pre` is given: the epilogue of the layer in front, whose
// output x was); dw += dy^T x; dbias += column sums of dy.
// Without `dw` only the gradient of the input is computed: whoever puts that of the weights off
// calls once more, without `dx`, for dw and dbias. A call without `dw` reads no x, one without `dx`
// no w. With `pre`, two more things that would each read a [T,K] tensor once more on their own:
// with `recompute_x` x = gelu(pre) is written before it is used (Forward has not kept it), and
// pre_dbias += column sums of dx, the bias gradient of the layer in front.
// With `packed`, x was SwigluForward's output from it: d_packed is written as by SwigluBackward, dx
// is scratch, and recompute_x writes x, which may be dx then. Only without `dw`.
struct LinearBackwardArgs {
  Tensor dy;         // [T,N] act
  Tensor x;          // [T,K] act; written with recompute_x; may be empty without dw
  Tensor w;          // [N,K] act
  Tensor dx;         // [T,K] act or empty
  Tensor pre;        // [T,K] act or empty
  Tensor dw;         // [N,K] fp32 += or empty
  Tensor dbias;      // [N] fp32 += or empty; with dw only
  Tensor pre_dbias;  // [K] fp32 += or empty
  bool recompute_x = false;
  // False: dw, dbias and pre_dbias are overwritten, so that nobody has to zero them first.
  bool accumulate = true;
  Tensor packed = Tensor();    // [T,2K] act or empty
  Tensor d_packed = Tensor();  // [T,2K] act, with `packed`, which it may alias
};
void LinearBackward(Stream& stream, const LinearBackwardArgs& args);

// GELU, tanh form (Hendrycks and Gimpel, arXiv 1606.08415).
void GeluForward(Stream& stream, Tensor x, Tensor y);
void GeluBackward(Stream& stream, Tensor x, Tensor dy, Tensor dx);  // dx = ; may alias dy

// ---- attention ----
// Causal softmax(q k^T * scale) v per head, computed in tiles without the S x S matrix in memory
// (FlashAttention-2, arXiv 2307.08691). Head h reads key/value head h / (H/G).
// q, out [B,S,H,D], k, v [B,S,G,D], all with strides (packed QKV needs no copy; the last dimension
// is dense); lse [B,H,S] fp32: log of the softmax denominator, for backward.
struct AttentionArgs {
  Tensor q, k, v, out, lse;
  float scale = 0;  // 0 = 1/sqrt(D)
  bool causal = true;
  // Packed sequences: a query sees the keys of its own document alone. [B,S] i32, the position at
  // which the document of each query begins, or empty; the first key has position `key_position`,
  // the others follow. Requires: does not fall along S. Without causal, a query may be left with no
  // key: out = 0, lse = -inf.
  Tensor documents = Tensor();
  int64_t key_position = 0;
};
void AttentionForward(Stream& stream, const AttentionArgs& args);
struct AttentionBackwardArgs {
  AttentionArgs forward;
  Tensor dout;        // as out
  Tensor dq, dk, dv;  // as q, k, v; written
  Tensor delta;       // [B,H,S] fp32 scratch: row sums of dout * out
  // False: dq may be added up in any order on CUDA, faster from some thousand tokens on.
  bool deterministic = true;
};
void AttentionBackward(Stream& stream, const AttentionBackwardArgs& args);

// Attention over a union of two disjoint sets of keys, from the results over each:
//   lse' = log(exp(lse) + exp(partial_lse)),
//   out = out exp(lse - lse') + partial_out exp(partial_lse - lse'), lse = lse'.
// In fp32; a set without keys has lse = -inf. AttentionBackward over one of the sets, given the
// merged out and lse, yields that set's part of dq, and its dk and dv.
struct AttentionMergeArgs {
  Tensor out;          // [B,S,H,D] act, updated
  Tensor lse;          // [B,H,S] fp32, updated
  Tensor partial_out;  // [B,S,H,D] act; need not be out's
  Tensor partial_lse;  // [B,H,S] fp32
};
void AttentionMerge(Stream& stream, const AttentionMergeArgs& args);

// ---- dropout (Srivastava et al., JMLR 2014) ----
// out = x * mask / (1 - probability), where the mask is 0 with that probability and else 1.
//
// The mask of an element depends on the seed, the site, the number of the sample in the order in
// which training takes samples, the token's position in it and the column alone (dropout_mask.h:
// Philox4x32-10). So it is the same wherever the element is computed, on host and device, and is
// not stored: the same call on the gradient is the backward pass. No sample is taken twice, so
// every step has masks of its own; what makes the difference is read from device memory, and a
// recording of the call (kernels/device/replay.h) draws anew.
struct DropoutArgs {
  Tensor x;                // [R,C] act; C <= 2^18
  Tensor out;              // as x, which it may be
  double probability = 0;  // of being dropped, 0 to less than 1
  uint64_t seed = 0;
  int64_t site = 0;  // tells apart where a model drops, 0 to 2^16 - 1
  // [2] i32: the lower and the upper half of the first sample's number; the others follow.
  Tensor sample;
  // Row r is token first_row + r of those samples, S = `sequence` tokens each. Token t of a sample
  // has the position positions[t] ([S] i32), or t where that is empty.
  int64_t sequence = 0;
  int64_t first_row = 0;
  Tensor positions = Tensor();
};
void Dropout(Stream& stream, const DropoutArgs& args);

// ---- loss ----
//
// losses[t] = logsumexp(z[t, :vocab]) - z[t, target]; 0 where target < 0 (masked). With
// `write_gradient` the logits are overwritten by scale * (softmax - onehot) (0 where masked and in
// the padding).
struct CrossEntropyArgs {
  Tensor logits;      // [T,V] act
  Tensor targets;     // [T] i32, < 0 = masked
  Tensor losses;      // [T] fp32
  int64_t vocab = 0;  // real columns, <= V
  float scale = 1;    // 1 / unmasked tokens of the global batch
  // Device memory, or null: one more factor of the gradient, the dynamic loss scale of fp16.
  const float* loss_scale = nullptr;
  bool write_gradient = true;
};
void CrossEntropy(Stream& stream, const CrossEntropyArgs& args);

// The same over a vocabulary that several ranks share, each with some columns of the logits. First
// every rank sums up its own columns: stats[t] = (max of z, sum of exp(z - max), z[t, target], or 0
// where the target is another rank's). The ranks' stats are brought together, and the merge gives
// every rank the losses, in the same bits, and the gradient of its own columns.
struct CrossEntropyStatsArgs {
  Tensor logits;      // [T,V] act, read
  Tensor targets;     // [T] i32 of the whole vocabulary, < 0 = masked
  int64_t first = 0;  // column 0 stands for this token
  int64_t vocab = 0;  // real columns, <= V
  Tensor stats;       // [T,3] fp32, written
};
void CrossEntropyStats(Stream& stream, const CrossEntropyStatsArgs& args);
struct CrossEntropyMergeArgs {
  Tensor logits;      // [T,V] act; overwritten by the gradient, as in CrossEntropy
  Tensor targets;     // [T] i32 of the whole vocabulary, < 0 = masked
  int64_t first = 0;  // as above
  int64_t vocab = 0;
  Tensor stats;   // [ranks,T,3] fp32, in the order of the ranks
  Tensor losses;  // [T] fp32
  float scale = 1;
  const float* loss_scale = nullptr;
  bool write_gradient = true;
};
void CrossEntropyMerge(Stream& stream, const CrossEntropyMergeArgs& args);

// out[0] (+)= sum of x, fp32, in a fixed order.
void Sum(Stream& stream, Tensor x, Tensor out, bool accumulate);

// ---- optimiser ----
// out[0] (+)= sum of squares of x (fp32), in a fixed order, accumulated in double.
void SumSquares(Stream& stream, Tensor x, Tensor out, bool accumulate);
// The same as a pair that keeps 48 bits: out[0] + out[1] in double is the sum, out[0] its fp32
// rounding. So partial sums of different ranks add up to the same total, however they were cut.
void SumSquaresPair(Stream& stream, Tensor x, Tensor out, bool accumulate);
// out[i] = the sum over parts of in[part * n + i] as one binary tree over the parts in order,
// ((0 1) (2 3)) ..., in fp32. in [parts * n] fp32, bf16 or fp16; out [n] fp32, or as in (rounded
// once).
void SumParts(Stream& stream, Tensor in, Tensor out);

// Scalars of a step, in device memory, so that no step waits for the host.
struct StepScalars {
  float learning_rate;
  float beta1_correction;  // 1 - beta1^step
  float beta2_correction;
  float gradient_scale;  // clip coefficient; multiplied into every gradient
  int32_t skip;          // 1: the step is not applied (overflow)
};
// gradient_scale = min(1, clip_norm / (norm + 1e-6)), 1 when clip_norm is 0; skip when the norm is
// not finite. square_sum [1] fp32 in, norm [1] fp32 out.
void ClipCoefficient(Stream& stream, Tensor square_sum, float clip_norm, Tensor norm,
                     StepScalars* scalars);
// Learning rate of update 1, 2, ...: linear warm-up from 0 to the peak, then as `decay` says.
struct LearningRateSchedule {
  enum class Decay { kConstant, kCosine, kLinear };
  Decay decay = Decay::kConstant;
  double peak = 0;
  double minimum = 0;        // not used by kConstant
  int64_t warmup_steps = 0;  // peak * update / warmup_steps
  int64_t decay_steps = 0;   // the minimum is reached here and kept
};
// Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740), with hysteresis.
struct LossScaling {
  bool dynamic = false;
  float initial = 1;
  float growth = 2;  // after growth_interval steps without overflow
  int32_t growth_interval = 1000;
  float backoff = 0.5f;
  float minimum = 1;
  int32_t hysteresis = 2;  // overflows before the scale shrinks
};
// What one step leaves to the next, in device memory.
struct StepState {
  int64_t updates = 0;  // optimizer steps applied; skipped ones do not count
  float loss_scale = 1;
  int32_t clean_steps = 0;  // since the last overflow or growth
  int32_t hysteresis = 0;   // overflows left before the scale shrinks
};
// What the host wants to know about a step.
struct StepOutcome {
  double loss = 0;           // per token
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  double tokens = 0;
  float loss_scale = 1;  // that the step was run with
  int32_t stop = 0;      // a rank has asked to stop
  int32_t skipped = 0;   // loss or norm was not finite: no update
  StepState state;       // after the step
};
// All scalars of a step at once, so that the host need not know any. One thread.
struct PrepareStepArgs {
  // fp32: the loss (sum over tokens) of every micro-batch of the global batch, the tokens of each,
  // the stop vote, and one pair of SumSquaresPair per rank.
  Tensor values;  // [2 * micro_batches + 1 + 2 * ranks]
  int64_t micro_batches = 0;
  int64_t ranks = 0;
  // Losses were divided by this many tokens; the real number makes up for it.
  double nominal_tokens = 1;
  double clip_norm = 0;  // 0: off
  double beta1 = 0, beta2 = 0;
  LearningRateSchedule schedule;
  LossScaling loss_scaling;
  StepState* state = nullptr;      // device memory, updated
  StepScalars* scalars = nullptr;  // device memory, written
  StepOutcome* outcome = nullptr;  // device memory, written
};
void PrepareStep(Stream& stream, const PrepareStepArgs& args);
// AdamW (arXiv 1711.05101) over n elements of flat storage, fp32 state. Each product, sum, root and
// quotient is rounded on its own, so that host and device agree to the bit.
struct AdamWArgs {
  Tensor parameter;  // [n] fp32 master, updated; empty with `lower`
  Tensor gradient;   // [n] fp32
  Tensor m, v;       // [n] fp32, updated
  Tensor copy;       // [n] bf16 (rounded as by SplitMaster) or fp16 copy of the parameter, or empty
  Tensor lower;      // [n] u16, updated: the master is `copy` with this; or empty
  float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f, weight_decay = 0;
  const StepScalars* scalars = nullptr;  // device memory
};
void AdamW(Stream& stream, const AdamWArgs& args);
// A fp32 master weight as the bf16 value that the model computes with and 16 bits beside it, which
// together are the same 32 bits: `upper` is the master rounded to nearest, ties away from zero (to
// even, a pair would stand for two masters), `lower` its lower 16 bits. A lower half that has its
// highest bit set says that `upper` was rounded up. Values that round beyond the largest bf16 are
// infinite in `upper` and come back whole; of a NaN only its being one and its sign are kept.
// Without `lower` (empty) the rounding alone. On CUDA any of the tensors may be in pinned host
// memory.
void SplitMaster(Stream& stream, Tensor master, Tensor upper, Tensor lower);
void JoinMaster(Stream& stream, Tensor upper, Tensor lower, Tensor master);

// ---- gradient compression ----
//
// Takes the k elements of x of largest magnitude out of it: they become zero there, and in `also`.
// Among equal magnitudes lower indices go first; NaN is larger than anything. They are written
// either as pairs in ascending order of index (each index plus `offset`), or to `dense` as they
// stood, with zeros between them. A twin needs about six passes over x.
struct TakeLargestArgs {
  Tensor x;       // [n] fp32, updated
  Tensor also;    // [n] fp32, updated, or empty
  int64_t k = 0;  // 1 to n
  int64_t offset = 0;
  Tensor indices;  // [k] i32, and
  Tensor values;   // [k] fp32; or
  Tensor dense;    // [n] fp32
};
void TakeLargest(Stream& stream, const TakeLargestArgs& args);
// out[i] = the sum over parts of the value whose index is first + i, 0 where a part has none, as
// SumParts adds: what is dense in every part has the bits of SumParts. entries [parts, 2, k] i32:
// the indices of a part, ascending, and its values (the bits of fp32).
void SumSparse(Stream& stream, Tensor entries, int64_t first, Tensor out);
// packed = the mean magnitude of x (the bits of an fp32 number) and a bit per element, 1 for
// negative; x -= mean * sign(x). packed [1 + ceil(n / 32)] i32.
void TakeSigns(Stream& stream, Tensor x, Tensor packed);
// out[i] = the sum over parts of +- mean, the sign of element first + i, as SumParts adds. packed
// [parts, 1 + ceil(n / 32)] i32, its parts any stride apart.
void SumSigns(Stream& stream, Tensor packed, int64_t first, Tensor out);

// ---- random ----
// out[i] = mean + stddev * normal(seed, stream_id, first + i): Philox4x32-10 (Salmon et al., SC
// 2011) by global element index and Box-Muller, so the value of an element does not depend on the
// layout; in fp32 without fused multiply-adds, so that it does not depend on the machine either. Up
// to 5.77 deviations. fp32, host tensors only (initial weights).
void FillNormal(Tensor out, uint64_t seed, uint64_t stream_id, int64_t first, float mean,
                float stddev);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_OPS_H_
