// Rotary position embedding on the host.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/attention/rotary.h"
#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/tensor.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kRows = 16;

double Frequency(const RotaryTableArgs& args, int64_t i, int64_t width) {
  const double frequency = std::pow(static_cast<double>(args.theta),
                                    -2.0 * static_cast<double>(i) / static_cast<double>(width));
  const RotaryScaling& scaling = args.scaling;
  if (scaling.factor == 1) return frequency;
  const auto factor = static_cast<double>(scaling.factor);
  const auto low = static_cast<double>(scaling.low_frequency_factor);
  const auto high = static_cast<double>(scaling.high_frequency_factor);
  // How often the wave fits into the context that the model was first trained on.
  const double turns = static_cast<double>(scaling.original_context) * frequency / (2 * M_PI);
  const double keep = std::clamp((turns - low) / (high - low), 0.0, 1.0);
  return keep * frequency + (1 - keep) * frequency / factor;
}

}  // namespace

void RotaryTable(Stream& stream, const RotaryTableArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const int64_t rows = args.table.dim(0), width = args.table.dim(1), half = width / 2;
    pool.Run((rows + kRows - 1) / kRows, [&](int64_t task) {
      double frequency[1024];
      for (int64_t first = 0; first < half; first += 1024) {
        const int64_t count = std::min<int64_t>(1024, half - first);
        for (int64_t i = 0; i < count; ++i) frequency[i] = Frequency(args, first + i, width);
        for (int64_t row = task * kRows; row < std::min(rows, (task + 1) * kRows); ++row) {
          const int64_t position = args.positions.empty() ? args.first_position + row
                                                          : args.positions.as<int32_t>()[row];
          float* out = args.table.f32() + row * width + first;
          for (int64_t i = 0; i < count; ++i) {
            const double angle = static_cast<double>(position) * frequency[i];
            out[i] = static_cast<float>(std::cos(angle));
            out[half + i] = static_cast<float>(std::sin(angle));
          }
        }
      }
    });
  });
}

void Rotary(Stream& stream, Tensor x, Tensor table, bool inverse) {
  EnqueueOnHost(stream, [x, table, inverse](ThreadPool& pool) {
    const int64_t batch = x.dim(0), sequence = x.dim(1), heads = x.dim(2), width = x.dim(3);
    const int64_t half = width / 2, tokens = batch * sequence;
    const float sign = inverse ? -1.0f : 1.0f;
    pool.Run((tokens + kRows - 1) / kRows, [&](int64_t task) {
      for (int64_t t = task * kRows; t < std::min(tokens, (task + 1) * kRows); ++t) {
        const float* cosine = table.f32() + (t % sequence) * width;
        const float* sine = cosine + half;
        for (int64_t head = 0; head < heads; ++head) {
          float* row = x.f32() + t / sequence * x.stride(0) + t % sequence * x.stride(1) +
                       head * x.stride(2);
          for (int64_t i = 0; i < half; ++i) {
            const float a = row[i], b = row[half + i], s = sign * sine[i];
            row[i] = a * cosine[i] - b * s;
            row[half + i] = b * cosine[i] + a * s;
          }
        }
      }
    });
  });
}

}  // namespace muster::kernels::cpu
