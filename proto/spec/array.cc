#include "proto/spec/array.h"

#include <algorithm>
#include <memory>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "proto/spec/names.h"

namespace muster::spec {
namespace {

constexpr char kIndexKey[] = "index";
constexpr char kBegin[] = "${array.";
constexpr size_t kBeginBytes = sizeof(kBegin) - 1;

template <typename... Parts>
absl::Status Refuse(const Node& node, const Parts&... why) {
  return absl::InvalidArgumentError(absl::StrCat(node.location, ": ", why...));
}

// The value of a top-level field, and where it is; null when it is not there.
NodePtr Field(const Node& root, const std::string& name) {
  for (const auto& [key, value] : root.entries) {
    if (key->text == name) return value;
  }
  return nullptr;
}

absl::Status CheckKey(const Node& key, const std::string& where) {
  if (key.kind != Node::Kind::kScalar || !IsArrayKey(key.text)) {
    return Refuse(key, where, ": ", Quoted(key.text),
                  " is not a key: 1-63 characters of [a-z0-9_], starting with a letter");
  }
  if (key.text == kIndexKey) {
    return Refuse(key, where, ": ${array.index} is the index of the task; choose another key");
  }
  return absl::OkStatus();
}

absl::Status CheckValue(const Node& value, const std::string& where) {
  if (value.kind != Node::Kind::kScalar) {
    return Refuse(value, where, ": expected a number or text, got ",
                  value.kind == Node::Kind::kNull   ? "nothing"
                  : value.kind == Node::Kind::kList ? "a list"
                                                    : "a mapping");
  }
  if (value.text.size() > kArrayValueBytesMax) {
    return Refuse(value, where, ": longer than ", kArrayValueBytesMax, " bytes");
  }
  return absl::OkStatus();
}

// `array: {lr: [1, 2], seed: [3, 4]}`: every combination, the last key varying fastest.
absl::Status ReadProduct(const Node& node, ArrayTree& array) {
  std::vector<const Node*> lists;
  int64_t tasks = 1;
  for (const auto& [key, list] : node.entries) {
    const std::string where = absl::StrCat("array.", Quoted(key->text));
    RETURN_IF_ERROR(CheckKey(*key, "array"));
    if (std::count(array.keys.begin(), array.keys.end(), key->text) > 0) {
      return Refuse(*key, where, ": given twice");
    }
    if (list->kind != Node::Kind::kList || list->items.empty()) {
      return Refuse(*list, where, ": expected a list of values, such as [0.1, 0.2]");
    }
    for (const NodePtr& value : list->items) RETURN_IF_ERROR(CheckValue(*value, where));
    array.keys.push_back(key->text);
    lists.push_back(list.get());
    tasks *= static_cast<int64_t>(list->items.size());
    if (tasks > kArrayTasksMax) {
      return Refuse(node, "array: more than ", kArrayTasksMax,
                    " tasks; give fewer values, or submit several arrays");
    }
  }
  for (int64_t task = 0; task < tasks; ++task) {
    std::vector<NodePtr>& values = array.tasks.emplace_back(lists.size());
    int64_t rest = task;
    for (size_t key = lists.size(); key-- > 0;) {
      const auto count = static_cast<int64_t>(lists[key]->items.size());
      values[key] = lists[key]->items[static_cast<size_t>(rest % count)];
      rest /= count;
    }
  }
  return absl::OkStatus();
}

// `array: [{lr: 1, seed: 3}, {lr: 2, seed: 4}]`: a task each, all with the same keys.
absl::Status ReadTasks(const Node& node, ArrayTree& array) {
  if (node.items.size() > static_cast<size_t>(kArrayTasksMax)) {
    return Refuse(node, "array: ", node.items.size(), " tasks; at most ", kArrayTasksMax,
                  "; submit several arrays");
  }
  for (size_t i = 0; i < node.items.size(); ++i) {
    const Node& task = *node.items[i];
    const std::string where = absl::StrCat("array[", i, "]");
    if (task.kind != Node::Kind::kMap || task.entries.empty()) {
      return Refuse(task, where, ": expected a mapping of keys to values, such as {lr: 0.1}");
    }
    std::vector<NodePtr>& values = array.tasks.emplace_back(task.entries.size());
    std::set<std::string> seen;
    for (const auto& [key, value] : task.entries) {
      RETURN_IF_ERROR(CheckKey(*key, where));
      RETURN_IF_ERROR(CheckValue(*value, absl::StrCat(where, ".", key->text)));
      if (!seen.insert(key->text).second) {
        return Refuse(*key, where, ".", key->text, ": given twice");
      }
      if (i == 0) array.keys.push_back(key->text);
      const auto known = std::find(array.keys.begin(), array.keys.end(), key->text);
      if (known == array.keys.end()) {
        return Refuse(*key, where, ".", key->text,
                      ": the first task has no such key; all tasks have the same");
      }
      values[static_cast<size_t>(known - array.keys.begin())] = value;
    }
    for (size_t key = 0; key < array.keys.size(); ++key) {
      if (key >= values.size() || values[key] == nullptr) {
        return Refuse(task, where, ": has no ", array.keys[key], ", which the first task has");
      }
    }
  }
  return absl::OkStatus();
}

// The key of the ${array.KEY} that begins at `at`, and the end of it; npos: it does not end.
std::string KeyAt(const std::string& text, size_t at, size_t* end) {
  const size_t brace = text.find('}', at);
  *end = brace == std::string::npos ? brace : brace + 1;
  if (brace == std::string::npos) return "";
  return text.substr(at + kBeginBytes, brace - at - kBeginBytes);
}

// Adds the keys that are used in `node` and below. kInvalidArgument: there is no such key.
absl::Status FindUses(const Node& node, const std::vector<std::string>& keys,
                      std::set<std::string>& used) {
  for (const NodePtr& item : node.items) RETURN_IF_ERROR(FindUses(*item, keys, used));
  for (const auto& [key, value] : node.entries) RETURN_IF_ERROR(FindUses(*value, keys, used));
  for (size_t at = node.text.find(kBegin); at != std::string::npos;) {
    size_t end;
    const std::string key = KeyAt(node.text, at, &end);
    if (end == std::string::npos) return Refuse(node, Quoted(node.text), ": ${array. without }");
    if (key != kIndexKey && std::find(keys.begin(), keys.end(), key) == keys.end()) {
      return Refuse(node, "${array.", key, "}: no such key; there are ", absl::StrJoin(keys, ", "),
                    " and index");
    }
    used.insert(key);
    at = node.text.find(kBegin, end);
  }
  return absl::OkStatus();
}

class Substitution {
 public:
  Substitution(const ArrayTree& array, int32_t index) : array_(array), index_(index) {}

