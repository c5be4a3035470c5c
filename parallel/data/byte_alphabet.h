// How byte-level tokenizers write bytes as characters: GPT-2's alphabet.
#ifndef MUSTER_PARALLEL_DATA_BYTE_ALPHABET_H_
#define MUSTER_PARALLEL_DATA_BYTE_ALPHABET_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace muster::parallel {

// Printable bytes stand for themselves, the 68 others are U+0100 and on. Const; thread-safe.
class ByteAlphabet {
 public:
  static const ByteAlphabet& Get();

  // The bytes that `token` (valid UTF-8) is written for; nullopt where a character stands for none.
  std::optional<std::string> Bytes(absl::string_view token) const;
  std::string Written(absl::string_view bytes) const;
  // All bytes in the order of their characters.
  std::array<int, 256> ByCharacter() const;

 private:
  ByteAlphabet();
  static constexpr uint32_t kCharacters = 0x144;
  std::array<int16_t, kCharacters> byte_of_;  // -1: none
  std::array<std::string, 256> written_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_BYTE_ALPHABET_H_
