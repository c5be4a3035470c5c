// Squared ReLU on the host.
#include <algorithm>
#include <cstdint>

#include "kernels/activation/activation.h"
#include "kernels/device/host_device.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kRangeElements = 16 * 1024;

}  // namespace

void Relu2Forward(Stream& stream, Tensor x, Tensor y) {
  EnqueueOnHost(stream, [x, y](ThreadPool& pool) {
    pool.RunRanges(x.elements(), kRangeElements, [&](int64_t begin, int64_t count) {
      for (int64_t i = begin; i < begin + count; ++i) {
        const float positive = std::max(x.f32()[i], 0.0f);
        y.f32()[i] = positive * positive;
      }
    });
  });
}

void Relu2Backward(Stream& stream, Tensor x, Tensor dy, Tensor dx, Tensor y) {
  EnqueueOnHost(stream, [x, dy, dx, y](ThreadPool& pool) {
    pool.RunRanges(x.elements(), kRangeElements, [&](int64_t begin, int64_t count) {
      for (int64_t i = begin; i < begin + count; ++i) {
        const float positive = std::max(x.f32()[i], 0.0f);
        dx.f32()[i] = dy.f32()[i] * (2 * positive);
        if (!y.empty()) y.f32()[i] = positive * positive;
      }
    });
  });
}

}  // namespace muster::kernels::cpu
