#include "parallel/data/tokenizer_file.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "parallel/data/bpe_tokenizer.h"

namespace muster::parallel {
namespace {

using Json = nlohmann::json;

constexpr int64_t kFileBytesMax = int64_t{256} << 20;  // a larger one is no tokenizer

// GPT-2's alphabet: printable bytes stand for themselves, the 68 others are U+0100 and on.
class ByteAlphabet {
 public:
  ByteAlphabet() {
    uint32_t next = 0x100;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const bool printable =
          (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
      const uint32_t character = printable ? byte : next++;
      byte_of_[character] = static_cast<int16_t>(byte);
    }
  }
  // The bytes that `token` is written for; nullopt where a character stands for none.
  std::optional<std::string> Bytes(absl::string_view token) const {
    std::string bytes;
    while (!token.empty()) {
      const CodePoint c = DecodeUtf8(token.data());
      if (c.value >= byte_of_.size() || byte_of_[c.value] < 0) return std::nullopt;
      bytes.push_back(static_cast<char>(byte_of_[c.value]));
      token.remove_prefix(static_cast<size_t>(c.bytes));
    }
    return bytes;
  }

 private:
  static constexpr std::array<int16_t, 0x144> None() {
    std::array<int16_t, 0x144> none{};
    for (int16_t& byte : none) byte = -1;
    return none;
  }
  std::array<int16_t, 0x144> byte_of_ = None();
};

absl::Status Unsupported(const std::string& what) {
  return absl::UnimplementedError(absl::StrCat(what, " is not supported"));
}

const Json* Member(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}
// A field of the type of `otherwise`, which is its value where it is missing or null.
template <typename T>
absl::StatusOr<T> Field(const Json& object, const char* name, T otherwise) {
  const Json* value = Member(object, name);
  if (value == nullptr) return otherwise;
  if constexpr (std::is_same_v<T, bool>) {
    if (value->is_boolean()) return value->get<bool>();
  } else {
    if (value->is_string()) return value->get<std::string>();
  }
  return absl::InvalidArgumentError(absl::StrCat("\"", name, "\" has the wrong type"));
}
absl::StatusOr<std::string> TypeOf(const Json& object, const char* what) {
  if (!object.is_object()) return absl::InvalidArgumentError(absl::StrCat(what, " is no object"));
  ASSIGN_OR_RETURN(std::string type, Field<std::string>(object, "type", ""));
  if (type.empty()) return absl::InvalidArgumentError(absl::StrCat(what, " has no type"));
  return type;
}

// Builds the parts of a tokenizer.json, section by section.
class Reader {
 public:
  explicit Reader(std::string name) { parts_.name = std::move(name); }

  absl::StatusOr<std::unique_ptr<Tokenizer>> Read(const Json& file) {
    if (!file.is_object()) return absl::InvalidArgumentError("it is no JSON object");
    if (const Json* part = Member(file, "normalizer")) RETURN_IF_ERROR(Normalizer(*part));
    if (const Json* part = Member(file, "pre_tokenizer")) RETURN_IF_ERROR(PreTokenizer(*part));
    const Json* model = Member(file, "model");
    if (model == nullptr) return absl::InvalidArgumentError("it has no \"model\"");
    RETURN_IF_ERROR(Model(*model));
    if (const Json* part = Member(file, "added_tokens")) RETURN_IF_ERROR(Added(*part));
    if (const Json* part = Member(file, "decoder")) RETURN_IF_ERROR(Decoder(*part));
    return std::make_unique<BpeTokenizer>(std::move(parts_));
  }

