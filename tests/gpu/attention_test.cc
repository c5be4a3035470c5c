#include "kernels/attention/attention.h"
#include "kernels/attention/attention_decode.h"
#include "kernels/attention/attention_workspace.h"
#include "kernels/attention/head_width.h"
#include "tests/gpu/support.h"

namespace muster::kernels {
namespace {

struct Shape {
  int64_t batch, queries, keys, heads, key_heads, width;
  bool causal;
  int64_t document = 0;  // mean tokens of a document; 0: all is one
  int64_t key_position = 0;
  float rise = 0;  // how much larger the first key is than the last one

  std::string ToString() const {
    return absl::StrCat("S=", queries, " keys=", keys, " H=", heads, " G=", key_heads, " D=", width,
                        causal ? " causal" : "", document > 0 ? " documents" : "");
  }
};

// Where the documents of the queries begin. Without causal, the keys lie before the queries, and
// some documents begin before all keys, some behind them.
std::vector<int32_t> DocumentsOf(const Shape& s, std::mt19937& random) {
  std::vector<int32_t> begins;
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t first = s.key_position + (s.causal ? 0 : s.keys);
    int64_t begin = s.causal ? first : s.key_position - 3 + b * s.keys / 2, left = s.queries / 2;
    for (int64_t i = 0; i < s.queries; ++i) {
      if (left-- == 0) {
        begin = first + i;
        left = s.document / 2 + random() % s.document;
      }
      begins.push_back(static_cast<int32_t>(begin));
    }
  }
  return begins;
}

// All tensors of one call, on the device and on the host. q, k and v are packed in one row, as a
// fused QKV layer writes them.
struct Problem {
  Problem(const Shape& s, Both qkv, Both dqkv, Both out, Both dout, Both lse, Both delta,
          Both documents)
      : shape(s),
        qkv(std::move(qkv)),
        dqkv(std::move(dqkv)),
        out(std::move(out)),
        dout(std::move(dout)),
        lse(std::move(lse)),
        delta(std::move(delta)),
        documents(std::move(documents)) {}

  AttentionArgs Forward(bool gpu) {
    AttentionArgs args;
    args.q = View(qkv, gpu, 0, shape.queries, shape.heads);
    args.k = View(qkv, gpu, shape.heads, shape.keys, shape.key_heads);
    args.v = View(qkv, gpu, shape.heads + shape.key_heads, shape.keys, shape.key_heads);
    args.out = gpu ? out.gpu() : out.cpu();
    args.lse = gpu ? lse.gpu() : lse.cpu();
    args.causal = shape.causal;
    if (shape.document > 0) {
      args.documents = Tensor((gpu ? documents.gpu() : documents.cpu()).data(), DType::kI32,
                              {shape.batch, shape.queries});
      args.key_position = shape.key_position;
    }
    return args;
  }
  AttentionBackwardArgs Backward(bool gpu, bool deterministic) {
    AttentionBackwardArgs args;
    args.forward = Forward(gpu);
    args.dout = gpu ? dout.gpu() : dout.cpu();
    args.dq = View(dqkv, gpu, 0, shape.queries, shape.heads);
    args.dk = View(dqkv, gpu, shape.heads, shape.keys, shape.key_heads);
    args.dv = View(dqkv, gpu, shape.heads + shape.key_heads, shape.keys, shape.key_heads);
    args.delta = gpu ? delta.gpu() : delta.cpu();
    args.deterministic = deterministic;
    return args;
  }
  // The elements of dqkv that a backward writes. Rows of q past the queries, and of k and v past
  // the keys, are unused and stay NaN.
  std::vector<float> Written(const std::vector<float>& all) const {
    std::vector<float> written;
    for (int64_t r = 0; r < shape.batch * Rows(shape); ++r) {
      for (int64_t c = 0; c < Row(shape); ++c) {
        if (r % Rows(shape) < (c < shape.heads * shape.width ? shape.queries : shape.keys)) {
          written.push_back(all[r * Row(shape) + c]);
        }
      }
    }
    return written;
  }

  static int64_t Row(const Shape& s) { return (s.heads + 2 * s.key_heads) * s.width; }
  static int64_t Rows(const Shape& s) { return std::max(s.queries, s.keys); }

  Tensor View(Both& both, bool gpu, int64_t head, int64_t length, int64_t heads) const {
    const int64_t row = Row(shape), begin = head * shape.width;
    return gpu ? both.Gpu(begin, {shape.batch, length, heads, shape.width},
                          {Rows(shape) * row, row, shape.width, 1})
               : both.Cpu(begin, {shape.batch, length, heads, shape.width},
                          {Rows(shape) * row, row, shape.width, 1});
  }

