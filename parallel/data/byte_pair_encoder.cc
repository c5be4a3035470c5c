#include "parallel/data/byte_pair_encoder.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "parallel/data/unicode.h"

namespace muster::parallel {
namespace {

uint64_t PairKey(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

// Shown in errors: a token may be any bytes.
std::string Shown(absl::string_view token) {
  return absl::StrCat("'", absl::Utf8SafeCHexEscape(token), "'");
}

}  // namespace

absl::StatusOr<BytePairEncoder> BytePairEncoder::Make(
    std::vector<std::pair<std::string, int32_t>> vocabulary,
    const std::vector<std::pair<std::string, std::string>>& merges, const Options& options) {
  BytePairEncoder encoder;
  encoder.options_ = options;
  encoder.ids_.reserve(vocabulary.size());
  absl::flat_hash_set<int32_t> seen;
  seen.reserve(vocabulary.size());
  for (auto& [token, id] : vocabulary) {
    if (id < 0 || id > kIdMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("token ", Shown(token), " has id ", id, ", must be 0 to ", kIdMax));
    }
    if (!seen.insert(id).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("token ", Shown(token), " has id ", id, ", as another one has"));
    }
    if (!encoder.ids_.emplace(std::move(token), id).second) {
      return absl::InvalidArgumentError(absl::StrCat("the token of id ", id, " is there twice"));
    }
  }
  for (int byte = 0; byte < 256; ++byte) {
    const auto character = static_cast<char>(byte);
    encoder.byte_ids_[byte] = encoder.IdOf(absl::string_view(&character, 1));
    encoder.fallback_ids_[byte] = encoder.IdOf(absl::StrFormat("<0x%02X>", byte));
    if (options.bytes && encoder.byte_ids_[byte] < 0 && options.unknown < 0) {
      return absl::InvalidArgumentError(
          absl::StrFormat("byte 0x%02X has no token, and there is no unknown token", byte));
    }
  }
  encoder.merges_.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [left, right] = merges[rank];
    const int32_t ids[] = {encoder.IdOf(left), encoder.IdOf(right),
                           encoder.IdOf(absl::StrCat(left, right))};
    const std::string names[] = {left, right, absl::StrCat(left, right)};
    for (int i = 0; i < 3; ++i) {
      if (ids[i] >= 0) continue;
      return absl::InvalidArgumentError(absl::StrCat("merge ", rank, " of ", Shown(left), " and ",
                                                     Shown(right), ": ", Shown(names[i]),
                                                     " is not in the vocabulary"));
    }
    // Of a pair that is there twice the later rank counts, as in the library that writes these
    // files.
    encoder.merges_[PairKey(ids[0], ids[1])] = {static_cast<uint32_t>(rank), ids[2]};
  }
  encoder.FindWords();
  return encoder;
}

absl::StatusOr<BytePairEncoder> BytePairEncoder::MakeRanked(
    std::vector<std::pair<std::string, int32_t>> vocabulary) {
  int32_t most = 0;
  for (const auto& [token, id] : vocabulary) most = std::max(most, id);
  ASSIGN_OR_RETURN(BytePairEncoder encoder,
                   Make(std::move(vocabulary), {}, {.whole_pre_tokens_first = true}));
  encoder.ranks_.resize(static_cast<size_t>(most) + 1);
  std::iota(encoder.ranks_.begin(), encoder.ranks_.end(), 0);
  return encoder;
}

absl::StatusOr<BytePairEncoder> BytePairEncoder::MakeScored(std::vector<ScoredToken> vocabulary,
                                                            const Options& options) {
  std::vector<float> scores;
  std::vector<std::pair<std::string, int32_t>> tokens;
  int32_t most = 0;
  for (const ScoredToken& token : vocabulary) {
    if (token.score.has_value()) scores.push_back(*token.score);
    most = std::max(most, token.id);
    tokens.emplace_back(token.text, token.id);
  }
  std::sort(scores.begin(), scores.end(), std::greater<>());
  ASSIGN_OR_RETURN(BytePairEncoder encoder, Make(std::move(tokens), {}, options));
  encoder.unknown_last_ = true;
  encoder.ranks_.resize(static_cast<size_t>(most) + 1, kNoRank);
  for (const ScoredToken& token : vocabulary) {
    if (!token.score.has_value()) continue;
    // Tokens of the same score have the same rank.
    encoder.ranks_[static_cast<size_t>(token.id)] = static_cast<uint32_t>(
        std::lower_bound(scores.begin(), scores.end(), *token.score, std::greater<>()) -
        scores.begin());
  }
  encoder.FindWords();
  return encoder;
}

void BytePairEncoder::FindWords() {
  if (options_.bytes || options_.whole_pre_tokens_first || IdOf(kSpaceMark) < 0) return;
  by_word_ = true;
  for (const auto& [token, id] : ids_) {
    by_word_ = by_word_ && NextWord(token) == absl::string_view::npos;
  }
}

BytePairEncoder::Merge BytePairEncoder::MergeOf(absl::string_view pre_token, const Symbol& left,
                                                const Symbol& right) const {
  if (!ranks_.empty()) {
    const int32_t id = IdOf(pre_token.substr(left.begin, right.end - left.begin));
    return id < 0 ? Merge{kNoRank, -1} : Merge{ranks_[static_cast<size_t>(id)], id};
  }
  const auto found = merges_.find(PairKey(left.id, right.id));
  return found == merges_.end() ? Merge{kNoRank, -1} : found->second;
}

