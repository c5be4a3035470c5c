// Libraries that may be absent where a binary runs (NVIDIA's), loaded when they are first needed.
#ifndef MUSTER_BASE_SHARED_LIBRARY_H_
#define MUSTER_BASE_SHARED_LIBRARY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster {

// Stays loaded until the process ends: its code may be on the stack of threads of its own.
// Thread-safe.
class SharedLibrary {
 public:
  // `name` is looked up as the system does it (LD_LIBRARY_PATH, the binary's own run path, the
  // system's folders), then in each of `directories`. kNotFound says where it was looked for;
  // kFailedPrecondition: it is there and cannot be loaded.
  static absl::StatusOr<SharedLibrary> Open(const std::string& name,
                                            const std::vector<std::string>& directories);

  // kNotFound names the library: it is older or newer than what we were built for.
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

// Where NVIDIA's libraries are beside the system's folders, most wanted first: CUDA's own folder
// and those of the Python packages (nvidia-nccl-cu13, ...) of the active or the system's Python.
std::vector<std::string> NvidiaLibraryDirectories();

}  // namespace muster

#endif  // MUSTER_BASE_SHARED_LIBRARY_H_
