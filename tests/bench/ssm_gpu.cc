// Times the ops of Mamba-2 at the shapes of common models, beside the rate of a device copy that is
// measured in the same run. A rate counts the bytes that the op cannot avoid: each tensor of
// activations once, and the states in front of chunks once. gpu_test checks correctness.
// Usage: bench_ssm_gpu [--runs N]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/check.h"
#include "kernels/device/device.h"
#include "kernels/ssm/ssm.h"
#include "kernels/tensor.h"
#include "tests/bench/op_bench.h"

namespace muster::kernels {
namespace {

constexpr DType kAct = DType::kBF16;
constexpr DType kF32 = DType::kF32;

// A layer: batch, sequence, heads, groups, head width, state columns, chunk.
struct Layer {
  const char* name;
  int64_t b, s, h, g, p, n, chunk;

  int64_t width() const { return h * p + 2 * g * n; }  // of the convolution
  double row_bytes(int64_t columns) const { return 2.0 * static_cast<double>(b * s * columns); }
};
constexpr Layer kLayers[] = {{"mamba2-130m 32x1024", 32, 1024, 24, 1, 64, 128, 128},
                             {"mamba2-780m 8x2048", 8, 2048, 48, 1, 64, 128, 128},
                             {"mamba2-2.7b 4x2048", 4, 2048, 80, 1, 64, 128, 128},
                             {"mamba2-1.3b 4x4096", 4, 4096, 64, 1, 64, 128, 128},
                             {"mamba2-780m 1x32768", 1, 32768, 48, 1, 64, 128, 128},
                             {"mamba2-130m 1x262144", 1, 262144, 24, 1, 64, 128, 128},
                             {"8 groups 2x2048", 2, 2048, 128, 8, 64, 128, 128},
                             {"head width 128 8x2048", 8, 2048, 24, 1, 128, 64, 128},
                             {"head width 128, state 128 8x2048", 8, 2048, 24, 1, 128, 128, 128},
                             {"head width 80 8x2048", 8, 2048, 40, 1, 80, 128, 128},
                             {"head width 32, state 16 8x2048", 8, 2048, 96, 1, 32, 16, 128},
                             {"state 64 8x2048", 8, 2048, 48, 1, 64, 64, 128},
                             {"state 256 8x2048", 8, 2048, 48, 1, 64, 256, 128}};

void Scan(Bench& bench, const Layer& l) {
  const auto slice = [&](const Tensor& rows, int64_t begin, int64_t slots, int64_t size) {
    return Tensor(static_cast<char*>(rows.data()) + begin * 2, kAct, {l.b, l.s, slots, size},
                  {l.s * l.width(), l.width(), size, 1});
  };
  const int64_t chunks = (l.s + l.chunk - 1) / l.chunk, inner = l.h * l.p;
  const Tensor rows = bench.Random(kAct, {l.b, l.s, l.width()});
  const Tensor gradients = bench.Empty(kAct, {l.b, l.s, l.width()});
  SsdArgs args = {.x = slice(rows, 0, l.h, l.p),
                  .dt = bench.Random(kAct, {l.b, l.s, l.h}),
                  .b = slice(rows, inner, l.g, l.n),
                  .c = slice(rows, inner + l.g * l.n, l.g, l.n),
                  .dt_bias = bench.Random(kF32, {l.h}),
                  .a_log = bench.Random(kF32, {l.h}),
                  .d = bench.Random(kF32, {l.h}),
                  .chunk = l.chunk,
                  .y = bench.Empty(kAct, {l.b, l.s, l.h, l.p}),
                  .states = bench.Empty(kAct, {l.b, chunks, l.h, l.p * l.n})};
  const double states = static_cast<double>(args.states.bytes()), x = l.row_bytes(inner);
  bench.Bytes("scan forward", 2 * x + states, [&](Stream& s) { SsdForward(s, args); });
  const SsdBackwardArgs backward = {.forward = args,
                                    .dy = bench.Random(kAct, {l.b, l.s, l.h, l.p}),
                                    .dx = slice(gradients, 0, l.h, l.p),
                                    .ddt = bench.Empty(kAct, {l.b, l.s, l.h}),
                                    .db = slice(gradients, inner, l.g, l.n),
                                    .dc = slice(gradients, inner + l.g * l.n, l.g, l.n),
                                    .d_dt_bias = bench.Random(kF32, {l.h}),
                                    .d_a_log = bench.Random(kF32, {l.h}),
                                    .dd = bench.Random(kF32, {l.h})};
  bench.Bytes("scan backward", 3 * x + states, [&](Stream& s) { SsdBackward(s, backward); });
  bench.Clear();
}

void Convolution(Bench& bench, const Layer& l) {
  const int64_t w = l.width();
  const CausalConvArgs args = {.x = bench.Random(kAct, {l.b, l.s, w}),
                               .weight = bench.Random(kF32, {w, 4}, 0.5f),
                               .bias = bench.Random(kF32, {w}),
                               .y = bench.Empty(kAct, {l.b, l.s, w})};
  bench.Bytes("convolution", 2 * l.row_bytes(w), [&](Stream& s) { CausalConvForward(s, args); });
  const CausalConvBackwardArgs backward = {.forward = args,
                                           .dy = bench.Random(kAct, {l.b, l.s, w}),
                                           .dx = bench.Empty(kAct, {l.b, l.s, w}),
                                           .dweight = bench.Random(kF32, {w, 4}),
                                           .dbias = bench.Random(kF32, {w})};
  bench.Bytes("convolution backward", 3 * l.row_bytes(w),
              [&](Stream& s) { CausalConvBackward(s, backward); });
  bench.Clear();
}

void Norm(Bench& bench, const Layer& l) {
  const int64_t t = l.b * l.s, w = l.h * l.p;
  const GatedRmsNormArgs args = {.y = bench.Random(kAct, {t, w}),
                                 .z = bench.Random(kAct, {t, w}),
                                 .gamma = bench.Random(kF32, {w}),
                                 .out = bench.Empty(kAct, {t, w}),
                                 .rstd = bench.Empty(kF32, {t, l.g}),
                                 .groups = l.g};
  bench.Bytes("gated norm", 3 * l.row_bytes(w), [&](Stream& s) { GatedRmsNormForward(s, args); });
  const GatedRmsNormBackwardArgs backward = {.forward = args,
                                             .dout = bench.Random(kAct, {t, w}),
                                             .dy = bench.Empty(kAct, {t, w}),
                                             .dz = bench.Empty(kAct, {t, w}),
                                             .dgamma = bench.Random(kF32, {w})};
  bench.Bytes("gated norm backward", 5 * l.row_bytes(w),
              [&](Stream& s) { GatedRmsNormBackward(s, backward); });
  bench.Clear();
}

int Main(int argc, char** argv) {
  int runs = 7;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--runs") == 0) runs = std::max(1, std::atoi(argv[i + 1]));
  }
  auto device = MakeCudaDevice(0, {});
  if (!device.ok()) {
    std::fprintf(stderr, "%s\n", device.status().ToString().c_str());
    return 1;
  }
  Bench bench(**device, runs);
  Copies(bench);
  for (const Layer& layer : kLayers) {
    std::printf("-- %s\n", layer.name);
    Scan(bench, layer);
    Convolution(bench, layer);
    Norm(bench, layer);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace muster::kernels

int main(int argc, char** argv) { return muster::kernels::Main(argc, argv); }
