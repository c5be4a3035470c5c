#include "parallel/data/byte_alphabet.h"

#include "parallel/data/unicode.h"

namespace muster::parallel {

const ByteAlphabet& ByteAlphabet::Get() {
  static const auto* const alphabet = new ByteAlphabet();
  return *alphabet;
}

ByteAlphabet::ByteAlphabet() {
  byte_of_.fill(-1);
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    const uint32_t character = printable ? byte : next++;
    byte_of_[character] = static_cast<int16_t>(byte);
    AppendUtf8(character, written_[byte]);
  }
}

std::optional<std::string> ByteAlphabet::Bytes(absl::string_view token) const {
  std::string bytes;
  while (!token.empty()) {
    const CodePoint c = DecodeUtf8(token.data());
    if (c.value >= kCharacters || byte_of_[c.value] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte_of_[c.value]));
    token.remove_prefix(static_cast<size_t>(c.bytes));
  }
  return bytes;
}

std::string ByteAlphabet::Written(absl::string_view bytes) const {
  std::string written;
  for (char byte : bytes) written += written_[static_cast<uint8_t>(byte)];
  return written;
}

std::array<int, 256> ByteAlphabet::ByCharacter() const {
  std::array<int, 256> bytes;
  size_t count = 0;
  for (int16_t byte : byte_of_) {
    if (byte >= 0) bytes[count++] = byte;
  }
  return bytes;
}

}  // namespace muster::parallel
