#include "parallel/data/text_input.h"

#include <fcntl.h>
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"

namespace muster::parallel {
namespace {

constexpr size_t kBlockBytes = 1 << 18;

absl::Status Failed(absl::string_view what, const std::string& path, int error) {
  const std::string message =
      absl::StrCat("cannot ", what, " ", path, ": ", std::generic_category().message(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(message);
  if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(message);
  return absl::UnavailableError(message);
}

bool HoldsJsonLines(absl::string_view name) {
  for (absl::string_view suffix : {".gz", ".zst", ".zstd"}) {
    if (absl::ConsumeSuffix(&name, suffix)) break;
  }
  return absl::EndsWith(name, ".jsonl") || absl::EndsWith(name, ".ndjson");
}

absl::StatusOr<TextInput> Describe(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return Failed("read", path, errno);
  TextInput input;
  input.path = path;
  input.json_lines = HoldsJsonLines(path);
  if (S_ISREG(info.st_mode)) {
    input.bytes = static_cast<int64_t>(info.st_size);
    input.modified_ns = int64_t{info.st_mtim.tv_sec} * 1000000000 + info.st_mtim.tv_nsec;
  }
  return input;
}

// Paths of the files below a directory, sorted.
absl::StatusOr<std::vector<std::string>> FilesBelow(const std::string& directory) {
  namespace fs = std::filesystem;
  std::vector<std::string> paths;
  std::error_code error;
  fs::recursive_directory_iterator at(directory, error), end;
  for (; !error && at != end; at.increment(error)) {
    const bool hidden = absl::StartsWith(at->path().filename().string(), ".");
    std::error_code kind;
    if (at->is_directory(kind)) {
      if (hidden) at.disable_recursion_pending();
    } else if (!hidden && at->is_regular_file(kind)) {
      paths.push_back(at->path().string());
    }
  }
  if (error) return Failed("list", directory, error.value());
  if (paths.empty()) {
    return absl::NotFoundError(absl::StrCat("there is no file in the directory ", directory));
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

absl::StatusOr<std::vector<std::string>> Expand(const std::string& pattern) {
  struct stat info;
  if (::stat(pattern.c_str(), &info) == 0) {
    if (S_ISDIR(info.st_mode)) return FilesBelow(pattern);
    return std::vector<std::string>{pattern};
  }
  if (pattern.find_first_of("*?[") == std::string::npos) return Failed("read", pattern, errno);
  glob_t found = {};
  const int result = ::glob(pattern.c_str(), 0, nullptr, &found);
  std::vector<std::string> paths;
  if (result == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  paths.erase(
      std::remove_if(paths.begin(), paths.end(),
                     [](const std::string& path) { return std::filesystem::is_directory(path); }),
      paths.end());
  if (paths.empty()) return absl::NotFoundError(absl::StrCat("no file matches ", pattern));
  std::sort(paths.begin(), paths.end());
  return paths;
}

// The bytes of a file as they are.
class RawStream : public TextStream {
 public:
  RawStream(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  RawStream(const RawStream&) = delete;
  RawStream& operator=(const RawStream&) = delete;
  ~RawStream() override {
    if (fd_ != STDIN_FILENO) ::close(fd_);
  }

  absl::StatusOr<bool> Fill(size_t bytes, std::string& out) override {
    while (out.size() < bytes) {
      if (!waiting_.empty()) {
        out += waiting_;
        waiting_.clear();
        continue;
      }
      const size_t old = out.size();
      const size_t most = std::max(bytes - old, kBlockBytes);
      out.resize(old + most);
      const ssize_t got = ::read(fd_, out.data() + old, most);
      const int error = errno;
      out.resize(old + static_cast<size_t>(std::max<ssize_t>(got, 0)));
      if (got < 0 && error == EINTR) continue;
      if (got < 0) return Failed("read", path_, error);
      if (got == 0) return false;
      read_ += got;
    }
    return true;
  }
  absl::Status Skip(int64_t bytes) override {
    waiting_.clear();
    struct stat info;
    if (::fstat(fd_, &info) == 0 && S_ISREG(info.st_mode) && info.st_size < bytes) {
      return absl::DataLossError(absl::StrCat(path_, " has ", info.st_size, " bytes, not ", bytes));
    }
    if (::lseek(fd_, bytes, SEEK_SET) != bytes) return Failed("seek in", path_, errno);
    read_ = bytes;
    return absl::OkStatus();
  }
  int64_t bytes_read() const override { return read_; }
  const std::string& path() const { return path_; }
  // The first bytes, which Fill gives again.
  absl::StatusOr<std::string> Peek(size_t bytes) {
    RETURN_IF_ERROR(Fill(bytes, waiting_).status());
    return waiting_.substr(0, bytes);
  }

 private:
  const std::string path_;
  const int fd_;
  std::string waiting_;
  int64_t read_ = 0;
};

// What gzip and zstd have in common: a step takes compressed bytes and gives text.
class Decompressor : public TextStream {
 public:
  explicit Decompressor(std::unique_ptr<RawStream> file) : file_(std::move(file)) {}

  absl::StatusOr<bool> Fill(size_t bytes, std::string& out) override {
    while (out.size() < bytes) {
      if (!rest_.empty()) {
        out += rest_;
        rest_.clear();
        continue;
      }
      if (at_ == block_.size() && !holds_more_) {
        block_.clear();
        at_ = 0;
        RETURN_IF_ERROR(file_->Fill(kBlockBytes, block_).status());
        if (block_.empty()) {
          if (!between_streams_) {
            return Broken("ends in the middle of its compressed data", file_->bytes_read());
          }
          return false;
        }
      }
      const size_t old = out.size();
      out.resize(old + kBlockBytes);
      size_t produced = 0;
      const absl::Status status = Step(out.data() + old, kBlockBytes, &produced);
      out.resize(old + produced);
      RETURN_IF_ERROR(status);
      holds_more_ = produced == kBlockBytes;
    }
    return true;
  }
  absl::Status Skip(int64_t bytes) override {
    std::string text;
    for (int64_t left = bytes; left > 0;) {
      text.clear();
      ASSIGN_OR_RETURN(const bool more, Fill(kBlockBytes, text));
      const auto got = static_cast<int64_t>(text.size());
      if (got > left) rest_ = text.substr(static_cast<size_t>(left));
      left -= got;
      if (!more && left > 0) {
        return absl::DataLossError(
            absl::StrCat(file_->path(), " has ", bytes - left, " bytes of text, not ", bytes));
      }
    }
    return absl::OkStatus();
  }
  int64_t bytes_read() const override { return file_->bytes_read(); }

 protected:
  // Consumes from Waiting(), which is empty where the step before filled its output, and writes up
  // to `size` bytes.
  virtual absl::Status Step(char* out, size_t size, size_t* produced) = 0;
  absl::string_view Waiting() const { return absl::string_view(block_).substr(at_); }
  void Consume(size_t bytes) { at_ += bytes; }
  absl::Status Broken(absl::string_view what, int64_t at) const {
    return absl::DataLossError(absl::StrCat(file_->path(), " ", what, ", at byte ", at));
  }
  absl::Status BrokenHere(absl::string_view what) const {
    return Broken(what, file_->bytes_read() - static_cast<int64_t>(Waiting().size()));
  }
  bool between_streams_ = true;

 private:
  std::unique_ptr<RawStream> file_;
  std::string block_;
  size_t at_ = 0;
  bool holds_more_ = false;  // the last step filled its output
  std::string rest_;         // text behind a Skip
};

class GzipStream : public Decompressor {
 public:
  explicit GzipStream(std::unique_ptr<RawStream> file) : Decompressor(std::move(file)) {
    started_ = ::inflateInit2(&state_, /*gzip*/ 15 + 16) == Z_OK;
  }
  ~GzipStream() override {
    if (started_) ::inflateEnd(&state_);
  }

 protected:
  absl::Status Step(char* out, size_t size, size_t* produced) override {
    if (!started_) return absl::ResourceExhaustedError("zlib cannot start");
    const absl::string_view waiting = Waiting();
    if (waiting.empty() && between_streams_) return absl::OkStatus();
    // Zero bytes behind the last stream pad some files.
    if (between_streams_ && padding_possible_ && waiting[0] == '\0') {
      Consume(1);
      return absl::OkStatus();
    }
    state_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(waiting.data()));
    state_.avail_in = static_cast<uInt>(waiting.size());
    state_.next_out = reinterpret_cast<Bytef*>(out);
    state_.avail_out = static_cast<uInt>(size);
    const int result = ::inflate(&state_, Z_NO_FLUSH);
    *produced = size - state_.avail_out;
    Consume(waiting.size() - state_.avail_in);
    between_streams_ = false;
    if (result == Z_STREAM_END) {
      between_streams_ = padding_possible_ = true;
      ::inflateReset(&state_);
      return absl::OkStatus();
    }
    if (result == Z_OK || result == Z_BUF_ERROR) return absl::OkStatus();
    return BrokenHere(absl::StrCat("is no sound gzip file (",
                                   state_.msg == nullptr ? "damaged" : state_.msg, ")"));
  }

 private:
  z_stream state_ = {};
  bool started_ = false;
  bool padding_possible_ = false;
};

class ZstdStream : public Decompressor {
 public:
  explicit ZstdStream(std::unique_ptr<RawStream> file) : Decompressor(std::move(file)) {}

 protected:
  absl::Status Step(char* out, size_t size, size_t* produced) override {
    if (state_ == nullptr) return absl::ResourceExhaustedError("zstd cannot start");
    const absl::string_view waiting = Waiting();
    if (waiting.empty() && between_streams_) return absl::OkStatus();
    ZSTD_inBuffer from = {waiting.data(), waiting.size(), 0};
    ZSTD_outBuffer to = {out, size, 0};
    const size_t result = ZSTD_decompressStream(state_.get(), &to, &from);
    *produced = to.pos;
    Consume(from.pos);
    if (ZSTD_isError(result) != 0) {
      return BrokenHere(absl::StrCat("is no sound zstd file (", ZSTD_getErrorName(result), ")"));
    }
    between_streams_ = result == 0;
    return absl::OkStatus();
  }

 private:
  struct Free {
    void operator()(ZSTD_DStream* state) const { ZSTD_freeDStream(state); }
  };
  std::unique_ptr<ZSTD_DStream, Free> state_{ZSTD_createDStream()};
};

}  // namespace

absl::StatusOr<std::vector<TextInput>> ListTextInputs(const std::vector<std::string>& patterns) {
  std::vector<TextInput> inputs;
  bool standard = false;
  for (const std::string& pattern : patterns) {
    if (pattern == "-") {
      if (standard) return absl::InvalidArgumentError("standard input can be read only once");
      standard = true;
      inputs.push_back({"-"});
      continue;
    }
    ASSIGN_OR_RETURN(const std::vector<std::string> paths, Expand(pattern));
    for (const std::string& path : paths) {
      ASSIGN_OR_RETURN(TextInput input, Describe(path));
      inputs.push_back(std::move(input));
    }
  }
  return inputs;
}

absl::StatusOr<std::unique_ptr<TextStream>> TextStream::Open(const std::string& path) {
  const int fd = path == "-" ? STDIN_FILENO : ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Failed("read", path, errno);
  auto file = std::make_unique<RawStream>(path == "-" ? "standard input" : path, fd);
  ASSIGN_OR_RETURN(const std::string first, file->Peek(4));
  if (absl::StartsWith(first, "\x1f\x8b")) return std::make_unique<GzipStream>(std::move(file));
  if (first == "\x28\xb5\x2f\xfd") return std::make_unique<ZstdStream>(std::move(file));
  return file;
}

}  // namespace muster::parallel
