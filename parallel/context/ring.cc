// Zigzag ring attention. In step i of Forward rank r holds the keys and values of rank j = r - i
// (mod c) and sends them on to r + 1 while it computes:
//   j = r: both chunks of queries attend causally to their own keys, the late chunk to all early
//   keys; j < r: both chunks of queries attend to the whole early chunk of keys; j > r: the late
//   chunk of queries attends to both chunks of keys.
// Every step but the first costs two whole squares of scores on every rank.
// Backward passes keys the other way, so that a rank's own block comes last: in step i rank r holds
// block r + 1 + i, adds its contribution to that block's gradients, and sends them to r - 1, which
// handles the block next. After c - 1 such steps each block's gradients are at the rank that owns
// it.
#include <vector>

#include "base/check.h"
#include "kernels/memory/memory.h"
#include "parallel/context/methods.h"

namespace muster::parallel::context {
namespace {

using kernels::DType;
using kernels::Tensor;

// Sends one buffer to the rank `by` places behind this one and receives another from the rank `by`
// places before it, on the overlap's stream if there is one.
class Exchange {
 public:
  Exchange(const ContextAttention::Call& call, int by) : call_(call), by_(by) {}

  // `done` is recorded behind both; null without an overlap.
  void Start(Tensor send, Tensor receive, kernels::Event* done) const {
    StartExchange(call_, done,
                  [&](kernels::Stream& stream) { call_.group.Rotate(stream, send, receive, by_); });
  }
  void Await(kernels::Event* done) const { AwaitExchange(call_, done, Collective::kSendReceive); }
  kernels::Event* Arrived(int buffer) const {
    return call_.overlap != nullptr ? call_.overlap->arrived[buffer].get() : nullptr;
  }
  kernels::Event* Returned(int buffer) const {
    return call_.overlap != nullptr ? call_.overlap->returned[buffer].get() : nullptr;
  }

 private:
  const ContextAttention::Call& call_;
  const int by_;
};

// The keys of a block that the queries of one local chunk attend to.
struct VisibleKeys {
  int chunk;           // of queries
  int key_chunk;       // first chunk of keys
  int key_chunks = 1;  // how many
  bool causal = false;
};
// `apart`: chunks of keys that do not follow each other in the sequence are handled one by one.
std::vector<VisibleKeys> VisibleKeysOf(int rank, int block, bool apart) {
  if (block == rank) return {{0, 0, 1, true}, {1, 0}, {1, 1, 1, true}};
  if (block < rank) return {{0, 0}, {1, 0}};
  if (apart) return {{1, 0}, {1, 1}};
  return {{1, 0, 2}};
}

class Ring : public ContextAttention {
 public:
  explicit Ring(const ContextShape& shape) : ContextAttention(shape), chunks_(shape) {}

  std::unique_ptr<Saved> TakeSaved(kernels::Arena& arena) const override {
    auto saved = std::make_unique<RingSaved>();
    saved->chunks = chunks_.TakeSaved(arena);
    return saved;
  }

  void TakeScratch(kernels::Arena& arena, Saved& base) const override {
    auto& saved = static_cast<RingSaved&>(base);
    const ContextShape& s = shape_;
    // Keys, then values.
    const auto take = [&](DType dtype) {
      return arena.Take("scratch", dtype, {2 * s.batch, s.local(), s.key_heads, s.width});
    };
    saved.scratch = chunks_.TakeScratch(arena);
    for (Tensor& buffer : saved.keys) buffer = take(s.activation);
    for (Tensor& buffer : saved.d_keys) buffer = take(DType::kF32);
    saved.partial_keys = take(s.activation);
  }

  void Forward(const Call& call, const Inputs& inputs, Saved& base) const override {
    auto& saved = static_cast<RingSaved&>(base);
    const int c = shape_.ranks, r = call.group.rank();
    CHECK_EQ(call.group.size(), c);
    const Exchange exchange(call, 1);
    if (c > 1) Pack(call.stream, inputs, saved.keys[0]);
    bool begun[2] = {false, false};
    for (int i = 0; i < c; ++i) {
      if (i > 0) exchange.Await(exchange.Arrived(i % 2));
      if (i + 1 < c) {
        exchange.Start(saved.keys[i % 2], saved.keys[(i + 1) % 2], exchange.Arrived((i + 1) % 2));
      }
      const int block = (r - i + c) % c;
      for (const VisibleKeys& visible : VisibleKeysOf(r, block, !inputs.documents.empty())) {
        chunks_.Forward(call.stream, inputs,
                        SetOf(visible, r, block, inputs, saved.keys[i % 2], begun), saved.chunks,
                        saved.scratch);
      }
    }
    chunks_.FinishForward(call.stream, inputs, saved.scratch);
  }

