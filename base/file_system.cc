#include "base/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_macros.h"

namespace muster {
namespace {

absl::Status Failed(absl::string_view what, const std::string& path, int error) {
  const std::string message =
      absl::StrCat("cannot ", what, " ", path, ": ", std::generic_category().message(error));
  switch (error) {
    case ENOENT:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    default:
      return absl::UnavailableError(message);
  }
}

absl::Status Shorter(const std::string& path, int64_t size, int64_t length) {
  return absl::DataLossError(absl::StrCat(path, " has ", size, " bytes, expected ", length));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { Close(); }
  int get() const { return fd_; }
  int Close() {
    const int result = fd_ >= 0 ? ::close(fd_) : 0;
    fd_ = -1;
    return result;
  }

 private:
  int fd_;
};

class PosixWritableFile : public WritableFile {
 public:
  PosixWritableFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  absl::Status Append(absl::string_view bytes) override {
    while (!bytes.empty()) {
      const ssize_t written = ::write(fd_.get(), bytes.data(), bytes.size());
      if (written < 0) {
        if (errno == EINTR) continue;
        return Failed("write", path_, errno);
      }
      bytes.remove_prefix(static_cast<size_t>(written));
    }
    return absl::OkStatus();
  }
  absl::Status Sync() override {
    return ::fdatasync(fd_.get()) == 0 ? absl::OkStatus() : Failed("sync", path_, errno);
  }
  absl::Status Close() override {
    return fd_.Close() == 0 ? absl::OkStatus() : Failed("close", path_, errno);
  }

 private:
  std::string path_;
  Descriptor fd_;
};

class Posix : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) return Failed("create", path, errno);
    return std::make_unique<PosixWritableFile>(path, fd);
  }
  absl::StatusOr<std::unique_ptr<WritableFile>> Reopen(const std::string& path,
                                                       int64_t length) override {
    ASSIGN_OR_RETURN(const int64_t size, Size(path));
    if (size < length) return Shorter(path, size, length);
    const int fd = ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
    if (fd < 0) return Failed("open", path, errno);
    auto file = std::make_unique<PosixWritableFile>(path, fd);
    if (::ftruncate(fd, length) != 0) return Failed("cut", path, errno);
    return file;
  }
  absl::StatusOr<std::string> Read(const std::string& path) override {
    ASSIGN_OR_RETURN(const int64_t size, Size(path));
    return ReadRange(path, 0, size);
  }
  absl::StatusOr<std::string> ReadRange(const std::string& path, int64_t offset,
                                        int64_t length) override {
    Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (fd.get() < 0) return Failed("open", path, errno);
    std::string out(static_cast<size_t>(length), '\0');
    size_t done = 0;
    while (done < out.size()) {
      const ssize_t got = ::pread(fd.get(), out.data() + done, out.size() - done,
                                  static_cast<off_t>(offset + static_cast<int64_t>(done)));
      if (got < 0) {
        if (errno == EINTR) continue;
        return Failed("read", path, errno);
      }
      if (got == 0) {
        return absl::DataLossError(absl::StrCat(path, " ends at byte ", offset + done,
                                                ", expected ", length, " bytes from ", offset));
      }
      done += static_cast<size_t>(got);
    }
    return out;
  }
  absl::StatusOr<int64_t> Size(const std::string& path) override {
    struct stat info;
    if (::stat(path.c_str(), &info) != 0) return Failed("stat", path, errno);
    if (S_ISDIR(info.st_mode)) return Failed("read", path, EISDIR);
    return static_cast<int64_t>(info.st_size);
  }
  bool Exists(const std::string& path) override { return ::access(path.c_str(), F_OK) == 0; }
  absl::Status MakeDirectory(const std::string& path) override {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    return error ? Failed("create directory", path, error.value()) : absl::OkStatus();
  }
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    DIR* directory = ::opendir(path.c_str());
    if (directory == nullptr) return Failed("list", path, errno);
    std::vector<std::string> names;
    while (const dirent* entry = ::readdir(directory)) {
      const absl::string_view name = entry->d_name;
      if (name != "." && name != "..") names.emplace_back(name);
    }
    ::closedir(directory);
    std::sort(names.begin(), names.end());
    return names;
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return ::rename(from.c_str(), to.c_str()) == 0
               ? absl::OkStatus()
               : Failed("rename", absl::StrCat(from, " to ", to), errno);
  }
  absl::Status SyncDirectory(const std::string& path) override {
    Descriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (fd.get() < 0) return Failed("open directory", path, errno);
    return ::fsync(fd.get()) == 0 ? absl::OkStatus() : Failed("sync directory", path, errno);
  }
  absl::Status RemoveFile(const std::string& path) override {
    return ::unlink(path.c_str()) == 0 ? absl::OkStatus() : Failed("remove", path, errno);
  }
  absl::Status RemoveTree(const std::string& path) override {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    return error ? Failed("remove", path, error.value()) : absl::OkStatus();
  }
};

