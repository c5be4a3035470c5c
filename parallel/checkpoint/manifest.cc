#include "parallel/checkpoint/manifest.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/checkpoint/crc32c.h"
#include "parallel/checkpoint/json.h"
#include "parallel/checkpoint/safetensors.h"

namespace muster::parallel {
namespace {

constexpr char kFormat[] = "muster-checkpoint";
constexpr int64_t kVersion = 1;
constexpr char kChunks[] = "pieces";  // the name in the files of version 1
constexpr absl::string_view kBeforeChecksum = "{\"crc32c\":\"";
constexpr absl::string_view kAfterChecksum = "\",\"manifest\":";
constexpr absl::string_view kEnd = "}\n";

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::StatusOr<uint32_t> CrcAt(const Json& object, const char* key) {
  ASSIGN_OR_RETURN(const std::string text, StringAt(object, key));
  uint32_t crc = 0;
  if (text.size() != 8 || !absl::SimpleHexAtoi(text, &crc)) {
    return absl::DataLossError(absl::StrCat("field '", key, "' is not 8 hex digits"));
  }
  return crc;
}

Json ShardToJson(const ShardRecord& shard) {
  return {{"file", shard.file},
          {"bytes", shard.bytes},
          {"header_bytes", shard.header_bytes},
          {"header_crc32c", CrcText(shard.header_crc)}};
}
absl::StatusOr<ShardRecord> ShardFromJson(const Json& json) {
  ShardRecord shard;
  ASSIGN_OR_RETURN(shard.file, StringAt(json, "file"));
  // The name is joined to a path: it must not lead out of the directory.
  if (shard.file.empty() || shard.file.size() > 255 || shard.file[0] == '.' ||
      shard.file.find('/') != std::string::npos || shard.file.find('\0') != std::string::npos) {
    return absl::DataLossError("field 'file' is not a plain file name");
  }
  ASSIGN_OR_RETURN(shard.bytes, IntegerAt(json, "bytes"));
  ASSIGN_OR_RETURN(shard.header_bytes, IntegerAt(json, "header_bytes"));
  ASSIGN_OR_RETURN(shard.header_crc, CrcAt(json, "header_crc32c"));
  if (shard.header_bytes > shard.bytes) {
    return absl::DataLossError(absl::StrCat(shard.file, " has more header bytes than bytes"));
  }
  return shard;
}

Json ChunkToJson(const ChunkRecord& chunk) {
  return {{"shard", chunk.shard},       {"begin", chunk.begin},
          {"end", chunk.end},           {"offset", chunk.box.offset},
          {"extent", chunk.box.extent}, {"crc32c", CrcText(chunk.crc)}};
}
// Decodes the rest of `chunk`, whose tensor, dtype and shape are known.
absl::Status ChunkFromJson(const Json& json, const std::vector<ShardRecord>& shards,
                           ChunkRecord& chunk) {
  ASSIGN_OR_RETURN(const int64_t shard, IntegerAt(json, "shard"));
  ASSIGN_OR_RETURN(chunk.begin, IntegerAt(json, "begin"));
  ASSIGN_OR_RETURN(chunk.end, IntegerAt(json, "end"));
  ASSIGN_OR_RETURN(chunk.box.offset, NumbersAt(json, "offset"));
  ASSIGN_OR_RETURN(chunk.box.extent, NumbersAt(json, "extent"));
  ASSIGN_OR_RETURN(chunk.crc, CrcAt(json, "crc32c"));
  if (shard >= static_cast<int64_t>(shards.size())) {
    return absl::DataLossError(absl::StrCat("is in shard ", shard, " of ", shards.size()));
  }
  chunk.shard = static_cast<int>(shard);
  if (!Inside(chunk.box, chunk.shape)) {
    return absl::DataLossError("has a box outside the tensor");
  }
  const ShardRecord& file = shards[static_cast<size_t>(shard)];
  ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(chunk.box.extent, SizeOf(chunk.dtype)));
  if (chunk.begin < file.header_bytes || chunk.end > file.bytes || chunk.begin > chunk.end ||
      chunk.end - chunk.begin != bytes) {
    return absl::DataLossError(absl::StrCat(
        chunk.box.ToString(), " of ", bytes, " bytes is at bytes ", chunk.begin, " to ", chunk.end,
        " of ", file.file, ", which holds data from ", file.header_bytes, " to ", file.bytes));
  }
  return absl::OkStatus();
}

Json TensorsToJson(const std::vector<ChunkRecord>& chunks) {
  Json tensors = Json::object();
  for (const ChunkRecord& chunk : chunks) {
    Json& tensor = tensors[chunk.tensor];
    if (tensor.is_null()) {
      tensor = {{"dtype", Name(chunk.dtype)}, {"shape", chunk.shape}, {kChunks, Json::array()}};
    }
    tensor[kChunks].push_back(ChunkToJson(chunk));
  }
  return tensors;
}
absl::Status TensorFromJson(const std::string& name, const Json& json,
                            const std::vector<ShardRecord>& shards,
                            std::vector<ChunkRecord>& chunks) {
  ChunkRecord common;
  common.tensor = name;
  ASSIGN_OR_RETURN(const std::string dtype, StringAt(json, "dtype"));
  ASSIGN_OR_RETURN(common.dtype, ParseDType(dtype));
  ASSIGN_OR_RETURN(common.shape, NumbersAt(json, "shape"));
  RETURN_IF_ERROR(BytesOf(common.shape, SizeOf(common.dtype)).status());
  ASSIGN_OR_RETURN(const Json* list, ArrayAt(json, kChunks));
  for (const Json& item : *list) {
    ChunkRecord chunk = common;
    if (absl::Status status = ChunkFromJson(item, shards, chunk); !status.ok()) {
      return Annotate(status, absl::StrCat("chunk ", &item - &(*list)[0]));
    }
    chunks.push_back(std::move(chunk));
  }
  return absl::OkStatus();
}

absl::Status ShardsAndChunksFromJson(const Json& body, std::vector<ShardRecord>& shards,
                                     std::vector<ChunkRecord>& chunks) {
  ASSIGN_OR_RETURN(const Json* list, ArrayAt(body, "shards"));
  for (const Json& item : *list) {
    ASSIGN_OR_RETURN(ShardRecord shard, ShardFromJson(item));
    shards.push_back(std::move(shard));
  }
  ASSIGN_OR_RETURN(const Json* tensors, ObjectAt(body, "tensors"));
  for (const auto& [name, json] : tensors->items()) {
    if (absl::Status status = TensorFromJson(name, json, shards, chunks); !status.ok()) {
      return absl::DataLossError(absl::StrCat("tensor '", name, "': ", status.message()));
    }
  }
  return absl::OkStatus();
}

absl::Status MapsFromJson(const Json& body, CheckpointState& state) {
  for (auto [key, to] : {std::pair("mesh", &state.mesh), std::pair("integers", &state.integers)}) {
    ASSIGN_OR_RETURN(const Json* object, ObjectAt(body, key));
    for (const auto& [name, value] : object->items()) {
      if (!value.is_number_integer() ||
          (value.is_number_unsigned() &&
           value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))) {
        return absl::DataLossError(absl::StrCat("'", name, "' of '", key, "' is not an integer"));
      }
      (*to)[name] = value.get<int64_t>();
    }
  }
  ASSIGN_OR_RETURN(const Json* numbers, ObjectAt(body, "numbers"));
  for (const auto& [name, value] : numbers->items()) {
    if (!value.is_number()) {
      return absl::DataLossError(absl::StrCat("'", name, "' of 'numbers' is not a number"));
    }
    state.numbers[name] = value.get<double>();
  }
  ASSIGN_OR_RETURN(const Json* texts, ObjectAt(body, "texts"));
  for (const auto& [name, value] : texts->items()) {
    if (!value.is_string()) {
      return absl::DataLossError(absl::StrCat("'", name, "' of 'texts' is not a text"));
    }
    state.texts[name] = value.get<std::string>();
  }
  return absl::OkStatus();
}

