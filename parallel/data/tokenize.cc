#include "parallel/data/tokenize.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "parallel/data/chunk_encoder.h"
#include "parallel/data/dataset_description.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/sha256.h"
#include "parallel/data/text_input.h"
#include "parallel/data/tokenize_state.h"

namespace muster::parallel {
namespace {

using Json = nlohmann::json;

// The length of a text without its compression.
absl::StatusOr<int64_t> TextBytes(const TextInput& input) {
  ASSIGN_OR_RETURN(const std::unique_ptr<TextStream> stream, TextStream::Open(input.path));
  std::string text;
  int64_t bytes = 0;
  for (bool more = true; more;) {
    text.clear();
    ASSIGN_OR_RETURN(more, stream->Fill(1 << 20, text));
    bytes += static_cast<int64_t>(text.size());
  }
  return bytes;
}

// The state of one Tokenize() call.
class Tokenization {
 public:
  Tokenization(FileSystem& files, const Tokenizer& tokenizer, const TokenizeOptions& options)
      : files_(files), tokenizer_(tokenizer), options_(options) {}

  absl::StatusOr<std::vector<TokenizedSplit>> Run() {
    RETURN_IF_ERROR(CheckSplits());
    RETURN_IF_ERROR(FindInputs());
    RETURN_IF_ERROR(PlaceSplits());
    RETURN_IF_ERROR(Resume());
    const absl::Status status = EncodeAll();
    if (!status.ok()) {
      // What the same call can go on from stays.
      const bool may_pass = absl::IsUnavailable(status) || absl::IsPermissionDenied(status) ||
                            absl::IsNotFound(status);
      if (may_pass && writer_ != nullptr) writer_->Keep();
      if (!may_pass && files_.Exists(StatePath())) (void)files_.RemoveFile(StatePath());
      return status;
    }
    if (files_.Exists(StatePath())) RETURN_IF_ERROR(files_.RemoveFile(StatePath()));
    return std::move(state_.splits);
  }

 private:
  std::string StatePath() const { return options_.output + ".resume"; }
  std::string TokenizerSha256() const {
    return options_.tokenizer_file.empty() ? "" : Sha256(options_.tokenizer_file);
  }
  absl::Status CheckSplits() const;
  absl::Status FindInputs();
  absl::Status PlaceSplits();
  std::string Request() const;
  absl::Status Resume();
  absl::Status EncodeAll();
  absl::Status Write(const EncodedChunk& chunk);
  absl::Status BeginSplit();
  absl::Status FinishSplit();
  absl::Status Save();

