// What the methods of context_attention.h share. Private to this folder.
#ifndef MUSTER_PARALLEL_CONTEXT_METHODS_H_
#define MUSTER_PARALLEL_CONTEXT_METHODS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/arena.h"
#include "kernels/attention/attention.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/context/context_attention.h"
#include "parallel/context/sequence_layout.h"

namespace muster::parallel::context {

std::unique_ptr<ContextAttention> MakeRing(const ContextShape& shape);
std::unique_ptr<ContextAttention> MakeAllGather(const ContextShape& shape);
std::unique_ptr<ContextAttention> MakeAllToAll(const ContextShape& shape);

// Enqueues `exchange` behind everything that is enqueued on the compute stream: on the overlap's
// stream, recording `done` after it, or on the compute stream where there is no overlap. Requires
// of `done`: one of call.overlap's events.
void StartExchange(const ContextAttention::Call& call, kernels::Event* done,
                   absl::FunctionRef<void(kernels::Stream& stream)> exchange);
// Makes the compute stream wait for `done`; the wait counts as exposed communication.
void AwaitExchange(const ContextAttention::Call& call, kernels::Event* done, Collective collective);

// Returns tokens [begin, begin + count) of [B,S,heads,D].
kernels::Tensor Tokens(const kernels::Tensor& x, int64_t begin, int64_t count);
// Returns heads [begin, begin + count) of [B,S,heads,D].
kernels::Tensor Heads(const kernels::Tensor& x, int64_t begin, int64_t count);
// Returns slice `index` of a contiguous tensor of equal slices, as [B,S,heads,D].
kernels::Tensor Part(const kernels::Tensor& parts, int64_t index, int64_t batch, int64_t sequence,
                     int64_t heads, int64_t width);

// The messages of an all-to-all between (this rank's tokens, all heads) and (all tokens, this
// rank's heads). A sample has a batch of messages for each of a rank's segments: with zigzag the
// early ones, whose order in the sequence is that of the ranks, and the late ones, whose order is
// the reverse. Tokens therefore arrive at their position in the sequence.
class HeadMessages {
 public:
  // Messages of all ranks, [B, segments of a rank, c, positions, columns].
  struct Packing {
    kernels::Tensor parts;
    int64_t columns;
  };
  // Of the heads of a tensor every rank has `count`, of which messages take `taken` from `first`
  // on.
  struct Share {
    int64_t count, first, taken;
  };

  HeadMessages(const SequenceLayout& layout, int64_t batch, int64_t sequence);

  // The number of ranks that share each of `heads` heads where every rank needs `count`.
  int64_t Repeats(int64_t heads, int64_t count) const { return ranks_ * count / heads; }
  // Calls work(mine, message) for views of the same shape: of `mine` [B,S/c,heads,D], and of the
  // messages from column `column` on. One call covers all ranks, per chunk. Where ranks share
  // heads: all ranks that share one, or only the nth of each.
  void ForHeads(
      const kernels::Tensor& mine, const Share& share, const Packing& packing, int64_t column,
      absl::FunctionRef<void(const kernels::Tensor& mine, const kernels::Tensor& message)> work,
      int nth = -1) const;
  // Between messages by rank and tokens in the order of the sequence, [B,S,columns].
  std::vector<AllToAllItem> FromParts(const kernels::Tensor& parts,
                                      const kernels::Tensor& whole) const;
  std::vector<AllToAllItem> ToParts(const kernels::Tensor& whole,
                                    const kernels::Tensor& parts) const;

 private:
  std::vector<AllToAllItem> Items(const kernels::Tensor& in, const kernels::Tensor& out) const;

  const int64_t batch_, chunk_;  // a segment's positions
  const int ranks_;
  std::vector<std::vector<int>> places_;  // by a rank's segment: the ranks' places in its batch
};

// Attention of the two local chunks of queries over one set of keys after the other. Partial
// results are merged, and partial gradients added up, in fp32.
class ChunkAttention {
 public:
  struct Saved {
    kernels::Tensor lse[2];  // per chunk, [B,H,S/2c]
  };
  struct Scratch {
    kernels::Tensor partial;      // [B,S/2c,H,D]: a partial out or dq
    kernels::Tensor partial_lse;  // [B,H,S/2c]
    kernels::Tensor delta;        // [B,H,S/2c]
    kernels::Tensor sum;          // [B,S/c,H,D] fp32, when the activations are narrower
  };

  explicit ChunkAttention(const ContextShape& shape) : shape_(shape) {}

  Saved TakeSaved(kernels::Arena& arena) const;
  Scratch TakeScratch(kernels::Arena& arena) const;

  // Keys and values that all queries of a chunk attend to, or with `causal` the chunk's own.
  struct KeySet {
    int chunk = 0;  // of queries, 0 or 1
    kernels::Tensor k, v;
    bool causal = false;
    bool first = false;  // of this chunk: results are written, not merged
    // Positions in the whole sequence of the first query and the first key; the others follow.
    int64_t query_position = 0, key_position = 0;
  };
  void Forward(kernels::Stream& stream, const ContextAttention::Inputs& inputs, const KeySet& set,
               const Saved& saved, const Scratch& scratch) const;
  // To be called after the last set.
  void FinishForward(kernels::Stream& stream, const ContextAttention::Inputs& inputs,
                     const Scratch& scratch) const;

  // Adds to dq's sum; writes the set's dk and dv to `dk` and `dv`, shaped as its k and v.
  void Backward(kernels::Stream& stream, const ContextAttention::Inputs& inputs,
                const ContextAttention::Gradients& gradients, const KeySet& set, kernels::Tensor dk,
                kernels::Tensor dv, const Saved& saved, const Scratch& scratch) const;
  void FinishBackward(kernels::Stream& stream, const ContextAttention::Gradients& gradients,
                      const Scratch& scratch) const;

 private:
  // Sets which keys of the set belong to the documents of the queries.
  void Mask(const ContextAttention::Inputs& inputs, const KeySet& set,
            kernels::AttentionArgs& args) const;
  kernels::Tensor Chunk(const kernels::Tensor& x, int chunk) const;
  bool narrow() const { return shape_.activation != kernels::DType::kF32; }

  const ContextShape shape_;
};

}  // namespace muster::parallel::context

#endif  // MUSTER_PARALLEL_CONTEXT_METHODS_H_
