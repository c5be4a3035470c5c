#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/checkpoint/crc32c.h"
#include "parallel/checkpoint/manifest.h"
#include "parallel/checkpoint/safetensors.h"

namespace muster::parallel {
namespace {

absl::Status CheckChunk(const SaveChunk& chunk) {
  if (chunk.tensor.empty() || absl::StartsWith(chunk.tensor, "__")) {
    return absl::InvalidArgumentError(absl::StrCat("'", chunk.tensor, "' is no tensor name"));
  }
  if (!Inside(chunk.box, chunk.shape)) {
    return absl::InvalidArgumentError(absl::StrCat("tensor '", chunk.tensor, "': box ",
                                                   chunk.box.ToString(), " is not inside ",
                                                   Box::Whole(chunk.shape).ToString()));
  }
  CHECK(chunk.box.elements() == 0 || chunk.data != nullptr || chunk.produce != nullptr)
      << chunk.tensor;
  return absl::OkStatus();
}

int64_t ByteCount(const SaveChunk& chunk) { return chunk.box.elements() * SizeOf(chunk.dtype); }

// Produces the bytes into `storage` where the chunk has none.
absl::StatusOr<absl::string_view> BytesOf(const SaveChunk& chunk, std::string& storage) {
  const auto size = static_cast<size_t>(ByteCount(chunk));
  if (chunk.data != nullptr) return absl::string_view(static_cast<const char*>(chunk.data), size);
  storage.resize(size);
  absl::Status status = chunk.produce(storage.data());
  if (!status.ok()) return Annotate(status, absl::StrCat("tensor '", chunk.tensor, "'"));
  return absl::string_view(storage);
}

// Writes this rank's shard; a rank that holds nothing writes none.
absl::StatusOr<RankRecord> WriteShard(FileSystem& files, const std::string& directory,
                                      const CheckpointId& id, int rank,
                                      absl::Span<const SaveChunk> chunks) {
  RankRecord record;
  std::vector<const SaveChunk*> order;
  for (const SaveChunk& chunk : chunks) {
    RETURN_IF_ERROR(CheckChunk(chunk));
    if (chunk.box.elements() > 0) order.push_back(&chunk);
  }
  if (order.empty()) return record;
  // Wide types first, so that every tensor is aligned to its element.
  std::sort(order.begin(), order.end(), [](const SaveChunk* a, const SaveChunk* b) {
    return std::forward_as_tuple(-SizeOf(a->dtype), a->tensor, a->box.offset) <
           std::forward_as_tuple(-SizeOf(b->dtype), b->tensor, b->box.offset);
  });

  SafetensorsHeader header;
  header.metadata = {{"format", "muster"},
                     {"job", id.job.value()},
                     {"step", absl::StrCat(id.step)},
                     {"epoch", absl::StrCat(id.epoch.value())}};
  int64_t at = 0;
  for (const SaveChunk* chunk : order) {
    const bool whole = chunk->box == Box::Whole(chunk->shape);
    const std::string name =
        whole ? chunk->tensor : absl::StrCat(chunk->tensor, chunk->box.ToString());
    if (!header.entries.empty() && header.entries.back().name == name) {
      return absl::InvalidArgumentError(absl::StrCat("'", name, "' is to be saved twice"));
    }
    const int64_t bytes = ByteCount(*chunk);
    header.entries.push_back({name, chunk->dtype, chunk->box.extent, at, at + bytes});
    at += bytes;
  }
  const std::string encoded = EncodeSafetensorsHeader(header);
  if (static_cast<int64_t>(encoded.size()) > kSafetensorsHeaderBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(order.size(), " chunks make a header of ",
                                                   encoded.size(), " bytes, too large to read"));
  }

