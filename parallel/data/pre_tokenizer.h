// Splits text into the pieces that byte-pair encoding works on: automata for the regular
// expressions that published tokenizers use, which all need a look-ahead that linear-time engines
// lack.
#ifndef MUSTER_PARALLEL_DATA_PRE_TOKENIZER_H_
#define MUSTER_PARALLEL_DATA_PRE_TOKENIZER_H_

#include <cstddef>
#include <optional>

#include "absl/strings/string_view.h"

namespace muster::parallel {

enum class SplitPattern {
  kWhole,   // no split
  kGpt2,    // 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  kCl100k,  // Llama 3 and GPT-4: contractions in any case, \p{N}{1,3}, line ends behind punctuation
  kQwen2,   // as kCl100k, with single digits
  kO200k,   // GPT-4o: letters split by case, contractions attached to their word
};

// The pattern whose regular expression is written so in tokenizer.json files, where it is known.
std::optional<SplitPattern> PatternOfRegex(absl::string_view regex);

// Bytes of the first piece of `text`, at least one code point. Requires: not empty, valid UTF-8.
size_t NextPiece(SplitPattern pattern, absl::string_view text);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_PRE_TOKENIZER_H_
