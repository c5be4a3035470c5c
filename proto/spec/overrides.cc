#include "proto/spec/overrides.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/spec/names.h"

namespace muster::spec {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;

// "a.b[0]" -> "a", "b", "[0]".
absl::StatusOr<std::vector<std::string>> SplitPath(const std::string& path) {
  std::vector<std::string> parts;
  size_t at = 0;
  while (at < path.size()) {
    const bool index = path[at] == '[';
    const size_t end = index ? path.find(']', at) : path.find_first_of(".[", at);
    if (index && end == std::string::npos) {
      return absl::InvalidArgumentError("a '[' without ']'");
    }
    parts.push_back(path.substr(at, index                      ? end + 1 - at
                                    : end == std::string::npos ? end
                                                               : end - at));
    if (parts.back().empty()) return absl::InvalidArgumentError("an empty name in the key");
    if (end == std::string::npos) return parts;
    at = index ? end + 1 : end;
    if (at < path.size() && path[at] == '.') {
      if (++at == path.size()) return absl::InvalidArgumentError("the key ends with '.'");
    } else if (index && at < path.size() && path[at] != '[') {
      return absl::InvalidArgumentError("expected '.' or '[' after ']'");
    }
  }
  if (parts.empty()) return absl::InvalidArgumentError("no key before '='");
  return parts;
}

// Applies one override. Copies the nodes on the path, since aliases may share them.
class Setter {
 public:
  Setter(std::vector<std::string> parts, NodePtr value, std::string location)
      : parts_(std::move(parts)), value_(std::move(value)), location_(std::move(location)) {}

  // Returns a copy of `node` (null = absent) in which the rest of the path, from part `at` on, has
  // the value; null = remove the node. `type` is the message that a mapping here is read as, null
  // when unknown.
  absl::StatusOr<NodePtr> Set(const NodePtr& node, size_t at, const Descriptor* type) {
    if (at == parts_.size()) return value_->kind == Node::Kind::kNull ? nullptr : value_;
    if (parts_[at][0] == '[') return SetItem(node, at, type);
    return SetEntry(node, at, type);
  }

 private:
  absl::Status NotA(const char* what, size_t at) const {
    std::string before;
    for (size_t i = 0; i < at; ++i) {
      absl::StrAppend(&before, i > 0 && parts_[i][0] != '[' ? "." : "", parts_[i]);
    }
    return absl::InvalidArgumentError(absl::StrCat(before, " is not a ", what));
  }

  absl::StatusOr<NodePtr> SetItem(const NodePtr& node, size_t at, const Descriptor* type) {
    const std::string& part = parts_[at];
    size_t index = 0;
    if (!absl::SimpleAtoi(part.substr(1, part.size() - 2), &index)) {
      return absl::InvalidArgumentError(absl::StrCat(part, " is not a list index"));
    }
    if (node != nullptr && node->kind != Node::Kind::kList && node->kind != Node::Kind::kNull) {
      return NotA("list", at);
    }
    auto copy = node == nullptr ? std::make_shared<Node>() : std::make_shared<Node>(*node);
    copy->kind = Node::Kind::kList;
    if (node == nullptr) copy->location = location_;
    if (index > copy->items.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat(part, " is past the end of the list, which has ", copy->items.size()));
    }
    ASSIGN_OR_RETURN(NodePtr item,
                     Set(index < copy->items.size() ? copy->items[index] : nullptr, at + 1, type));
    if (index < copy->items.size()) copy->items.erase(copy->items.begin() + index);
    if (item != nullptr) copy->items.insert(copy->items.begin() + index, item);
    return NodePtr(copy);
  }

  absl::StatusOr<NodePtr> SetEntry(const NodePtr& node, size_t at, const Descriptor* type) {
    if (node != nullptr && node->kind != Node::Kind::kMap && node->kind != Node::Kind::kNull) {
      return NotA("mapping", at);
    }
    const std::string& name = parts_[at];
    const FieldDescriptor* field = type == nullptr ? nullptr : type->FindFieldByName(name);
    const Descriptor* below =
        field == nullptr || field->message_type() == nullptr ? nullptr : field->message_type();
    auto copy = node == nullptr ? std::make_shared<Node>() : std::make_shared<Node>(*node);
    copy->kind = Node::Kind::kMap;
    if (node == nullptr) copy->location = location_;
    if (field != nullptr && field->is_map() && at + 1 < parts_.size()) {
      // Keys of a map may contain dots: the rest of the path is one key.
      std::string key = parts_[at + 1];
      for (size_t i = at + 2; i < parts_.size(); ++i) {
        absl::StrAppend(&key, parts_[i][0] == '[' ? "" : ".", parts_[i]);
      }
      parts_.resize(at + 1);
      parts_.push_back(key);
      below = nullptr;
    }
    auto& entries = copy->entries;
    const auto named = [&](const std::string& wanted) {
      return std::find_if(entries.begin(), entries.end(),
                          [&](const auto& entry) { return entry.first->text == wanted; });
    };
    RemoveSiblings(*copy, field);
    auto found = named(name);
    ASSIGN_OR_RETURN(NodePtr value,
                     Set(found == entries.end() ? nullptr : found->second, at + 1, below));
    if (value == nullptr) {
      if (found != entries.end()) entries.erase(found);
    } else if (found != entries.end()) {
      found->second = value;
    } else {
      auto key = std::make_shared<Node>();
      key->kind = Node::Kind::kScalar;
      key->text = name;
      key->location = location_;
      entries.emplace_back(key, value);
    }
    return NodePtr(copy);
  }

  static void RemoveSiblings(Node& map, const FieldDescriptor* field) {
    const auto* oneof = field == nullptr ? nullptr : field->real_containing_oneof();
    if (oneof == nullptr) return;
    for (int i = 0; i < oneof->field_count(); ++i) {
      if (oneof->field(i) == field) continue;
      auto& entries = map.entries;
      entries.erase(std::remove_if(entries.begin(), entries.end(),
                                   [&](const auto& entry) {
                                     return entry.first->text == oneof->field(i)->name();
                                   }),
                    entries.end());
    }
  }

  std::vector<std::string> parts_;
  const NodePtr value_;
  const std::string location_;
};

}  // namespace

absl::StatusOr<NodePtr> ApplyOverride(const NodePtr& root, const Descriptor& type,
                                      const std::string& override_text) {
  const std::string location = absl::StrCat("--set ", Quoted(override_text));
  const size_t equals = override_text.find('=');
  if (equals == std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(location, ": expected KEY=VALUE, such as engine.training.steps=100"));
  }
  const absl::StatusOr<std::vector<std::string>> parts = SplitPath(override_text.substr(0, equals));
  if (!parts.ok()) return Annotate(parts.status(), location);
  if (parts->size() > static_cast<size_t>(kNestingMax)) {
    return absl::InvalidArgumentError(
        absl::StrCat(location, ": nested deeper than ", kNestingMax, " levels"));
  }
  const std::string text = override_text.substr(equals + 1);
  if (text.find_first_not_of(" \t") == std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(location, ": no value after '='; null removes the field"));
  }
  ASSIGN_OR_RETURN(NodePtr value, ParseDocument(text, "", location));
  absl::StatusOr<NodePtr> result = Setter(*parts, value, location).Set(root, 0, &type);
  if (!result.ok()) return Annotate(result.status(), location);
  return result;
}

}  // namespace muster::spec
