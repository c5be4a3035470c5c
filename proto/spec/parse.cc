#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/message.h"
#include "proto/spec/array.h"
#include "proto/spec/document.h"
#include "proto/spec/names.h"
#include "proto/spec/overrides.h"
#include "proto/spec/queues.h"
#include "proto/spec/spec.h"

namespace muster::spec {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

// More problems are not reported; this also bounds the work on hostile text.
constexpr size_t kProblemsMax = 100;

bool IsNull(const std::string& text) {
  return text == "null" || text == "Null" || text == "NULL" || text == "~" || text.empty();
}
bool IsBool(const std::string& text) {
  const std::string lower = absl::AsciiStrToLower(text);
  return lower == "true" || lower == "false";
}

// [+-]digits, without leading zeros (which YAML 1.1 reads as octal).
bool IsWhole(const std::string& text) {
  size_t at = !text.empty() && (text[0] == '-' || text[0] == '+') ? 1 : 0;
  if (at == text.size() || (text[at] == '0' && at + 1 < text.size())) return false;
  for (; at < text.size(); ++at) {
    if (!absl::ascii_isdigit(text[at])) return false;
  }
  return true;
}

// Decimal numbers only: no hexadecimal, no "inf" or "nan", which SimpleAtod would take.
bool IsNumber(const std::string& text) {
  double ignored;
  return !text.empty() && text.find_first_not_of("0123456789+-.eE") == std::string::npos &&
         text.find_first_of("0123456789") != std::string::npos && absl::SimpleAtod(text, &ignored);
}

// It has no name of its own in a spec: it is written as a mapping of the field `ranks`.
bool IsRankRange(const FieldDescriptor& field) {
  return field.number() == v1::ResourceSpec::kRankRangeFieldNumber &&
         field.containing_type() == v1::ResourceSpec::descriptor();
}

// The value as a message names it.
std::string Describe(const Node& node) {
  switch (node.kind) {
    case Node::Kind::kNull:
      return "nothing";
    case Node::Kind::kList:
      return "a list";
    case Node::Kind::kMap:
      return "a mapping";
    case Node::Kind::kScalar:
      break;
  }
  return Quoted(node.text);
}

struct LocatedProblem {
  std::string location;
  std::string path;
  std::string message;
  // The field that cannot be checked because of this problem: `path`, or the field that was meant.
  std::string about;
};

// Reads a tree as a message. Continues after a problem, so that one run finds all.
class Converter {
 public:
  void ConvertMessage(const Node& node, const std::string& path, Message* message) {
    Locate(path, node);
    if (node.kind != Node::Kind::kMap) {
      Add(node, path,
          absl::StrCat("expected a mapping of fields, got ", Describe(node), EmptyHint(node)));
      return;
    }
    std::map<std::string, const Node*> seen;
    for (const auto& [key, value] : node.entries) {
      if (problems_.size() >= kProblemsMax) return;
      const FieldDescriptor* field = FindField(*key, path, *message->GetDescriptor());
      if (field == nullptr) continue;
      const std::string field_path = Join(path, field->name());
      const auto [first, is_new] = seen.emplace(field->name(), key.get());
      if (!is_new) {
        Add(*key, field_path, absl::StrCat("given twice; first at ", first->second->location));
        continue;
      }
      if (TakenOneof(*key, *field, path, seen)) continue;
      if (v1::ResourceSpec* resources = ElasticRanks(*field, *value, message)) {
        ConvertMessage(*value, field_path, resources->mutable_rank_range());
        resources->set_ranks(resources->rank_range().max());
        continue;
      }
      ConvertField(*value, field_path, *field, message);
    }
  }

  std::vector<LocatedProblem>& problems() { return problems_; }

  // The location of the field at `path`, or of the nearest field around it that the text has.
  std::string LocationOf(std::string path) const {
    for (;;) {
      const auto found = locations_.find(path);
      if (found != locations_.end()) return found->second;
      const size_t cut = path.find_last_of(".[");
      path = cut == std::string::npos ? "" : path.substr(0, cut);
    }
  }

  // True when a problem was found at `path`, above it or below it.
  bool Touches(const std::string& path) const {
    for (const LocatedProblem& problem : problems_) {
      const std::string& other = problem.about;
      const std::string& shorter = other.size() < path.size() ? other : path;
      const std::string& longer = other.size() < path.size() ? path : other;
      if (absl::StartsWith(longer, shorter) &&
          (longer.size() == shorter.size() || longer[shorter.size()] == '.' ||
           longer[shorter.size()] == '[' || shorter.empty())) {
        return true;
      }
    }
    return false;
  }

