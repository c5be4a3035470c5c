// Tokens that a tokenizer finds in text before anything is merged, such as "<|endoftext|>".
#ifndef MUSTER_PARALLEL_DATA_ADDED_TOKENS_H_
#define MUSTER_PARALLEL_DATA_ADDED_TOKENS_H_

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {

struct AddedToken {
  std::string content;  // not empty
  int32_t id = 0;
  bool single_word = false;  // only between characters that are no part of a word
  bool strip_left = false, strip_right = false;  // takes white space on that side with it
  bool normalized = false;                       // looked for in the normalised text
  bool in_text = true;  // else it has an id, and text that reads like it is text
};

// Finds added tokens as Hugging Face's tokenizers do: the leftmost, of those the longest; the
// search goes on behind the content of a match, also of one that single_word rules out. Const after
// construction; thread-safe.
class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  bool empty() const { return tokens_.empty(); }
  // Calls text(begin, end) for what lies between the tokens, where it is not empty, and token(id)
  // for each token, in the order of `whole`, which is valid UTF-8.
  template <typename OnText, typename OnToken>
  void ForEach(absl::string_view whole, OnText text, OnToken token) const {
    size_t done = 0;
    for (size_t from = 0; !tokens_.empty();) {
      Match match = Find(whole, from, done);
      if (match.token == nullptr) break;
      if (match.begin > done) text(done, match.begin);
      token(match.token->id);
      done = match.end;
      from = match.search_from;
    }
    if (done < whole.size()) text(done, whole.size());
  }

 private:
  struct Match {
    size_t begin = 0, end = 0;  // with stripped white space
    size_t search_from = 0;
    const AddedToken* token = nullptr;  // null: there is none
  };
  // White space in front of `done` belongs to the match before.
  Match Find(absl::string_view text, size_t from, size_t done) const;
  const AddedToken* LongestAt(absl::string_view text) const;

  std::vector<AddedToken> tokens_;
  absl::flat_hash_map<absl::string_view, size_t> by_content_;
  std::vector<size_t> lengths_;          // of contents; longest first, each once
  std::bitset<size_t{1} << 16> begins_;  // by the first two bytes; of one byte: with any second
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_ADDED_TOKENS_H_
