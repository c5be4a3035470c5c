// Causal depthwise convolution with SiLU on the host. A task owns a slice of the channels of one
// sample, so that every sum over positions has one order.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/device/host_device.h"
#include "kernels/ssm/ssm.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kChannels = 64;  // of a task
constexpr int64_t kTapsMax = 4;

float Sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The inputs of one sample's channels [begin, begin + n): positions below 0 are the halo.
class Inputs {
 public:
  Inputs(const CausalConvArgs& args, int64_t sample, int64_t begin)
      : x_(args.x.f32() + sample * args.x.stride(0) + begin),
        stride_(args.x.stride(1)),
        halo_(args.halo.empty() ? nullptr : args.halo.f32() + sample * args.halo.stride(0) + begin),
        halo_stride_(args.halo.empty() ? 0 : args.halo.stride(1)),
        taps_(args.weight.dim(1)),
        documents_(args.documents.empty()
                       ? nullptr
                       : args.documents.as<int32_t>() + sample * args.documents.stride(0)),
        first_position_(args.first_position) {}

  // The row that tap `k` reads for position `t`, or null: zeros.
  const float* Row(int64_t t, int64_t k) const {
    const int64_t from = t - (taps_ - 1) + k;
    if (documents_ != nullptr && first_position_ + from < documents_[t]) return nullptr;
    if (from >= 0) return x_ + from * stride_;
    return halo_ == nullptr ? nullptr : halo_ + (from + taps_ - 1) * halo_stride_;
  }

 private:
  const float* const x_;
  const int64_t stride_;
  const float* const halo_;
  const int64_t halo_stride_;
  const int64_t taps_;
  const int32_t* const documents_;
  const int64_t first_position_;
};

// The weights of channels [begin, begin + n), by tap.
struct Weights {
  Weights(const CausalConvArgs& args, int64_t begin, int64_t n) {
    const int64_t taps = args.weight.dim(1);
    for (int64_t i = 0; i < n; ++i) {
      bias[i] = args.bias.f32()[begin + i];
      for (int64_t k = 0; k < taps; ++k) tap[k][i] = args.weight.f32()[(begin + i) * taps + k];
    }
  }
  float tap[kTapsMax][kChannels];
  float bias[kChannels];
};

// The convolution's value at position t, in front of SiLU.
void Convolve(const Inputs& inputs, const Weights& weights, int64_t taps, int64_t t, int64_t n,
              float* out) {
  std::copy(weights.bias, weights.bias + n, out);
  for (int64_t k = 0; k < taps; ++k) {
    const float* row = inputs.Row(t, k);
    if (row == nullptr) continue;
    for (int64_t i = 0; i < n; ++i) out[i] += weights.tap[k][i] * row[i];
  }
}

// Calls work(sample, first channel, channels) for every slice of channels of every sample.
template <typename Work>
void ForEachSlice(ThreadPool& pool, int64_t samples, int64_t width, Work work) {
  const int64_t slices = (width + kChannels - 1) / kChannels;
  pool.Run(samples * slices, [&](int64_t task) {
    const int64_t begin = task % slices * kChannels;
    work(task / slices, begin, std::min(kChannels, width - begin));
  });
}

}  // namespace

void CausalConvForward(Stream& stream, const CausalConvArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const int64_t positions = args.x.dim(1), taps = args.weight.dim(1);
    ForEachSlice(pool, args.x.dim(0), args.x.dim(2), [&](int64_t sample, int64_t begin, int64_t n) {
      const Inputs inputs(args, sample, begin);
      const Weights weights(args, begin, n);
      float value[kChannels];
      for (int64_t t = 0; t < positions; ++t) {
        Convolve(inputs, weights, taps, t, n, value);
        float* y = args.y.f32() + sample * args.y.stride(0) + t * args.y.stride(1) + begin;
        for (int64_t i = 0; i < n; ++i) y[i] = value[i] * Sigmoid(value[i]);
      }
    });
  });
}

void CausalConvBackward(Stream& stream, const CausalConvBackwardArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const CausalConvArgs& forward = args.forward;
    const int64_t samples = forward.x.dim(0), positions = forward.x.dim(1);
    const int64_t width = forward.x.dim(2), taps = forward.weight.dim(1), halo = taps - 1;
    // By sample, channel and tap, the last one for the bias; added up below in the samples' order.
    std::vector<float> sums(static_cast<size_t>(samples * width * (taps + 1)));
    ForEachSlice(pool, samples, width, [&](int64_t sample, int64_t begin, int64_t n) {
      const Inputs inputs(forward, sample, begin);
      const Weights weights(forward, begin, n);
      float tap_sums[kTapsMax + 1][kChannels] = {};
      // Gradients of the inputs at the positions that later outputs still add to.
      float pending[kTapsMax][kChannels] = {};
      float value[kChannels];
      // Backwards, so that dx may be written over dy.
      for (int64_t t = positions - 1; t >= -halo; --t) {
        // pending[j]: input at t - j, before this position's output adds to it.
        if (t >= 0) {
          const float* dy =
              args.dy.f32() + sample * args.dy.stride(0) + t * args.dy.stride(1) + begin;
          Convolve(inputs, weights, taps, t, n, value);
          for (int64_t i = 0; i < n; ++i) {
            const float s = Sigmoid(value[i]);
            value[i] = dy[i] * s * (1 + value[i] * (1 - s));
            tap_sums[taps][i] += value[i];
          }
          for (int64_t k = 0; k < taps; ++k) {
            const float* row = inputs.Row(t, k);
            if (row == nullptr) continue;
            float* input = pending[taps - 1 - k];
            for (int64_t i = 0; i < n; ++i) {
              tap_sums[k][i] += value[i] * row[i];
              input[i] += value[i] * weights.tap[k][i];
            }
          }
        }
        float* out = nullptr;
        if (t >= 0) {
          out = args.dx.f32() + sample * args.dx.stride(0) + t * args.dx.stride(1) + begin;
        } else if (!args.d_halo.empty()) {
          out = args.d_halo.f32() + sample * args.d_halo.stride(0) +
                (t + halo) * args.d_halo.stride(1) + begin;
        }
        if (out != nullptr) std::copy(pending[0], pending[0] + n, out);
        for (int64_t j = 0; j + 1 < taps; ++j)
          std::copy(pending[j + 1], pending[j + 1] + n, pending[j]);
        std::fill(pending[taps - 1], pending[taps - 1] + n, 0.0f);
      }
      for (int64_t i = 0; i < n; ++i) {
        float* to = sums.data() + (sample * width + begin + i) * (taps + 1);
        for (int64_t k = 0; k <= taps; ++k) to[k] = tap_sums[k][i];
      }
    });
    for (int64_t w = 0; w < width; ++w) {
      for (int64_t k = 0; k <= taps; ++k) {
        float sum = 0;
        for (int64_t sample = 0; sample < samples; ++sample) {
          sum += sums[static_cast<size_t>((sample * width + w) * (taps + 1) + k)];
        }
        (k < taps ? args.dweight.f32()[w * taps + k] : args.dbias.f32()[w]) += sum;
      }
    }
  });
}

}  // namespace muster::kernels::cpu
