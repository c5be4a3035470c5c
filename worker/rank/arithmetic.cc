#include "worker/rank/arithmetic.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/device/peak_flops.h"

namespace muster::worker {

Arithmetic Arithmetic::Of(const parallel::Model& model, const std::string& device,
                          parallel::Precision precision, bool tf32, int ranks) {
  using kernels::DType;
  const DType compute = precision == parallel::Precision::kBf16   ? DType::kBF16
                        : precision == parallel::Precision::kFp16 ? DType::kF16
                                                                  : DType::kF32;
  Arithmetic of;
  of.model_flops = static_cast<double>(model.training_flops_per_token());
  of.hardware_flops = static_cast<double>(model.hardware_flops_per_token());
  of.peak_flops = kernels::PeakFlops(device, compute, tf32);
  of.ranks = ranks;
  if (of.peak_flops == 0 && device != "cpu") of.unknown_device = device;
  return of;
}

double Arithmetic::Utilization(double flops_per_token, double tokens, double seconds) const {
  const double possible = peak_flops * ranks * seconds;
  return possible > 0 ? flops_per_token * tokens / possible : 0;
}

std::string Arithmetic::ToText() const {
  std::string text = absl::StrFormat(
      "%.4g GFLOP per token: 6 per weight of a GEMM, 6 x sequence x width of every attention "
      "(its causal half), the scans",
      model_flops * 1e-9);
  if (hardware_flops > model_flops) {
    absl::StrAppendFormat(&text, "; %.4g with what is recomputed", hardware_flops * 1e-9);
  }
  if (peak_flops > 0) {
    absl::StrAppendFormat(&text,
                          ". MFU = tokens/s x that / (%d x %.4g TFLOP/s, dense, by the data sheet)",
                          ranks, peak_flops * 1e-12);
  } else if (!unknown_device.empty()) {
    absl::StrAppend(&text, ". No MFU: what ", unknown_device, " does at best is not known here");
  }
  return text;
}

}  // namespace muster::worker
