// An all-to-all from (this rank's tokens, all heads) to (all tokens, this rank's heads), packed as
// query | key | value heads, then attention over the whole sequence, then an all-to-all back
// (HeadMessages). What attention reads is kept for backward in its own layout, which takes as much
// memory again as the caller's q, k, v and out.
//
// A rank's heads may be two groups (HeadGroups): the exchanges of one overlap with the attention of
// the other. Every buffer holds the whole first group in front of the second.
#include <algorithm>
#include <vector>

#include "base/check.h"
#include "kernels/attention/attention.h"
#include "kernels/memory/memory.h"
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
        key_heads_(shape.key_heads >= shape.ranks ? shape.key_heads / shape.ranks : 1),
        groups_(HeadGroups(shape)),
        messages_(SequenceLayout::Zigzag(shape.ranks), shape.batch, shape.sequence) {}

  std::unique_ptr<Saved> TakeSaved(kernels::Arena& arena) const override {
    auto saved = std::make_unique<HeadsSaved>();
    const ContextShape& s = shape_;
    saved->qkv =
        arena.Take("activations", s.activation, {s.batch, s.sequence, groups_ * Packed(), s.width});
    saved->out = arena.Take("activations", s.activation, {s.batch, s.sequence, heads_, s.width});
    saved->lse = arena.Take("activations", DType::kF32, {s.batch, heads_, s.sequence});
    return saved;
  }

  void TakeScratch(kernels::Arena& arena, Saved& base) const override {
    auto& saved = static_cast<HeadsSaved&>(base);
    const ContextShape& s = shape_;
    const auto take = [&] {
      return arena.Take("scratch", s.activation,
                        {s.batch, s.sequence, groups_ * Packed(), s.width});
    };
    saved.parts = take();
    saved.d_qkv = take();
    saved.delta = arena.Take("scratch", DType::kF32, {s.batch, heads_, s.sequence});
  }

  void Forward(const Call& call, const Inputs& inputs, Saved& base) const override {
    auto& saved = static_cast<HeadsSaved&>(base);
    kernels::Stream& stream = call.stream;
    CHECK_EQ(call.group.size(), shape_.ranks);
    const auto pack = [&](const Tensor& mine, const Tensor& part) {
      kernels::CopyStrided(stream, mine, part);
    };
    for (int g = 0; g < groups_; ++g) {
      const Packing parts = {PackedOf(saved.parts, g), Packed()};
      ForHeads(inputs.q, heads_, g, parts, 0, pack);
      ForHeads(inputs.k, key_heads_, g, parts, Queries(), pack);
      ForHeads(inputs.v, key_heads_, g, parts, Queries() + Keys(), pack);
    }
    // An exchange that overlaps with nothing stays on the compute stream, which saves two events.
    // That is the first one to arrive and the last one to leave.
    const auto exchange = [&](kernels::Event* done, const std::vector<AllToAllItem>& items) {
      StartExchange(call, done, [&](kernels::Stream& on) { call.group.AllToAllBatch(on, items); });
    };
    const auto in = [&](int g) {
      return FromParts(PackedOf(saved.parts, g), PackedOf(saved.qkv, g));
    };
    const auto event = [&](int g) {
      return call.overlap == nullptr ? nullptr : call.overlap->arrived[g].get();
    };
    exchange(nullptr, in(0));
    if (groups_ > 1) exchange(event(1), in(1));
    for (int g = 0; g < groups_; ++g) {
      if (g > 0) AwaitExchange(call, event(1), Collective::kAllToAll);
      kernels::AttentionForward(stream, Attention(inputs, saved, g));
      const bool last = g + 1 == groups_;
      if (last && g > 0) AwaitExchange(call, event(0), Collective::kAllToAll);
      exchange(last ? nullptr : event(0), ToParts(OutOf(saved, g), SentOut(saved.parts, g).parts));
    }
    for (int g = 0; g < groups_; ++g) {
      ForHeads(inputs.out, heads_, g, SentOut(saved.parts, g), 0,
               [&](const Tensor& mine, const Tensor& part) {
                 kernels::CopyStrided(stream, part, mine);
               });
    }
  }

  // Gradients of out arrive and gradients of q, k and v leave, as in forward. All exchanges
  // overlap: with the caller's work at both ends, with the attention of the other group in between.
  // A group's dout is received where its d_qkv will be, and d_qkv is sent from there into the
  // memory of dout.
  void Backward(const Call& call, const Inputs& inputs, const Gradients& gradients,
                Saved& base) const override {
    auto& saved = static_cast<HeadsSaved&>(base);
    kernels::Stream& stream = call.stream;
    const auto pack = [&](const Tensor& mine, const Tensor& part) {
      kernels::CopyStrided(stream, mine, part);
    };
    const auto unpack = [&](const Tensor& mine, const Tensor& part) {
      kernels::CopyStrided(stream, part, mine);
    };
    // Null where there is nothing to overlap with.
    const auto event = [&](const auto& of, int g, bool beside) {
      return call.overlap != nullptr && beside ? of(g) : nullptr;
    };
    const auto arrived = [&](int g) { return call.overlap->arrived[g].get(); };
    const auto returned = [&](int g) { return call.overlap->returned[g].get(); };
    std::vector<kernels::Event*> came, went;
    const int last = groups_ - 1;
    for (int g = 0; g < groups_; ++g) {
      came.push_back(event(arrived, g, g > 0 || call.beside_first != nullptr));
      went.push_back(event(returned, g, g < last || call.beside_last != nullptr));
    }
    for (int g = 0; g < groups_; ++g) {
      ForHeads(gradients.dout, heads_, g, SentOut(saved.d_qkv, g), 0, pack);
    }
    for (int g = 0; g < groups_; ++g) {
      StartExchange(call, came[g], [&](kernels::Stream& on) {
        call.group.AllToAllBatch(
            on, FromParts(SentOut(saved.d_qkv, g).parts, SentOut(saved.parts, g).parts));
      });
    }
    if (call.beside_first != nullptr) call.beside_first();
    for (int g = 0; g < groups_; ++g) {
      AwaitExchange(call, came[g], Collective::kAllToAll);
      kernels::AttentionBackwardArgs args;
      args.forward = Attention(inputs, saved, g);
      args.dout = SentOut(saved.parts, g).parts;
      const Tensor d_qkv = PackedOf(saved.d_qkv, g);
      args.dq = Query(d_qkv);
      args.dk = Key(d_qkv);
      args.dv = Value(d_qkv);
      args.delta = Rows(saved.delta, g);
      args.deterministic = shape_.deterministic;
      kernels::AttentionBackward(stream, args);
      // A group's exchanges would lose their order on two streams at once.
      if (g > 0 && went[g] == nullptr) AwaitExchange(call, went[g - 1], Collective::kAllToAll);
      StartExchange(call, went[g], [&](kernels::Stream& on) {
        call.group.AllToAllBatch(on, ToParts(d_qkv, PackedOf(saved.parts, g)));
      });
    }
    if (call.beside_last != nullptr) call.beside_last();
    for (int g = 0; g < groups_; ++g) {
      const bool awaited = g < last && went[last] == nullptr;
      if (!awaited) AwaitExchange(call, went[g], Collective::kAllToAll);
    }
    for (int g = 0; g < groups_; ++g) {
      const Packing parts = {PackedOf(saved.parts, g), Packed()};
      ForHeads(gradients.dq, heads_, g, parts, 0, unpack);
      // Each rank that shares a key/value head sends its contribution to the gradient.
      bool add = false;
      const auto join = [&](const Tensor& mine, const Tensor& part) {
        kernels::CopyStrided(stream, part, mine, add);
      };
      for (int rank = 0; rank < Repeats(); ++rank, add = true) {
        ForHeads(gradients.dk, key_heads_, g, parts, Queries(), join, rank);
        ForHeads(gradients.dv, key_heads_, g, parts, Queries() + Keys(), join, rank);
      }
    }
  }

 private:
  struct HeadsSaved : Saved {
    Tensor qkv, out, lse;
    Tensor parts, d_qkv, delta;  // scratch
  };
  // The messages of all ranks, packed heads: [B, early or late, c, S/2c, heads, D].
  struct Packing {
    Tensor parts;
    int64_t heads;
  };

  // The heads of a group.
  int64_t Queries() const { return heads_ / groups_; }
  int64_t Keys() const { return key_heads_ / groups_; }
  int64_t Packed() const { return Queries() + 2 * Keys(); }
  Tensor Query(const Tensor& packed) const { return Heads(packed, 0, Queries()); }
  Tensor Key(const Tensor& packed) const { return Heads(packed, Queries(), Keys()); }
  Tensor Value(const Tensor& packed) const { return Heads(packed, Queries() + Keys(), Keys()); }
  // A group's range of a buffer of packed heads, with all tokens.
  Tensor PackedOf(const Tensor& buffer, int group) const {
    return Part(buffer, group, shape_.batch, shape_.sequence, Packed(), shape_.width);
  }
  Tensor OutOf(const HeadsSaved& saved, int group) const {
    return Part(saved.out, group, shape_.batch, shape_.sequence, Queries(), shape_.width);
  }
  // The beginning of such a range, of the size of the group's out.
  Packing SentOut(const Tensor& buffer, int group) const {
    return {
        Part(PackedOf(buffer, group), 0, shape_.batch, shape_.sequence, Queries(), shape_.width),
        Queries()};
  }
  // The view [B,heads of a group,S] of [B,heads,S].
  Tensor Rows(const Tensor& statistics, int group) const {
    const int64_t elements = statistics.elements() / groups_;
    return statistics.Reshape({groups_, elements})
        .Rows(group, 1)
        .Reshape({shape_.batch, Queries(), shape_.sequence});
  }
  // The number of ranks that share a key/value head.
  int Repeats() const {
    return static_cast<int>(std::max<int64_t>(1, shape_.ranks / shape_.key_heads));
  }

  // HeadMessages::ForHeads of a group, whose heads every rank has `count` of with those of other
  // groups.
  template <typename Work>
  void ForHeads(const Tensor& mine, int64_t count, int group, const Packing& packing, int64_t first,
                Work work, int nth = -1) const {
    const int64_t some = count / groups_;
    messages_.ForHeads(mine, {count, group * some, some}, Columns(packing), first * shape_.width,
                       work, nth);
  }
  HeadMessages::Packing Columns(const Packing& packing) const {
    return {packing.parts, packing.heads * shape_.width};
  }
  std::vector<AllToAllItem> FromParts(const Tensor& parts, const Tensor& whole) const {
    return messages_.FromParts(parts, whole);
  }
  std::vector<AllToAllItem> ToParts(const Tensor& whole, const Tensor& parts) const {
    return messages_.ToParts(whole, parts);
  }
  kernels::AttentionArgs Attention(const Inputs& inputs, const HeadsSaved& saved, int group) const {
    const Tensor qkv = PackedOf(saved.qkv, group);
    kernels::AttentionArgs args;
    args.q = Query(qkv);
    args.k = Key(qkv);
    args.v = Value(qkv);
    args.out = OutOf(saved, group);
    args.lse = Rows(saved.lse, group);
    args.documents = inputs.documents;
    return args;
  }

  const int64_t heads_;
  const int64_t key_heads_;
  const int groups_;
  const HeadMessages messages_;
};

}  // namespace

std::unique_ptr<ContextAttention> MakeAllToAll(const ContextShape& shape) {
  return std::make_unique<AllToAll>(shape);
}

}  // namespace muster::parallel::context
