// The merge of two partial results of attention on the host. It is bound by memory: out is read and
// written once.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/attention/attention.h"
#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/low_precision.h"
#include "kernels/tensor.h"

namespace muster::kernels::cpu {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

int64_t Offset(const Tensor& x, int64_t batch, int64_t token, int64_t head) {
  return batch * x.stride(0) + token * x.stride(1) + head * x.stride(2);
}

}  // namespace

void AttentionMerge(Stream& stream, const AttentionMergeArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const Tensor &out = args.out, &partial = args.partial_out;
    const int64_t sequence = out.dim(1), heads = out.dim(2), width = out.dim(3);
    pool.Run(out.dim(0) * heads, [&](int64_t task) {
      const int64_t batch = task / heads, head = task % heads;
      for (int64_t token = 0; token < sequence; ++token) {
        float& lse = args.lse.f32()[task * sequence + token];
        const float other = args.partial_lse.f32()[task * sequence + token];
        const float most = std::max(lse, other);
        if (most == kEmpty) continue;  // no keys at all: out stays
        const float merged = most + std::log1p(std::exp(-std::abs(lse - other)));
        const float keep = std::exp(lse - merged), add = std::exp(other - merged);
        const int64_t to = Offset(out, batch, token, head);
        const int64_t from = Offset(partial, batch, token, head);
        for (int64_t i = 0; i < width; ++i) {
          WriteFloat(out, to + i,
                     keep * ReadAsFloat(out, to + i) + add * ReadAsFloat(partial, from + i));
        }
        lse = merged;
      }
    });
  });
}

}  // namespace muster::kernels::cpu