  const Shape shape;
  Both qkv, dqkv, out, dout, lse, delta, documents;
};

// 16-bit attention rounds the probabilities and the gradients of scores to 16 bits before the
// second GEMM, as a plain 16-bit implementation does. This is their share of the error, relative to
// the norm.
double Slack(DType dtype) {
  if (dtype == DType::kF32) return 5e-6;
  return dtype == DType::kBF16 ? 4e-3 : 6e-4;
}

class AttentionGpuTest : public GpuTest, public ::testing::WithParamInterface<bool> {
 protected:
  AttentionGpuTest() { options_.own_attention = GetParam(); }

  Problem Make(const Shape& s, DType dtype) {
    const int64_t row = Problem::Row(s), rows = s.batch * Problem::Rows(s);
    std::vector<float> qkv = Random(rows * row, 1, 0);
    for (int64_t i = 0; i < rows * row; ++i) {
      const int64_t head = i % row / s.width, key = i / row % Problem::Rows(s);
      if (head < s.heads || head >= s.heads + s.key_heads) continue;
      qkv[i] *= 1 + s.rise * static_cast<float>(s.keys - key) / static_cast<float>(s.keys);
    }
    Both packed(*device_, dtype, {rows, row}, std::move(qkv));
    packed.Upload(*stream_);
    return Problem(s, std::move(packed), Output(dtype, {rows, row}),
                   Output(dtype, {s.batch, s.queries, s.heads, s.width}),
                   Input(dtype, {s.batch, s.queries, s.heads, s.width}),
                   Output(DType::kF32, {s.batch, s.heads, s.queries}),
                   Output(DType::kF32, {s.batch, s.heads, s.queries}),
                   Integers(s.document > 0 ? DocumentsOf(s, random_) : std::vector<int32_t>{0}));
  }

  // Queries without any key have lse = -inf on both sides, which a distance cannot express.
  void ExpectSameLse(const std::string& what, Both& lse, int* empty) {
    std::vector<float> actual = lse.Download(*stream_), expected = lse.values();
    *empty = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      if (!std::isinf(expected[i])) continue;
      EXPECT_EQ(actual[i], expected[i]) << what << " at " << i;
      actual[i] = expected[i] = 0;
      ++*empty;
    }
    ExpectClose(what, actual, expected, DType::kF32, 1e-5);
  }

  void ExpectForwardLikeTheHost(const Shape& s, DType dtype) {
    const std::string what = absl::StrCat(Name(dtype), " ", s.ToString());
    Problem problem = Make(s, dtype);
    const auto run = [&] {
      problem.out.Poison();
      problem.out.Upload(*stream_);
      AttentionForward(*stream_, problem.Forward(/*gpu=*/true));
      EXPECT_OK(stream_->Synchronize()) << what;
      return problem.out.Download(*stream_);
    };
    const std::vector<float> once = run(), again = run();
    EXPECT_EQ(std::memcmp(once.data(), again.data(), again.size() * sizeof(float)), 0) << what;
    AttentionForward(*cpu_stream_, problem.Forward(/*gpu=*/false));
    ExpectClose("out " + what, problem.out, Slack(dtype));
    int empty = 0;
    ExpectSameLse("lse " + what, problem.lse, &empty);
  }

  void ExpectLikeTheHost(const Shape& s, DType dtype) {
    const std::string what = absl::StrCat(Name(dtype), " ", s.ToString());
    Problem problem = Make(s, dtype);
    AttentionForward(*stream_, problem.Forward(/*gpu=*/true));
    ASSERT_OK(stream_->Synchronize()) << what;
    AttentionForward(*cpu_stream_, problem.Forward(/*gpu=*/false));
    ExpectClose("out " + what, problem.out, Slack(dtype));
    int empty = 0;
    ExpectSameLse("lse " + what, problem.lse, &empty);
    EXPECT_EQ(empty > 0, s.document > 0 && !s.causal) << what;
    AttentionBackward(*cpu_stream_, problem.Backward(/*gpu=*/false, /*deterministic=*/true));
    for (const bool deterministic : {true, false}) {
      const auto run = [&] {
        problem.dqkv.Poison();
        problem.dqkv.Upload(*stream_);
        AttentionBackward(*stream_, problem.Backward(/*gpu=*/true, deterministic));
        EXPECT_OK(stream_->Synchronize()) << what;
        return problem.dqkv.Download(*stream_);
      };
      const std::vector<float> actual = run();
      ExpectClose("gradients " + what, problem.Written(actual),
                  problem.Written(problem.dqkv.values()), dtype, Slack(dtype));
      if (!deterministic) continue;
      const std::vector<float> again = run();
      EXPECT_EQ(std::memcmp(actual.data(), again.data(), again.size() * sizeof(float)), 0) << what;
    }
  }
};

