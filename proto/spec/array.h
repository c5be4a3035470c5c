// Arrays: many jobs from one file, whose specs differ in the values of some keys.
#ifndef MUSTER_PROTO_SPEC_ARRAY_H_
#define MUSTER_PROTO_SPEC_ARRAY_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "muster/v1/spec.pb.h"
#include "proto/spec/document.h"

namespace muster::spec {

inline constexpr int32_t kArrayTasksMax = 10'000;
inline constexpr int kArrayKeysMax = 16;
inline constexpr size_t kArrayValueBytesMax = 1024;
// Labels that every task has: the name of its array, and its index.
inline constexpr char kArrayLabel[] = "array";
inline constexpr char kArrayIndexLabel[] = "array-index";

// 1-63 characters of [a-z0-9_], starting with a letter. "index" is that of the task.
bool IsArrayKey(const std::string& key);

// The rules for all tasks of one array, each of which Validate accepts: kInvalidArgument where they
// are not 0 to n - 1 of one array. O(tasks).
absl::Status ValidateArray(const google::protobuf::RepeatedPtrField<v1::JobSpec>& tasks);

// ---- of the library muster_spec_parse
// What `array` and `max_running` of a file say, and the rest of it.
struct ArrayTree {
  std::string name;
  NodePtr rest;  // of the tree, with ${array.KEY} in it
  std::vector<std::string> keys;
  std::vector<std::vector<NodePtr>> tasks;  // the values of each, by key
  int32_t max_running = 0;
};
// No value: the tree has no array. kInvalidArgument: "FILE:LINE:COLUMN: array: why".
absl::StatusOr<std::optional<ArrayTree>> ReadArray(const NodePtr& root);
// The tree of one task: ${array.KEY} is replaced. A scalar that is nothing else is replaced by the
// value as it is written, so that it may be a number.
NodePtr TreeOf(const ArrayTree& array, int32_t index);
// Makes the spec that was read from the tree of a task the spec of this task: name, labels,
// array_task. kInvalidArgument: it has such a label.
absl::Status Number(const ArrayTree& array, int32_t index, v1::JobSpec& spec);
// "task 3 (lr: 0.1, seed: 2)".
std::string TaskText(const ArrayTree& array, int32_t index);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_ARRAY_H_
