#include "base/shared_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

// Folders in `directory` in descending order, so that newer versions come first; none when it
// cannot be read.
std::vector<fs::path> Folders(const fs::path& directory) {
  std::vector<fs::path> folders;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (it->is_directory(error)) folders.push_back(it->path());
  }
  std::sort(folders.rbegin(), folders.rend());
  return folders;
}

// <root>/lib/python3.*/{site,dist}-packages/nvidia/*/lib
void AddPythonPackages(const fs::path& root, std::vector<std::string>& directories) {
  std::error_code error;
  for (const fs::path& python : Folders(root / "lib")) {
    if (!absl::StartsWith(python.filename().string(), "python3")) continue;
    for (const char* packages : {"site-packages", "dist-packages"}) {
      for (const fs::path& package : Folders(python / packages / "nvidia")) {
        if (fs::is_directory(package / "lib", error)) directories.push_back(package / "lib");
      }
    }
  }
}

}  // namespace

absl::StatusOr<SharedLibrary> SharedLibrary::Open(const std::string& name,
                                                  const std::vector<std::string>& directories) {
  if (void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL); handle != nullptr) {
    return SharedLibrary(name, handle);
  }
  std::string reason = ::dlerror();
  for (const std::string& directory : directories) {
    const std::string path = absl::StrCat(directory, "/", name);
    std::error_code error;
    if (!fs::exists(path, error)) continue;
    if (void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL); handle != nullptr) {
      return SharedLibrary(path, handle);
    }
    return absl::FailedPreconditionError(absl::StrCat("cannot load ", path, ": ", ::dlerror()));
  }
  if (!absl::StrContains(reason, "No such file")) {
    return absl::FailedPreconditionError(absl::StrCat("cannot load ", name, ": ", reason));
  }
  return absl::NotFoundError(
      absl::StrCat(name, " was found neither by the system's loader (LD_LIBRARY_PATH) nor in ",
                   directories.empty() ? "any other folder" : absl::StrJoin(directories, ", ")));
}

absl::StatusOr<void*> SharedLibrary::Symbol(const std::string& name) const {
  void* symbol = ::dlsym(handle_, name.c_str());
  if (symbol == nullptr) {
    return absl::NotFoundError(
        absl::StrCat(name_, " has no ", name, ": another version of it is needed"));
  }
  return symbol;
}

std::vector<std::string> NvidiaLibraryDirectories() {
  std::vector<std::string> directories;
  if (const char* root = std::getenv("CUDA_HOME"))
    directories.push_back(absl::StrCat(root, "/lib64"));
  directories.push_back("/usr/local/cuda/lib64");
  if (const char* root = std::getenv("VIRTUAL_ENV")) AddPythonPackages(root, directories);
  // A virtual environment that is only on the PATH keeps its packages beside its python3.
  if (const char* path = std::getenv("PATH")) {
    std::error_code error;
    for (absl::string_view folder : absl::StrSplit(path, ':', absl::SkipEmpty())) {
      const fs::path bin(std::string{folder});
      if (fs::exists(bin / "python3", error)) AddPythonPackages(bin.parent_path(), directories);
    }
  }
  // Without repetitions.
  std::vector<std::string> unique;
  for (std::string& directory : directories) {
    if (std::find(unique.begin(), unique.end(), directory) == unique.end()) {
      unique.push_back(std::move(directory));
    }
  }
  return unique;
}

}  // namespace muster