TEST_P(AttentionGpuTest, ForwardAndBackward_PackedGroupedAndOddShapes_MatchTheHost) {
  for (const DType dtype : FloatTypes()) {
    for (const Shape& s : std::vector<Shape>{{2, 37, 37, 3, 3, 64, true},
                                             {1, 200, 200, 4, 2, 64, true},
                                             {1, 333, 333, 2, 2, 64, true},
                                             {2, 129, 129, 4, 1, 128, true},
                                             {1, 300, 300, 2, 1, 128, true},
                                             {1, 64, 64, 2, 2, 40, true},
                                             {1, 131, 131, 2, 1, 20, true},
                                             {1, 257, 257, 3, 3, 80, true},
                                             {1, 70, 33, 2, 1, 64, false},
                                             {2, 130, 257, 4, 2, 64, false},
                                             {1, 257, 130, 4, 2, 128, false},
                                             {1, 33, 33, 1, 1, 13, true},
                                             {1, 40, 40, 2, 2, 256, true},
                                             {2, 256, 256, 2, 2, 96, false}}) {
      ExpectLikeTheHost(s, dtype);
    }
  }
}

// The widths of the host's test (tests/kernels/attention_test.cc): each is served here or refused
// before a job starts. The sequence is no multiple of a tile.
TEST_P(AttentionGpuTest, ForwardAndBackward_HeadsOf8To512Columns_MatchTheHostOrAreRefused) {
  for (const DType dtype : FloatTypes()) {
    for (const int64_t width : {8,   13,  16,  24,  40,  64,  72,  80,  96,  100, 112, 120,
                                128, 129, 136, 160, 192, 200, 255, 256, 257, 384, 512}) {
      if (!AttentionPathOf(DeviceKind::kCuda, dtype, width).ok()) {
        EXPECT_GT(width, kCudaHeadWidthMax);
        continue;
      }
      ExpectLikeTheHost({1, 131, 131, 2, 1, width, true}, dtype);
    }
  }
}

// Borders of documents lie inside of tiles and between them, keys before the queries, and some
// queries have no key.
TEST_P(AttentionGpuTest, ForwardAndBackward_WithinDocuments_MatchTheHost) {
  for (const DType dtype : FloatTypes()) {
    for (const Shape& s : std::vector<Shape>{{2, 333, 333, 4, 2, 64, true, 40},
                                             {2, 400, 400, 2, 1, 128, true, 150, 1000},
                                             {1, 257, 257, 3, 3, 80, true, 60},
                                             {1, 131, 131, 2, 1, 40, true, 10},
                                             {1, 90, 90, 2, 2, 256, true, 30},
                                             {2, 130, 257, 4, 2, 64, false, 30, 100},
                                             {2, 257, 130, 2, 2, 128, false, 50},
                                             {1, 70, 33, 2, 1, 13, false, 20, 5}}) {
      ExpectLikeTheHost(s, dtype);
    }
  }
}

// A block has several tiles, and they are of different lengths.
TEST_P(AttentionGpuTest, Forward_OfMoreTilesThanTheDeviceHasBlocks_MatchesTheHost) {
  for (const DType dtype : FloatTypes()) {
    for (const Shape& s : std::vector<Shape>{{3, 777, 777, 16, 8, 64, true},
                                             {5, 193, 193, 30, 10, 64, true},
                                             {40, 63, 64, 8, 8, 64, false},
                                             {2, 500, 1100, 32, 4, 64, false},
                                             {2, 1000, 300, 32, 4, 64, false},
                                             {2, 1500, 1500, 16, 4, 64, true, 300},
                                             {4, 400, 700, 24, 8, 64, false, 120}}) {
      ExpectForwardLikeTheHost(s, dtype);
    }
  }
}

