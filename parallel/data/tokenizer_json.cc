#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "parallel/data/byte_alphabet.h"
#include "parallel/data/byte_pair_encoder.h"
#include "parallel/data/character_map.h"
#include "parallel/data/subword_tokenizer.h"
#include "parallel/data/tokenizer_file.h"
#include "parallel/data/unicode.h"
#include "parallel/data/unigram_encoder.h"

namespace muster::parallel {
namespace {

using Json = nlohmann::json;

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
// The members of a Sequence. Each level of the file is a call, so that their number has a limit.
absl::StatusOr<const Json*> SequenceOf(const Json& part, const char* what, const char* name,
                                       int depth) {
  const Json* list = Member(part, name);
  if (list == nullptr || !list->is_array()) {
    return absl::InvalidArgumentError(absl::StrCat(what, " Sequence has no list of ", name));
  }
  if (depth > 16) {
    return absl::InvalidArgumentError(absl::StrCat(what, " Sequences are nested too deeply"));
  }
  return list;
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
    ASSIGN_OR_RETURN(const std::string version, Field<std::string>(file, "version", "1.0"));
    if (version != "1.0") return Unsupported(absl::StrCat("version ", version));
    if (const Json* part = Member(file, "normalizer")) RETURN_IF_ERROR(Normalizer(*part, 0));
    if (const Json* part = Member(file, "pre_tokenizer")) RETURN_IF_ERROR(PreTokenizer(*part, 0));
    const Json* model = Member(file, "model");
    if (model == nullptr) return absl::InvalidArgumentError("it has no \"model\"");
    RETURN_IF_ERROR(Model(*model));
    if (const Json* part = Member(file, "added_tokens")) RETURN_IF_ERROR(Added(*part));
    if (const Json* part = Member(file, "decoder")) RETURN_IF_ERROR(Decoder(*part, 0));
    if (const Json* part = Member(file, "post_processor")) {
      RETURN_IF_ERROR(PostProcessor(*part, 0));
    }
    const std::vector<int32_t> around[] = {parts_.boundaries.bos, parts_.boundaries.eos};
    auto tokenizer = std::make_unique<SubwordTokenizer>(std::move(parts_));
    for (const std::vector<int32_t>& ids : around) {
      for (int32_t id : ids) {
        if (id < tokenizer->vocab()) continue;
        return absl::InvalidArgumentError(absl::StrCat(
            "the post_processor has id ", id, ", outside the vocabulary of ", tokenizer->vocab()));
      }
    }
    return tokenizer;
  }

 private:
  absl::Status Normalizer(const Json& part, int depth) {
    ASSIGN_OR_RETURN(const std::string type, TypeOf(part, "the normalizer"));
    if (type == "Sequence") {
      ASSIGN_OR_RETURN(const Json* list, SequenceOf(part, "normalizer", "normalizers", depth));
      for (const Json& each : *list) RETURN_IF_ERROR(Normalizer(each, depth + 1));
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
      parts_.normalizers.emplace_back(SubwordTokenizerParts::Prepend{std::move(text)});
      return absl::OkStatus();
    }
    if (type == "Replace") {
      const Json* pattern = Member(part, "pattern");
      if (pattern != nullptr && pattern->is_object() && Member(*pattern, "Regex") != nullptr) {
        ASSIGN_OR_RETURN(const std::string regex, Field<std::string>(*pattern, "Regex", ""));
        if (regex != " {2,}") {
          return Unsupported(absl::StrCat("normalizer Replace of the regular expression ", regex));
        }
        ASSIGN_OR_RETURN(std::string to, Field<std::string>(part, "content", ""));
        parts_.normalizers.emplace_back(SubwordTokenizerParts::JoinSpaces{std::move(to)});
        return absl::OkStatus();
      }
      if (pattern == nullptr || !pattern->is_object() || Member(*pattern, "String") == nullptr) {
        return Unsupported("normalizer Replace with another pattern than a String");
      }
      ASSIGN_OR_RETURN(std::string from, Field<std::string>(*pattern, "String", ""));
      ASSIGN_OR_RETURN(std::string to, Field<std::string>(part, "content", ""));
      if (from.empty()) return absl::InvalidArgumentError("normalizer Replace replaces nothing");
      parts_.normalizers.emplace_back(
          SubwordTokenizerParts::Replace{std::move(from), std::move(to)});
      return absl::OkStatus();
    }
    if (type == "Strip") {
      SubwordTokenizerParts::Strip strip;
      ASSIGN_OR_RETURN(strip.left, Field(part, "strip_left", false));
      ASSIGN_OR_RETURN(strip.right, Field(part, "strip_right", false));
      parts_.normalizers.emplace_back(strip);
      return absl::OkStatus();
    }
    if (type == "Precompiled") {
      ASSIGN_OR_RETURN(const std::string base64,
                       Field<std::string>(part, "precompiled_charsmap", ""));
      std::string blob;
      if (!absl::Base64Unescape(base64, &blob)) {
        return absl::InvalidArgumentError("precompiled_charsmap is no base64");
      }
      ASSIGN_OR_RETURN(CharacterMap map, CharacterMap::Parse(blob));
      parts_.normalizers.emplace_back(std::move(map));
      return absl::OkStatus();
    }
    return Unsupported(absl::StrCat("normalizer ", type));
  }

