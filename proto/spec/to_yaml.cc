#include <algorithm>
#include <charconv>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/message.h"
#include "proto/spec/names.h"
#include "proto/spec/queues.h"
#include "proto/spec/spec.h"
#include "proto/time.h"

namespace muster::spec {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// Plain where every YAML reader takes the text for text, else in double quotes.
std::string Text(const std::string& text) {
  const std::string lower = absl::AsciiStrToLower(text);
  bool plain = !text.empty() && (absl::ascii_isalpha(text[0]) || text[0] == '/' || text[0] == '_');
  for (char c : text) {
    plain = plain && (absl::ascii_isalnum(c) || c == '_' || c == '-' || c == '/' || c == '.');
  }
  for (const char* word : {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}) {
    plain = plain && lower != word;
  }
  if (plain) return text;
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      absl::StrAppend(&out, "\\", std::string(1, c));
    } else if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) {
      absl::StrAppendFormat(&out, "\\x%02x", static_cast<unsigned char>(c));
    } else {
      out.push_back(c);
    }
  }
  return out + "\"";
}

// The shortest digits that read back as the same number.
template <typename T>
std::string Number(T value) {
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, result.ptr);
}

bool IsDuration(const FieldDescriptor& field) {
  return field.message_type() != nullptr &&
         field.message_type()->full_name() == "google.protobuf.Duration";
}

std::string DurationText(const Message& message) {
  const auto& proto = static_cast<const google::protobuf::Duration&>(message);
  return absl::FormatDuration(FromProto(proto));
}

// A scalar, enum or duration; `index` is -1 for a singular field.
std::string Scalar(const Message& message, const FieldDescriptor& field, int index) {
  const Reflection& reflection = *message.GetReflection();
  const auto get = [&](auto single, auto repeated) {
    return index < 0 ? (reflection.*single)(message, &field)
                     : (reflection.*repeated)(message, &field, index);
  };
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return absl::StrCat(get(&Reflection::GetInt32, &Reflection::GetRepeatedInt32));
    case FieldDescriptor::CPPTYPE_INT64:
      return absl::StrCat(get(&Reflection::GetInt64, &Reflection::GetRepeatedInt64));
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat(get(&Reflection::GetUInt32, &Reflection::GetRepeatedUInt32));
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(get(&Reflection::GetUInt64, &Reflection::GetRepeatedUInt64));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return Number(get(&Reflection::GetDouble, &Reflection::GetRepeatedDouble));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return Number(get(&Reflection::GetFloat, &Reflection::GetRepeatedFloat));
    case FieldDescriptor::CPPTYPE_BOOL:
      return get(&Reflection::GetBool, &Reflection::GetRepeatedBool) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_STRING:
      return Text(get(&Reflection::GetString, &Reflection::GetRepeatedString));
    case FieldDescriptor::CPPTYPE_ENUM:
      return ShortEnumName(*get(&Reflection::GetEnum, &Reflection::GetRepeatedEnum));
    case FieldDescriptor::CPPTYPE_MESSAGE:
      break;
  }
  return DurationText(index < 0 ? reflection.GetMessage(message, &field)
                                : reflection.GetRepeatedMessage(message, &field, index));
}

class Writer {
 public:
  // Writes the fields of `message`, each line behind `indent`, the first one behind `first` instead
  // (for the "- " of a list). False: the message is empty.
  bool Fields(const Message& message, const std::string& indent, std::string first) {
    std::vector<const FieldDescriptor*> fields;
    message.GetReflection()->ListFields(message, &fields);
    std::sort(fields.begin(), fields.end(),
              [](const auto* a, const auto* b) { return a->index() < b->index(); });
    const auto* resources = message.GetDescriptor() == v1::ResourceSpec::descriptor()
                                ? static_cast<const v1::ResourceSpec*>(&message)
                                : nullptr;
    for (const FieldDescriptor* field : fields) {
      // A range is written as the value of `ranks`.
      const bool elastic = resources != nullptr && resources->has_rank_range();
      if (elastic && field->number() == v1::ResourceSpec::kRanksFieldNumber) continue;
      const bool range = elastic && field->number() == v1::ResourceSpec::kRankRangeFieldNumber;
      absl::StrAppend(&out_, first, range ? "ranks" : field->name(), ":");
      Value(message, *field, indent);
      first = indent;
    }
    return !fields.empty();
  }

  std::string Take() { return std::move(out_); }

 private:
  void Value(const Message& message, const FieldDescriptor& field, const std::string& indent) {
    const Reflection& reflection = *message.GetReflection();
    const bool scalar = field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE || IsDuration(field);
    if (field.is_map()) return Map(message, field, indent);
    if (!field.is_repeated()) {
      if (scalar) {
        absl::StrAppend(&out_, " ", Scalar(message, field, -1), "\n");
      } else {
        Nested(reflection.GetMessage(message, &field), indent);
      }
      return;
    }
    const int size = reflection.FieldSize(message, &field);
    if (scalar) {
      std::vector<std::string> values;
      for (int i = 0; i < size; ++i) values.push_back(Scalar(message, field, i));
      absl::StrAppend(&out_, " [", absl::StrJoin(values, ", "), "]\n");
      return;
    }
    out_ += "\n";
    for (int i = 0; i < size; ++i) {
      const Message& item = reflection.GetRepeatedMessage(message, &field, i);
      if (!Fields(item, indent + "    ", indent + "  - ")) {
        absl::StrAppend(&out_, indent, "  - {}\n");
      }
    }
  }

  void Nested(const Message& message, const std::string& indent) {
    const size_t before = out_.size();
    out_ += "\n";
    if (!Fields(message, indent + "  ", indent + "  ")) {
      out_.resize(before);
      out_ += " {}\n";
    }
  }

  // Writes the entries of a map sorted by key, since a map has no order of its own.
  void Map(const Message& message, const FieldDescriptor& field, const std::string& indent) {
    const Reflection& reflection = *message.GetReflection();
    std::vector<std::string> lines;
    for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
      const Message& entry = reflection.GetRepeatedMessage(message, &field, i);
      lines.push_back(absl::StrCat(indent, "  ",
                                   Scalar(entry, *field.message_type()->map_key(), -1), ": ",
                                   Scalar(entry, *field.message_type()->map_value(), -1), "\n"));
    }
    std::sort(lines.begin(), lines.end());
    absl::StrAppend(&out_, "\n", absl::StrJoin(lines, ""));
  }

  std::string out_;
};

}  // namespace

std::string ToYaml(const v1::JobSpec& spec) {
  Writer writer;
  writer.Fields(spec, "", "");
  return writer.Take();
}

std::string QueuesToYaml(const v1::QueuePolicy& policy) {
  Writer writer;
  writer.Fields(policy, "", "");
  std::string text = writer.Take();
  return text.empty() ? "{}\n" : text;  // an empty file would be refused
}

}  // namespace muster::spec