  // Shares what has nothing to replace with `node`.
  NodePtr In(const NodePtr& node) const {
    std::shared_ptr<Node> copy;
    const auto changed = [&]() -> Node& {
      if (copy == nullptr) copy = std::make_shared<Node>(*node);
      return *copy;
    };
    for (size_t i = 0; i < node->items.size(); ++i) {
      NodePtr item = In(node->items[i]);
      if (item != node->items[i]) changed().items[i] = std::move(item);
    }
    for (size_t i = 0; i < node->entries.size(); ++i) {
      NodePtr value = In(node->entries[i].second);
      if (value != node->entries[i].second) changed().entries[i].second = std::move(value);
    }
    if (node->text.find(kBegin) != std::string::npos) InText(changed());
    if (copy == nullptr) return node;
    return copy;
  }

 private:
  void InText(Node& node) const {
    const std::string text = std::exchange(node.text, "");
    size_t from = 0;
    for (size_t at = text.find(kBegin); at != std::string::npos; at = text.find(kBegin, from)) {
      size_t end;
      const std::string key = KeyAt(text, at, &end);
      const bool whole = at == 0 && end == text.size();
      node.text.append(text, from, at - from);
      if (key == kIndexKey) {
        absl::StrAppend(&node.text, index_);
        if (whole) node.plain = node.may_be_text = true;
      } else {
        const auto known = std::find(array_.keys.begin(), array_.keys.end(), key);
        const Node& value = *array_.tasks[static_cast<size_t>(index_)]
                                         [static_cast<size_t>(known - array_.keys.begin())];
        node.text += value.text;
        if (whole) {
          node.plain = value.plain;
          node.may_be_text = true;
        }
      }
      from = end;
    }
    node.text.append(text, from);
  }

