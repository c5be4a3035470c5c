#include "parallel/data/tokenizer.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace muster::parallel {
namespace {

constexpr int64_t kReadBytes = 1 << 20;
// A line longer than this is passed to the tokenizer in several slices.
constexpr size_t kLineBytesMax = 1 << 20;

class ByteTokenizer : public Tokenizer {
 public:
  absl::string_view name() const override { return "bytes"; }
  int64_t vocab() const override { return 256; }
  void Encode(absl::string_view text, std::vector<int32_t>& out) const override {
    out.reserve(out.size() + text.size());
    for (char byte : text) out.push_back(static_cast<unsigned char>(byte));
  }
  std::unique_ptr<Encoder> NewEncoder() const override {
    class Bytes : public Encoder {
     public:
      explicit Bytes(const ByteTokenizer& tokenizer) : tokenizer_(tokenizer) {}
      void Encode(absl::string_view text, bool, std::vector<int32_t>& out) override {
        tokenizer_.Encode(text, out);
      }

     private:
      const ByteTokenizer& tokenizer_;
    };
    return std::make_unique<Bytes>(*this);
  }
  size_t LastCut(absl::string_view text) const override {
    return text.empty() ? 0 : text.size() - 1;
  }
  std::optional<int32_t> IdOf(absl::string_view token) const override {
    if (token.size() != 1) return std::nullopt;
    return static_cast<unsigned char>(token[0]);
  }
  const BoundaryTokens& boundaries() const override { return none_; }
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t> tokens) const override {
    std::string text;
    text.reserve(tokens.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] < 0 || tokens[i] > 255) {
        return absl::InvalidArgumentError(
            absl::StrCat("token ", tokens[i], " at position ", i, " is not a byte"));
      }
      text.push_back(static_cast<char>(tokens[i]));
    }
    return text;
  }

 private:
  const BoundaryTokens none_;
};

// The state of one Tokenize() call. Input comes line by line; documents go to the current split.
class Tokenization {
 public:
  Tokenization(FileSystem& files, const Tokenizer& tokenizer, const TokenizeOptions& options)
      : files_(files), tokenizer_(tokenizer), options_(options) {}

  absl::StatusOr<std::vector<TokenizedSplit>> Run() {
    RETURN_IF_ERROR(Plan());
    for (const std::string& input : options_.inputs) {
      RETURN_IF_ERROR(ReadFile(input));
      // The end of a file ends a document, whatever the boundary.
      RETURN_IF_ERROR(EndDocument());
      RETURN_IF_ERROR(MaybeNextSplit());
    }
    RETURN_IF_ERROR(FinishSplit());
    if (done_.size() != options_.splits.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the input is used up before split '", options_.splits[done_.size()].name,
          "' begins: it has too few documents or lines for ", options_.splits.size(), " splits"));
    }
    return std::move(done_);
  }

 private:
  absl::Status Plan();
  absl::Status ReadFile(const std::string& input);
  // `line` includes its line end, except at the end of a file and in slices of overlong lines.
  absl::Status TakeLine(absl::string_view line);
  absl::Status EndDocument();
  absl::Status MaybeNextSplit();
  absl::Status FinishSplit();

  FileSystem& files_;
  const Tokenizer& tokenizer_;
  const TokenizeOptions& options_;
  int64_t bytes_ = 0;          // of all inputs
  int64_t bytes_read_ = 0;     // so far
  std::vector<int64_t> ends_;  // by split, the input position at or behind which it ends
  std::unique_ptr<IndexedDatasetWriter> writer_;
  std::vector<TokenizedSplit> done_;
  std::vector<int32_t> tokens_;
  bool blank_seen_ = false;  // kBlankLine: the next line that is not empty begins a document
};

absl::Status Tokenization::Plan() {
  if (options_.inputs.empty()) return absl::InvalidArgumentError("no input files");
  if (options_.output.empty()) return absl::InvalidArgumentError("no output prefix");
  if (options_.splits.empty()) return absl::InvalidArgumentError("no splits");
  double total = 0;
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
    total += split.fraction;
  }
  for (const std::string& input : options_.inputs) {
    ASSIGN_OR_RETURN(const int64_t size, files_.Size(input));
    bytes_ += size;
  }
  if (bytes_ == 0) return absl::InvalidArgumentError("the input files are empty");
  double before = 0;
  for (const Split& split : options_.splits) {
    before += split.fraction;
    ends_.push_back(
        static_cast<int64_t>(std::llround(before / total * static_cast<double>(bytes_))));
  }
  ends_.back() = bytes_;
  return absl::OkStatus();
}

