#include "kernels/device/range.h"

#include "absl/time/clock.h"

#ifdef MUSTER_KERNELS_CUDA
// Header-only: it looks for a profiler's library when the first range begins.
#include <nvtx3/nvToolsExt.h>
#endif

namespace muster::kernels {
namespace {

#ifdef MUSTER_KERNELS_CUDA
void Push(const std::string& name) { nvtxRangePushA(name.c_str()); }
void Pop() { nvtxRangePop(); }
#else
void Push(const std::string&) {}
void Pop() {}
#endif

}  // namespace

Range::Range(Stream& stream, const std::string& name, Trace* trace)
    : shown_(stream.device().kind() == DeviceKind::kCuda), trace_(trace) {
  if (shown_) Push(name);
  if (trace_ == nullptr) return;
  track_ = shown_ ? "enqueued by the host" : "compute";
  name_ = name;
  begin_ = absl::GetCurrentTimeNanos();
}

Range::~Range() {
  if (shown_) Pop();
  if (trace_ != nullptr) trace_->Add(track_, name_, begin_, absl::GetCurrentTimeNanos());
}

}  // namespace muster::kernels