struct MemoryFile {
  std::string contents;
  std::string durable;  // at the last Sync
};

class Memory : public MemoryFileSystem {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<WritableFile>> Reopen(const std::string& path,
                                                       int64_t length) override;

  absl::StatusOr<std::string> Read(const std::string& path) override {
    MutexLock lock(&mutex_);
    auto found = live_.find(path);
    if (found == live_.end()) return Failed("read", path, ENOENT);
    return found->second->contents;
  }
  absl::StatusOr<std::string> ReadRange(const std::string& path, int64_t offset,
                                        int64_t length) override {
    ASSIGN_OR_RETURN(std::string all, Read(path));
    if (offset + length > static_cast<int64_t>(all.size())) {
      return absl::DataLossError(absl::StrCat(path, " ends at byte ", all.size(), ", expected ",
                                              length, " bytes from ", offset));
    }
    return all.substr(static_cast<size_t>(offset), static_cast<size_t>(length));
  }
  absl::StatusOr<int64_t> Size(const std::string& path) override {
    ASSIGN_OR_RETURN(std::string all, Read(path));
    return static_cast<int64_t>(all.size());
  }
  bool Exists(const std::string& path) override {
    MutexLock lock(&mutex_);
    return live_.contains(path) || HasChildren(path);
  }
  // Directories are implied by the files in them.
  absl::Status MakeDirectory(const std::string&) override { return absl::OkStatus(); }
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    MutexLock lock(&mutex_);
    std::vector<std::string> names;
    const std::string prefix = path + "/";
    for (const auto& [name, file] : live_) {
      if (!absl::StartsWith(name, prefix)) continue;
      std::string rest = name.substr(prefix.size());
      rest = rest.substr(0, rest.find('/'));
      if (names.empty() || names.back() != rest) names.push_back(rest);
    }
    return names;
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    MutexLock lock(&mutex_);
    if (fail_writes_) return Failed("rename", from, EIO);
    if (auto found = live_.find(from); found != live_.end()) {
      auto file = found->second;
      live_.erase(found);
      live_[to] = std::move(file);
      return absl::OkStatus();
    }
    if (!HasChildren(from)) return Failed("rename", from, ENOENT);
    std::map<std::string, std::shared_ptr<MemoryFile>> moved;
    for (const auto& [name, file] : live_) {
      moved[absl::StartsWith(name, from + "/") ? to + name.substr(from.size()) : name] = file;
    }
    live_ = std::move(moved);
    return absl::OkStatus();
  }
  absl::Status SyncDirectory(const std::string& path) override {
    MutexLock lock(&mutex_);
    const std::string prefix = path + "/";
    auto inside = [&](const std::string& name) { return absl::StartsWith(name, prefix); };
    // Not erase_if: clang's thread-safety analysis does not see that its lambda runs under the
    // lock.
    for (auto entry = durable_.begin(); entry != durable_.end();) {
      const bool removed = inside(entry->first) && !live_.contains(entry->first);
      entry = removed ? durable_.erase(entry) : std::next(entry);
    }
    for (const auto& [name, file] : live_) {
      if (inside(name)) durable_[name] = file;
    }
    return absl::OkStatus();
  }
  absl::Status RemoveFile(const std::string& path) override {
    MutexLock lock(&mutex_);
    return live_.erase(path) == 1 ? absl::OkStatus() : Failed("remove", path, ENOENT);
  }
  absl::Status RemoveTree(const std::string& path) override {
    MutexLock lock(&mutex_);
    std::erase_if(live_, [&](const auto& entry) {
      return entry.first == path || absl::StartsWith(entry.first, path + "/");
    });
    return absl::OkStatus();
  }
  void Crash() override {
    MutexLock lock(&mutex_);
    live_ = durable_;
    for (auto& [name, file] : live_) file->contents = file->durable;
  }
  void FailWrites(bool fail) override {
    MutexLock lock(&mutex_);
    fail_writes_ = fail;
  }

 private:
  friend class MemoryWritableFile;

  bool HasChildren(const std::string& path) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    auto next = live_.lower_bound(path + "/");
    return next != live_.end() && absl::StartsWith(next->first, path + "/");
  }

  Mutex mutex_;
  bool fail_writes_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, std::shared_ptr<MemoryFile>> live_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<MemoryFile>> durable_ ABSL_GUARDED_BY(mutex_);
};

