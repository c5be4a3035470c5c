#include "parallel/data/dataset_tools.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <optional>
#include <tuple>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/numeric/int128.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status_macros.h"

namespace muster::parallel {
namespace {

constexpr int64_t kBlock = 1 << 16;
constexpr int64_t kAnyId = int64_t{1} << 31;

// Calls visit(ids) for the tokens [begin, end) of the stream, some at a time.
absl::Status ForEachBlock(const IndexedDataset& dataset, int64_t begin, int64_t end, int64_t vocab,
                          std::vector<int32_t>& buffer,
                          absl::FunctionRef<absl::Status(absl::Span<const int32_t>)> visit) {
  for (int64_t at = begin; at < end; at += kBlock) {
    buffer.resize(static_cast<size_t>(std::min(kBlock, end - at)));
    RETURN_IF_ERROR(dataset.Read(at, vocab, absl::MakeSpan(buffer)));
    RETURN_IF_ERROR(visit(buffer));
  }
  return absl::OkStatus();
}

// 128 bits of the ids of a document: two of 10^9 documents are taken for equal by chance in less
// than one of 10^20 datasets.
class Hasher {
 public:
  void Add(int32_t id) {
    for (uint64_t* word : {&low_, &high_}) {
      const auto mixed = static_cast<unsigned __int128>(
                             *word ^ (static_cast<uint32_t>(id) + uint64_t{0x9e3779b97f4a7c15})) *
                         (word == &low_ ? 0xd6e8feb86659fd93u : 0xa0761d6478bd642fu);
      *word = static_cast<uint64_t>(mixed) ^ static_cast<uint64_t>(mixed >> 64);
    }
  }
  absl::uint128 value() const { return absl::MakeUint128(high_, low_); }

