// The normalization tables of SentencePiece models, which tokenizer.json files hold as well
// ("precompiled_charsmap"): strings that are replaced by others, such as full-width letters.
#ifndef MUSTER_PARALLEL_DATA_CHARACTER_MAP_H_
#define MUSTER_PARALLEL_DATA_CHARACTER_MAP_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {

// Const after construction; thread-safe.
class CharacterMap {
 public:
  // Replaces nothing.
  CharacterMap() = default;
  // `blob`: the bytes of a double array of Darts-clone, after their number as u32, then the
  // replacements, each ended by a zero byte. kInvalidArgument: damaged.
  static absl::StatusOr<CharacterMap> Parse(absl::string_view blob);

  bool empty() const { return units_.empty(); }
  struct Match {
    size_t bytes = 0;  // of the text; 0: nothing is replaced
    absl::string_view replacement;
  };
  Match Longest(absl::string_view text) const;
  Match Shortest(absl::string_view text) const;
  // Some string that is replaced begins with `text`, or is it.
  bool HasPrefix(absl::string_view text) const;

 private:
  // Calls found(bytes, value) for each string that `text` begins with, the shortest first, until it
  // returns false. Returns whether all of `text` leads on.
  template <typename Found>
  bool Walk(absl::string_view text, Found found) const;
  absl::string_view ReplacementAt(uint32_t offset) const;

  std::vector<uint32_t> units_;
  std::string replacements_;  // ends with a zero byte
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_CHARACTER_MAP_H_
