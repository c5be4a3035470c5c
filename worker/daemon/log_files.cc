#include "worker/daemon/log_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace muster::worker {
namespace {

absl::Status Failed(absl::string_view what, const std::string& path, int error) {
  return absl::UnavailableError(
      absl::StrCat("cannot ", what, " ", path, ": ", std::generic_category().message(error)));
}

std::string FilePath(const std::string& directory, int64_t start) {
  return absl::StrCat(directory, "/", absl::StrFormat("%020d", start));
}

constexpr char kTimes[] = ".times";  // a directory of its own, so that what is beside a log is log
// Two marks of a log are at least so far apart.
constexpr absl::Duration kMarkInterval = absl::Milliseconds(100);
constexpr size_t kLogMarksMax = 4096;

std::string TimesPath(const std::string& directory, int64_t start) {
  return FilePath(directory + kTimes, start);
}

// All marks of one file. A record that was cut off by a full disk is left out, and so is what
// follows it.
std::vector<LogTime> TimesOf(const std::string& directory, int64_t start) {
  std::vector<LogTime> times;
  const UniqueFd file(::open(TimesPath(directory, start).c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return times;
  std::string bytes;
  char buffer[64 * 1024];
  for (ssize_t got; (got = ::read(file.get(), buffer, sizeof(buffer))) > 0;) {
    bytes.append(buffer, static_cast<size_t>(got));
  }
  int64_t record[2];
  for (size_t at = 0; at + sizeof(record) <= bytes.size(); at += sizeof(record)) {
    std::memcpy(record, bytes.data() + at, sizeof(record));
    if (!times.empty() && record[0] < times.back().offset) break;
    times.push_back({record[0], absl::FromUnixMillis(record[1])});
  }
  return times;
}

// Start offset -> size.
std::map<int64_t, int64_t> ListFiles(const std::string& directory) {
  std::map<int64_t, int64_t> files;
  std::error_code error;
  for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error)) {
    int64_t start = 0;
    std::error_code gone;
    const auto size = it->file_size(gone);
    if (!gone && absl::SimpleAtoi(it->path().filename().string(), &start)) {
      files[start] = static_cast<int64_t>(size);
    }
  }
  return files;
}

}  // namespace

absl::StatusOr<LogWriter> LogWriter::Open(const std::string& directory, const LogLimits& limits) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return Failed("create", directory, error.value());
  LogWriter writer(directory, limits);
  const std::map<int64_t, int64_t> files = ListFiles(directory);
  if (!files.empty()) {
    writer.start_ = files.rbegin()->first;
    writer.size_ = files.rbegin()->second;
  }
  return writer;
}

