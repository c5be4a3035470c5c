// Cross-entropy on the host: loss and gradient of a row are computed while it is in the L2 cache.
// The softmax is written over the logits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/loss/cross_entropy.h"
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

void CrossEntropyStats(Stream& stream, const CrossEntropyStatsArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    const int64_t columns = args.logits.dim(1);
    const int32_t* targets = args.targets.as<int32_t>();
    pool.Run(args.logits.dim(0), [&](int64_t row) {
      float* z = args.logits.f32() + row * columns;
      float* stats = args.stats.f32() + 3 * row;
      stats[0] = loops.max(args.vocab, z);
      stats[1] = static_cast<float>(loops.sum_exp(args.vocab, stats[0], /*store=*/false, z));
      const int64_t target = targets[row] - args.first;
      stats[2] = target >= 0 && target < args.vocab ? z[target] : 0.0f;
    });
  });
}

void CrossEntropyMerge(Stream& stream, const CrossEntropyMergeArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const float scale = args.scale * (args.loss_scale == nullptr ? 1.0f : *args.loss_scale);
    const Loops& loops = ChooseLoops();
    const int64_t rows = args.logits.dim(0), columns = args.logits.dim(1);
    const int64_t ranks = args.stats.dim(0);
    const int32_t* targets = args.targets.as<int32_t>();
    pool.Run(rows, [&](int64_t row) {
      float* z = args.logits.f32() + row * columns;
      float& loss = args.losses.f32()[row];
      if (targets[row] < 0) {
        loss = 0;
        if (args.write_gradient) std::memset(z, 0, columns * sizeof(float));
        return;
      }
      const auto stats = [&](int64_t rank) { return args.stats.f32() + 3 * (rank * rows + row); };
      float most = stats(0)[0];
      for (int64_t rank = 1; rank < ranks; ++rank) most = std::max(most, stats(rank)[0]);
      double sum = 0, of_target = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        sum += stats(rank)[1] * std::exp(static_cast<double>(stats(rank)[0]) - most);
        of_target += stats(rank)[2];
      }
      loss = static_cast<float>(std::log(sum) + (most - of_target));
      if (!args.write_gradient) return;
      loops.sum_exp(args.vocab, most, /*store=*/true, z);
      loops.scale(args.vocab, static_cast<float>(scale / sum), z);
      const int64_t target = targets[row] - args.first;
      if (target >= 0 && target < args.vocab) z[target] -= scale;
      std::memset(z + args.vocab, 0, (columns - args.vocab) * sizeof(float));
    });
  });
}

}  // namespace muster::kernels::cpu