  ShardRecord shard;
  shard.file = absl::StrFormat("rank-%05d.safetensors", rank);
  shard.header_bytes = static_cast<int64_t>(encoded.size());
  shard.header_crc = Crc32c(encoded);
  shard.bytes = shard.header_bytes + at;
  const std::string path = absl::StrCat(directory, "/", shard.file);
  {
    ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, files.Create(path + ".tmp"));
    RETURN_IF_ERROR(file->Append(encoded));
    int64_t begin = shard.header_bytes;
    std::string storage;
    for (const SaveChunk* chunk : order) {
      ASSIGN_OR_RETURN(const absl::string_view bytes, BytesOf(*chunk, storage));
      const int64_t end = begin + static_cast<int64_t>(bytes.size());
      record.chunks.push_back(
          {chunk->tensor, chunk->dtype, chunk->shape, chunk->box, 0, begin, end, Crc32c(bytes)});
      RETURN_IF_ERROR(file->Append(bytes));
      begin = end;
    }
    RETURN_IF_ERROR(file->Sync());
    RETURN_IF_ERROR(file->Close());
  }
  RETURN_IF_ERROR(files.Rename(path + ".tmp", path));
  RETURN_IF_ERROR(files.SyncDirectory(directory));
  record.shards.push_back(shard);
  return record;
}

// The text of a manifest that says the checksum of a file beside it.
std::string ChecksumKey(const std::string& name) { return absl::StrCat("file.", name, ".crc32c"); }

absl::Status CheckState(const CheckpointState& state) {
  const std::string& job = state.id.job.value();
  if (job.empty() || job[0] == '.' || job.find('/') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("job id '", job, "' is no directory name"));
  }
  if (state.id.step < 0 || state.consumed_samples < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("step ", state.id.step, ", consumed samples ", state.consumed_samples));
  }
  for (const auto& [name, number] : state.numbers) {
    if (!std::isfinite(number)) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", name, "' is ", number, "; a checkpoint keeps finite numbers only"));
    }
  }
  return absl::OkStatus();
}

// What this rank does before it tells the others.
absl::StatusOr<RankRecord> Prepare(FileSystem& files, const std::string& root,
                                   const std::string& directory, const CheckpointState& state,
                                   int rank, bool leads, absl::Span<const SaveChunk> chunks) {
  RETURN_IF_ERROR(CheckState(state));
  if (files.Exists(absl::StrCat(directory, "/", kManifestFile))) {
    return absl::AlreadyExistsError(absl::StrCat(directory, " is complete already"));
  }
  RETURN_IF_ERROR(files.MakeDirectory(directory));
  RETURN_IF_ERROR(files.SyncDirectory(ParentDirectory(directory)));
  RETURN_IF_ERROR(files.SyncDirectory(root));
  RETURN_IF_ERROR(files.SyncDirectory(ParentDirectory(root)));
  for (const auto& [name, bytes] : state.files) {
    if (leads) RETURN_IF_ERROR(files.WriteAtomically(absl::StrCat(directory, "/", name), bytes));
  }
  return WriteShard(files, directory, state.id, rank, chunks);
}

// Makes one manifest of the records of the ranks of group `own`. Returns the first failure of any
// rank. Adds the shards of all ranks to `bytes`.
absl::StatusOr<Manifest> Combine(const CheckpointState& state,
                                 const std::vector<std::string>& texts,
                                 absl::Span<const int> groups, int own, int64_t& bytes) {
  Manifest manifest;
  manifest.state = state;
  for (const auto& [name, content] : state.files) {
    manifest.state.texts[ChecksumKey(name)] = CrcText(Crc32c(content));
    bytes += static_cast<int64_t>(content.size());
  }
  manifest.partial =
      std::any_of(groups.begin(), groups.end(), [](int group) { return group != 0; });
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    absl::StatusOr<RankRecord> record = DecodeRankRecord(texts[rank]);
    if (!record.ok()) return Annotate(record.status(), absl::StrCat("record of rank ", rank));
    if (!record->status.ok()) return Annotate(record->status, absl::StrCat("rank ", rank));
    for (const ShardRecord& shard : record->shards) bytes += shard.bytes;
    if (!groups.empty() && groups[rank] != own) continue;
    for (ChunkRecord& chunk : record->chunks) {
      chunk.shard = static_cast<int>(manifest.shards.size());
      manifest.chunks.push_back(std::move(chunk));
    }
    for (ShardRecord& shard : record->shards) manifest.shards.push_back(std::move(shard));
  }
  std::stable_sort(manifest.chunks.begin(), manifest.chunks.end(),
                   [](const ChunkRecord& a, const ChunkRecord& b) { return a.tensor < b.tensor; });
  for (size_t i = 1; i < manifest.chunks.size(); ++i) {
    const ChunkRecord& a = manifest.chunks[i - 1];
    const ChunkRecord& b = manifest.chunks[i];
    if (a.tensor == b.tensor && (a.dtype != b.dtype || a.shape != b.shape)) {
      return absl::InvalidArgumentError(
          absl::StrCat("ranks disagree about dtype or shape of '", a.tensor, "'"));
    }
  }
  return manifest;
}

}  // namespace

