#include "parallel/data/indexed_dataset.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/data/indexed_format.h"

namespace muster::parallel {
namespace {

// Maps a file into memory, read-only. An empty file has no mapping.
class MappedFile {
 public:
  static absl::StatusOr<MappedFile> Open(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return Failed("open", path);
    struct stat info;
    absl::StatusOr<MappedFile> result = MappedFile();
    if (::fstat(fd, &info) != 0) {
      result = Failed("stat", path);
    } else if (!S_ISREG(info.st_mode)) {
      result = absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
    } else if (info.st_size > 0) {
      void* data = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ, MAP_SHARED, fd, 0);
      if (data == MAP_FAILED) {
        result = Failed("map", path);
      } else {
        result->data_ = static_cast<const char*>(data);
        result->bytes_ = static_cast<int64_t>(info.st_size);
      }
    }
    ::close(fd);
    return result;
  }
  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~MappedFile() {
    if (data_ != nullptr) ::munmap(const_cast<char*>(data_), static_cast<size_t>(bytes_));
  }
  const char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  static absl::Status Failed(absl::string_view what, const std::string& path) {
    const int error = errno;
    const std::string message =
        absl::StrCat("cannot ", what, " ", path, ": ", std::generic_category().message(error));
    if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(message);
    if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(message);
    return absl::UnavailableError(message);
  }
  const char* data_ = nullptr;
  int64_t bytes_ = 0;
};

class Dataset : public IndexedDataset {
 public:
  Dataset(std::string prefix, MappedFile tokens, MappedFile index)
      : prefix_(std::move(prefix)), bin_(std::move(tokens)), idx_(std::move(index)) {}

  // Fills in the fields below from idx_, which may hold anything.
  absl::Status ReadIndex();

  const std::string& prefix() const override { return prefix_; }
  TokenType type() const override { return type_; }
  int64_t tokens() const override { return bin_.bytes() / SizeOf(type_); }
  int64_t sequences() const override { return sequences_; }
  int64_t documents() const override { return bounds_ - 1; }
  int64_t DocumentBegin(int64_t i) const override {
    CHECK(i >= 0 && i <= documents()) << "document " << i << " of " << documents();
    const int64_t sequence = NumberAt<int64_t>(bound_data_ + 8 * i);
    if (sequence == sequences_) return tokens();
    return NumberAt<int64_t>(pointer_data_ + 8 * sequence) / SizeOf(type_);
  }
  absl::Status Read(int64_t begin, int64_t vocab, absl::Span<int32_t> out) const override;

 private:
  template <typename... Args>
  absl::Status Damaged(const Args&... args) const {
    return absl::DataLossError(absl::StrCat(prefix_, ".idx: ", args...));
  }
  absl::Status ReadHeader();
  absl::Status CheckSequences() const;
  absl::Status CheckDocuments() const;
  template <typename T>
  absl::Status ReadAs(int64_t begin, int64_t vocab, absl::Span<int32_t> out) const;

