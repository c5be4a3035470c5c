#include "parallel/plan/pattern.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace muster::parallel {

absl::StatusOr<std::vector<std::string>> BlocksOfPattern(absl::string_view pattern) {
  if (pattern.empty()) {
    return absl::InvalidArgumentError(
        "names no layers; write a letter for each: M is Mamba-2, * attention, - an MLP");
  }
  if (static_cast<int64_t>(pattern.size()) > kPatternMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("has ", pattern.size(), " letters; at most ", kPatternMax));
  }
  std::vector<std::string> blocks;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char letter = pattern[i];
    if (letter != kMambaLetter && letter != kAttentionLetter && letter != kMlpLetter) {
      // All bytes of a letter that has several.
      size_t size = 1;
      while (i + size < pattern.size() && (pattern[i] & 0x80) != 0 &&
             (pattern[i + size] & 0xc0) == 0x80) {
        ++size;
      }
      return absl::InvalidArgumentError(
          absl::StrCat("has '", absl::Utf8SafeCHexEscape(pattern.substr(i, size)), "' at position ",
                       i + 1, "; M is Mamba-2, * attention, - an MLP"));
    }
    const bool joins = letter == kMlpLetter && !blocks.empty() && blocks.back().size() == 1 &&
                       blocks.back()[0] != kMlpLetter;
    if (!joins) blocks.emplace_back();
    blocks.back() += letter;
  }
  return blocks;
}

}  // namespace muster::parallel