class MemoryWritableFile : public WritableFile {
 public:
  MemoryWritableFile(Memory& owner, std::string path, std::shared_ptr<MemoryFile> file)
      : owner_(owner), path_(std::move(path)), file_(std::move(file)) {}
  absl::Status Append(absl::string_view bytes) override {
    MutexLock lock(&owner_.mutex_);
    if (owner_.fail_writes_) return Failed("write", path_, EIO);
    file_->contents.append(bytes.data(), bytes.size());
    return absl::OkStatus();
  }
  absl::Status Sync() override {
    MutexLock lock(&owner_.mutex_);
    if (owner_.fail_writes_) return Failed("sync", path_, EIO);
    file_->durable = file_->contents;
    return absl::OkStatus();
  }
  absl::Status Close() override { return absl::OkStatus(); }

 private:
  Memory& owner_;
  std::string path_;
  std::shared_ptr<MemoryFile> file_;
};

absl::StatusOr<std::unique_ptr<WritableFile>> Memory::Create(const std::string& path) {
  MutexLock lock(&mutex_);
  if (fail_writes_) return Failed("create", path, EIO);
  auto file = std::make_shared<MemoryFile>();
  live_[path] = file;
  return std::make_unique<MemoryWritableFile>(*this, path, std::move(file));
}

absl::StatusOr<std::unique_ptr<WritableFile>> Memory::Reopen(const std::string& path,
                                                             int64_t length) {
  MutexLock lock(&mutex_);
  if (fail_writes_) return Failed("open", path, EIO);
  const auto found = live_.find(path);
  if (found == live_.end()) return Failed("open", path, ENOENT);
  std::string& contents = found->second->contents;
  if (static_cast<int64_t>(contents.size()) < length) {
    return Shorter(path, static_cast<int64_t>(contents.size()), length);
  }
  contents.resize(static_cast<size_t>(length));
  return std::make_unique<MemoryWritableFile>(*this, path, found->second);
}

}  // namespace

absl::Status FileSystem::WriteAtomically(const std::string& path, absl::string_view bytes) {
  const std::string temporary = absl::StrCat(path, ".tmp");
  {
    ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, Create(temporary));
    RETURN_IF_ERROR(file->Append(bytes));
    RETURN_IF_ERROR(file->Sync());
    RETURN_IF_ERROR(file->Close());
  }
  RETURN_IF_ERROR(Rename(temporary, path));
  return SyncDirectory(ParentDirectory(path));
}

absl::Status FileSystem::WriteUnsynced(const std::string& path, absl::string_view bytes) {
  const std::string temporary = absl::StrCat(path, ".tmp");
  {
    ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, Create(temporary));
    RETURN_IF_ERROR(file->Append(bytes));
    RETURN_IF_ERROR(file->Close());
  }
  return Rename(temporary, path);
}

std::unique_ptr<FileSystem> PosixFileSystem() { return std::make_unique<Posix>(); }

std::unique_ptr<MemoryFileSystem> MemoryFileSystem::Make() { return std::make_unique<Memory>(); }

std::string ParentDirectory(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace muster