 private:
  absl::Status Normalizer(const Json& part) {
    ASSIGN_OR_RETURN(const std::string type, TypeOf(part, "the normalizer"));
    if (type == "Sequence") {
      const Json* list = Member(part, "normalizers");
      if (list == nullptr || !list->is_array()) {
        return absl::InvalidArgumentError("normalizer Sequence has no list of normalizers");
      }
      for (const Json& each : *list) RETURN_IF_ERROR(Normalizer(each));
      return absl::OkStatus();
    }
    for (const auto& [name, form] :
         {std::make_pair("NFC", NormalForm::kNfc), std::make_pair("NFD", NormalForm::kNfd),
          std::make_pair("NFKC", NormalForm::kNfkc), std::make_pair("NFKD", NormalForm::kNfkd)}) {
      if (type != name) continue;
      parts_.normalizers.emplace_back(form);
      return absl::OkStatus();
    }
    if (type == "Prepend") {
      ASSIGN_OR_RETURN(std::string text, Field<std::string>(part, "prepend", ""));
      parts_.normalizers.emplace_back(BpeTokenizerParts::Prepend{std::move(text)});
      return absl::OkStatus();
    }
    if (type == "Replace") {
      const Json* pattern = Member(part, "pattern");
      if (pattern == nullptr || !pattern->is_object() || Member(*pattern, "String") == nullptr) {
        return Unsupported("normalizer Replace with another pattern than a String");
      }
      ASSIGN_OR_RETURN(std::string from, Field<std::string>(*pattern, "String", ""));
      ASSIGN_OR_RETURN(std::string to, Field<std::string>(part, "content", ""));
      if (from.empty()) return absl::InvalidArgumentError("normalizer Replace replaces nothing");
      parts_.normalizers.emplace_back(BpeTokenizerParts::Replace{std::move(from), std::move(to)});
      return absl::OkStatus();
    }
    return Unsupported(absl::StrCat("normalizer ", type));
  }

  absl::Status PreTokenizer(const Json& part) {
    ASSIGN_OR_RETURN(const std::string type, TypeOf(part, "the pre_tokenizer"));
    if (type == "Sequence") {
      const Json* list = Member(part, "pretokenizers");
      if (list == nullptr || !list->is_array()) {
        return absl::InvalidArgumentError("pre_tokenizer Sequence has no list of pretokenizers");
      }
      for (const Json& each : *list) RETURN_IF_ERROR(PreTokenizer(each));
      return absl::OkStatus();
    }
    if (byte_level_) return Unsupported(absl::StrCat("pre_tokenizer ", type, " behind ByteLevel"));
    if (type == "ByteLevel") {
      byte_level_ = true;
      ASSIGN_OR_RETURN(const bool prefix, Field(part, "add_prefix_space", true));
      ASSIGN_OR_RETURN(const bool use_regex, Field(part, "use_regex", true));
      if (prefix && !parts_.splitters.empty()) {
        return Unsupported("ByteLevel with add_prefix_space behind another pre_tokenizer");
      }
      parts_.prefix_space = prefix;
      if (use_regex) parts_.splitters.emplace_back(SplitPattern::kGpt2);
      return absl::OkStatus();
    }
    if (type == "Digits") {
      ASSIGN_OR_RETURN(const bool individual, Field(part, "individual_digits", false));
      parts_.splitters.emplace_back(BpeTokenizerParts::Digits{individual});
      return absl::OkStatus();
    }
    if (type == "Split") {
      const Json* pattern = Member(part, "pattern");
      if (pattern == nullptr || !pattern->is_object() || Member(*pattern, "Regex") == nullptr) {
        return Unsupported("pre_tokenizer Split with another pattern than a Regex");
      }
      ASSIGN_OR_RETURN(const std::string regex, Field<std::string>(*pattern, "Regex", ""));
      ASSIGN_OR_RETURN(const std::string behavior, Field<std::string>(part, "behavior", ""));
      ASSIGN_OR_RETURN(const bool invert, Field(part, "invert", false));
      const std::optional<SplitPattern> known = PatternOfRegex(regex);
      if (!known.has_value()) return Unsupported(absl::StrCat("the regular expression ", regex));
      // The known patterns match all of a text, so nothing lies between two matches.
      if (behavior != (invert ? "Removed" : "Isolated")) {
        return Unsupported(absl::StrCat("pre_tokenizer Split with behavior ", behavior));
      }
      parts_.splitters.emplace_back(*known);
      return absl::OkStatus();
    }
    return Unsupported(absl::StrCat("pre_tokenizer ", type));
  }

  absl::StatusOr<std::string> Token(const std::string& written) const {
    if (!byte_level_) return written;
    std::optional<std::string> bytes = alphabet_.Bytes(written);
    if (!bytes.has_value()) return written;  // of an added token
    return *std::move(bytes);
  }

