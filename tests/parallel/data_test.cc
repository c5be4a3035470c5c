#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "base/rng.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/inspect.h"
#include "parallel/data/sampler.h"
#include "parallel/data/tokenize.h"
#include "parallel/data/tokenizer.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"

namespace muster::parallel {
namespace {

using ::muster::testing::StatusIs;
using ::muster::testing::TemporaryDirectory;
using ::testing::AllOf;
using ::testing::HasSubstr;

class Data : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) { return directory_ / name; }
  void WriteFile(const std::string& path, const std::string& bytes) {
    ASSERT_OK(files_->WriteAtomically(path, bytes));
  }
  // Ids 0, 1, 2, ... in documents of the given lengths.
  std::unique_ptr<IndexedDataset> Counting(const std::string& name,
                                           const std::vector<int>& documents,
                                           TokenType type = TokenType::kI32) {
    auto writer = IndexedDatasetWriter::Create(*files_, Path(name), type);
    CHECK_OK(writer);
    int32_t next = 0;
    for (int length : documents) {
      for (int i = 0; i < length; ++i, ++next) CHECK_OK((*writer)->Append({next}));
      CHECK_OK((*writer)->EndDocument());
    }
    CHECK_OK((*writer)->Finish());
    auto dataset = IndexedDataset::Open(Path(name));
    CHECK_OK(dataset);
    return std::move(dataset).value();
  }

  TemporaryDirectory directory_;
  std::unique_ptr<FileSystem> files_ = PosixFileSystem();
};

// The layout as documented in indexed_dataset.h, byte by byte: two documents, [5 6 7] and [8].
std::string GoldenIndex() {
  return std::string("MMIDIDX\0\0", 9) + std::string("\1\0\0\0\0\0\0\0", 8) + "\x08" +
         std::string("\2\0\0\0\0\0\0\0", 8) + std::string("\3\0\0\0\0\0\0\0", 8) +
         std::string("\3\0\0\0\1\0\0\0", 8) + std::string("\0\0\0\0\0\0\0\0", 8) +
         std::string("\6\0\0\0\0\0\0\0", 8) + std::string("\0\0\0\0\0\0\0\0", 8) +
         std::string("\1\0\0\0\0\0\0\0", 8) + std::string("\2\0\0\0\0\0\0\0", 8);
}
std::string GoldenTokens() { return std::string("\5\0\6\0\7\0\x8\0", 8); }

TEST_F(Data, Writer_ProducesMegatronsLayout_ByteForByte) {
  ASSERT_OK_AND_ASSIGN(auto writer,
                       IndexedDatasetWriter::Create(*files_, Path("golden"), TokenType::kU16));
  ASSERT_OK(writer->Append({5, 6}));
  ASSERT_OK(writer->Append({7}));
  ASSERT_OK(writer->EndDocument());
  ASSERT_OK(writer->EndDocument());  // an empty document is not written
  ASSERT_OK(writer->Append({8}));
  ASSERT_OK(writer->Finish());
  ASSERT_OK_AND_ASSIGN(const std::string index, files_->Read(Path("golden.idx")));
  ASSERT_OK_AND_ASSIGN(const std::string tokens, files_->Read(Path("golden.bin")));
  EXPECT_EQ(index, GoldenIndex());
  EXPECT_EQ(tokens, GoldenTokens());
  ASSERT_OK_AND_ASSIGN(auto names, files_->List(directory_.path()));
  EXPECT_EQ(names, (std::vector<std::string>{"golden.bin", "golden.idx"}));
}

TEST_F(Data, Reader_ReadsMegatronsLayout_WithAndWithoutModes) {
  for (const std::string& modes : {std::string(), std::string(2, '\0')}) {
    WriteFile(Path("golden.idx"), GoldenIndex() + modes);
    WriteFile(Path("golden.bin"), GoldenTokens());
    ASSERT_OK_AND_ASSIGN(auto dataset, IndexedDataset::Open(Path("golden")));
    EXPECT_EQ(dataset->type(), TokenType::kU16);
    EXPECT_EQ(dataset->documents(), 2);
    EXPECT_EQ(dataset->tokens(), 4);
    EXPECT_EQ(dataset->DocumentBegin(1), 3);
    EXPECT_EQ(dataset->DocumentBegin(2), 4);
    std::vector<int32_t> ids(4);
    ASSERT_OK(dataset->Read(0, 100, absl::MakeSpan(ids)));
    EXPECT_EQ(ids, (std::vector<int32_t>{5, 6, 7, 8}));
  }
}

