#include "parallel/data/bpe_tokenizer.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/check.h"

namespace muster::parallel {
namespace {

constexpr absl::string_view kSpaceMark = "\xe2\x96\x81";  // U+2581

// The byte of "<0xE2>", or -1.
int FallbackByte(absl::string_view token) {
  uint32_t byte = 0;
  if (token.size() != 6 || !absl::StartsWith(token, "<0x") || token[5] != '>') return -1;
  return absl::SimpleHexAtoi(token.substr(3, 2), &byte) ? static_cast<int>(byte) : -1;
}

// Where the first run of space marks begins that has something in front of it, or npos.
size_t NextWord(absl::string_view text) {
  size_t at = 0;
  while (absl::StartsWith(text.substr(at), kSpaceMark)) at += kSpaceMark.size();
  return text.find(kSpaceMark, at);
}

}  // namespace

class BpeTokenizer::CachingEncoder : public Tokenizer::Encoder {
 public:
  explicit CachingEncoder(const BpeTokenizer& tokenizer) : tokenizer_(tokenizer) {}
  void Encode(absl::string_view text, bool begins, std::vector<int32_t>& out) override {
    tokenizer_.Encode(text, begins, {&cache_, out});
  }

 private:
  const BpeTokenizer& tokenizer_;
  PreTokenCache cache_;
};

BpeTokenizer::BpeTokenizer(BpeTokenizerParts parts) : parts_(std::move(parts)) {
  int32_t most = -1;
  for (const auto& [token, id] : parts_.encoder.ids()) most = std::max(most, id);
  for (const auto& [token, id] : parts_.unreachable) most = std::max(most, id);
  for (const AddedToken& token : parts_.added) most = std::max(most, token.id);
  tokens_.resize(static_cast<size_t>(most) + 1);
  added_.resize(tokens_.size());
  for (const auto& [token, id] : parts_.encoder.ids()) tokens_[static_cast<size_t>(id)] = token;
  for (const auto& [token, id] : parts_.unreachable) tokens_[static_cast<size_t>(id)] = token;
  std::vector<AddedToken> raw, normalized;
  for (const AddedToken& token : parts_.added) {
    tokens_[static_cast<size_t>(token.id)] = token.content;
    added_[static_cast<size_t>(token.id)] = true;
    if (token.in_text) (token.normalized ? normalized : raw).push_back(token);
  }
  raw_ = AddedTokens(std::move(raw));
  normalized_ = AddedTokens(std::move(normalized));
  FindCuts();
}

void BpeTokenizer::FindCuts() {
  bool split = false;
  for (const BpeTokenizerParts::Splitter& splitter : parts_.splitters) {
    const auto* pattern = std::get_if<SplitPattern>(&splitter);
    split = split || (pattern != nullptr && *pattern != SplitPattern::kWhole);
  }
  bool marks = false;  // every space becomes a space mark
  bool others = false;
  for (const BpeTokenizerParts::Normalizer& normalizer : parts_.normalizers) {
    prepends_ = prepends_ || std::holds_alternative<BpeTokenizerParts::Prepend>(normalizer);
    const auto* replace = std::get_if<BpeTokenizerParts::Replace>(&normalizer);
    if (replace == nullptr) continue;
    if (replace->from == " " && replace->to == kSpaceMark) {
      marks = true;
    } else {
      others = true;
    }
  }
  if (parts_.splitters.empty() && !parts_.encoder.options().bytes &&
      !parts_.encoder.options().whole_pre_tokens_first && parts_.encoder.IdOf(kSpaceMark) >= 0) {
    words_ = true;
    for (const auto& [token, id] : parts_.encoder.ids()) {
      words_ = words_ && NextWord(token) == absl::string_view::npos;
    }
  }
  cuts_at_spaces_ = !others && (split ? !marks : words_ && marks);
  cuts_at_lines_ = cuts_at_spaces_ && split;
  // A cut must not separate a token from the white space that it takes with it, nor cut a token.
  for (const AddedToken& token : parts_.added) {
    if (!token.in_text) continue;
    if (token.strip_right || absl::StrContains(token.content, ' ')) cuts_at_spaces_ = false;
    if (token.strip_left || token.strip_right || absl::StrContains(token.content, '\n')) {
      cuts_at_lines_ = false;
    }
  }
  cuts_at_lines_ = cuts_at_lines_ && cuts_at_spaces_;
}

size_t BpeTokenizer::LastCut(absl::string_view text) const {
  if (!cuts_at_spaces_) return 0;
  // Behind an added token a text begins anew and gets its prefix, which a continuation does not.
  const auto begins_anew = [this](absl::string_view before) {
    for (const AddedToken& token : parts_.added) {
      if (token.in_text && absl::EndsWith(before, token.content)) return true;
    }
    return false;
  };
  size_t cut = parallel::LastCut(text, cuts_at_lines_);
  while (prepends_ && cut > 0 && begins_anew(text.substr(0, cut))) {
    cut = parallel::LastCut(text.substr(0, cut), cuts_at_lines_);
  }
  return cut;
}

std::unique_ptr<Tokenizer::Encoder> BpeTokenizer::NewEncoder() const {
  return std::make_unique<CachingEncoder>(*this);
}

std::optional<int32_t> BpeTokenizer::IdOf(absl::string_view token) const {
  for (const AddedToken& added : parts_.added) {
    if (added.content == token) return added.id;
  }
  const int32_t id = parts_.encoder.IdOf(token);
  return id < 0 ? std::nullopt : std::optional<int32_t>(id);
}

void BpeTokenizer::Encode(absl::string_view text, std::vector<int32_t>& out) const {
  Encode(text, /*begins=*/true, {nullptr, out});
}

void BpeTokenizer::Encode(absl::string_view text, bool begins, const Run& run) const {
  std::string valid;
  if (!IsValidUtf8(text)) {
    valid = ToValidUtf8(text);
    text = valid;
  }
  raw_.ForEach(
      text,
      [&](size_t begin, size_t end) {
        EncodeRest(text.substr(begin, end - begin), begins || begin > 0, run);
      },
      [&](int32_t id) { run.out.push_back(id); });
}

void BpeTokenizer::EncodeRest(absl::string_view text, bool begins, const Run& run) const {
  std::string normal;
  for (const BpeTokenizerParts::Normalizer& normalizer : parts_.normalizers) {
    if (const auto* form = std::get_if<NormalForm>(&normalizer)) {
      absl::StatusOr<std::string> made = Normalize(text, *form);
      CHECK_OK(made);  // it is valid UTF-8
      normal = *std::move(made);
    } else if (const auto* prepend = std::get_if<BpeTokenizerParts::Prepend>(&normalizer)) {
      normal = absl::StrCat(begins ? prepend->text : "", text);
    } else {
      const auto& replace = std::get<BpeTokenizerParts::Replace>(normalizer);
      normal = absl::StrReplaceAll(text, {{replace.from, replace.to}});
    }
    text = normal;
  }
  normalized_.ForEach(
      text,
      [&](size_t begin, size_t end) {
        EncodeNormalized(text.substr(begin, end - begin), begins || begin > 0, run);
      },
      [&](int32_t id) { run.out.push_back(id); });
}

void BpeTokenizer::EncodeNormalized(absl::string_view text, bool begins, const Run& run) const {
  if (parts_.prefix_space && begins && text[0] != ' ') {
    return Split(absl::StrCat(" ", text), 0, run);
  }
  if (!words_) return Split(text, 0, run);
  while (!text.empty()) {
    const size_t bytes = std::min(NextWord(text), text.size());
    EncodePreToken(text.substr(0, bytes), run);
    text.remove_prefix(bytes);
  }
}

void BpeTokenizer::EncodePreToken(absl::string_view pre_token, const Run& run) const {
  if (run.cache == nullptr) return parts_.encoder.Encode(pre_token, run.out);
  run.cache->Encode(parts_.encoder, pre_token, run.out);
}

void BpeTokenizer::Split(absl::string_view text, size_t splitter, const Run& run) const {
  if (splitter == parts_.splitters.size()) return EncodePreToken(text, run);
  const BpeTokenizerParts::Splitter& how = parts_.splitters[splitter];
  const auto* digits = std::get_if<BpeTokenizerParts::Digits>(&how);
  while (!text.empty()) {
    size_t bytes = 0;
    if (digits == nullptr) {
      bytes = NextPreToken(std::get<SplitPattern>(how), text);
    } else {
      const auto number = [text](size_t at) {
        return (CharClasses::Get().Of(DecodeUtf8(text.data() + at).value) & kNumber) != 0;
      };
      const bool first = number(0);
      do bytes += static_cast<size_t>(DecodeUtf8(text.data() + bytes).bytes);
      while (bytes < text.size() && number(bytes) == first && !(first && digits->individual));
    }
    Split(text.substr(0, bytes), splitter + 1, run);
    text.remove_prefix(bytes);
  }
}

absl::StatusOr<std::string> BpeTokenizer::Decode(absl::Span<const int32_t> tokens) const {
  std::string text;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const int32_t id = tokens[i];
    if (id < 0 || static_cast<size_t>(id) >= tokens_.size()) {
      return absl::InvalidArgumentError(absl::StrCat("token ", id, " at position ", i,
                                                     " is not one of ", parts_.name, ", which has ",
                                                     tokens_.size()));
    }
    const std::string& token = tokens_[static_cast<size_t>(id)];
    if (parts_.space.empty() || added_[static_cast<size_t>(id)]) {
      text += token;
    } else if (const int byte = FallbackByte(token); byte >= 0) {
      text.push_back(static_cast<char>(byte));
    } else {
      text += absl::StrReplaceAll(token, {{parts_.space, " "}});
    }
  }
  if (parts_.strip_first_space && !text.empty() && text[0] == ' ') text.erase(0, 1);
  return text;
}

}  // namespace muster::parallel
