// The Mamba-2 mixer (Dao and Gu, "Transformers are SSMs", arXiv 2405.21060): input projection,
// causal depthwise convolution with SiLU, selective state-space scan, gated RMS norm, output
// projection. The ops are kernels/ssm/ssm.h's, which have the formulas.
//
// Parameters (H heads of width P, E = H P, G groups, N state columns, K taps, W = E + 2 G N):
//   NAME.in_proj.weight [2E + 2GN + H, C]: the rows of z (E), x (E), B (G N), C (G N), dt (H)
//   NAME.conv.weight [W,K], NAME.conv.bias [W]: over x, B and C
//   NAME.{dt_bias, a_log, d} [H], NAME.norm.weight [E], NAME.out_proj.weight [C,E]
// All but the projections are read in fp32 and have no weight decay. Initial values are those of
// mamba_ssm: conv uniform within 1 / sqrt(K), exp(a_log) uniform in [1, 16), softplus(dt_bias)
// log-uniform in [0.001, 0.1), d 1.
//
// Tensor parallel: a rank has some heads: their rows of z, x and dt, their channels, their columns
// of the output projection; and the rows of their groups' B and C. Where ranks share a group, since
// there are fewer groups than ranks or since shares by single heads are faster (tensor_parallel.h),
// B and C of all groups are held by all ranks (TensorSharing::kPartial), and the sums of the gated
// norm over a row are added up over the ranks, G fp32 numbers per token forward and backward.
//
// Context parallel (ModelParallel::scan_method, whatever the method of attention layers): the two
// chunks of a rank are segments of a scan (state_passing.h), and documents count positions within a
// segment; or every rank has whole sequences of some heads between the projections and the norm
// (scan_by_heads.h), and of the convolution and the scan only these heads' gradients.
//
// Kept for backward per token: the projection's output (2E + 2GN + H); what another scan
// recomputes: y (E) and the states in front of chunks (E N / chunk); and what is cheap to
// recompute: the convolution's output (W) and the norm's (E).
#ifndef MUSTER_PARALLEL_MODEL_MAMBA2_MIXER_H_
#define MUSTER_PARALLEL_MODEL_MAMBA2_MIXER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "parallel/model/mixer.h"
#include "parallel/model/parameters.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

// Positions between two stored states. With 128 the fused Hopper kernels run (docs/benchmarks).
constexpr int64_t kMamba2Chunk = 128;

struct Mamba2Spec {
  std::string name;
  int64_t hidden = 0;      // C
  int64_t heads = 0;       // H
  int64_t head_width = 0;  // P
  int64_t groups = 1;      // G, divides H
  int64_t state = 0;       // N
  int64_t taps = 4;        // K, 2 to 4
  float step_min = 0;      // of the steps of the scan (kernels/ssm/ssm.h)
  float norm_epsilon = 1e-5f;
  float stddev = 0;
  float output_stddev = 0;
};

std::unique_ptr<Mixer> MakeMamba2Mixer(ParameterRegistry& registry, const Mamba2Spec& spec,
                                       const TensorShard& shard, const Recomputed& recomputed,
                                       const ModelParallel& parallel);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_MAMBA2_MIXER_H_
