// Checkpoints: every tensor saved as boxes under a layout-free name, so that any mesh can load what
// any other saved.
//
//   ROOT/<job id>/step-00000150.e3/rank-00000.safetensors   one shard per rank that holds anything
//                                  rank-00001.safetensors
//                                  tokenizer                and other files of CheckpointState
//                                  manifest.json            written last: its presence = complete
//
// A save becomes durable in this order: each rank writes its shard under a temporary name, syncs it
// and renames it; rank 0 gets the records of all shards; rank 0 writes the manifest the same way.
// So at no point is there a manifest over missing data, whichever process dies at whatever time.
// The epoch in the name keeps a fenced attempt from writing into a later attempt's directory.
//
// The manifest is {"crc32c":"<8 hex digits>","manifest":<body>}\n, where the checksum covers the
// bytes of <body>, a JSON object: format, version, job, epoch, step, consumed_samples, mesh,
// numbers, texts, shards (file, bytes, header_bytes, header_crc32c) and tensors (dtype, shape and
// chunks: shard, byte range in the file, offset, extent, crc32c). Shards are plain safetensors
// files that other tools read. A chunk is one box of one tensor; where it is not the whole tensor
// it is called "name[0:96, 32:64]".
//
// Status codes: kDataLoss for damage (flipped byte, truncated or missing shard, garbled manifest,
// chunks that overlap or leave a gap), always with file, tensor and offsets; kNotFound for no
// manifest; kInvalidArgument for a caller's mistake; and FileSystem's.
#ifndef MUSTER_PARALLEL_CHECKPOINT_CHECKPOINT_H_
#define MUSTER_PARALLEL_CHECKPOINT_CHECKPOINT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/file_system.h"
#include "base/ids.h"
#include "kernels/tensor.h"
#include "parallel/checkpoint/box.h"

namespace muster::parallel {

struct CheckpointId {
  JobId job;
  int64_t step = 0;
  Epoch epoch;
  // The version of the attempt's ranks: ranks that were replaced before training must not write
  // where those that took their place do.
  uint32_t membership = 1;
  friend bool operator==(const CheckpointId&, const CheckpointId&) = default;
};

// ROOT/<job id>/step-<8 digits>.e<epoch>, with .m<membership> behind it from the second on.
std::string CheckpointDirectory(const std::string& root, const CheckpointId& id);

// What a checkpoint holds beside tensors.
struct CheckpointState {
  CheckpointId id;
  int64_t consumed_samples = 0;
  std::map<std::string, int64_t> mesh;      // degrees by axis name, for people: loading ignores it
  std::map<std::string, int64_t> integers;  // optimizer step, seeds, fingerprints...
  std::map<std::string, double> numbers;    // finite; kept to the last bit
  std::map<std::string, std::string> texts;
  // Small files that lie beside the shards, by name: what these must not be separated from, as a
  // tokenizer. Read back by ReadCheckpointFile; empty in the state that a reader gives.
  std::map<std::string, std::string> files;
};

// One box of one tensor, to be saved.
struct SaveChunk {
  std::string tensor;  // layout-free, e.g. "optimizer.m.blocks.3.mlp.up.weight"
  kernels::DType dtype = kernels::DType::kF32;
  std::vector<int64_t> shape;  // of the whole tensor
  Box box;
  // Its contiguous row-major storage in host memory, or null: then `produce` fills such storage
  // when the chunk is written. One produced chunk is in memory at a time. An error of `produce`
  // fails the save.
  const void* data = nullptr;
  std::function<absl::Status(void* out)> produce;
};

struct SaveResult {
  std::string directory;
  int64_t bytes = 0;              // all files of the checkpoint
  std::string manifest_checksum;  // CRC32C of the manifest file
};

// Calls `text` once, on the calling thread, and returns the texts of all ranks in rank order, on
// every rank. Writing files is part of `text`, so it may take any time on some of the ranks. Called
// equally often on every rank, also when this rank's share failed, so that nobody waits for ever.
using TextGatherer = absl::AnyInvocable<absl::StatusOr<std::vector<std::string>>(
    absl::FunctionRef<std::string()> text)>;
// The gatherer of a job of one rank.
TextGatherer GatherAlone();

// Every rank of the job calls it with its own chunks, which cover each tensor exactly once over all
// ranks (one of the holders of a replica saves it). Blocks until everything, the manifest included,
// is durable. The result is complete on rank 0; elsewhere `manifest_checksum` is empty. When any
// rank failed, all return its error and there is no manifest that counts. kAlreadyExists when the
// directory has a manifest already. Any thread; `data` must not change meanwhile.
//
// `groups`, for ranks whose `root` is not one directory (each host has its own): by rank, the
// lowest rank that writes into the same directory; empty: all ranks share one. The lowest rank of
// every group writes a manifest of what its group has saved. Such a manifest is partial: tensors
// may have gaps, but chunks do not overlap.
absl::StatusOr<SaveResult> SaveCheckpoint(FileSystem& files, const std::string& root,
                                          const CheckpointState& state, int rank,
                                          absl::Span<const SaveChunk> chunks, TextGatherer gather,
                                          absl::Span<const int> groups = {});

// The bytes of a file of CheckpointState::files from a checkpoint in `directory` with that `state`;
// empty where it was saved without one. kDataLoss: it is gone, or another one.
absl::StatusOr<std::string> ReadCheckpointFile(FileSystem& files, const std::string& directory,
                                               const CheckpointState& state,
                                               const std::string& name);

struct TensorInfo {
  kernels::DType dtype = kernels::DType::kF32;
  std::vector<int64_t> shape;
};

enum class Verify {
  // The manifest's checksum, that chunks tile their tensors (in a partial manifest: that they do
  // not
  // overlap), and the size of every shard.
  kSizes,
  kFull,  // also every byte of every shard
};

// The share of one of several ranks that verify a checkpoint: 0 <= index < count.
struct VerifyShare {
  int index = 0;
  int count = 1;
};

// One checkpoint, opened for reading. Read() may be called from several threads.
class CheckpointReader {
 public:
  // `manifest_checksum` (CRC32C of the file, from the coordinator's record) may be empty.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(
      FileSystem& files, const std::string& directory, Verify verify,
      const std::string& manifest_checksum = "");
  virtual ~CheckpointReader() = default;