  FileSystem& files_;
  const Tokenizer& tokenizer_;
  const TokenizeOptions& options_;
  std::vector<TextInput> inputs_;
  int64_t bytes_ = 0;  // of all inputs as they are on disk; -1: not known
  std::vector<int64_t> split_ends_;
  TokenizeState state_;
  std::unique_ptr<IndexedDatasetWriter> writer_;
  absl::Time saved_ = absl::Now();
};

absl::Status Tokenization::CheckSplits() const {
  if (options_.inputs.empty()) return absl::InvalidArgumentError("no input files");
  if (options_.output.empty()) return absl::InvalidArgumentError("no output prefix");
  if (options_.splits.empty()) return absl::InvalidArgumentError("no splits");
  std::set<std::string> names;
  for (const Split& split : options_.splits) {
    if (!(split.fraction > 0) || !std::isfinite(split.fraction)) {
      return absl::InvalidArgumentError(absl::StrCat("split '", split.name, "' has fraction ",
                                                     split.fraction, ", must be above 0"));
    }
    if (!names.insert(split.name).second || (split.name.empty() && options_.splits.size() > 1)) {
      return absl::InvalidArgumentError(
          absl::StrCat("split name '", split.name, "' is empty or given twice"));
    }
  }
  return absl::OkStatus();
}

absl::Status Tokenization::FindInputs() {
  ASSIGN_OR_RETURN(inputs_, ListTextInputs(options_.inputs));
  for (const TextInput& input : inputs_) {
    bytes_ = bytes_ < 0 || input.bytes < 0 ? -1 : bytes_ + input.bytes;
  }
  return bytes_ == 0 ? absl::InvalidArgumentError("the input files are empty") : absl::OkStatus();
}

absl::Status Tokenization::PlaceSplits() {
  if (options_.splits.size() == 1) {
    split_ends_ = {0};
    return absl::OkStatus();
  }
  // The positions are those in the text: compressed files are read once more for them.
  int64_t text_bytes = 0;
  for (const TextInput& input : inputs_) {
    if (input.bytes < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("splits by position need the size of the input, which ", input.path,
                       " does not have before it is read"));
    }
    ASSIGN_OR_RETURN(const int64_t bytes, TextBytes(input));
    text_bytes += bytes;
  }
  double total = 0, before = 0;
  for (const Split& split : options_.splits) total += split.fraction;
  for (const Split& split : options_.splits) {
    before += split.fraction;
    split_ends_.push_back(
        static_cast<int64_t>(std::llround(before / total * static_cast<double>(text_bytes))));
  }
  split_ends_.back() = text_bytes;
  return absl::OkStatus();
}

// All that the result depends on.
std::string Tokenization::Request() const {
  Json inputs = Json::array();
  for (const TextInput& input : inputs_) {
    inputs.push_back({input.path, input.bytes, input.modified_ns});
  }
  Json splits = Json::array();
  for (size_t i = 0; i < options_.splits.size(); ++i) {
    splits.push_back({options_.splits[i].name, split_ends_[i]});
  }
  const Json request = {{"inputs", inputs},
                        {"splits", splits},
                        {"boundary", static_cast<int>(options_.boundary)},
                        {"field", options_.field},
                        {"bos", options_.bos},
                        {"eos", options_.eos},
                        {"tokenizer", std::string(tokenizer_.name())},
                        {"sha256", TokenizerSha256()},
                        {"vocabulary", tokenizer_.vocab()}};
  return request.dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::Status Tokenization::Resume() {
  std::optional<TokenizeState> found = LoadState(files_, StatePath());
  state_.request = Request();
  if (!found.has_value() || found->request != state_.request || bytes_ < 0) {
    if (files_.Exists(StatePath())) RETURN_IF_ERROR(files_.RemoveFile(StatePath()));
    return absl::OkStatus();
  }
  if (found->writer.has_value()) {
    auto writer = IndexedDatasetWriter::Resume(files_, found->splits.back().prefix,
                                               TokenTypeFor(tokenizer_.vocab()), *found->writer);
    // Its files are gone, as a split was finished and the next state not yet saved: begin anew.
    if (!writer.ok()) return files_.RemoveFile(StatePath());
    writer_ = *std::move(writer);
  }
  state_ = *std::move(found);
  if (options_.resumed) options_.resumed(state_.bytes_read);
  return absl::OkStatus();
}

absl::Status Tokenization::EncodeAll() {
  DocumentReaderOptions reading;
  reading.boundary = options_.boundary;
  reading.json_lines = !options_.field.empty();
  reading.split_ends = split_ends_;
  reading.chunk_bytes = options_.chunk_bytes;
  DocumentReader reader(tokenizer_, inputs_, reading, state_.next);
  EncodingOptions encoding;
  encoding.boundary = options_.boundary;
  encoding.field = options_.field.empty() ? "text" : options_.field;
  encoding.bos = options_.bos;
  encoding.eos = options_.eos;
  encoding.threads = std::max(options_.threads, 1);
  const auto pipeline = EncodingPipeline::Start(tokenizer_, inputs_, reader, encoding);
  while (true) {
    ASSIGN_OR_RETURN(const std::optional<EncodedChunk> chunk, pipeline->Next());
    if (!chunk.has_value()) break;
    RETURN_IF_ERROR(Write(*chunk));
    if (options_.progress) options_.progress(state_.bytes_read, bytes_);
  }
  if (writer_ != nullptr) RETURN_IF_ERROR(FinishSplit());
  if (state_.splits.empty()) return absl::InvalidArgumentError("there is no text in the input");
  if (state_.splits.size() != options_.splits.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the input is used up before split '", options_.splits[state_.splits.size()].name,
        "' begins: it has too few documents or lines for ", options_.splits.size(), " splits"));
  }
  return absl::OkStatus();
}

absl::Status Tokenization::Write(const EncodedChunk& chunk) {
  if (writer_ == nullptr && !chunk.documents.empty()) RETURN_IF_ERROR(BeginSplit());
  absl::Span<const int32_t> rest = chunk.tokens;
  for (size_t i = 0; i < chunk.documents.size(); ++i) {
    const auto count = static_cast<size_t>(chunk.documents[i]);
    RETURN_IF_ERROR(writer_->Append(rest.subspan(0, count)));
    rest.remove_prefix(count);
    if (i + 1 < chunk.documents.size() || chunk.ends) RETURN_IF_ERROR(writer_->EndDocument());
  }
  if (!chunk.documents.empty()) {
    TokenizedSplit& split = state_.splits.back();
    split.text_bytes += chunk.text_bytes;
    for (int32_t id : chunk.tokens) split.largest_id = std::max<int64_t>(split.largest_id, id);
  }
  state_.next = chunk.next;
  state_.bytes_read = chunk.bytes_read;
  if (chunk.ends_split && writer_ != nullptr) {
    RETURN_IF_ERROR(FinishSplit());
    return Save();
  }
  return absl::Now() - saved_ >= options_.save_every ? Save() : absl::OkStatus();
}

absl::Status Tokenization::BeginSplit() {
  const Split& split = options_.splits[state_.splits.size()];
  const std::string prefix =
      split.name.empty() ? options_.output : absl::StrCat(options_.output, ".", split.name);
  ASSIGN_OR_RETURN(writer_,
                   IndexedDatasetWriter::Create(files_, prefix, TokenTypeFor(tokenizer_.vocab())));
  state_.splits.push_back({prefix});
  return absl::OkStatus();
}

