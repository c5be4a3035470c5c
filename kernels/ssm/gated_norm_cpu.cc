// Gated RMS norm on the host. Rows are independent; the sums over rows for gamma are those of
// slices of columns, each by one task.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/device/host_device.h"
#include "kernels/simd/loops.h"
#include "kernels/ssm/ssm.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kRows = 16;
constexpr int64_t kColumns = 64;

float Sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float* Row(const Tensor& of, int64_t t) { return of.f32() + t * of.stride(0); }

// What the norm reads: y, or y silu(z) with the gate in front of it.
float Normed(const GatedRmsNormArgs& args, const float* y, const float* z, int64_t i) {
  return args.norm_before_gate ? y[i] : y[i] * z[i] * Sigmoid(z[i]);
}

// Columns of a group over all ranks.
float GroupWidth(const GatedRmsNormArgs& args) {
  return static_cast<float>(args.sums.empty() ? args.y.dim(1) / args.groups : args.group_width);
}

// A row's columns of a group: `g`, the gradient of norm(v), times gamma, and `v`, what the norm
// reads.
void LoadBackward(const GatedRmsNormBackwardArgs& args, int64_t t, int64_t group, float* g,
                  float* v) {
  const GatedRmsNormArgs& forward = args.forward;
  const int64_t width = forward.y.dim(1) / forward.groups, begin = group * width;
  const float* y = Row(forward.y, t) + begin;
  const float* z = Row(forward.z, t) + begin;
  const float* gamma = forward.gamma.f32() + begin;
  const float* dout = Row(args.dout, t) + begin;
  for (int64_t i = 0; i < width; ++i) {
    const float gate = forward.norm_before_gate ? z[i] * Sigmoid(z[i]) : 1.0f;
    g[i] = dout[i] * gamma[i] * gate;
    v[i] = Normed(forward, y, z, i);
  }
}

void BackwardGroup(const GatedRmsNormBackwardArgs& args, int64_t t, int64_t group) {
  const GatedRmsNormArgs& forward = args.forward;
  const int64_t width = forward.y.dim(1) / forward.groups, begin = group * width;
  const float* y = Row(forward.y, t) + begin;
  const float* z = Row(forward.z, t) + begin;
  const float* gamma = forward.gamma.f32() + begin;
  const float* dout = Row(args.dout, t) + begin;
  const float rstd = forward.rstd.f32()[t * forward.groups + group];
  float* g = ThreadScratch(2 * width);
  float* v = g + width;
  LoadBackward(args, t, group, g, v);
  const float sum =
      forward.sums.empty() ? ChooseLoops().dot(width, g, v) : Row(forward.sums, t)[group];
  const float mean = sum / GroupWidth(forward);
  const float factor = rstd * rstd * mean;
  float* dy = Row(args.dy, t) + begin;
  float* dz = Row(args.dz, t) + begin;
  for (int64_t i = 0; i < width; ++i) {
    const float s = Sigmoid(z[i]);
    const float d_silu = s * (1 + z[i] * (1 - s));
    const float dv = rstd * (g[i] - v[i] * factor);
    if (!args.out.empty()) Row(args.out, t)[begin + i] = v[i] * rstd * gamma[i];
    if (forward.norm_before_gate) {
      dz[i] = dout[i] * gamma[i] * v[i] * rstd * d_silu;
      dy[i] = dv;
    } else {
      dz[i] = dv * y[i] * d_silu;
      dy[i] = dv * z[i] * s;
    }
  }
}

// Calls sum(row, group) for all of them and writes what it returns to args.sums.
template <typename Sum>
void WriteSums(Stream& stream, const GatedRmsNormArgs& args, Sum sum) {
  EnqueueOnHost(stream, [args, sum](ThreadPool& pool) {
    const int64_t rows = args.y.dim(0);
    pool.Run((rows + kRows - 1) / kRows, [&](int64_t task) {
      for (int64_t t = task * kRows; t < std::min(rows, (task + 1) * kRows); ++t) {
        for (int64_t group = 0; group < args.groups; ++group) {
          Row(args.sums, t)[group] = sum(t, group);
        }
      }
    });
  });
}

}  // namespace

void GatedRmsNormForward(Stream& stream, const GatedRmsNormArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const int64_t rows = args.y.dim(0), width = args.y.dim(1) / args.groups;
    pool.Run((rows + kRows - 1) / kRows, [&](int64_t task) {
      float* v = ThreadScratch(width);
      for (int64_t t = task * kRows; t < std::min(rows, (task + 1) * kRows); ++t) {
        for (int64_t group = 0; group < args.groups; ++group) {
          const int64_t begin = group * width;
          const float* y = Row(args.y, t) + begin;
          const float* z = Row(args.z, t) + begin;
          for (int64_t i = 0; i < width; ++i) v[i] = Normed(args, y, z, i);
          const double sum = args.sums.empty() ? ChooseLoops().sum_squares(width, v)
                                               : static_cast<double>(Row(args.sums, t)[group]);
          const double mean = sum / static_cast<double>(GroupWidth(args));
          const auto rstd =
              static_cast<float>(1 / std::sqrt(mean + static_cast<double>(args.epsilon)));
          args.rstd.f32()[t * args.groups + group] = rstd;
          const float* gamma = args.gamma.f32() + begin;
          float* out = Row(args.out, t) + begin;
          for (int64_t i = 0; i < width; ++i) {
            const float gate = args.norm_before_gate ? z[i] * Sigmoid(z[i]) : 1.0f;
            out[i] = v[i] * rstd * gamma[i] * gate;
          }
        }
      }
    });
  });
}

