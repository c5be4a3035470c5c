#include "parallel/data/subword_tokenizer.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/check.h"

namespace muster::parallel {
namespace {

// The byte of "<0xE2>", or -1.
int FallbackByte(absl::string_view token) {
  uint32_t byte = 0;
  if (token.size() != 6 || !absl::StartsWith(token, "<0x") || token[5] != '>') return -1;
  return absl::SimpleHexAtoi(token.substr(3, 2), &byte) ? static_cast<int>(byte) : -1;
}

// As tokenizers does it, grapheme by grapheme: a short one becomes the replacement of the shortest
// string that it begins with, others are looked up code point by code point.
std::string Replaced(absl::string_view text, const CharacterMap& map) {
  constexpr size_t kShortMax = 5;  // bytes
  std::string out;
  out.reserve(text.size());
  const auto append = [&](absl::string_view part) {
    const CharacterMap::Match match = map.Shortest(part);
    if (match.bytes == 0) return false;
    out.append(match.replacement.data(), match.replacement.size());
    return true;
  };
  while (!text.empty()) {
    // Most text is ASCII, where a grapheme is a character but for CR LF.
    const bool ascii = absl::ascii_isprint(static_cast<unsigned char>(text[0])) &&
                       (text.size() == 1 || static_cast<uint8_t>(text[1]) < 0x80);
    absl::string_view grapheme = text.substr(0, ascii ? 1 : FirstGrapheme(text));
    text.remove_prefix(grapheme.size());
    if (grapheme.size() <= kShortMax && append(grapheme)) continue;
    while (!grapheme.empty()) {
      const absl::string_view point =
          grapheme.substr(0, static_cast<size_t>(DecodeUtf8(grapheme.data()).bytes));
      if (!append(point)) out.append(point.data(), point.size());
      grapheme.remove_prefix(point.size());
    }
  }
  // A damaged map gives any bytes.
  return IsValidUtf8(out) ? out : ToValidUtf8(out);
}

std::string Joined(absl::string_view text, const std::string& to) {
  std::string out;
  while (!text.empty()) {
    const size_t begin = std::min(text.find("  "), text.size());
    out.append(text.data(), begin);
    text.remove_prefix(begin);
    if (text.empty()) break;
    out += to;
    text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  }
  return out;
}

absl::string_view Stripped(absl::string_view text, bool left, bool right) {
  const auto space = [](absl::string_view at) {
    return (CharClasses::Get().Of(DecodeUtf8(at.data()).value) & kSpace) != 0;
  };
  while (left && !text.empty() && space(text)) {
    text.remove_prefix(static_cast<size_t>(DecodeUtf8(text.data()).bytes));
  }
  while (right && !text.empty()) {
    size_t last = text.size() - 1;
    while (last > 0 && (static_cast<uint8_t>(text[last]) & 0xc0) == 0x80) --last;
    if (!space(text.substr(last))) break;
    text.remove_suffix(text.size() - last);
  }
  return text;
}

}  // namespace

class SubwordTokenizer::CachingEncoder : public Tokenizer::Encoder {
 public:
  explicit CachingEncoder(const SubwordTokenizer& tokenizer) : tokenizer_(tokenizer) {}
  void Encode(absl::string_view text, bool begins, std::vector<int32_t>& out) override {
    tokenizer_.Encode(text, begins, {&cache_, out});
  }

