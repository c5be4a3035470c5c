#include "parallel/data/unigram_encoder.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "parallel/data/unicode.h"

namespace muster::parallel {

absl::StatusOr<std::unique_ptr<UnigramEncoder>> UnigramEncoder::Make(std::vector<Token> tokens,
                                                                     const Options& options) {
  if (tokens.size() > static_cast<size_t>(kIdMax)) {
    return absl::InvalidArgumentError(
        absl::StrCat("there are ", tokens.size(), " tokens, must be at most ", kIdMax));
  }
  if (options.unknown < 0 || static_cast<size_t>(options.unknown) >= tokens.size()) {
    return absl::InvalidArgumentError(absl::StrCat("the id of unknown text is ", options.unknown,
                                                   ", must be below ", tokens.size()));
  }
  std::unique_ptr<UnigramEncoder> encoder(new UnigramEncoder());
  encoder->options_ = options;
  std::vector<std::pair<absl::string_view, int32_t>> in_text;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Token& token = tokens[i];
    const auto id = static_cast<int32_t>(i);
    if (token.text.empty() || !IsValidUtf8(token.text) || !std::isfinite(token.score)) {
      return absl::InvalidArgumentError(
          absl::StrCat("token ", id, " must have text in UTF-8 and a finite score"));
    }
    encoder->scores_.push_back(token.score);
    encoder->ids_[token.text] = id;
    if (token.in_text) in_text.emplace_back(token.text, id);
  }
  encoder->trie_ = ByteTrie(std::move(in_text));
  for (int byte = 0; byte < 256; ++byte) {
    encoder->fallback_ids_[byte] = encoder->IdOf(absl::StrFormat("<0x%02X>", byte));
  }
  return encoder;
}

void UnigramEncoder::Encode(absl::string_view pre_token, std::vector<int32_t>& out) const {
  return options_.sentence_piece ? EncodeWith<float>(pre_token, out)
                                 : EncodeWith<double>(pre_token, out);
}

// The tokens of the best path to every position (Viterbi). As in both libraries the first of equal
// paths counts, and a candidate is compared in 64 bits with what may be kept in 32.
template <typename Sum>
void UnigramEncoder::EncodeWith(absl::string_view text, std::vector<int32_t>& out) const {
  struct End {
    Sum score = 0;
    int32_t id = -1;
    uint32_t begin = 0;  // of the last token
  };
  std::vector<End> ends(text.size() + 1);
  const Sum unknown_score = static_cast<Sum>(options_.unknown_score);
  for (size_t begin = 0; begin < text.size();) {
    const Sum score = ends[begin].score;
    const auto length = static_cast<size_t>(DecodeUtf8(text.data() + begin).bytes);
    bool alone = false;  // the code point is a token
    trie_.ForEachPrefix(text.substr(begin), [&](size_t bytes, int32_t id) {
      End& end = ends[begin + bytes];
      const double candidate = scores_[static_cast<size_t>(id)] + static_cast<double>(score);
      if (end.id < 0 || candidate > static_cast<double>(end.score)) {
        end = {static_cast<Sum>(candidate), id, static_cast<uint32_t>(begin)};
      }
      alone = alone || bytes == length;
    });
    if (!alone) {
      End& end = ends[begin + length];
      const Sum candidate = unknown_score + score;
      if (end.id < 0 || candidate > end.score) {
        end = {candidate, options_.unknown, static_cast<uint32_t>(begin)};
      }
    }
    begin += length;
  }
  // Backwards, then in order. Neighbouring unknown text is one token.
  const size_t first = out.size();
  std::vector<int32_t> unknown;
  for (size_t at = text.size(); at > 0;) {
    if (ends[at].id != options_.unknown) {
      out.push_back(ends[at].id);
      at = ends[at].begin;
      continue;
    }
    const size_t end = at;
    while (at > 0 && ends[at].id == options_.unknown) at = ends[at].begin;
    unknown.clear();
    AppendUnknown(text.substr(at, end - at), unknown);
    out.insert(out.end(), unknown.rbegin(), unknown.rend());
  }
  std::reverse(out.begin() + static_cast<ptrdiff_t>(first), out.end());
}

void UnigramEncoder::AppendUnknown(absl::string_view text, std::vector<int32_t>& out) const {
  if (const int32_t id = options_.sentence_piece ? -1 : IdOf(text); id >= 0) {
    out.push_back(id);
    return;
  }
  bool falls_back = options_.byte_fallback;
  for (const char byte : text) {
    falls_back = falls_back && fallback_ids_[static_cast<uint8_t>(byte)] >= 0;
  }
  if (!falls_back) {
    out.push_back(options_.unknown);
    return;
  }
  for (const char byte : text) out.push_back(fallback_ids_[static_cast<uint8_t>(byte)]);
}

}  // namespace muster::parallel
