#include "kernels/attention_workspace.h"
#include "tests/gpu/support.h"

namespace muster::kernels {
namespace {

struct Shape {
  int64_t batch, queries, keys, heads, key_heads, width;
  bool causal;
};

class AttentionGpuTest : public GpuTest, public ::testing::WithParamInterface<bool> {
 protected:
  AttentionGpuTest() { options_.own_attention = GetParam(); }
};

// 16-bit attention rounds the probabilities and the scores' gradients to 16 bits before the second
// product, as a plain 16-bit implementation does: their share of the error, in units of the
// rounding of a result.
double Slack(DType dtype) {
  if (dtype == DType::kF32) return 5e-6;
  return dtype == DType::kBF16 ? 4e-3 : 6e-4;
}

TEST_P(AttentionGpuTest, ForwardAndBackward_PackedGroupedAndOddShapes_MatchTheHost) {
  const std::vector<Shape> shapes = {
      {2, 37, 37, 3, 3, 64, true},  {1, 200, 200, 4, 2, 64, true}, {2, 129, 129, 4, 1, 128, true},
      {1, 64, 64, 2, 2, 40, true},  {1, 70, 33, 2, 1, 64, false},  {1, 33, 33, 1, 1, 13, true},
      {1, 40, 40, 2, 2, 256, true}, {2, 256, 256, 2, 2, 96, false}};
  for (DType dtype : FloatTypes()) {
    for (const Shape& s : shapes) {
      const std::string what =
          absl::StrCat(Name(dtype), " S=", s.queries, " H=", s.heads, " G=", s.key_heads,
                       " D=", s.width, s.causal ? " causal" : "");
      const int64_t q_width = s.heads * s.width, kv_width = s.key_heads * s.width;
      // q, k and v interleaved in one row where they have the same rows, as a fused QKV layer
      // makes.
      const int64_t row = q_width + 2 * kv_width;
      const int64_t rows = std::max(s.queries, s.keys);
      Both qkv = Input(dtype, {s.batch * rows, row}), dqkv = Output(dtype, {s.batch * rows, row});
      Both out = Output(dtype, {s.batch, s.queries, s.heads, s.width});
      Both dout = Input(dtype, {s.batch, s.queries, s.heads, s.width});
      Both lse = Output(DType::kF32, {s.batch, s.heads, s.queries});
      Both delta = Output(DType::kF32, {s.batch, s.heads, s.queries});
      const auto view = [&](Both& both, bool gpu, int64_t begin, int64_t length, int64_t heads) {
        return gpu ? both.Gpu(begin, {s.batch, length, heads, s.width},
                              {rows * row, row, s.width, 1})
                   : both.Cpu(begin, {s.batch, length, heads, s.width},
                              {rows * row, row, s.width, 1});
      };
      const auto forward = [&](bool gpu) {
        return AttentionArgs{.q = view(qkv, gpu, 0, s.queries, s.heads),
                             .k = view(qkv, gpu, q_width, s.keys, s.key_heads),
                             .v = view(qkv, gpu, q_width + kv_width, s.keys, s.key_heads),
                             .out = gpu ? out.gpu() : out.cpu(),
                             .lse = gpu ? lse.gpu() : lse.cpu(),
                             .causal = s.causal};
      };
      const auto backward = [&](bool gpu, bool deterministic) {
        return AttentionBackwardArgs{.forward = forward(gpu),
                                     .dout = gpu ? dout.gpu() : dout.cpu(),
                                     .dq = view(dqkv, gpu, 0, s.queries, s.heads),
                                     .dk = view(dqkv, gpu, q_width, s.keys, s.key_heads),
                                     .dv = view(dqkv, gpu, q_width + kv_width, s.keys, s.key_heads),
                                     .delta = gpu ? delta.gpu() : delta.cpu(),
                                     .deterministic = deterministic};
      };
      AttentionForward(*stream_, forward(true));
      ASSERT_OK(stream_->Synchronize()) << what;
      AttentionForward(*cpu_stream_, forward(false));
      ExpectClose("out " + what, out, Slack(dtype));
      ExpectClose("lse " + what, lse, 1e-5);
      AttentionBackward(*cpu_stream_, backward(false, true));
      for (bool deterministic : {true, false}) {
        dqkv.Poison();
        dqkv.Upload(*stream_);
        AttentionBackward(*stream_, backward(true, deterministic));
        ASSERT_OK(stream_->Synchronize()) << what;
        // Rows of q past the queries, and of k, v past the keys, belong to nobody.
        const std::vector<float> actual = dqkv.Download(*stream_);
        std::vector<float> got, expected;
        for (int64_t r = 0; r < s.batch * rows; ++r) {
          for (int64_t c = 0; c < row; ++c) {
            if (r % rows >= (c < q_width ? s.queries : s.keys)) continue;
            got.push_back(actual[r * row + c]);
            expected.push_back(dqkv.values()[r * row + c]);
          }
        }
        ExpectClose("gradients " + what, got, expected, dtype, Slack(dtype));
        if (!deterministic) continue;
        dqkv.Poison();
        dqkv.Upload(*stream_);
        AttentionBackward(*stream_, backward(true, true));
        const std::vector<float> again = dqkv.Download(*stream_);
        EXPECT_EQ(std::memcmp(actual.data(), again.data(), again.size() * sizeof(float)), 0)
            << what;
      }
    }
  }
}

// Its workspace for all samples at once would take GiBs.
TEST_P(AttentionGpuTest, Backward_OfManySamplesOfLongSequences_IsThatOfEachSample) {
  if (GetParam()) GTEST_SKIP() << "our own kernels have no workspace";
  const int64_t batch = 3, sequence = 4096, heads = 32, key_heads = 8, width = 64;
  const DType dtype = DType::kBF16;
  const int64_t row = (heads + 2 * key_heads) * width;
  Both qkv = Input(dtype, {batch, sequence, row}),
       out = Output(dtype, {batch, sequence, heads, width});
  Both dout = Input(dtype, {batch, sequence, heads, width});
  Both lse = Output(DType::kF32, {batch, heads, sequence}),
       delta = Output(DType::kF32, {batch, heads, sequence});
  Both together = Output(dtype, {batch, sequence, row}),
       apart = Output(dtype, {batch, sequence, row});
  const auto run = [&](Both& gradients, int64_t first, int64_t count) {
    const auto view = [&](Both& both, int64_t head, int64_t n) {
      return both.Gpu(first * sequence * row + head * width, {count, sequence, n, width},
                      {sequence * row, row, width, 1});
    };
    const auto samples = [&](Both& both) { return both.gpu().Rows(first, count); };
    AttentionBackwardArgs args;
    args.forward = {.q = view(qkv, 0, heads),
                    .k = view(qkv, heads, key_heads),
                    .v = view(qkv, heads + key_heads, key_heads),
                    .out = samples(out),
                    .lse = samples(lse)};
    args.dout = samples(dout);
    args.dq = view(gradients, 0, heads);
    args.dk = view(gradients, heads, key_heads);
    args.dv = view(gradients, heads + key_heads, key_heads);
    args.delta = samples(delta);
    AttentionForward(*stream_, args.forward);
    AttentionBackward(*stream_, args);
    ASSERT_OK(stream_->Synchronize());
  };
  run(together, 0, batch);
  for (int64_t i = 0; i < batch; ++i) run(apart, i, 1);
  EXPECT_EQ(together.Download(*stream_), apart.Download(*stream_));
}

// As cuDNN 9.19 answers on an H200, in MiB, at the shapes of GPT-2 124M and Llama 1B and 3B.
TEST(AttentionWorkspace, OfKnownShapes_IsWhatCudnnAsksOrThatOfParts) {
  const auto mib = [](auto... shape) { return AttentionWorkspaceBytes(shape...) >> 20; };
  EXPECT_EQ(mib(64, 12, 12, 1024, 64, true), 1539);
  EXPECT_EQ(mib(64, 12, 12, 1024, 64, false), 195);
  EXPECT_EQ(mib(4, 32, 8, 4096, 64, false), 258);
  EXPECT_EQ(mib(2, 24, 8, 4096, 128, true), 1632);
  EXPECT_EQ(mib(4, 32, 8, 4096, 64, true), 4226 / 4);  // a sample at a time
  EXPECT_EQ(mib(1, 32, 8, 16384, 64, true), (int64_t{32} * 16384 * (2 * 16384 + 4 + 256)) >> 20);
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionGpuTest, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Own" : "Chosen"; });

}  // namespace
}  // namespace muster::kernels
