// Times host ops at GPT-2 124M shapes (256 tokens), each against a ceiling measured in the same
// run: GEMMs against one of 2048^3, the other ops against a copy of 256 MiB. Prints one line of
// JSON per op and number of threads, with the median of nine.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include "base/check.h"
#include "kernels/activation/activation.h"
#include "kernels/attention/attention.h"
#include "kernels/device/device.h"
#include "kernels/gemm/linear.h"
#include "kernels/loss/cross_entropy.h"
#include "kernels/memory/memory.h"
#include "kernels/norm/norm.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"

namespace muster::kernels {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double MedianSeconds(Stream& stream, const std::function<void()>& op) {
  std::vector<double> seconds;
  for (int i = 0; i < 10; ++i) {
    const double begin = Now();
    op();
    CHECK_OK(stream.Synchronize());
    if (i > 0) seconds.push_back(Now() - begin);  // the first touches memory
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

class Floats {
 public:
  explicit Floats(int64_t n) : data_(n) {
    for (int64_t i = 0; i < n; ++i) data_[i] = static_cast<float>(i % 13 - 6) * 0.1f;
  }
  Tensor View(std::initializer_list<int64_t> shape) {
    return Tensor(data_.data(), DType::kF32, shape);
  }

 private:
  std::vector<float> data_;
};

struct Bench {
  Stream& stream;
  int threads;
  double ceiling_gflops = 0, ceiling_gbps = 0;

  // `work` in FLOPs or bytes.
  void Report(const char* op, bool compute, double work, const std::function<void()>& run) {
    const double rate = work / MedianSeconds(stream, run) / 1e9;
    double& ceiling = compute ? ceiling_gflops : ceiling_gbps;
    if (ceiling == 0) ceiling = rate;
    std::printf("{\"op\": \"%s\", \"threads\": %d, \"%s\": %.1f, \"share_of_ceiling\": %.2f}\n", op,
                threads, compute ? "gflops" : "gb_per_second", rate, rate / ceiling);
  }
};

void Linears(Bench& bench) {
  constexpr int64_t kSize = 2048, kT = 256;
  Floats a(kSize * kSize), b(kSize * kSize), c(kSize * kSize);
  bench.Report("gemm 2048 (ceiling)", true, 2.0 * kSize * kSize * kSize, [&] {
    LinearForward(
        bench.stream,
        {.x = a.View({kSize, kSize}), .w = b.View({kSize, kSize}), .y = c.View({kSize, kSize})});
  });
  for (const auto& shape : {std::pair<int64_t, int64_t>(2304, 768), {768, 3072}, {50304, 768}}) {
    const int64_t n = shape.first, k = shape.second;
    Floats x(kT * k), w(n * k), y(kT * n), dx(kT * k), dw(n * k);
    const double flops = 2.0 * kT * static_cast<double>(n * k);
    char name[64];
    std::snprintf(name, sizeof(name), "linear %lld<-%lld forward", static_cast<long long>(n),
                  static_cast<long long>(k));
    bench.Report(name, true, flops, [&] {
      LinearForward(bench.stream,
                    {.x = x.View({kT, k}), .w = w.View({n, k}), .y = y.View({kT, n})});
    });
    std::snprintf(name, sizeof(name), "linear %lld<-%lld backward", static_cast<long long>(n),
                  static_cast<long long>(k));
    bench.Report(name, true, 2 * flops, [&] {
      LinearBackward(bench.stream, {.dy = y.View({kT, n}),
                                    .x = x.View({kT, k}),
                                    .w = w.View({n, k}),
                                    .dx = dx.View({kT, k}),
                                    .dw = dw.View({n, k})});
    });
  }
}

void Attentions(Bench& bench) {
  constexpr int64_t kS = 1024, kH = 12, kD = 64, kN = kS * kH * kD;
  Floats q(kN), k(kN), v(kN), out(kN), lse(kH * kS), delta(kH * kS), dq(kN), dk(kN), dv(kN);
  const AttentionArgs forward = {.q = q.View({1, kS, kH, kD}),
                                 .k = k.View({1, kS, kH, kD}),
                                 .v = v.View({1, kS, kH, kD}),
                                 .out = out.View({1, kS, kH, kD}),
                                 .lse = lse.View({1, kH, kS})};
  const double flops = 2.0 * kS * kS * kH * kD;  // the causal half of 4 S^2 H D
  bench.Report("attention 1024 forward", true, flops,
               [&] { AttentionForward(bench.stream, forward); });
  bench.Report("attention 1024 backward", true, 2.5 * flops, [&] {
    AttentionBackward(bench.stream, {.forward = forward,
                                     .dout = q.View({1, kS, kH, kD}),
                                     .dq = dq.View({1, kS, kH, kD}),
                                     .dk = dk.View({1, kS, kH, kD}),
                                     .dv = dv.View({1, kS, kH, kD}),
                                     .delta = delta.View({1, kH, kS})});
  });
}

void MemoryBound(Bench& bench) {
  constexpr int64_t kN = int64_t{64} << 20, kT = 4096, kC = 768;
  Floats a(kN), b(kN), c(kN), d(kN);
  bench.Report("copy 256 MiB (ceiling)", false, 8.0 * kN,
               [&] { Copy(bench.stream, a.View({kN}), b.View({kN})); });
  const StepScalars scalars = {.learning_rate = 1e-4f,
                               .beta1_correction = 0.1f,
                               .beta2_correction = 0.05f,
                               .gradient_scale = 1};
  bench.Report("adamw", false, 28.0 * kN, [&] {
    AdamW(bench.stream, {.parameter = a.View({kN}),
                         .gradient = b.View({kN}),
                         .m = c.View({kN}),
                         .v = d.View({kN}),
                         .scalars = &scalars});
  });
  Floats one(1);
  bench.Report("sum of squares", false, 4.0 * kN,
               [&] { SumSquares(bench.stream, b.View({kN}), one.View({1}), false); });
  Floats x(kT * kC), branch(kT * kC), y(kT * kC), gamma(kC), beta(kC), mean(kT), rstd(kT),
      dgamma(kC), dbeta(kC), sum(kT * kC);
  bench.Report("residual + layer norm forward", false, 16.0 * kT * kC, [&] {
    LayerNormForward(bench.stream, {.residual = x.View({kT, kC}),
                                    .branch = branch.View({kT, kC}),
                                    .sum = sum.View({kT, kC}),
                                    .gamma = gamma.View({kC}),
                                    .beta = beta.View({kC}),
                                    .y = y.View({kT, kC}),
                                    .mean = mean.View({kT}),
                                    .rstd = rstd.View({kT})});
  });
  bench.Report("layer norm backward", false, 16.0 * kT * kC, [&] {
    LayerNormBackward(bench.stream, {.dy = y.View({kT, kC}),
                                     .x = sum.View({kT, kC}),
                                     .gamma = gamma.View({kC}),
                                     .mean = mean.View({kT}),
                                     .rstd = rstd.View({kT}),
                                     .dx = branch.View({kT, kC}),
                                     .dgamma = dgamma.View({kC}),
                                     .dbeta = dbeta.View({kC})});
  });
  constexpr int64_t kRows = 256, kV = 50304;
  Floats logits(kRows * kV), losses(kRows);
  std::vector<int32_t> targets(kRows, 7);
  bench.Report("cross-entropy with gradient", false, 8.0 * kRows * kV, [&] {
    CrossEntropy(bench.stream, {.logits = logits.View({kRows, kV}),
                                .targets = Tensor(targets.data(), DType::kI32, {kRows}),
                                .losses = losses.View({kRows}),
                                .vocab = 50257});
  });
  bench.Report("gelu forward", false, 8.0 * kN,
               [&] { GeluForward(bench.stream, a.View({kN}), b.View({kN})); });
}

}  // namespace
}  // namespace muster::kernels

int main() {
  for (int threads : {1, 2}) {
    auto device = muster::kernels::MakeCpuDevice(threads);
    auto stream = device->MakeStream();
    CHECK_OK(stream);
    muster::kernels::Bench bench = {**stream, threads};
    muster::kernels::Linears(bench);
    muster::kernels::Attentions(bench);
    muster::kernels::MemoryBound(bench);
  }
  return 0;
}
