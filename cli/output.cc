#include "cli/output.h"

#include <yaml-cpp/emitter.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/util/time_util.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::cli {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

Json NumberJson(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

Json EnumJson(const FieldDescriptor& field, int number) {
  const auto* value = field.enum_type()->FindValueByNumber(number);
  if (value == nullptr) return number;
  return value->name();
}

Json TextJson(const FieldDescriptor& field, const std::string& text) {
  return field.type() == FieldDescriptor::TYPE_BYTES ? absl::Base64Escape(text) : text;
}

// One value of a field; `index` is -1 for a singular one.
Json ValueJson(const Message& message, const FieldDescriptor& field, int index) {
  const Reflection& reflection = *message.GetReflection();
  const auto get = [&](auto single, auto repeated) {
    return index < 0 ? (reflection.*single)(message, &field)
                     : (reflection.*repeated)(message, &field, index);
  };
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return get(&Reflection::GetInt32, &Reflection::GetRepeatedInt32);
    case FieldDescriptor::CPPTYPE_INT64:
      return get(&Reflection::GetInt64, &Reflection::GetRepeatedInt64);
    case FieldDescriptor::CPPTYPE_UINT32:
      return get(&Reflection::GetUInt32, &Reflection::GetRepeatedUInt32);
    case FieldDescriptor::CPPTYPE_UINT64:
      return get(&Reflection::GetUInt64, &Reflection::GetRepeatedUInt64);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return NumberJson(get(&Reflection::GetDouble, &Reflection::GetRepeatedDouble));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return NumberJson(get(&Reflection::GetFloat, &Reflection::GetRepeatedFloat));
    case FieldDescriptor::CPPTYPE_BOOL:
      return get(&Reflection::GetBool, &Reflection::GetRepeatedBool);
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumJson(field, get(&Reflection::GetEnumValue, &Reflection::GetRepeatedEnumValue));
    case FieldDescriptor::CPPTYPE_STRING:
      return TextJson(field, get(&Reflection::GetString, &Reflection::GetRepeatedString));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      break;
  }
  return ToJson(index < 0 ? reflection.GetMessage(message, &field)
                          : reflection.GetRepeatedMessage(message, &field, index));
}

Json MapJson(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  std::vector<std::pair<std::string, Json>> entries;
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    const Message& entry = reflection.GetRepeatedMessage(message, &field, i);
    const Json key = ValueJson(entry, *field.message_type()->map_key(), -1);
    entries.emplace_back(key.is_string() ? key.get<std::string>() : key.dump(),
                         ValueJson(entry, *field.message_type()->map_value(), -1));
  }
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  Json object = Json::object();
  for (auto& [key, value] : entries) object[key] = std::move(value);
  return object;
}

std::string Dump(const Json& value, int indent) {
  // Replaces bytes that are no UTF-8: a message may quote those of a broken file.
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

void EmitYaml(const Json& value, YAML::Emitter& emitter) {
  if (value.is_object()) {
    if (value.empty()) emitter << YAML::Flow;
    emitter << YAML::BeginMap;
    for (const auto& [key, item] : value.items()) {
      emitter << YAML::Key << key << YAML::Value;
      EmitYaml(item, emitter);
    }
    emitter << YAML::EndMap;
  } else if (value.is_array()) {
    if (value.empty()) emitter << YAML::Flow;
    emitter << YAML::BeginSeq;
    for (const Json& item : value) EmitYaml(item, emitter);
    emitter << YAML::EndSeq;
  } else if (value.is_string()) {
    const std::string text = value.get<std::string>();
    const std::string lower = absl::AsciiStrToLower(text);
    const bool plain = !text.empty() && absl::ascii_isalpha(text[0]) &&
                       text.find_first_of("\n\t") == std::string::npos && lower != "true" &&
                       lower != "false" && lower != "null" && lower != "yes" && lower != "no" &&
                       lower != "on" && lower != "off";
    if (!plain) emitter << YAML::DoubleQuoted;
    emitter << text;
  } else if (value.is_null()) {
    emitter << YAML::Null;
  } else {
    emitter << Dump(value, -1);
  }
}

// Columns on the terminal: characters and not bytes, without escape sequences.
size_t Width(const std::string& text) {
  size_t width = 0;
  bool escape = false;
  for (char c : text) {
    if (c == '\033') escape = true;
    if (!escape && (static_cast<unsigned char>(c) & 0xC0) != 0x80) ++width;
    if (escape && c == 'm') escape = false;
  }
  return width;
}

}  // namespace

