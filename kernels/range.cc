#include "kernels/range.h"

#ifdef MUSTER_KERNELS_CUDA
// Header-only: it looks for a profiler's library when the first range begins.
#include <nvtx3/nvToolsExt.h>
#endif

namespace muster::kernels {

#ifdef MUSTER_KERNELS_CUDA

Range::Range(Stream& stream, const std::string& name)
    : shown_(stream.device().kind() == DeviceKind::kCuda) {
  if (shown_) nvtxRangePushA(name.c_str());
}
Range::~Range() {
  if (shown_) nvtxRangePop();
}

#else

Range::Range(Stream&, const std::string&) : shown_(false) {}
Range::~Range() { static_cast<void>(shown_); }

#endif

}  // namespace muster::kernels
