// Sums in a fixed order, the clip coefficient and AdamW on the host. All are one pass over memory.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "base/check.h"
#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/gemm/weight_gradient.h"
#include "kernels/low_precision.h"
#include "kernels/ops_cpu.h"
#include "kernels/optimizer/step_math.h"
#include "kernels/simd/loops.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kChunkElements = 32 * 1024;
constexpr int64_t kPartials = 256;

// Sums `x` in at most kPartials pieces whose borders depend on the length alone.
double Reduce(ThreadPool& pool, const Tensor& x, double total,
              double (*sum)(int64_t, const float*)) {
  const int64_t n = x.elements();
  const int64_t piece = std::max(kChunkElements, (n + kPartials - 1) / kPartials);
  const int64_t pieces = (n + piece - 1) / piece;
  std::array<double, kPartials> partial{};
  pool.Run(pieces, [&](int64_t i) {
    partial[i] = sum(std::min(piece, n - i * piece), x.f32() + i * piece);
  });
  for (int64_t i = 0; i < pieces; ++i) total += partial[i];
  return total;
}

void ReduceTo(ThreadPool& pool, const Tensor& x, const Tensor& out, bool accumulate,
              double (*sum)(int64_t, const float*)) {
  out.f32()[0] = static_cast<float>(Reduce(pool, x, accumulate ? out.f32()[0] : 0.0, sum));
}

void WritePair(double sum, float* pair) {
  pair[0] = static_cast<float>(sum);
  // Nothing is left over of an infinite sum.
  pair[1] = std::isfinite(pair[0]) ? static_cast<float>(sum - pair[0]) : 0.0f;
}

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
  // Whole for as long as it is in the first cache.
  constexpr int64_t kPiece = 2048;
  float master[kPiece];
  for (const int64_t end = begin + count; begin < end; begin += kPiece) {
    const int64_t piece = std::min(kPiece, end - begin);
    uint16_t* upper = args.copy.as<uint16_t>() + begin;
    uint16_t* lower = args.lower.as<uint16_t>() + begin;
    loops.join_master(piece, upper, lower, master);
    loops.adamw(piece, step, args.gradient.f32() + begin, master, args.m.f32() + begin,
                args.v.f32() + begin);
    loops.split_master(piece, master, upper, lower);
  }
}

}  // namespace

void Sum(Stream& stream, Tensor x, Tensor out, bool accumulate) {
  EnqueueOnHost(stream,
                [=](ThreadPool& pool) { ReduceTo(pool, x, out, accumulate, ChooseLoops().sum); });
}

void SumSquares(Stream& stream, Tensor x, Tensor out, bool accumulate) {
  EnqueueOnHost(stream, [=](ThreadPool& pool) {
    ReduceTo(pool, x, out, accumulate, ChooseLoops().sum_squares);
  });
}

void SumSquaresPair(Stream& stream, Tensor x, Tensor out, bool accumulate) {
  EnqueueOnHost(stream, [=](ThreadPool& pool) {
    float* pair = out.f32();
    const double before = accumulate ? static_cast<double>(pair[0]) + pair[1] : 0.0;
    WritePair(Reduce(pool, x, before, ChooseLoops().sum_squares), pair);
  });
}

void SumSquaresPair(Stream& stream, const std::vector<Tensor>& of, Tensor out, bool accumulate) {
  if (!accumulate) cpu::Zero(stream, out);
  for (const Tensor& x : of) cpu::SumSquaresPair(stream, x, out, /*accumulate=*/true);
}

void WeightGradient(Stream& stream, const WeightGradientArgs& args, bool* left) {
  *left = true;
  cpu::LinearBackward(stream,
                      {.dy = args.dy,
                       .x = args.x,
                       .w = Tensor(args.dw.data(), DType::kF32, {args.dw.dim(0), args.dw.dim(1)}),
                       .dw = args.dw,
                       .dbias = args.dbias,
                       .accumulate = args.accumulate});
  cpu::Zero(stream, args.squares);
  cpu::SumSquaresPair(stream, args.dw, args.squares, /*accumulate=*/false);
}

void SumPairs(Stream& stream, Tensor pairs, Tensor out, bool accumulate) {
  EnqueueOnHost(stream, [=](ThreadPool& pool) {
    const double before = accumulate ? static_cast<double>(out.f32()[0]) + out.f32()[1] : 0.0;
    WritePair(Reduce(pool, pairs, before, ChooseLoops().sum), out.f32());
  });
}

void SumParts(Stream& stream, Tensor in, Tensor out) {
  EnqueueOnHost(stream, [=](ThreadPool& pool) {
    const int64_t n = out.elements();
    const int64_t parts = in.elements() / n;
    pool.Run((n + kChunkElements - 1) / kChunkElements, [&](int64_t chunk) {
      const int64_t end = std::min(n, (chunk + 1) * kChunkElements);
      for (int64_t i = chunk * kChunkElements; i < end; ++i) {
        WriteFloat(out, i,
                   SumAsTree(parts, [&](int64_t part) { return ReadAsFloat(in, part * n + i); }));
      }
    });
  });
}

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
    const int64_t n = args.m.elements();
    pool.Run((n + kChunkElements - 1) / kChunkElements, [&](int64_t chunk) {
      const int64_t begin = chunk * kChunkElements;
      const int64_t count = std::min(kChunkElements, n - begin);
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
    const int64_t n = master.elements();
    pool.Run((n + kChunkElements - 1) / kChunkElements, [&](int64_t chunk) {
      const int64_t begin = chunk * kChunkElements;
      ChooseLoops().split_master(std::min(kChunkElements, n - begin), master.f32() + begin,
                                 upper.as<uint16_t>() + begin,
                                 lower.empty() ? nullptr : lower.as<uint16_t>() + begin);
    });
  });
}

void JoinMaster(Stream& stream, Tensor upper, Tensor lower, Tensor master) {
  EnqueueOnHost(stream, [=](ThreadPool& pool) {
    const int64_t n = master.elements();
    pool.Run((n + kChunkElements - 1) / kChunkElements, [&](int64_t chunk) {
      const int64_t begin = chunk * kChunkElements;
      ChooseLoops().join_master(std::min(kChunkElements, n - begin), upper.as<uint16_t>() + begin,
                                lower.as<uint16_t>() + begin, master.f32() + begin);
    });
  });
}

}  // namespace muster::kernels::cpu