void GatedRmsNormBackward(Stream& stream, const GatedRmsNormBackwardArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const GatedRmsNormArgs& forward = args.forward;
    const int64_t rows = forward.y.dim(0), columns = forward.y.dim(1);
    const int64_t width = columns / forward.groups;
    // gamma's gradient reads dout, which dy may overwrite: it comes first.
    pool.Run((columns + kColumns - 1) / kColumns, [&](int64_t task) {
      const int64_t begin = task * kColumns, n = std::min(kColumns, columns - begin);
      float sums[kColumns] = {};
      for (int64_t t = 0; t < rows; ++t) {
        const float* y = Row(forward.y, t);
        const float* z = Row(forward.z, t);
        const float* dout = Row(args.dout, t);
        for (int64_t i = begin; i < begin + n; ++i) {
          const float rstd = forward.rstd.f32()[t * forward.groups + i / width];
          const float gate = forward.norm_before_gate ? z[i] * Sigmoid(z[i]) : 1.0f;
          sums[i - begin] += dout[i] * gate * Normed(forward, y, z, i) * rstd;
        }
      }
      for (int64_t i = 0; i < n; ++i) args.dgamma.f32()[begin + i] += sums[i];
    });
    pool.Run((rows + kRows - 1) / kRows, [&](int64_t task) {
      for (int64_t t = task * kRows; t < std::min(rows, (task + 1) * kRows); ++t) {
        for (int64_t group = 0; group < forward.groups; ++group) BackwardGroup(args, t, group);
      }
    });
  });
}

void GatedRmsNormSums(Stream& stream, const GatedRmsNormArgs& args) {
  WriteSums(stream, args, [args](int64_t t, int64_t group) {
    const int64_t width = args.y.dim(1) / args.groups, begin = group * width;
    float* v = ThreadScratch(width);
    for (int64_t i = 0; i < width; ++i) {
      v[i] = Normed(args, Row(args.y, t) + begin, Row(args.z, t) + begin, i);
    }
    return static_cast<float>(ChooseLoops().sum_squares(width, v));
  });
}

void GatedRmsNormUnscaled(Stream& stream, const GatedRmsNormArgs& args) {
  WriteSums(stream, args, [args](int64_t t, int64_t group) {
    const int64_t width = args.y.dim(1) / args.groups, begin = group * width;
    const float* gamma = args.gamma.f32() + begin;
    float* out = Row(args.out, t) + begin;
    float* v = ThreadScratch(width);
    for (int64_t i = 0; i < width; ++i) {
      v[i] = Normed(args, Row(args.y, t) + begin, Row(args.z, t) + begin, i);
      out[i] = v[i] * gamma[i];
    }
    return static_cast<float>(ChooseLoops().sum_squares(width, v));
  });
}

void RmsScaleRows(Stream& stream, const RmsScaleRowsArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const int64_t all = args.sums.dim(0);
    const int64_t end = args.first + (args.rows.empty() ? 0 : args.rows.dim(0));
    pool.Run((all + kRows - 1) / kRows, [&](int64_t task) {
      for (int64_t t = task * kRows; t < std::min(all, (task + 1) * kRows); ++t) {
        const double mean =
            static_cast<double>(args.sums.f32()[t]) / static_cast<double>(args.width);
        const auto rstd =
            static_cast<float>(1 / std::sqrt(mean + static_cast<double>(args.epsilon)));
        args.rstd.f32()[t] = rstd;
        if (t < args.first || t >= end) continue;
        float* row = Row(args.rows, t - args.first);
        for (int64_t i = 0; i < args.rows.dim(1); ++i) row[i] *= rstd;
      }
    });
  });
}

void GatedRmsNormBackwardSums(Stream& stream, const GatedRmsNormBackwardArgs& args) {
  WriteSums(stream, args.forward, [args](int64_t t, int64_t group) {
    const int64_t width = args.forward.y.dim(1) / args.forward.groups, begin = group * width;
    if (!args.out.empty()) {
      return ChooseLoops().dot(width, Row(args.dout, t) + begin, Row(args.out, t) + begin);
    }
    float* g = ThreadScratch(2 * width);
    LoadBackward(args, t, group, g, g + width);
    return ChooseLoops().dot(width, g, g + width);
  });
}

}  // namespace muster::kernels::cpu
