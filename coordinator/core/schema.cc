#include "coordinator/core/schema.h"

#include <limits>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"

namespace muster::coordinator::schema {

std::string EncodeU64(uint64_t value) {
  std::string out(8, '\0');
  for (int i = 7; i >= 0; --i) {
    out[i] = static_cast<char>(value & 0xff);
    value >>= 8;
  }
  return out;
}

absl::StatusOr<uint64_t> DecodeU64(absl::string_view bytes) {
  if (bytes.size() != 8) {
    return absl::DataLossError(absl::StrCat("a number of ", bytes.size(), " bytes instead of 8"));
  }
  uint64_t value = 0;
  for (const char c : bytes) value = (value << 8) | static_cast<unsigned char>(c);
  return value;
}

std::string EventKey(uint64_t sequence) { return EncodeU64(sequence); }

std::string Encode(const JobKey& key) {
  std::string out = key.job.value();
  if (!key.numbers.empty()) out.push_back('\0');
  for (const uint64_t number : key.numbers) out += EncodeU64(number);
  return out;
}

absl::StatusOr<JobKey> DecodeJobKey(Table table, absl::string_view bytes, size_t numbers) {
  const size_t tail = numbers == 0 ? 0 : 1 + 8 * numbers;
  if (bytes.size() <= tail || (tail > 0 && bytes[bytes.size() - tail] != '\0')) {
    return absl::DataLossError(absl::StrCat("row '", absl::CHexEscape(bytes), "' of table ",
                                            Name(table), " has no key of a job"));
  }
  JobKey key{JobId(std::string(bytes.substr(0, bytes.size() - tail))), {}};
  for (size_t i = 0; i < numbers; ++i) {
    ASSIGN_OR_RETURN(const uint64_t number,
                     DecodeU64(bytes.substr(bytes.size() - tail + 1 + 8 * i, 8)));
    key.numbers.push_back(number);
  }
  return key;
}

std::string CheckpointKey(const JobId& job, const v1::CheckpointRecord& record) {
  return Encode({job, {record.epoch(), static_cast<uint64_t>(record.step())}});
}

std::string Encode(const KeyValueKey& key) {
  return absl::StrCat(key.job.value(), absl::string_view("\0", 1), EncodeU64(key.epoch.value()),
                      key.key);
}

absl::StatusOr<KeyValueKey> DecodeKeyValueKey(absl::string_view bytes) {
  const size_t zero = bytes.find('\0');
  if (zero == absl::string_view::npos || bytes.size() < zero + 9) {
    return absl::DataLossError(
        absl::StrCat("key_value row '", absl::CHexEscape(bytes), "' has no job and epoch"));
  }
  ASSIGN_OR_RETURN(const uint64_t epoch, DecodeU64(bytes.substr(zero + 1, 8)));
  return KeyValueKey{JobId(std::string(bytes.substr(0, zero))), Epoch(epoch),
                     std::string(bytes.substr(zero + 9))};
}

std::string Serialize(const google::protobuf::MessageLite& message) {
  std::string out(message.ByteSizeLong(), '\0');
  CHECK_LE(out.size(), static_cast<size_t>(std::numeric_limits<int>::max()))
      << message.GetTypeName();
  google::protobuf::io::ArrayOutputStream stream(out.data(), static_cast<int>(out.size()));
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  message.SerializeWithCachedSizes(&coded);
  CHECK(!coded.HadError()) << message.GetTypeName();
  return out;
}

absl::Status Parse(Table table, absl::string_view key, const std::string& value,
                   google::protobuf::MessageLite& message) {
  if (message.ParseFromString(value)) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("row '", absl::CHexEscape(key), "' of table ",
                                          Name(table), " is not a ", message.GetTypeName(), " (",
                                          value.size(), " bytes)"));
}

}  // namespace muster::coordinator::schema