  absl::Status PreTokenizer(const Json& part, int depth) {
    ASSIGN_OR_RETURN(const std::string type, TypeOf(part, "the pre_tokenizer"));
    if (type == "Sequence") {
      ASSIGN_OR_RETURN(const Json* list, SequenceOf(part, "pre_tokenizer", "pretokenizers", depth));
      for (const Json& each : *list) RETURN_IF_ERROR(PreTokenizer(each, depth + 1));
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
      parts_.splitters.emplace_back(SubwordTokenizerParts::Digits{individual});
      return absl::OkStatus();
    }
    if (type == "WhitespaceSplit") {
      parts_.splitters.emplace_back(SubwordTokenizerParts::WhiteSpace{});
      return absl::OkStatus();
    }
    if (type == "Metaspace") {
      ASSIGN_OR_RETURN(SubwordTokenizerParts::SpaceMarks marks, ReadMetaspace(part));
      parts_.splitters.emplace_back(std::move(marks));
      return absl::OkStatus();
    }
    if (type == "Split") {
      const Json* pattern = Member(part, "pattern");
      if (SplitsAtSpacesOnly(pattern) && SpacesAreReplaced()) return absl::OkStatus();
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

  static bool SplitsAtSpacesOnly(const Json* pattern) {
    return pattern != nullptr && *pattern == Json{{"String", " "}};
  }
  // The last normalizer leaves no space, so that nothing splits there.
  bool SpacesAreReplaced() const {
    if (parts_.normalizers.empty()) return false;
    const auto* last = std::get_if<SubwordTokenizerParts::Replace>(&parts_.normalizers.back());
    return last != nullptr && last->from == " " && !absl::StrContains(last->to, ' ');
  }

  // Of a pre_tokenizer or decoder.
  static absl::StatusOr<SubwordTokenizerParts::SpaceMarks> ReadMetaspace(const Json& part) {
    using Prepend = SubwordTokenizerParts::SpaceMarks::Prepend;
    SubwordTokenizerParts::SpaceMarks marks;
    ASSIGN_OR_RETURN(marks.mark, Field<std::string>(part, "replacement", marks.mark));
    if (marks.mark.empty() ||
        static_cast<size_t>(DecodeUtf8(marks.mark.data()).bytes) != marks.mark.size() ||
        marks.mark == " ") {
      return absl::InvalidArgumentError("Metaspace.replacement is no character");
    }
    ASSIGN_OR_RETURN(marks.split, Field(part, "split", true));
    ASSIGN_OR_RETURN(const bool prefix, Field(part, "add_prefix_space", true));
    ASSIGN_OR_RETURN(const std::string scheme,
                     Field<std::string>(part, "prepend_scheme", prefix ? "always" : "never"));
    for (const auto& [name, prepend] :
         {std::make_pair("always", Prepend::kAlways), std::make_pair("first", Prepend::kFirst),
          std::make_pair("never", Prepend::kNever)}) {
      if (scheme != name) continue;
      marks.prepend = prepend;
      return marks;
    }
    return Unsupported(absl::StrCat("Metaspace.prepend_scheme ", scheme));
  }

  // A list of tokens with their scores.
  absl::Status Unigram(const Json& model) {
    if (byte_level_) return Unsupported("model Unigram behind ByteLevel");
    const Json* vocab = Member(model, "vocab");
    const Json* unknown = Member(model, "unk_id");
    if (vocab == nullptr || !vocab->is_array()) {
      return absl::InvalidArgumentError("model.vocab of Unigram is no list");
    }
    if (unknown == nullptr) return Unsupported("model Unigram without unk_id");
    if (!unknown->is_number_unsigned() || unknown->get<uint64_t>() >= vocab->size()) {
      return absl::InvalidArgumentError(absl::StrCat("model.unk_id must be below ", vocab->size()));
    }
    std::vector<UnigramEncoder::Token> tokens;
    double lowest = std::numeric_limits<double>::infinity();
    for (const Json& each : *vocab) {
      const auto id = static_cast<int32_t>(tokens.size());
      if (!each.is_array() || each.size() != 2 || !each[0].is_string() || !each[1].is_number()) {
        return absl::InvalidArgumentError(
            absl::StrCat("model.vocab[", id, "] is no token and score"));
      }
      UnigramEncoder::Token token{each[0].get<std::string>(), each[1].get<double>()};
      lowest = std::min(lowest, token.score);
      const auto found = vocabulary_.find(token.text);
      // Of equal tokens the last is found in text; those before have no text.
      if (found != vocabulary_.end()) parts_.unreachable.emplace_back(token.text, found->second);
      vocabulary_[token.text] = id;
      tokens.push_back(std::move(token));
    }
    vocabulary_size_ = static_cast<int32_t>(tokens.size());
    UnigramEncoder::Options options;
    options.unknown = unknown->get<int32_t>();
    options.unknown_score = lowest - 10;
    ASSIGN_OR_RETURN(options.byte_fallback, Field(model, "byte_fallback", false));
    ASSIGN_OR_RETURN(parts_.encoder, UnigramEncoder::Make(std::move(tokens), options));
    return absl::OkStatus();
  }

  absl::Status Model(const Json& model) {
    if (!model.is_object()) return absl::InvalidArgumentError("\"model\" is no object");
    ASSIGN_OR_RETURN(const std::string type, Field<std::string>(model, "type", ""));
    if (type == "Unigram") return Unigram(model);
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
      if (!id.is_number_unsigned() || id.get<uint64_t>() > kIdMax) {
        return absl::InvalidArgumentError(
            absl::StrCat("model.vocab: the id of '", token, "' must be 0 to ", kIdMax));
      }
      vocabulary_[token] = id.get<int32_t>();
      // No text has a character outside the alphabet, so it never becomes such a token.
      std::optional<std::string> bytes = byte_level_ ? alphabet_.Bytes(token) : token;
      (bytes.has_value() ? tokens : parts_.unreachable)
          .emplace_back(bytes.value_or(token), id.get<int32_t>());
    }
    std::vector<std::pair<std::string, std::string>> merges;
    if (const Json* list = Member(model, "merges")) RETURN_IF_ERROR(Merges(*list, merges));
    BytePairEncoder::Options options;
    options.bytes = byte_level_;
    ASSIGN_OR_RETURN(options.byte_fallback, Field(model, "byte_fallback", false));
    ASSIGN_OR_RETURN(options.fuse_unknown, Field(model, "fuse_unk", false));
    ASSIGN_OR_RETURN(options.whole_pre_tokens_first, Field(model, "ignore_merges", false));
    ASSIGN_OR_RETURN(const std::string unknown, Field<std::string>(model, "unk_token", ""));
    if (!unknown.empty()) {
      const auto found = vocabulary_.find(unknown);
      if (found == vocabulary_.end()) {
        return absl::InvalidArgumentError(
            absl::StrCat("model.unk_token '", unknown, "' is not in model.vocab"));
      }
      options.unknown = found->second;
    }
    vocabulary_size_ = static_cast<int32_t>(vocabulary_.size());
    ASSIGN_OR_RETURN(BytePairEncoder encoder,
                     BytePairEncoder::Make(std::move(tokens), merges, options));
    parts_.encoder = std::make_unique<BytePairEncoder>(std::move(encoder));
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
      for (std::string* token : {&pair.first, &pair.second}) {
        if (byte_level_) *token = alphabet_.Bytes(*token).value_or(*token);
      }
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
      if (id == nullptr || token.content.empty()) {
        return absl::InvalidArgumentError(
            absl::StrCat("added_tokens[", i, "] needs an id and a content"));
      }
      ASSIGN_OR_RETURN(token.single_word, Field(each, "single_word", false));
      ASSIGN_OR_RETURN(token.strip_left, Field(each, "lstrip", false));
      ASSIGN_OR_RETURN(token.strip_right, Field(each, "rstrip", false));
      ASSIGN_OR_RETURN(token.normalized, Field(each, "normalized", false));
      if (!id->is_number_unsigned() || id->get<uint64_t>() > kIdMax) {
        return absl::InvalidArgumentError(
            absl::StrCat("added_tokens[", i, "]: the id must be 0 to ", kIdMax));
      }
      token.id = id->get<int32_t>();
      parts_.added.push_back(std::move(token));
    }
    GiveIds();
    return absl::OkStatus();
  }