TEST_F(Data, DamagedIndex_IsADataLossThatNamesFileFieldAndNumbers) {
  struct Case {
    size_t at;
    char byte;
    std::string message;
  };
  const std::vector<Case> cases = {
      {0, 'X', "magic"},
      {9, 2, "version is 2"},
      {17, 9, "dtype code is 9"},
      {17, 7, "not a token id"},
      {17, 4, "sequence 0 ends at byte 12"},
      {18, 3, "3 sequences and 3 document bounds take 94"},
      {25, 1, "claims 72057594037927938 sequences"},
      {34, 2, "pointer of sequence 1 is 6"},
      {37, -1, "length of sequence 0 is -16777213"},
      {38, 2, "sequence 1 ends at byte 10"},
      {50, 4, "pointer of sequence 1 is 4, the lengths before it put it at 6"},
      {58, 1, "document bound 0 is 1"},
      {66, 3, "document bound 1 is 3, must be between 0 and 2"},
      {74, 1, "the last document bound is 1, there are 2 sequences"},
  };
  WriteFile(Path("d.bin"), GoldenTokens());
  for (const Case& c : cases) {
    std::string index = GoldenIndex();
    index[c.at] = c.byte;
    WriteFile(Path("d.idx"), index);
    EXPECT_THAT(
        IndexedDataset::Open(Path("d")),
        StatusIs(absl::StatusCode::kDataLoss, AllOf(HasSubstr("d.idx"), HasSubstr(c.message))))
        << "byte " << c.at;
  }
  for (size_t length = 0; length < GoldenIndex().size(); ++length) {
    WriteFile(Path("d.idx"), GoldenIndex().substr(0, length));
    EXPECT_THAT(IndexedDataset::Open(Path("d")), StatusIs(absl::StatusCode::kDataLoss));
  }
  WriteFile(Path("d.idx"), GoldenIndex());
  WriteFile(Path("d.bin"), GoldenTokens() + "x");
  EXPECT_THAT(IndexedDataset::Open(Path("d")),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("is 9 bytes long, the lengths")));
  ASSERT_OK(files_->RemoveFile(Path("d.bin")));
  EXPECT_THAT(IndexedDataset::Open(Path("d")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("d.bin")));
}

TEST_F(Data, Writer_WithoutFinish_LeavesNothing) {
  {
    ASSERT_OK_AND_ASSIGN(auto writer,
                         IndexedDatasetWriter::Create(*files_, Path("x"), TokenType::kU8));
    ASSERT_OK(writer->Append({1, 2}));
    EXPECT_THAT(writer->Append({256}),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("token 256 at position 2")));
  }
  ASSERT_OK_AND_ASSIGN(auto names, files_->List(directory_.path()));
  EXPECT_TRUE(names.empty());
}

TEST_F(Data, EveryTokenType_RoundTrips) {
  for (TokenType type : {TokenType::kU8, TokenType::kI8, TokenType::kI16, TokenType::kU16,
                         TokenType::kI32, TokenType::kI64}) {
    auto dataset = Counting("t", {60, 1, 66}, type);
    std::vector<int32_t> ids(127);
    ASSERT_OK(dataset->Read(0, 127, absl::MakeSpan(ids)));
    for (int i = 0; i < 127; ++i) EXPECT_EQ(ids[static_cast<size_t>(i)], i) << Name(type);
    EXPECT_THAT(dataset->Read(0, 100, absl::MakeSpan(ids)),
                StatusIs(absl::StatusCode::kDataLoss,
                         AllOf(HasSubstr("t.bin: token 100 has id 100"), HasSubstr("of 100"))));
  }
  EXPECT_EQ(TokenTypeFor(256), TokenType::kU8);
  EXPECT_EQ(TokenTypeFor(257), TokenType::kU16);
  EXPECT_EQ(TokenTypeFor(65537), TokenType::kI32);
}

// ---- tokenize ----------------------------------------------------------------------------------