// The largest scores come last, whichever end of the keys comes first.
TEST_P(AttentionGpuTest, Forward_OfScoresThatRiseOrFallAlongTheKeys_MatchesTheHost) {
  for (const DType dtype : FloatTypes()) {
    for (const float rise : {30.f, -0.99f, 3.f}) {
      for (Shape s : std::vector<Shape>{{1, 700, 700, 2, 1, 64, true},
                                        {2, 300, 1000, 2, 2, 64, false},
                                        {1, 600, 600, 2, 1, 64, true, 200},
                                        {1, 300, 300, 1, 1, 128, true}}) {
        s.rise = rise;
        ExpectForwardLikeTheHost(s, dtype);
      }
    }
  }
}

// In any order at width 64 a block takes one tile of keys after the other. The shapes have more
// tiles than a GPU has multiprocessors, heads that share keys, and tiles that no query sees whole.
TEST_P(AttentionGpuTest, ForwardAndBackward_OfMoreTilesThanMultiprocessors_MatchTheHost) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const Shape& s : std::vector<Shape>{{4, 300, 300, 48, 24, 64, true},
                                             {2, 700, 700, 64, 16, 64, true},
                                             {3, 129, 520, 40, 40, 64, false},
                                             {2, 520, 65, 96, 96, 64, false}}) {
      ExpectLikeTheHost(s, dtype);
    }
  }
}

// The workspace for all samples at once would take several GiB.
TEST_P(AttentionGpuTest, Backward_OfManySamplesOfLongSequences_IsThatOfEachSample) {
  if (GetParam()) GTEST_SKIP() << "in order, our own kernels have no workspace";
  const int64_t batch = 3, sequence = 4096, heads = 32, key_heads = 8, width = 72;
  const DType dtype = DType::kBF16;
  const int64_t row = (heads + 2 * key_heads) * width;
  Both qkv = Input(dtype, {batch, sequence, row}),
       out = Output(dtype, {batch, sequence, heads, width});
  Both dout = Input(dtype, {batch, sequence, heads, width});
  Both lse = Output(DType::kF32, {batch, heads, sequence}),
       delta = Output(DType::kF32, {batch, heads, sequence});
  Both whole = Output(dtype, {batch, sequence, row}), apart = Output(dtype, {batch, sequence, row});
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
  run(whole, 0, batch);
  for (int64_t i = 0; i < batch; ++i) run(apart, i, 1);
  EXPECT_EQ(whole.Download(*stream_), apart.Download(*stream_));
}

// In a fixed order cuDNN runs on groups of heads, or our own kernels run where its workspace would
// be too large. Sums are long here, so both, and sums in any order, are compared, too.
TEST_P(AttentionGpuTest, Backward_InOrderOfOneLongSample_RepeatsItsBitsAndIsThatOfOtherKernels) {
  CudaOptions other_options;
  other_options.own_attention = !GetParam();
  ASSERT_OK_AND_ASSIGN(const auto other_device, MakeCudaDevice(0, other_options));
  ASSERT_OK_AND_ASSIGN(const auto other, other_device->MakeStream());
  for (const Shape& s : std::vector<Shape>{{1, 4096, 4096, 4, 2, 64, true},
                                           {1, 2048, 2048, 3, 1, 128, true},
                                           {1, 16384, 16384, 4, 2, 72, true},
                                           {1, 12288, 12288, 8, 1, 16, true}}) {
    Problem problem = Make(s, DType::kBF16);
    const auto run = [&](Stream& stream, bool deterministic) {
      problem.out.Poison();
      problem.out.Upload(stream);
      problem.dqkv.Poison();
      problem.dqkv.Upload(stream);
      AttentionForward(stream, problem.Forward(/*gpu=*/true));
      AttentionBackward(stream, problem.Backward(/*gpu=*/true, deterministic));
      EXPECT_OK(stream.Synchronize());
      return problem.dqkv.Download(stream);
    };
    const std::vector<float> once = run(*stream_, true), again = run(*stream_, true);
    EXPECT_EQ(std::memcmp(once.data(), again.data(), once.size() * sizeof(float)), 0);
    ExpectClose(s.ToString(), once, run(*stream_, false), DType::kBF16, 4e-3);
    ExpectClose(s.ToString(), once, run(*other, false), DType::kBF16, 4e-3);
  }
}

