// A file system that hands every call on; tests override what they disturb or count.
#ifndef MUSTER_TESTS_SUPPORT_FORWARDING_FILE_SYSTEM_H_
#define MUSTER_TESTS_SUPPORT_FORWARDING_FILE_SYSTEM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/file_system.h"

namespace muster::testing {

class ForwardingFileSystem : public FileSystem {
 public:
  // `inner` must outlive it.
  explicit ForwardingFileSystem(FileSystem& inner) : inner_(inner) {}

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    return inner_.Create(path);
  }
  absl::StatusOr<std::unique_ptr<WritableFile>> Reopen(const std::string& path,
                                                       int64_t length) override {
    return inner_.Reopen(path, length);
  }
  absl::StatusOr<std::string> Read(const std::string& path) override { return inner_.Read(path); }
  absl::StatusOr<std::string> ReadRange(const std::string& path, int64_t offset,
                                        int64_t length) override {
    return inner_.ReadRange(path, offset, length);
  }
  absl::StatusOr<int64_t> Size(const std::string& path) override { return inner_.Size(path); }
  bool Exists(const std::string& path) override { return inner_.Exists(path); }
  absl::Status MakeDirectory(const std::string& path) override {
    return inner_.MakeDirectory(path);
  }
  absl::StatusOr<std::vector<std::string>> List(const std::string& path) override {
    return inner_.List(path);
  }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return inner_.Rename(from, to);
  }
  absl::Status SyncDirectory(const std::string& path) override {
    return inner_.SyncDirectory(path);
  }
  absl::Status RemoveFile(const std::string& path) override { return inner_.RemoveFile(path); }
  absl::Status RemoveTree(const std::string& path) override { return inner_.RemoveTree(path); }

 protected:
  FileSystem& inner_;
};

}  // namespace muster::testing

#endif  // MUSTER_TESTS_SUPPORT_FORWARDING_FILE_SYSTEM_H_
