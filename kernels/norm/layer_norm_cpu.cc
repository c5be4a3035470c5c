// Layer norm on the host, the residual addition fused: a row is read once into L1.
#include <algorithm>
#include <cstdint>

#include "kernels/device/host_device.h"
#include "kernels/ops_cpu.h"
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
    pool.Run((t + kRows - 1) / kRows, [&](int64_t chunk) {
      for (int64_t row = chunk * kRows; row < std::min(t, (chunk + 1) * kRows); ++row) {
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

// Chunks of rows make dx, chunks of columns make dgamma and dbeta: reading dy and x twice is
// cheaper than partial sums per thread and makes the order of additions independent of threads. The
// sums of dx follow when it is complete.
void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    const int64_t t = args.x.dim(0), c = args.x.dim(1);
    const int64_t row_chunks = (t + kRows - 1) / kRows;
    const int64_t column_chunks = (c + kColumns - 1) / kColumns;
    const float* dy = args.dy.f32();
    const float* x = args.x.f32();
    pool.Run(column_chunks + row_chunks, [&](int64_t chunk) {
      if (chunk < column_chunks) {
        const int64_t begin = chunk * kColumns, count = std::min(kColumns, c - begin);
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
      const int64_t begin = (chunk - column_chunks) * kRows;
      for (int64_t row = begin; row < std::min(t, begin + kRows); ++row) {
        loops.layer_norm_backward_row(c, dy + row * c, x + row * c, args.gamma.f32(),
                                      args.mean.f32()[row], args.rstd.f32()[row],
                                      args.dx.f32() + row * c);
      }
    });
    if (args.dx_sums.empty()) return;
    pool.Run(column_chunks, [&](int64_t chunk) {
      const int64_t begin = chunk * kColumns, count = std::min(kColumns, c - begin);
      float* const sums = args.dx_sums.f32() + begin;
      if (!args.accumulate_dx_sums) std::fill(sums, sums + count, 0.0f);
      loops.add_column_sums(t, count, c, args.dx.f32() + begin, sums);
    });
  });
}

}  // namespace muster::kernels::cpu
