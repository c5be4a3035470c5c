// The safetensors container: u64 little-endian header length, a JSON header, then the tensors'
// bytes without gaps. https://huggingface.co/docs/safetensors, format as read by safetensors 0.4.
#ifndef MUSTER_PARALLEL_CHECKPOINT_SAFETENSORS_H_
#define MUSTER_PARALLEL_CHECKPOINT_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file_system.h"
#include "kernels/tensor.h"

namespace muster::parallel {

// kInvalidArgument for anything but "F32", "BF16", "F16", "I32", "I64", "U8".
absl::StatusOr<kernels::DType> ParseDType(absl::string_view name);

struct SafetensorsEntry {
  std::string name;
  kernels::DType dtype = kernels::DType::kF32;
  std::vector<int64_t> shape;
  int64_t begin = 0;  // in the data behind the header
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;
  std::vector<SafetensorsEntry> entries;  // by begin
  int64_t bytes = 0;                      // of the file in front of the data, the length included
};

// The largest header that is written or accepted; the same limit as the reference reader's.
inline constexpr int64_t kSafetensorsHeaderBytesMax = 100'000'000;

// Length and JSON, padded with spaces so that the data starts at a multiple of 8. Requires: entries
// without gaps from 0, sizes that fit dtype and shape, distinct names other than "__metadata__".
std::string EncodeSafetensorsHeader(const SafetensorsHeader& header);

// `prefix` is the beginning of a file of `file_bytes` bytes, at least the whole header; `file` is
// for messages. kDataLoss names the file, the tensor and the numbers: header longer than the file,
// not JSON, unknown dtype, offsets that leave gaps, overlap or do not fit the shape or the file.
absl::StatusOr<SafetensorsHeader> DecodeSafetensorsHeader(absl::string_view prefix,
                                                          int64_t file_bytes,
                                                          const std::string& file);

// Reads only as much as the header takes. Also the codes of FileSystem.
absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(FileSystem& files, const std::string& path);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_CHECKPOINT_SAFETENSORS_H_