 private:
  // `ranks: {min: A, max: B}`: the message that the field is of, else null.
  static v1::ResourceSpec* ElasticRanks(const FieldDescriptor& field, const Node& node,
                                        Message* message) {
    if (node.kind != Node::Kind::kMap || field.number() != v1::ResourceSpec::kRanksFieldNumber ||
        field.containing_type() != v1::ResourceSpec::descriptor()) {
      return nullptr;
    }
    return static_cast<v1::ResourceSpec*>(message);
  }

  static std::string Join(const std::string& path, const std::string& name) {
    return path.empty() ? name : absl::StrCat(path, ".", name);
  }
  static std::string EmptyHint(const Node& node) {
    return node.kind == Node::Kind::kNull ? "; write {} for all defaults, or leave the field out"
                                          : "";
  }

  // A key as it appears in the path of a problem: quoted and cut when it is long or unprintable.
  static std::string Abbreviated(const std::string& key) {
    const std::string quoted = Quoted(key);
    return quoted == absl::StrCat("'", key, "'") ? key : quoted;
  }

  void Add(const Node& node, const std::string& path, std::string message) {
    problems_.push_back({node.location, path, std::move(message), path});
  }
  void Locate(const std::string& path, const Node& node) { locations_[path] = node.location; }

  const FieldDescriptor* FindField(const Node& key, const std::string& path,
                                   const Descriptor& type) {
    if (key.kind != Node::Kind::kScalar) {
      Add(key, path, absl::StrCat("expected the name of a field, got ", Describe(key)));
      return nullptr;
    }
    const FieldDescriptor* field = type.FindFieldByName(key.text);
    if (field != nullptr && !IsRankRange(*field)) return field;
    std::vector<std::string> names;
    for (int i = 0; i < type.field_count(); ++i) {
      if (type.field(i)->full_name() == "muster.v1.JobSpec.array_task") {
        names.insert(names.end(), {"array", "max_running"});  // it is read from these
      } else if (!IsRankRange(*type.field(i))) {
        names.push_back(type.field(i)->name());
      }
    }
    const std::string nearest = NearestName(key.text, names);
    Add(key, Join(path, Abbreviated(key.text)),
        absl::StrCat("unknown field; ",
                     nearest.empty()
                         ? absl::StrCat("the fields here are ", absl::StrJoin(names, ", "))
                         : absl::StrCat("did you mean '", nearest, "'?")));
    problems_.back().about = Join(path, nearest.empty() ? key.text : nearest);
    return nullptr;
  }

  // True, and adds a problem, when another member of the field's oneof came before it.
  bool TakenOneof(const Node& key, const FieldDescriptor& field, const std::string& path,
                  const std::map<std::string, const Node*>& seen) {
    const auto* oneof = field.real_containing_oneof();
    if (oneof == nullptr) return false;
    for (int i = 0; i < oneof->field_count(); ++i) {
      const std::string& other = oneof->field(i)->name();
      if (other == field.name() || seen.count(other) == 0) continue;
      Add(key, Join(path, field.name()),
          absl::StrCat("only one of '", other, "' and '", field.name(), "' may be given"));
      return true;
    }
    return false;
  }

  void ConvertField(const Node& node, const std::string& path, const FieldDescriptor& field,
                    Message* message) {
    Locate(path, node);
    if (field.is_map()) {
      ConvertMap(node, path, field, message);
    } else if (field.is_repeated()) {
      if (node.kind != Node::Kind::kList) {
        Add(node, path,
            absl::StrCat("expected a list, got ", Describe(node),
                         field.name() == "command" && node.kind == Node::Kind::kScalar
                             ? "; a command is [PROGRAM, ARGUMENT, ...], a line for the shell "
                               "[sh, -c, \"LINE\"]"
                             : ""));
        return;
      }
      for (size_t i = 0; i < node.items.size() && problems_.size() < kProblemsMax; ++i) {
        ConvertValue(*node.items[i], absl::StrCat(path, "[", i, "]"), field, message);
      }
    } else {
      ConvertValue(node, path, field, message);
    }
  }

  void ConvertMap(const Node& node, const std::string& path, const FieldDescriptor& field,
                  Message* message) {
    if (node.kind != Node::Kind::kMap) {
      Add(node, path, absl::StrCat("expected a mapping, got ", Describe(node)));
      return;
    }
    std::set<std::string> seen;
    for (const auto& [key, value] : node.entries) {
      if (problems_.size() >= kProblemsMax) return;
      const std::string entry_path = Join(path, Abbreviated(key->text));
      Message* entry = message->GetReflection()->AddMessage(message, &field);
      ConvertValue(*key, entry_path, *field.message_type()->map_key(), entry);
      if (!seen.insert(key->text).second) {
        Add(*key, entry_path, "given twice");
        continue;
      }
      Locate(entry_path, *value);
      ConvertValue(*value, entry_path, *field.message_type()->map_value(), entry);
    }
  }

