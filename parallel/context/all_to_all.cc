// All-to-alls from (my tokens, all heads) to (all tokens, my heads), packed as query | key | value
// heads, ordinary attention over the whole sequence, and all-to-alls back. Each has two pieces of a
// sample: the ranks' early chunks, which follow each other in the sequence, and their late ones,
// which do so backwards. So tokens arrive, and leave, where they stand in the sequence. What
// attention reads is kept for backward in its own layout: as much memory again as the caller's q,
// k, v and out.
#include <algorithm>
#include <functional>
#include <initializer_list>
#include <vector>

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
        key_heads_(shape.key_heads >= shape.ranks ? shape.key_heads / shape.ranks : 1) {
    for (int rank = 0; rank < shape.ranks; ++rank) late_places_.push_back(shape.ranks - 1 - rank);
  }

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
    saved.parts = take(Packed());
    saved.d_qkv = take(Packed());
    saved.delta = arena.Take("scratch", DType::kF32, {s.batch, heads_, s.sequence});
  }

  void Forward(const Call& call, const Inputs& inputs, Saved& base) const override {
    auto& saved = static_cast<HeadsSaved&>(base);
    kernels::Stream& stream = call.stream;
    CHECK_EQ(call.group.size(), shape_.ranks);
    const auto pack = [&](const Tensor& mine, const Tensor& part) {
      kernels::CopyStrided(stream, mine, part);
    };
    const auto unpack = [&](const Tensor& mine, const Tensor& part) {
      kernels::CopyStrided(stream, part, mine);
    };
    const Packing parts = {saved.parts, Packed()};
    ForHeads(inputs.q, heads_, parts, 0, pack);
    ForHeads(inputs.k, key_heads_, parts, heads_, pack);
    ForHeads(inputs.v, key_heads_, parts, heads_ + key_heads_, pack);
    call.group.AllToAllPieces(stream, FromParts(saved.parts, saved.qkv));
    kernels::AttentionForward(stream, Attention(inputs, saved));
    const Packing out = {Prefix(saved.parts, heads_), heads_};
    call.group.AllToAllPieces(stream, ToParts(saved.out, out.parts));
    ForHeads(inputs.out, heads_, out, 0, unpack);
  }

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
    // d_qkv comes where the parts of dout were; its parts come where d_out was.
    const Packing send = {Prefix(saved.d_qkv, heads_), heads_};
    const Tensor d_out = Prefix(saved.parts, heads_);
    ForHeads(gradients.dout, heads_, send, 0, pack);
    ExchangeBeside(call, FromParts(send.parts, d_out), call.beside_first);
    kernels::AttentionBackwardArgs args;
    args.forward = Attention(inputs, saved);
    args.dout = d_out;
    args.dq = Query(saved.d_qkv);
    args.dk = Key(saved.d_qkv);
    args.dv = Value(saved.d_qkv);
    args.delta = saved.delta;
    args.deterministic = shape_.deterministic;
    kernels::AttentionBackward(stream, args);
    ExchangeBeside(call, ToParts(saved.d_qkv, saved.parts), call.beside_last);
    const Packing parts = {saved.parts, Packed()};
    ForHeads(gradients.dq, heads_, parts, 0, unpack);
    // Ranks that share a key/value head each send their part of its gradient.
    bool add = false;
    const auto join = [&](const Tensor& mine, const Tensor& part) {
      kernels::CopyStrided(stream, part, mine, add);
    };
    for (int rank = 0; rank < Repeats(); ++rank, add = true) {
      ForHeads(gradients.dk, key_heads_, parts, heads_, join, rank);
      ForHeads(gradients.dv, key_heads_, parts, heads_ + key_heads_, join, rank);
    }
  }

 private:
  struct HeadsSaved : Saved {
    Tensor qkv, out, lse;
    Tensor parts, d_qkv, delta;  // scratch
  };

  // Without work to run beside it an exchange stays on the computing stream: another one would
  // cost two events.
  static void ExchangeBeside(const Call& call, const std::vector<AllToAllPiece>& pieces,
                             const std::function<void()>& work) {
    const bool beside = work != nullptr && call.overlap != nullptr;
    kernels::Event* const done = beside ? call.overlap->arrived[0].get() : nullptr;
    StartExchange(call, done,
                  [&](kernels::Stream& stream) { call.group.AllToAllPieces(stream, pieces); });
    if (work != nullptr) work();
    AwaitExchange(call, done, Collective::kAllToAll);
  }

  int64_t Packed() const { return heads_ + 2 * key_heads_; }
  Tensor Query(const Tensor& packed) const { return Heads(packed, 0, heads_); }
  Tensor Key(const Tensor& packed) const { return Heads(packed, heads_, key_heads_); }
  Tensor Value(const Tensor& packed) const {
    return Heads(packed, heads_ + key_heads_, key_heads_);
  }
  // As much of a buffer as tokens of `heads` heads need.
  Tensor Prefix(const Tensor& buffer, int64_t heads) const {
    return Part(buffer, 0, shape_.batch, shape_.sequence, heads, shape_.width);
  }
  // Ranks that share a key/value head.
  int Repeats() const {
    return static_cast<int>(std::max<int64_t>(1, shape_.ranks / shape_.key_heads));
  }

  // Parts of all ranks of packed heads: [B, early or late, c, S/2c, heads, D].
  struct Packing {
    Tensor parts;
    int64_t heads;
  };
  // Calls work(mine, part) for views of the same shape: of `mine` [B,S/c,heads,D] and, from head
  // `first` of the parts on, where the ranks have their `count` heads of it. All of them at once,
  // but for chunks. Where ranks share heads: all that share one, or only the nth of each.
  template <typename Work>
  void ForHeads(const Tensor& mine, int64_t count, const Packing& packing, int64_t first, Work work,
                int nth = -1) const {
    const bool shared = mine.dim(2) < shape_.ranks * count;
    const int64_t repeats = shared ? Repeats() : 1, owners = shape_.ranks / repeats;
    const int64_t row = packing.heads * shape_.width, chunk = shape_.chunk(), part = chunk * row;
    for (int64_t i = 0; i < 2 * shape_.batch; ++i) {
      const int64_t tokens = i / 2 * mine.stride(0) + i % 2 * chunk * mine.stride(1);
      for (int64_t repeat = 0; repeat < repeats; ++repeat) {
        if (nth >= 0 && repeat != nth) continue;
        work(View(mine, tokens, {owners, chunk, count, shape_.width},
                  {count * mine.stride(2), mine.stride(1), mine.stride(2), 1}),
             View(packing.parts, (i * shape_.ranks + repeat) * part + first * shape_.width,
                  {owners, chunk, count, shape_.width}, {repeats * part, row, shape_.width, 1}));
      }
    }
  }

  // Between tokens of all ranks in the order of the sequence, [B,S,heads,D], and parts of them.
  std::vector<AllToAllPiece> FromParts(const Tensor& parts, const Tensor& whole) const {
    std::vector<AllToAllPiece> pieces = Pieces(parts, whole);
    for (size_t late = 1; late < pieces.size(); late += 2) pieces[late].out_places = late_places_;
    return pieces;
  }
  std::vector<AllToAllPiece> ToParts(const Tensor& whole, const Tensor& parts) const {
    std::vector<AllToAllPiece> pieces = Pieces(whole, parts);
    for (size_t late = 1; late < pieces.size(); late += 2) pieces[late].in_places = late_places_;
    return pieces;
  }
  std::vector<AllToAllPiece> Pieces(const Tensor& in, const Tensor& out) const {
    const int64_t count = 2 * shape_.batch, piece = in.elements() / count;
    const auto half = [&](const Tensor& of, int64_t i) {
      return of.Reshape({count, piece}).Rows(i, 1);
    };
    std::vector<AllToAllPiece> pieces;
    for (int64_t i = 0; i < count; ++i) pieces.push_back({half(in, i), half(out, i)});
    return pieces;
  }
  static Tensor View(const Tensor& of, int64_t offset, std::initializer_list<int64_t> shape,
                     std::initializer_list<int64_t> strides) {
    return Tensor(static_cast<char*>(of.data()) + offset * SizeOf(of.dtype()), of.dtype(), shape,
                  strides);
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
  std::vector<int> late_places_;  // of the ranks' late chunks
};

}  // namespace

std::unique_ptr<ContextAttention> MakeAllToAll(const ContextShape& shape) {
  return std::make_unique<AllToAll>(shape);
}

}  // namespace muster::parallel::context
