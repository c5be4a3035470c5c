// Splits text into the pre-tokens that byte-pair encoding works on: automata for the regular
// expressions that published tokenizers use, which all need a look-ahead that linear-time engines
// lack.
#ifndef MUSTER_PARALLEL_DATA_PRE_TOKENIZER_H_
#define MUSTER_PARALLEL_DATA_PRE_TOKENIZER_H_

#include <cstddef>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace muster::parallel {

enum class SplitPattern {
  kWhole,   // no split
  kGpt2,    // 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  kCl100k,  // Llama 3 and GPT-4: contractions in any case, \p{N}{1,3}, line ends behind punctuation
  kCl100kRanks,  // as kCl100k, with white space at the end of a text in one pre-token: tiktoken's
                 // form
  kQwen2,        // as kCl100k, with single digits
  kO200k,        // GPT-4o: letters split by case, contractions attached to their word
};

// As tokenizer.json files write it; empty for kWhole and kCl100kRanks, which none of them has.
std::string RegexOf(SplitPattern pattern);
// The pattern whose regular expression is written so in tokenizer.json files, where it is known.
std::optional<SplitPattern> PatternOfRegex(absl::string_view regex);

// A position in (0, text.size()) at which every text that goes on like `text` can be cut in two,
// the later the better: the pre-tokens of both are those of the whole. It lies between a character
// and a space, or with `at_lines` behind a line end in front of a letter or digit. 0: there is
// none. `text` need not be valid UTF-8.
size_t LastCut(absl::string_view text, bool at_lines);

// Bytes of the first pre-token of `text`, at least one code point. Requires: not empty, valid
// UTF-8.
size_t NextPreToken(SplitPattern pattern, absl::string_view text);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_PRE_TOKENIZER_H_
