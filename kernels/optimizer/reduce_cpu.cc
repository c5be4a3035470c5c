// Sums in a fixed order on the host, each one pass over memory.
#include "kernels/optimizer/reduce.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/device/host_device.h"
#include "kernels/low_precision.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/step_math.h"
#include "kernels/simd/loops.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(Zero)

namespace cpu {
namespace {

constexpr int64_t kRangeElements = 32 * 1024;
constexpr int64_t kPartials = 256;

// Sums `x` in at most kPartials ranges whose borders depend on the length alone.
double Reduce(ThreadPool& pool, const Tensor& x, double total,
              double (*sum)(int64_t, const float*)) {
  const int64_t n = x.elements();
  const int64_t range = std::max(kRangeElements, (n + kPartials - 1) / kPartials);
  const int64_t ranges = (n + range - 1) / range;
  std::array<double, kPartials> partial{};
  pool.Run(ranges, [&](int64_t i) {
    partial[i] = sum(std::min(range, n - i * range), x.f32() + i * range);
  });
  for (int64_t i = 0; i < ranges; ++i) total += partial[i];
  return total;
}

void ReduceTo(ThreadPool& pool, const Tensor& x, const Tensor& out, bool accumulate,
              double (*sum)(int64_t, const float*)) {
  out.f32()[0] = static_cast<float>(Reduce(pool, x, accumulate ? out.f32()[0] : 0.0, sum));
}

void WritePair(double sum, float* pair) {
  pair[0] = static_cast<float>(sum);
  // An infinite sum has no remainder.
  pair[1] = std::isfinite(pair[0]) ? static_cast<float>(sum - pair[0]) : 0.0f;
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
    pool.RunRanges(n, kRangeElements, [&](int64_t begin, int64_t count) {
      for (int64_t i = begin; i < begin + count; ++i) {
        WriteFloat(out, i,
                   SumAsTree(parts, [&](int64_t part) { return ReadAsFloat(in, part * n + i); }));
      }
    });
  });
}

}  // namespace cpu
}  // namespace muster::kernels
