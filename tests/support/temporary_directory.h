// A temporary directory, removed with everything in it by the destructor.
#ifndef MUSTER_TESTS_SUPPORT_TEMPORARY_DIRECTORY_H_
#define MUSTER_TESTS_SUPPORT_TEMPORARY_DIRECTORY_H_

#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/check.h"

namespace muster::testing {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "muster-test-XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr) << name;
    path_ = name;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace muster::testing

#endif  // MUSTER_TESTS_SUPPORT_TEMPORARY_DIRECTORY_H_
