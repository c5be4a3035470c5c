#include "parallel/data/bpe_trainer.h"

#include <algorithm>
#include <queue>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "parallel/data/byte_alphabet.h"
#include "parallel/data/byte_pair_encoder.h"
#include "parallel/data/unicode.h"

namespace muster::parallel {
namespace {

uint64_t KeyOf(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}
int32_t LeftOf(uint64_t pair) { return static_cast<int32_t>(pair >> 32); }
int32_t RightOf(uint64_t pair) { return static_cast<int32_t>(pair & 0xffffffff); }

// The state of one training. Words are runs of symbols in one array; a merge shortens them in
// place.
class Training {
 public:
  Training(const PreTokenCounts& counts, int64_t vocabulary, int64_t frequency_min)
      : vocabulary_(static_cast<size_t>(vocabulary)),
        frequency_min_(std::max<int64_t>(frequency_min, 1)) {
    // Ids of bytes are in the order of their characters in the alphabet, as in tokenizers.
    int32_t ids[256];
    for (int byte : ByteAlphabet::Get().ByCharacter()) {
      ids[byte] = static_cast<int32_t>(model_.tokens.size());
      model_.tokens.emplace_back(1, static_cast<char>(byte));
      by_token_[model_.tokens.back()] = ids[byte];
    }
    size_t symbols = 0;
    for (const auto& [word, count] : counts) symbols += word.size();
    symbols_.reserve(symbols);
    words_.reserve(counts.size());
    for (const auto& [word, count] : counts) {
      if (word.size() < 2) continue;
      words_.push_back(
          {static_cast<uint32_t>(symbols_.size()), static_cast<uint32_t>(word.size()), count});
      for (char byte : word) symbols_.push_back(ids[static_cast<uint8_t>(byte)]);
    }
    for (uint32_t word = 0; word < words_.size(); ++word) CountPairs(word);
    for (const auto& [pair, info] : pairs_) queue_.push({info.count, pair});
  }

  BpeModel Run(const std::function<void(int64_t, int64_t)>& progress) {
    while (model_.tokens.size() < vocabulary_ && !queue_.empty()) {
      const Entry top = queue_.top();
      queue_.pop();
      const auto found = pairs_.find(top.pair);
      if (found == pairs_.end()) continue;
      if (found->second.count != top.count) {
        if (found->second.count > 0 && found->second.count < top.count) {
          queue_.push({found->second.count, top.pair});
        }
        continue;
      }
      if (top.count < frequency_min_) break;
      Merge(top.pair, std::move(found->second.words));
      if (progress && model_.tokens.size() % 256 == 0) {
        progress(static_cast<int64_t>(model_.tokens.size()), static_cast<int64_t>(vocabulary_));
      }
    }
    return std::move(model_);
  }

 private:
  struct Word {
    uint32_t begin, size;  // of symbols_
    int64_t count;
  };
  struct Pair {
    int64_t count = 0;
    std::vector<uint32_t> words;  // that may hold it, each once or more
  };
  struct Entry {
    int64_t count;
    uint64_t pair;
    bool operator<(const Entry& other) const {
      return count != other.count ? count < other.count : pair > other.pair;
    }
  };

  void Count(uint64_t key, int64_t change, uint32_t word) {
    Pair& pair = pairs_[key];
    pair.count += change;
    if (change > 0 && (pair.words.empty() || pair.words.back() != word)) pair.words.push_back(word);
  }
  void CountPairs(uint32_t index) {
    const Word& word = words_[index];
    const int32_t* symbols = &symbols_[word.begin];
    for (uint32_t i = 0; i + 1 < word.size; ++i) {
      Count(KeyOf(symbols[i], symbols[i + 1]), word.count, index);
    }
  }

  void Merge(uint64_t pair, std::vector<uint32_t> words) {
    const int32_t left = LeftOf(pair), right = RightOf(pair);
    const std::string& first = model_.tokens[static_cast<size_t>(left)];
    const std::string& second = model_.tokens[static_cast<size_t>(right)];
    const std::string token = first + second;
    model_.merges.emplace_back(first, second);
    // Two pairs may make the same token.
    const auto [known, is_new] =
        by_token_.emplace(token, static_cast<int32_t>(model_.tokens.size()));
    if (is_new) model_.tokens.push_back(token);
    pairs_.erase(pair);
    touched_.clear();
    for (uint32_t word : words) MergeIn(word, left, right, known->second);
    std::sort(touched_.begin(), touched_.end());
    touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
    for (uint64_t each : touched_) {
      const auto found = pairs_.find(each);
      if (found != pairs_.end() && found->second.count > 0) {
        queue_.push({found->second.count, each});
      }
    }
  }

