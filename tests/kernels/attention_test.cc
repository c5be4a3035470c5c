#include <cmath>
#include <limits>
#include <tuple>

#include "kernels/attention/attention.h"
#include "kernels/attention/attention_decode.h"
#include "kernels/attention/head_width.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "tests/kernels/support.h"

namespace muster::kernels {
namespace {

using testing::Doubles;
using testing::ExpectClose;
using testing::Floats;
using testing::Host;
using testing::Random;
using testing::View;

struct Shape {
  int64_t batch, sequence, heads, key_heads, width;
  bool causal = true;
  double scale = 0;
  std::vector<int32_t> documents = {};  // see AttentionArgs
  int64_t key_position = 0;
  int64_t packed() const { return (heads + 2 * key_heads) * width; }
  int64_t tokens() const { return batch * sequence; }
};

// Packed QKV [B,S,(H + 2G) D] to out [B,S,H,D], and lse [B,H,S].
Doubles Reference(const Shape& s, const Doubles& qkv, Doubles* lse) {
  Doubles out(s.tokens() * s.heads * s.width);
  const double scale = s.scale != 0 ? s.scale : 1 / std::sqrt(static_cast<double>(s.width));
  if (lse != nullptr) lse->resize(s.tokens() * s.heads);
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      const int64_t g = h / (s.heads / s.key_heads);
      for (int64_t i = 0; i < s.sequence; ++i) {
        const double* q = &qkv[(b * s.sequence + i) * s.packed() + h * s.width];
        const int64_t keys = s.causal ? i + 1 : s.sequence;
        int64_t first = 0;
        if (!s.documents.empty()) {
          first = std::max<int64_t>(0, s.documents[b * s.sequence + i] - s.key_position);
        }
        if (first >= keys) {
          if (lse != nullptr) {
            (*lse)[(b * s.heads + h) * s.sequence + i] = -std::numeric_limits<double>::infinity();
          }
          continue;
        }
        Doubles scores(keys);
        double most = -1e300, sum = 0;
        for (int64_t j = first; j < keys; ++j) {
          const double* k = &qkv[(b * s.sequence + j) * s.packed() + (s.heads + g) * s.width];
          for (int64_t d = 0; d < s.width; ++d) scores[j] += scale * q[d] * k[d];
          most = std::max(most, scores[j]);
        }
        for (int64_t j = first; j < keys; ++j) sum += std::exp(scores[j] - most);
        for (int64_t j = first; j < keys; ++j) {
          const double* v =
              &qkv[(b * s.sequence + j) * s.packed() + (s.heads + s.key_heads + g) * s.width];
          double* to = &out[((b * s.sequence + i) * s.heads + h) * s.width];
          for (int64_t d = 0; d < s.width; ++d) to[d] += std::exp(scores[j] - most) / sum * v[d];
        }
        if (lse != nullptr) (*lse)[(b * s.heads + h) * s.sequence + i] = most + std::log(sum);
      }
    }
  }
  return out;
}

Tensor Heads(Floats& packed, const Shape& s, int64_t first, int64_t heads) {
  return Tensor(packed.data() + first * s.width, DType::kF32, {s.batch, s.sequence, heads, s.width},
                {s.sequence * s.packed(), s.packed(), s.width, 1});
}

AttentionArgs Args(const Shape& s, Floats& qkv, Floats& out, Floats& lse) {
  return {.q = Heads(qkv, s, 0, s.heads),
          .k = Heads(qkv, s, s.heads, s.key_heads),
          .v = Heads(qkv, s, s.heads + s.key_heads, s.key_heads),
          .out = View(out, {s.batch, s.sequence, s.heads, s.width}),
          .lse = View(lse, {s.batch, s.heads, s.sequence}),
          .scale = static_cast<float>(s.scale),
          .causal = s.causal,
          .documents = s.documents.empty() ? Tensor()
                                           : Tensor(const_cast<int32_t*>(s.documents.data()),
                                                    DType::kI32, {s.batch, s.sequence}),
          .key_position = s.key_position};
}