  virtual const std::string& directory() const = 0;
  virtual const CheckpointState& state() const = 0;
  virtual const std::map<std::string, TensorInfo>& tensors() const = 0;
  // Other hosts have saved the rest (SaveCheckpoint's groups): tensors may be absent or have gaps.
  virtual bool partial() const = 0;
  // Fills `out` (row-major, box.elements() elements) from the saved chunks that intersect `box`.
  // The checksum of every chunk is verified before the first byte of it is used. kNotFound for a
  // tensor that was not saved, or elements of it that a partial manifest lacks; kInvalidArgument
  // for another dtype or a box outside the tensor.
  virtual absl::Status Read(const std::string& tensor, kernels::DType dtype, const Box& box,
                            void* out) = 0;
  // Bytes that VerifyBytes(share) reads: about 1 / count of all shards.
  virtual int64_t BytesOf(const VerifyShare& share) const = 0;
  // Reads the headers and chunks of the share and checks them. The shares of all `count` ranks
  // cover every byte of every shard exactly once; each takes neighbouring bytes of few files.
  // `read` is called with the bytes read since the last call; false ends the verification with
  // kCancelled.
  virtual absl::Status VerifyBytes(const VerifyShare& share,
                                   absl::FunctionRef<bool(int64_t bytes)> read) = 0;
};

struct CheckpointEntry {
  CheckpointId id;
  std::string directory;
  bool complete = false;  // has a manifest
};
// The checkpoint directories of a job, by step, then epoch; none is OK. Other names are ignored.
absl::StatusOr<std::vector<CheckpointEntry>> ListCheckpoints(FileSystem& files,
                                                             const std::string& root,
                                                             const JobId& job);

// Removes the manifest first and syncs that, so that a crash meanwhile leaves no manifest over
// missing data. A checkpoint that is not there is OK.
absl::Status RemoveCheckpoint(FileSystem& files, const std::string& root, const CheckpointId& id);

// Removes the checkpoints that `keep` (the coordinator's committed ones) does not list, of earlier
// epochs, and of `epoch` where the step is below the newest one kept. Never touches a later
// attempt's checkpoints or a save under way. Returns what was removed.
absl::StatusOr<std::vector<CheckpointId>> PruneCheckpoints(FileSystem& files,
                                                           const std::string& root,
                                                           const JobId& job, Epoch epoch,
                                                           absl::Span<const CheckpointId> keep);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_CHECKPOINT_CHECKPOINT_H_
