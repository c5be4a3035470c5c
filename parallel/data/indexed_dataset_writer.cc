#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/indexed_format.h"

namespace muster::parallel {
namespace {

constexpr size_t kBufferBytes = 1 << 20;
// The format counts the tokens of a sequence in 32 bits; longer documents are several sequences.
constexpr int64_t kSequenceTokensMax = int64_t{1} << 30;

// The smallest and the largest id that a type can hold, within int32.
std::pair<int64_t, int64_t> RangeOf(TokenType type) {
  switch (type) {
    case TokenType::kU8:
      return {0, 255};
    case TokenType::kI8:
      return {-128, 127};
    case TokenType::kI16:
      return {-32768, 32767};
    case TokenType::kU16:
      return {0, 65535};
    case TokenType::kI32:
    case TokenType::kI64:
      return {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
  }
  CHECK(false) << "token type " << static_cast<int>(type);
  return {};
}

// Buffers what is written to a file.
class BufferedFile {
 public:
  static absl::StatusOr<BufferedFile> Create(FileSystem& files, const std::string& path) {
    ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, files.Create(path));
    return BufferedFile(std::move(file));
  }
  static absl::StatusOr<BufferedFile> Reopen(FileSystem& files, const std::string& path,
                                             int64_t length) {
    ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, files.Reopen(path, length));
    return BufferedFile(std::move(file));
  }
  // What is to be written next. Callers append to it and then call Spill().
  std::string& buffer() { return buffer_; }
  absl::Status Spill() { return buffer_.size() < kBufferBytes ? absl::OkStatus() : Flush(); }
  absl::Status Sync() {
    RETURN_IF_ERROR(Flush());
    return file_->Sync();
  }
  absl::Status Close() {
    RETURN_IF_ERROR(Sync());
    return file_->Close();
  }

 private:
  explicit BufferedFile(std::unique_ptr<WritableFile> file) : file_(std::move(file)) {}
  absl::Status Flush() {
    RETURN_IF_ERROR(file_->Append(buffer_));
    buffer_.clear();
    return absl::OkStatus();
  }
  std::unique_ptr<WritableFile> file_;
  std::string buffer_;
};

// Lengths of sequences are kept in a temporary file (8 bytes each: tokens, and whether the document
// ends), because the index begins with their number.
class Writer : public IndexedDatasetWriter {
 public:
  Writer(FileSystem& files, std::string prefix, TokenType type, BufferedFile tokens,
         BufferedFile lengths, const Progress& progress)
      : files_(files),
        prefix_(std::move(prefix)),
        type_(type),
        tokens_file_(std::move(tokens)),
        lengths_file_(std::move(lengths)),
        token_count_(progress.tokens),
        document_count_(progress.documents),
        sequence_count_(progress.sequences),
        sequence_tokens_(progress.open_tokens) {}

  ~Writer() override {
    if (finished_ || kept_) return;
    for (const char* suffix : {".bin.tmp", ".idx.tmp", ".lengths.tmp"}) {
      // The file may not exist, and a destructor cannot return another error.
      (void)files_.RemoveFile(prefix_ + suffix);
    }
  }

  absl::StatusOr<Progress> Save() override {
    CHECK(!finished_);
    RETURN_IF_ERROR(tokens_file_.Sync());
    RETURN_IF_ERROR(lengths_file_.Sync());
    return Progress{token_count_, document_count_, sequence_count_, sequence_tokens_};
  }
  void Keep() override { kept_ = true; }

  absl::Status Append(absl::Span<const int32_t> tokens) override {
    CHECK(!finished_);
    const auto [low, high] = RangeOf(type_);
    while (!tokens.empty()) {
      if (sequence_tokens_ == kSequenceTokensMax) RETURN_IF_ERROR(EndSequence(false));
      const auto free = static_cast<size_t>(kSequenceTokensMax - sequence_tokens_);
      const absl::Span<const int32_t> part = tokens.subspan(0, std::min(free, kBufferBytes));
      for (size_t i = 0; i < part.size(); ++i) {
        if (part[i] >= low && part[i] <= high) continue;
        return absl::InvalidArgumentError(
            absl::StrCat(prefix_, ": token ", part[i], " at position ",
                         token_count_ + static_cast<int64_t>(i), " does not fit ", Name(type_)));
      }
      Encode(part);
      sequence_tokens_ += static_cast<int64_t>(part.size());
      token_count_ += static_cast<int64_t>(part.size());
      tokens.remove_prefix(part.size());
      RETURN_IF_ERROR(tokens_file_.Spill());
    }
    return absl::OkStatus();
  }

