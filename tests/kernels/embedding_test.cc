#include "kernels/embedding/embedding.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "tests/kernels/support.h"

namespace muster::kernels {
namespace {

using testing::Floats;
using testing::Host;
using testing::Random;
using testing::View;

constexpr int64_t kSequence = 5, kTokens = 15, kWidth = 67, kVocab = 11;

std::vector<int32_t> Tokens() {
  std::vector<int32_t> tokens(kTokens);
  for (int64_t t = 0; t < kTokens; ++t) tokens[t] = static_cast<int32_t>(t * t % 4 * 3);
  tokens[7] = kVocab - 1;
  return tokens;
}

TEST(Embedding, Forward_WithAndWithoutPositions_AddsTheRows) {
  Host host;
  std::vector<int32_t> tokens = Tokens();
  Floats wte = Random(kVocab * kWidth, 1), wpe = Random(kSequence * kWidth, 2),
         out(kTokens * kWidth);
  EmbeddingForward(*host.stream, View(tokens, {kTokens}), View(wte, {kVocab, kWidth}),
                   View(wpe, {kSequence, kWidth}), kSequence, View(out, {kTokens, kWidth}));
  for (int64_t i = 0; i < kTokens * kWidth; ++i) {
    const int64_t t = i / kWidth, c = i % kWidth;
    ASSERT_EQ(out[i], wte[tokens[t] * kWidth + c] + wpe[t % kSequence * kWidth + c]);
  }
  EmbeddingForward(*host.stream, View(tokens, {kTokens}), View(wte, {kVocab, kWidth}), Tensor(),
                   kSequence, View(out, {kTokens, kWidth}));
  for (int64_t i = 0; i < kTokens * kWidth; ++i) {
    ASSERT_EQ(out[i], wte[tokens[i / kWidth] * kWidth + i % kWidth]);
  }
}

std::vector<int32_t> Groups(Stream& stream, std::vector<int32_t> tokens, int64_t vocab = kVocab) {
  const auto t = static_cast<int64_t>(tokens.size());
  std::vector<int32_t> groups(2 * t, -7);
  GroupTokens(stream, View(tokens, {t}), vocab, View(groups, {2, t}));
  CHECK_OK(stream.Synchronize());
  return groups;
}

TEST(Embedding, GroupTokens_RepeatedMissingAndWrongOnes_SortsThemInOrderAndTheOthersLast) {
  Host host;
  EXPECT_EQ(Groups(*host.stream, {3, 0, -1, 3, 11, 0, 10, 3, -5}),
            (std::vector<int32_t>{0, 0, 3, 3, 3, 10, 11, 11, 11,  //
                                  1, 5, 0, 3, 7, 6, 2, 4, 8}));
  EXPECT_EQ(Groups(*host.stream, {0}, 1), (std::vector<int32_t>{0, 0}));
}

TEST(Embedding, Backward_RepeatedTokens_AddsInOrderOfTokens) {
  Host host(3);
  std::vector<int32_t> tokens = Tokens();
  Floats dout = Random(kTokens * kWidth, 1), d_wte = Random(kVocab * kWidth, 2),
         d_wpe = Random(kSequence * kWidth, 3);
  Floats wte_expected = d_wte, wpe_expected = d_wpe;
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t c = 0; c < kWidth; ++c) {
      wte_expected[tokens[t] * kWidth + c] += dout[t * kWidth + c];
      wpe_expected[t % kSequence * kWidth + c] += dout[t * kWidth + c];
    }
  }
  std::vector<int32_t> groups = Groups(*host.stream, tokens);
  EmbeddingBackward(*host.stream, View(groups, {2, kTokens}), View(dout, {kTokens, kWidth}),
                    kSequence, View(d_wte, {kVocab, kWidth}), View(d_wpe, {kSequence, kWidth}));
  EXPECT_EQ(d_wte, wte_expected);  // the same order of additions: the same bits
  EXPECT_EQ(d_wpe, wpe_expected);
}

TEST(Embedding, TableInShards_SumsToTheWholeAndGivesEachItsRowsOfTheGradient) {
  Host host;
  std::vector<int32_t> tokens = Tokens(), local(kTokens);
  Floats wte = Random(kVocab * kWidth, 1), wpe = Random(kSequence * kWidth, 2),
         dout = Random(kTokens * kWidth, 3);
  Floats whole(kTokens * kWidth), sum(kTokens * kWidth), d_whole(kVocab * kWidth);
  EmbeddingForward(*host.stream, View(tokens, {kTokens}), View(wte, {kVocab, kWidth}),
                   View(wpe, {kSequence, kWidth}), kSequence, View(whole, {kTokens, kWidth}));
  std::vector<int32_t> groups = Groups(*host.stream, tokens);
  EmbeddingBackward(*host.stream, View(groups, {2, kTokens}), View(dout, {kTokens, kWidth}),
                    kSequence, View(d_whole, {kVocab, kWidth}), Tensor());
  Floats d_shards(kVocab * kWidth);
  for (const auto& [first, count] : {std::pair(0, 4), std::pair(4, 7)}) {
    ShardTokens(*host.stream, View(tokens, {kTokens}), first, count, View(local, {kTokens}));
    Floats part(kTokens * kWidth);
    EmbeddingForward(*host.stream, View(local, {kTokens}),
                     View(wte, {kVocab, kWidth}).Rows(first, count),
                     first == 0 ? View(wpe, {kSequence, kWidth}) : Tensor(), kSequence,
                     View(part, {kTokens, kWidth}));
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    std::vector<int32_t> local_groups = Groups(*host.stream, local, count);
    EmbeddingBackward(*host.stream, View(local_groups, {2, kTokens}), View(dout, {kTokens, kWidth}),
                      kSequence, View(d_shards, {kVocab, kWidth}).Rows(first, count), Tensor());
  }
  EXPECT_EQ(sum, whole);
  EXPECT_EQ(d_shards, d_whole);
}

TEST(EmbeddingDeathTest, Forward_TokenOutsideTheVocabulary_NamesItAndItsPlace) {
  Host host(1);
  std::vector<int32_t> tokens = {0, 11};
  Floats wte(kVocab * 2), out(4);
  EXPECT_DEATH(EmbeddingForward(*host.stream, View(tokens, {2}), View(wte, {kVocab, 2}), Tensor(),
                                2, View(out, {2, 2})),
               "token 11 at 1");
}

}  // namespace
}  // namespace muster::kernels