Json ToJson(const Message& message) {
  const std::string& type = message.GetDescriptor()->full_name();
  if (type == "google.protobuf.Timestamp") {
    return google::protobuf::util::TimeUtil::ToString(
        static_cast<const google::protobuf::Timestamp&>(message));
  }
  if (type == "google.protobuf.Duration") {
    return google::protobuf::util::TimeUtil::ToString(
        static_cast<const google::protobuf::Duration&>(message));
  }
  const Reflection& reflection = *message.GetReflection();
  Json object = Json::object();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *message.GetDescriptor()->field(i);
    if (field.is_map()) {
      object[field.json_name()] = MapJson(message, field);
    } else if (field.is_repeated()) {
      Json list = Json::array();
      for (int j = 0; j < reflection.FieldSize(message, &field); ++j) {
        list.push_back(ValueJson(message, field, j));
      }
      object[field.json_name()] = std::move(list);
    } else if (!field.has_presence() || reflection.HasField(message, &field)) {
      object[field.json_name()] = ValueJson(message, field, -1);
    }
  }
  return object;
}

void Print(const Json& value, Format format, std::ostream& out) {
  if (format == Format::kJson) {
    out << Dump(value, 2) << "\n";
    return;
  }
  YAML::Emitter emitter;
  EmitYaml(value, emitter);
  out << emitter.c_str() << "\n";
}

void PrintItem(const Json& value, Format format, std::ostream& out) {
  if (format == Format::kJson) {
    out << Dump(value, -1) << "\n";
  } else {
    out << "---\n";
    Print(value, format, out);
  }
  out.flush();
}

std::string Table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], Width(row[i]));
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i];
      if (i + 1 < row.size()) line.append(widths[i] - Width(row[i]) + 2, ' ');
    }
    absl::StripTrailingAsciiWhitespace(&line);
    out += line + "\n";
  }
  return out;
}

std::string Coloured(const std::string& state, const Terminal& terminal) {
  if (!terminal.colour) return state;
  const char* code = "33";  // states that lead to others
  if (state == "succeeded" || state == "running" || state == "ready") code = "32";
  if (state == "failed" || state == "lost" || state == "unreachable" || state == "dead") {
    code = "31";
  }
  return absl::StrCat("\033[", code, "m", state, "\033[0m");
}

std::string ShortDuration(absl::Duration duration) {
  const int64_t seconds = std::max<int64_t>(0, absl::ToInt64Seconds(duration));
  if (seconds < 60) return absl::StrCat(seconds, "s");
  if (seconds < 3600) return absl::StrCat(seconds / 60, "m", seconds % 60, "s");
  if (seconds < 48 * 3600) return absl::StrCat(seconds / 3600, "h", seconds % 3600 / 60, "m");
  return absl::StrCat(seconds / 86400, "d");
}

std::string Age(const google::protobuf::Timestamp& time, absl::Time now) {
  return time.seconds() == 0 ? "-" : ShortDuration(now - FromProto(time));
}

std::string LocalTime(const google::protobuf::Timestamp& time) {
  if (time.seconds() == 0) return "-";
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", FromProto(time), absl::LocalTimeZone());
}

std::string ShortNumber(double value) {
  if (!(value >= 1000)) return absl::StrFormat("%.0f", value);
  for (const char* unit : {"k", "M", "G", "T"}) {
    value /= 1000;
    if (value < 999.95 || *unit == 'T') return absl::StrFormat("%.1f%s", value, unit);
  }
  return "";
}

std::string Bytes(int64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes);
  for (const char* unit : {"KiB", "MiB", "GiB", "TiB"}) {
    value /= 1024;
    if (value < 1023.95 || *unit == 'T') return absl::StrFormat("%.1f %s", value, unit);
  }
  return "";
}

std::string StepText(const v1::Job& job) {
  if (job.steps() > 0) return absl::StrCat(job.step(), "/", job.steps());
  return job.step() > 0 ? absl::StrCat(job.step()) : "-";
}

std::string Loss(double loss) { return loss == 0 ? "-" : absl::StrFormat("%.4f", loss); }

}  // namespace muster::cli
