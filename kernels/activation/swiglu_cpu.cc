// SwiGLU on the host. With s = 1 / (1 + exp(-g)): y = g s u, du = dy g s,
// dg = dy u s (1 + g (1 - s)).
#include <algorithm>
#include <cstdint>

#include "kernels/activation/activation.h"
#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/simd/loops.h"
#include "kernels/tensor.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kColumns = 1024;

// sigmoid(g) of n values, n <= kColumns.
void Sigmoid(const Loops& loops, int64_t n, const float* g, float* s) {
  for (int64_t i = 0; i < n; ++i) s[i] = -g[i];
  loops.exp(n, s, s);
  for (int64_t i = 0; i < n; ++i) s[i] = 1.0f / (1.0f + s[i]);
}

// Calls work(row, first column, columns) for slices of rows that cover [T,F].
template <typename Work>
void ForSlices(ThreadPool& pool, int64_t t, int64_t f, Work work) {
  const int64_t slices = (f + kColumns - 1) / kColumns;
  pool.Run(t * slices, [&](int64_t task) {
    const int64_t begin = task % slices * kColumns;
    work(task / slices, begin, std::min(kColumns, f - begin));
  });
}

}  // namespace

void SwigluForward(Stream& stream, Tensor packed, Tensor y) {
  EnqueueOnHost(stream, [packed, y](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    const int64_t f = y.dim(1);
    ForSlices(pool, y.dim(0), f, [&](int64_t row, int64_t begin, int64_t n) {
      const float* gate = packed.f32() + row * 2 * f + begin;
      const float* up = gate + f;
      float* out = y.f32() + row * f + begin;
      float* s = ThreadScratch(kColumns);
      Sigmoid(loops, n, gate, s);
      for (int64_t i = 0; i < n; ++i) out[i] = gate[i] * s[i] * up[i];
    });
  });
}

void SwigluBackward(Stream& stream, Tensor packed, Tensor dy, Tensor d_packed, Tensor y) {
  EnqueueOnHost(stream, [packed, dy, d_packed, y](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    const int64_t f = dy.dim(1);
    ForSlices(pool, dy.dim(0), f, [&](int64_t row, int64_t begin, int64_t n) {
      const float* gate = packed.f32() + row * 2 * f + begin;
      const float* up = gate + f;
      const float* d = dy.f32() + row * f + begin;
      float* d_gate = d_packed.f32() + row * 2 * f + begin;
      float* d_up = d_gate + f;
      float* out = y.empty() ? nullptr : y.f32() + row * f + begin;
      float* s = ThreadScratch(kColumns);
      Sigmoid(loops, n, gate, s);
      for (int64_t i = 0; i < n; ++i) {
        // All inputs are read before any output is written, because they may alias.
        const float g = gate[i], u = up[i], dy_i = d[i];
        d_up[i] = dy_i * g * s[i];
        d_gate[i] = dy_i * u * s[i] * (1.0f + g * (1.0f - s[i]));
        if (out != nullptr) out[i] = g * s[i] * u;
      }
    });
  });
}

}  // namespace muster::kernels::cpu