absl::Status Tokenization::FinishSplit() {
  TokenizedSplit& split = state_.splits.back();
  RETURN_IF_ERROR(writer_->EndDocument());
  split.documents = writer_->documents();
  split.tokens = writer_->tokens();
  // An index says that its dataset is whole, so that of an earlier one goes before the description
  // changes.
  if (files_.Exists(split.prefix + ".idx")) {
    RETURN_IF_ERROR(files_.RemoveFile(split.prefix + ".idx"));
  }
  DatasetDescription description;
  description.tokenizer = std::string(tokenizer_.name());
  description.tokenizer = description.tokenizer.substr(description.tokenizer.rfind('/') + 1);
  description.tokenizer_sha256 = TokenizerSha256();
  description.vocabulary = tokenizer_.vocab();
  description.largest_id = split.largest_id;
  description.bos = options_.bos;
  description.eos = options_.eos;
  description.documents = split.documents;
  description.tokens = split.tokens;
  description.text_bytes = split.text_bytes;
  RETURN_IF_ERROR(WriteDatasetTokenizer(files_, split.prefix, options_.tokenizer_file));
  RETURN_IF_ERROR(WriteDescription(files_, split.prefix, description));
  RETURN_IF_ERROR(writer_->Finish());
  writer_ = nullptr;
  return absl::OkStatus();
}

// The order counts: a state that is on disk never says more than the files hold.
absl::Status Tokenization::Save() {
  if (bytes_ < 0) return absl::OkStatus();  // a pipe cannot be read again
  state_.writer.reset();
  if (writer_ != nullptr) {
    ASSIGN_OR_RETURN(state_.writer, writer_->Save());
  }
  RETURN_IF_ERROR(SaveState(files_, StatePath(), state_));
  saved_ = absl::Now();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DocumentBoundary> ParseDocumentBoundary(absl::string_view text) {
  if (text == "file") return DocumentBoundary::kFile;
  if (text == "line") return DocumentBoundary::kLine;
  if (text == "blank-line") return DocumentBoundary::kBlankLine;
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is no document boundary: file, line or blank-line"));
}

absl::StatusOr<std::vector<Split>> ParseSplits(absl::string_view text) {
  std::vector<Split> splits;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    const std::vector<std::string> sides = absl::StrSplit(part, '=');
    Split split;
    if (sides.size() != 2 || sides[0].empty() || !absl::SimpleAtod(sides[1], &split.fraction) ||
        !(split.fraction > 0) || !std::isfinite(split.fraction)) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", part,
                       "' is no split: expected NAME=FRACTION with a fraction above 0, as in "
                       "train=0.9,validation=0.1"));
    }
    if (sides[0].find('/') != std::string::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat("the split name '", sides[0], "' must not contain '/'"));
    }
    split.name = sides[0];
    for (const Split& other : splits) {
      if (other.name == split.name) {
        return absl::InvalidArgumentError(absl::StrCat("split '", split.name, "' is given twice"));
      }
    }
    splits.push_back(split);
  }
  // Shares such as 8,1,1 are relative. Fractions below 1 that do not add up to 1 are a mistake.
  double total = 0;
  bool fractions = false;
  for (const Split& split : splits) {
    total += split.fraction;
    fractions = fractions || split.fraction < 1;
  }
  if (fractions && std::abs(total - 1) > 1e-6) {
    return absl::InvalidArgumentError(
        absl::StrCat("the fractions of '", text, "' add up to ", total,
                     ", not 1; whole numbers are taken as shares, as in train=8,validation=1"));
  }
  return splits;
}

absl::StatusOr<BoundaryTokens> ChooseBoundaries(const Tokenizer& tokenizer, absl::string_view bos,
                                                absl::string_view eos) {
  BoundaryTokens chosen = tokenizer.boundaries();
  for (const auto& [written, ids] :
       {std::make_pair(bos, &chosen.bos), std::make_pair(eos, &chosen.eos)}) {
    if (written == "auto") continue;
    ids->clear();
    if (written == "none") continue;
    const std::optional<int32_t> id = tokenizer.IdOf(written);
    if (!id.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(tokenizer.name(), " has no token '", written, "'"));
    }
    ids->push_back(*id);
  }
  for (const char* known : {"<|endoftext|>", "<|end_of_text|>", "</s>"}) {
    if (eos != "auto" || !chosen.eos.empty()) break;
    if (const std::optional<int32_t> id = tokenizer.IdOf(known)) chosen.eos.push_back(*id);
  }
  return chosen;
}

absl::StatusOr<std::vector<TokenizedSplit>> Tokenize(FileSystem& files, const Tokenizer& tokenizer,
                                                     const TokenizeOptions& options) {
  return Tokenization(files, tokenizer, options).Run();
}

}  // namespace muster::parallel
