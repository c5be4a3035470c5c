#include "base/check.h"
#include "kernels/attention/attention.h"
#include "kernels/memory/memory.h"
#include "parallel/context/methods.h"

namespace muster::parallel::context {

using kernels::DType;
using kernels::Tensor;

Tensor Tokens(const Tensor& x, int64_t begin, int64_t count) {
  CHECK(begin >= 0 && begin + count <= x.dim(1));
  auto* data = static_cast<char*>(x.data()) + begin * x.stride(1) * SizeOf(x.dtype());
  return Tensor(data, x.dtype(), {x.dim(0), count, x.dim(2), x.dim(3)},
                {x.stride(0), x.stride(1), x.stride(2), x.stride(3)});
}

Tensor Heads(const Tensor& x, int64_t begin, int64_t count) {
  CHECK(begin >= 0 && begin + count <= x.dim(2));
  auto* data = static_cast<char*>(x.data()) + begin * x.stride(2) * SizeOf(x.dtype());
  return Tensor(data, x.dtype(), {x.dim(0), x.dim(1), count, x.dim(3)},
                {x.stride(0), x.stride(1), x.stride(2), x.stride(3)});
}

Tensor Part(const Tensor& parts, int64_t index, int64_t batch, int64_t sequence, int64_t heads,
            int64_t width) {
  const int64_t size = batch * sequence * heads * width;
  CHECK(parts.contiguous() && (index + 1) * size <= parts.elements());
  auto* data = static_cast<char*>(parts.data()) + index * size * SizeOf(parts.dtype());
  return Tensor(data, parts.dtype(), {batch, sequence, heads, width});
}

Tensor ChunkAttention::Chunk(const Tensor& x, int chunk) const {
  return Tokens(x, chunk * shape_.chunk(), shape_.chunk());
}

void ChunkAttention::Mask(const ContextAttention::Inputs& inputs, const KeySet& set,
                          kernels::AttentionArgs& args) const {
  if (inputs.documents.empty()) return;
  args.documents = Tensor(inputs.documents.as<int32_t>() + set.query_position, DType::kI32,
                          {shape_.batch, shape_.chunk()}, {shape_.sequence, 1});
  args.key_position = set.key_position;
}

ChunkAttention::Saved ChunkAttention::TakeSaved(kernels::Arena& arena) const {
  Saved saved;
  for (Tensor& lse : saved.lse) {
    lse = arena.Take("activations", DType::kF32, {shape_.batch, shape_.heads, shape_.chunk()});
  }
  return saved;
}

ChunkAttention::Scratch ChunkAttention::TakeScratch(kernels::Arena& arena) const {
  const ContextShape& s = shape_;
  Scratch scratch;
  scratch.partial = arena.Take("scratch", s.activation, {s.batch, s.chunk(), s.heads, s.width});
  scratch.partial_lse = arena.Take("scratch", DType::kF32, {s.batch, s.heads, s.chunk()});
  scratch.delta = arena.Take("scratch", DType::kF32, {s.batch, s.heads, s.chunk()});
  if (narrow()) {
    scratch.sum = arena.Take("scratch", DType::kF32, {s.batch, s.local(), s.heads, s.width});
  }
  return scratch;
}

void ChunkAttention::Forward(kernels::Stream& stream, const ContextAttention::Inputs& inputs,
                             const KeySet& set, const Saved& saved, const Scratch& scratch) const {
  const Tensor out = Chunk(narrow() ? scratch.sum : inputs.out, set.chunk);
  const Tensor lse = saved.lse[set.chunk];
  const bool direct = set.first && !narrow();
  kernels::AttentionArgs args;
  args.q = Chunk(inputs.q, set.chunk);
  args.k = set.k;
  args.v = set.v;
  args.out = direct ? out : scratch.partial;
  args.lse = set.first ? lse : scratch.partial_lse;
  args.causal = set.causal;
  Mask(inputs, set, args);
  kernels::AttentionForward(stream, args);
  if (direct) return;
  if (set.first) {
    kernels::CopyStrided(stream, scratch.partial, out);
  } else {
    kernels::AttentionMerge(stream, {out, lse, scratch.partial, scratch.partial_lse});
  }
}

void ChunkAttention::FinishForward(kernels::Stream& stream, const ContextAttention::Inputs& inputs,
                                   const Scratch& scratch) const {
  if (narrow()) kernels::CopyStrided(stream, scratch.sum, inputs.out);
}

void ChunkAttention::Backward(kernels::Stream& stream, const ContextAttention::Inputs& inputs,
                              const ContextAttention::Gradients& gradients, const KeySet& set,
                              Tensor dk, Tensor dv, const Saved& saved,
                              const Scratch& scratch) const {
  kernels::AttentionBackwardArgs args;
  args.forward.q = Chunk(inputs.q, set.chunk);
  args.forward.k = set.k;
  args.forward.v = set.v;
  args.forward.out = Chunk(inputs.out, set.chunk);
  args.forward.lse = saved.lse[set.chunk];
  args.forward.causal = set.causal;
  Mask(inputs, set, args.forward);
  args.dout = Chunk(gradients.dout, set.chunk);
  args.dq = scratch.partial;
  args.dk = dk;
  args.dv = dv;
  args.delta = scratch.delta;
  args.deterministic = shape_.deterministic;
  kernels::AttentionBackward(stream, args);
  kernels::CopyStrided(stream, scratch.partial,
                       Chunk(narrow() ? scratch.sum : gradients.dq, set.chunk), !set.first);
}

void ChunkAttention::FinishBackward(kernels::Stream& stream,
                                    const ContextAttention::Gradients& gradients,
                                    const Scratch& scratch) const {
  if (narrow()) kernels::CopyStrided(stream, scratch.sum, gradients.dq);
}

}  // namespace muster::parallel::context
