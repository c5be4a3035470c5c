#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "base/check.h"
#include "nlohmann/json.hpp"
#include "parallel/data/json_field.h"
#include "parallel/data/tokenizer_file.h"
#include "tests/fuzz/targets/targets.h"

namespace muster::fuzz {
namespace {

// A tokenizer that was accepted encodes any text to ids of its vocabulary, which it decodes; and a
// text that is cut has the ids of the whole.
void Try(const parallel::Tokenizer& tokenizer, const std::string& text) {
  std::vector<int32_t> ids, parts;
  tokenizer.Encode(text, ids);
  CHECK_OK(tokenizer.Decode(ids).status());
  const auto encoder = tokenizer.NewEncoder();
  const size_t cut = tokenizer.LastCut(text);
  CHECK(cut == 0 || cut < text.size()) << cut;
  encoder->Encode(absl::string_view(text).substr(0, cut), /*begins=*/true, parts);
  encoder->Encode(absl::string_view(text).substr(cut), /*begins=*/cut == 0, parts);
  CHECK(parts == ids) << "cut at " << cut << " of " << text.size();
}

void TryAll(const absl::StatusOr<std::unique_ptr<parallel::Tokenizer>>& tokenizer,
            const std::string& bytes) {
  if (!tokenizer.ok()) {
    CHECK(absl::IsInvalidArgument(tokenizer.status()) || absl::IsUnimplemented(tokenizer.status()))
        << tokenizer.status();
    return;
  }
  Try(**tokenizer,
      "The quick brown fox  doesn't\n jump <|endoftext|> over 12 \xe4\xbb\x8a\xff x\n");
  Try(**tokenizer, bytes.substr(0, 4096));
}

}  // namespace

void TokenizerJson(const std::string& bytes) {
  TryAll(parallel::ParseTokenizerJson(bytes, "tokenizer.json"), bytes);
}

void TiktokenRanks(const std::string& bytes) {
  TryAll(parallel::ParseRanks(bytes, "ranks", parallel::SplitPattern::kCl100kRanks), bytes);
}

void SentencePieceModel(const std::string& bytes) {
  TryAll(parallel::ParseSentencePiece(bytes, "tokenizer.model"), bytes);
}

void JsonLine(const std::string& bytes) {
  using Json = nlohmann::json;
  std::string text;
  const absl::Status status = parallel::ReadStringField(bytes, "text", text);
  CHECK(status.ok() || absl::IsInvalidArgument(status)) << status;
  // What the parser of all JSON reads is read. It refuses more: halves of surrogate pairs, bytes
  // that are no UTF-8, numbers that fit no type. A zero byte behind a value ends its input.
  if (bytes.find('\0') != std::string::npos) return;
  const Json json = Json::parse(bytes, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("text") || !json["text"].is_string()) return;
  if (status.ok()) {
    CHECK(text == json["text"].get<std::string>()) << bytes;
  } else {
    CHECK(absl::StrContains(status.message(), "is no string") ||
          absl::StrContains(status.message(), "nested too deeply"))
        << status << ": " << bytes;
  }
}

}  // namespace muster::fuzz
