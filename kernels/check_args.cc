#include "kernels/check_args.h"

#include <cstdint>
#include <initializer_list>
#include <limits>

#include "base/check.h"
#include "kernels/random/dropout_mask.h"

namespace muster::kernels {
namespace {

bool IsActivation(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

// Contiguous, of this dtype and shape.
void CheckIs(const char* name, const Tensor& x, DType dtype, std::initializer_list<int64_t> shape) {
  const Tensor expected(nullptr, dtype, shape);
  bool same = x.dtype() == dtype && x.rank() == expected.rank() && x.contiguous();
  for (int i = 0; same && i < x.rank(); ++i) same = x.dim(i) == expected.dim(i);
  CHECK(same) << name << " is " << x.ToString() << (x.contiguous() ? "" : " with gaps")
              << ", expected " << expected.ToString();
}

void CheckIsOrEmpty(const char* name, const Tensor& x, DType dtype,
                    std::initializer_list<int64_t> shape) {
  if (!x.empty()) CheckIs(name, x, dtype, shape);
}

// [B,S,heads,D] with any strides but a dense last dimension.
void CheckHeads(const char* name, const Tensor& x, DType dtype, int64_t batch, int64_t sequence,
                int64_t heads, int64_t width) {
  CHECK(x.rank() == 4 && x.dtype() == dtype && x.dim(0) == batch && x.dim(1) == sequence &&
        x.dim(2) == heads && x.dim(3) == width && (x.stride(3) == 1 || width == 1))
      << name << " is " << x.ToString() << ", expected "
      << Tensor(nullptr, dtype, {batch, sequence, heads, width}).ToString()
      << " with a dense last dimension";
}

// What both norms require.
template <typename Args>
void CheckNormForward(const Args& args) {
  CHECK_EQ(args.residual.rank(), 2);
  const DType act = args.residual.dtype();
  const int64_t t = args.residual.dim(0), c = args.residual.dim(1);
  CheckIs("residual", args.residual, act, {t, c});
  CheckIsOrEmpty("branch", args.branch, act, {t, c});
  CheckIsOrEmpty("sum", args.sum, act, {t, c});
  CHECK(args.branch.empty() || !args.sum.empty()) << "a branch needs a sum to be written to";
  CheckIs("gamma", args.gamma, args.gamma.dtype(), {c});
  CheckIs("y", args.y, act, {t, c});
  CheckIs("rstd", args.rstd, DType::kF32, {t});
}

template <typename Args>
void CheckNormBackward(const Args& args) {
  CHECK_EQ(args.x.rank(), 2);
  const DType act = args.x.dtype();
  const int64_t t = args.x.dim(0), c = args.x.dim(1);
  CheckIs("x", args.x, act, {t, c});
  CheckIs("dy", args.dy, act, {t, c});
  CheckIs("gamma", args.gamma, args.gamma.dtype(), {c});
  CheckIs("rstd", args.rstd, DType::kF32, {t});
  CheckIs("dx", args.dx, act, {t, c});
  CheckIs("dgamma", args.dgamma, DType::kF32, {c});
  CHECK(args.dx.data() != args.dy.data() && args.dx.data() != args.x.data())
      << "dx is added to and cannot alias dy or x";
}

// `rows` [T,C] of an embedding and its tables, either of which may be empty.
void CheckEmbeddingTables(const Tensor& wte, const Tensor& wpe, int64_t sequence,
                          const Tensor& rows) {
  CHECK_EQ(rows.rank(), 2);
  const int64_t t = rows.dim(0), c = rows.dim(1);
  CheckIs("rows of an embedding", rows, rows.dtype(), {t, c});
  CHECK(sequence > 0 && t % sequence == 0) << t << " tokens in sequences of " << sequence;
  if (!wte.empty()) {
    CHECK(wte.rank() == 2 && wte.dim(1) == c && wte.contiguous()) << "wte is " << wte.ToString();
  }
  if (!wpe.empty()) {
    CHECK(wpe.rank() == 2 && wpe.dim(0) >= sequence && wpe.dim(1) == c && wpe.contiguous())
        << "wpe is " << wpe.ToString();
  }
}

}  // namespace

void CheckCopy(const Tensor& from, const Tensor& to) {
  CHECK(from.dtype() == to.dtype() && from.elements() == to.elements() && from.contiguous() &&
        to.contiguous())
      << from.ToString() << " to " << to.ToString();
}

void CheckCast(const Tensor& from, const Tensor& to) {
  CHECK(IsActivation(from.dtype()) && IsActivation(to.dtype()) &&
        from.elements() == to.elements() && from.contiguous() && to.contiguous())
      << from.ToString() << " to " << to.ToString();
}

void CheckCopyStrided(const Tensor& from, const Tensor& to) {
  bool same = IsActivation(from.dtype()) && IsActivation(to.dtype()) && from.rank() == to.rank();
  for (int i = 0; same && i < from.rank(); ++i) same = from.dim(i) == to.dim(i);
  CHECK(same) << from.ToString() << " to " << to.ToString();
}

void CheckFp32(const Tensor& x) {
  CHECK(x.dtype() == DType::kF32 && x.contiguous()) << x.ToString();
}

void CheckSameFp32(const Tensor& x, const Tensor& y) {
  CheckFp32(x);
  CheckFp32(y);
  CHECK_EQ(x.elements(), y.elements());
}

void CheckEmbedding(const Tensor& tokens, const Tensor& wte, const Tensor& wpe, int64_t sequence,
                    const Tensor& out) {
  CheckEmbeddingTables(wte, wpe, sequence, out);
  CheckIs("tokens", tokens, DType::kI32, {out.dim(0)});
}

void CheckGroupTokens(const Tensor& tokens, int64_t vocab, const Tensor& groups) {
  const int64_t t = tokens.elements();
  CheckIs("tokens", tokens, DType::kI32, {t});
  CheckIs("groups", groups, DType::kI32, {2, t});
  CHECK(t < int64_t{1} << 30) << t << " tokens";
  CHECK(vocab > 0 && vocab < int64_t{1} << 30) << "vocabulary of " << vocab;
}

void CheckEmbeddingBackward(const Tensor& groups, const Tensor& d_wte, const Tensor& d_wpe,
                            int64_t sequence, const Tensor& dout) {
  CheckEmbeddingTables(d_wte, d_wpe, sequence, dout);
  if (!d_wte.empty()) CheckIs("groups", groups, DType::kI32, {2, dout.dim(0)});
}

void CheckLayerNorm(const LayerNormForwardArgs& args) {
  CheckNormForward(args);
  CheckIs("beta", args.beta, args.gamma.dtype(), {args.residual.dim(1)});
  CheckIs("mean", args.mean, DType::kF32, {args.residual.dim(0)});
}

void CheckLayerNorm(const LayerNormBackwardArgs& args) {
  CheckNormBackward(args);
  CheckIs("mean", args.mean, DType::kF32, {args.x.dim(0)});
  CheckIs("dbeta", args.dbeta, DType::kF32, {args.x.dim(1)});
}

void CheckRmsNorm(const RmsNormForwardArgs& args) { CheckNormForward(args); }

void CheckRmsNorm(const RmsNormBackwardArgs& args) { CheckNormBackward(args); }

void CheckRotaryTable(const RotaryTableArgs& args) {
  CHECK(args.table.rank() == 2 && args.table.dim(1) % 2 == 0) << args.table.ToString();
  CheckIs("table", args.table, DType::kF32, {args.table.dim(0), args.table.dim(1)});
  CheckIsOrEmpty("positions", args.positions, DType::kI32, {args.table.dim(0)});
  CHECK(args.first_position >= 0 && args.theta > 0);
  const RotaryScaling& scaling = args.scaling;
  CHECK(scaling.factor >= 1 && scaling.low_frequency_factor > 0 &&
        scaling.high_frequency_factor > scaling.low_frequency_factor &&
        scaling.original_context > 0);
}

void CheckRotary(const Tensor& x, const Tensor& table) {
  CHECK(x.rank() == 4 && IsActivation(x.dtype())) << x.ToString();
  CheckHeads("x", x, x.dtype(), x.dim(0), x.dim(1), x.dim(2), x.dim(3));
  CHECK_EQ(x.dim(3) % 2, 0);
  CheckIs("table", table, DType::kF32, {x.dim(1), x.dim(3)});
}

void CheckDropout(const DropoutArgs& args) {
  const Tensor& x = args.x;
  CHECK(x.rank() == 2 && IsActivation(x.dtype()) && x.contiguous()) << x.ToString();
  CheckIs("out", args.out, x.dtype(), {x.dim(0), x.dim(1)});
  CHECK(args.probability >= 0 && args.probability < 1) << args.probability;
  CHECK(args.site >= 0 && args.site < DropoutMask::kSites) << args.site;
  CHECK_LE(x.dim(1), DropoutMask::kColumns);
  CheckIs("sample", args.sample, DType::kI32, {2});
  CHECK(args.sequence > 0 && args.first_row >= 0) << args.sequence << ", " << args.first_row;
  CheckIsOrEmpty("positions", args.positions, DType::kI32, {args.sequence});
}

void CheckSwiglu(const Tensor& packed, const Tensor& y) {
  CHECK(y.rank() == 2 && IsActivation(y.dtype())) << y.ToString();
  CheckIs("y", y, y.dtype(), {y.dim(0), y.dim(1)});
  CheckIs("packed", packed, y.dtype(), {y.dim(0), 2 * y.dim(1)});
}

void CheckAdd(const Tensor& a, const Tensor& b, const Tensor& out) {
  CHECK(IsActivation(a.dtype()) && a.dtype() == b.dtype() && a.dtype() == out.dtype() &&
        a.elements() == b.elements() && a.elements() == out.elements() && a.contiguous() &&
        b.contiguous() && out.contiguous())
      << a.ToString() << " + " << b.ToString() << " to " << out.ToString();
}

void CheckLinear(const LinearForwardArgs& args) {
  CHECK(args.x.rank() == 2 && args.w.rank() == 2);
  const DType act = args.x.dtype();
  const int64_t t = args.x.dim(0), k = args.x.dim(1), n = args.w.dim(0);
  CheckIs("x", args.x, act, {t, k});
  CheckIs("w", args.w, act, {n, k});
  CheckIsOrEmpty("bias", args.bias, act, {n});
  const bool swiglu = args.epilogue == Epilogue::kSwiglu;
  CHECK(!swiglu || n % 2 == 0) << n << " columns are not a gate and as many more";
  CheckIs("y", args.y, act, {t, swiglu ? n / 2 : n});
  const bool rotary = args.epilogue == Epilogue::kRotary;
  CHECK_EQ(rotary, !args.rotary.empty()) << "the table of angles comes with kRotary";
  if (rotary) {
    CHECK(args.rotary_heads > 0 && args.rotary_heads * args.rotary.dim(1) <= n &&
          t % args.rotary.dim(0) == 0)
        << args.rotary_heads << " heads of " << args.rotary.ToString() << " in " << t << " x " << n;
    CheckRotary(args.RotaryHeads(), args.rotary);
  }
  CheckIsOrEmpty("residual", args.residual, act, {t, n});
  CHECK(args.residual.empty() ||
        (args.epilogue == Epilogue::kNone && args.residual.data() != args.y.data()))
      << "residual is added to a plain product, somewhere else";
  if (args.epilogue != Epilogue::kNone && !rotary) {
    CheckIs("pre", args.pre, act, {t, n});
  } else {
    CHECK(args.pre.empty()) << "pre is written with an activation only";
  }
}

void CheckLinear(const LinearBackwardArgs& args) {
  CHECK(args.dy.rank() == 2 && args.w.rank() == 2);
  const DType act = args.dy.dtype();
  const int64_t t = args.dy.dim(0), k = args.w.dim(1), n = args.w.dim(0);
  CheckIs("dy", args.dy, act, {t, n});
  CheckIsOrEmpty("x", args.x, act, {t, k});
  CheckIs("w", args.w, act, {n, k});
  CheckIsOrEmpty("dx", args.dx, act, {t, k});
  CheckIsOrEmpty("pre", args.pre, act, {t, k});
  CheckIsOrEmpty("dw", args.dw, DType::kF32, {n, k});
  CHECK(!args.x.empty() || (args.dw.empty() && !args.recompute_x)) << "dw needs x";
  CHECK(!args.dw.empty() || (!args.dx.empty() && args.dbias.empty())) << "dbias comes with dw";
  CheckIsOrEmpty("dbias", args.dbias, DType::kF32, {n});
  CheckIsOrEmpty("pre_dbias", args.pre_dbias, DType::kF32, {k});
  CHECK(!args.pre.empty() || args.pre_dbias.empty()) << "without pre there is no layer in front";
  CHECK(!args.recompute_x || !args.pre.empty() || !args.packed.empty())
      << "x comes again from pre or packed";
  CheckIsOrEmpty("packed", args.packed, act, {t, 2 * k});
  if (!args.packed.empty()) {
    CheckIs("d_packed", args.d_packed, act, {t, 2 * k});
    CHECK(args.pre.empty() && args.dw.empty() && !args.dx.empty())
        << "packed is for dx alone, and in the place of pre";
  }
  CHECK(args.pre.empty() || !args.dx.empty()) << "pre is for dx";
  if (!args.dx.empty()) {
    CHECK((args.dx.data() != args.x.data() || !args.packed.empty()) &&
          args.dx.data() != args.dy.data() && args.dx.data() != args.pre.data())
        << "dx cannot alias an input";
  }
}

void CheckGelu(const Tensor& x, const Tensor& y) {
  CHECK(IsActivation(x.dtype()) && x.dtype() == y.dtype() && x.elements() == y.elements() &&
        x.contiguous() && y.contiguous())
      << x.ToString() << " to " << y.ToString();
}

void CheckAttention(const AttentionArgs& args) {
  CHECK(args.q.rank() == 4 && args.k.rank() == 4);
  const DType act = args.q.dtype();
  const int64_t b = args.q.dim(0), s = args.q.dim(1), h = args.q.dim(2), d = args.q.dim(3);
  const int64_t keys = args.k.dim(1), g = args.k.dim(2);
  CHECK(g > 0 && h % g == 0) << h << " heads over " << g << " key/value heads";
  CHECK(!args.causal || keys == s) << "causal attention of " << s << " queries over " << keys;
  CheckHeads("q", args.q, act, b, s, h, d);
  CheckHeads("k", args.k, act, b, keys, g, d);
  CheckHeads("v", args.v, act, b, keys, g, d);
  CheckHeads("out", args.out, act, b, s, h, d);
  CheckIs("lse", args.lse, DType::kF32, {b, h, s});
  CHECK(args.documents.empty() ||
        (args.documents.dtype() == DType::kI32 && args.documents.rank() == 2 &&
         args.documents.dim(0) == b && args.documents.dim(1) == s &&
         (args.documents.stride(1) == 1 || s == 1)))
      << "documents " << args.documents.ToString();
}

void CheckAttention(const AttentionBackwardArgs& args) {
  CheckAttention(args.forward);
  const Tensor& q = args.forward.q;
  const Tensor& k = args.forward.k;
  CheckHeads("dout", args.dout, q.dtype(), q.dim(0), q.dim(1), q.dim(2), q.dim(3));
  CheckHeads("dq", args.dq, q.dtype(), q.dim(0), q.dim(1), q.dim(2), q.dim(3));
  CheckHeads("dk", args.dk, k.dtype(), k.dim(0), k.dim(1), k.dim(2), k.dim(3));
  CheckHeads("dv", args.dv, k.dtype(), k.dim(0), k.dim(1), k.dim(2), k.dim(3));
  CheckIs("delta", args.delta, DType::kF32, {q.dim(0), q.dim(2), q.dim(1)});
}

void CheckAttention(const AttentionMergeArgs& args) {
  CHECK_EQ(args.out.rank(), 4);
  const int64_t b = args.out.dim(0), s = args.out.dim(1), h = args.out.dim(2), d = args.out.dim(3);
  CHECK(IsActivation(args.out.dtype()) && IsActivation(args.partial_out.dtype()));
  CheckHeads("out", args.out, args.out.dtype(), b, s, h, d);
  CheckHeads("partial_out", args.partial_out, args.partial_out.dtype(), b, s, h, d);
  CheckIs("lse", args.lse, DType::kF32, {b, h, s});
  CheckIs("partial_lse", args.partial_lse, DType::kF32, {b, h, s});
}

void CheckCrossEntropy(const CrossEntropyArgs& args) {
  CHECK_EQ(args.logits.rank(), 2);
  const int64_t t = args.logits.dim(0), v = args.logits.dim(1);
  CheckIs("logits", args.logits, args.logits.dtype(), {t, v});
  CheckIs("targets", args.targets, DType::kI32, {t});
  CheckIs("losses", args.losses, DType::kF32, {t});
  CHECK(args.vocab > 0 && args.vocab <= v) << "vocab " << args.vocab << " of " << v << " columns";
}

void CheckCrossEntropy(const CrossEntropyStatsArgs& args) {
  CHECK_EQ(args.logits.rank(), 2);
  const int64_t t = args.logits.dim(0), v = args.logits.dim(1);
  CheckIs("logits", args.logits, args.logits.dtype(), {t, v});
  CheckIs("targets", args.targets, DType::kI32, {t});
  CheckIs("stats", args.stats, DType::kF32, {t, 3});
  CHECK(args.first >= 0 && args.vocab > 0 && args.vocab <= v)
      << "vocab " << args.vocab << " from " << args.first << " of " << v << " columns";
}

void CheckCrossEntropy(const CrossEntropyMergeArgs& args) {
  CHECK(args.logits.rank() == 2 && args.stats.rank() == 3);
  const int64_t t = args.logits.dim(0), v = args.logits.dim(1);
  CheckIs("logits", args.logits, args.logits.dtype(), {t, v});
  CheckIs("targets", args.targets, DType::kI32, {t});
  CheckIs("losses", args.losses, DType::kF32, {t});
  CheckIs("stats", args.stats, DType::kF32, {args.stats.dim(0), t, 3});
  CHECK(args.first >= 0 && args.vocab > 0 && args.vocab <= v)
      << "vocab " << args.vocab << " from " << args.first << " of " << v << " columns";
}

void CheckShardTokens(const Tensor& tokens, int64_t first, int64_t count, const Tensor& out) {
  CheckIs("tokens", tokens, DType::kI32, {tokens.elements()});
  CheckIs("out", out, DType::kI32, {tokens.elements()});
  CHECK(first >= 0 && count > 0) << "tokens " << first << " + " << count;
}

void CheckReduction(const Tensor& x, const Tensor& out) {
  CheckFp32(x);
  CheckFp32(out);
  CHECK_GE(out.elements(), 1);
}

void CheckSumParts(const Tensor& in, const Tensor& out) {
  CHECK(out.dtype() == DType::kF32 || out.dtype() == in.dtype()) << out.ToString();
  CHECK(IsActivation(in.dtype()) && in.contiguous() && out.contiguous() && out.elements() > 0 &&
        in.elements() % out.elements() == 0)
      << in.ToString() << " in parts of " << out.ToString();
}

void CheckPrepareStep(const PrepareStepArgs& args) {
  CheckFp32(args.values);
  CHECK_EQ(args.values.elements(), 2 * args.micro_batches + 1 + 2 * args.ranks);
  CHECK(args.state != nullptr && args.scalars != nullptr && args.outcome != nullptr);
}

void CheckHalves(const Tensor& master, const Tensor& upper, const Tensor& lower) {
  CheckFp32(master);
  CHECK(upper.dtype() == DType::kBF16 && upper.contiguous() &&
        upper.elements() == master.elements())
      << "the upper half is " << upper.ToString() << " of " << master.ToString();
  if (lower.empty()) return;
  CHECK(lower.dtype() == DType::kU16 && lower.contiguous() && lower.elements() == master.elements())
      << "the lower half is " << lower.ToString() << " of " << master.ToString();
}

void CheckAdamW(const AdamWArgs& args) {
  CheckSameFp32(args.gradient, args.m);
  CheckSameFp32(args.gradient, args.v);
  if (!args.lower.empty()) {
    CHECK(args.parameter.empty()) << "a master weight both whole and in halves";
    CheckHalves(args.gradient, args.copy, args.lower);
  } else {
    CheckSameFp32(args.parameter, args.gradient);
    if (!args.copy.empty()) {
      CHECK(IsActivation(args.copy.dtype()) && args.copy.dtype() != DType::kF32 &&
            args.copy.contiguous() && args.copy.elements() == args.parameter.elements())
          << "copy is " << args.copy.ToString() << " of " << args.parameter.ToString();
    }
  }
  CHECK(args.scalars != nullptr);
}

void CheckTakeLargest(const TakeLargestArgs& args) {
  CheckFp32(args.x);
  if (!args.also.empty()) CheckSameFp32(args.x, args.also);
  const int64_t n = args.x.elements();
  CHECK(args.k >= 1 && args.k <= n) << args.k << " of " << n;
  CHECK(args.offset >= 0 && args.offset + n <= std::numeric_limits<int32_t>::max())
      << n << " elements from " << args.offset << " have no 32-bit index";
  if (!args.dense.empty()) {
    CheckSameFp32(args.x, args.dense);
    return;
  }
  CheckIs("indices", args.indices, DType::kI32, {args.k});
  CheckIs("values", args.values, DType::kF32, {args.k});
}

void CheckSumSparse(const Tensor& entries, int64_t first, const Tensor& out) {
  CheckFp32(out);
  CHECK(entries.dtype() == DType::kI32 && entries.rank() == 3 && entries.dim(1) == 2 &&
        entries.contiguous())
      << entries.ToString();
  CHECK_GE(first, 0);
}

void CheckTakeSigns(const Tensor& x, const Tensor& packed) {
  CheckFp32(x);
  CHECK_GT(x.elements(), 0);
  CheckIs("packed", packed, DType::kI32, {1 + (x.elements() + 31) / 32});
}

void CheckSumSigns(const Tensor& packed, int64_t first, const Tensor& out) {
  CheckFp32(out);
  CHECK(packed.dtype() == DType::kI32 && packed.rank() == 2 && packed.stride(1) == 1 &&
        first >= 0 && (first + out.elements() + 31) / 32 < packed.dim(1))
      << packed.ToString() << " for " << out.elements() << " elements from " << first;
}

}  // namespace muster::kernels
