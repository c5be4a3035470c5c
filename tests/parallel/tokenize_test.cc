// Text of every form to datasets: the same bytes whatever the threads, the chunks and the moment at
// which the process was killed.
#include "parallel/data/tokenize.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/rng.h"
#include "nlohmann/json.hpp"
#include "parallel/data/dataset_description.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/json_field.h"
#include "parallel/data/paragraphs.h"
#include "parallel/data/text_input.h"
#include "parallel/data/tokenizer_file.h"
#include "tests/parallel/read_documents.h"
#include "tests/support/forwarding_file_system.h"
#include "tests/support/sanitized.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temporary_directory.h"

namespace muster::parallel {
namespace {

using Json = nlohmann::json;
using ::muster::testing::ForwardingFileSystem;
using ::muster::testing::StatusIs;
using ::muster::testing::TemporaryDirectory;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string Gzip(const std::string& text) {
  z_stream state = {};
  CHECK(deflateInit2(&state, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string out(deflateBound(&state, text.size()) + 64, '\0');
  state.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  state.avail_in = static_cast<uInt>(text.size());
  state.next_out = reinterpret_cast<Bytef*>(out.data());
  state.avail_out = static_cast<uInt>(out.size());
  CHECK(deflate(&state, Z_FINISH) == Z_STREAM_END);
  out.resize(state.total_out);
  deflateEnd(&state);
  return out;
}

std::string Zstd(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

class TokenizeTest : public ::testing::Test {
 protected:
  TokenizeTest() {
    auto made = LoadTokenizer(
        *files_, absl::StrCat(MUSTER_SOURCE_DIR, "/tests/parallel/tokenizers/llama3.json"));
    CHECK_OK(made);
    tokenizer_ = *std::move(made);
    options_.output = Path("out");
    options_.save_every = absl::ZeroDuration();
    options_.chunk_bytes = 300;
  }
  std::string Path(const std::string& name) { return directory_ / name; }
  void WriteFile(const std::string& name, const std::string& bytes) {
    std::filesystem::create_directories(std::filesystem::path(Path(name)).parent_path());
    ASSERT_OK(files_->WriteAtomically(Path(name), bytes));
  }
  // Words, numbers, spaces, line ends, empty lines and characters of several bytes.
  std::string RandomText(int words) {
    const std::vector<std::string> parts = {"the",     " quick", " brown", "  ",     "\n", "\n\n",
                                            "\r\n",    " été",   "今天",   " 123",   "45", "\t",
                                            " don't ", "!\n",    " a",     "\n\n\n", "/",  " x\n"};
    std::string text;
    for (int i = 0; i < words; ++i) text += parts[rng_.Next() % parts.size()];
    return text;
  }
  std::vector<int32_t> IdsOf(absl::string_view text) {
    std::vector<int32_t> ids;
    tokenizer_->Encode(text, ids);
    return ids;
  }
  std::string Bytes(const std::string& path) {
    auto bytes = files_->Read(path);
    CHECK_OK(bytes);
    return *bytes;
  }
  absl::StatusOr<std::vector<TokenizedSplit>> Run() {
    return Tokenize(*files_, *tokenizer_, options_);
  }

  TemporaryDirectory directory_;
  std::unique_ptr<FileSystem> files_ = PosixFileSystem();
  std::unique_ptr<Tokenizer> tokenizer_;
  TokenizeOptions options_;
  Rng rng_{testing::TestSeed()};
};

TEST_F(TokenizeTest, Documents_HaveTheIdsOfTheirText_WhateverTheChunksAndThreads) {
  std::vector<std::string> texts;
  for (int i = 0; i < 3; ++i) {
    texts.push_back(RandomText(700));
    WriteFile(absl::StrCat("in/", i, ".txt"), texts.back());
  }
  options_.inputs = {Path("in")};
  options_.bos = {420};
  options_.eos = {421, 5};
  for (DocumentBoundary boundary :
       {DocumentBoundary::kFile, DocumentBoundary::kLine, DocumentBoundary::kBlankLine}) {
    Documents expected;
    int64_t text_bytes = 0;
    for (absl::string_view text : texts) {
      text_bytes += static_cast<int64_t>(text.size());
      while (!text.empty()) {
        size_t bytes = text.size();
        if (boundary == DocumentBoundary::kLine) bytes = text.find('\n') + 1;
        if (boundary == DocumentBoundary::kBlankLine) bytes = FirstParagraph(text, 1);
        if (bytes == 0) bytes = text.size();
        std::vector<int32_t> ids = IdsOf(text.substr(0, bytes));
        ids.insert(ids.begin(), 420);
        ids.insert(ids.end(), {421, 5});
        expected.push_back(ids);
        text.remove_prefix(bytes);
      }
    }
    options_.boundary = boundary;
    std::string tokens, index;
    for (int threads : {1, 2, 7}) {
      for (int64_t chunk_bytes : {40, 300, 1 << 20}) {
        options_.threads = threads;
        options_.chunk_bytes = chunk_bytes;
        ASSERT_OK_AND_ASSIGN(const auto splits, Run());
        EXPECT_EQ(splits[0].text_bytes, text_bytes);
        if (tokens.empty()) {
          EXPECT_EQ(ReadDocuments(Path("out")), expected);
          tokens = Bytes(Path("out.bin"));
          index = Bytes(Path("out.idx"));
        }
        EXPECT_TRUE(tokens == Bytes(Path("out.bin")) && index == Bytes(Path("out.idx")))
            << threads << " threads, chunks of " << chunk_bytes;
      }
    }
  }
  ASSERT_OK_AND_ASSIGN(const auto names, files_->List(directory_.path()));
  EXPECT_EQ(names, (std::vector<std::string>{"in", "out.bin", "out.dataset.json", "out.idx"}));
}

TEST_F(TokenizeTest, CompressedFilesAndJsonLines_HoldTheSameDocuments) {
  std::vector<std::string> texts;
  std::string lines;
  for (int i = 0; i < 200; ++i) {
    texts.push_back(RandomText(30));
    // Every other line has its characters escaped.
    lines +=
        Json{{"id", i}, {"text", texts.back()}, {"more", {{"text", "not this"}, {"n", {1, {}}}}}}
            .dump(-1, ' ', i % 2 == 0) +
        (i % 3 == 0   ? "\r\n"
         : i % 3 == 1 ? "\n"
                      : "\n\n");
  }
  lines += R"({"text": ""})";  // of an empty text nothing is made
  const size_t half = lines.find('\n', lines.size() / 2) + 1;
  WriteFile("a.jsonl", lines);
  WriteFile("b.jsonl.gz", Gzip(lines.substr(0, half)) + Gzip(lines.substr(half)));
  WriteFile("c.ndjson.zst", Zstd(lines.substr(0, half)) + Zstd(lines.substr(half)));
  WriteFile("plain", lines);
  Documents expected;
  for (const std::string& text : texts) expected.push_back(IdsOf(text));
  for (const std::string name : {"a.jsonl", "b.jsonl.gz", "c.ndjson.zst", "pl*n"}) {
    options_.inputs = {Path(name)};
    options_.field = name == "pl*n" ? "text" : "";
    ASSERT_OK(Run()) << name;
    EXPECT_EQ(ReadDocuments(Path("out")), expected) << name;
  }
  options_.field = "";
  options_.inputs = {Path("b*"), Path("a.jsonl")};
  ASSERT_OK(Run());
  Documents twice = expected;
  twice.insert(twice.end(), expected.begin(), expected.end());
  EXPECT_EQ(ReadDocuments(Path("out")), twice);
}

TEST_F(TokenizeTest, Splits_OfCompressedText_AreThoseOfTheText) {
  const std::string text = RandomText(900);
  WriteFile("a.txt", text);
  WriteFile("a.gz", Gzip(text));
  options_.splits = {{"train", 7}, {"validation", 2}, {"test", 1}};
  for (DocumentBoundary boundary :
       {DocumentBoundary::kFile, DocumentBoundary::kLine, DocumentBoundary::kBlankLine}) {
    options_.boundary = boundary;
    std::vector<std::string> outputs;
    for (const char* name : {"a.txt", "a.gz"}) {
      options_.inputs = {Path(name)};
      for (int64_t chunk_bytes : {64, 1 << 20}) {
        options_.chunk_bytes = chunk_bytes;
        ASSERT_OK_AND_ASSIGN(const auto splits, Run());
        ASSERT_EQ(splits.size(), 3u);
        int64_t before = 0;
        std::string all;
        for (const TokenizedSplit& split : splits) {
          before += split.text_bytes;
          all += Bytes(split.prefix + ".bin") + Bytes(split.prefix + ".idx");
        }
        EXPECT_EQ(before, static_cast<int64_t>(text.size()));
        EXPECT_GE(splits[0].text_bytes, static_cast<int64_t>(text.size()) * 7 / 10);
        outputs.push_back(all);
      }
    }
    for (const std::string& output : outputs) EXPECT_TRUE(output == outputs[0]);
  }
}

// Runs in a process that ends without any destructor behind the given number of chunks.
TEST_F(TokenizeTest, AfterAKill_GoesOnWhereItWas_ToTheSameBytes) {
  std::string lines;
  for (int i = 0; i < 100; ++i) lines += Json{{"text", RandomText(10)}}.dump() + "\n";
  WriteFile("a.txt", RandomText(1500));
  WriteFile("b.jsonl.gz", Gzip(lines));
  WriteFile("c.zst", Zstd(RandomText(1500)));
  options_.inputs = {Path("a.txt"), Path("b.jsonl.gz"), Path("c.zst")};
  options_.splits = {{"train", 0.8}, {"validation", 0.2}};
  options_.threads = 2;
  ASSERT_OK(Run());
  const std::vector<std::string> outputs = {
      "out.train.bin",      "out.train.idx",          "out.validation.bin",
      "out.validation.idx", "out.train.dataset.json", "out.validation.dataset.json"};
  std::vector<std::string> expected;
  for (const std::string& name : outputs) expected.push_back(Bytes(Path(name)));
  for (int step = 1; step < 12; step += 2) {
    for (const std::string& name : outputs) ASSERT_OK(files_->RemoveFile(Path(name)));
    for (int attempt = 0; attempt < 3; ++attempt) {
      const pid_t child = fork();
      if (child == 0) {
        int chunks = 0;
        options_.progress = [&](int64_t, int64_t) {
          if (++chunks == step) _exit(9);
        };
        _exit(Run().ok() ? 0 : 1);
      }
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFEXITED(status));
      ASSERT_EQ(WEXITSTATUS(status), 9) << "the run ended before it was killed";
    }
    int64_t resumed_at = 0;
    TokenizeOptions rest = options_;
    rest.resumed = [&](int64_t bytes) { resumed_at = bytes; };
    ASSERT_OK(Tokenize(*files_, *tokenizer_, rest));
    EXPECT_TRUE(resumed_at > 0 || step == 1) << step;
    for (size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_TRUE(Bytes(Path(outputs[i])) == expected[i]) << outputs[i] << ", step " << step;
    }
    EXPECT_FALSE(files_->Exists(Path("out.resume")));
  }
}

TEST_F(TokenizeTest, OtherOptions_BeginAnew) {
  WriteFile("a.txt", RandomText(1500));
  options_.inputs = {Path("a.txt")};
  const pid_t child = fork();
  if (child == 0) {
    int chunks = 0;
    options_.progress = [&](int64_t, int64_t) {
      if (++chunks == 5) _exit(9);
    };
    _exit(Run().ok() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(WEXITSTATUS(status), 9);
  ASSERT_TRUE(files_->Exists(Path("out.resume")));
  bool resumed = false;
  options_.resumed = [&](int64_t) { resumed = true; };
  options_.eos = {7};
  ASSERT_OK(Run());
  EXPECT_FALSE(resumed);
  EXPECT_EQ(ReadDocuments(Path("out"))[0].back(), 7);
}

// Fails to write once so many bytes are written, as a full disk does.
class FullDisk : public ForwardingFileSystem {
 public:
  FullDisk(FileSystem& inner, int64_t left) : ForwardingFileSystem(inner), left_(left) {}
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    auto file = inner_.Create(path);
    if (!file.ok()) return file;
    return std::make_unique<File>(*this, *std::move(file));
  }
  absl::StatusOr<std::unique_ptr<WritableFile>> Reopen(const std::string& path,
                                                       int64_t length) override {
    auto file = inner_.Reopen(path, length);
    if (!file.ok()) return file;
    return std::make_unique<File>(*this, *std::move(file));
  }
  int64_t left_;

 private:
  class File : public WritableFile {
   public:
    File(FullDisk& disk, std::unique_ptr<WritableFile> inner)
        : disk_(disk), inner_(std::move(inner)) {}
    absl::Status Append(absl::string_view bytes) override {
      disk_.left_ -= static_cast<int64_t>(bytes.size());
      if (disk_.left_ < 0) return absl::UnavailableError("no space left on device");
      return inner_->Append(bytes);
    }
    absl::Status Sync() override { return inner_->Sync(); }
    absl::Status Close() override { return inner_->Close(); }

   private:
    FullDisk& disk_;
    const std::unique_ptr<WritableFile> inner_;
  };
};

TEST_F(TokenizeTest, OnAFullDisk_FailsWithoutADataset_AndGoesOnWhenThereIsRoom) {
  WriteFile("a.txt", RandomText(3000));
  options_.inputs = {Path("a.txt")};
  ASSERT_OK(Run());
  const std::string expected = Bytes(Path("out.bin")) + Bytes(Path("out.idx"));
  for (int64_t bytes = 0; bytes < 40000; bytes += 1999) {
    for (const char* name : {"out.bin", "out.idx"}) {
      std::filesystem::remove(Path(name));
    }
    FullDisk disk(*files_, bytes);
    const auto splits = Tokenize(disk, *tokenizer_, options_);
    if (!splits.ok()) {
      EXPECT_THAT(splits, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no space left")));
      EXPECT_FALSE(files_->Exists(Path("out.idx")));
    }
    ASSERT_OK(Run());
    EXPECT_TRUE(Bytes(Path("out.bin")) + Bytes(Path("out.idx")) == expected) << bytes;
  }
}

TEST_F(TokenizeTest, BadInput_NamesFileAndLine) {
  std::string lines;
  for (int i = 0; i < 50; ++i) lines += "{\"text\": \"some text\"}\n";
  const auto error_of = [&](const std::string& name, const std::string& bytes) {
    WriteFile(name, bytes);
    options_.inputs = {Path(name)};
    const absl::Status status = Run().status();
    EXPECT_FALSE(files_->Exists(Path("out.idx"))) << name;
    EXPECT_FALSE(files_->Exists(Path("out.bin.tmp"))) << name;
    return std::string(status.message());
  };
  EXPECT_THAT(error_of("a.jsonl", lines + "{\"text\": \"x}\n" + lines),
              AllOf(HasSubstr("a.jsonl:51: invalid JSON at byte 13: "), Not(HasSubstr("52"))));
  EXPECT_THAT(error_of("a.jsonl", lines + "{\"txt\": \"x\"}\n"),
              HasSubstr("a.jsonl:51: there is no field \"text\""));
  EXPECT_THAT(error_of("a.jsonl", lines + "{\"text\": 3}"),
              HasSubstr("a.jsonl:51: the field \"text\" is no string"));
  const std::string packed = Gzip(RandomText(5000));
  EXPECT_THAT(error_of("t.gz", packed.substr(0, packed.size() / 2)),
              HasSubstr("t.gz ends in the middle of its compressed data, at byte"));
  std::string damaged = packed;
  damaged[damaged.size() / 2] = static_cast<char>(~damaged[damaged.size() / 2]);
  EXPECT_THAT(error_of("d.gz", damaged), HasSubstr("d.gz is no sound gzip file"));
  EXPECT_THAT(error_of("g.gz", packed + "garbage"), HasSubstr("g.gz is no sound gzip file"));
  const std::string frames = Zstd(RandomText(5000));
  EXPECT_THAT(error_of("t.zst", frames.substr(0, frames.size() - 9)),
              HasSubstr("t.zst ends in the middle of its compressed data"));
  EXPECT_THAT(error_of("g.zst", frames + "garbage"), HasSubstr("g.zst is no sound zstd file"));
  options_.inputs = {Path("*.none")};
  EXPECT_THAT(Run(), StatusIs(absl::StatusCode::kNotFound, HasSubstr("no file matches")));
  std::filesystem::create_directories(Path("empty"));
  options_.inputs = {Path("empty")};
  EXPECT_THAT(Run(), StatusIs(absl::StatusCode::kNotFound, HasSubstr("no file in the directory")));
  WriteFile("e.gz", Gzip(""));
  options_.inputs = {Path("e.gz")};
  EXPECT_THAT(Run(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no text")));
}

TEST_F(TokenizeTest, Description_SaysWhatTheDatasetIsMadeWith) {
  WriteFile("a.txt", "the quick");
  options_.inputs = {Path("a.txt")};
  options_.tokenizer_file = "abc";
  ASSERT_OK_AND_ASSIGN(const BoundaryTokens around, ChooseBoundaries(*tokenizer_, "auto", "auto"));
  EXPECT_EQ(around.bos, tokenizer_->boundaries().bos);
  EXPECT_EQ(around.eos, std::vector<int32_t>{*tokenizer_->IdOf("<|end_of_text|>")});
  options_.bos = around.bos;
  options_.eos = around.eos;
  ASSERT_OK(Run());
  ASSERT_OK_AND_ASSIGN(const auto description, ReadDescription(*files_, Path("out")));
  ASSERT_TRUE(description.has_value());
  EXPECT_EQ(description->tokenizer, "llama3.json");
  EXPECT_EQ(description->tokenizer_sha256,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(description->vocabulary, tokenizer_->vocab());
  EXPECT_EQ(description->bos, around.bos);
  EXPECT_EQ(description->eos, around.eos);
  EXPECT_EQ(description->largest_id, *tokenizer_->IdOf("<|end_of_text|>"));
  EXPECT_EQ(description->documents, 1);
  EXPECT_EQ(description->text_bytes, 9);
  ASSERT_OK_AND_ASSIGN(const std::string file,
                       ReadDatasetTokenizer(*files_, Path("out"), *description));
  EXPECT_EQ(file, "abc");
  ASSERT_OK(files_->WriteAtomically(Path("out.tokenizer"), "abd"));
  EXPECT_THAT(ReadDatasetTokenizer(*files_, Path("out"), *description),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("out.dataset.json names ba7816bf")));
  // A data set of bytes has no file.
  options_.tokenizer_file = "";
  ASSERT_OK(Run());
  EXPECT_FALSE(files_->Exists(Path("out.tokenizer")));
  ASSERT_OK_AND_ASSIGN(const BoundaryTokens none, ChooseBoundaries(*tokenizer_, "none", "none"));
  EXPECT_TRUE(none.bos.empty() && none.eos.empty());
  EXPECT_THAT(ChooseBoundaries(*tokenizer_, "auto", "<eos>"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("no token '<eos>'")));
  ASSERT_OK(files_->WriteAtomically(Path("out.dataset.json"), "{}"));
  EXPECT_THAT(ReadDescription(*files_, Path("out")), StatusIs(absl::StatusCode::kDataLoss));
}

TEST(ReadStringField, AgreesWithAParserOfAllJson) {
  Rng rng(testing::TestSeed());
  const std::vector<std::string> parts = {"{",        "}",       "[",
                                          "]",        ",",       ":",
                                          "\"text\"", "\"a\"",   "\"\\u00e9\\ud83d\\ude00\\n\"",
                                          " ",        "-0.5e-3", "01",
                                          "1",        "true",    "null",
                                          "nul",      "\"\\x\"", "\"",
                                          "\\",       "\t",      "\"\x01\"",
                                          "1.",       "-",       "\"\\u12\""};
  const int rounds = testing::kSanitized ? 20000 : 200000;
  int sound = 0;
  for (int round = 0; round < rounds; ++round) {
    // Mostly sound objects with something put in or left out.
    std::vector<std::string> words = {
        "{", "\"a\"", ":", "[", "1", ",", "{", "}", "]", ",", "\"text\"", ":", "\"\\u00e9x\"", "}"};
    for (uint64_t i = rng.Next() % 3; i > 0; --i) {
      const size_t at = rng.Next() % words.size();
      if (rng.Next() % 2 == 0) {
        words[at] = parts[rng.Next() % parts.size()];
      } else {
        words.insert(words.begin() + static_cast<ptrdiff_t>(at), parts[rng.Next() % parts.size()]);
      }
    }
    const std::string text = absl::StrJoin(words, "");
    const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    std::string value;
    const absl::Status status = ReadStringField(text, "text", value);
    if (json.is_object() && json.contains("text") && json["text"].is_string()) {
      ++sound;
      if (status.ok()) {
        EXPECT_EQ(value, json["text"].get<std::string>()) << text;
      } else {
        // Of two fields of the name, one may be no string.
        EXPECT_THAT(status.message(), HasSubstr("is no string")) << text;
      }
    } else {
      EXPECT_FALSE(status.ok()) << text;
    }
  }
  EXPECT_GT(sound, rounds / 20);
}

TEST(ReadStringField, UnusualText_IsReadOrRefused) {
  std::string value;
  ASSERT_OK(ReadStringField(R"({"text":"a\ud83dx\ude00\ud83d\u0041\ud83d\ude00"})", "text", value));
  EXPECT_EQ(value,
            "a\xef\xbf\xbdx\xef\xbf\xbd\xef\xbf\xbd"
            "A\xf0\x9f\x98\x80");
  ASSERT_OK(ReadStringField("\xef\xbb\xbf{\"text\": \"behind a byte order mark\"}", "text", value));
  EXPECT_EQ(value, "behind a byte order mark");
  EXPECT_FALSE(ReadStringField(std::string(100000, '['), "text", value).ok());
  EXPECT_FALSE(ReadStringField("{\"a\":" + std::string(100000, '['), "text", value).ok());
}

}  // namespace
}  // namespace muster::parallel
