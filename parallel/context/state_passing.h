// The state-space scan of Mamba-2 over sequences whose tokens are spread over the ranks of a
// context-parallel group.
//
// Layout: as for attention (context_attention.h). The two chunks of a rank are two segments of the
// sequence (SsdPassArgs), so that a rank with B sequences runs the ops of kernels/ssm/ssm.h on 2B
// samples of S/2c positions, and the layers of a hybrid model permute nothing.
//
// What segments tell each other, each in one all-gather:
//   forward   the last K - 1 inputs of the convolution, which the next segment reads
//             what a segment leaves behind a zero state, and its decay
//   backward  the gradient of the state in front of a segment, and its decay
//             the gradients of the inputs that the convolution has read of segments in front
// Every rank then combines what concerns its own segments, in the order of the sequence: the same
// bits in every run. Segments may be shorter than the convolution's reach.
//
// Bytes that a rank sends per call, e = bytes of an activation, in both directions together
//   (c-1) 2B ((K-1) W (e + 4) + 2 x 4 H (P N + 1)),
// of which (c-1) 2B ((K-1) W e + 4 H (P N + 1)) forward; nothing grows with S.
#ifndef MUSTER_PARALLEL_CONTEXT_STATE_PASSING_H_
#define MUSTER_PARALLEL_CONTEXT_STATE_PASSING_H_

#include <cstdint>
#include <vector>

#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/context/context_attention.h"

namespace muster::parallel {

// Numbers of heads that several calls of a scan share out lie in memory part behind part, each
// dense: of `of`, with all heads in dimension `axis`, the tensor of `count` of them.
kernels::Tensor OfHeads(const kernels::Tensor& of, int axis, int64_t first, int64_t count);

struct ScanShape {
  int ranks = 1;         // c
  int64_t batch = 0;     // B, sequences
  int64_t heads = 0;     // H
  int64_t width = 0;     // P, of a head
  int64_t state = 0;     // N
  int64_t taps = 0;      // K, of the convolution
  int64_t channels = 0;  // W, of the convolution
  kernels::DType activation = kernels::DType::kF32;
  std::vector<int64_t> parts = {};  // heads of each call of the scan (OfHeads); empty: of one

  int64_t segments() const { return 2 * batch; }  // of a rank
};

// The bytes that a rank sends in one call forward, and in one backward.
int64_t ForwardBytes(const ScanShape& shape);
int64_t BackwardBytes(const ScanShape& shape);

// Of one layer. Const; the caller provides the memory, planned in an Arena. All ranks of the group
// make these calls in the same order.
class StatePassing {
 public:
  using Call = ContextAttention::Call;

  // What Forward keeps for Backward, and views of the scratch memory.
  struct Saved {
    kernels::Tensor halo;  // [2B,K-1,W] act: the inputs in front of each segment
    // Scratch.
    kernels::Tensor tails;    // [c,2B,K-1,W] act
    kernels::Tensor d_halos;  // [c,2B,K-1,W] fp32
    kernels::Tensor left;     // [c, 2B H (P N + 1)] fp32: states, then decays
    kernels::Tensor ends;     // [2B,H,P,N] fp32, OfHeads
  };
  // Some channels of the segments' positions, [2B,S/2c,n]: `first` is the first of them.
  struct Channels {
    kernels::Tensor positions;
    int64_t first = 0;
  };

  explicit StatePassing(const ScanShape& shape) : shape_(shape) {}

  void TakeSaved(kernels::Arena& arena, const char* category, Saved& saved) const;
  // Memory of one call of forward or backward; all layers may share it.
  void TakeScratch(kernels::Arena& arena, Saved& saved) const;

  // Fills saved.halo from the inputs of the convolution.
  void PassInputs(const Call& call, const std::vector<Channels>& inputs, const Saved& saved) const;
  // Adds what other segments have left in saved.d_halos to the gradients of these inputs. This rank
  // has written OwnHaloGradient.
  void PassInputGradients(const Call& call, const std::vector<Channels>& gradients,
                          const Saved& saved) const;
  kernels::Tensor OwnHaloGradient(const Call& call, const Saved& saved) const;

  // Where SsdForwardStates writes final_state and SsdBackwardStates d_initial_state, [2B,H,P,N],
  // and both write decay, [2B,H]; of several calls OfHeads.
  kernels::Tensor OwnStates(const Call& call, const Saved& saved) const;
  kernels::Tensor OwnDecays(const Call& call, const Saved& saved) const;
  // From these to the states in front of segments or, in `reverse`, the gradients behind them,
  // which it leaves in saved.ends.
  void PassStates(const Call& call, bool reverse, const Saved& saved) const;

 private:
  int64_t LeftElements() const;
  // [2B,K-1,W] of a rank.
  kernels::Tensor PartOf(const kernels::Tensor& halos, int rank) const;

  const ScanShape shape_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_CONTEXT_STATE_PASSING_H_