  // Sets `field`, or adds a value to it when it is repeated.
  void ConvertValue(const Node& node, const std::string& path, const FieldDescriptor& field,
                    Message* message) {
    const Reflection& reflection = *message->GetReflection();
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE: {
        Message* below = field.is_repeated() ? reflection.AddMessage(message, &field)
                                             : reflection.MutableMessage(message, &field);
        if (field.message_type()->full_name() == "google.protobuf.Duration") {
          ConvertDuration(node, path, below);
        } else {
          ConvertMessage(node, path, below);
        }
        return;
      }
      case FieldDescriptor::CPPTYPE_ENUM:
        return ConvertEnum(node, path, field, message);
      case FieldDescriptor::CPPTYPE_STRING:
        return ConvertText(node, path, field, message);
      case FieldDescriptor::CPPTYPE_BOOL:
        if (node.kind != Node::Kind::kScalar || !node.plain || !IsBool(node.text)) {
          return Expected("true or false", node, path);
        }
        return Store(field, message, absl::AsciiStrToLower(node.text) == "true",
                     &Reflection::SetBool, &Reflection::AddBool);
      case FieldDescriptor::CPPTYPE_INT32:
        return ConvertWhole<int32_t>(node, path, field, message, &Reflection::SetInt32,
                                     &Reflection::AddInt32);
      case FieldDescriptor::CPPTYPE_INT64:
        return ConvertWhole<int64_t>(node, path, field, message, &Reflection::SetInt64,
                                     &Reflection::AddInt64);
      case FieldDescriptor::CPPTYPE_UINT32:
        return ConvertWhole<uint32_t>(node, path, field, message, &Reflection::SetUInt32,
                                      &Reflection::AddUInt32);
      case FieldDescriptor::CPPTYPE_UINT64:
        return ConvertWhole<uint64_t>(node, path, field, message, &Reflection::SetUInt64,
                                      &Reflection::AddUInt64);
      case FieldDescriptor::CPPTYPE_FLOAT:
        return ConvertNumber<float>(node, path, field, message, &Reflection::SetFloat,
                                    &Reflection::AddFloat);
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return ConvertNumber<double>(node, path, field, message, &Reflection::SetDouble,
                                     &Reflection::AddDouble);
    }
  }

  template <typename T, typename SetFunction, typename AddFunction>
  static void Store(const FieldDescriptor& field, Message* message, T value, SetFunction set,
                    AddFunction add) {
    const Reflection* reflection = message->GetReflection();
    if (field.is_repeated()) {
      (reflection->*add)(message, &field, value);
    } else {
      (reflection->*set)(message, &field, value);
    }
  }

  // Adds the problem that a scalar is not `what`; a number in quotes gets a hint.
  void Expected(const char* what, const Node& node, const std::string& path) {
    const bool quoted_number = node.kind == Node::Kind::kScalar && !node.plain &&
                               (IsNumber(node.text) || IsBool(node.text));
    Add(node, path,
        absl::StrCat("expected ", what, ", got ", quoted_number ? "the text " : "", Describe(node),
                     quoted_number ? "; remove the quotes" : ""));
  }

  // What a field may be that counts something of which there is always some, else "". In the
  // message 0 stands for the default, so that a 0 that a user writes has to be refused here. The
  // rules for other values are those of the families' checks.
  static absl::string_view RangeWithoutZero(const FieldDescriptor& field) {
    constexpr absl::string_view kAny = "at least 1, or leave it out for the default";
    constexpr absl::string_view kWidth = "1 to 256, or leave it out for the default";
    static const auto* const ranges = new absl::flat_hash_map<std::string, absl::string_view>{
        {"muster.v1.MambaSpec.heads", kAny},
        {"muster.v1.MambaSpec.head_width", kWidth},
        {"muster.v1.MambaSpec.groups", kAny},
        {"muster.v1.MambaSpec.state", kWidth},
        {"muster.v1.MambaSpec.taps", "2 to 4, or leave it out for the default"},
        {"muster.v1.ModelSpec.kv_heads", kAny},
        {"muster.v1.ModelSpec.ffn", "at least 1"},
        {"muster.v1.ModelSpec.head_width", kAny},
        {"muster.v1.ParallelSpec.tensor", kAny},
        {"muster.v1.ParallelSpec.context", kAny},
        {"muster.v1.ParallelSpec.pipeline", kAny}};
    const auto found = ranges->find(field.full_name());
    return found == ranges->end() ? "" : found->second;
  }

