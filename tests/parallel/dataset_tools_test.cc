#include "parallel/data/dataset_tools.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "parallel/data/sha256.h"
#include "tests/parallel/read_documents.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"

namespace muster::parallel {
namespace {

using ::muster::testing::StatusIs;
using ::muster::testing::TemporaryDirectory;
using ::testing::AllOf;
using ::testing::HasSubstr;

class DatasetTools : public ::testing::Test {
 protected:
  // With a description, of the tokenizer file "tokenizer", unless the vocabulary is 0.
  std::string Make(const std::string& name, const Documents& documents, int64_t vocabulary = 100,
                   TokenType type = TokenType::kU16) {
    const std::string prefix = directory_ / name;
    auto writer = IndexedDatasetWriter::Create(*files_, prefix, type);
    CHECK_OK(writer);
    DatasetDescription description = {"t.json", Sha256("tokenizer"), vocabulary};
    for (const std::vector<int32_t>& document : documents) {
      CHECK_OK((*writer)->Append(document));
      CHECK_OK((*writer)->EndDocument());
      for (int32_t id : document) {
        description.largest_id = std::max<int64_t>(description.largest_id, id);
      }
    }
    CHECK_OK((*writer)->Finish());
    description.documents = (*writer)->documents();
    description.tokens = (*writer)->tokens();
    description.text_bytes = 4 * description.tokens;
    if (vocabulary > 0) {
      CHECK_OK(WriteDescription(*files_, prefix, description));
      CHECK_OK(WriteDatasetTokenizer(*files_, prefix, "tokenizer"));
    }
    return prefix;
  }

  TemporaryDirectory directory_;
  std::unique_ptr<FileSystem> files_ = PosixFileSystem();
};

TEST_F(DatasetTools, Stats_CountLengthsAndDuplicates) {
  const std::vector<int32_t> longest(200'000, 7);  // in several blocks
  Documents documents = {{1}, {2, 3}, {3, 2}, longest, {2, 3}, longest};
  for (int i = 0; i < 94; ++i) documents.push_back({i, 1, 2, 3});
  ASSERT_OK_AND_ASSIGN(const DatasetStats stats, Stats(*files_, Make("a", documents)));
  EXPECT_EQ(stats.documents, 100);
  EXPECT_EQ(stats.tokens, 1 + 6 + 400'000 + 4 * 94);
  EXPECT_EQ(stats.text_bytes, 4 * stats.tokens);
  EXPECT_EQ(stats.duplicates, 2);
  EXPECT_EQ(stats.duplicate_tokens, 200'002);
  EXPECT_EQ(stats.shortest, 1);
  EXPECT_EQ(stats.median, 4);
  EXPECT_EQ(stats.length_90, 4);
  EXPECT_EQ(stats.longest, 200'000);
  ASSERT_EQ(stats.by_power.size(), 18u);
  EXPECT_EQ(stats.by_power[0], 1);
  EXPECT_EQ(stats.by_power[1], 3);
  EXPECT_EQ(stats.by_power[2], 94);
  EXPECT_EQ(stats.by_power[17], 2);
}

TEST_F(DatasetTools, Validate_NamesWhatDoesNotFit) {
  const std::string prefix = Make("a", {{1, 99}, {2}});
  ASSERT_OK_AND_ASSIGN(const DatasetDescription found, Validate(*files_, prefix));
  EXPECT_EQ(found.tokens, 3);
  ASSERT_OK(files_->WriteAtomically(prefix + ".tokenizer", "another"));
  EXPECT_THAT(Validate(*files_, prefix),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("a.tokenizer has the SHA-256")));
  Make("a", {{1, 99}, {2}});
  ASSERT_OK(files_->WriteAtomically(prefix + ".bin", std::string("\1\0\x7f\0\2\0", 6)));
  EXPECT_THAT(Validate(*files_, prefix),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("token 1 has id 127, outside the vocabulary of 100")));
  ASSERT_OK(files_->WriteAtomically(prefix + ".bin", std::string("\1\0\x0f\0\2\0", 6)));
  EXPECT_THAT(Validate(*files_, prefix),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("says a largest id of 99, the dataset has 15")));
  // The files of another data set under the name.
  const std::string other = Make("b", {{1}, {2}, {3}});
  for (const char* suffix : {".bin", ".idx"}) {
    ASSERT_OK_AND_ASSIGN(const std::string bytes, files_->Read(other + suffix));
    ASSERT_OK(files_->WriteAtomically(prefix + suffix, bytes));
  }
  EXPECT_THAT(Validate(*files_, prefix),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("says documents 2")));
  ASSERT_OK_AND_ASSIGN(const DatasetDescription bare, Validate(*files_, Make("c", {{5}}, 0)));
  EXPECT_EQ(bare.largest_id, 5);
}

TEST_F(DatasetTools, Merge_HoldsAllDocumentsInOrder) {
  const Documents a = {{1, 2}, {3}}, b = {{4, 90, 5}};
  const std::vector<std::string> prefixes = {Make("a", a, 100, TokenType::kU8), Make("b", b),
                                             Make("a2", a)};
  const std::string output = directory_ / "out";
  ASSERT_OK_AND_ASSIGN(const DatasetDescription merged, Merge(*files_, prefixes, output));
  EXPECT_EQ(ReadDocuments(output), (Documents{{1, 2}, {3}, {4, 90, 5}, {1, 2}, {3}}));
  EXPECT_EQ(merged.largest_id, 90);
  EXPECT_EQ(merged.text_bytes, 4 * 9);
  ASSERT_OK(Validate(*files_, output));
  EXPECT_THAT(Merge(*files_, {prefixes[0], output}, output),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("is one of the inputs")));
  const std::string bare = Make("bare", a, 0);
  EXPECT_THAT(Merge(*files_, {prefixes[0], bare}, directory_ / "mixed"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("different tokenizers"), HasSubstr("t.json and unknown"))));
  EXPECT_FALSE(files_->Exists(directory_ / "mixed.idx"));
  ASSERT_OK(Merge(*files_, {bare, bare}, output));
  for (const char* suffix : {".dataset.json", ".tokenizer"}) {
    EXPECT_FALSE(files_->Exists(output + suffix));
  }
}

}  // namespace
}  // namespace muster::parallel
