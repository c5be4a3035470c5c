// Training against what tokenizers has trained on the same text (tokenizers/make_fixtures.py).
#include "parallel/data/bpe_trainer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "base/rng.h"
#include "nlohmann/json.hpp"
#include "parallel/data/tokenizer_file.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"

namespace muster::parallel {
namespace {

using Json = nlohmann::json;
using ::muster::testing::StatusIs;
using ::muster::testing::TemporaryDirectory;
using ::testing::HasSubstr;

const std::string kFolder = MUSTER_SOURCE_DIR "/tests/parallel/tokenizers/";

class BpeTrainer : public ::testing::Test {
 protected:
  // The sentences three times, as the fixtures are trained.
  CountOptions Sentences(SplitPattern pattern) {
    CountOptions options;
    options.inputs.assign(3, kFolder + "sentences.jsonl");
    options.pattern = pattern;
    return options;
  }
  std::unique_ptr<FileSystem> files_ = PosixFileSystem();
};

TEST_F(BpeTrainer, TokensAndMerges_AreThoseOfTokenizers) {
  const std::pair<const char*, SplitPattern> fixtures[] = {{"gpt2", SplitPattern::kGpt2},
                                                           {"llama3", SplitPattern::kCl100k},
                                                           {"qwen2", SplitPattern::kQwen2},
                                                           {"o200k", SplitPattern::kO200k}};
  for (const auto& [name, pattern] : fixtures) {
    ASSERT_OK_AND_ASSIGN(const std::string text, files_->Read(kFolder + name + ".json"));
    Json expected = Json::parse(text)["model"];
    expected["vocab"].erase("\u0120zyzzyva");  // which llama3.json has without training
    // The trained ones alone; special tokens of the fixtures are no part of the vocabulary.
    ASSERT_OK_AND_ASSIGN(const PreTokenCounts counts, CountPreTokens(Sentences(pattern)));
    ASSERT_OK_AND_ASSIGN(
        const BpeModel model,
        TrainBpe(counts, static_cast<int64_t>(expected["vocab"].size()), /*frequency_min=*/1));
    ASSERT_OK_AND_ASSIGN(const std::string made, ToTokenizerJson(model, pattern, {"<|end|>"}));
    const Json file = Json::parse(made);
    EXPECT_EQ(file["model"]["vocab"], expected["vocab"]) << name;
    EXPECT_EQ(file["model"]["merges"], expected["merges"]) << name;
    ASSERT_OK_AND_ASSIGN(const auto tokenizer, ParseTokenizerJson(made, "made"));
    EXPECT_EQ(tokenizer->IdOf("<|end|>"), static_cast<int32_t>(expected["vocab"].size()));
    std::vector<int32_t> ids;
    tokenizer->Encode("The Käfer doesn't 今天 12345<|end|>", ids);
    EXPECT_EQ(ids.back(), *tokenizer->IdOf("<|end|>"));
    ASSERT_OK_AND_ASSIGN(const std::string decoded, tokenizer->Decode(ids));
    EXPECT_EQ(decoded, "The Käfer doesn't 今天 12345<|end|>");
  }
}

TEST_F(BpeTrainer, ThreadsChunksAndSections_DoNotChangeTheCounts) {
  const TemporaryDirectory directory;
  Rng rng(testing::TestSeed());
  std::string text;
  for (int i = 0; i < 20000; ++i) {
    text +=
        absl::StrCat(i % 3 == 0 ? " " : "", "word", rng.Below(300), rng.Below(9) == 0 ? "\n" : " ");
  }
  ASSERT_OK(files_->WriteAtomically(directory / "text", text));
  CountOptions options;
  options.inputs = {directory / "text"};
  ASSERT_OK_AND_ASSIGN(const PreTokenCounts expected, CountPreTokens(options));
  int64_t bytes = 0;
  for (const auto& [word, count] : expected) bytes += count * static_cast<int64_t>(word.size());
  EXPECT_EQ(bytes, static_cast<int64_t>(text.size()));
  for (int threads : {1, 3}) {
    for (int64_t section : {3000, 50000}) {
      options.threads = threads;
      options.section_bytes = section;
      options.chunk_bytes = 1000;
      options.distinct_max = 16'000'000;
      ASSERT_OK_AND_ASSIGN(const PreTokenCounts counts, CountPreTokens(options));
      EXPECT_EQ(counts, expected) << threads << " threads, sections of " << section;
    }
  }
  // Where memory is bounded, the rarest go, the same ones for any number of threads.
  options.distinct_max = 50;
  ASSERT_OK_AND_ASSIGN(const PreTokenCounts some, CountPreTokens(options));
  EXPECT_LE(some.size(), 50u);
  options.threads = 1;
  ASSERT_OK_AND_ASSIGN(const PreTokenCounts alone, CountPreTokens(options));
  EXPECT_EQ(alone, some);
}

TEST_F(BpeTrainer, RarePairs_AreNotMerged) {
  const PreTokenCounts counts = {{"abc", 5}, {"abd", 2}, {"xy", 1}};
  ASSERT_OK_AND_ASSIGN(const BpeModel often, TrainBpe(counts, 300, /*frequency_min=*/3));
  EXPECT_EQ(often.merges,
            (std::vector<std::pair<std::string, std::string>>{{"a", "b"}, {"ab", "c"}}));
  ASSERT_OK_AND_ASSIGN(const BpeModel all, TrainBpe(counts, 300, /*frequency_min=*/1));
  EXPECT_EQ(all.merges.size(), 4u);
  ASSERT_OK_AND_ASSIGN(const BpeModel few, TrainBpe(counts, 257, /*frequency_min=*/1));
  EXPECT_EQ(few.tokens.size(), 257u);
}

TEST_F(BpeTrainer, RunsOfOneCharacter_AreCountedAsTheyOverlap) {
  ASSERT_OK_AND_ASSIGN(const BpeModel model, TrainBpe({{"aaaaaaa", 1}, {"bcbc", 3}}, 260, 1));
  EXPECT_EQ(model.merges, (std::vector<std::pair<std::string, std::string>>{
                              {"a", "a"}, {"b", "c"}, {"bc", "bc"}, {"aa", "aa"}}));
}

TEST_F(BpeTrainer, BadRequests_SayWhatIsWrong) {
  EXPECT_THAT(TrainBpe({}, 255, 1),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("must be 256")));
  EXPECT_THAT(ToTokenizerJson({}, SplitPattern::kWhole, {}),
              StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(ToTokenizerJson({}, SplitPattern::kGpt2, {""}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("special token")));
  CountOptions options;
  options.inputs = {kFolder + "nothing"};
  EXPECT_THAT(CountPreTokens(options), StatusIs(absl::StatusCode::kNotFound));
}

}  // namespace
}  // namespace muster::parallel