class TokenizeText : public Data {
 protected:
  std::string TextOf(const std::string& prefix) {
    auto dataset = IndexedDataset::Open(prefix);
    CHECK_OK(dataset);
    std::vector<int32_t> ids(static_cast<size_t>((*dataset)->tokens()));
    CHECK_OK((*dataset)->Read(0, 256, absl::MakeSpan(ids)));
    auto text = tokenizer_->Decode(ids);
    CHECK_OK(text);
    return *text;
  }
  std::unique_ptr<Tokenizer> tokenizer_ = MakeTokenizer("bytes").value();
};

TEST_F(TokenizeText, Splits_HoldTheWholeInput_AndCutAtDocuments) {
  const std::string a = "one\ntwo\n\nthree\n\n\nfour \xC3\xA9\nfive", b = "\nsix\r\n\r\nseven\n";
  WriteFile(Path("a.txt"), a);
  WriteFile(Path("b.txt"), b);
  const std::map<DocumentBoundary, int64_t> documents = {{DocumentBoundary::kFile, 2},
                                                         {DocumentBoundary::kLine, 12},
                                                         {DocumentBoundary::kBlankLine, 6}};
  for (auto [boundary, count] : documents) {
    TokenizeOptions options;
    options.inputs = {Path("a.txt"), Path("b.txt")};
    options.output = Path("out");
    options.boundary = boundary;
    ASSERT_OK_AND_ASSIGN(auto whole, Tokenize(*files_, *tokenizer_, options));
    EXPECT_EQ(whole[0].documents, count);
    EXPECT_EQ(TextOf(Path("out")), a + b);

    ASSERT_OK_AND_ASSIGN(options.splits, ParseSplits("train=0.5,validation=0.5"));
    ASSERT_OK_AND_ASSIGN(auto parts, Tokenize(*files_, *tokenizer_, options));
    ASSERT_EQ(parts.size(), 2u);
    EXPECT_EQ(parts[1].prefix, Path("out.validation"));
    const std::string train = TextOf(Path("out.train"));
    EXPECT_EQ(train + TextOf(Path("out.validation")), a + b);
    EXPECT_TRUE(train.back() == '\n' || train == a)
        << train;  // a split ends behind a line or a file
    EXPECT_GE(train.size(), (a + b).size() / 2);
  }
}

