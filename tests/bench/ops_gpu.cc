// Times every CUDA op at the shapes of GPT-2 124M (64 x 1024) and 1558M (16 x 1024), and SwiGLU's
// GEMMs at those of Llama 1B (4 x 4096) and 3B (2 x 4096). Two ceilings are measured in the same
// run: a device copy (bytes read plus written) and an 8192^3 GEMM. Attention is timed as the engine
// chooses it and with our own kernels alone. gpu_test checks correctness. Usage: bench_ops_gpu
// [--plans FOLDER] [--runs N]
//                      [--only attention|norms|embedding|losses|rotary]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "kernels/activation/activation.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/rotary.h"
#include "kernels/device/device.h"
#include "kernels/embedding/embedding.h"
#include "kernels/gemm/linear.h"
#include "kernels/loss/cross_entropy.h"
#include "kernels/memory/memory.h"
#include "kernels/norm/norm.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/random/dropout.h"
#include "kernels/tensor.h"
#include "tests/bench/op_bench.h"

namespace muster::kernels {
namespace {

struct Model {
  const char* name;
  int64_t batch, sequence, width, heads, parameters;
};
constexpr Model kModels[] = {{"gpt2-124m 64x1024", 64, 1024, 768, 12, 124'475'904},
                             {"gpt2-1558m 16x1024", 16, 1024, 1600, 25, 1'557'686'400 / 4}};
constexpr int64_t kVocab = 50304;
constexpr int64_t kRealVocab = 50257;

constexpr DType kAct = DType::kBF16;
constexpr DType kF32 = DType::kF32;

void Norms(Bench& bench, const Model& m) {
  const int64_t t = m.batch * m.sequence, c = m.width;
  Tensor residual = bench.Random(kAct, {t, c}), branch = bench.Random(kAct, {t, c});
  Tensor sum = bench.Empty(kAct, {t, c}), y = bench.Empty(kAct, {t, c});
  Tensor gamma = bench.Random(kAct, {c}), beta = bench.Random(kAct, {c});
  Tensor mean = bench.Empty(kF32, {t}), rstd = bench.Empty(kF32, {t});
  Tensor dgamma = bench.Random(kF32, {c}), dbeta = bench.Random(kF32, {c});
  const double bytes = 4.0 * y.bytes();
  bench.Bytes("layer norm forward + residual", bytes, [&](Stream& s) {
    LayerNormForward(s, {.residual = residual,
                         .branch = branch,
                         .sum = sum,
                         .gamma = gamma,
                         .beta = beta,
                         .y = y,
                         .mean = mean,
                         .rstd = rstd});
  });
  bench.Bytes("layer norm backward", bytes, [&](Stream& s) {
    LayerNormBackward(s, {.dy = y,
                          .x = sum,
                          .gamma = gamma,
                          .mean = mean,
                          .rstd = rstd,
                          .dx = branch,
                          .dgamma = dgamma,
                          .dbeta = dbeta});
  });
  bench.Clear();
}

void Elementwise(Bench& bench, const Model& m) {
  const int64_t t = m.batch * m.sequence, c = m.width;
  Tensor x = bench.Random(kAct, {t, 4 * c}), y = bench.Empty(kAct, {t, 4 * c});
  bench.Bytes("gelu forward", 2.0 * x.bytes(), [&](Stream& s) { GeluForward(s, x, y); });
  bench.Bytes("gelu backward, in place", 3.0 * x.bytes(),
              [&](Stream& s) { GeluBackward(s, x, y, y); });
  Tensor hidden = x.Rows(0, t / 4).Reshape({t, c}), sample = bench.Upload({7, 0});
  bench.Bytes("dropout, in place", 2.0 * hidden.bytes(), [&](Stream& s) {
    Dropout(
        s,
        {.x = hidden, .out = hidden, .probability = 0.1, .sample = sample, .sequence = m.sequence});
  });
  Tensor wide = bench.Random(kF32, {t, 2 * c});
  bench.Bytes("cast fp32 to bf16", 1.5 * wide.bytes(), [&](Stream& s) {
    Cast(s, wide, y.Rows(0, t / 2).Reshape({t, 2 * c}));
  });
  bench.Bytes("zero", wide.bytes(), [&](Stream& s) { Zero(s, wide); });
  bench.Clear();
}

void Embeddings(Bench& bench, const Model& m) {
  const int64_t t = m.batch * m.sequence, c = m.width;
  const std::vector<int32_t> ids = Bench::Tokens(t, kRealVocab);
  const auto distinct = static_cast<double>(std::set<int32_t>(ids.begin(), ids.end()).size());
  Tensor tokens = bench.Upload(ids), groups = bench.Empty(DType::kI32, {2, t});
  Tensor wte = bench.Random(kAct, {kVocab, c}), wpe = bench.Random(kAct, {m.sequence, c});
  Tensor out = bench.Random(kAct, {t, c});
  Tensor d_wte = bench.Random(kF32, {kVocab, c}), d_wpe = bench.Random(kF32, {m.sequence, c});
  // Counts one row read and one written per token, although repeated rows come from the cache.
  bench.Bytes("embedding forward", 2.0 * out.bytes(),
              [&](Stream& s) { EmbeddingForward(s, tokens, wte, wpe, m.sequence, out); });
  bench.Latency("grouping of the tokens",
                [&](Stream& s) { GroupTokens(s, tokens, kVocab, groups); });
  // Counts the gradient once, and the table rows that occur as read and written.
  const double d = static_cast<double>(out.bytes()), token_rows = 8.0 * distinct * c,
               position_rows = 2.0 * d_wpe.bytes();
  bench.Bytes("embedding backward, tokens", d + token_rows,
              [&](Stream& s) { EmbeddingBackward(s, groups, out, m.sequence, d_wte, Tensor()); });
  bench.Bytes("embedding backward, positions", d + position_rows,
              [&](Stream& s) { EmbeddingBackward(s, Tensor(), out, m.sequence, Tensor(), d_wpe); });
  // Counts the gradient twice, because the sums of the two tables read it in different orders.
  bench.Bytes("embedding backward, both", 2 * d + token_rows + position_rows,
              [&](Stream& s) { EmbeddingBackward(s, groups, out, m.sequence, d_wte, d_wpe); });
  bench.Clear();
}

// Shapes that the models of kModels do not have.
void NormWidths(Bench& bench) {
  for (const int64_t c : {1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 8192}) {
    std::printf("-- width %lld\n", static_cast<long long>(c));
    Norms(bench, {"", 16, 1024, c, 1, 0});
    const int64_t t = 16384;
    Tensor dy = bench.Random(kAct, {t, c}), x = bench.Random(kAct, {t, c}),
           dx = bench.Random(kAct, {t, c}), gamma = bench.Random(kAct, {c});
    Tensor rstd = bench.Random(kF32, {t}, 1e-3f), dgamma = bench.Random(kF32, {c});
    bench.Bytes("rms norm forward", 2.0 * x.bytes(), [&](Stream& s) {
      RmsNormForward(s, {.residual = x, .gamma = gamma, .y = dy, .rstd = rstd});
    });
    bench.Bytes("rms norm backward", 4.0 * dy.bytes(), [&](Stream& s) {
      RmsNormBackward(s,
                      {.dy = dy, .x = x, .gamma = gamma, .rstd = rstd, .dx = dx, .dgamma = dgamma});
    });
    bench.Clear();
  }
}

// Queries and keys are strided views of packed heads, as in Llama 1B (4 x 4096) and 3B (2 x 4096).
void Rotations(Bench& bench) {
  struct Work {
    int64_t batch, sequence, heads, key_heads, width;
  };
  for (const Work& w : {Work{4, 4096, 32, 8, 64}, Work{2, 4096, 24, 8, 128}}) {
    const int64_t turned = w.heads + w.key_heads, row = (turned + w.key_heads) * w.width;
    Tensor qkv = bench.Random(kAct, {w.batch * w.sequence, row});
    Tensor table = bench.Random(kF32, {w.sequence, w.width});
    const Tensor x(qkv.data(), kAct, {w.batch, w.sequence, turned, w.width},
                   {w.sequence * row, row, w.width, 1});
    bench.Bytes("rotary, heads of " + std::to_string(w.width), 2.0 * x.bytes(),
                [&](Stream& s) { Rotary(s, x, table, /*inverse=*/false); });
    bench.Clear();
  }
}

// Logits have `stored` columns, of which `vocab` are real and the rest padding.
void Losses(Bench& bench, int64_t t, int64_t stored, int64_t vocab) {
  Tensor logits = bench.Random(kAct, {t, stored}),
         targets = bench.Upload(Bench::Tokens(t, static_cast<int32_t>(vocab)));
  Tensor losses = bench.Empty(kF32, {t});
  bench.Bytes("cross-entropy with gradient", 2.0 * logits.bytes(), [&](Stream& s) {
    CrossEntropy(s, {.logits = logits,
                     .targets = targets,
                     .losses = losses,
                     .vocab = vocab,
                     .scale = 1.0f / 65536});
  });
  bench.Clear();
}

void Optimizer(Bench& bench, const Model& m) {
  const int64_t n = m.parameters;
  Tensor p = bench.Random(kF32, {n}), g = bench.Random(kF32, {n}),
         mm = bench.Random(kF32, {n}, 0.1f);
  Tensor v = bench.Empty(kF32, {n}), copy = bench.Empty(kAct, {n}), sum = bench.Empty(kF32, {1});
  Tensor scalars = bench.Empty(DType::kU8, {sizeof(StepScalars)});
  StepScalars host{1e-4f, 0.1f, 0.05f, 1, 0};
  bench.Time([&](Stream& s) {
    Zero(s, v);
    Copy(s, Tensor(&host, DType::kU8, {sizeof(host)}), scalars);
  });
  bench.Bytes("sum of squares", 4.0 * n, [&](Stream& s) { SumSquares(s, g, sum, false); });
  bench.Bytes("adamw", 30.0 * n, [&](Stream& s) {
    AdamW(s, {.parameter = p,
              .gradient = g,
              .m = mm,
              .v = v,
              .copy = copy,
              .weight_decay = 0.1f,
              .scalars = static_cast<const StepScalars*>(scalars.data())});
  });
  Tensor lower = bench.Empty(DType::kU16, {n});
  bench.Time([&](Stream& s) { SplitMaster(s, p, copy, lower); });
  bench.Bytes("adamw, split master weights", 28.0 * n, [&](Stream& s) {
    AdamW(s, {.gradient = g,
              .m = mm,
              .v = v,
              .copy = copy,
              .lower = lower,
              .weight_decay = 0.1f,
              .scalars = static_cast<const StepScalars*>(scalars.data())});
  });
  bench.Clear();
}

void LinearLayer(Bench& bench, const std::string& name, int64_t t, int64_t k, int64_t n, bool bias,
                 bool gelu, bool gelu_in_front) {
  Tensor x = bench.Random(kAct, {t, k}), w = bench.Random(kAct, {n, k}, 0.02f);
  Tensor b = bias ? bench.Random(kAct, {n}) : Tensor();
  Tensor y = bench.Random(kAct, {t, n}), pre = gelu ? bench.Empty(kAct, {t, n}) : Tensor();
  Tensor dx = bench.Empty(kAct, {t, k}),
         before = gelu_in_front ? bench.Random(kAct, {t, k}) : Tensor();
  Tensor dw = bench.Random(kF32, {n, k}), db = bias ? bench.Random(kF32, {n}) : Tensor();
  const double flops = 2.0 * t * k * n;
  bench.Flops(name + " backward", 2 * flops, [&](Stream& s) {
    LinearBackward(s, {.dy = y, .x = x, .w = w, .dx = dx, .pre = before, .dw = dw, .dbias = db});
  });
  bench.Flops(name + " forward", flops, [&](Stream& s) {
    LinearForward(s, {.x = x,
                      .w = w,
                      .bias = b,
                      .y = y,
                      .epilogue = gelu ? Epilogue::kGelu : Epilogue::kNone,
                      .pre = pre});
  });
  bench.Clear();
}

void Linears(Bench& bench, const Model& m) {
  const int64_t t = m.batch * m.sequence, c = m.width;
  LinearLayer(bench, "qkv + bias", t, c, 3 * c, true, false, false);
  LinearLayer(bench, "projection + bias", t, c, c, true, false, false);
  LinearLayer(bench, "mlp up + bias + gelu", t, c, 4 * c, true, true, false);
  LinearLayer(bench, "mlp down + bias, gelu'", t, 4 * c, c, true, false, true);
  LinearLayer(bench, "head", t, c, kVocab, false, false, false);
}

// Counts the FLOPs of the GEMMs alone.
void GatedLayers(Bench& bench, int64_t t, int64_t c, int64_t f) {
  Tensor x = bench.Random(kAct, {t, c}), w = bench.Random(kAct, {2 * f, c}, 0.02f);
  Tensor packed = bench.Random(kAct, {t, 2 * f}), y = bench.Random(kAct, {t, f});
  Tensor down = bench.Random(kAct, {c, f}, 0.02f), d_packed = bench.Empty(kAct, {t, 2 * f});
  const double flops = 2.0 * t * c * f;
  bench.Flops("mlp up, swiglu forward", 2 * flops, [&](Stream& s) {
    LinearForward(s, {.x = x, .w = w, .y = y, .epilogue = Epilogue::kSwiglu, .pre = packed});
  });
  for (bool recompute : {false, true}) {
    bench.Flops(recompute ? "mlp down, swiglu' and again" : "mlp down, swiglu' to input", flops,
                [&](Stream& s) {
                  LinearBackward(s, {.dy = x,
                                     .x = recompute ? y : Tensor(),
                                     .w = down,
                                     .dx = y,
                                     .recompute_x = recompute,
                                     .packed = packed,
                                     .d_packed = d_packed});
                });
  }
  bench.Clear();
}

void Attentions(Bench& bench, const Model& m) {
  const int64_t b = m.batch, s = m.sequence, h = m.heads, d = m.width / m.heads, c = m.width;
  Tensor qkv = bench.Random(kAct, {b * s, 3 * c}), dqkv = bench.Empty(kAct, {b * s, 3 * c});
  const auto part = [&](const Tensor& packed, int i) {
    auto* data = static_cast<uint16_t*>(packed.data()) + i * c;
    return Tensor(data, kAct, {b, s, h, d}, {s * 3 * c, 3 * c, d, 1});
  };
  const AttentionArgs forward{.q = part(qkv, 0),
                              .k = part(qkv, 1),
                              .v = part(qkv, 2),
                              .out = bench.Empty(kAct, {b, s, h, d}),
                              .lse = bench.Empty(kF32, {b, h, s})};
  AttentionBackwardArgs backward{.forward = forward,
                                 .dout = bench.Random(kAct, {b, s, h, d}),
                                 .dq = part(dqkv, 0),
                                 .dk = part(dqkv, 1),
                                 .dv = part(dqkv, 2),
                                 .delta = bench.Empty(kF32, {b, h, s})};
  const double flops = 4.0 * b * h * s * s * d / 2;  // the causal half
  bench.Flops("attention forward", flops, [&](Stream& st) { AttentionForward(st, forward); });
  bench.Flops("attention backward", 2.5 * flops,
              [&](Stream& st) { AttentionBackward(st, backward); });
  backward.deterministic = false;
  bench.Flops("attention backward, any order", 2.5 * flops,
              [&](Stream& st) { AttentionBackward(st, backward); });
  bench.Clear();
}

struct AttentionWork {
  int64_t batch, sequence, heads, key_heads, width;
  int64_t document = 0;  // mean tokens of a document; 0 = the sample is one document
  bool causal = true;
};
constexpr AttentionWork kAttentionWorks[] = {
    {64, 1024, 12, 12, 64},         {8, 2048, 32, 8, 64},       {4, 4096, 32, 8, 64},
    {4, 4096, 32, 8, 64, 0, false}, {2, 4096, 24, 8, 128},      {1, 16384, 32, 8, 64},
    {1, 32768, 32, 8, 64},          {4, 4096, 32, 8, 64, 1000}, {1, 32768, 32, 8, 64, 1000},
    {2, 4096, 24, 8, 128, 1000}};

// Draws document boundaries (lengths are uniform in [1/2, 3/2] x `work.document`) and counts the
// pairs of a query and a key in the same document, causally, over all samples.
std::vector<int32_t> BeginsOf(const AttentionWork& work, double* pairs) {
  std::vector<int32_t> begins;
  std::mt19937 random(3);
  *pairs = 0;
  for (int64_t b = 0; b < work.batch; ++b) {
    int64_t begin = 0, end = work.document > 0 ? 0 : work.sequence;
    for (int64_t i = 0; i < work.sequence; ++i) {
      if (i == end) {
        begin = i;
        end = i + work.document / 2 + static_cast<int64_t>(random() % work.document);
      }
      begins.push_back(static_cast<int32_t>(begin));
      *pairs += static_cast<double>(work.causal ? i - begin + 1 : work.sequence);
    }
  }
  return begins;
}

// Rates count the pairs of query and key that are not masked, and the five GEMMs of a backward
// pass.
void AttentionOf(Bench& bench, const AttentionWork& work, const std::string& who) {
  const int64_t b = work.batch, s = work.sequence, h = work.heads, g = work.key_heads,
                d = work.width, row = (h + 2 * g) * d;
  Tensor qkv = bench.Random(kAct, {b * s, row}), dqkv = bench.Empty(kAct, {b * s, row});
  const auto part = [&](const Tensor& packed, int64_t head, int64_t heads) {
    auto* data = static_cast<uint16_t*>(packed.data()) + head * d;
    return Tensor(data, kAct, {b, s, heads, d}, {s * row, row, d, 1});
  };
  double pairs = 0;
  const std::vector<int32_t> begins = BeginsOf(work, &pairs);
  AttentionArgs forward{.q = part(qkv, 0, h),
                        .k = part(qkv, h, g),
                        .v = part(qkv, h + g, g),
                        .out = bench.Empty(kAct, {b, s, h, d}),
                        .lse = bench.Empty(kF32, {b, h, s}),
                        .causal = work.causal};
  if (work.document > 0) forward.documents = bench.Upload(begins).Reshape({b, s});
  AttentionBackwardArgs backward{.forward = forward,
                                 .dout = bench.Random(kAct, {b, s, h, d}),
                                 .dq = part(dqkv, 0, h),
                                 .dk = part(dqkv, h, g),
                                 .dv = part(dqkv, h + g, g),
                                 .delta = bench.Empty(kF32, {b, h, s})};
  const double flops = 4.0 * pairs * h * d;
  bench.Flops(who + " forward", flops, [&](Stream& st) { AttentionForward(st, forward); });
  bench.Flops(who + " backward", 2.5 * flops, [&](Stream& st) { AttentionBackward(st, backward); });
  if (work.document == 0) {
    backward.deterministic = false;
    bench.Flops(who + " backward, any order", 2.5 * flops,
                [&](Stream& st) { AttentionBackward(st, backward); });
  }
  bench.Clear();
}

// Times the kernel that the engine chooses, and our own.
void AttentionWorks(Bench& bench, Bench& own) {
  for (const AttentionWork& work : kAttentionWorks) {
    std::printf("-- attention %lldx%lld, %lld heads (%lld) of %lld%s%s\n",
                static_cast<long long>(work.batch), static_cast<long long>(work.sequence),
                static_cast<long long>(work.heads), static_cast<long long>(work.key_heads),
                static_cast<long long>(work.width), work.causal ? "" : ", all keys",
                work.document > 0 ? absl::StrCat(", documents of ", work.document).c_str() : "");
    AttentionOf(bench, work, "chosen");
    if (work.document == 0) AttentionOf(own, work, "our own");
    std::fflush(stdout);
  }
}

int Main(int argc, char** argv) {
  CudaOptions options;
  int runs = 15;
  std::string only;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--plans") == 0) options.plan_cache = argv[i + 1];
    if (std::strcmp(argv[i], "--only") == 0) only = argv[i + 1];
    if (std::strcmp(argv[i], "--runs") == 0) runs = std::max(1, std::atoi(argv[i + 1]));
  }
  const auto wanted = [&](const char* part) { return only.empty() || only == part; };
  auto device = MakeCudaDevice(0, options);
  if (!device.ok()) {
    std::fprintf(stderr, "NO GPU, NOT MEASURED: %s\n", device.status().ToString().c_str());
    return 0;
  }
  std::printf("%s, median of %d runs; last column: of the ceiling\n", (*device)->name().c_str(),
              runs);
  Bench bench(**device, runs);
  Ceilings(bench);
  if (wanted("attention")) {
    options.own_attention = true;
    auto own_device = MakeCudaDevice(0, options);
    CHECK_OK(own_device);
    Bench own(**own_device, runs);
    own.UseCeilingsOf(bench);
    AttentionWorks(bench, own);
  }
  for (const Model& model : kModels) {
    std::printf("-- %s\n", model.name);
    if (wanted("norms")) Norms(bench, model);
    if (wanted("embedding")) Embeddings(bench, model);
    if (wanted("losses")) Losses(bench, 16384, kVocab, kRealVocab);
    if (!only.empty()) continue;
    Elementwise(bench, model);
    Optimizer(bench, model);
    Attentions(bench, model);
    Linears(bench, model);
    std::fflush(stdout);
  }
  if (wanted("norms")) NormWidths(bench);
  if (wanted("losses")) {
    std::printf("-- vocabulary of llama-1b and -3b, a chunk of 4096 tokens\n");
    Losses(bench, 4096, 128256, 128256);
  }
  if (wanted("rotary")) Rotations(bench);
  if (!only.empty()) return 0;
  std::printf("-- llama-1b 4x4096\n");
  GatedLayers(bench, 16384, 2048, 8192);
  std::printf("-- llama-3b 2x4096\n");
  GatedLayers(bench, 8192, 3072, 8192);
  return 0;
}

}  // namespace
}  // namespace muster::kernels

int main(int argc, char** argv) { return muster::kernels::Main(argc, argv); }
