#include "kernels/embedding/embedding.h"

#include <cstdint>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(EmbeddingForward)
MUSTER_TWINS(GroupTokens)
MUSTER_TWINS(EmbeddingBackward)
MUSTER_TWINS(ShardTokens)

namespace {

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

void EmbeddingForward(Stream& stream, Tensor tokens, Tensor wte, Tensor wpe, int64_t sequence,
                      Tensor out) {
  CHECK(!wte.empty());
  CheckEmbeddingTables(wte, wpe, sequence, out);
  CheckIs("tokens", tokens, DType::kI32, {out.dim(0)});
  MUSTER_DISPATCH(EmbeddingForward, tokens, wte, wpe, sequence, out);
}

void GroupTokens(Stream& stream, Tensor tokens, int64_t vocab, Tensor groups) {
  const int64_t t = tokens.elements();
  CheckIs("tokens", tokens, DType::kI32, {t});
  CheckIs("groups", groups, DType::kI32, {2, t});
  CHECK(t < int64_t{1} << 30) << t << " tokens";
  CHECK(vocab > 0 && vocab < int64_t{1} << 30) << "vocabulary of " << vocab;
  MUSTER_DISPATCH(GroupTokens, tokens, vocab, groups);
}

void EmbeddingBackward(Stream& stream, Tensor groups, Tensor dout, int64_t sequence, Tensor d_wte,
                       Tensor d_wpe) {
  CheckEmbeddingTables(d_wte, d_wpe, sequence, dout);
  if (!d_wte.empty()) CheckIs("groups", groups, DType::kI32, {2, dout.dim(0)});
  MUSTER_DISPATCH(EmbeddingBackward, groups, dout, sequence, d_wte, d_wpe);
}

void ShardTokens(Stream& stream, Tensor tokens, int64_t first, int64_t count, Tensor out) {
  CheckIs("tokens", tokens, DType::kI32, {tokens.elements()});
  CheckIs("out", out, DType::kI32, {tokens.elements()});
  CHECK(first >= 0 && count > 0) << "tokens " << first << " + " << count;
  MUSTER_DISPATCH(ShardTokens, tokens, first, count, out);
}

}  // namespace muster::kernels
