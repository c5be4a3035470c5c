#ifndef MUSTER_KERNELS_RANGE_H_
#define MUSTER_KERNELS_RANGE_H_

#include <string>

#include "kernels/device.h"

namespace muster::kernels {

// A named stretch of what the calling thread enqueues. On CUDA an NVTX range: Nsight Systems shows
// it above the kernels that it has launched. Without a profiler it costs a call or two, on other
// devices nothing. Ranges nest; they end on the thread that began them.
class Range {
 public:
  Range(Stream& stream, const std::string& name);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const bool shown_;
};

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_RANGE_H_