struct Result {
  Floats out, lse, dqkv;
};

Result RunBoth(const Shape& s, Floats qkv, Floats dout) {
  Host host;
  Result r = {Floats(s.tokens() * s.heads * s.width), Floats(s.tokens() * s.heads),
              Floats(qkv.size(), 1e30f)};
  Floats delta(r.lse.size());
  const AttentionArgs forward = Args(s, qkv, r.out, r.lse);
  AttentionForward(*host.stream, forward);
  if (dout.empty()) return r;
  AttentionBackward(*host.stream, {.forward = forward,
                                   .dout = View(dout, {s.batch, s.sequence, s.heads, s.width}),
                                   .dq = Heads(r.dqkv, s, 0, s.heads),
                                   .dk = Heads(r.dqkv, s, s.heads, s.key_heads),
                                   .dv = Heads(r.dqkv, s, s.heads + s.key_heads, s.key_heads),
                                   .delta = View(delta, {s.batch, s.heads, s.sequence})});
  return r;
}

TEST(Attention, Forward_ShapesAcrossTilesAndGroups_MatchesFloat64) {
  for (const Shape& s : std::vector<Shape>{{1, 1, 1, 1, 1},
                                           {2, 7, 3, 3, 5},
                                           {1, 128, 2, 2, 16},
                                           {1, 129, 4, 2, 8},
                                           {2, 300, 4, 1, 16},
                                           {1, 150, 2, 1, 24, false},
                                           {1, 40, 2, 2, 64, true, 0.3}}) {
    SCOPED_TRACE(::testing::Message() << "S " << s.sequence << " H " << s.heads);
    const Floats qkv = Random(s.tokens() * s.packed(), 1);
    Doubles lse;
    const Doubles out = Reference(s, testing::Wide(qkv), &lse);
    const Result result = RunBoth(s, qkv, {});
    ExpectClose(result.out, out, 1e-5, "out");
    ExpectClose(result.lse, lse, 1e-5, "lse");
  }
}

// Narrow, wide, odd, and no multiple of a tile or of 16 bytes.
const int64_t kHeadWidths[] = {8,   13,  16,  24,  40,  64,  72,  80,  96,  100, 112, 120,
                               128, 129, 136, 160, 192, 200, 255, 256, 257, 384, 512};

TEST(Attention, ForwardAndBackward_HeadsOf8To512Columns_MatchFloat64) {
  for (const int64_t width : kHeadWidths) {
    SCOPED_TRACE(::testing::Message() << "width " << width);
    const Shape s = {1, 131, 2, 1, width};
    const Floats qkv = Random(s.tokens() * s.packed(), 1);
    const Floats dout = Random(s.tokens() * s.heads * s.width, 2);
    Doubles lse;
    const Doubles out = Reference(s, testing::Wide(qkv), &lse);
    const Result result = RunBoth(s, qkv, dout);
    ExpectClose(result.out, out, 1e-5, "out");
    ExpectClose(result.lse, lse, 1e-5, "lse");
    // The gradient along one direction of the tokens of both tiles.
    const Floats step = Random(qkv.size(), 3);
    Doubles above = testing::Wide(qkv), below = above;
    double actual = 0, scale = 0;
    for (size_t i = 0; i < qkv.size(); ++i) {
      above[i] += 1e-6 * step[i];
      below[i] -= 1e-6 * step[i];
      const double term = static_cast<double>(step[i]) * result.dqkv[i];
      actual += term;
      scale += std::abs(term);
    }
    const double expected = (testing::DotOf(Reference(s, above, nullptr), dout) -
                             testing::DotOf(Reference(s, below, nullptr), dout)) /
                            2e-6;
    EXPECT_NEAR(actual, expected, 2e-5 * scale);
  }
}

