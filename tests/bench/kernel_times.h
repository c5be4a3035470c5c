// Where the GPU's time of a piece of work goes, kernel by kernel, through CUPTI's activity records.
#ifndef MUSTER_TESTS_BENCH_KERNEL_TIMES_H_
#define MUSTER_TESTS_BENCH_KERNEL_TIMES_H_

#include <functional>
#include <map>
#include <string>

namespace muster {

struct KernelTimes {
  double wall = 0;       // seconds from the first kernel's start to the last one's end
  double product = 0;    // cuBLASLt
  double attention = 0;  // cuDNN, or our own attention kernels
  double bandwidth = 0;  // everything else, copies included
  double idle = 0;       // no kernel running
  int kernels = 0;
  std::map<std::string, double> seconds_by_kernel;
};

// Runs `work`, which must wait for the device at its end. One caller at a time. False: CUPTI is not
// there or refuses.
bool MeasureKernels(const std::function<void()>& work, KernelTimes* times);

}  // namespace muster

#endif  // MUSTER_TESTS_BENCH_KERNEL_TIMES_H_
