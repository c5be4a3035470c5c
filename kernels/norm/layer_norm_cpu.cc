// Layer norm on the host, with the residual addition fused: a row is read once into the L1 cache.
#include <algorithm>
#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/norm/norm.h"
#include "kernels/simd/loops.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kRows = 16;
constexpr int64_t kColumns = 64;

}  // namespace

void LayerNormForward(Stream& stream, const LayerNormForwardArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    const int64_t t = args.residual.dim(0), c = args.residual.dim(1);
    pool.Run((t + kRows - 1) / kRows, [&](int64_t task) {
      for (int64_t row = task * kRows; row < std::min(t, (task + 1) * kRows); ++row) {
        loops.layer_norm_forward(c, args.residual.f32() + row * c,
                                 args.branch.empty() ? nullptr : args.branch.f32() + row * c,
                                 args.sum.empty() ? nullptr : args.sum.f32() + row * c,
                                 args.gamma.f32(), args.beta.f32(), args.epsilon,
                                 args.y.f32() + row * c, args.mean.f32() + row,
                                 args.rstd.f32() + row);
      }
    });
  });
}

// Tasks over rows compute dx, tasks over columns dgamma and dbeta: reading dy and x twice is
// cheaper than partial sums per thread and makes the order of additions independent of threads. The
// sums of dx are taken when it is complete.
void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    const int64_t t = args.x.dim(0), c = args.x.dim(1);
    const int64_t row_tasks = (t + kRows - 1) / kRows;
    const int64_t column_tasks = (c + kColumns - 1) / kColumns;
    const float* dy = args.dy.f32();
    const float* x = args.x.f32();
    pool.Run(column_tasks + row_tasks, [&](int64_t task) {
      if (task < column_tasks) {
        const int64_t begin = task * kColumns, count = std::min(kColumns, c - begin);
        float* dgamma = args.dgamma.f32() + begin;
        float* dbeta = args.dbeta.f32() + begin;
        if (!args.accumulate) {
          std::fill(dgamma, dgamma + count, 0.0f);
          std::fill(dbeta, dbeta + count, 0.0f);
        }
        loops.layer_norm_backward_columns(t, count, c, dy + begin, x + begin, args.mean.f32(),
                                          args.rstd.f32(), dgamma, dbeta);
        return;
      }
      const int64_t begin = (task - column_tasks) * kRows;
      for (int64_t row = begin; row < std::min(t, begin + kRows); ++row) {
        loops.layer_norm_backward_row(c, dy + row * c, x + row * c, args.gamma.f32(),
                                      args.mean.f32()[row], args.rstd.f32()[row],
                                      args.dx.f32() + row * c);
      }
    });
    if (args.dx_sums.empty()) return;
    pool.Run(column_tasks, [&](int64_t task) {
      const int64_t begin = task * kColumns, count = std::min(kColumns, c - begin);
      float* const sums = args.dx_sums.f32() + begin;
      if (!args.accumulate_dx_sums) std::fill(sums, sums + count, 0.0f);
      loops.add_column_sums(t, count, c, args.dx.f32() + begin, sums);
    });
  });
}

}  // namespace muster::kernels::cpu