TEST(AttentionPathOf, EveryHeadWidth_IsServedOrRefusedWithWhatWouldDo) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t width : kHeadWidths) {
      const auto host = AttentionPathOf(DeviceKind::kCpu, dtype, width);
      ASSERT_TRUE(host.ok()) << width;
      EXPECT_EQ(*host, AttentionPath::kHost);
      const auto cuda = AttentionPathOf(DeviceKind::kCuda, dtype, width);
      if (width > 256) {
        EXPECT_TRUE(absl::IsInvalidArgument(cuda.status())) << width;
        EXPECT_NE(cuda.status().message().find("at most 256"), absl::string_view::npos);
        continue;
      }
      ASSERT_TRUE(cuda.ok()) << width;
      const bool fast = dtype != DType::kF32 && width <= 128 && width % 8 == 0;
      EXPECT_EQ(*cuda, fast ? AttentionPath::kTensorCores : AttentionPath::kCudaCores) << width;
      EXPECT_STREQ(Name(*cuda), fast ? "tensor cores" : "CUDA cores (slow)");
    }
  }
  EXPECT_TRUE(absl::IsInvalidArgument(AttentionPathOf(DeviceKind::kCpu, DType::kF32, 0).status()));
}

TEST(Attention, Forward_HugeScores_StayFinite) {
  const Shape s = {1, 140, 2, 2, 8};
  const Floats qkv = Random(s.tokens() * s.packed(), 1, 30);
  Doubles lse;
  const Doubles out = Reference(s, testing::Wide(qkv), &lse);
  const Result result = RunBoth(s, qkv, {});
  ExpectClose(result.out, out, 1e-3, "out");
  ExpectClose(result.lse, lse, 1e-5, "lse");
}

// Documents of 40 to 90 tokens, whose borders lie inside of tiles and between them.
std::vector<int32_t> Documents(int64_t batch, int64_t sequence) {
  std::vector<int32_t> begins;
  for (int64_t b = 0; b < batch; ++b) {
    int64_t begin = 0, size = 40 + 17 * b;
    for (int64_t i = 0; i < sequence; ++i) {
      if (i == begin + size) {
        begin = i;
        size = 40 + size * 7 % 51;
      }
      begins.push_back(static_cast<int32_t>(begin));
    }
  }
  return begins;
}

TEST(Attention, QueriesOfPackedDocuments_SeeTheirOwnAlone) {
  for (Shape s : std::vector<Shape>{{2, 300, 4, 2, 16}, {1, 150, 2, 2, 8, false}}) {
    s.documents = Documents(s.batch, s.sequence);
    // Without causal, keys lie 90 positions before the queries, so that some queries have none.
    if (!s.causal) {
      s.key_position = -90;
      for (int32_t& begin : s.documents) begin = begin < 60 ? begin - 100 : begin;
    }
    const Floats qkv = Random(s.tokens() * s.packed(), 1);
    Doubles lse;
    const Doubles out = Reference(s, testing::Wide(qkv), &lse);
    const Result result = RunBoth(s, qkv, {});
    ExpectClose(result.out, out, 1e-5, "out");
    for (size_t i = 0; i < lse.size(); ++i) {
      if (std::isinf(lse[i])) {
        EXPECT_EQ(result.lse[i], -std::numeric_limits<float>::infinity());
      } else {
        EXPECT_NEAR(result.lse[i], lse[i], 1e-4);
      }
    }
  }
}

TEST(Attention, Backward_SmallShapes_MatchesFiniteDifferences) {
  for (const Shape& s : std::vector<Shape>{{2, 5, 2, 2, 3},
                                           {1, 9, 4, 2, 4},
                                           {1, 6, 3, 1, 5, false},
                                           {1, 7, 2, 2, 4, true, 0.7},
                                           {2, 5, 2, 1, 3, true, 0, {0, 0, 2, 2, 4, 0, 1, 1, 1, 1}},
                                           {1, 4, 1, 1, 3, false, 0, {5, 5, 7, 8}, 4}}) {
    SCOPED_TRACE(::testing::Message() << "S " << s.sequence << " H " << s.heads);
    const Floats qkv = Random(s.tokens() * s.packed(), 1);
    const Floats dout = Random(s.tokens() * s.heads * s.width, 2);
    Doubles x = testing::Wide(qkv);
    const Doubles expected =
        testing::NumericGradient(x, [&] { return testing::DotOf(Reference(s, x, nullptr), dout); });
    ExpectClose(RunBoth(s, qkv, dout).dqkv, expected, 2e-5, "dqkv");
  }
}

