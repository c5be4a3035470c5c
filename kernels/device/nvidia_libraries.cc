// The functions of NVIDIA's libraries that we (and cuDNN's frontend headers) call, each defined
// here as a jump through a slot that is filled from the library. A function missing from a list is
// an undefined reference when linking; add its name.
#include "kernels/device/nvidia_libraries.h"

#include <cuda.h>

#include <array>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/shared_library.h"
#include "base/status_macros.h"

#define MUSTER_CUBLASLT_FUNCTIONS(X)       \
  X(cublasLtCreate)                        \
  X(cublasLtDestroy)                       \
  X(cublasLtGetStatusName)                 \
  X(cublasLtGetVersion)                    \
  X(cublasLtMatmul)                        \
  X(cublasLtMatmulAlgoCheck)               \
  X(cublasLtMatmulAlgoConfigSetAttribute)  \
  X(cublasLtMatmulAlgoGetHeuristic)        \
  X(cublasLtMatmulDescInit_internal)       \
  X(cublasLtMatmulDescSetAttribute)        \
  X(cublasLtMatmulPreferenceInit_internal) \
  X(cublasLtMatmulPreferenceSetAttribute)  \
  X(cublasLtMatrixLayoutInit_internal)     \
  X(cublasLtMatrixLayoutSetAttribute)

#define MUSTER_CUDNN_FUNCTIONS(X)  \
  X(cudnnBackendCreateDescriptor)  \
  X(cudnnBackendDestroyDescriptor) \
  X(cudnnBackendExecute)           \
  X(cudnnBackendFinalize)          \
  X(cudnnBackendGetAttribute)      \
  X(cudnnBackendSetAttribute)      \
  X(cudnnCreate)                   \
  X(cudnnDestroy)                  \
  X(cudnnGetErrorString)           \
  X(cudnnGetLastErrorString)       \
  X(cudnnGetStream)                \
  X(cudnnGetVersion)               \
  X(cudnnSetStream)

#define MUSTER_NVRTC_FUNCTIONS(X) \
  X(nvrtcCompileProgram)          \
  X(nvrtcCreateProgram)           \
  X(nvrtcDestroyProgram)          \
  X(nvrtcGetCUBIN)                \
  X(nvrtcGetCUBINSize)            \
  X(nvrtcGetProgramLog)           \
  X(nvrtcGetProgramLogSize)

extern "C" {

// Stands in for the functions of a missing library: their status is an error.
static int MusterLibraryIsAbsent() { return 1; }

#define MUSTER_SLOT(name)                                                \
  __attribute__((visibility("hidden"), used)) void* muster_slot_##name = \
      reinterpret_cast<void*>(&MusterLibraryIsAbsent);
MUSTER_CUBLASLT_FUNCTIONS(MUSTER_SLOT)
MUSTER_CUDNN_FUNCTIONS(MUSTER_SLOT)
MUSTER_NVRTC_FUNCTIONS(MUSTER_SLOT)
#undef MUSTER_SLOT

}  // extern "C"

#if defined(__x86_64__)
#define MUSTER_JUMP(name) "jmp *muster_slot_" #name "(%rip)\n"
#elif defined(__aarch64__)
#define MUSTER_JUMP(name)                   \
  "adrp x16, muster_slot_" #name            \
  "\n"                                      \
  "ldr x16, [x16, :lo12:muster_slot_" #name \
  "]\n"                                     \
  "br x16\n"
#else
#error "no jump for this processor"
#endif
#define MUSTER_FUNCTION(name)                                                          \
  asm(".text\n.globl " #name "\n.hidden " #name "\n.type " #name ", %function\n" #name \
      ":\n" MUSTER_JUMP(name) ".size " #name ", .-" #name "\n");
MUSTER_CUBLASLT_FUNCTIONS(MUSTER_FUNCTION)
MUSTER_CUDNN_FUNCTIONS(MUSTER_FUNCTION)
MUSTER_NVRTC_FUNCTIONS(MUSTER_FUNCTION)
#undef MUSTER_FUNCTION
#undef MUSTER_JUMP

namespace muster::kernels::cuda {
namespace {

struct Function {
  const char* name;
  void** slot;
};
#define MUSTER_ENTRY(name) Function{#name, &muster_slot_##name},
constexpr Function kCublasLt[] = {MUSTER_CUBLASLT_FUNCTIONS(MUSTER_ENTRY)};
constexpr Function kCudnn[] = {MUSTER_CUDNN_FUNCTIONS(MUSTER_ENTRY)};
constexpr Function kNvrtc[] = {MUSTER_NVRTC_FUNCTIONS(MUSTER_ENTRY)};
#undef MUSTER_ENTRY

absl::Status Load(const std::string& library, absl::Span<const Function> functions,
                  absl::string_view package) {
  const absl::StatusOr<SharedLibrary> loaded =
      SharedLibrary::Open(library, NvidiaLibraryDirectories());
  absl::Status status = loaded.status();
  for (const Function& function : functions) {
    if (!status.ok()) break;
    const absl::StatusOr<void*> symbol = loaded->Symbol(function.name);
    status = symbol.status();
    // Every thread stores the same address.
    if (symbol.ok()) __atomic_store_n(function.slot, *symbol, __ATOMIC_RELEASE);
  }
  if (status.ok()) return status;
  return absl::FailedPreconditionError(absl::StrCat(
      status.message(), "; install CUDA ", CUDA_VERSION / 1000,
      "'s libraries or the Python package ", package, ", or add its folder to LD_LIBRARY_PATH"));
}

}  // namespace

absl::Status LoadCublasLt() {
  return Load(absl::StrCat("libcublasLt.so.", CUDA_VERSION / 1000), kCublasLt, "nvidia-cublas");
}

absl::Status LoadCudnn() {
  // The frontend compiles kernels of its own with it, of which we use none.
  (void)Load(absl::StrCat("libnvrtc.so.", CUDA_VERSION / 1000), kNvrtc, "nvidia-cuda-nvrtc");
  return Load("libcudnn.so.9", kCudnn, "nvidia-cudnn-cu13");
}

}  // namespace muster::kernels::cuda
