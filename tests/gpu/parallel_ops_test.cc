// The ops that tensor and context parallelism need.
#include <array>
#include <cmath>
#include <limits>

#include "kernels/attention/attention.h"
#include "kernels/embedding/embedding.h"
#include "kernels/loss/cross_entropy.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/peers/sum_parts.h"
#include "tests/gpu/support.h"

namespace muster::kernels {
namespace {

using CopyStridedGpuTest = GpuTest;
using ShardTokensGpuTest = GpuTest;
using AttentionMergeGpuTest = GpuTest;
using SharedCrossEntropyGpuTest = GpuTest;
using SumPartsGpuTest = GpuTest;

using Four = std::array<int64_t, 4>;
struct Strided {
  const char* name;
  Four shape;  // of both
  int64_t from_begin;
  Four from_strides;
  int64_t to_begin;
  Four to_strides;
};

TEST_F(CopyStridedGpuTest, AnyStridesAndTypes_CopyAndAddLikeTheHostAndTouchNothingElse) {
  // In [2,37,8,64] = 37888 elements, packed heads, tokens and odd widths of both sides.
  const std::vector<Strided> cases = {
      {"heads to dense", {2, 37, 3, 64}, 128, {18944, 512, 64, 1}, 0, {7104, 192, 64, 1}},
      {"dense to tokens", {2, 19, 8, 64}, 0, {9728, 512, 64, 1}, 9216, {18944, 512, 64, 1}},
      {"width 13", {3, 5, 7, 13}, 26, {1300, 130, 13, 1}, 3, {455, 91, 13, 1}},
      {"misaligned", {1, 4, 8, 16}, 1, {512, 128, 16, 1}, 8, {512, 128, 16, 1}},
      {"transposed", {1, 1, 31, 33}, 0, {1, 1, 1, 31}, 0, {1, 1, 33, 1}},
      {"one element", {1, 1, 1, 1}, 5, {9, 9, 9, 9}, 7, {1, 1, 1, 1}},
      {"flat", {2, 37, 8, 64}, 0, {18944, 512, 64, 1}, 0, {18944, 512, 64, 1}},
      {"every other", {1, 1, 1, 1000}, 0, {0, 0, 0, 2}, 1, {0, 0, 0, 3}}};
  const auto list = [](Both& both, bool gpu, int64_t begin, const Four& n, const Four& s) {
    return gpu ? both.Gpu(begin, {n[0], n[1], n[2], n[3]}, {s[0], s[1], s[2], s[3]})
               : both.Cpu(begin, {n[0], n[1], n[2], n[3]}, {s[0], s[1], s[2], s[3]});
  };
  for (DType from_type : FloatTypes()) {
    for (DType to_type : FloatTypes()) {
      for (const Strided& c : cases) {
        for (bool accumulate : {false, true}) {
          const std::string what = absl::StrCat(c.name, " ", Name(from_type), " to ", Name(to_type),
                                                accumulate ? " added" : "");
          Both from = Input(from_type, {37888}), to = Input(to_type, {37888});
          for (bool gpu : {true, false}) {
            CopyStrided(gpu ? *stream_ : *cpu_stream_,
                        list(from, gpu, c.from_begin, c.shape, c.from_strides),
                        list(to, gpu, c.to_begin, c.shape, c.to_strides), accumulate);
          }
          ASSERT_OK(stream_->Synchronize()) << what;
          // The same fp32 value is rounded once.
          const std::vector<float> actual = to.Download(*stream_);
          for (int64_t i = 0; i < to.cpu().elements(); ++i) {
            ASSERT_EQ(actual[i], RoundTo(to_type, to.values()[i])) << what << " at " << i;
          }
        }
      }
    }
  }
}

TEST_F(ShardTokensGpuTest, TokensOfAShard_AreCountedFromItsBeginTheOthersAreNone) {
  for (int64_t n : {1, 3, 1000, 4097}) {
    std::vector<int32_t> ids(n);
    for (int32_t& id : ids) id = std::uniform_int_distribution<int32_t>(-1, 130)(random_);
    Both tokens = Integers(ids), out = Integers(std::vector<int32_t>(n, 77));
    ShardTokens(*stream_, AsIntegers(tokens.gpu()), 40, 45, AsIntegers(out.gpu()));
    ShardTokens(*cpu_stream_, AsIntegers(tokens.cpu()), 40, 45, AsIntegers(out.cpu()));
    const std::vector<float> actual = out.Download(*stream_);
    EXPECT_EQ(std::memcmp(actual.data(), out.values().data(), n * sizeof(float)), 0) << n;
  }
}

TEST_F(AttentionMergeGpuTest, PartialResults_MatchTheHostAndFloat64) {
  struct Shape {
    int64_t batch, sequence, heads, width;
  };
  const float none = -std::numeric_limits<float>::infinity();
  for (DType out_type : FloatTypes()) {
    for (DType partial_type : FloatTypes()) {
      for (const Shape& s : {Shape{2, 37, 3, 64}, Shape{1, 5, 1, 13}, Shape{1, 16, 2, 128},
                             Shape{1, 3, 2, 256}, Shape{2, 3, 5, 8}}) {
        const std::string what = absl::StrCat(Name(out_type), " + ", Name(partial_type),
                                              " S=", s.sequence, " D=", s.width);
        const int64_t rows = s.batch * s.sequence * s.heads;
        // The result lies among other heads, as in a packed buffer.
        const int64_t row = (s.heads + 2) * s.width;
        Both out = Input(out_type, {s.batch * s.sequence, row});
        Both partial = Input(partial_type, {s.batch, s.sequence, s.heads, s.width});
        std::vector<float> own = Random(rows, 3), other = Random(rows, 3);
        own[0] = none;
        other[rows / 2] = none;
        own[rows - 1] = other[rows - 1] = none;
        own[rows / 3] = 60;  // the other has no weight
        Both lse(*device_, DType::kF32, {s.batch, s.heads, s.sequence}, own);
        Both partial_lse(*device_, DType::kF32, {s.batch, s.heads, s.sequence}, other);
        lse.Upload(*stream_);
        partial_lse.Upload(*stream_);

        std::vector<float> expected = out.values(), expected_lse = own;
        for (int64_t at = 0; at < rows; ++at) {
          const int64_t b = at / (s.heads * s.sequence), h = at / s.sequence % s.heads;
          const int64_t token = b * s.sequence + at % s.sequence;
          if (own[at] == none && other[at] == none) continue;
          const double most = std::max(own[at], other[at]);
          const double sum = std::exp(own[at] - most) + std::exp(other[at] - most);
          expected_lse[at] = static_cast<float>(most + std::log(sum));
          for (int64_t d = 0; d < s.width; ++d) {
            float& x = expected[token * row + (h + 1) * s.width + d];
            const float y = partial.values()[(token * s.heads + h) * s.width + d];
            x = static_cast<float>((x * std::exp(own[at] - most) + y * std::exp(other[at] - most)) /
                                   sum);
          }
        }
        const auto view = [&](bool gpu) {
          const std::initializer_list<int64_t> shape = {s.batch, s.sequence, s.heads, s.width};
          const std::initializer_list<int64_t> strides = {s.sequence * row, row, s.width, 1};
          return gpu ? out.Gpu(s.width, shape, strides) : out.Cpu(s.width, shape, strides);
        };
        AttentionMerge(*stream_, {view(true), lse.gpu(), partial.gpu(), partial_lse.gpu()});
        AttentionMerge(*cpu_stream_, {view(false), lse.cpu(), partial.cpu(), partial_lse.cpu()});
        ASSERT_OK(stream_->Synchronize()) << what;
        const std::vector<float> merged = out.Download(*stream_);
        ExpectClose("out " + what, merged, out.values(), out_type, 2e-6);
        ExpectClose("out, in float64, " + what, merged, expected, out_type, 2e-6);
        const std::vector<float> merged_lse = lse.Download(*stream_);
        for (int64_t i = 0; i < rows; ++i) {
          if (expected_lse[i] == none) {
            EXPECT_EQ(merged_lse[i], none) << what;
          } else {
            EXPECT_NEAR(merged_lse[i], expected_lse[i], 1e-5) << what << " at " << i;
            EXPECT_NEAR(lse.values()[i], expected_lse[i], 1e-5) << what << " at " << i;
          }
        }
      }
    }
  }
}

TEST_F(SharedCrossEntropyGpuTest, LossAndGradientOverRanks_MatchTheHostAndFloat64) {
  // Columns of each rank.
  const std::vector<std::vector<int64_t>> vocabularies = {
      {99}, {33, 35, 31}, {512, 488}, {25216, 25041}, {40000, 91000}};
  for (DType dtype : FloatTypes()) {
    for (const std::vector<int64_t>& parts : vocabularies) {
      const auto ranks = static_cast<int64_t>(parts.size());
      int64_t vocab = 0;
      for (const int64_t part : parts) vocab += part;
      const int64_t t = vocab > 100000 ? 3 : 19;
      const std::string what = absl::StrCat(Name(dtype), " ", t, "x", vocab, "/", ranks);
      std::vector<int32_t> wanted(t);
      for (int64_t i = 0; i < t; ++i) {
        const auto last = static_cast<int32_t>(vocab) - 1;
        wanted[i] = i % 5 == 3 ? -1 : std::uniform_int_distribution<int32_t>(0, last)(random_);
      }
      Both targets = Integers(wanted);
      Both stats = Output(DType::kF32, {ranks, t, 3});
      const float scale = 1.0f / 37;
      std::vector<Both> logits;
      std::vector<double> sums(t, 0.0), of_target(t, 0.0);
      std::vector<std::vector<float>> gradients;
      int64_t first = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        // Padded to whole packs, and not.
        const int64_t columns = rank % 2 == 0 ? (parts[rank] + 15) / 16 * 16 : parts[rank] + 2;
        logits.push_back(Input(dtype, {t, columns}, 3));
        const auto stats_of = [&](const Tensor& all) {
          return Tensor(all.f32() + rank * t * 3, DType::kF32, {t, 3});
        };
        const auto args = [&](const Tensor& z, const Tensor& y, const Tensor& all) {
          return CrossEntropyStatsArgs{.logits = z,
                                       .targets = y,
                                       .first = first,
                                       .vocab = parts[rank],
                                       .stats = stats_of(all)};
        };
        CrossEntropyStats(*stream_,
                          args(logits[rank].gpu(), AsIntegers(targets.gpu()), stats.gpu()));
        CrossEntropyStats(*cpu_stream_,
                          args(logits[rank].cpu(), AsIntegers(targets.cpu()), stats.cpu()));
        gradients.emplace_back(t * columns);
        for (int64_t row = 0; row < t; ++row) {
          const float* z = logits[rank].values().data() + row * columns;
          for (int64_t c = 0; c < parts[rank]; ++c) sums[row] += std::exp(double{z[c]});
          const int64_t target = wanted[row] - first;
          if (target >= 0 && target < parts[rank]) of_target[row] = z[target];
        }
        first += parts[rank];
      }
      ASSERT_OK(stream_->Synchronize()) << what;
      ExpectClose("stats " + what, stats, 2e-6);

      std::vector<float> losses(t, 0.0f), first_losses;
      for (int64_t row = 0; row < t; ++row) {
        if (wanted[row] >= 0) {
          losses[row] = static_cast<float>(std::log(sums[row]) - of_target[row]);
        }
      }
      first = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const int64_t columns = logits[rank].cpu().dim(1);
        for (int64_t row = 0; row < t; ++row) {
          if (wanted[row] < 0) continue;
          const float* z = logits[rank].values().data() + row * columns;
          float* gradient = gradients[rank].data() + row * columns;
          for (int64_t c = 0; c < parts[rank]; ++c) {
            const double softmax = std::exp(double{z[c]}) / sums[row];
            gradient[c] =
                static_cast<float>(scale * (softmax - (first + c == wanted[row] ? 1 : 0)));
          }
        }
        Both out = Output(DType::kF32, {t});
        const auto args = [&](const Tensor& z, const Tensor& y, const Tensor& all,
                              const Tensor& to) {
          CrossEntropyMergeArgs merge;
          merge.logits = z;
          merge.targets = y;
          merge.first = first;
          merge.vocab = parts[rank];
          merge.stats = all;
          merge.losses = to;
          merge.scale = scale;
          return merge;
        };
        CrossEntropyMerge(
            *stream_, args(logits[rank].gpu(), AsIntegers(targets.gpu()), stats.gpu(), out.gpu()));
        CrossEntropyMerge(*cpu_stream_, args(logits[rank].cpu(), AsIntegers(targets.cpu()),
                                             stats.cpu(), out.cpu()));
        ASSERT_OK(stream_->Synchronize()) << what;
        const std::vector<float> actual = out.Download(*stream_);
        ExpectClose("losses " + what, actual, out.values(), DType::kF32, 2e-6);
        ExpectClose("losses, in float64, " + what, actual, losses, DType::kF32, 2e-6);
        ExpectClose("gradient " + what, logits[rank], 1e-5);
        ExpectClose("gradient, in float64, " + what, logits[rank].Download(*stream_),
                    gradients[rank], dtype, 1e-5);
        if (rank == 0) first_losses = actual;
        EXPECT_EQ(actual, first_losses) << what << ", rank " << rank;
        first += parts[rank];
      }
    }
  }
}

