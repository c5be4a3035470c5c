// Every rank gathers all keys and values, puts them into the order of the sequence, and computes
// attention of its two chunks of queries: chunk m attends to all keys in front of it, and causally
// to its own. Backward gathers keys and values again, which costs less than keeping them for every
// layer.
#include "base/check.h"
#include "kernels/memory/memory.h"
#include "parallel/context/methods.h"

namespace muster::parallel::context {
namespace {

using kernels::DType;
using kernels::Tensor;

class AllGather : public ContextAttention {
 public:
  explicit AllGather(const ContextShape& shape) : ContextAttention(shape), chunks_(shape) {}

  std::unique_ptr<Saved> TakeSaved(kernels::Arena& arena) const override {
    auto saved = std::make_unique<GatherSaved>();
    saved->chunks = chunks_.TakeSaved(arena);
    return saved;
  }

  void TakeScratch(kernels::Arena& arena, Saved& base) const override {
    auto& saved = static_cast<GatherSaved&>(base);
    const ContextShape& s = shape_;
    // Keys, then values, of the whole sequence.
    const auto take = [&](DType dtype) {
      return arena.Take("scratch", dtype, {2 * s.batch, s.sequence, s.key_heads, s.width});
    };
    saved.scratch = chunks_.TakeScratch(arena);
    saved.parts = take(s.activation);
    saved.keys = take(s.activation);
    saved.d_keys = take(DType::kF32);
    saved.d_parts = take(DType::kF32);
  }

  void Forward(const Call& call, const Inputs& inputs, Saved& base) const override {
    auto& saved = static_cast<GatherSaved&>(base);
    Gather(call, inputs, saved);
    for (const int chunk : {0, 1}) {
      for (const ChunkAttention::KeySet& set : SetsOf(call.group.rank(), chunk, saved.keys)) {
        chunks_.Forward(call.stream, inputs, set, saved.chunks, saved.scratch);
      }
    }
    chunks_.FinishForward(call.stream, inputs, saved.scratch);
  }

  void Backward(const Call& call, const Inputs& inputs, const Gradients& gradients,
                Saved& base) const override {
    auto& saved = static_cast<GatherSaved&>(base);
    const int rank = call.group.rank();
    if (call.beside_first) call.beside_first();
    Gather(call, inputs, saved);
    kernels::Zero(call.stream, saved.d_keys);
    for (const int chunk : {0, 1}) {
      for (const ChunkAttention::KeySet& set : SetsOf(rank, chunk, saved.keys)) {
        // The gathered data has been reordered, so this memory is free.
        const int64_t count = set.k.dim(1);
        const int64_t begin = set.causal ? IndexOf(rank, chunk) * shape_.chunk() : 0;
        const Tensor dk = Keys(saved.parts, 0, count), dv = Keys(saved.parts, 1, count);
        chunks_.Backward(call.stream, inputs, gradients, set, dk, dv, saved.chunks, saved.scratch);
        kernels::CopyStrided(call.stream, dk, Tokens(Whole(saved.d_keys, 0), begin, count), true);
        kernels::CopyStrided(call.stream, dv, Tokens(Whole(saved.d_keys, 1), begin, count), true);
      }
    }
    chunks_.FinishBackward(call.stream, gradients, saved.scratch);
    Reorder(call.stream, saved.d_parts, saved.d_keys, /*to_parts=*/true);
    call.group.ReduceScatter(call.stream, saved.d_parts, ReduceOp::kSum);
    kernels::CopyStrided(call.stream, OfRank(saved.d_parts, rank, 0), gradients.dk);
    kernels::CopyStrided(call.stream, OfRank(saved.d_parts, rank, 1), gradients.dv);
    if (call.beside_last) call.beside_last();
  }

 private:
  struct GatherSaved : Saved {
    ChunkAttention::Saved chunks;
    ChunkAttention::Scratch scratch;
    Tensor parts, d_parts;  // [c][keys, values][B,S/c,G,D]: by rank, in its order
    Tensor keys, d_keys;    // [keys, values][B,S,G,D]: in the order of the sequence
  };

  // The index in the sequence of a rank's chunk.
  int64_t IndexOf(int rank, int chunk) const {
    return chunk == 0 ? rank : 2 * shape_.ranks - 1 - rank;
  }
  Tensor Keys(const Tensor& buffer, int64_t which, int64_t count) const {
    return Part(buffer, which, shape_.batch, count, shape_.key_heads, shape_.width);
  }
  Tensor Whole(const Tensor& buffer, int64_t which) const {
    return Keys(buffer, which, shape_.sequence);
  }
  Tensor OfRank(const Tensor& parts, int rank, int64_t which) const {
    return Keys(parts, 2 * rank + which, shape_.local());
  }

  void Reorder(kernels::Stream& stream, const Tensor& parts, const Tensor& whole,
               bool to_parts) const {
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      for (const int chunk : {0, 1}) {
        for (const int which : {0, 1}) {
          const Tensor part =
              Tokens(OfRank(parts, rank, which), chunk * shape_.chunk(), shape_.chunk());
          const Tensor place =
              Tokens(Whole(whole, which), IndexOf(rank, chunk) * shape_.chunk(), shape_.chunk());
          kernels::CopyStrided(stream, to_parts ? place : part, to_parts ? part : place);
        }
      }
    }
  }
  void Gather(const Call& call, const Inputs& inputs, const GatherSaved& saved) const {
    const int rank = call.group.rank();
    CHECK_EQ(call.group.size(), shape_.ranks);
    kernels::CopyStrided(call.stream, inputs.k, OfRank(saved.parts, rank, 0));
    kernels::CopyStrided(call.stream, inputs.v, OfRank(saved.parts, rank, 1));
    call.group.AllGather(call.stream, saved.parts);
    Reorder(call.stream, saved.parts, saved.keys, /*to_parts=*/false);
  }
  std::vector<ChunkAttention::KeySet> SetsOf(int rank, int chunk, const Tensor& keys) const {
    const int64_t before = IndexOf(rank, chunk) * shape_.chunk();
    std::vector<ChunkAttention::KeySet> sets;
    if (before > 0) {
      sets.push_back({chunk, Tokens(Whole(keys, 0), 0, before), Tokens(Whole(keys, 1), 0, before)});
    }
    sets.push_back({chunk, Tokens(Whole(keys, 0), before, shape_.chunk()),
                    Tokens(Whole(keys, 1), before, shape_.chunk()), /*causal=*/true});
    sets.front().first = true;
    sets.back().key_position = before;
    for (ChunkAttention::KeySet& set : sets) set.query_position = before;
    return sets;
  }

  const ChunkAttention chunks_;
};

}  // namespace

std::unique_ptr<ContextAttention> MakeAllGather(const ContextShape& shape) {
  return std::make_unique<AllGather>(shape);
}

}  // namespace muster::parallel::context
