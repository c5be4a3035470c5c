// Private to parallel/checkpoint: the manifest, and the record of one shard, as text and in memory.
#ifndef MUSTER_PARALLEL_CHECKPOINT_MANIFEST_H_
#define MUSTER_PARALLEL_CHECKPOINT_MANIFEST_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/tensor.h"
#include "parallel/checkpoint/checkpoint.h"

namespace muster::parallel {

inline constexpr char kManifestFile[] = "manifest.json";
inline constexpr int64_t kManifestBytesMax = int64_t{1} << 28;

// One file of a checkpoint.
struct ShardRecord {
  std::string file;  // name in the checkpoint's directory
  int64_t bytes = 0;
  int64_t header_bytes = 0;
  uint32_t header_crc = 0;
};

// One box of one tensor in a shard.
struct ChunkRecord {
  std::string tensor;
  kernels::DType dtype = kernels::DType::kF32;
  std::vector<int64_t> shape;  // of the whole tensor
  Box box;
  int shard = 0;      // index into the manifest's shards
  int64_t begin = 0;  // in the file
  int64_t end = 0;
  uint32_t crc = 0;
};

struct Manifest {
  CheckpointState state;
  std::vector<ShardRecord> shards;
  std::vector<ChunkRecord> chunks;  // grouped by tensor name
  bool partial = false;             // other hosts have the rest
};

// What a rank tells the others about its save: its shard, if it holds anything, or why it failed.
struct RankRecord {
  absl::Status status;
  std::vector<ShardRecord> shards;  // none or one
  std::vector<ChunkRecord> chunks;
};
std::string EncodeRankRecord(const RankRecord& record);
// kDataLoss for text that is not one; the record's own status is in the record.
absl::StatusOr<RankRecord> DecodeRankRecord(absl::string_view text);

// The whole file, checksum included. Requires: finite numbers.
std::string EncodeManifest(const Manifest& manifest);
// kDataLoss names `file` and the field. Checks the checksum, every field, that chunks lie within
// their shards and within their tensors, and that they tile them (or do not overlap, if partial).
absl::StatusOr<Manifest> DecodeManifest(absl::string_view text, const std::string& file);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_CHECKPOINT_MANIFEST_H_