 private:
  uint64_t low_ = 0x243f6a8885a308d3, high_ = 0x13198a2e03707344;
};

int64_t AtShare(const std::vector<int64_t>& sorted, double share) {
  const auto at = static_cast<size_t>(share * static_cast<double>(sorted.size() - 1));
  return sorted[at];
}

}  // namespace

absl::StatusOr<DatasetStats> Stats(FileSystem& files, const std::string& prefix) {
  ASSIGN_OR_RETURN(const std::unique_ptr<IndexedDataset> dataset, IndexedDataset::Open(prefix));
  ASSIGN_OR_RETURN(const std::optional<DatasetDescription> description,
                   ReadDescription(files, prefix));
  DatasetStats stats;
  stats.documents = dataset->documents();
  stats.tokens = dataset->tokens();
  if (description.has_value()) stats.text_bytes = description->text_bytes;
  std::vector<int64_t> lengths;
  lengths.reserve(static_cast<size_t>(stats.documents));
  absl::flat_hash_set<absl::uint128> seen;
  std::vector<int32_t> buffer;
  for (int64_t i = 0; i < stats.documents; ++i) {
    const int64_t begin = dataset->DocumentBegin(i), end = dataset->DocumentBegin(i + 1);
    Hasher hasher;
    RETURN_IF_ERROR(ForEachBlock(*dataset, begin, end, kAnyId, buffer,
                                 [&hasher](absl::Span<const int32_t> ids) {
                                   for (int32_t id : ids) hasher.Add(id);
                                   return absl::OkStatus();
                                 }));
    const int64_t length = end - begin;
    lengths.push_back(length);
    if (!seen.insert(hasher.value()).second) {
      ++stats.duplicates;
      stats.duplicate_tokens += length;
    }
    const auto power =
        static_cast<size_t>(63 - std::countl_zero(static_cast<uint64_t>(length) | 1));
    if (stats.by_power.size() <= power) stats.by_power.resize(power + 1);
    ++stats.by_power[power];
  }
  if (lengths.empty()) return stats;
  std::sort(lengths.begin(), lengths.end());
  stats.shortest = lengths.front();
  stats.median = AtShare(lengths, 0.5);
  stats.length_90 = AtShare(lengths, 0.9);
  stats.length_99 = AtShare(lengths, 0.99);
  stats.longest = lengths.back();
  return stats;
}

absl::StatusOr<DatasetDescription> Validate(FileSystem& files, const std::string& prefix) {
  ASSIGN_OR_RETURN(const std::unique_ptr<IndexedDataset> dataset, IndexedDataset::Open(prefix));
  ASSIGN_OR_RETURN(const std::optional<DatasetDescription> described,
                   ReadDescription(files, prefix));
  std::vector<int32_t> buffer;
  int64_t largest = 0;
  RETURN_IF_ERROR(ForEachBlock(*dataset, 0, dataset->tokens(),
                               described.has_value() ? described->vocabulary : kAnyId, buffer,
                               [&largest](absl::Span<const int32_t> ids) {
                                 for (int32_t id : ids) largest = std::max<int64_t>(largest, id);
                                 return absl::OkStatus();
                               }));
  DatasetDescription found = described.value_or(DatasetDescription());
  if (!described.has_value()) {
    found.documents = dataset->documents();
    found.tokens = dataset->tokens();
    found.largest_id = largest;
    return found;
  }
  const std::tuple<const char*, int64_t, int64_t> numbers[] = {
      {"documents", found.documents, dataset->documents()},
      {"tokens", found.tokens, dataset->tokens()},
      {"a largest id of", found.largest_id, largest}};
  for (const auto& [name, said, there] : numbers) {
    if (said == there) continue;
    return absl::DataLossError(
        absl::StrCat(prefix, ".dataset.json: says ", name, " ", said, ", the dataset has ", there));
  }
  RETURN_IF_ERROR(ReadDatasetTokenizer(files, prefix, found).status());
  return found;
}

absl::StatusOr<DatasetDescription> Merge(FileSystem& files,
                                         const std::vector<std::string>& prefixes,
                                         const std::string& output) {
  if (prefixes.empty()) return absl::InvalidArgumentError("no datasets to merge");
  std::vector<std::unique_ptr<IndexedDataset>> datasets;
  std::vector<std::optional<DatasetDescription>> descriptions;
  TokenType type = TokenType::kU8;
  for (const std::string& prefix : prefixes) {
    if (prefix == output) {
      return absl::InvalidArgumentError(absl::StrCat(output, " is one of the inputs"));
    }
    ASSIGN_OR_RETURN(datasets.emplace_back(), IndexedDataset::Open(prefix));
    ASSIGN_OR_RETURN(descriptions.emplace_back(), ReadDescription(files, prefix));
    const std::optional<DatasetDescription>& first = descriptions.front();
    const std::optional<DatasetDescription>& last = descriptions.back();
    if (first.has_value() != last.has_value() ||
        (first.has_value() && (first->tokenizer_sha256 != last->tokenizer_sha256 ||
                               first->vocabulary != last->vocabulary))) {
      return absl::InvalidArgumentError(absl::StrCat(
          prefixes.front(), " and ", prefix,
          " have different tokenizers: ", first.has_value() ? first->tokenizer : "unknown", " and ",
          last.has_value() ? last->tokenizer : "unknown"));
    }
    if (SizeOf(datasets.back()->type()) > SizeOf(type)) type = datasets.back()->type();
  }
  ASSIGN_OR_RETURN(auto writer, IndexedDatasetWriter::Create(files, output, type));
  DatasetDescription merged = descriptions.front().value_or(DatasetDescription());
  merged.text_bytes = 0;
  std::vector<int32_t> buffer;
  for (size_t i = 0; i < datasets.size(); ++i) {
    const IndexedDataset& dataset = *datasets[i];
    for (int64_t document = 0; document < dataset.documents(); ++document) {
      RETURN_IF_ERROR(ForEachBlock(dataset, dataset.DocumentBegin(document),
                                   dataset.DocumentBegin(document + 1), kAnyId, buffer,
                                   [&](absl::Span<const int32_t> ids) {
                                     for (int32_t id : ids)
                                       merged.largest_id = std::max<int64_t>(merged.largest_id, id);
                                     return writer->Append(ids);
                                   }));
      RETURN_IF_ERROR(writer->EndDocument());
    }
    if (!descriptions[i].has_value()) continue;
    merged.text_bytes += descriptions[i]->text_bytes;
    // What is around documents is said where it is the same everywhere.
    if (descriptions[i]->bos != merged.bos) merged.bos.clear();
    if (descriptions[i]->eos != merged.eos) merged.eos.clear();
  }
  merged.documents = writer->documents();
  merged.tokens = writer->tokens();
  if (files.Exists(output + ".idx")) RETURN_IF_ERROR(files.RemoveFile(output + ".idx"));
  if (descriptions.front().has_value()) {
    ASSIGN_OR_RETURN(const std::string file,
                     ReadDatasetTokenizer(files, prefixes.front(), *descriptions.front()));
    RETURN_IF_ERROR(WriteDatasetTokenizer(files, output, file));
    RETURN_IF_ERROR(WriteDescription(files, output, merged));
  } else {
    RETURN_IF_ERROR(WriteDatasetTokenizer(files, output, ""));
    if (files.Exists(output + ".dataset.json")) {
      RETURN_IF_ERROR(files.RemoveFile(output + ".dataset.json"));
    }
  }
  RETURN_IF_ERROR(writer->Finish());
  return merged;
}

}  // namespace muster::parallel