  // A token of the vocabulary keeps its id there. Others follow behind the vocabulary in the order
  // of their ids in the file, which only says that order: tokenizers counts on from the size of the
  // vocabulary, or from the largest id that it has given.
  void GiveIds() {
    std::stable_sort(parts_.added.begin(), parts_.added.end(),
                     [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
    const int32_t behind = vocabulary_size_;
    int32_t largest = -1;
    absl::flat_hash_map<std::string, int32_t> given;
    for (AddedToken& token : parts_.added) {
      const auto found = vocabulary_.find(token.content);
      const auto again = given.find(token.content);
      if (found != vocabulary_.end()) {
        token.id = found->second;
      } else if (again != given.end()) {
        token.id = again->second;
      } else {
        token.id = std::max(behind, largest + 1);
      }
      given[token.content] = token.id;
      largest = std::max(largest, token.id);
    }
  }

  absl::Status Decoder(const Json& part, int depth) {
    ASSIGN_OR_RETURN(const std::string type, TypeOf(part, "the decoder"));
    if (type == "ByteLevel" && byte_level_) return absl::OkStatus();
    if (type == "Sequence") {
      ASSIGN_OR_RETURN(const Json* list, SequenceOf(part, "decoder", "decoders", depth));
      for (const Json& each : *list) RETURN_IF_ERROR(Decoder(each, depth + 1));
      return absl::OkStatus();
    }
    if (type == "ByteFallback" || type == "Fuse") return absl::OkStatus();
    if (type == "Metaspace") {
      ASSIGN_OR_RETURN(const SubwordTokenizerParts::SpaceMarks marks, ReadMetaspace(part));
      parts_.space = marks.mark;
      parts_.strip_first_space =
          marks.prepend != SubwordTokenizerParts::SpaceMarks::Prepend::kNever;
      return absl::OkStatus();
    }
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

  // Reads which tokens stand around a single text.
  absl::Status PostProcessor(const Json& part, int depth) {
    ASSIGN_OR_RETURN(const std::string type, TypeOf(part, "the post_processor"));
    if (type == "ByteLevel") return absl::OkStatus();
    if (type == "Sequence") {
      ASSIGN_OR_RETURN(const Json* list, SequenceOf(part, "post_processor", "processors", depth));
      for (const Json& each : *list) RETURN_IF_ERROR(PostProcessor(each, depth + 1));
      return absl::OkStatus();
    }
    BoundaryTokens& ids = parts_.boundaries;
    if (type == "RobertaProcessing" || type == "BertProcessing") {
      for (const auto& [name, list] :
           {std::make_pair("cls", &ids.bos), std::make_pair("sep", &ids.eos)}) {
        const Json* pair = Member(part, name);
        if (pair == nullptr || !pair->is_array() || pair->size() != 2) {
          return absl::InvalidArgumentError(absl::StrCat("post_processor.", name, " is no pair"));
        }
        RETURN_IF_ERROR(BoundaryId((*pair)[1], *list));
      }
      return absl::OkStatus();
    }
    if (type != "TemplateProcessing") return Unsupported(absl::StrCat("post_processor ", type));
    const Json* single = Member(part, "single");
    const Json* specials = Member(part, "special_tokens");
    if (single == nullptr || !single->is_array()) {
      return absl::InvalidArgumentError("post_processor.single is no list");
    }
    bool behind = false;
    for (const Json& each : *single) {
      const Json* special = each.is_object() ? Member(each, "SpecialToken") : nullptr;
      if (special == nullptr) {
        behind = true;
        continue;
      }
      std::string name;
      if (special->is_object()) {
        ASSIGN_OR_RETURN(name, Field<std::string>(*special, "id", ""));
      }
      const Json* token =
          specials == nullptr || !specials->is_object() ? nullptr : Member(*specials, name.c_str());
      const Json* list = token == nullptr || !token->is_object() ? nullptr : Member(*token, "ids");
      if (list == nullptr || !list->is_array()) {
        return absl::InvalidArgumentError(
            absl::StrCat("post_processor.special_tokens has no ids of '", name, "'"));
      }
      for (const Json& id : *list) RETURN_IF_ERROR(BoundaryId(id, behind ? ids.eos : ids.bos));
    }
    return absl::OkStatus();
  }

  static absl::Status BoundaryId(const Json& id, std::vector<int32_t>& ids) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > kIdMax) {
      return absl::InvalidArgumentError("an id of the post_processor is none");
    }
    ids.push_back(id.get<int32_t>());
    return absl::OkStatus();
  }

  const ByteAlphabet& alphabet_ = ByteAlphabet::Get();
  SubwordTokenizerParts parts_;
  bool byte_level_ = false;
  absl::flat_hash_map<std::string, int32_t> vocabulary_;  // as written
  int32_t vocabulary_size_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTokenizerJson(absl::string_view text,
                                                              const std::string& name) {
  Json file;
  try {
    file = Json::parse(text.begin(), text.end());
  } catch (const Json::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 3, column 7: ..."
    const absl::string_view what = error.what();
    return absl::InvalidArgumentError(absl::StrCat(
        name, " is no JSON: ", what.substr(std::min(what.find(']') + 2, what.size()))));
  }
  auto tokenizer = Reader(name).Read(file);
  if (!tokenizer.ok()) return Annotate(tokenizer.status(), name);
  return tokenizer;
}

}  // namespace muster::parallel