// What cuDNN 9.19 asks for on an H200, in MiB, at the shapes of GPT-2 124M and Llama 1B and 3B.
TEST(AttentionWorkspace, OfKnownShapes_IsWhatCudnnAsksForOrThatOfSlices) {
  const auto mib = [](int64_t batch, int64_t heads, int64_t key_heads, int64_t sequence,
                      int64_t width, bool deterministic) {
    return AttentionWorkspaceBytes(batch, heads, key_heads, sequence, sequence, width,
                                   deterministic) >>
           20;
  };
  EXPECT_EQ(mib(64, 12, 12, 1024, 64, true), 1539);
  EXPECT_EQ(mib(64, 12, 12, 1024, 64, false), 195);
  EXPECT_EQ(mib(4, 32, 8, 4096, 64, false), 258);
  EXPECT_EQ(mib(2, 24, 8, 4096, 128, true), 1632);
  // Beyond 2 GiB it is 0 where our own kernels run, or that of a sample or key head at a time.
  EXPECT_EQ(mib(4, 32, 8, 4096, 64, true), 0);
  EXPECT_EQ(mib(4, 32, 8, 4096, 128, true), (int64_t{32} * 4096 * (2 * 4096 + 4 + 512)) >> 20);
  EXPECT_EQ(mib(1, 32, 8, 16384, 64, true), 0);
  EXPECT_EQ(mib(1, 32, 8, 16384, 128, true), (int64_t{4} * 16384 * (2 * 16384 + 4 + 512)) >> 20);
  EXPECT_EQ(mib(1, 32, 8, 131072, 128, true), 0);
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionGpuTest, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "Own" : "Chosen"; });

class AttentionDecodeGpuTest : public GpuTest {};

// Keys of one block and of many, the last one with few; groups; widths with and without pairs; rows
// of a cache that has room for more.
TEST_F(AttentionDecodeGpuTest, AttentionDecode_CachesOfAnyLength_MatchesTheHost) {
  struct Case {
    int64_t batch, keys, heads, key_heads, width;
  };
  for (const DType dtype : FloatTypes()) {
    for (const Case& c : std::vector<Case>{{1, 1, 1, 1, 64},
                                           {2, 3, 4, 2, 8},
                                           {3, 255, 6, 2, 64},
                                           {1, 256, 12, 12, 64},
                                           {2, 257, 8, 1, 128},
                                           {1, 700, 3, 3, 13},
                                           {1, 1000, 4, 2, 80},
                                           {2, 511, 2, 1, 255},
                                           {1, 5000, 32, 8, 128},
                                           {4, 2048, 2, 2, 256},
                                           {1, 40001, 4, 4, 64}}) {
      const std::string what = absl::StrCat(Name(dtype), " B=", c.batch, " keys=", c.keys,
                                            " H=", c.heads, " G=", c.key_heads, " D=", c.width);
      const int64_t capacity = c.keys + 5, row = c.key_heads * c.width;
      const int64_t packed = (c.heads + 2 * c.key_heads) * c.width;
      Both q = Input(dtype, {c.batch, packed});
      Both k = Input(dtype, {c.batch, capacity, c.key_heads, c.width});
      Both v = Input(dtype, {c.batch, capacity, c.key_heads, c.width});
      Both out = Output(dtype, {c.batch, 1, c.heads, c.width});
      Both partial =
          Output(DType::kF32, {AttentionDecodePartials(c.batch, c.heads, c.keys, c.width)});
      const auto args = [&](bool gpu) {
        const auto view = [&](Both& both, std::initializer_list<int64_t> shape,
                              std::initializer_list<int64_t> strides) {
          return gpu ? both.Gpu(0, shape, strides) : both.Cpu(0, shape, strides);
        };
        const auto cache = [&](Both& both) {
          return view(both, {c.batch, c.keys, c.key_heads, c.width},
                      {capacity * row, row, c.width, 1});
        };
        return AttentionDecodeArgs{
            .q = view(q, {c.batch, 1, c.heads, c.width}, {packed, packed, c.width, 1}),
            .k = cache(k),
            .v = cache(v),
            .out = gpu ? out.gpu() : out.cpu(),
            .partial = gpu ? partial.gpu() : partial.cpu()};
      };
      const auto run = [&] {
        out.Poison();
        out.Upload(*stream_);
        AttentionDecode(*stream_, args(/*gpu=*/true));
        EXPECT_OK(stream_->Synchronize()) << what;
        return out.Download(*stream_);
      };
      const std::vector<float> once = run(), again = run();
      EXPECT_EQ(std::memcmp(once.data(), again.data(), again.size() * sizeof(float)), 0) << what;
      AttentionDecode(*cpu_stream_, args(/*gpu=*/false));
      ASSERT_OK(cpu_stream_->Synchronize());
      ExpectClose("out " + what, out, 1e-5);
    }
  }
}

}  // namespace
}  // namespace muster::kernels
