// The commands of `muster data` that show what is in a data set, and merge.
#include <algorithm>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/file_system.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "cli/data.h"
#include "parallel/data/dataset_description.h"
#include "parallel/data/dataset_tools.h"
#include "parallel/data/inspect.h"
#include "parallel/data/tokenizer.h"
#include "parallel/data/tokenizer_file.h"
#include "proto/spec/names.h"

namespace muster::cli {
namespace {

// The tokenizer that a data set was made with. Where nothing says it, bytes are shown as text.
absl::StatusOr<std::unique_ptr<parallel::Tokenizer>> TokenizerOf(FileSystem& files,
                                                                 const std::string& prefix) {
  ASSIGN_OR_RETURN(const auto description, parallel::ReadDescription(files, prefix));
  if (!description.has_value()) {
    ASSIGN_OR_RETURN(const auto dataset, parallel::IndexedDataset::Open(prefix));
    if (dataset->type() != parallel::TokenType::kU8) return nullptr;
    return parallel::MakeByteTokenizer();
  }
  ASSIGN_OR_RETURN(const std::string file,
                   parallel::ReadDatasetTokenizer(files, prefix, *description));
  if (file.empty()) return parallel::MakeByteTokenizer();
  return parallel::ParseTokenizer(file, prefix + ".tokenizer");
}

// As DataInspect names it; null: no text.
absl::StatusOr<std::unique_ptr<parallel::Tokenizer>> TokenizerFor(FileSystem& files,
                                                                  const std::string& prefix,
                                                                  const std::string& name) {
  if (name.empty() || name == "none") return nullptr;
  return name == "auto" ? TokenizerOf(files, prefix) : parallel::OpenTokenizer(files, name);
}

std::string Share(int64_t part, int64_t whole) {
  return absl::StrFormat("%.2f%%", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

}  // namespace

absl::Status DataInspect(const std::string& prefix, const std::string& tokenizer_name,
                         Format format, Terminal& terminal) {
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  ASSIGN_OR_RETURN(const std::unique_ptr<parallel::Tokenizer> tokenizer,
                   TokenizerFor(*files, prefix, tokenizer_name));
  ASSIGN_OR_RETURN(const parallel::DatasetSummary summary,
                   parallel::Inspect(prefix, tokenizer.get()));
  ASSIGN_OR_RETURN(const auto description, parallel::ReadDescription(*files, prefix));
  const std::string type(parallel::Name(summary.type));
  if (format != Format::kTable) {
    Json top = Json::array();
    for (const auto& [id, count] : summary.top) top.push_back({{"id", id}, {"count", count}});
    Print({{"prefix", summary.prefix},
           {"type", type},
           {"tokenizer", description.has_value() ? description->tokenizer : ""},
           {"tokenizerSha256", description.has_value() ? description->tokenizer_sha256 : ""},
           {"documents", summary.documents},
           {"sequences", summary.sequences},
           {"tokens", summary.tokens},
           {"bytes", summary.bytes},
           {"idMin", summary.id_min},
           {"idMax", summary.id_max},
           {"idsDistinct", summary.ids_distinct},
           {"top", top},
           {"snippet", summary.snippet}},
          format, terminal.out);
    return absl::OkStatus();
  }
  std::string made_with = "not said";
  if (description.has_value()) {
    made_with = description->tokenizer;
    if (!description->tokenizer_sha256.empty()) {
      absl::StrAppend(&made_with, ", SHA-256 ", description->tokenizer_sha256);
    }
  }
  terminal.out << Table({{"dataset:", summary.prefix},
                         {"tokenizer:", made_with},
                         {"token type:", type},
                         {"documents:", absl::StrCat(summary.documents)},
                         {"sequences:", absl::StrCat(summary.sequences)},
                         {"tokens:", absl::StrCat(summary.tokens)},
                         {"size:", Bytes(summary.bytes)},
                         {"ids:", absl::StrCat(summary.id_min, " to ", summary.id_max, ", ",
                                               summary.ids_distinct, " distinct")}});
  if (!summary.top.empty()) {
    std::vector<std::vector<std::string>> rows = {{"ID", "COUNT", "SHARE"}};
    for (const auto& [id, count] : summary.top) {
      rows.push_back({absl::StrCat(id), absl::StrCat(count),
                      absl::StrFormat("%.2f%%", 100.0 * static_cast<double>(count) /
                                                    static_cast<double>(summary.tokens))});
    }
    terminal.out << "\nmost frequent\n" << Table(rows);
  }
  if (!summary.snippet.empty()) {
    terminal.out << "\nbeginning\n" << spec::Quoted(summary.snippet, 300) << "\n";
  }
  return absl::OkStatus();
}

absl::Status DataStats(const std::string& prefix, Format format, Terminal& terminal) {
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  ASSIGN_OR_RETURN(const parallel::DatasetStats stats, parallel::Stats(*files, prefix));
  if (format != Format::kTable) {
    Print({{"prefix", prefix},
           {"documents", stats.documents},
           {"tokens", stats.tokens},
           {"textBytes", stats.text_bytes},
           {"duplicates", stats.duplicates},
           {"duplicateTokens", stats.duplicate_tokens},
           {"shortest", stats.shortest},
           {"median", stats.median},
           {"length90", stats.length_90},
           {"length99", stats.length_99},
           {"longest", stats.longest},
           {"documentsByPowerOfTwo", stats.by_power}},
          format, terminal.out);
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> rows = {
      {"dataset:", prefix},
      {"documents:", absl::StrCat(stats.documents)},
      {"tokens:", absl::StrCat(stats.tokens)},
      {"duplicates:",
       absl::StrCat(stats.duplicates, " documents, ", stats.duplicate_tokens, " tokens (",
                    Share(stats.duplicate_tokens, std::max<int64_t>(stats.tokens, 1)), ")")},
      {"lengths:",
       absl::StrCat(stats.shortest, " to ", stats.longest, " tokens; half up to ", stats.median,
                    ", 90% up to ", stats.length_90, ", 99% up to ", stats.length_99)}};
  if (stats.text_bytes > 0 && stats.tokens > 0) {
    rows.push_back(
        {"bytes/token:", absl::StrFormat("%.3f", static_cast<double>(stats.text_bytes) /
                                                     static_cast<double>(stats.tokens))});
  }
  terminal.out << Table(rows);
  if (stats.by_power.empty()) return absl::OkStatus();
  const int64_t most = *std::max_element(stats.by_power.begin(), stats.by_power.end());
  rows = {{"TOKENS", "DOCUMENTS", "SHARE", ""}};
  for (size_t i = 0; i < stats.by_power.size(); ++i) {
    constexpr int64_t kWidth = 40;
    const int64_t count = stats.by_power[i];
    // Every number above zero is seen.
    const int64_t width = (count * kWidth + most - 1) / most;
    rows.push_back({absl::StrCat(int64_t{1} << i, " to ", (int64_t{2} << i) - 1),
                    absl::StrCat(count), Share(count, stats.documents),
                    std::string(static_cast<size_t>(width), '#')});
  }
  terminal.out << "\nlengths of documents\n" << Table(rows);
  return absl::OkStatus();
}

absl::Status DataSample(const SampleDocumentsArguments& arguments, Format format,
                        Terminal& terminal) {
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  ASSIGN_OR_RETURN(const auto dataset, parallel::IndexedDataset::Open(arguments.prefix));
  ASSIGN_OR_RETURN(const std::unique_ptr<parallel::Tokenizer> tokenizer,
                   TokenizerFor(*files, arguments.prefix, arguments.tokenizer));
  Rng rng(arguments.seed);
  Json list = Json::array();
  for (int64_t i = 0; i < arguments.count && dataset->documents() > 0; ++i) {
    const auto document =
        static_cast<int64_t>(rng.Below(static_cast<uint64_t>(dataset->documents())));
    const int64_t begin = dataset->DocumentBegin(document);
    const int64_t length = dataset->DocumentBegin(document + 1) - begin;
    std::vector<int32_t> ids(static_cast<size_t>(std::min(length, arguments.tokens_max)));
    RETURN_IF_ERROR(dataset->Read(begin, int64_t{1} << 31, absl::MakeSpan(ids)));
    std::string text = absl::StrJoin(ids, " ");
    if (tokenizer != nullptr) {
      ASSIGN_OR_RETURN(text, tokenizer->Decode(ids));
    }
    if (format != Format::kTable) {
      list.push_back({{"document", document}, {"tokens", length}, {"text", text}});
      continue;
    }
    terminal.out << "document " << document << ", " << length << " tokens"
                 << (length > arguments.tokens_max ? ", its beginning" : "") << "\n"
                 << text << "\n\n";
  }
  if (format != Format::kTable) Print(list, format, terminal.out);
  return absl::OkStatus();
}

absl::Status DataValidate(const std::string& prefix, Format format, Terminal& terminal) {
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  ASSIGN_OR_RETURN(const parallel::DatasetDescription found, parallel::Validate(*files, prefix));
  if (format != Format::kTable) {
    Print({{"prefix", prefix},
           {"sound", true},
           {"documents", found.documents},
           {"tokens", found.tokens},
           {"largestId", found.largest_id},
           {"tokenizer", found.tokenizer}},
          format, terminal.out);
    return absl::OkStatus();
  }
  terminal.out << prefix << " is sound: " << found.documents << " documents, " << found.tokens
               << " tokens, ids up to " << found.largest_id << ", "
               << (found.tokenizer.empty() ? "of an unknown tokenizer"
                                           : absl::StrCat("of ", found.tokenizer))
               << "\n";
  return absl::OkStatus();
}

absl::Status DataMerge(const std::vector<std::string>& prefixes, const std::string& output,
                       Format format, Terminal& terminal) {
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  ASSIGN_OR_RETURN(const parallel::DatasetDescription merged,
                   parallel::Merge(*files, prefixes, output));
  if (format != Format::kTable) {
    Print({{"prefix", output}, {"documents", merged.documents}, {"tokens", merged.tokens}}, format,
          terminal.out);
  } else {
    terminal.out << Table({{"DATASET", "DOCUMENTS", "TOKENS"},
                           {output, absl::StrCat(merged.documents), absl::StrCat(merged.tokens)}});
  }
  return absl::OkStatus();
}

}  // namespace muster::cli