  absl::Status Model(const Json& model) {
    if (!model.is_object()) return absl::InvalidArgumentError("\"model\" is no object");
    ASSIGN_OR_RETURN(const std::string type, Field<std::string>(model, "type", ""));
    if (type != "BPE" && !(type.empty() && Member(model, "merges") != nullptr)) {
      return Unsupported(absl::StrCat("model ", type.empty() ? "without a type" : type));
    }
    for (const char* field : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      ASSIGN_OR_RETURN(const std::string value, Field<std::string>(model, field, ""));
      if (!value.empty()) return Unsupported(absl::StrCat("model.", field));
    }
    if (const Json* dropout = Member(model, "dropout");
        dropout != nullptr && *dropout != Json(0.0)) {
      return Unsupported("model.dropout");
    }
    const Json* vocab = Member(model, "vocab");
    if (vocab == nullptr || !vocab->is_object()) {
      return absl::InvalidArgumentError("model.vocab is no object");
    }
    std::vector<std::pair<std::string, int32_t>> tokens;
    for (const auto& [token, id] : vocab->items()) {
      if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > INT32_MAX) {
        return absl::InvalidArgumentError(absl::StrCat("model.vocab: the id of '", token, "'"));
      }
      ASSIGN_OR_RETURN(std::string bytes, Token(token));
      tokens.emplace_back(std::move(bytes), id.get<int32_t>());
      vocabulary_[token] = id.get<int32_t>();
    }
    std::vector<std::pair<std::string, std::string>> merges;
    if (const Json* list = Member(model, "merges")) RETURN_IF_ERROR(Merges(*list, merges));
    BytePairEncoder::Options options;
    options.bytes = byte_level_;
    ASSIGN_OR_RETURN(options.byte_fallback, Field(model, "byte_fallback", false));
    ASSIGN_OR_RETURN(options.fuse_unknown, Field(model, "fuse_unk", false));
    ASSIGN_OR_RETURN(options.whole_pieces_first, Field(model, "ignore_merges", false));
    ASSIGN_OR_RETURN(const std::string unknown, Field<std::string>(model, "unk_token", ""));
    if (!unknown.empty()) {
      const auto found = vocabulary_.find(unknown);
      if (found == vocabulary_.end()) {
        return absl::InvalidArgumentError(
            absl::StrCat("model.unk_token '", unknown, "' is not in model.vocab"));
      }
      options.unknown = found->second;
    }
    ASSIGN_OR_RETURN(parts_.encoder, BytePairEncoder::Make(std::move(tokens), merges, options));
    return absl::OkStatus();
  }

  absl::Status Merges(const Json& list, std::vector<std::pair<std::string, std::string>>& merges) {
    if (!list.is_array()) return absl::InvalidArgumentError("model.merges is no list");
    for (size_t i = 0; i < list.size(); ++i) {
      const Json& merge = list[i];
      std::pair<std::string, std::string> pair;
      if (merge.is_string()) {
        const std::string text = merge.get<std::string>();
        if (absl::StartsWith(text, "#version")) continue;
        pair = absl::StrSplit(text, absl::MaxSplits(' ', 1));
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
                 merge[1].is_string()) {
        pair = {merge[0].get<std::string>(), merge[1].get<std::string>()};
      } else {
        return absl::InvalidArgumentError(absl::StrCat("model.merges[", i, "] is no pair"));
      }
      ASSIGN_OR_RETURN(pair.first, Token(pair.first));
      ASSIGN_OR_RETURN(pair.second, Token(pair.second));
      merges.push_back(std::move(pair));
    }
    return absl::OkStatus();
  }

  absl::Status Added(const Json& list) {
    if (!list.is_array()) return absl::InvalidArgumentError("added_tokens is no list");
    for (size_t i = 0; i < list.size(); ++i) {
      const Json& each = list[i];
      const Json* id = each.is_object() ? Member(each, "id") : nullptr;
      AddedToken token;
      if (each.is_object()) {
        ASSIGN_OR_RETURN(token.content, Field<std::string>(each, "content", ""));
      }
      if (id == nullptr || !id->is_number_integer() || token.content.empty()) {
        return absl::InvalidArgumentError(
            absl::StrCat("added_tokens[", i, "] needs an id and a content"));
      }
      // A token of the vocabulary keeps its id, whatever the list says.
      const auto found = vocabulary_.find(token.content);
      token.id = found == vocabulary_.end() ? id->get<int32_t>() : found->second;
      ASSIGN_OR_RETURN(token.single_word, Field(each, "single_word", false));
      ASSIGN_OR_RETURN(token.strip_left, Field(each, "lstrip", false));
      ASSIGN_OR_RETURN(token.strip_right, Field(each, "rstrip", false));
      ASSIGN_OR_RETURN(token.normalized, Field(each, "normalized", false));
      ASSIGN_OR_RETURN(token.special, Field(each, "special", false));
      if (token.id < 0) {
        return absl::InvalidArgumentError(absl::StrCat("added_tokens[", i, "] has id ", token.id));
      }
      parts_.added.push_back(std::move(token));
    }
    return absl::OkStatus();
  }

