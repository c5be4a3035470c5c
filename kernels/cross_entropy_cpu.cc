// Cross-entropy on the host: loss and gradient of a row while it is in the L2 cache; the softmax is
// written over the logits and nowhere else.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "kernels/host_device.h"
#include "kernels/ops_cpu.h"
#include "kernels/simd/loops.h"

namespace muster::kernels::cpu {

void CrossEntropy(Stream& stream, const CrossEntropyArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const float scale = args.scale * (args.loss_scale == nullptr ? 1.0f : *args.loss_scale);
    const Loops& loops = ChooseLoops();
    const int64_t columns = args.logits.dim(1);
    const int32_t* targets = args.targets.as<int32_t>();
    pool.Run(args.logits.dim(0), [&](int64_t row) {
      float* z = args.logits.f32() + row * columns;
      float& loss = args.losses.f32()[row];
      const int64_t target = targets[row];
      if (target < 0) {
        loss = 0;
        if (args.write_gradient) std::memset(z, 0, columns * sizeof(float));
        return;
      }
      CHECK_LT(target, args.vocab) << "target at " << row;
      const float of_target = z[target];
      const float most = loops.max(args.vocab, z);
      const double sum = loops.sum_exp(args.vocab, most, args.write_gradient, z);
      loss = static_cast<float>(std::log(sum) + (static_cast<double>(most) - of_target));
      if (!args.write_gradient) return;
      loops.scale(args.vocab, static_cast<float>(scale / sum), z);
      z[target] -= scale;
      std::memset(z + args.vocab, 0, (columns - args.vocab) * sizeof(float));
    });
  });
}

}  // namespace muster::kernels::cpu
