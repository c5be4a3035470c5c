#include "parallel/data/byte_trie.h"

#include <algorithm>

namespace muster::parallel {

ByteTrie::ByteTrie(std::vector<std::pair<absl::string_view, int32_t>> strings) {
  if (strings.empty()) return;
  const auto by_text = [](const auto& a, const auto& b) { return a.first < b.first; };
  std::stable_sort(strings.begin(), strings.end(), by_text);
  struct Range {
    size_t begin, end;  // strings that share `depth` bytes
    size_t depth;
    uint32_t node;
  };
  nodes_.resize(1);
  nodes_[0].parent = 0;  // no byte leads to the root: bases are above 0
  std::vector<Range> ranges = {{0, strings.size(), 0, 0}};
  std::vector<uint8_t> children;
  while (!ranges.empty()) {
    Range range = ranges.back();
    ranges.pop_back();
    for (; range.begin < range.end && strings[range.begin].first.size() == range.depth;
         ++range.begin) {
      nodes_[range.node].value = strings[range.begin].second;
    }
    if (range.begin == range.end) continue;
    const auto byte = [&](size_t i) { return static_cast<uint8_t>(strings[i].first[range.depth]); };
    children.clear();
    for (size_t i = range.begin; i < range.end; ++i) {
      if (children.empty() || children.back() != byte(i)) children.push_back(byte(i));
    }
    const uint32_t base = FindBase(children);
    nodes_[range.node].base = base;
    for (size_t i = range.begin; i < range.end;) {
      const size_t begin = i;
      while (i < range.end && byte(i) == byte(begin)) ++i;
      nodes_[base + byte(begin)].parent = range.node;
      ranges.push_back({begin, i, range.depth + 1, base + byte(begin)});
    }
  }
}

uint32_t ByteTrie::FindBase(const std::vector<uint8_t>& children) {
  const auto free = [this](uint32_t node) {
    return node >= nodes_.size() || nodes_[node].parent == kNone;
  };
  uint32_t seen = 0, taken = 0;
  for (uint32_t first = std::max<uint32_t>(search_from_, children[0] + 1);; ++first) {
    ++seen;
    if (!free(first)) {
      ++taken;
      continue;
    }
    const uint32_t base = first - children[0];
    bool fits = true;
    for (const uint8_t child : children) fits = fits && free(base + child);
    if (!fits) continue;
    if (base + children.back() >= nodes_.size()) nodes_.resize(base + children.back() + 1);
    if (seen > 64 && taken > seen - seen / 16) search_from_ = first;
    return base;
  }
}

}  // namespace muster::parallel