  const std::string prefix_;
  const MappedFile bin_;
  const MappedFile idx_;
  TokenType type_ = TokenType::kU8;
  int64_t sequences_ = 0;
  int64_t bounds_ = 0;
  const char* length_data_ = nullptr;
  const char* pointer_data_ = nullptr;
  const char* bound_data_ = nullptr;
};

absl::Status Dataset::ReadHeader() {
  if (idx_.bytes() < kIndexHeaderBytes) {
    return Damaged("is ", idx_.bytes(), " bytes long, the header alone takes ", kIndexHeaderBytes);
  }
  const char* at = idx_.data();
  if (std::memcmp(at, kIndexMagic, sizeof(kIndexMagic)) != 0) {
    return Damaged("begins with '", absl::CHexEscape(absl::string_view(at, sizeof(kIndexMagic))),
                   "', not with the magic of an indexed dataset");
  }
  const uint64_t version = NumberAt<uint64_t>(at + 9);
  if (version != kIndexVersion) {
    return Damaged("version is ", version, ", only ", kIndexVersion, " is known");
  }
  const uint8_t code = NumberAt<uint8_t>(at + 17);
  if (code == 6 || code == 7) return Damaged("dtype code is ", code, ", which is not a token id");
  if (code < 1 || code > 8) return Damaged("dtype code is ", code, ", must be 1 to 5 or 8");
  type_ = static_cast<TokenType>(code);
  const uint64_t sequences = NumberAt<uint64_t>(at + 18);
  const uint64_t bounds = NumberAt<uint64_t>(at + 26);
  // Counts that do not fit the file are refused before they are multiplied, which could overflow.
  const uint64_t most = static_cast<uint64_t>(idx_.bytes()) / 8;
  if (sequences > most || bounds > most) {
    return Damaged("claims ", sequences, " sequences and ", bounds,
                   " document bounds, but is only ", idx_.bytes(), " bytes long");
  }
  sequences_ = static_cast<int64_t>(sequences);
  bounds_ = static_cast<int64_t>(bounds);
  const int64_t expected = kIndexHeaderBytes + 12 * sequences_ + 8 * bounds_;
  if (idx_.bytes() != expected && idx_.bytes() != expected + sequences_) {
    return Damaged("is ", idx_.bytes(), " bytes long, ", sequences_, " sequences and ", bounds_,
                   " document bounds take ", expected, " (or ", expected + sequences_,
                   " with modes)");
  }
  length_data_ = at + kIndexHeaderBytes;
  pointer_data_ = length_data_ + 4 * sequences_;
  bound_data_ = pointer_data_ + 8 * sequences_;
  return absl::OkStatus();
}

absl::Status Dataset::CheckSequences() const {
  int64_t expected = 0;
  for (int64_t i = 0; i < sequences_; ++i) {
    const int32_t length = NumberAt<int32_t>(length_data_ + 4 * i);
    const int64_t pointer = NumberAt<int64_t>(pointer_data_ + 8 * i);
    if (length < 0) return Damaged("length of sequence ", i, " is ", length);
    if (pointer != expected) {
      return Damaged("pointer of sequence ", i, " is ", pointer,
                     ", the lengths before it put it at ", expected);
    }
    expected += int64_t{length} * SizeOf(type_);
    if (expected > bin_.bytes()) {
      return Damaged("sequence ", i, " ends at byte ", expected, " of ", prefix_,
                     ".bin, which has ", bin_.bytes());
    }
  }
  if (expected != bin_.bytes()) {
    return absl::DataLossError(absl::StrCat(prefix_, ".bin: is ", bin_.bytes(),
                                            " bytes long, the lengths in ", prefix_,
                                            ".idx add up to ", expected));
  }
  return absl::OkStatus();
}

absl::Status Dataset::CheckDocuments() const {
  if (bounds_ < 1) return Damaged("has no document bounds, not even the first");
  int64_t previous = 0;
  for (int64_t i = 0; i < bounds_; ++i) {
    const int64_t bound = NumberAt<int64_t>(bound_data_ + 8 * i);
    if (i == 0 && bound != 0) return Damaged("document bound 0 is ", bound, ", must be 0");
    if (bound < previous || bound > sequences_) {
      return Damaged("document bound ", i, " is ", bound, ", must be between ", previous, " and ",
                     sequences_);
    }
    previous = bound;
  }
  if (previous != sequences_) {
    return Damaged("the last document bound is ", previous, ", there are ", sequences_,
                   " sequences");
  }
  return absl::OkStatus();
}

absl::Status Dataset::ReadIndex() {
  RETURN_IF_ERROR(ReadHeader());
  RETURN_IF_ERROR(CheckSequences());
  return CheckDocuments();
}

template <typename T>
absl::Status Dataset::ReadAs(int64_t begin, int64_t vocab, absl::Span<int32_t> out) const {
  const char* at = bin_.data() + begin * static_cast<int64_t>(sizeof(T));
  const int64_t limit = std::min<int64_t>(vocab, int64_t{1} << 31);
  for (size_t i = 0; i < out.size(); ++i, at += sizeof(T)) {
    const int64_t id = NumberAt<T>(at);
    if (id < 0 || id >= limit) {
      return absl::DataLossError(absl::StrCat(prefix_, ".bin: token ",
                                              begin + static_cast<int64_t>(i), " has id ", id,
                                              ", outside the vocabulary of ", vocab));
    }
    out[i] = static_cast<int32_t>(id);
  }
  return absl::OkStatus();
}

absl::Status Dataset::Read(int64_t begin, int64_t vocab, absl::Span<int32_t> out) const {
  const int64_t count = static_cast<int64_t>(out.size());
  CHECK(begin >= 0 && count <= tokens() && begin <= tokens() - count)
      << "tokens [" << begin << ", " << begin + count << ") of " << tokens();
  switch (type_) {
    case TokenType::kU8:
      return ReadAs<uint8_t>(begin, vocab, out);
    case TokenType::kI8:
      return ReadAs<int8_t>(begin, vocab, out);
    case TokenType::kI16:
      return ReadAs<int16_t>(begin, vocab, out);
    case TokenType::kU16:
      return ReadAs<uint16_t>(begin, vocab, out);
    case TokenType::kI32:
      return ReadAs<int32_t>(begin, vocab, out);
    case TokenType::kI64:
      return ReadAs<int64_t>(begin, vocab, out);
  }
  CHECK(false) << "token type " << static_cast<int>(type_);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<IndexedDataset>> IndexedDataset::Open(const std::string& prefix) {
  if (prefix.empty()) return absl::InvalidArgumentError("the prefix of a dataset is empty");
  ASSIGN_OR_RETURN(MappedFile index, MappedFile::Open(prefix + ".idx"));
  ASSIGN_OR_RETURN(MappedFile tokens, MappedFile::Open(prefix + ".bin"));
  auto dataset = std::make_unique<Dataset>(prefix, std::move(tokens), std::move(index));
  RETURN_IF_ERROR(dataset->ReadIndex());
  return dataset;
}

}  // namespace muster::parallel
