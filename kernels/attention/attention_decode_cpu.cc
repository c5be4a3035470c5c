// A step of decoding on the host: one task per (sample, head), which reads its keys once, then its
// values. It is bound by memory.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/attention/attention_decode.h"
#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/simd/loops.h"
#include "kernels/tensor.h"

namespace muster::kernels::cpu {

void AttentionDecode(Stream& stream, const AttentionDecodeArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const int64_t heads = args.q.dim(2), width = args.q.dim(3), keys = args.k.dim(1);
    const int64_t group = heads / args.k.dim(2);
    const float scale = args.scale != 0 ? args.scale : 1.0f / std::sqrt(static_cast<float>(width));
    pool.Run(args.q.dim(0) * heads, [&](int64_t task) {
      const Loops& loops = ChooseLoops();
      const int64_t batch = task / heads, head = task % heads;
      const auto head_of = [&](const Tensor& x, int64_t which) {
        return x.f32() + batch * x.stride(0) + which * x.stride(2);
      };
      const float* q = head_of(args.q, head);
      const float* k = head_of(args.k, head / group);
      const float* v = head_of(args.v, head / group);
      float* out = head_of(args.out, head);
      float* scores = ThreadScratch(keys);
      for (int64_t key = 0; key < keys; ++key) {
        scores[key] = loops.dot(width, q, k + key * args.k.stride(1));
      }
      float most = -std::numeric_limits<float>::infinity(), sum = 0;
      loops.softmax_block(keys, keys, scale, scores, &most, &sum);
      std::fill(out, out + width, 0.0f);
      for (int64_t key = 0; key < keys; ++key) {
        loops.axpy(width, scores[key], v + key * args.v.stride(1), out);
      }
      loops.scale(width, 1.0f / sum, out);
    });
  });
}

}  // namespace muster::kernels::cpu