TEST_F(SumPartsGpuTest, AnyNumberOfParts_IsAddedInTheOrderOfTheHostAndRoundedOnce) {
  for (const DType in_type : FloatTypes()) {
    for (const DType out_type : {in_type, DType::kF32}) {
      for (const int64_t parts : {1, 2, 3, 4, 5, 8, 9}) {
        // With the second size the parts behind the first are not aligned.
        for (const int64_t n : {4096 * 3, 1001}) {
          Both in = Input(in_type, {parts * n}), out = Output(out_type, {n});
          SumParts(*stream_, in.gpu(), out.gpu());
          SumParts(*cpu_stream_, in.cpu(), out.cpu());
          const std::vector<float> actual = out.Download(*stream_);
          for (int64_t i = 0; i < n; ++i) {
            ASSERT_EQ(actual[i], RoundTo(out_type, out.values()[i]))
                << parts << " parts of " << Name(in_type) << " to " << Name(out_type) << " at "
                << i;
          }
        }
      }
    }
  }
}

TEST_F(SumPartsGpuTest, OwnPartElsewhere_GivesTheSameBitsAlsoInItsPlace) {
  for (const DType type : FloatTypes()) {
    for (const int64_t parts : {2, 3, 4, 5, 8}) {
      for (const int64_t n : {4096 * 3, 1001}) {
        for (const int own : {0, static_cast<int>(parts) - 1}) {
          Both whole = Input(type, {parts * n}), expected = Output(type, {n});
          SumParts(*stream_, whole.gpu(), expected.gpu());
          // What is in `staging` at the place of the own part must not be read.
          std::vector<float> others = whole.values();
          const auto begin = others.begin() + own * n;
          Both mine(*device_, type, {n}, std::vector<float>(begin, begin + n));
          std::fill(begin, begin + n, std::numeric_limits<float>::quiet_NaN());
          Both staging(*device_, type, {parts * n}, std::move(others));
          mine.Upload(*stream_);
          staging.Upload(*stream_);
          cuda::SumPartsWithOwn(*stream_, staging.gpu(), mine.gpu(), own, mine.gpu());
          EXPECT_EQ(mine.Download(*stream_), expected.Download(*stream_))
              << parts << " parts of " << Name(type) << ", own " << own;
        }
      }
    }
  }
}

}  // namespace
}  // namespace muster::kernels