absl::StatusOr<Manifest> FromBody(absl::string_view text) {
  ASSIGN_OR_RETURN(const Json body, ParseObject(text));
  ASSIGN_OR_RETURN(const std::string format, StringAt(body, "format"));
  ASSIGN_OR_RETURN(const int64_t version, IntegerAt(body, "version"));
  if (format != kFormat || version != kVersion) {
    return absl::DataLossError(absl::StrCat("format '", format, "' version ", version,
                                            ", expected '", kFormat, "' version ", kVersion));
  }
  Manifest manifest;
  ASSIGN_OR_RETURN(const std::string job, StringAt(body, "job"));
  ASSIGN_OR_RETURN(const uint64_t epoch, UnsignedAt(body, "epoch"));
  manifest.state.id.job = JobId(job);
  manifest.state.id.epoch = Epoch(epoch);
  ASSIGN_OR_RETURN(manifest.state.id.step, IntegerAt(body, "step"));
  ASSIGN_OR_RETURN(manifest.state.consumed_samples, IntegerAt(body, "consumed_samples"));
  RETURN_IF_ERROR(MapsFromJson(body, manifest.state));
  RETURN_IF_ERROR(ShardsAndChunksFromJson(body, manifest.shards, manifest.chunks));
  if (const auto partial = body.find("partial"); partial != body.end()) {
    if (!partial->is_boolean()) return absl::DataLossError("field 'partial' is no boolean");
    manifest.partial = partial->get<bool>();
  }
  // The items of a JSON object come sorted by name, so the chunks of a tensor are neighbours.
  for (size_t begin = 0, end; begin < manifest.chunks.size(); begin = end) {
    const ChunkRecord& first = manifest.chunks[begin];
    std::vector<Box> boxes;
    for (end = begin; end < manifest.chunks.size() && manifest.chunks[end].tensor == first.tensor;
         ++end) {
      boxes.push_back(manifest.chunks[end].box);
    }
    if (auto problem = manifest.partial ? OverlapProblem(boxes, first.shape)
                                        : TilingProblem(boxes, first.shape)) {
      return absl::DataLossError(absl::StrCat("tensor '", first.tensor, "': ", *problem));
    }
  }
  return manifest;
}

}  // namespace

