// All-to-alls from (my tokens, all heads) to (all tokens, my heads), packed as query | key | value
// heads, ordinary attention over the whole sequence, and all-to-alls back. What attention reads is
// kept for backward in its own layout: as much memory again as the caller's q, k, v and out.
#include "base/check.h"
#include "parallel/context/methods.h"

namespace muster::parallel::context {
namespace {

using kernels::DType;
using kernels::Tensor;

class AllToAll : public ContextAttention {
 public:
  explicit AllToAll(const ContextShape& shape)
      : ContextAttention(shape),
        heads_(shape.heads / shape.ranks),
        key_heads_(shape.key_heads >= shape.ranks ? shape.key_heads / shape.ranks : 1) {}

  std::unique_ptr<Saved> TakeSaved(kernels::Arena& arena) const override {
    auto saved = std::make_unique<HeadsSaved>();
    const ContextShape& s = shape_;
    saved->qkv = arena.Take("activations", s.activation, {s.batch, s.sequence, Packed(), s.width});
    saved->out = arena.Take("activations", s.activation, {s.batch, s.sequence, heads_, s.width});
    saved->lse = arena.Take("activations", DType::kF32, {s.batch, heads_, s.sequence});
    return saved;
  }

  void TakeScratch(kernels::Arena& arena, Saved& base) const override {
    auto& saved = static_cast<HeadsSaved&>(base);
    const ContextShape& s = shape_;
    const auto take = [&](int64_t heads) {
      return arena.Take("scratch", s.activation, {s.batch, s.sequence, heads, s.width});
    };
    saved.send = take(Packed());
    saved.receive = take(Packed());
    saved.d_qkv = take(Packed());
    saved.d_out = take(heads_);
    saved.delta = arena.Take("scratch", DType::kF32, {s.batch, heads_, s.sequence});
  }

  void Forward(const Call& call, const Inputs& inputs, Saved& base) const override {
    auto& saved = static_cast<HeadsSaved&>(base);
    kernels::Stream& stream = call.stream;
    CHECK_EQ(call.group.size(), shape_.ranks);
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      const Tensor part = OfRank(saved.send, rank, Packed());
      kernels::CopyStrided(stream, Heads(inputs.q, rank * heads_, heads_), Query(part));
      kernels::CopyStrided(stream, Heads(inputs.k, KeyHead(rank), key_heads_), Key(part));
      kernels::CopyStrided(stream, Heads(inputs.v, KeyHead(rank), key_heads_), Value(part));
    }
    call.group.AllToAll(stream, saved.send, saved.receive);
    Reorder(stream, saved.receive, saved.qkv, Packed(), /*to_parts=*/false);
    kernels::AttentionForward(stream, Attention(inputs, saved));
    const Tensor send = Prefix(saved.send, heads_), receive = Prefix(saved.receive, heads_);
    Reorder(stream, send, saved.out, heads_, /*to_parts=*/true);
    call.group.AllToAll(stream, send, receive);
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      kernels::CopyStrided(stream, OfRank(receive, rank, heads_),
                           Heads(inputs.out, rank * heads_, heads_));
    }
  }

  void Backward(const Call& call, const Inputs& inputs, const Gradients& gradients,
                Saved& base) const override {
    auto& saved = static_cast<HeadsSaved&>(base);
    kernels::Stream& stream = call.stream;
    const Tensor send = Prefix(saved.send, heads_), receive = Prefix(saved.receive, heads_);
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      kernels::CopyStrided(stream, Heads(gradients.dout, rank * heads_, heads_),
                           OfRank(send, rank, heads_));
    }
    call.group.AllToAll(stream, send, receive);
    Reorder(stream, receive, saved.d_out, heads_, /*to_parts=*/false);
    kernels::AttentionBackwardArgs args;
    args.forward = Attention(inputs, saved);
    args.dout = saved.d_out;
    args.dq = Query(saved.d_qkv);
    args.dk = Key(saved.d_qkv);
    args.dv = Value(saved.d_qkv);
    args.delta = saved.delta;
    args.deterministic = shape_.deterministic;
    kernels::AttentionBackward(stream, args);
    Reorder(stream, saved.send, saved.d_qkv, Packed(), /*to_parts=*/true);
    call.group.AllToAll(stream, saved.send, saved.receive);
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      const Tensor part = OfRank(saved.receive, rank, Packed());
      kernels::CopyStrided(stream, Query(part), Heads(gradients.dq, rank * heads_, heads_));
      // Ranks that share a key/value head each send their part of its gradient.
      const bool add = rank > 0 && KeyHead(rank) == KeyHead(rank - 1);
      kernels::CopyStrided(stream, Key(part), Heads(gradients.dk, KeyHead(rank), key_heads_), add);
      kernels::CopyStrided(stream, Value(part), Heads(gradients.dv, KeyHead(rank), key_heads_),
                           add);
    }
  }

 private:
  struct HeadsSaved : Saved {
    Tensor qkv, out, lse;
    Tensor send, receive, d_qkv, d_out, delta;  // scratch
  };

  int64_t Packed() const { return heads_ + 2 * key_heads_; }
  int64_t KeyHead(int rank) const { return rank * shape_.key_heads / shape_.ranks; }
  Tensor Query(const Tensor& packed) const { return Heads(packed, 0, heads_); }
  Tensor Key(const Tensor& packed) const { return Heads(packed, heads_, key_heads_); }
  Tensor Value(const Tensor& packed) const {
    return Heads(packed, heads_ + key_heads_, key_heads_);
  }
  // As much of a buffer as tokens of `heads` heads need.
  Tensor Prefix(const Tensor& buffer, int64_t heads) const {
    return Part(buffer, 0, shape_.batch, shape_.sequence, heads, shape_.width);
  }
  Tensor OfRank(const Tensor& parts, int rank, int64_t heads) const {
    return Part(parts, rank, shape_.batch, shape_.local(), heads, shape_.width);
  }

  // Between the ranks' tokens in their order and the order of the sequence.
  void Reorder(kernels::Stream& stream, const Tensor& parts, const Tensor& whole, int64_t heads,
               bool to_parts) const {
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      for (const int chunk : {0, 1}) {
        const int64_t index = chunk == 0 ? rank : 2 * shape_.ranks - 1 - rank;
        const Tensor part =
            Tokens(OfRank(parts, rank, heads), chunk * shape_.chunk(), shape_.chunk());
        const Tensor place = Tokens(whole, index * shape_.chunk(), shape_.chunk());
        kernels::CopyStrided(stream, to_parts ? place : part, to_parts ? part : place);
      }
    }
  }
  kernels::AttentionArgs Attention(const Inputs& inputs, const HeadsSaved& saved) const {
    kernels::AttentionArgs args;
    args.q = Query(saved.qkv);
    args.k = Key(saved.qkv);
    args.v = Value(saved.qkv);
    args.out = saved.out;
    args.lse = saved.lse;
    args.documents = inputs.documents;
    return args;
  }

  const int64_t heads_;
  const int64_t key_heads_;
};

}  // namespace

std::unique_ptr<ContextAttention> MakeAllToAll(const ContextShape& shape) {
  return std::make_unique<AllToAll>(shape);
}

}  // namespace muster::parallel::context