  template <typename T, typename SetFunction, typename AddFunction>
  void ConvertWhole(const Node& node, const std::string& path, const FieldDescriptor& field,
                    Message* message, SetFunction set, AddFunction add) {
    if (node.kind != Node::Kind::kScalar || !node.plain || !IsWhole(node.text)) {
      return Expected("a whole number", node, path);
    }
    T value = 0;
    if (!absl::SimpleAtoi(node.text, &value)) {
      Add(node, path,
          absl::StrCat("out of range: ", Quoted(node.text), " is not between ",
                       std::numeric_limits<T>::min(), " and ", std::numeric_limits<T>::max()));
      return;
    }
    if (const absl::string_view range = RangeWithoutZero(field); value == 0 && !range.empty()) {
      Add(node, path, absl::StrCat("0 is out of range; ", range));
      return;
    }
    Store(field, message, value, set, add);
  }

  template <typename T, typename SetFunction, typename AddFunction>
  void ConvertNumber(const Node& node, const std::string& path, const FieldDescriptor& field,
                     Message* message, SetFunction set, AddFunction add) {
    double value = 0;
    if (node.kind != Node::Kind::kScalar || !node.plain || !IsNumber(node.text) ||
        !absl::SimpleAtod(node.text, &value)) {
      return Expected("a number", node, path);
    }
    if (!std::isfinite(static_cast<T>(value))) {
      Add(node, path, absl::StrCat("out of range: ", Quoted(node.text), " is too large"));
      return;
    }
    Store(field, message, static_cast<T>(value), set, add);
  }

  // Arguments and variables of a command are texts whatever they look like.
  static bool TakesNumbersAsText(const FieldDescriptor& field) {
    return field.full_name() == "muster.v1.JobSpec.command" ||
           field.full_name() == "muster.v1.JobSpec.EnvEntry.value";
  }

  void ConvertText(const Node& node, const std::string& path, const FieldDescriptor& field,
                   Message* message) {
    if (node.kind != Node::Kind::kScalar) return Expected("text", node, path);
    const bool verbatim = TakesNumbersAsText(field) && !IsNull(node.text);
    if (node.plain && !verbatim && !node.may_be_text &&
        (IsNull(node.text) || IsBool(node.text) || IsNumber(node.text))) {
      Add(node, path,
          absl::StrCat("expected text, got the ", IsBool(node.text) ? "value " : "number ",
                       node.text.substr(0, 80), "; put it in quotes"));
      return;
    }
    const Reflection* reflection = message->GetReflection();
    if (field.is_repeated()) {
      reflection->AddString(message, &field, node.text);
    } else {
      reflection->SetString(message, &field, node.text);
    }
  }

  void ConvertEnum(const Node& node, const std::string& path, const FieldDescriptor& field,
                   Message* message) {
    const auto* value =
        node.kind == Node::Kind::kScalar ? FindEnumValue(*field.enum_type(), node.text) : nullptr;
    if (value == nullptr) {
      const std::vector<std::string> names = EnumNames(*field.enum_type());
      const std::string nearest =
          node.kind == Node::Kind::kScalar ? NearestName(node.text, names) : "";
      Add(node, path,
          absl::StrCat("expected ", names.size() == 1 ? "" : "one of ", absl::StrJoin(names, ", "),
                       ", got ", Describe(node),
                       nearest.empty() ? "" : absl::StrCat("; did you mean '", nearest, "'?")));
      return;
    }
    const Reflection* reflection = message->GetReflection();
    if (field.is_repeated()) {
      reflection->AddEnum(message, &field, value);
    } else {
      reflection->SetEnum(message, &field, value);
    }
  }