std::string EncodeRankRecord(const RankRecord& record) {
  Json body = {{"code", static_cast<int>(record.status.code())},
               {"message", std::string(record.status.message())},
               {"shards", Json::array()},
               {"tensors", TensorsToJson(record.chunks)}};
  for (const ShardRecord& shard : record.shards) body["shards"].push_back(ShardToJson(shard));
  return Dump(body);
}

absl::StatusOr<RankRecord> DecodeRankRecord(absl::string_view text) {
  ASSIGN_OR_RETURN(const Json body, ParseObject(text));
  RankRecord record;
  ASSIGN_OR_RETURN(const int64_t code, IntegerAt(body, "code"));
  ASSIGN_OR_RETURN(const std::string message, StringAt(body, "message"));
  record.status = absl::Status(static_cast<absl::StatusCode>(code), message);
  RETURN_IF_ERROR(ShardsAndChunksFromJson(body, record.shards, record.chunks));
  return record;
}

std::string EncodeManifest(const Manifest& manifest) {
  const CheckpointState& state = manifest.state;
  Json body = {{"format", kFormat},           {"version", kVersion},
               {"job", state.id.job.value()}, {"epoch", state.id.epoch.value()},
               {"step", state.id.step},       {"consumed_samples", state.consumed_samples},
               {"mesh", state.mesh},          {"integers", state.integers},
               {"numbers", state.numbers},    {"texts", state.texts},
               {"shards", Json::array()},     {"tensors", TensorsToJson(manifest.chunks)}};
  for (const ShardRecord& shard : manifest.shards) body["shards"].push_back(ShardToJson(shard));
  if (manifest.partial) body["partial"] = true;
  const std::string text = Dump(body);
  return absl::StrCat(kBeforeChecksum, CrcText(Crc32c(text)), kAfterChecksum, text, kEnd);
}

absl::StatusOr<Manifest> DecodeManifest(absl::string_view text, const std::string& file) {
  const size_t before = kBeforeChecksum.size() + 8 + kAfterChecksum.size();
  if (text.size() < before + kEnd.size() || !absl::StartsWith(text, kBeforeChecksum) ||
      text.substr(kBeforeChecksum.size() + 8, kAfterChecksum.size()) != kAfterChecksum ||
      !absl::EndsWith(text, kEnd)) {
    return absl::DataLossError(
        absl::StrCat(file, ": is not a manifest, or is cut off (", text.size(), " bytes)"));
  }
  const absl::string_view stated = text.substr(kBeforeChecksum.size(), 8);
  const absl::string_view body = text.substr(before, text.size() - before - kEnd.size());
  if (const std::string actual = CrcText(Crc32c(body)); actual != stated) {
    return absl::DataLossError(
        absl::StrCat(file, ": its checksum is ", actual, ", it states ", stated));
  }
  absl::StatusOr<Manifest> manifest = FromBody(body);
  if (manifest.ok()) return manifest;
  return absl::DataLossError(absl::StrCat(file, ": ", manifest.status().message()));
}

}  // namespace muster::parallel
