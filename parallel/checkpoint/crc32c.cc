#include "parallel/checkpoint/crc32c.h"

#include <array>
#include <cstddef>
#include <cstring>

#include "absl/strings/str_format.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace muster::parallel {
namespace {

// Slicing by eight (Kounavis and Berry, ISCC 2005): table k advances a byte by k further bytes.
struct Tables {
  std::array<std::array<uint32_t, 256>, 8> of;
};
constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
    tables.of[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables.of[k - 1][byte];
      tables.of[k][byte] = crc >> 8 ^ tables.of[0][crc & 255];
    }
  }
  return tables;
}
constexpr Tables kTables = MakeTables();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t WithInstruction(absl::string_view bytes, uint32_t crc) {
  uint64_t state = ~crc;
  const char* at = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    state = _mm_crc32_u64(state, word);
  }
  uint32_t rest = static_cast<uint32_t>(state);
  for (; left > 0; --left, ++at) rest = _mm_crc32_u8(rest, static_cast<unsigned char>(*at));
  return ~rest;
}
#endif

}  // namespace

uint32_t Crc32cPortable(absl::string_view bytes, uint32_t crc) {
  uint32_t state = ~crc;
  const unsigned char* at = reinterpret_cast<const unsigned char*>(bytes.data());
  size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    uint32_t low, high;
    std::memcpy(&low, at, 4);
    std::memcpy(&high, at + 4, 4);
    low ^= state;
    state = kTables.of[7][low & 255] ^ kTables.of[6][low >> 8 & 255] ^
            kTables.of[5][low >> 16 & 255] ^ kTables.of[4][low >> 24] ^ kTables.of[3][high & 255] ^
            kTables.of[2][high >> 8 & 255] ^ kTables.of[1][high >> 16 & 255] ^
            kTables.of[0][high >> 24];
  }
  for (; left > 0; --left, ++at) state = state >> 8 ^ kTables.of[0][(state ^ *at) & 255];
  return ~state;
}

uint32_t Crc32c(absl::string_view bytes, uint32_t crc) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return WithInstruction(bytes, crc);
#endif
  return Crc32cPortable(bytes, crc);
}

std::string CrcText(uint32_t crc) { return absl::StrFormat("%08x", crc); }

}  // namespace muster::parallel
