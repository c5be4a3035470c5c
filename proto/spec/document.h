// YAML text as a tree whose nodes know their location in the text. Only document.cc sees yaml-cpp's
// types and exceptions.
#ifndef MUSTER_PROTO_SPEC_DOCUMENT_H_
#define MUSTER_PROTO_SPEC_DOCUMENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace muster::spec {

inline constexpr int64_t kTextBytesMax = 1 << 20;
inline constexpr int kNestingMax = 64;
inline constexpr int64_t kValuesMax = 100'000;

struct Node;
// Shared, since an alias refers to the node of its anchor. Never cyclic: an alias inside its own
// anchor is refused.
using NodePtr = std::shared_ptr<const Node>;

struct Node {
  enum class Kind { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  std::string text;            // scalars
  bool plain = false;          // a scalar written without quotes, so that it may be a number
  bool may_be_text = false;    // although `plain`: the value of a key of an array
  std::string location;        // "FILE:LINE:COLUMN", or "--set KEY=VALUE"
  std::vector<NodePtr> items;  // lists
  std::vector<std::pair<NodePtr, NodePtr>> entries;  // maps, in order; keys may repeat
  int64_t values = 1;  // nodes below and including this one, aliases counted in full
};

// Parses `text`, which must hold one document. kInvalidArgument: "FILE:LINE:COLUMN: why". With
// `whole_location`, nodes and errors carry that instead of FILE:LINE:COLUMN: the value of an
// override has no line.
absl::StatusOr<NodePtr> ParseDocument(const std::string& text, const std::string& file,
                                      const std::string& whole_location = "");

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_DOCUMENT_H_
