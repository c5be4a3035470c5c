#include "parallel/data/inspect.h"

#include <algorithm>
#include <limits>

#include "absl/container/flat_hash_map.h"
#include "base/file_system.h"
#include "base/status_macros.h"

namespace muster::parallel {

absl::StatusOr<DatasetSummary> Inspect(const std::string& prefix, const Tokenizer* tokenizer,
                                       int top_max, int snippet_tokens) {
  ASSIGN_OR_RETURN(const std::unique_ptr<IndexedDataset> dataset, IndexedDataset::Open(prefix));
  std::unique_ptr<FileSystem> files = PosixFileSystem();
  DatasetSummary summary;
  summary.prefix = prefix;
  summary.type = dataset->type();
  summary.documents = dataset->documents();
  summary.sequences = dataset->sequences();
  summary.tokens = dataset->tokens();
  for (const char* suffix : {".bin", ".idx"}) {
    ASSIGN_OR_RETURN(const int64_t bytes, files->Size(prefix + suffix));
    summary.bytes += bytes;
  }

  constexpr int64_t kBlock = 1 << 16;
  constexpr int64_t kAnyId = int64_t{1} << 31;
  absl::flat_hash_map<int32_t, int64_t> counts;
  std::vector<int32_t> block;
  for (int64_t begin = 0; begin < summary.tokens; begin += kBlock) {
    block.resize(static_cast<size_t>(std::min(kBlock, summary.tokens - begin)));
    RETURN_IF_ERROR(dataset->Read(begin, kAnyId, absl::MakeSpan(block)));
    for (int32_t id : block) ++counts[id];
  }
  summary.ids_distinct = static_cast<int64_t>(counts.size());
  summary.top.assign(counts.begin(), counts.end());
  const auto by_id = [](const auto& a, const auto& b) { return a.first < b.first; };
  if (!summary.top.empty()) {
    const auto [low, high] = std::minmax_element(summary.top.begin(), summary.top.end(), by_id);
    summary.id_min = low->first;
    summary.id_max = high->first;
  }
  std::sort(summary.top.begin(), summary.top.end(), [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  });
  if (static_cast<int>(summary.top.size()) > top_max) {
    summary.top.resize(static_cast<size_t>(std::max(0, top_max)));
  }

  if (tokenizer != nullptr) {
    block.resize(static_cast<size_t>(std::clamp<int64_t>(snippet_tokens, 0, summary.tokens)));
    RETURN_IF_ERROR(dataset->Read(0, kAnyId, absl::MakeSpan(block)));
    ASSIGN_OR_RETURN(summary.snippet, tokenizer->Decode(block));
  }
  return summary;
}

}  // namespace muster::parallel