TEST_F(TokenizeText, BadRequests_SayWhatIsWrong) {
  TokenizeOptions options;
  options.output = Path("out");
  EXPECT_THAT(Tokenize(*files_, *tokenizer_, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no input")));
  options.inputs = {Path("missing.txt")};
  EXPECT_THAT(Tokenize(*files_, *tokenizer_, options),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("missing.txt")));
  WriteFile(Path("one.txt"), "a single line");
  options.inputs = {Path("one.txt")};
  options.splits = {{"train", 0.5}, {"validation", 0.5}};
  EXPECT_THAT(Tokenize(*files_, *tokenizer_, options),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("used up")));
  EXPECT_THAT(MakeTokenizer("words"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("bytes")));
  EXPECT_THAT(ParseSplits("train=x"), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(ParseSplits("a=1,a=1"), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(ParseSplits("a=0.9,b=0.5"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("add up to 1.4")));
  EXPECT_THAT(ParseSplits("a=0.9"), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_OK(ParseSplits("a=8,b=1,c=1"));
  EXPECT_OK(ParseSplits("a=0.7,b=0.2,c=0.1"));
  EXPECT_THAT(ParseDocumentBoundary("page"), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST_F(TokenizeText, Inspect_CountsWhatIsThere) {
  WriteFile(Path("a.txt"), "banana\nbee\n");
  TokenizeOptions options;
  options.inputs = {Path("a.txt")};
  options.output = Path("out");
  options.boundary = DocumentBoundary::kLine;
  ASSERT_OK(Tokenize(*files_, *tokenizer_, options));
  ASSERT_OK_AND_ASSIGN(const DatasetSummary summary, Inspect(Path("out"), tokenizer_.get(), 2, 6));
  EXPECT_EQ(summary.documents, 2);
  EXPECT_EQ(summary.tokens, 11);
  EXPECT_EQ(summary.id_min, '\n');
  EXPECT_EQ(summary.id_max, 'n');
  EXPECT_EQ(summary.ids_distinct, 5);
  EXPECT_EQ(summary.top, (std::vector<std::pair<int32_t, int64_t>>{{'a', 3}, {'\n', 2}}));
  EXPECT_EQ(summary.snippet, "banana");
}

// ---- samples -----------------------------------------------------------------------------------

TEST(SeededPermutation, EverySize_IsABijectionThatDependsOnTheSeed) {
  Rng rng(testing::TestSeed());
  for (int64_t size : {1, 2, 3, 4, 5, 16, 17, 1000, 4097}) {
    const SeededPermutation permutation(rng.Next(), size);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t to = permutation(i);
      ASSERT_TRUE(to >= 0 && to < size);
      seen.insert(to);
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), size);
  }
  int same = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    same += SeededPermutation(1, 1000)(i) == SeededPermutation(2, 1000)(i);
  }
  EXPECT_LT(same, 10);
}

TEST(BlendOrder, AnyWeights_StayWithinTwoOfTheirShare_AndCountWithoutGaps) {
  Rng rng(testing::TestSeed());
  double worst = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<double> weights(1 + rng.Below(9));
    double total = 0;
    for (double& weight : weights) total += weight = std::exp(8 * rng.Uniform() - 4);
    const BlendOrder order(weights);
    std::vector<int64_t> counts(weights.size());
    for (int64_t i = 0; i < 3000; ++i) {
      const BlendOrder::Pick pick = order(i);
      ASSERT_EQ(pick.count, counts[static_cast<size_t>(pick.source)]++);
      for (size_t d = 0; d < weights.size(); ++d) {
        const double share = weights[d] / total * static_cast<double>(i + 1);
        worst = std::max(worst, std::abs(static_cast<double>(counts[d]) - share));
      }
    }
  }
  // 2 is proven (sampler.cc); in practice it is about 1.
  EXPECT_LT(worst, 1.5);
  // At indices so large that counting from the start would take too long.
  const BlendOrder order({1, 3});
  const BlendOrder::Pick pick = order(int64_t{1} << 50);
  EXPECT_NEAR(static_cast<double>(pick.count), std::ldexp(pick.source == 0 ? 0.25 : 0.75, 50), 1);
}

TEST_F(Data, Training_EachEpochVisitsEverySampleOnce_InAnOrderOfItsOwn) {
  auto dataset = Counting("d", {40, 1, 62});  // 103 tokens: 10 samples of 10, 2 tokens left over
  ASSERT_OK_AND_ASSIGN(const Sampler sampler,
                       Sampler::Training({{dataset.get(), 1}}, {10, 1000, testing::TestSeed()}));
  EXPECT_EQ(sampler.samples_per_epoch(), 10);
  std::set<std::vector<int64_t>> orders;
  std::set<int64_t> shifts;
  for (int64_t epoch = 0; epoch < 50; ++epoch) {
    std::vector<int64_t> order;
    std::set<int64_t> begins;
    for (int64_t i = 0; i < 10; ++i) {
      const SampleLocation location = sampler.Locate(epoch * 10 + i);
      EXPECT_EQ(location.epoch, epoch);
      EXPECT_GE(location.begin, 0);
      EXPECT_LE(location.begin + 11, 103);
      order.push_back(location.begin / 10);
      begins.insert(location.begin);
    }
    ASSERT_EQ(begins.size(), 10u);
    EXPECT_EQ(*begins.rbegin() - *begins.begin(), 90);
    shifts.insert(*begins.begin());
    orders.insert(order);
  }
  EXPECT_GT(orders.size(), 45u);
  EXPECT_EQ(shifts, (std::set<int64_t>{0, 1, 2}));  // every token is in some epoch
}

TEST_F(Data, Documents_SayWhereTheDocumentOfEveryTokenBegins) {
  auto dataset = Counting("d", {3, 1, 14, 40});  // they begin at 0, 3, 4, 18
  ASSERT_OK_AND_ASSIGN(const Sampler sampler,
                       Sampler::Evaluation({{dataset.get()}}, {10, 1000, 5}));
  std::vector<int32_t> begins(30);
  sampler.Documents({1, 0, 2}, absl::MakeSpan(begins));
  EXPECT_EQ(begins, (std::vector<int32_t>{0, 0, 0, 0, 0, 0, 0, 0, 8, 8,     // tokens 10 to 19
                                          0, 0, 0, 3, 4, 4, 4, 4, 4, 4,     // 0 to 9
                                          0, 0, 0, 0, 0, 0, 0, 0, 0, 0}));  // 20 to 29
}

TEST_F(Data, Fill_GivesInputsAndTheTokensThatFollow_WhateverTheGrouping) {
  auto a = Counting("a", {500}), b = Counting("b", {300});
  ASSERT_OK_AND_ASSIGN(const Sampler sampler,
                       Sampler::Training({{a.get(), 2}, {b.get(), 1}}, {7, 500, 99}));
  std::vector<int32_t> all(90 * 7), all_targets(90 * 7);
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < 90; ++i) indices.push_back(i);
  ASSERT_OK(sampler.Fill(indices, absl::MakeSpan(all), absl::MakeSpan(all_targets)));
  int from_a = 0;
  for (size_t i = 0; i < 90; ++i) {
    const SampleLocation location = sampler.Locate(static_cast<int64_t>(i));
    from_a += location.source == 0;
    // Another layout, or a resumed job, reads the sample in another group.
    std::vector<int32_t> tokens(7), targets(7);
    ASSERT_OK(
        sampler.Fill({static_cast<int64_t>(i)}, absl::MakeSpan(tokens), absl::MakeSpan(targets)));
    for (size_t t = 0; t < 7; ++t) {
      EXPECT_EQ(tokens[t], location.begin + static_cast<int64_t>(t));
      EXPECT_EQ(targets[t], tokens[t] + 1);
      EXPECT_EQ(all[i * 7 + t], tokens[t]);
      EXPECT_EQ(all_targets[i * 7 + t], targets[t]);
    }
  }
  EXPECT_EQ(from_a, 60);
  ASSERT_OK_AND_ASSIGN(const Sampler narrow, Sampler::Training({{a.get(), 1}}, {7, 100, 99}));
  EXPECT_THAT(narrow.Fill(indices, absl::MakeSpan(all), absl::MakeSpan(all_targets)),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("a.bin")));
}

