// The clip coefficient and AdamW on the host. All are one pass over memory.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/low_precision.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/step_math.h"
#include "kernels/simd/loops.h"
#include "kernels/tensor.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kRangeElements = 32 * 1024;
void UpdateWhole(const AdamWArgs& args, const AdamWStep& step, int64_t begin, int64_t count) {
  const Loops& loops = ChooseLoops();
  float* parameter = args.parameter.f32();
  loops.adamw(count, step, args.gradient.f32() + begin, parameter + begin, args.m.f32() + begin,
              args.v.f32() + begin);
  if (args.copy.empty()) return;
  if (args.copy.dtype() == DType::kBF16) {
    loops.split_master(count, parameter + begin, args.copy.as<uint16_t>() + begin, nullptr);
    return;
  }
  for (int64_t i = begin; i < begin + count; ++i) WriteFloat(args.copy, i, parameter[i]);
}

void UpdateHalves(const AdamWArgs& args, const AdamWStep& step, int64_t begin, int64_t count) {
  const Loops& loops = ChooseLoops();
  // Master weights are joined for a few at a time, so that they stay in the L1 cache.
  constexpr int64_t kSlice = 2048;
  float master[kSlice];
  for (const int64_t end = begin + count; begin < end; begin += kSlice) {
    const int64_t slice = std::min(kSlice, end - begin);
    uint16_t* upper = args.copy.as<uint16_t>() + begin;
    uint16_t* lower = args.lower.as<uint16_t>() + begin;
    loops.join_master(slice, upper, lower, master);
    loops.adamw(slice, step, args.gradient.f32() + begin, master, args.m.f32() + begin,
                args.v.f32() + begin);
    loops.split_master(slice, master, upper, lower);
  }
}

}  // namespace

void PrepareStep(Stream& stream, const PrepareStepArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) { PrepareStepOn(args, args.values.f32()); });
}

void ClipCoefficient(Stream& stream, Tensor square_sum, float clip_norm, Tensor norm,
                     StepScalars* scalars) {
  EnqueueOnHost(stream, [=](ThreadPool& pool) {
    const float value = std::sqrt(square_sum.f32()[0]);
    norm.f32()[0] = value;
    scalars->gradient_scale = clip_norm > 0 ? std::min(1.0f, clip_norm / (value + 1e-6f)) : 1.0f;
    scalars->skip = std::isfinite(value) ? 0 : 1;
  });
}

void AdamW(Stream& stream, const AdamWArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const StepScalars& scalars = *args.scalars;
    if (scalars.skip != 0) return;
    const AdamWStep step = {.beta1 = args.beta1,
                            .beta2 = args.beta2,
                            .epsilon = args.epsilon,
                            .gradient_scale = scalars.gradient_scale,
                            .step_size = scalars.learning_rate / scalars.beta1_correction,
                            .v_scale = 1.0f / std::sqrt(scalars.beta2_correction),
                            .decay_scale = 1.0f - scalars.learning_rate * args.weight_decay};
    pool.RunRanges(args.m.elements(), kRangeElements, [&](int64_t begin, int64_t count) {
      if (args.lower.empty()) {
        UpdateWhole(args, step, begin, count);
      } else {
        UpdateHalves(args, step, begin, count);
      }
    });
  });
}

void SplitMaster(Stream& stream, Tensor master, Tensor upper, Tensor lower) {
  EnqueueOnHost(stream, [=](ThreadPool& pool) {
    pool.RunRanges(master.elements(), kRangeElements, [&](int64_t begin, int64_t count) {
      ChooseLoops().split_master(count, master.f32() + begin, upper.as<uint16_t>() + begin,
                                 lower.empty() ? nullptr : lower.as<uint16_t>() + begin);
    });
  });
}

void JoinMaster(Stream& stream, Tensor upper, Tensor lower, Tensor master) {
  EnqueueOnHost(stream, [=](ThreadPool& pool) {
    pool.RunRanges(master.elements(), kRangeElements, [&](int64_t begin, int64_t count) {
      ChooseLoops().join_master(count, upper.as<uint16_t>() + begin, lower.as<uint16_t>() + begin,
                                master.f32() + begin);
    });
  });
}

}  // namespace muster::kernels::cpu