  void Backward(const Call& call, const Inputs& inputs, const Gradients& gradients,
                Saved& base) const override {
    auto& saved = static_cast<RingSaved&>(base);
    const int c = shape_.ranks, r = call.group.rank();
    CHECK_EQ(call.group.size(), c);
    const Exchange exchange(call, -1);
    if (c > 1) {
      Pack(call.stream, inputs, saved.keys[0]);
      exchange.Start(saved.keys[0], saved.keys[1], exchange.Arrived(1));
    }
    // The only exchange without attention to overlap with, because the own keys are needed last.
    if (call.beside_first) call.beside_first();
    if (call.beside_last) call.beside_last();
    kernels::Zero(call.stream, saved.d_keys[0]);
    bool begun[2] = {false, false};
    for (int i = 0; i < c; ++i) {
      const int block = (r + 1 + i) % c;
      const Tensor keys = saved.keys[(i + 1) % 2], d_keys = saved.d_keys[i % 2];
      if (i + 1 < c) exchange.Await(exchange.Arrived((i + 1) % 2));
      if (i + 2 < c) exchange.Start(keys, saved.keys[i % 2], exchange.Arrived(i % 2));
      bool waiting = i > 0;  // for the gradients of the ranks before, which are only added to
      for (const VisibleKeys& visible : VisibleKeysOf(r, block, !inputs.documents.empty())) {
        const int64_t count = visible.key_chunks * shape_.chunk();
        const Tensor dk = Partial(saved, 0, count), dv = Partial(saved, 1, count);
        chunks_.Backward(call.stream, inputs, gradients,
                         SetOf(visible, r, block, inputs, keys, begun), dk, dv, saved.chunks,
                         saved.scratch);
        if (waiting) exchange.Await(exchange.Returned(i % 2));
        waiting = false;
        const int64_t begin = visible.key_chunk * shape_.chunk();
        kernels::CopyStrided(call.stream, dk, Tokens(KeysOf(d_keys, 0), begin, count), true);
        kernels::CopyStrided(call.stream, dv, Tokens(KeysOf(d_keys, 1), begin, count), true);
      }
      if (i + 1 < c) {
        exchange.Start(d_keys, saved.d_keys[(i + 1) % 2], exchange.Returned((i + 1) % 2));
      }
    }
    chunks_.FinishBackward(call.stream, gradients, saved.scratch);
    const Tensor home = saved.d_keys[(c - 1) % 2];
    kernels::CopyStrided(call.stream, KeysOf(home, 0), gradients.dk);
    kernels::CopyStrided(call.stream, KeysOf(home, 1), gradients.dv);
  }

 private:
  struct RingSaved : Saved {
    ChunkAttention::Saved chunks;
    ChunkAttention::Scratch scratch;
    Tensor keys[2];       // keys and values in transit, [2 B,S/c,G,D]
    Tensor d_keys[2];     // their gradients
    Tensor partial_keys;  // gradients of one step
  };

  // The keys (0) or values (1) of a buffer.
  Tensor KeysOf(const Tensor& buffer, int64_t which) const {
    return Part(buffer, which, shape_.batch, shape_.local(), shape_.key_heads, shape_.width);
  }
  Tensor Partial(const RingSaved& saved, int64_t which, int64_t count) const {
    return Part(saved.partial_keys, which, shape_.batch, count, shape_.key_heads, shape_.width);
  }
  void Pack(kernels::Stream& stream, const Inputs& inputs, const Tensor& buffer) const {
    kernels::CopyStrided(stream, inputs.k, KeysOf(buffer, 0));
    kernels::CopyStrided(stream, inputs.v, KeysOf(buffer, 1));
  }
  // The position in the sequence at which a rank's chunk begins.
  int64_t PositionOf(int rank, int chunk) const {
    return (chunk == 0 ? rank : 2 * shape_.ranks - 1 - rank) * shape_.chunk();
  }
  ChunkAttention::KeySet SetOf(const VisibleKeys& visible, int rank, int block,
                               const Inputs& inputs, const Tensor& buffer, bool* begun) const {
    const bool own = rank == block;
    const int64_t begin = visible.key_chunk * shape_.chunk();
    const int64_t count = visible.key_chunks * shape_.chunk();
    ChunkAttention::KeySet set;
    set.chunk = visible.chunk;
    set.k = Tokens(own ? inputs.k : KeysOf(buffer, 0), begin, count);
    set.v = Tokens(own ? inputs.v : KeysOf(buffer, 1), begin, count);
    set.causal = visible.causal;
    set.first = !begun[visible.chunk];
    set.query_position = PositionOf(rank, visible.chunk);
    set.key_position = PositionOf(block, visible.key_chunk);
    begun[visible.chunk] = true;
    return set;
  }

  const ChunkAttention chunks_;
};

}  // namespace

std::unique_ptr<ContextAttention> MakeRing(const ContextShape& shape) {
  return std::make_unique<Ring>(shape);
}

}  // namespace muster::parallel::context
