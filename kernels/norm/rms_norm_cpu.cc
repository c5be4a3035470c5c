// RMS norm on the host, with the residual addition fused: a row is read once into the L1 cache.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/norm/norm.h"
#include "kernels/simd/loops.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kRows = 16;
constexpr int64_t kColumns = 64;

// dx += rstd (g - x rstd^2 mean(g x)), where g = dy gamma.
void BackwardRow(const Loops& loops, int64_t c, const float* dy, const float* x, const float* gamma,
                 float rstd, float* dx) {
  float* g = ThreadScratch(c);
  for (int64_t i = 0; i < c; ++i) g[i] = dy[i] * gamma[i];
  const float mean = loops.dot(c, g, x) / static_cast<float>(c);
  const float factor = rstd * rstd * mean;
  for (int64_t i = 0; i < c; ++i) dx[i] += rstd * (g[i] - x[i] * factor);
}

}  // namespace

void RmsNormForward(Stream& stream, const RmsNormForwardArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    const int64_t t = args.residual.dim(0), c = args.residual.dim(1);
    pool.Run((t + kRows - 1) / kRows, [&](int64_t task) {
      for (int64_t row = task * kRows; row < std::min(t, (task + 1) * kRows); ++row) {
        const float* x = args.residual.f32() + row * c;
        if (!args.branch.empty()) {
          loops.add(c, x, args.branch.f32() + row * c, args.sum.f32() + row * c);
          x = args.sum.f32() + row * c;
        } else if (!args.sum.empty() && args.sum.data() != args.residual.data()) {
          std::copy(x, x + c, args.sum.f32() + row * c);
        }
        const double mean = loops.sum_squares(c, x) / static_cast<double>(c);
        const auto rstd =
            static_cast<float>(1 / std::sqrt(mean + static_cast<double>(args.epsilon)));
        const float* gamma = args.gamma.f32();
        float* y = args.y.f32() + row * c;
        for (int64_t i = 0; i < c; ++i) y[i] = x[i] * rstd * gamma[i];
        args.rstd.f32()[row] = rstd;
      }
    });
  });
}

// Tasks over rows compute dx, tasks over columns dgamma, as in layer norm.
void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    const int64_t t = args.x.dim(0), c = args.x.dim(1);
    const int64_t row_tasks = (t + kRows - 1) / kRows;
    const int64_t column_tasks = (c + kColumns - 1) / kColumns;
    const float* dy = args.dy.f32();
    const float* x = args.x.f32();
    const float* rstd = args.rstd.f32();
    pool.Run(column_tasks + row_tasks, [&](int64_t task) {
      if (task < column_tasks) {
        const int64_t begin = task * kColumns, n = std::min(kColumns, c - begin);
        float sums[kColumns] = {};
        for (int64_t row = 0; row < t; ++row) {
          const float* d = dy + row * c + begin;
          const float* v = x + row * c + begin;
          for (int64_t i = 0; i < n; ++i) sums[i] += d[i] * v[i] * rstd[row];
        }
        float* dgamma = args.dgamma.f32() + begin;
        for (int64_t i = 0; i < n; ++i) {
          dgamma[i] = args.accumulate ? dgamma[i] + sums[i] : sums[i];
        }
        return;
      }
      const int64_t begin = (task - column_tasks) * kRows;
      for (int64_t row = begin; row < std::min(t, begin + kRows); ++row) {
        BackwardRow(loops, c, dy + row * c, x + row * c, args.gamma.f32(), rstd[row],
                    args.dx.f32() + row * c);
      }
    });
  });
}

}  // namespace muster::kernels::cpu
