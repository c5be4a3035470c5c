// Libraries that a machine may lack (NVIDIA's), loaded when they are first needed.
#ifndef MUSTER_BASE_SHARED_LIBRARY_H_
#define MUSTER_BASE_SHARED_LIBRARY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster {

// A loaded library. It stays loaded until the process ends, since it may run threads of its own.
// Thread-safe.
class SharedLibrary {
 public:
  // Looks for `name` as the system's loader does (LD_LIBRARY_PATH, the binary's run path, the
  // system's folders), then in each of `directories`. kNotFound says where; kFailedPrecondition: it
  // exists and cannot be loaded.
  static absl::StatusOr<SharedLibrary> Open(const std::string& name,
                                            const std::vector<std::string>& directories);

  // kNotFound names the library: its version is not the one that this program needs.
  absl::StatusOr<void*> Symbol(const std::string& name) const;
  template <typename Function>
  absl::Status Resolve(const std::string& name, Function*& function) const {
    absl::StatusOr<void*> symbol = Symbol(name);
    if (!symbol.ok()) return symbol.status();
    function = reinterpret_cast<Function*>(*symbol);
    return absl::OkStatus();
  }
  const std::string& name() const { return name_; }

 private:
  SharedLibrary(std::string name, void* handle) : name_(std::move(name)), handle_(handle) {}

  std::string name_;
  void* handle_;
};

// The folders outside the system's that may have NVIDIA's libraries, in order of preference: CUDA's
// own, and those of the Python packages (nvidia-nccl-cu13, ...) of the active or the system's
// Python.
std::vector<std::string> NvidiaLibraryDirectories();

}  // namespace muster

#endif  // MUSTER_BASE_SHARED_LIBRARY_H_