absl::Status Tokenization::ReadFile(const std::string& input) {
  ASSIGN_OR_RETURN(const int64_t size, files_.Size(input));
  std::string pending;  // the beginning of a line whose end is not read yet
  for (int64_t offset = 0; offset < size; offset += kReadBytes) {
    ASSIGN_OR_RETURN(const std::string block,
                     files_.ReadRange(input, offset, std::min(kReadBytes, size - offset)));
    absl::string_view rest = block;
    for (size_t end; (end = rest.find('\n')) != absl::string_view::npos;) {
      pending.append(rest.data(), end + 1);
      rest.remove_prefix(end + 1);
      RETURN_IF_ERROR(TakeLine(pending));
      pending.clear();
    }
    pending.append(rest.data(), rest.size());
    if (pending.size() >= kLineBytesMax) {
      RETURN_IF_ERROR(TakeLine(pending));
      pending.clear();
    }
    if (options_.progress) options_.progress(bytes_read_, bytes_);
  }
  return pending.empty() ? absl::OkStatus() : TakeLine(pending);
}

absl::Status Tokenization::TakeLine(absl::string_view line) {
  const bool blank = line == "\n" || line == "\r\n";
  if (options_.boundary == DocumentBoundary::kBlankLine && blank_seen_ && !blank) {
    RETURN_IF_ERROR(EndDocument());
    RETURN_IF_ERROR(MaybeNextSplit());
  }
  blank_seen_ = blank;
  if (writer_ == nullptr) {
    const Split& split = options_.splits[done_.size()];
    const std::string prefix =
        split.name.empty() ? options_.output : absl::StrCat(options_.output, ".", split.name);
    ASSIGN_OR_RETURN(
        writer_, IndexedDatasetWriter::Create(files_, prefix, TokenTypeFor(tokenizer_.vocab())));
    done_.push_back({prefix, 0, 0});
  }
  tokens_.clear();
  tokenizer_.Encode(line, tokens_);
  RETURN_IF_ERROR(writer_->Append(tokens_));
  bytes_read_ += static_cast<int64_t>(line.size());
  if (line.back() != '\n') return absl::OkStatus();
  if (options_.boundary == DocumentBoundary::kLine) RETURN_IF_ERROR(EndDocument());
  return options_.boundary == DocumentBoundary::kBlankLine ? absl::OkStatus() : MaybeNextSplit();
}

absl::Status Tokenization::EndDocument() {
  blank_seen_ = false;
  return writer_ == nullptr ? absl::OkStatus() : writer_->EndDocument();
}

// The last split ends at the end of the input, whatever the rounding.
absl::Status Tokenization::MaybeNextSplit() {
  if (writer_ == nullptr || done_.size() == options_.splits.size()) return absl::OkStatus();
  return bytes_read_ >= ends_[done_.size() - 1] ? FinishSplit() : absl::OkStatus();
}

absl::Status Tokenization::FinishSplit() {
  if (writer_ == nullptr) return absl::OkStatus();
  RETURN_IF_ERROR(writer_->Finish());
  done_.back().documents = writer_->documents();
  done_.back().tokens = writer_->tokens();
  writer_ = nullptr;
  return absl::OkStatus();
}

}  // namespace

std::unique_ptr<Tokenizer> MakeByteTokenizer() { return std::make_unique<ByteTokenizer>(); }

absl::StatusOr<std::unique_ptr<Tokenizer>> MakeTokenizer(absl::string_view name) {
  if (name == "bytes") return MakeByteTokenizer();
  return absl::InvalidArgumentError(
      absl::StrCat("no tokenizer is called '", name, "'; there is: bytes"));
}

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

absl::StatusOr<std::vector<TokenizedSplit>> Tokenize(FileSystem& files, const Tokenizer& tokenizer,
                                                     const TokenizeOptions& options) {
  return Tokenization(files, tokenizer, options).Run();
}

}  // namespace muster::parallel