  absl::Status EndDocument() override {
    CHECK(!finished_);
    // A full sequence ends only when another token comes, so an open document has an open sequence.
    if (sequence_tokens_ == 0) return absl::OkStatus();
    ++document_count_;
    return EndSequence(true);
  }

  absl::Status Finish() override {
    CHECK(!finished_);
    RETURN_IF_ERROR(EndDocument());
    RETURN_IF_ERROR(tokens_file_.Close());
    RETURN_IF_ERROR(lengths_file_.Close());
    RETURN_IF_ERROR(WriteIndex());
    // Removed first: the index of an earlier dataset must never be beside other tokens.
    if (files_.Exists(prefix_ + ".idx")) RETURN_IF_ERROR(files_.RemoveFile(prefix_ + ".idx"));
    RETURN_IF_ERROR(files_.Rename(prefix_ + ".bin.tmp", prefix_ + ".bin"));
    RETURN_IF_ERROR(files_.SyncDirectory(ParentDirectory(prefix_)));
    RETURN_IF_ERROR(files_.Rename(prefix_ + ".idx.tmp", prefix_ + ".idx"));
    RETURN_IF_ERROR(files_.RemoveFile(prefix_ + ".lengths.tmp"));
    finished_ = true;
    return files_.SyncDirectory(ParentDirectory(prefix_));
  }

  int64_t tokens() const override { return token_count_; }
  int64_t documents() const override { return document_count_; }

 private:
  void Encode(absl::Span<const int32_t> tokens) {
    switch (SizeOf(type_)) {
      case 1:
        return EncodeAs<uint8_t>(tokens);
      case 2:
        return EncodeAs<uint16_t>(tokens);
      case 4:
        return EncodeAs<int32_t>(tokens);
      default:
        return EncodeAs<int64_t>(tokens);
    }
  }
  template <typename T>
  void EncodeAs(absl::Span<const int32_t> tokens) {
    std::string& out = tokens_file_.buffer();
    const size_t old = out.size();
    out.resize(old + tokens.size() * sizeof(T));
    char* at = out.data() + old;
    for (int32_t token : tokens) {
      const auto value = static_cast<T>(token);
      std::memcpy(at, &value, sizeof(value));
      at += sizeof(value);
    }
  }

  absl::Status EndSequence(bool ends_document) {
    AppendNumber(lengths_file_.buffer(), static_cast<int32_t>(sequence_tokens_));
    AppendNumber(lengths_file_.buffer(), static_cast<int32_t>(ends_document));
    ++sequence_count_;
    sequence_tokens_ = 0;
    RETURN_IF_ERROR(tokens_file_.Spill());
    return lengths_file_.Spill();
  }

  // Calls visit(tokens of the sequence, whether its document ends) for every sequence, and
  // file.Spill() behind each.
  template <typename Visit>
  absl::Status ForEachSequence(BufferedFile& file, Visit visit) {
    const int64_t bytes = sequence_count_ * 8;
    for (int64_t offset = 0; offset < bytes; offset += kBufferBytes) {
      ASSIGN_OR_RETURN(const std::string block,
                       files_.ReadRange(prefix_ + ".lengths.tmp", offset,
                                        std::min<int64_t>(kBufferBytes, bytes - offset)));
      for (size_t at = 0; at < block.size(); at += 8) {
        visit(NumberAt<int32_t>(&block[at]), NumberAt<int32_t>(&block[at + 4]) != 0);
        RETURN_IF_ERROR(file.Spill());
      }
    }
    return absl::OkStatus();
  }