  void ConvertDuration(const Node& node, const std::string& path, Message* message) {
    // The range of google.protobuf.Duration.
    const absl::Duration limit = absl::Seconds(315'576'000'000);
    absl::Duration duration;
    if (node.kind != Node::Kind::kScalar || !absl::ParseDuration(node.text, &duration) ||
        duration > limit || duration < -limit) {
      return Expected("a duration such as 500ms, 0.5s, 2m or 1h", node, path);
    }
    auto* proto = static_cast<google::protobuf::Duration*>(message);
    proto->set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
    proto->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
  }

  std::vector<LocatedProblem> problems_;
  std::map<std::string, std::string> locations_;
};

absl::StatusOr<NodePtr> ReadTree(const std::string& text, const std::string& file,
                                 const std::vector<std::string>& overrides) {
  ASSIGN_OR_RETURN(NodePtr root, ParseDocument(text, file));
  if (root->kind == Node::Kind::kNull) {
    return absl::InvalidArgumentError(absl::StrCat(root->location, ": the spec is empty"));
  }
  for (const std::string& text_of_override : overrides) {
    ASSIGN_OR_RETURN(root, ApplyOverride(root, *v1::JobSpec::descriptor(), text_of_override));
  }
  return root;
}

absl::Status AsStatus(const std::vector<LocatedProblem>& problems) {
  if (problems.empty()) return absl::OkStatus();
  std::string text;
  for (size_t i = 0; i < problems.size() && i < kProblemsMax; ++i) {
    const LocatedProblem& problem = problems[i];
    absl::StrAppend(&text, i > 0 ? "\n" : "", problem.location, ": ", problem.path,
                    problem.path.empty() ? "" : ": ", problem.message);
  }
  if (problems.size() >= kProblemsMax) absl::StrAppend(&text, "\n... and perhaps more");
  return absl::InvalidArgumentError(text);
}

}  // namespace

absl::StatusOr<v1::JobSpec> Parse(const std::string& text, const std::string& file,
                                  const std::vector<std::string>& overrides) {
  ASSIGN_OR_RETURN(const NodePtr root, ReadTree(text, file, overrides));
  v1::JobSpec spec;
  Converter converter;
  converter.ConvertMessage(*root, "", &spec);
  RETURN_IF_ERROR(AsStatus(converter.problems()));
  return spec;
}

absl::StatusOr<v1::QueuePolicy> ParseQueues(const std::string& text, const std::string& file) {
  ASSIGN_OR_RETURN(const NodePtr root, ParseDocument(text, file));
  v1::QueuePolicy policy;
  if (root->kind == Node::Kind::kNull) return policy;
  Converter converter;
  converter.ConvertMessage(*root, "", &policy);
  RETURN_IF_ERROR(AsStatus(converter.problems()));
  return policy;
}

namespace {

// `task` is called once the spec is read and before it is checked.
template <typename Task>
absl::StatusOr<v1::JobSpec> LoadTree(const NodePtr& root, const std::string& working_directory,
                                     Task task) {
  v1::JobSpec spec;
  Converter converter;
  converter.ConvertMessage(*root, "", &spec);
  if (spec.working_directory().empty()) spec.set_working_directory(working_directory);
  std::vector<LocatedProblem> problems = converter.problems();
  if (spec.has_array_task()) {
    problems.push_back({converter.LocationOf("array_task"), "array_task",
                        "is set for the tasks of `array`; leave it out", "array_task"});
  }
  RETURN_IF_ERROR(task(spec));

  v1::JobSpec complete = spec;
  ApplyDefaults(complete);
  for (const Problem& problem : FindProblems(complete)) {
    // A field that could not be read has its default value, whose problems are not the user's.
    if (converter.Touches(problem.path)) continue;
    problems.push_back(
        {converter.LocationOf(problem.path), problem.path, problem.message, problem.path});
  }
  RETURN_IF_ERROR(AsStatus(problems));
  return spec;
}

}  // namespace

absl::StatusOr<v1::JobSpec> Load(const std::string& text, const std::string& file,
                                 const std::vector<std::string>& overrides,
                                 const std::string& working_directory) {
  ASSIGN_OR_RETURN(const NodePtr root, ReadTree(text, file, overrides));
  return LoadTree(root, working_directory, [](v1::JobSpec&) { return absl::OkStatus(); });
}

absl::StatusOr<std::vector<v1::JobSpec>> LoadTasks(const std::string& text, const std::string& file,
                                                   const std::vector<std::string>& overrides,
                                                   const std::string& working_directory) {
  ASSIGN_OR_RETURN(const NodePtr root, ReadTree(text, file, overrides));
  ASSIGN_OR_RETURN(const std::optional<ArrayTree> array, ReadArray(root));
  std::vector<v1::JobSpec> specs;
  if (!array.has_value()) {
    ASSIGN_OR_RETURN(specs.emplace_back(), LoadTree(root, working_directory,
                                                    [](v1::JobSpec&) { return absl::OkStatus(); }));
    return specs;
  }
  for (int32_t index = 0; index < static_cast<int32_t>(array->tasks.size()); ++index) {
    absl::StatusOr<v1::JobSpec> spec =
        LoadTree(TreeOf(*array, index), working_directory,
                 [&](v1::JobSpec& read) { return Number(*array, index, read); });
    if (!spec.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(TaskText(*array, index), "\n", spec.status().message()));
    }
    specs.push_back(*std::move(spec));
  }
  return specs;
}

}  // namespace muster::spec