  void MergeIn(uint32_t index, int32_t left, int32_t right, int32_t merged) {
    Word& word = words_[index];
    int32_t* symbols = &symbols_[word.begin];
    uint32_t size = 0;  // of what is written
    for (uint32_t i = 0; i < word.size; ++i) {
      if (symbols[i] != left || i + 1 == word.size || symbols[i + 1] != right) {
        symbols[size++] = symbols[i];
        continue;
      }
      if (size > 0) {
        Remove(KeyOf(symbols[size - 1], left), word.count);
        Add(KeyOf(symbols[size - 1], merged), word.count, index);
      }
      if (i + 2 < word.size) {
        Remove(KeyOf(right, symbols[i + 2]), word.count);
        Add(KeyOf(merged, symbols[i + 2]), word.count, index);
      }
      symbols[size++] = merged;
      ++i;
    }
    word.size = size;
  }
  // The pair that is merged is not in the map any more.
  void Remove(uint64_t key, int64_t count) {
    const auto found = pairs_.find(key);
    if (found == pairs_.end()) return;
    found->second.count -= count;
    if (found->second.count == 0) pairs_.erase(found);
  }
  void Add(uint64_t key, int64_t count, uint32_t word) {
    Count(key, count, word);
    touched_.push_back(key);
  }

  const size_t vocabulary_;
  const int64_t frequency_min_;
  BpeModel model_;
  absl::flat_hash_map<std::string, int32_t> by_token_;
  std::vector<int32_t> symbols_;
  std::vector<Word> words_;
  absl::flat_hash_map<uint64_t, Pair> pairs_;
  std::priority_queue<Entry> queue_;  // counts may be out of date; they only fall
  std::vector<uint64_t> touched_;     // pairs that the merge has made
};

}  // namespace

absl::StatusOr<BpeModel> TrainBpe(const PreTokenCounts& counts, int64_t vocabulary,
                                  int64_t frequency_min,
                                  const std::function<void(int64_t, int64_t)>& progress) {
  if (vocabulary < 256 || vocabulary > kIdMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a vocabulary of ", vocabulary, " tokens: must be 256, one per byte, to ", kIdMax));
  }
  return Training(counts, vocabulary, frequency_min).Run(progress);
}

absl::StatusOr<std::string> ToTokenizerJson(const BpeModel& model, SplitPattern pattern,
                                            const std::vector<std::string>& specials) {
  using Json = nlohmann::ordered_json;
  const std::string regex = RegexOf(pattern);
  if (regex.empty()) return absl::InvalidArgumentError("the pattern has no regular expression");
  const ByteAlphabet& alphabet = ByteAlphabet::Get();
  Json vocabulary = Json::object(), merges = Json::array(), added = Json::array();
  for (size_t id = 0; id < model.tokens.size(); ++id) {
    vocabulary.push_back({alphabet.Written(model.tokens[id]), id});
  }
  for (const auto& [left, right] : model.merges) {
    merges.push_back({alphabet.Written(left), alphabet.Written(right)});
  }
  for (const std::string& special : specials) {
    if (special.empty() || !IsValidUtf8(special)) {
      return absl::InvalidArgumentError("a special token is empty or no UTF-8");
    }
    added.push_back({{"id", model.tokens.size() + added.size()},
                     {"content", special},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const auto byte_level = [](bool use_regex) {
    return Json{{"type", "ByteLevel"},
                {"add_prefix_space", false},
                {"trim_offsets", true},
                {"use_regex", use_regex}};
  };
  Json splitter = byte_level(true);
  if (pattern != SplitPattern::kGpt2) {
    const Json split = {{"type", "Split"},
                        {"pattern", {{"Regex", regex}}},
                        {"behavior", "Isolated"},
                        {"invert", false}};
    splitter = {{"type", "Sequence"}, {"pretokenizers", Json::array({split, byte_level(false)})}};
  }
  const Json file = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", added},
                     {"normalizer", nullptr},
                     {"pre_tokenizer", splitter},
                     {"post_processor", nullptr},
                     {"decoder", byte_level(true)},
                     {"model",
                      {{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", nullptr},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", false},
                       {"byte_fallback", false},
                       {"ignore_merges", false},
                       {"vocab", vocabulary},
                       {"merges", merges}}}};
  return file.dump(1) + "\n";
}

}  // namespace muster::parallel
