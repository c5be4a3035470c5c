#include "kernels/device/peak_flops.h"

#include "absl/strings/match.h"

namespace muster::kernels {
namespace {

// NVIDIA's data sheets give the tensor cores' rates with sparsity: half of those. TFLOP/s.
struct Peak {
  const char* model;
  double half;  // bf16 and fp16
  double tf32;
  double fp32;  // outside the tensor cores
};
// The more special name first: the first one that the device's name holds counts.
constexpr Peak kPeaks[] = {
    {"B200", 2250, 1125, 75},    {"H200 NVL", 835.5, 417.5, 60}, {"H100 NVL", 835.5, 417.5, 60},
    {"H100 PCIe", 756, 378, 51}, {"H200", 989, 494.5, 67},       {"H100", 989, 494.5, 67},
    {"A100", 312, 156, 19.5},    {"L40S", 362, 183, 91.6},
};

}  // namespace

double PeakFlops(absl::string_view device, DType compute, bool tf32) {
  for (const Peak& peak : kPeaks) {
    if (!absl::StrContains(device, peak.model)) continue;
    if (compute == DType::kBF16 || compute == DType::kF16) return peak.half * 1e12;
    if (compute == DType::kF32) return (tf32 ? peak.tf32 : peak.fp32) * 1e12;
  }
  return 0;
}

}  // namespace muster::kernels