 private:
  const SubwordTokenizer& tokenizer_;
  PreTokenCache cache_;
};

SubwordTokenizer::SubwordTokenizer(SubwordTokenizerParts parts) : parts_(std::move(parts)) {
  int32_t most = -1;
  for (const auto& [token, id] : parts_.encoder->ids()) most = std::max(most, id);
  for (const auto& [token, id] : parts_.unreachable) most = std::max(most, id);
  for (const AddedToken& token : parts_.added) most = std::max(most, token.id);
  tokens_.resize(static_cast<size_t>(most) + 1);
  added_.resize(tokens_.size());
  for (const auto& [token, id] : parts_.encoder->ids()) tokens_[static_cast<size_t>(id)] = token;
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

void SubwordTokenizer::FindCuts() {
  using Parts = SubwordTokenizerParts;
  words_ = parts_.encoder->EncodesWordByWord();
  bool splits = false;       // at spaces
  bool split_marks = false;  // spaces are marks, and split there
  bool marks = false;        // every space becomes a mark
  bool lines = true, others = false;
  for (const Parts::Splitter& splitter : parts_.splitters) {
    if (const auto* pattern = std::get_if<SplitPattern>(&splitter)) {
      splits = splits || *pattern != SplitPattern::kWhole;
    } else if (const auto* spaces = std::get_if<Parts::SpaceMarks>(&splitter)) {
      split_marks = split_marks || spaces->split;
      marks = marks || spaces->mark == kSpaceMark;
      lines = false;
    } else if (std::holds_alternative<Parts::WhiteSpace>(splitter)) {
      splits = true;
      lines = false;
    }
  }
  bool marked = false;  // before text is split
  for (const Parts::Normalizer& normalizer : parts_.normalizers) {
    if (const auto* replace = std::get_if<Parts::Replace>(&normalizer)) {
      marked = marked || (replace->from == " " && replace->to == kSpaceMark);
      others = others || replace->from != " " || replace->to != kSpaceMark;
    } else if (const auto* strip = std::get_if<Parts::Strip>(&normalizer)) {
      prepends_ = prepends_ || strip->left;
      lines = false;
    } else if (std::holds_alternative<CharacterMap>(normalizer)) {
      cuts_at_ascii_ = true;
      lines = false;
    } else if (std::holds_alternative<Parts::Prepend>(normalizer)) {
      prepends_ = true;
    }
  }
  cuts_at_spaces_ =
      !others && (split_marks || (splits && !marked) || (words_ && (marked || marks)));
  cuts_at_lines_ = cuts_at_spaces_ && splits && !marked && lines;
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

size_t SubwordTokenizer::LastCut(absl::string_view text) const {
  if (!cuts_at_spaces_) return 0;
  // Behind an added token a text begins anew and gets its prefix, which a continuation does not.
  const auto begins_anew = [this](absl::string_view before) {
    for (const AddedToken& token : parts_.added) {
      if (token.in_text && absl::EndsWith(before, token.content)) return true;
    }
    return false;
  };
  // What a map makes of another character may be, or combine with, a space.
  const auto changes = [this](absl::string_view before) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(before.back()))) return true;
    for (const SubwordTokenizerParts::Normalizer& normalizer : parts_.normalizers) {
      const auto* map = std::get_if<CharacterMap>(&normalizer);
      if (map != nullptr && map->Shortest(before.substr(before.size() - 1)).bytes > 0) return true;
    }
    return false;
  };
  size_t cut = parallel::LastCut(text, cuts_at_lines_);
  while (cut > 0 && ((prepends_ && begins_anew(text.substr(0, cut))) ||
                     (cuts_at_ascii_ && changes(text.substr(0, cut))))) {
    cut = parallel::LastCut(text.substr(0, cut), cuts_at_lines_);
  }
  return cut;
}

std::unique_ptr<Tokenizer::Encoder> SubwordTokenizer::NewEncoder() const {
  return std::make_unique<CachingEncoder>(*this);
}

std::optional<int32_t> SubwordTokenizer::IdOf(absl::string_view token) const {
  for (const AddedToken& added : parts_.added) {
    if (added.content == token) return added.id;
  }
  const int32_t id = parts_.encoder->IdOf(token);
  return id < 0 ? std::nullopt : std::optional<int32_t>(id);
}

void SubwordTokenizer::Encode(absl::string_view text, std::vector<int32_t>& out) const {
  Encode(text, /*begins=*/true, {nullptr, out});
}

void SubwordTokenizer::Encode(absl::string_view text, bool begins, const Run& run) const {
  std::string valid;
  if (!IsValidUtf8(text)) {
    valid = ToValidUtf8(text);
    text = valid;
  }
  raw_.ForEach(
      text,
      [&](size_t begin, size_t end) {
        EncodeRest(text.substr(begin, end - begin), {begins || begin > 0, begins && begin == 0},
                   run);
      },
      [&](int32_t id) { run.out.push_back(id); });
}

