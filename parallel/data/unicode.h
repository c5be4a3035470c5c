// Text as Unicode code points, and the classes of code points that pre-tokenizers split by.
// Categories are those of Unicode 16: utf8proc's, which are of Unicode 15, and a table of what came
// later. Normalization is utf8proc's, kept to Unicode 9.
#ifndef MUSTER_PARALLEL_DATA_UNICODE_H_
#define MUSTER_PARALLEL_DATA_UNICODE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {

// Bits of CharClasses::Of.
enum CharClass : uint8_t {
  kLetter = 1,      // \p{L}
  kNumber = 2,      // \p{N}
  kSpace = 4,       // \s: White_Space
  kLineEnd = 8,     // \r, \n
  kUpperWord = 16,  // \p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}
  kLowerWord = 32,  // \p{Ll}\p{Lm}\p{Lo}\p{M}
  kWord = 64,       // \w: alphabetic characters, marks, decimal digits, connectors, joiners
};

// The classes of all code points, a byte each. Made once per process, on first use; thread-safe.
class CharClasses {
 public:
  static const CharClasses& Get();
  // 0 above U+10FFFF.
  uint8_t Of(uint32_t code_point) const {
    return code_point < kCodePoints ? table_[code_point] : 0;
  }

 private:
  static constexpr uint32_t kCodePoints = 0x110000;
  CharClasses();
  uint8_t table_[kCodePoints];
};

struct CodePoint {
  uint32_t value;
  int bytes;
};
// The code point at the beginning of `text`, which is not empty and valid UTF-8 (ToValidUtf8).
inline CodePoint DecodeUtf8(const char* text) {
  const auto byte = [text](int i) { return static_cast<uint32_t>(static_cast<uint8_t>(text[i])); };
  const uint32_t first = byte(0);
  if (first < 0x80) return {first, 1};
  if (first < 0xe0) return {(first & 0x1f) << 6 | (byte(1) & 0x3f), 2};
  if (first < 0xf0) return {(first & 0x0f) << 12 | (byte(1) & 0x3f) << 6 | (byte(2) & 0x3f), 3};
  return {(first & 0x07) << 18 | (byte(1) & 0x3f) << 12 | (byte(2) & 0x3f) << 6 | (byte(3) & 0x3f),
          4};
}
void AppendUtf8(uint32_t code_point, std::string& out);

// Whether all of it is well-formed UTF-8 (no overlong forms, no surrogates).
bool IsValidUtf8(absl::string_view text);
// Each maximal ill-formed subsequence becomes U+FFFD, as readers of text with errors="replace" have
// it (Unicode 15, section 3.9, "U+FFFD substitution of maximal subparts").
std::string ToValidUtf8(absl::string_view text);
// Each byte that is no part of a well-formed code point becomes U+FFFD, as in SentencePiece.
std::string ReplaceIllFormedBytes(absl::string_view text);

// Bytes of the first extended grapheme cluster (Unicode Standard Annex 29) of `text`, which is not
// empty and valid UTF-8.
size_t FirstGrapheme(absl::string_view text);

// Normalization Forms of Unicode Standard Annex 15, in the version of Hugging Face's tokenizers:
// what came after Unicode 9 neither decomposes nor combines.
enum class NormalForm { kNfc, kNfd, kNfkc, kNfkd };
// `text` is valid UTF-8 (also with zero bytes). kInternal: utf8proc fails.
absl::StatusOr<std::string> Normalize(absl::string_view text, NormalForm form);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_UNICODE_H_