  absl::Status WriteIndex() {
    ASSIGN_OR_RETURN(BufferedFile file, BufferedFile::Create(files_, prefix_ + ".idx.tmp"));
    std::string& out = file.buffer();
    out.append(kIndexMagic, sizeof(kIndexMagic));
    AppendNumber(out, kIndexVersion);
    AppendNumber(out, static_cast<uint8_t>(type_));
    AppendNumber(out, static_cast<uint64_t>(sequence_count_));
    AppendNumber(out, static_cast<uint64_t>(document_count_ + 1));
    RETURN_IF_ERROR(
        ForEachSequence(file, [&](int32_t tokens, bool) { AppendNumber(out, tokens); }));
    int64_t pointer = 0;
    RETURN_IF_ERROR(ForEachSequence(file, [&](int32_t tokens, bool) {
      AppendNumber(out, pointer);
      pointer += int64_t{tokens} * SizeOf(type_);
    }));
    AppendNumber(out, int64_t{0});
    int64_t sequence = 0;
    RETURN_IF_ERROR(ForEachSequence(file, [&](int32_t, bool ends_document) {
      ++sequence;
      if (ends_document) AppendNumber(out, sequence);
    }));
    return file.Close();
  }

  FileSystem& files_;
  const std::string prefix_;
  const TokenType type_;
  BufferedFile tokens_file_;
  BufferedFile lengths_file_;
  int64_t token_count_ = 0;
  int64_t document_count_ = 0;
  int64_t sequence_count_ = 0;
  int64_t sequence_tokens_ = 0;  // in the open sequence
  bool finished_ = false;
  bool kept_ = false;
};

}  // namespace

int SizeOf(TokenType type) {
  switch (type) {
    case TokenType::kU8:
    case TokenType::kI8:
      return 1;
    case TokenType::kI16:
    case TokenType::kU16:
      return 2;
    case TokenType::kI32:
      return 4;
    case TokenType::kI64:
      return 8;
  }
  CHECK(false) << "token type " << static_cast<int>(type);
  return 0;
}

absl::string_view Name(TokenType type) {
  switch (type) {
    case TokenType::kU8:
      return "u8";
    case TokenType::kI8:
      return "i8";
    case TokenType::kI16:
      return "i16";
    case TokenType::kI32:
      return "i32";
    case TokenType::kI64:
      return "i64";
    case TokenType::kU16:
      return "u16";
  }
  CHECK(false) << "token type " << static_cast<int>(type);
  return "";
}

TokenType TokenTypeFor(int64_t vocab) {
  CHECK(vocab >= 1 && vocab <= int64_t{1} << 31) << "vocabulary of " << vocab;
  if (vocab <= 256) return TokenType::kU8;
  if (vocab <= 65536) return TokenType::kU16;
  return TokenType::kI32;
}

absl::StatusOr<std::unique_ptr<IndexedDatasetWriter>> IndexedDatasetWriter::Create(
    FileSystem& files, const std::string& prefix, TokenType type) {
  if (prefix.empty() || prefix.back() == '/') {
    return absl::InvalidArgumentError(
        absl::StrCat("'", prefix, "' is no prefix for a dataset, try DIRECTORY/NAME"));
  }
  RETURN_IF_ERROR(files.MakeDirectory(ParentDirectory(prefix)));
  ASSIGN_OR_RETURN(BufferedFile tokens, BufferedFile::Create(files, prefix + ".bin.tmp"));
  ASSIGN_OR_RETURN(BufferedFile lengths, BufferedFile::Create(files, prefix + ".lengths.tmp"));
  return std::make_unique<Writer>(files, prefix, type, std::move(tokens), std::move(lengths),
                                  IndexedDatasetWriter::Progress());
}

absl::StatusOr<std::unique_ptr<IndexedDatasetWriter>> IndexedDatasetWriter::Resume(
    FileSystem& files, const std::string& prefix, TokenType type, const Progress& progress) {
  ASSIGN_OR_RETURN(BufferedFile tokens, BufferedFile::Reopen(files, prefix + ".bin.tmp",
                                                             progress.tokens * SizeOf(type)));
  ASSIGN_OR_RETURN(BufferedFile lengths,
                   BufferedFile::Reopen(files, prefix + ".lengths.tmp", progress.sequences * 8));
  return std::make_unique<Writer>(files, prefix, type, std::move(tokens), std::move(lengths),
                                  progress);
}

}  // namespace muster::parallel