absl::Status LogWriter::OpenFile(int64_t start, int64_t size) {
  const std::string path = FilePath(directory_, start);
  file_.Reset(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!file_.valid()) return Failed("open", path, errno);
  ::mkdir((directory_ + kTimes).c_str(), 0755);  // without it no times are known
  times_.Reset(::open(TimesPath(directory_, start).c_str(),
                      O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  marked_ = absl::InfinitePast();  // each file begins with a mark
  start_ = start;
  size_ = size;
  std::map<int64_t, int64_t> files = ListFiles(directory_);
  while (static_cast<int>(files.size()) > std::max(1, limits_.files_max)) {
    ::unlink(FilePath(directory_, files.begin()->first).c_str());
    ::unlink(TimesPath(directory_, files.begin()->first).c_str());
    files.erase(files.begin());
  }
  return absl::OkStatus();
}

void LogWriter::Mark(absl::Time now) {
  // A clock that was set back does not stop the marks.
  if (now >= marked_ && now - marked_ < kMarkInterval) return;
  marked_ = now;
  const int64_t record[2] = {offset(), absl::ToUnixMillis(now)};
  (void)!::write(times_.get(), record, sizeof(record));
}

absl::Status LogWriter::Append(absl::string_view bytes, absl::Time now) {
  while (!bytes.empty()) {
    if (size_ >= limits_.bytes_max) {
      RETURN_IF_ERROR(OpenFile(start_ + size_, 0));
    } else if (!file_.valid()) {
      RETURN_IF_ERROR(OpenFile(start_, size_));
    }
    Mark(now);
    const size_t space = static_cast<size_t>(std::max<int64_t>(1, limits_.bytes_max - size_));
    const ssize_t written = ::write(file_.get(), bytes.data(), std::min(bytes.size(), space));
    if (written < 0) {
      if (errno == EINTR) continue;
      return Failed("write a log file in", directory_, errno);
    }
    size_ += written;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::StatusOr<LogChunk> ReadLog(const std::string& directory, int64_t offset, int64_t length_max) {
  const std::map<int64_t, int64_t> files = ListFiles(directory);
  if (files.empty()) {
    if (::access(directory.c_str(), F_OK) == 0) return LogChunk{.end = true};
    return absl::NotFoundError(absl::StrCat("there is no log in ", directory,
                                            "; logs of earlier attempts are removed in time"));
  }
  const int64_t total = files.rbegin()->first + files.rbegin()->second;
  if (offset < 0) offset = std::max<int64_t>(0, total + offset);
  LogChunk chunk;
  chunk.offset = std::min(std::max(offset, files.begin()->first), total);
  auto file = std::prev(files.upper_bound(chunk.offset));
  for (; file != files.end(); ++file) {
    const int64_t at = chunk.offset + static_cast<int64_t>(chunk.data.size());
    const int64_t wanted = length_max - static_cast<int64_t>(chunk.data.size());
    const int64_t skip = at - file->first;
    const int64_t length = std::min(wanted, file->second - skip);
    if (length <= 0) continue;
    const std::string path = FilePath(directory, file->first);
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd.valid()) break;  // removed meanwhile; the reader asks again
    std::string part(static_cast<size_t>(length), '\0');
    const ssize_t got = ::pread(fd.get(), part.data(), part.size(), skip);
    if (got < 0) return Failed("read", path, errno);
    chunk.data.append(part, 0, static_cast<size_t>(got));
    if (got < length) break;
  }
  chunk.end = chunk.offset + static_cast<int64_t>(chunk.data.size()) >= total;
  return chunk;
}

std::vector<LogTime> ReadLogTimes(const std::string& directory, int64_t begin, int64_t end) {
  const std::map<int64_t, int64_t> files = ListFiles(directory);
  std::vector<LogTime> found;
  if (files.empty()) return found;
  auto file = files.upper_bound(begin);
  if (file != files.begin()) --file;
  for (; file != files.end() && file->first < end; ++file) {
    for (const LogTime& mark : TimesOf(directory, file->first)) {
      if (mark.offset >= end) break;
      if (mark.offset <= begin) found.clear();
      found.push_back(mark);
    }
  }
  if (found.size() <= kLogMarksMax) return found;
  const size_t stride = (found.size() + kLogMarksMax - 1) / kLogMarksMax;
  std::vector<LogTime> some;
  for (size_t i = 0; i < found.size(); i += stride) some.push_back(found[i]);
  return some;
}

int64_t LogOffsetAt(const std::string& directory, absl::Time since) {
  const std::map<int64_t, int64_t> files = ListFiles(directory);
  bool marked = false;
  for (const auto& [start, size] : files) {
    for (const LogTime& mark : TimesOf(directory, start)) {
      marked = true;
      if (mark.time >= since) return mark.offset;
    }
  }
  return files.empty() || !marked ? 0 : files.rbegin()->first + files.rbegin()->second;
}

int64_t LogBytesKept(const std::string& directory) {
  int64_t bytes = 0;
  for (const auto& [start, size] : ListFiles(directory)) bytes += size;
  return bytes;
}

}  // namespace muster::worker