TEST_F(Data, Evaluation_GoesThroughEveryDatasetInOrder) {
  auto a = Counting("a", {22}), b = Counting("b", {11});
  ASSERT_OK_AND_ASSIGN(const Sampler sampler,
                       Sampler::Evaluation({{a.get()}, {b.get()}}, {10, 1000, 5}));
  EXPECT_EQ(sampler.samples_per_epoch(), 3);
  EXPECT_EQ(sampler.Locate(0), (SampleLocation{0, 0, 0}));
  EXPECT_EQ(sampler.Locate(1), (SampleLocation{0, 0, 10}));
  EXPECT_EQ(sampler.Locate(2), (SampleLocation{1, 0, 0}));
}

TEST_F(Data, Fingerprint_ChangesWithAnythingThatChangesTheStream) {
  auto a = Counting("a", {50}), b = Counting("b", {60});
  std::set<uint64_t> seen;
  auto add = [&](std::vector<SampleSource> sources, SamplerOptions options) {
    auto sampler = Sampler::Training(std::move(sources), options);
    CHECK_OK(sampler);
    seen.insert(sampler->fingerprint());
  };
  add({{a.get(), 1}}, {8, 100, 1});
  add({{a.get(), 1}}, {8, 100, 2});
  add({{a.get(), 1}}, {9, 100, 1});
  add({{b.get(), 1}}, {8, 100, 1});
  add({{a.get(), 1}, {b.get(), 1}}, {8, 100, 1});
  add({{a.get(), 1}, {b.get(), 2}}, {8, 100, 1});
  EXPECT_EQ(seen.size(), 6u);
}

TEST_F(Data, ImpossibleSources_AreRefused) {
  auto a = Counting("a", {10});
  EXPECT_THAT(Sampler::Training({{a.get(), 1}}, {10, 100, 1}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("/a has 10 tokens"), HasSubstr("takes 11"))));
  EXPECT_THAT(Sampler::Training({{a.get(), 0}}, {5, 100, 1}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("weight 0")));
  EXPECT_THAT(Sampler::Training({}, {5, 100, 1}), StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace muster::parallel
