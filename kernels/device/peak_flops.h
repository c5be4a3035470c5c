// The peak arithmetic of devices, which the utilisation of a run is measured against.
#ifndef MUSTER_KERNELS_DEVICE_PEAK_FLOPS_H_
#define MUSTER_KERNELS_DEVICE_PEAK_FLOPS_H_

#include "absl/strings/string_view.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// FLOP/s of matmuls without sparsity, by the maker's data sheet; a multiply-add counts two.
// `device` is Device::name() or a part of it with the model; `tf32` matters to kF32 alone. 0: the
// device is not in the table; no CPU is.
double PeakFlops(absl::string_view device, DType compute, bool tf32);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_DEVICE_PEAK_FLOPS_H_
