#include <algorithm>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/checkpoint/crc32c.h"
#include "parallel/checkpoint/manifest.h"
#include "parallel/checkpoint/safetensors.h"

namespace muster::parallel {
namespace {

class Reader : public CheckpointReader {
 public:
  Reader(FileSystem& files, std::string directory, Manifest manifest)
      : files_(files), directory_(std::move(directory)), manifest_(std::move(manifest)) {
    for (size_t i = 0; i < manifest_.chunks.size(); ++i) {
      const ChunkRecord& chunk = manifest_.chunks[i];
      tensors_.try_emplace(chunk.tensor, TensorInfo{chunk.dtype, chunk.shape});
      chunks_of_[chunk.tensor].push_back(i);
    }
  }

  const std::string& directory() const override { return directory_; }
  const CheckpointState& state() const override { return manifest_.state; }
  const std::map<std::string, TensorInfo>& tensors() const override { return tensors_; }
  bool partial() const override { return manifest_.partial; }

  absl::Status CheckSizes() {
    for (const ShardRecord& shard : manifest_.shards) {
      const std::string path = PathOf(shard);
      const absl::StatusOr<int64_t> bytes = files_.Size(path);
      if (absl::IsNotFound(bytes.status())) {
        return absl::DataLossError(absl::StrCat(path, " is missing; the manifest lists it"));
      }
      RETURN_IF_ERROR(bytes.status());
      if (*bytes != shard.bytes) {
        return absl::DataLossError(
            absl::StrCat(path, " is ", *bytes, " bytes long, the manifest says ", shard.bytes));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Read(const std::string& tensor, kernels::DType dtype, const Box& box,
                    void* out) override;

  int64_t BytesOf(const VerifyShare& share) const override {
    int64_t bytes = 0;
    for (const Unit& unit : UnitsOf(share)) bytes += unit.bytes;
    return bytes;
  }

  absl::Status VerifyBytes(const VerifyShare& share,
                           absl::FunctionRef<bool(int64_t bytes)> read) override {
    for (const Unit& unit : UnitsOf(share)) {
      if (unit.chunk.has_value()) {
        RETURN_IF_ERROR(Verified(*unit.chunk).status());
      } else {
        RETURN_IF_ERROR(VerifyHeader(manifest_.shards[static_cast<size_t>(unit.shard)]));
      }
      if (!read(unit.bytes)) return absl::CancelledError(absl::StrCat(directory_, ": cancelled"));
    }
    return absl::OkStatus();
  }

 private:
  std::string PathOf(const ShardRecord& shard) const {
    return absl::StrCat(directory_, "/", shard.file);
  }

  // What is verified at once: a shard's header, or a chunk.
  struct Unit {
    int shard = 0;
    int64_t begin = 0;  // in the shard
    int64_t bytes = 0;
    std::optional<size_t> chunk;
  };
  // The share's units, in the order of shards and bytes. The units of all shards are thought of as
  // one range of bytes, cut into share.count equal parts; a unit is in the part that has its
  // middle.
  std::vector<Unit> UnitsOf(const VerifyShare& share) const {
    std::vector<Unit> units;
    for (size_t i = 0; i < manifest_.shards.size(); ++i) {
      units.push_back({static_cast<int>(i), 0, manifest_.shards[i].header_bytes, std::nullopt});
    }
    for (size_t i = 0; i < manifest_.chunks.size(); ++i) {
      const ChunkRecord& chunk = manifest_.chunks[i];
      units.push_back({chunk.shard, chunk.begin, chunk.end - chunk.begin, i});
    }
    std::sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) {
      return std::tie(a.shard, a.begin) < std::tie(b.shard, b.begin);
    });
    double total = 0;
    for (const Unit& unit : units) total += static_cast<double>(unit.bytes);
    std::vector<Unit> own;
    double begin = 0;
    for (const Unit& unit : units) {
      const double middle = begin + static_cast<double>(unit.bytes) / 2;
      const int owner =
          total > 0 ? std::min(share.count - 1, static_cast<int>(middle / total * share.count)) : 0;
      if (owner == share.index) own.push_back(unit);
      begin += static_cast<double>(unit.bytes);
    }
    return own;
  }

  absl::Status VerifyHeader(const ShardRecord& shard) {
    ASSIGN_OR_RETURN(const std::string header,
                     files_.ReadRange(PathOf(shard), 0, shard.header_bytes));
    if (const uint32_t crc = Crc32c(header); crc != shard.header_crc) {
      return absl::DataLossError(absl::StrCat(PathOf(shard), ": header (bytes 0 to ",
                                              shard.header_bytes, ") has checksum ", CrcText(crc),
                                              ", the manifest says ", CrcText(shard.header_crc)));
    }
    return DecodeSafetensorsHeader(header, shard.bytes, PathOf(shard)).status();
  }

  // A whole chunk, its checksum verified.
  absl::StatusOr<std::string> Verified(size_t index) {
    const ChunkRecord& chunk = manifest_.chunks[index];
    const std::string path = PathOf(manifest_.shards[static_cast<size_t>(chunk.shard)]);
    absl::StatusOr<std::string> bytes =
        files_.ReadRange(path, chunk.begin, chunk.end - chunk.begin);
    if (absl::IsNotFound(bytes.status())) {
      return absl::DataLossError(
          absl::StrCat(path, " is missing; tensor '", chunk.tensor, "' needs it"));
    }
    RETURN_IF_ERROR(bytes.status());
    if (const uint32_t crc = Crc32c(*bytes); crc != chunk.crc) {
      return absl::DataLossError(absl::StrCat(path, ": tensor '", chunk.tensor, "' ",
                                              chunk.box.ToString(), " (bytes ", chunk.begin, " to ",
                                              chunk.end, ") has checksum ", CrcText(crc),
                                              ", the manifest says ", CrcText(chunk.crc)));
    }
    MutexLock lock(&mutex_);
    verified_.insert(index);
    return bytes;
  }

  FileSystem& files_;
  const std::string directory_;
  const Manifest manifest_;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::vector<size_t>> chunks_of_;
  Mutex mutex_;
  std::set<size_t> verified_ ABSL_GUARDED_BY(mutex_);  // chunks whose checksum was right
};

absl::Status Reader::Read(const std::string& tensor, kernels::DType dtype, const Box& box,
                          void* out) {
  const auto found = tensors_.find(tensor);
  if (found == tensors_.end()) {
    return absl::NotFoundError(absl::StrCat(directory_, " has no tensor '", tensor, "'"));
  }
  if (found->second.dtype != dtype || !Inside(box, found->second.shape)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor '", tensor, "' is ", Name(found->second.dtype), " ",
                     Box::Whole(found->second.shape).ToString(), " in ", directory_, ", asked for ",
                     Name(dtype), " ", box.ToString()));
  }
  const int64_t width = SizeOf(dtype);
  int64_t covered = 0;
  for (size_t index : chunks_of_[tensor]) {
    const std::optional<Box> part = Intersect(manifest_.chunks[index].box, box);
    if (part.has_value()) covered += part->elements();
  }
  if (covered < box.elements()) {
    return absl::NotFoundError(absl::StrCat(
        directory_, " has ", covered, " of ", box.elements(), " elements of tensor '", tensor, "' ",
        box.ToString(), ": the rest was saved on other hosts (checkpoint.storage: local)"));
  }
  for (size_t index : chunks_of_[tensor]) {
    const ChunkRecord& chunk = manifest_.chunks[index];
    const std::optional<Box> part = Intersect(chunk.box, box);
    if (!part.has_value()) continue;
    bool verified;
    {
      MutexLock lock(&mutex_);
      verified = verified_.contains(index);
    }
    if (!verified || part->extent.empty()) {
      ASSIGN_OR_RETURN(const std::string bytes, Verified(index));
      CopyBox(*part, width, chunk.box, bytes.data(), box, static_cast<char*>(out));
      continue;
    }
    // The whole chunk is known to be sound, so that only the rows that are needed are read.
    Box rows = chunk.box;
    rows.offset[0] = part->offset[0];
    rows.extent[0] = part->extent[0];
    const int64_t row_bytes = (chunk.end - chunk.begin) / chunk.box.extent[0];
    const std::string path = PathOf(manifest_.shards[static_cast<size_t>(chunk.shard)]);
    ASSIGN_OR_RETURN(
        const std::string bytes,
        files_.ReadRange(path, chunk.begin + (rows.offset[0] - chunk.box.offset[0]) * row_bytes,
                         rows.extent[0] * row_bytes));
    CopyBox(*part, width, rows, bytes.data(), box, static_cast<char*>(out));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(
    FileSystem& files, const std::string& directory, Verify verify,
    const std::string& manifest_checksum) {
  const std::string path = absl::StrCat(directory, "/", kManifestFile);
  ASSIGN_OR_RETURN(const int64_t bytes, files.Size(path));
  if (bytes > kManifestBytesMax) {
    return absl::DataLossError(absl::StrCat(path, " is ", bytes, " bytes long, at most ",
                                            kManifestBytesMax, " make sense"));
  }
  ASSIGN_OR_RETURN(const std::string text, files.Read(path));
  if (const std::string crc = CrcText(Crc32c(text));
      !manifest_checksum.empty() && crc != manifest_checksum) {
    return absl::DataLossError(
        absl::StrCat(path, " has checksum ", crc, ", it was committed with ", manifest_checksum));
  }
  ASSIGN_OR_RETURN(Manifest manifest, DecodeManifest(text, path));
  auto reader = std::make_unique<Reader>(files, directory, std::move(manifest));
  RETURN_IF_ERROR(reader->CheckSizes());
  if (verify == Verify::kFull) {
    RETURN_IF_ERROR(reader->VerifyBytes({}, [](int64_t) { return true; }));
  }
  return reader;
}

}  // namespace muster::parallel