absl::StatusOr<std::string> ReadCheckpointFile(FileSystem& files, const std::string& directory,
                                               const CheckpointState& state,
                                               const std::string& name) {
  const auto checksum = state.texts.find(ChecksumKey(name));
  if (checksum == state.texts.end()) return std::string();
  const std::string path = absl::StrCat(directory, "/", name);
  absl::StatusOr<std::string> bytes = files.Read(path);
  if (absl::IsNotFound(bytes.status())) {
    return absl::DataLossError(absl::StrCat(path, ", which the manifest names, is missing"));
  }
  RETURN_IF_ERROR(bytes.status());
  if (CrcText(Crc32c(*bytes)) == checksum->second) return bytes;
  return absl::DataLossError(absl::StrCat(path, " has the CRC32C ", CrcText(Crc32c(*bytes)),
                                          ", but the manifest has ", checksum->second));
}

absl::StatusOr<SaveResult> SaveCheckpoint(FileSystem& files, const std::string& root,
                                          const CheckpointState& state, int rank,
                                          absl::Span<const SaveChunk> chunks, TextGatherer gather,
                                          absl::Span<const int> groups) {
  const bool leads = groups.empty() ? rank == 0 : groups[static_cast<size_t>(rank)] == rank;
  SaveResult result;
  result.directory = CheckpointDirectory(root, state.id);
  ASSIGN_OR_RETURN(const std::vector<std::string> texts, gather([&] {
                     absl::StatusOr<RankRecord> own =
                         Prepare(files, root, result.directory, state, rank, leads, chunks);
                     if (own.ok()) return EncodeRankRecord(*own);
                     RankRecord failed;
                     failed.status = own.status();
                     return EncodeRankRecord(failed);
                   }));
  CHECK(groups.empty() || groups.size() == texts.size());
  const int group = groups.empty() ? 0 : groups[static_cast<size_t>(rank)];
  ASSIGN_OR_RETURN(const Manifest manifest, Combine(state, texts, groups, group, result.bytes));
  const std::string text = EncodeManifest(manifest);
  result.bytes += static_cast<int64_t>(text.size());
  const std::string path = absl::StrCat(result.directory, "/", kManifestFile);
  // The checkpoint counts once every group's manifest is there.
  ASSIGN_OR_RETURN(const std::vector<std::string> verdicts, gather([&] {
                     // Read back as a loader would: nothing is committed that could not be loaded,
                     // such as chunks that leave a gap.
                     RankRecord verdict;
                     verdict.status = DecodeManifest(text, path).status();
                     if (!verdict.status.ok()) {
                       verdict.status = absl::InvalidArgumentError(
                           absl::StrCat("not committed: ", verdict.status.message()));
                     } else if (rank == group) {
                       verdict.status = files.WriteAtomically(path, text);
                     }
                     return EncodeRankRecord(verdict);
                   }));
  for (size_t of = 0; of < verdicts.size(); ++of) {
    ASSIGN_OR_RETURN(const RankRecord other, DecodeRankRecord(verdicts[of]));
    if (!other.status.ok()) return Annotate(other.status, absl::StrCat("rank ", of));
  }
  if (rank == 0) result.manifest_checksum = CrcText(Crc32c(text));
  return result;
}

TextGatherer GatherAlone() {
  return [](absl::FunctionRef<std::string()> text) -> absl::StatusOr<std::vector<std::string>> {
    return std::vector<std::string>{text()};
  };
}

}  // namespace muster::parallel
