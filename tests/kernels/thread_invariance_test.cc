// Every op that splits work gives the same bits with 1, 2 and 3 threads and on repetition.
#include <functional>

#include "kernels/attention/attention.h"
#include "kernels/compression/compression.h"
#include "kernels/device/device.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gemm/linear.h"
#include "kernels/loss/cross_entropy.h"
#include "kernels/norm/norm.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"
#include "tests/kernels/support.h"

namespace muster::kernels {
namespace {

using testing::Floats;
using testing::Host;
using testing::Random;
using testing::View;

// `run` returns everything the ops wrote.
void ExpectSameBits(const std::function<Floats(Stream&)>& run) {
  Host one(1);
  const Floats expected = run(*one.stream);
  for (int threads : {1, 2, 3}) {
    for (bool threaded : {false, true}) {
      Host host(threads, {.threaded = threaded});
      EXPECT_TRUE(run(*host.stream) == expected) << threads << " threads";
    }
  }
}

void Append(Floats& all, const Floats& part) { all.insert(all.end(), part.begin(), part.end()); }

TEST(ThreadInvariance, Linear_ForwardAndBackward_SameBits) {
  constexpr int64_t kT = 300, kK = 200, kN = 450;
  ExpectSameBits([](Stream& stream) {
    Floats x = Random(kT * kK, 1), w = Random(kN * kK, 2), b = Random(kN, 3), y(kT * kN),
           pre(kT * kN), dy = Random(kT * kN, 4), dx(kT * kK), dw(kN * kK), db(kN);
    LinearForward(stream, {.x = View(x, {kT, kK}),
                           .w = View(w, {kN, kK}),
                           .bias = View(b, {kN}),
                           .y = View(y, {kT, kN}),
                           .epilogue = Epilogue::kGelu,
                           .pre = View(pre, {kT, kN})});
    LinearBackward(stream, {.dy = View(dy, {kT, kN}),
                            .x = View(x, {kT, kK}),
                            .w = View(w, {kN, kK}),
                            .dx = View(dx, {kT, kK}),
                            .pre = View(x, {kT, kK}),
                            .dw = View(dw, {kN, kK}),
                            .dbias = View(db, {kN})});
    CHECK_OK(stream.Synchronize());
    Floats all = y;
    for (const Floats& part : {pre, dx, dw, db}) Append(all, part);
    return all;
  });
}

TEST(ThreadInvariance, Attention_ForwardAndBackward_SameBits) {
  constexpr int64_t kB = 2, kS = 300, kH = 4, kG = 2, kD = 16;
  ExpectSameBits([](Stream& stream) {
    Floats q = Random(kB * kS * kH * kD, 1), k = Random(kB * kS * kG * kD, 2),
           v = Random(kB * kS * kG * kD, 3), dout = Random(q.size(), 4);
    Floats out(q.size()), lse(kB * kH * kS), delta(lse.size()), dq(q.size()), dk(k.size()),
        dv(v.size());
    const AttentionArgs forward = {.q = View(q, {kB, kS, kH, kD}),
                                   .k = View(k, {kB, kS, kG, kD}),
                                   .v = View(v, {kB, kS, kG, kD}),
                                   .out = View(out, {kB, kS, kH, kD}),
                                   .lse = View(lse, {kB, kH, kS})};
    AttentionForward(stream, forward);
    AttentionBackward(stream, {.forward = forward,
                               .dout = View(dout, {kB, kS, kH, kD}),
                               .dq = View(dq, {kB, kS, kH, kD}),
                               .dk = View(dk, {kB, kS, kG, kD}),
                               .dv = View(dv, {kB, kS, kG, kD}),
                               .delta = View(delta, {kB, kH, kS})});
    CHECK_OK(stream.Synchronize());
    Floats all = out;
    for (const Floats& part : {lse, dq, dk, dv}) Append(all, part);
    return all;
  });
}

TEST(ThreadInvariance, LayerNormEmbeddingCrossEntropy_SameBits) {
  constexpr int64_t kT = 100, kC = 200, kV = 500;
  ExpectSameBits([](Stream& stream) {
    Floats x = Random(kT * kC, 1), gamma = Random(kC, 2), beta = Random(kC, 3), y(kT * kC),
           mean(kT), rstd(kT), dy = Random(kT * kC, 4), dx(kT * kC), dgamma(kC), dbeta(kC),
           wte(kV * kC), wpe(20 * kC), logits = Random(kT * kV, 5), losses(kT);
    std::vector<int32_t> tokens(kT);
    for (int64_t t = 0; t < kT; ++t) tokens[t] = static_cast<int32_t>(t * 7 % 50);
    LayerNormForward(stream, {.residual = View(x, {kT, kC}),
                              .gamma = View(gamma, {kC}),
                              .beta = View(beta, {kC}),
                              .y = View(y, {kT, kC}),
                              .mean = View(mean, {kT}),
                              .rstd = View(rstd, {kT})});
    LayerNormBackward(stream, {.dy = View(dy, {kT, kC}),
                               .x = View(x, {kT, kC}),
                               .gamma = View(gamma, {kC}),
                               .mean = View(mean, {kT}),
                               .rstd = View(rstd, {kT}),
                               .dx = View(dx, {kT, kC}),
                               .dgamma = View(dgamma, {kC}),
                               .dbeta = View(dbeta, {kC})});
    std::vector<int32_t> groups(2 * kT);
    GroupTokens(stream, View(tokens, {kT}), kV, View(groups, {2, kT}));
    EmbeddingBackward(stream, View(groups, {2, kT}), View(dy, {kT, kC}), 20, View(wte, {kV, kC}),
                      View(wpe, {20, kC}));
    CrossEntropy(stream, {.logits = View(logits, {kT, kV}),
                          .targets = View(tokens, {kT}),
                          .losses = View(losses, {kT}),
                          .vocab = kV - 3});
    CHECK_OK(stream.Synchronize());
    Floats all = y;
    for (const Floats& part : {dx, dgamma, dbeta, wte, wpe, logits, losses}) Append(all, part);
    return all;
  });
}

TEST(ThreadInvariance, SumsAndAdamW_SameBits) {
  constexpr int64_t kN = 300007;
  ExpectSameBits([](Stream& stream) {
    Floats x = Random(kN, 1), p = Random(kN, 2), m(kN), v(kN), sums(2);
    const StepScalars scalars = {.learning_rate = 1e-3f,
                                 .beta1_correction = 0.1f,
                                 .beta2_correction = 0.05f,
                                 .gradient_scale = 1};
    Sum(stream, View(x, {kN}), Tensor(&sums[0], DType::kF32, {1}), false);
    SumSquares(stream, View(x, {kN}), Tensor(&sums[1], DType::kF32, {1}), false);
    AdamW(stream, {.parameter = View(p, {kN}),
                   .gradient = View(x, {kN}),
                   .m = View(m, {kN}),
                   .v = View(v, {kN}),
                   .scalars = &scalars});
    CHECK_OK(stream.Synchronize());
    Floats all = p;
    for (const Floats& part : {m, v, sums}) Append(all, part);
    return all;
  });
}

TEST(ThreadInvariance, Compression_SameBits) {
  constexpr int64_t kN = 100001, kK = 5000, kWords = 1 + (kN + 31) / 32;
  ExpectSameBits([](Stream& stream) {
    Floats x = Random(kN, 1), y = Random(kN, 2), sum(kN), signs(kN);
    std::vector<int32_t> entries(2 * kK), packed(kWords);
    TakeLargest(stream, {.x = View(x, {kN}),
                         .k = kK,
                         .indices = Tensor(entries.data(), DType::kI32, {kK}),
                         .values = Tensor(entries.data() + kK, DType::kF32, {kK})});
    SumSparse(stream, View(entries, {1, 2, kK}), 0, View(sum, {kN}));
    TakeSigns(stream, View(y, {kN}), View(packed, {kWords}));
    SumSigns(stream, View(packed, {1, kWords}), 0, View(signs, {kN}));
    CHECK_OK(stream.Synchronize());
    Floats all = x;
    for (const Floats& part : {y, sum, signs}) Append(all, part);
    return all;
  });
}

}  // namespace
}  // namespace muster::kernels