  absl::Status Decoder(const Json& part) {
    ASSIGN_OR_RETURN(const std::string type, TypeOf(part, "the decoder"));
    if (type == "ByteLevel" && byte_level_) return absl::OkStatus();
    if (type == "Sequence") {
      const Json* list = Member(part, "decoders");
      if (list == nullptr || !list->is_array()) {
        return absl::InvalidArgumentError("decoder Sequence has no list of decoders");
      }
      for (const Json& each : *list) RETURN_IF_ERROR(Decoder(each));
      return absl::OkStatus();
    }
    if (type == "ByteFallback" || type == "Fuse") return absl::OkStatus();
    if (type == "Replace") {
      const Json* pattern = Member(part, "pattern");
      ASSIGN_OR_RETURN(const std::string to, Field<std::string>(part, "content", ""));
      if (pattern != nullptr && pattern->is_object() && to == " ") {
        ASSIGN_OR_RETURN(parts_.space, Field<std::string>(*pattern, "String", ""));
        if (!parts_.space.empty()) return absl::OkStatus();
      }
      return Unsupported("decoder Replace of this form");
    }
    if (type == "Strip") {
      ASSIGN_OR_RETURN(const std::string content, Field<std::string>(part, "content", ""));
      const Json* start = Member(part, "start");
      const Json* stop = Member(part, "stop");
      if (content != " " || start == nullptr || *start != Json(1) ||
          (stop != nullptr && *stop != Json(0))) {
        return Unsupported("decoder Strip of this form");
      }
      parts_.strip_first_space = true;
      return absl::OkStatus();
    }
    return Unsupported(absl::StrCat("decoder ", type));
  }

  const ByteAlphabet alphabet_;
  BpeTokenizerParts parts_;
  bool byte_level_ = false;
  absl::flat_hash_map<std::string, int32_t> vocabulary_;  // as written
};

// Lines of base64 and rank.
absl::StatusOr<std::unique_ptr<Tokenizer>> ReadRanks(absl::string_view text,
                                                     const std::string& name) {
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
  BpeTokenizerParts parts;
  parts.name = name;
  // The file does not say how text is split; the published ones are told by their size.
  switch (tokens.size()) {
    case 50256:  // r50k_base, GPT-2
    case 50280:  // p50k_base
      parts.splitters.emplace_back(SplitPattern::kGpt2);
      break;
    case 100256:  // cl100k_base
    case 128000:  // Llama 3
      parts.splitters.emplace_back(SplitPattern::kCl100k);
      break;
    case 151643:  // Qwen
      parts.splitters.emplace_back(SplitPattern::kQwen2);
      break;
    case 199998:  // o200k_base
      parts.splitters.emplace_back(SplitPattern::kO200k);
      break;
    default:
      return absl::UnimplementedError(absl::StrCat(
          name, ": a list of ", tokens.size(),
          " ranks is none whose way to split text is known (50256, 50280, 100256, 128000, 151643 "
          "or 199998); a tokenizer.json says it"));
  }
  auto encoder = BytePairEncoder::MakeRanked(std::move(tokens));
  if (!encoder.ok()) return Annotate(encoder.status(), name);
  parts.encoder = *std::move(encoder);
  return std::make_unique<BpeTokenizer>(std::move(parts));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTokenizerJson(absl::string_view text,
                                                              const std::string& name) {
  const Json file = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (file.is_discarded()) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is no JSON"));
  }
  auto tokenizer = Reader(name).Read(file);
  if (!tokenizer.ok()) return Annotate(tokenizer.status(), name);
  return tokenizer;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadTokenizer(FileSystem& files,
                                                         const std::string& path) {
  ASSIGN_OR_RETURN(const int64_t size, files.Size(path));
  if (size > kFileBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(path, " has ", size, " bytes: no tokenizer"));
  }
  ASSIGN_OR_RETURN(const std::string text, files.Read(path));
  const absl::string_view start = absl::StripLeadingAsciiWhitespace(text);
  if (!absl::StartsWith(start, "{")) return ReadRanks(text, path);
  Json file = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (file.is_discarded()) return absl::InvalidArgumentError(absl::StrCat(path, " is no JSON"));
  if (file.contains("model")) return ParseTokenizerJson(text, path);
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
  auto tokenizer = Reader(path).Read(built);
  if (!tokenizer.ok()) return Annotate(tokenizer.status(), path);
  return tokenizer;
}

}  // namespace muster::parallel
