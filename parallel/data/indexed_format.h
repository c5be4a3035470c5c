// Private to parallel/data: the fixed part of an .idx file.
#ifndef MUSTER_PARALLEL_DATA_INDEXED_FORMAT_H_
#define MUSTER_PARALLEL_DATA_INDEXED_FORMAT_H_

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/string_view.h"

namespace muster::parallel {

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

inline constexpr char kIndexMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', '\0', '\0'};
inline constexpr uint64_t kIndexVersion = 1;
inline constexpr int64_t kIndexHeaderBytes = 9 + 8 + 1 + 8 + 8;

template <typename T>
void AppendNumber(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}
// The fields of the format are not aligned.
template <typename T>
T NumberAt(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_INDEXED_FORMAT_H_