TEST(Attention, Backward_SeveralTiles_MatchesFiniteDifferencesAlongDirections) {
  for (const Shape& s : std::vector<Shape>{{1, 300, 2, 2, 8},
                                           {1, 257, 4, 2, 8, false},
                                           {1, 300, 2, 2, 8, true, 0, Documents(1, 300)}}) {
    const Floats qkv = Random(s.tokens() * s.packed(), 1);
    const Floats dout = Random(s.tokens() * s.heads * s.width, 2);
    const Floats dqkv = RunBoth(s, qkv, dout).dqkv;
    for (int direction = 0; direction < 6; ++direction) {
      // Each direction changes one token, so that every tile is tested on its own.
      const int64_t token = direction * (s.tokens() - 1) / 5;
      const Floats step = Random(s.packed(), 100 + direction);
      Doubles above = testing::Wide(qkv), below = above;
      double expected_scale = 0, actual = 0;
      for (int64_t i = 0; i < s.packed(); ++i) {
        above[token * s.packed() + i] += 1e-5 * step[i];
        below[token * s.packed() + i] -= 1e-5 * step[i];
        const double term = static_cast<double>(step[i]) * dqkv[token * s.packed() + i];
        actual += term;
        expected_scale += std::abs(term);
      }
      const double expected = (testing::DotOf(Reference(s, above, nullptr), dout) -
                               testing::DotOf(Reference(s, below, nullptr), dout)) /
                              2e-5;
      EXPECT_NEAR(actual, expected, 2e-5 * expected_scale + 1e-6) << "token " << token;
    }
  }
}

// The keys [begin, begin + count) of a packed tensor.
Tensor Keys(const Tensor& all, int64_t begin, int64_t count) {
  return Tensor(all.f32() + begin * all.stride(1), DType::kF32,
                {all.dim(0), count, all.dim(2), all.dim(3)},
                {all.stride(0), all.stride(1), all.stride(2), all.stride(3)});
}

TEST(Attention, MergeOfTwoSetsOfKeys_EqualsAttentionOverBoth) {
  const Shape s = {2, 150, 4, 2, 8, false};
  Floats qkv = Random(s.tokens() * s.packed(), 1);
  Floats dout = Random(s.tokens() * s.heads * s.width, 2);
  const Result whole = RunBoth(s, qkv, dout);

  Host host;
  Floats out(whole.out.size()), lse(whole.lse.size()), part_out(out.size()), part_lse(lse.size());
  AttentionArgs first = Args(s, qkv, out, lse), second = Args(s, qkv, part_out, part_lse);
  const Tensor k = first.k, v = first.v;
  first.k = Keys(k, 0, 90), first.v = Keys(v, 0, 90);
  second.k = Keys(k, 90, 60), second.v = Keys(v, 90, 60);
  AttentionForward(*host.stream, first);
  AttentionForward(*host.stream, second);
  AttentionMerge(*host.stream, {first.out, first.lse, second.out, second.lse});
  ExpectClose(out, whole.out, 1e-6, "out");
  ExpectClose(lse, whole.lse, 1e-6, "lse");

  // Backward for each set, with the merged out and lse: dq adds up, and each set has its own dk,
  // dv.
  second.out = first.out, second.lse = first.lse;
  Floats dqkv(qkv.size()), dq(out.size()), delta(lse.size());
  const Tensor packed_dq = Heads(dqkv, s, 0, s.heads), packed_dk = Heads(dqkv, s, 4, 2),
               packed_dv = Heads(dqkv, s, 6, 2);
  const Tensor part_dq = View(dq, {s.batch, s.sequence, s.heads, s.width});
  for (const auto& [args, begin, count] :
       {std::tuple(first, int64_t{0}, int64_t{90}), std::tuple(second, int64_t{90}, int64_t{60})}) {
    AttentionBackward(*host.stream, {.forward = args,
                                     .dout = View(dout, {s.batch, s.sequence, s.heads, s.width}),
                                     .dq = part_dq,
                                     .dk = Keys(packed_dk, begin, count),
                                     .dv = Keys(packed_dv, begin, count),
                                     .delta = View(delta, {s.batch, s.heads, s.sequence})});
    CopyStrided(*host.stream, part_dq, packed_dq, /*accumulate=*/true);
  }
  ExpectClose(dqkv, whole.dqkv, 1e-5, "dqkv");
}

