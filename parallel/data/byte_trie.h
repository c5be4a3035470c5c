// Finds which of many strings a text begins with.
#ifndef MUSTER_PARALLEL_DATA_BYTE_TRIE_H_
#define MUSTER_PARALLEL_DATA_BYTE_TRIE_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace muster::parallel {

// A double array (Aoe, "An efficient digital search algorithm by using a double-array structure",
// 1989): the child of node n by byte b is base(n) + b, if its parent is n. Const after
// construction; thread-safe.
class ByteTrie {
 public:
  ByteTrie() = default;
  // Of strings that are not empty, with values >= 0. Of equal strings the last counts.
  explicit ByteTrie(std::vector<std::pair<absl::string_view, int32_t>> strings);

  bool empty() const { return nodes_.empty(); }
  // Calls found(bytes, value) for every string that `text` begins with, the shortest first.
  template <typename Found>
  void ForEachPrefix(absl::string_view text, Found found) const {
    if (nodes_.empty()) return;
    uint32_t node = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      const uint32_t child = nodes_[node].base + static_cast<uint8_t>(text[i]);
      if (child >= nodes_.size() || nodes_[child].parent != node) return;
      node = child;
      if (nodes_[node].value >= 0) found(i + 1, nodes_[node].value);
    }
  }
  // Bytes of the longest string that `text` begins with; 0: of none.
  size_t LongestPrefix(absl::string_view text) const {
    size_t longest = 0;
    ForEachPrefix(text, [&longest](size_t bytes, int32_t) { longest = bytes; });
    return longest;
  }

 private:
  static constexpr uint32_t kNone = 0xffffffff;
  struct Node {
    uint32_t base = kNone - 255;  // of a node without children: no child is in the table
    uint32_t parent = kNone;
    int32_t value = -1;
  };
  uint32_t FindBase(const std::vector<uint8_t>& children);

  std::vector<Node> nodes_;
  uint32_t search_from_ = 1;  // while it is built; below, few nodes are free
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_BYTE_TRIE_H_
