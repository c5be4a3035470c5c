#include "parallel/data/tokenizer_file.h"

#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "parallel/data/byte_pair_encoder.h"
#include "parallel/data/sentence_piece_model.h"
#include "parallel/data/sentence_piece_tokenizer.h"
#include "parallel/data/subword_tokenizer.h"

namespace muster::parallel {
namespace {

using Json = nlohmann::json;

constexpr int64_t kFileBytesMax = int64_t{256} << 20;  // a larger one is no tokenizer

// A published list of ranks. The file says neither how text is split nor what other tokens there
// are; the list is told by its size.
struct PublishedRanks {
  size_t ranks;
  SplitPattern pattern;
  std::vector<std::pair<const char*, int32_t>> specials;
};
const std::vector<PublishedRanks>& Published() {
  static const auto* const lists = new std::vector<PublishedRanks>{
      {50256, SplitPattern::kGpt2, {{"<|endoftext|>", 50256}}},  // r50k_base, GPT-2
      {50280, SplitPattern::kGpt2, {{"<|endoftext|>", 50256}}},  // p50k_base
      {100256,
       SplitPattern::kCl100kRanks,
       {{"<|endoftext|>", 100257},
        {"<|fim_prefix|>", 100258},
        {"<|fim_middle|>", 100259},
        {"<|fim_suffix|>", 100260},
        {"<|endofprompt|>", 100276}}},  // cl100k_base
      {128000,
       SplitPattern::kCl100k,
       {{"<|begin_of_text|>", 128000}, {"<|end_of_text|>", 128001}}},  // Llama 3
      {151643, SplitPattern::kQwen2, {{"<|endoftext|>", 151643}}},     // Qwen
      {199998,
       SplitPattern::kO200k,
       {{"<|endoftext|>", 199999}, {"<|endofprompt|>", 200018}}},  // o200k_base
  };
  return *lists;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseRanks(absl::string_view text,
                                                      const std::string& name,
                                                      std::optional<SplitPattern> pattern) {
  std::vector<std::pair<std::string, int32_t>> tokens;
  int line_number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++line_number;
    if (absl::StripAsciiWhitespace(line).empty()) continue;
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipWhitespace());
    std::string token;
    int32_t rank = 0;
    if (words.size() != 2 || !absl::Base64Unescape(words[0], &token) || token.empty() ||
        !absl::SimpleAtoi(words[1], &rank)) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ":", line_number, ": expected a token in base64 and its rank"));
    }
    tokens.emplace_back(std::move(token), rank);
  }
  SubwordTokenizerParts parts;
  parts.name = name;
  for (const PublishedRanks& list : Published()) {
    if (list.ranks != tokens.size() || pattern.has_value()) continue;
    pattern = list.pattern;
    for (const auto& [content, id] : list.specials) {
      AddedToken token;
      token.content = content;
      token.id = id;
      token.in_text = false;
      parts.added.push_back(std::move(token));
    }
  }
  if (!pattern.has_value()) {
    return absl::UnimplementedError(absl::StrCat(
        name, ": a list of ", tokens.size(),
        " ranks is none whose way to split text is known (50256, 50280, 100256, 128000, 151643 or "
        "199998); a tokenizer.json says it"));
  }
  parts.splitters.emplace_back(*pattern);
  auto encoder = BytePairEncoder::MakeRanked(std::move(tokens));
  if (!encoder.ok()) return Annotate(encoder.status(), name);
  parts.encoder = std::make_unique<BytePairEncoder>(*std::move(encoder));
  return std::make_unique<SubwordTokenizer>(std::move(parts));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseSentencePiece(absl::string_view text,
                                                              const std::string& name) {
  absl::StatusOr<SentencePieceModel> model = ParseSentencePieceModel(text);
  if (!model.ok()) return Annotate(model.status(), name);
  auto tokenizer = SentencePieceTokenizer::Make(*std::move(model), name);
  if (!tokenizer.ok()) return Annotate(tokenizer.status(), name);
  return tokenizer;
}

absl::StatusOr<std::string> ReadTokenizerFile(FileSystem& files, const std::string& path) {
  ASSIGN_OR_RETURN(const int64_t size, files.Size(path));
  if (size > kFileBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has ", size, " bytes: no tokenizer"));
  }
  ASSIGN_OR_RETURN(std::string text, files.Read(path));
  if (LooksLikeSentencePiece(text)) return text;
  const absl::string_view start = absl::StripLeadingAsciiWhitespace(text);
  if (!absl::StartsWith(start, "{")) return text;
  Json file = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  // What is no JSON is refused with the place when it is parsed.
  if (file.is_discarded() || file.contains("model")) return text;
  // vocab.json: the ids alone, with the merges in a file beside it.
  const std::string merges_path = path.substr(0, path.rfind('/') + 1) + "merges.txt";
  const absl::StatusOr<std::string> merges = files.Read(merges_path);
  if (!merges.ok()) {
    return Annotate(merges.status(),
                    absl::StrCat(path, " has no \"model\", so it is read as a vocabulary"));
  }
  Json list = Json::array();
  for (absl::string_view line : absl::StrSplit(*merges, '\n')) {
    line = absl::StripSuffix(line, "\r");
    if (!line.empty()) list.push_back(std::string(line));
  }
  Json built = {
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", std::move(file)}, {"merges", std::move(list)}}}};
  constexpr char kEndOfText[] = "<|endoftext|>";
  if (const auto id = built["model"]["vocab"].find(kEndOfText);
      id != built["model"]["vocab"].end()) {
    built["added_tokens"] =
        Json::array({{{"content", kEndOfText}, {"id", *id}, {"special", true}}});
  }
  return built.dump();
}

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTokenizer(absl::string_view text,
                                                          const std::string& name) {
  if (LooksLikeSentencePiece(text)) return ParseSentencePiece(text, name);
  return absl::StartsWith(absl::StripLeadingAsciiWhitespace(text), "{")
             ? ParseTokenizerJson(text, name)
             : ParseRanks(text, name);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(FileSystem& files,
                                                         const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadTokenizerFile(files, path));
  return ParseTokenizer(text, path);
}

absl::StatusOr<std::unique_ptr<Tokenizer>> OpenTokenizer(FileSystem& files,
                                                         const std::string& name) {
  if (name == "bytes") return MakeByteTokenizer();
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = LoadTokenizer(files, name);
  if (absl::IsNotFound(tokenizer.status()) && !files.Exists(name)) {
    return absl::NotFoundError(
        absl::StrCat("the tokenizer is neither bytes nor a file: ", tokenizer.status().message()));
  }
  return tokenizer;
}

}  // namespace muster::parallel