void SubwordTokenizer::EncodeRest(absl::string_view text, Place place, const Run& run) const {
  using Parts = SubwordTokenizerParts;
  std::string normal;
  for (const Parts::Normalizer& normalizer : parts_.normalizers) {
    if (const auto* form = std::get_if<NormalForm>(&normalizer)) {
      absl::StatusOr<std::string> made = Normalize(text, *form);
      CHECK_OK(made);  // it is valid UTF-8
      normal = *std::move(made);
    } else if (const auto* prepend = std::get_if<Parts::Prepend>(&normalizer)) {
      if (text.empty()) continue;
      normal = absl::StrCat(place.begins ? prepend->text : "", text);
    } else if (const auto* replace = std::get_if<Parts::Replace>(&normalizer)) {
      normal = absl::StrReplaceAll(text, {{replace->from, replace->to}});
    } else if (const auto* join = std::get_if<Parts::JoinSpaces>(&normalizer)) {
      normal = Joined(text, join->to);
    } else if (const auto* strip = std::get_if<Parts::Strip>(&normalizer)) {
      normal = std::string(Stripped(text, strip->left && place.begins, strip->right));
    } else {
      normal = Replaced(text, std::get<CharacterMap>(normalizer));
    }
    text = normal;
  }
  normalized_.ForEach(
      text,
      [&](size_t begin, size_t end) {
        EncodeNormalized(text.substr(begin, end - begin),
                         {place.begins || begin > 0, place.first && begin == 0}, run);
      },
      [&](int32_t id) { run.out.push_back(id); });
}

void SubwordTokenizer::EncodeNormalized(absl::string_view text, Place place, const Run& run) const {
  if (parts_.prefix_space && place.begins && text[0] != ' ') {
    return Split(absl::StrCat(" ", text), place.first, 0, run);
  }
  Split(text, place.first, 0, run);
}

void SubwordTokenizer::EncodePreToken(absl::string_view pre_token, const Run& run) const {
  while (!pre_token.empty()) {
    const size_t bytes =
        words_ ? std::min(NextWord(pre_token), pre_token.size()) : pre_token.size();
    if (run.cache == nullptr) {
      parts_.encoder->Encode(pre_token.substr(0, bytes), run.out);
    } else {
      run.cache->Encode(*parts_.encoder, pre_token.substr(0, bytes), run.out);
    }
    pre_token.remove_prefix(bytes);
  }
}

// `first`: the document begins with `text`.
void SubwordTokenizer::Split(absl::string_view text, bool first, size_t splitter,
                             const Run& run) const {
  using Parts = SubwordTokenizerParts;
  if (splitter == parts_.splitters.size()) return EncodePreToken(text, run);
  const Parts::Splitter& how = parts_.splitters[splitter];
  if (std::holds_alternative<Parts::SpaceMarks>(how)) return MarkSpaces(text, first, splitter, run);
  const auto* digits = std::get_if<Parts::Digits>(&how);
  const bool removes_space = std::holds_alternative<Parts::WhiteSpace>(how);
  const auto in_class = [&text](size_t at, uint8_t char_class) {
    return (CharClasses::Get().Of(DecodeUtf8(text.data() + at).value) & char_class) != 0;
  };
  while (!text.empty()) {
    size_t bytes = 0;
    bool space = false;
    if (digits != nullptr || removes_space) {
      const uint8_t char_class = removes_space ? kSpace : kNumber;
      const bool is_in = in_class(0, char_class);
      do bytes += static_cast<size_t>(DecodeUtf8(text.data() + bytes).bytes);
      while (bytes < text.size() && in_class(bytes, char_class) == is_in &&
             !(is_in && digits != nullptr && digits->individual));
      space = removes_space && is_in;
    } else {
      bytes = NextPreToken(std::get<SplitPattern>(how), text);
    }
    if (!space) Split(text.substr(0, bytes), first, splitter + 1, run);
    first = false;
    text.remove_prefix(bytes);
  }
}

void SubwordTokenizer::MarkSpaces(absl::string_view text, bool first, size_t splitter,
                                  const Run& run) const {
  using SpaceMarks = SubwordTokenizerParts::SpaceMarks;
  const SpaceMarks& how = std::get<SpaceMarks>(parts_.splitters[splitter]);
  std::string marked = absl::StrReplaceAll(text, {{" ", how.mark}});
  if (!absl::StartsWith(marked, how.mark) &&
      (how.prepend == SpaceMarks::Prepend::kAlways ||
       (how.prepend == SpaceMarks::Prepend::kFirst && first))) {
    marked = absl::StrCat(how.mark, marked);
  }
  if (!how.split) return Split(marked, first, splitter + 1, run);
  absl::string_view rest = marked;
  while (!rest.empty()) {
    const size_t bytes = std::min(rest.find(how.mark, 1), rest.size());
    Split(rest.substr(0, bytes), first, splitter + 1, run);
    first = false;
    rest.remove_prefix(bytes);
  }
}

absl::StatusOr<std::string> SubwordTokenizer::Decode(absl::Span<const int32_t> tokens) const {
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
