#include "parallel/checkpoint/safetensors.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/checkpoint/json.h"

namespace muster::parallel {
namespace {

constexpr char kMetadata[] = "__metadata__";

absl::StatusOr<SafetensorsEntry> DecodeEntry(const std::string& name, const Json& value) {
  SafetensorsEntry entry;
  entry.name = name;
  ASSIGN_OR_RETURN(const std::string dtype, StringAt(value, "dtype"));
  ASSIGN_OR_RETURN(entry.dtype, ParseDType(dtype));
  ASSIGN_OR_RETURN(entry.shape, NumbersAt(value, "shape"));
  ASSIGN_OR_RETURN(const std::vector<int64_t> offsets, NumbersAt(value, "data_offsets"));
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    return absl::DataLossError("data_offsets are not [begin, end]");
  }
  entry.begin = offsets[0];
  entry.end = offsets[1];
  ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(entry.shape, SizeOf(entry.dtype)));
  if (entry.end - entry.begin != bytes) {
    return absl::DataLossError(absl::StrCat("data_offsets [", entry.begin, ", ", entry.end,
                                            "] hold ", entry.end - entry.begin,
                                            " bytes, its shape and dtype take ", bytes));
  }
  return entry;
}

absl::StatusOr<SafetensorsHeader> Decode(absl::string_view json, int64_t data_bytes) {
  ASSIGN_OR_RETURN(const Json object, ParseObject(json));
  SafetensorsHeader header;
  for (const auto& [name, value] : object.items()) {
    if (name != kMetadata) {
      absl::StatusOr<SafetensorsEntry> entry = DecodeEntry(name, value);
      if (!entry.ok()) {
        return absl::DataLossError(absl::StrCat("tensor '", name, "': ", entry.status().message()));
      }
      header.entries.push_back(std::move(entry).value());
      continue;
    }
    if (!value.is_object()) return absl::DataLossError("__metadata__ is not an object");
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) {
        return absl::DataLossError(absl::StrCat("__metadata__ '", key, "' is not a text"));
      }
      header.metadata[key] = text.get<std::string>();
    }
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  int64_t expected = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    if (entry.begin != expected) {
      return absl::DataLossError(absl::StrCat("tensor '", entry.name, "' begins at ", entry.begin,
                                              ", the one before it ends at ", expected));
    }
    expected = entry.end;
  }
  if (expected != data_bytes) {
    return absl::DataLossError(absl::StrCat("the tensors take ", expected, " bytes, the file has ",
                                            data_bytes, " behind the header"));
  }
  return header;
}

absl::StatusOr<int64_t> HeaderBytes(absl::string_view prefix, int64_t file_bytes) {
  if (prefix.size() < 8) {
    return absl::DataLossError(absl::StrCat("has only ", file_bytes, " bytes"));
  }
  uint64_t length;
  std::memcpy(&length, prefix.data(), 8);
  if (length > static_cast<uint64_t>(kSafetensorsHeaderBytesMax) ||
      static_cast<int64_t>(length) > file_bytes - 8) {
    return absl::DataLossError(
        absl::StrCat("claims a header of ", length, " bytes, has ", file_bytes, " in all"));
  }
  return static_cast<int64_t>(length) + 8;
}

}  // namespace

absl::StatusOr<kernels::DType> ParseDType(absl::string_view name) {
  using kernels::DType;
  for (DType dtype :
       {DType::kF32, DType::kBF16, DType::kF16, DType::kI32, DType::kI64, DType::kU8}) {
    if (name == Name(dtype)) return dtype;
  }
  return absl::InvalidArgumentError(absl::StrCat("dtype '", name, "' is not known"));
}

std::string EncodeSafetensorsHeader(const SafetensorsHeader& header) {
  Json object = Json::object();
  if (!header.metadata.empty()) object[kMetadata] = header.metadata;
  int64_t expected = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    CHECK(entry.begin == expected && entry.name != kMetadata && !object.contains(entry.name))
        << entry.name;
    object[entry.name] = {{"dtype", Name(entry.dtype)},
                          {"shape", entry.shape},
                          {"data_offsets", {entry.begin, entry.end}}};
    expected = entry.end;
  }
  // Names that are not UTF-8 are the caller's mistake; by default the library would throw.
  std::string json = object.dump(-1, ' ', false, Json::error_handler_t::replace);
  json.resize((json.size() + 7) / 8 * 8, ' ');
  const uint64_t length = json.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + json;
}

absl::StatusOr<SafetensorsHeader> DecodeSafetensorsHeader(absl::string_view prefix,
                                                          int64_t file_bytes,
                                                          const std::string& file) {
  absl::StatusOr<int64_t> bytes = HeaderBytes(prefix, file_bytes);
  if (!bytes.ok()) return Annotate(bytes.status(), file);
  if (static_cast<int64_t>(prefix.size()) < *bytes) {
    return absl::DataLossError(
        absl::StrCat(file, ": the header ends at byte ", *bytes, ", got ", prefix.size()));
  }
  absl::StatusOr<SafetensorsHeader> header =
      Decode(prefix.substr(8, static_cast<size_t>(*bytes) - 8), file_bytes - *bytes);
  if (!header.ok()) return Annotate(header.status(), absl::StrCat(file, ": header"));
  header->bytes = *bytes;
  return header;
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(FileSystem& files,
                                                        const std::string& path) {
  ASSIGN_OR_RETURN(const int64_t size, files.Size(path));
  ASSIGN_OR_RETURN(std::string prefix, files.ReadRange(path, 0, std::min<int64_t>(8, size)));
  absl::StatusOr<int64_t> bytes = HeaderBytes(prefix, size);
  if (!bytes.ok()) return Annotate(bytes.status(), path);
  ASSIGN_OR_RETURN(prefix, files.ReadRange(path, 0, *bytes));
  return DecodeSafetensorsHeader(prefix, size, path);
}

}  // namespace muster::parallel
