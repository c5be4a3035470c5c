// The state-space scan of Mamba-2 over sequences whose tokens are spread over the ranks of a
// context-parallel group, by all-to-alls: the alternative to state_passing.h.
//
// Layout: as for attention (context_attention.h). An all-to-all turns a rank's two chunks of every
// sequence with all heads into whole sequences with 1/c of the heads, for the convolution and the
// scan; another one brings the scan's output back. The gate, the norm and the projections in front
// of and behind it stay with the tokens. Backward does the same with gradients. Where there are
// fewer groups than ranks, the B and C of a group go to every rank that has heads of it, and these
// ranks' gradients are added up by the rank that has the tokens, in the order of the ranks.
//
// A rank adds the gradients of the scan's parameters for its own heads only; the sum over the
// context group, which gradients take anyway, has those of all heads.
//
// Bytes that a rank sends, forward and the same again backward, e = bytes of an activation,
// T = B S/c its tokens, n = max(G, c) / G:
//   (c-1)/c T (2 H P + 2 n G N + H) e
// More than state passing where the sequence is long; a scan here is as long as on one rank, with
// fewer heads.
#ifndef MUSTER_PARALLEL_CONTEXT_SCAN_BY_HEADS_H_
#define MUSTER_PARALLEL_CONTEXT_SCAN_BY_HEADS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/arena.h"
#include "kernels/tensor.h"
#include "parallel/context/context_attention.h"

namespace muster::parallel {

struct HeadsShape {
  int ranks = 1;         // c
  int64_t batch = 0;     // B, sequences
  int64_t sequence = 0;  // S, the whole sequence
  int64_t heads = 0;     // H
  int64_t groups = 0;    // G, divides H
  int64_t width = 0;     // P, of a head
  int64_t state = 0;     // N
  kernels::DType activation = kernels::DType::kF32;

  // Of one rank, when it has whole sequences.
  int64_t own_heads() const { return heads / ranks; }
  int64_t own_groups() const { return groups >= ranks ? groups / ranks : 1; }
  int64_t own_columns() const { return own_heads() * width; }
  int64_t own_channels() const { return own_columns() + 2 * own_groups() * state; }
  int64_t first_head(int rank) const { return rank * own_heads(); }
  int64_t first_group(int rank) const { return rank * groups / ranks; }
};
// kInvalidArgument with the numbers: H no multiple of c, or G and c of which neither divides the
// other.
absl::Status Validate(const HeadsShape& shape);

// The bytes that a rank sends in one call forward, and as many in one backward.
int64_t PassBytes(const HeadsShape& shape);

// Of one layer. Const; the caller provides the memory, planned in an Arena. All ranks of the group
// make these calls in the same order. Requires: Validate.
class ScanByHeads {
 public:
  using Call = ContextAttention::Call;

  // What Forward keeps for Backward, and views of the scratch memory. Of whole sequences, with W =
  // own_channels() columns x | B | C of this rank's heads and groups, and E = own_columns().
  struct Saved {
    kernels::Tensor channels;  // [B S,W] act: inputs of the convolution
    kernels::Tensor steps;     // [B S,H/c] act: dt
    // Scratch.
    kernels::Tensor outputs;     // [B S,E] act: of the scan, or their gradients
    kernels::Tensor d_channels;  // [B S,W] act
    kernels::Tensor d_steps;     // [B S,H/c] act
    kernels::Tensor parts;       // [B S,W] act: messages
    kernels::Tensor step_parts;  // [B S,H/c] act: messages
  };
  // Of this rank's tokens and all heads, any strides but a dense last dimension.
  struct Inputs {
    kernels::Tensor x;     // [B,S/c,H,P]
    kernels::Tensor b, c;  // [B,S/c,G,N]
    kernels::Tensor dt;    // [B,S/c,H,1]
  };

  explicit ScanByHeads(const HeadsShape& shape);
  const HeadsShape& shape() const { return shape_; }

  void TakeSaved(kernels::Arena& arena, const char* category, Saved& saved) const;
  // Memory of one call of forward or backward; all layers may share it.
  void TakeScratch(kernels::Arena& arena, Saved& saved) const;

  // Fills saved.channels and saved.steps.
  void SendInputs(const Call& call, const Inputs& inputs, const Saved& saved) const;
  // Writes `y` [B,S/c,H,P] from saved.outputs.
  void ReturnOutputs(const Call& call, const kernels::Tensor& y, const Saved& saved) const;

  // Fills saved.outputs from `dy` [B,S/c,H,P]. Calls call.beside_first.
  void SendOutputGradients(const Call& call, const kernels::Tensor& dy, const Saved& saved) const;
  // Writes the gradients of inputs from saved.d_channels and saved.d_steps. Calls call.beside_last.
  void ReturnInputGradients(const Call& call, const Inputs& gradients, const Saved& saved) const;

 private:
  kernels::Tensor OutputParts(const Saved& saved) const;

  const HeadsShape shape_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_CONTEXT_SCAN_BY_HEADS_H_
