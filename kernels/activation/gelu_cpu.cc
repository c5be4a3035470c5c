// GELU on the host.
#include <cstdint>

#include "kernels/activation/activation.h"
#include "kernels/device/host_device.h"
#include "kernels/simd/loops.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kRangeElements = 16 * 1024;

}  // namespace

void GeluForward(Stream& stream, Tensor x, Tensor y) {
  EnqueueOnHost(stream, [x, y](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    pool.RunRanges(x.elements(), kRangeElements, [&](int64_t begin, int64_t count) {
      loops.gelu_forward(count, x.f32() + begin, y.f32() + begin);
    });
  });
}

void GeluBackward(Stream& stream, Tensor x, Tensor dy, Tensor dx) {
  EnqueueOnHost(stream, [x, dy, dx](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    pool.RunRanges(x.elements(), kRangeElements, [&](int64_t begin, int64_t count) {
      loops.gelu_backward(count, x.f32() + begin, dy.f32() + begin, dx.f32() + begin);
    });
  });
}

}  // namespace muster::kernels::cpu