void BytePairEncoder::Start(absl::string_view pre_token, Symbols& symbols) const {
  symbols.clear();
  const auto unknown = [&](uint32_t begin, uint32_t end) {
    if (options_.fuse_unknown && !symbols.empty() && symbols.back().id == options_.unknown) {
      symbols.back().end = end;
    } else if (options_.unknown >= 0) {
      symbols.push_back({options_.unknown, begin, end});
    }
  };
  for (uint32_t at = 0; at < pre_token.size();) {
    const uint32_t length =
        options_.bytes ? 1 : static_cast<uint32_t>(DecodeUtf8(pre_token.data() + at).bytes);
    const int32_t id = options_.bytes ? byte_ids_[static_cast<uint8_t>(pre_token[at])]
                                      : IdOf(pre_token.substr(at, length));
    if (id >= 0 || unknown_last_) {
      symbols.push_back({id, at, at + length});
    } else {
      bool falls_back = options_.byte_fallback;
      for (uint32_t i = at; i < at + length; ++i) {
        falls_back = falls_back && fallback_ids_[static_cast<uint8_t>(pre_token[i])] >= 0;
      }
      if (falls_back) {
        for (uint32_t i = at; i < at + length; ++i) {
          symbols.push_back({fallback_ids_[static_cast<uint8_t>(pre_token[i])], i, i + 1});
        }
      } else {
        unknown(at, at + length);
      }
    }
    at += length;
  }
}

void BytePairEncoder::MergeShort(absl::string_view pre_token, Symbols& symbols) const {
  Merge pairs[kShortMax];  // of each symbol and the next one
  size_t count = symbols.size();
  for (size_t i = 0; i + 1 < count; ++i) pairs[i] = MergeOf(pre_token, symbols[i], symbols[i + 1]);
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      if (pairs[i].rank < pairs[best].rank) best = i;
    }
    if (pairs[best].rank == kNoRank) break;
    symbols[best] = {pairs[best].id, symbols[best].begin, symbols[best + 1].end};
    --count;
    for (size_t i = best + 1; i < count; ++i) {
      symbols[i] = symbols[i + 1];
      pairs[i - 1] = pairs[i];
    }
    if (best > 0) pairs[best - 1] = MergeOf(pre_token, symbols[best - 1], symbols[best]);
    if (best + 1 < count) pairs[best] = MergeOf(pre_token, symbols[best], symbols[best + 1]);
  }
  symbols.resize(count);
}

// Symbols are a linked list by position; an entry of the heap is stale when its pair has changed.
void BytePairEncoder::MergeLong(absl::string_view pre_token, Symbols& symbols) const {
  struct Entry {
    uint32_t rank, left, right;
    int32_t id, left_id, right_id;
    bool operator<(const Entry& other) const {
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  const auto count = static_cast<uint32_t>(symbols.size());
  constexpr int32_t kGone = -2;
  std::vector<uint32_t> next(count), previous(count);
  for (uint32_t i = 0; i < count; ++i) {
    next[i] = i + 1;
    previous[i] = i - 1;
  }
  std::vector<Entry> entries;
  std::priority_queue<Entry> heap(std::less<Entry>(), std::move(entries));
  const auto push = [&](uint32_t left, uint32_t right) {
    const Merge merge = MergeOf(pre_token, symbols[left], symbols[right]);
    if (merge.rank == kNoRank) return;
    heap.push({merge.rank, left, right, merge.id, symbols[left].id, symbols[right].id});
  };
  for (uint32_t i = 0; i + 1 < count; ++i) push(i, i + 1);
  while (!heap.empty()) {
    const Entry top = heap.top();
    heap.pop();
    if (symbols[top.left].id != top.left_id || symbols[top.right].id != top.right_id ||
        next[top.left] != top.right) {
      continue;
    }
    symbols[top.left].id = top.id;
    symbols[top.left].end = symbols[top.right].end;
    symbols[top.right].id = kGone;
    next[top.left] = next[top.right];
    if (next[top.right] < count) previous[next[top.right]] = top.left;
    if (previous[top.left] < count) push(previous[top.left], top.left);
    if (next[top.left] < count) push(top.left, next[top.left]);
  }
  symbols.erase(std::remove_if(symbols.begin(), symbols.end(),
                               [](const Symbol& symbol) { return symbol.id == kGone; }),
                symbols.end());
}

void BytePairEncoder::Encode(absl::string_view pre_token, std::vector<int32_t>& out) const {
  if (options_.whole_pre_tokens_first) {
    if (const int32_t id = IdOf(pre_token); id >= 0) {
      out.push_back(id);
      return;
    }
  }
  Symbols symbols;
  Start(pre_token, symbols);
  if (symbols.size() <= kShortMax) {
    MergeShort(pre_token, symbols);
  } else {
    MergeLong(pre_token, symbols);
  }
  bool known = true;
  for (const Symbol& symbol : symbols) {
    if (symbol.id >= 0) {
      out.push_back(symbol.id);
    } else {
      AppendUnknown(pre_token.substr(symbol.begin, symbol.end - symbol.begin), known, out);
    }
    known = symbol.id >= 0;
  }
}

// `first`: the text in front of it is known.
void BytePairEncoder::AppendUnknown(absl::string_view text, bool first,
                                    std::vector<int32_t>& out) const {
  if (!options_.byte_fallback) {
    if (first || !options_.fuse_unknown) out.push_back(options_.unknown);
    return;
  }
  for (char byte : text) out.push_back(fallback_ids_[static_cast<uint8_t>(byte)]);
}

}  // namespace muster::parallel