TEST(Attention, MergeWithAnEmptySet_ChangesNothing) {
  Host host;
  Floats out = Random(2 * 3 * 2 * 4, 1), part(out.size(), 7);
  Floats lse = Random(2 * 2 * 3, 2), part_lse(lse.size(), -std::numeric_limits<float>::infinity());
  const Floats before = out, lse_before = lse;
  AttentionMerge(*host.stream, {View(out, {2, 3, 2, 4}), View(lse, {2, 2, 3}),
                                View(part, {2, 3, 2, 4}), View(part_lse, {2, 2, 3})});
  EXPECT_EQ(out, before);
  EXPECT_EQ(lse, lse_before);
  // And the other way round, the partial result becomes the result.
  Floats empty(out.size()), empty_lse = part_lse;
  AttentionMerge(*host.stream, {View(empty, {2, 3, 2, 4}), View(empty_lse, {2, 2, 3}),
                                View(out, {2, 3, 2, 4}), View(lse, {2, 2, 3})});
  EXPECT_EQ(empty, before);
  EXPECT_EQ(empty_lse, lse_before);
}

// The query of the last position sees all keys, so it is the last row of causal attention.
TEST(AttentionDecode, ShapesAcrossGroupsAndWidths_MatchTheLastRowOfFloat64) {
  for (const Shape& s : std::vector<Shape>{{1, 1, 1, 1, 1},
                                           {2, 7, 3, 3, 5},
                                           {3, 256, 4, 2, 8},
                                           {1, 257, 4, 1, 64},
                                           {2, 700, 6, 2, 13, true, 0.3},
                                           {1, 40, 2, 2, 512}}) {
    SCOPED_TRACE(::testing::Message() << "S " << s.sequence << " H " << s.heads);
    Floats qkv = Random(s.tokens() * s.packed(), 1);
    const Doubles whole = Reference(s, testing::Wide(qkv), nullptr);
    const int64_t row = s.heads * s.width;
    Floats out(s.batch * row);
    Floats partial(AttentionDecodePartials(s.batch, s.heads, s.sequence, s.width));
    Host host;
    const Tensor q = Heads(qkv, s, 0, s.heads);
    AttentionDecode(*host.stream, {.q = Keys(q, s.sequence - 1, 1),
                                   .k = Heads(qkv, s, s.heads, s.key_heads),
                                   .v = Heads(qkv, s, s.heads + s.key_heads, s.key_heads),
                                   .out = View(out, {s.batch, 1, s.heads, s.width}),
                                   .partial = View(partial, {static_cast<int64_t>(partial.size())}),
                                   .scale = static_cast<float>(s.scale)});
    Doubles expected;
    for (int64_t b = 0; b < s.batch; ++b) {
      const auto last = whole.begin() + ((b + 1) * s.sequence - 1) * row;
      expected.insert(expected.end(), last, last + row);
    }
    ExpectClose(out, expected, 1e-5, "out");
  }
}

}  // namespace
}  // namespace muster::kernels