  const ArrayTree& array_;
  const int32_t index_;
};

absl::StatusOr<std::string> NameOf(const Node& root, size_t tasks) {
  const NodePtr name = Field(root, "name");
  if (name == nullptr || name->kind != Node::Kind::kScalar) {
    return Refuse(root, "name: required; tasks of an array are named NAME-0, NAME-1, ...");
  }
  if (name->text.find(kBegin) != std::string::npos) {
    return Refuse(*name, "name: ", Quoted(name->text),
                  ": tasks of an array are named NAME-0, NAME-1, ...; leave ${array...} out");
  }
  constexpr size_t kNameBytesMax = 63;
  const size_t digits = absl::StrCat(tasks - 1).size();
  if (name->text.size() + 1 + digits > kNameBytesMax) {
    return Refuse(*name, "name: ", Quoted(name->text), " is longer than the ",
                  kNameBytesMax - 1 - digits, " characters that leave room for -", tasks - 1);
  }
  return name->text;
}

}  // namespace

absl::StatusOr<std::optional<ArrayTree>> ReadArray(const NodePtr& root) {
  if (root->kind != Node::Kind::kMap) return std::optional<ArrayTree>();
  const NodePtr node = Field(*root, "array");
  const NodePtr max_running = Field(*root, "max_running");
  if (node == nullptr) {
    if (max_running == nullptr) return std::optional<ArrayTree>();
    return Refuse(*max_running, "max_running: is for `array`, which is not given");
  }
  ArrayTree array;
  const bool product = node->kind == Node::Kind::kMap && !node->entries.empty();
  if (!product && (node->kind != Node::Kind::kList || node->items.empty())) {
    return Refuse(*node,
                  "array: expected a mapping of keys to lists, such as {lr: [0.1, 0.2]}, or a list "
                  "of mappings, such as [{lr: 0.1}, {lr: 0.2}]");
  }
  RETURN_IF_ERROR(product ? ReadProduct(*node, array) : ReadTasks(*node, array));
  if (array.keys.size() > static_cast<size_t>(kArrayKeysMax)) {
    return Refuse(*node, "array: ", array.keys.size(), " keys; at most ", kArrayKeysMax);
  }
  if (max_running != nullptr &&
      (max_running->kind != Node::Kind::kScalar || !max_running->plain ||
       !absl::SimpleAtoi(max_running->text, &array.max_running) || array.max_running < 1)) {
    return Refuse(*max_running, "max_running: expected a whole number of at least 1, got ",
                  Quoted(max_running->text));
  }
  auto rest = std::make_shared<Node>(*root);
  int given = 0;
  std::erase_if(rest->entries, [&given](const auto& entry) {
    given += entry.first->text == "array" ? 1 : 0;
    return entry.first->text == "array" || entry.first->text == "max_running";
  });
  if (given > 1) return Refuse(*node, "array: given twice");
  ASSIGN_OR_RETURN(array.name, NameOf(*rest, array.tasks.size()));
  std::set<std::string> used;
  RETURN_IF_ERROR(FindUses(*rest, array.keys, used));
  // A command finds its values in its environment, also those that its spec does not name.
  for (const std::string& key : array.keys) {
    if (Field(*rest, "engine") == nullptr || used.contains(key)) continue;
    return Refuse(*node, "array.", key, ": no field says ${array.", key,
                  "}, so that tasks would be the same; use it, or leave it out");
  }
  array.rest = std::move(rest);
  return std::optional<ArrayTree>(std::move(array));
}

NodePtr TreeOf(const ArrayTree& array, int32_t index) {
  return Substitution(array, index).In(array.rest);
}

absl::Status Number(const ArrayTree& array, int32_t index, v1::JobSpec& spec) {
  v1::ArrayTask& task = *spec.mutable_array_task();
  task.set_array(array.name);
  task.set_index(index);
  task.set_tasks(static_cast<int32_t>(array.tasks.size()));
  task.set_max_running(array.max_running);
  for (size_t key = 0; key < array.keys.size(); ++key) {
    v1::ArrayValue& value = *task.add_values();
    value.set_key(array.keys[key]);
    value.set_value(array.tasks[static_cast<size_t>(index)][key]->text);
  }
  for (const char* label : {kArrayLabel, kArrayIndexLabel}) {
    if (spec.labels().contains(label)) {
      return Refuse(*array.rest, "labels.", label,
                    ": tasks of an array get this label; leave it out");
    }
  }
  spec.set_name(absl::StrCat(array.name, "-", index));
  (*spec.mutable_labels())[kArrayLabel] = array.name;
  (*spec.mutable_labels())[kArrayIndexLabel] = absl::StrCat(index);
  return absl::OkStatus();
}

std::string TaskText(const ArrayTree& array, int32_t index) {
  std::vector<std::string> values;
  for (size_t key = 0; key < array.keys.size(); ++key) {
    values.push_back(
        absl::StrCat(array.keys[key], ": ", array.tasks[static_cast<size_t>(index)][key]->text));
  }
  return absl::StrCat("task ", index, " (", absl::StrJoin(values, ", "), ")");
}

}  // namespace muster::spec
