// The ops of Mamba-2 on tensors of more than 2^31 elements each. An op over all positions is held
// to itself over two parts, whose tensors are smaller than that, so that no host has to compute a
// million positions.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ssm/ssm.h"
#include "tests/gpu/support.h"

namespace muster::kernels {
namespace {

constexpr DType kAct = DType::kBF16;
constexpr int64_t kHeads = 32, kWidth = 64, kColumns = 128, kChunk = 128;
constexpr int64_t kInner = kHeads * kWidth, kState = kWidth * kColumns;
constexpr int64_t kPositions = (1 << 20) + 1000;
constexpr int64_t kChunks = (kPositions + kChunk - 1) / kChunk;
constexpr int64_t kCut = 7000 * kChunk;  // where the second part begins
constexpr int64_t kTaps = 4;
constexpr int64_t kBeyond = int64_t{1} << 31;
static_assert(kPositions * kInner > kBeyond && kChunks * kHeads * kState > kBeyond);
static_assert(kCut * (kInner + 2 * kColumns + 4) < kBeyond);  // the longest rows
static_assert(kCut / kChunk * kHeads * kState < kBeyond);

// Rows of a buffer.
struct Matrix {
  std::shared_ptr<Buffer> buffer;
  DType dtype = kAct;
  int64_t pitch = 0;  // elements from row to row

  Tensor At(int64_t row, int64_t column, std::initializer_list<int64_t> shape,
            std::initializer_list<int64_t> strides) const {
    char* const begin = static_cast<char*>(buffer->data());
    return Tensor(begin + (row * pitch + column) * SizeOf(dtype), dtype, shape, strides);
  }
  // [count, columns]
  Tensor Rows(int64_t row, int64_t count, int64_t column, int64_t columns) const {
    return At(row, column, {count, columns}, {pitch, 1});
  }
  // [1, count, columns]
  Tensor Sample(int64_t row, int64_t count, int64_t columns) const {
    return At(row, 0, {1, count, columns}, {count * pitch, pitch, 1});
  }
  // [1, count, slots, size]
  Tensor Slots(int64_t row, int64_t count, int64_t column, int64_t slots, int64_t size) const {
    return At(row, column, {1, count, slots, size}, {count * pitch, pitch, size, 1});
  }
};

class LongSsmGpuTest : public GpuTest {
 protected:
  // Divides no power of two, so that what is 2^31 or 2^32 elements away is different.
  static constexpr int64_t kPeriod = 4099 * 577;
  static constexpr int64_t kWindow = 200;

  void SetUp() override {
    GpuTest::SetUp();
    if (device_ == nullptr) return;
    constexpr int64_t kBytes = int64_t{60} << 30;
    ASSERT_OK_AND_ASSIGN(const DeviceMemory memory, device_->Memory());
    if (memory.free < kBytes) GTEST_SKIP() << "LESS THAN 60 GiB OF FREE MEMORY, NOT TESTED";
    pattern_ = Input(kAct, {kPeriod});
  }

  Matrix Make(int64_t rows, int64_t pitch, DType dtype = kAct) {
    auto buffer = device_->Allocate(rows * pitch * SizeOf(dtype));
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    Matrix made = {std::move(*buffer), dtype, pitch};
    Zero(*stream_, Tensor(made.buffer->data(), dtype, {rows * pitch}));
    return made;
  }
  Matrix Filled(int64_t rows, int64_t pitch) {
    Matrix made = Make(rows, pitch);
    for (int64_t at = 0; at < rows * pitch; at += kPeriod) {
      const int64_t count = std::min(kPeriod, rows * pitch - at);
      Copy(*stream_, Tensor(pattern_.gpu().data(), kAct, {count}),
           Tensor(static_cast<char*>(made.buffer->data()) + at * 2, kAct, {count}));
    }
    return made;
  }
  Both Zeros(std::initializer_list<int64_t> shape) {
    Both zeros = Output(DType::kF32, shape);
    Zero(*stream_, zeros.gpu());
    return zeros;
  }

  std::vector<float> Read(const Matrix& of, int64_t row, int64_t count, int64_t columns) {
    Both dense = Output(of.dtype, {count, columns});
    CopyStrided(*stream_, of.Rows(row, count, 0, columns), dense.gpu());
    return dense.Download(*stream_);
  }
  void ExpectRows(const std::string& what, const Matrix& all, const Matrix& parts, int64_t row,
                  int64_t count, int64_t columns, double slack) {
    const std::vector<float> expected = Read(parts, row, count, columns);
    EXPECT_GT(std::count_if(expected.begin(), expected.end(), [](float x) { return x != 0; }),
              static_cast<int64_t>(expected.size()) / 2)
        << what;
    ExpectClose(absl::StrCat(what, " from row ", row), Read(all, row, count, columns), expected,
                all.dtype, slack);
  }
  // At both ends, on either side of the cut, and where offsets pass 2^31 elements.
  void ExpectWindows(const std::string& what, const Matrix& all, const Matrix& parts,
                     int64_t columns, double slack) {
    for (const int64_t row : {int64_t{0}, kCut - kWindow - kTaps, kCut,
                              std::min(kPositions - kWindow, kBeyond / all.pitch - kWindow / 2),
                              kPositions - kWindow}) {
      ExpectRows(what, all, parts, row, kWindow, columns, slack);
    }
  }
  void ExpectSame(const std::string& what, Both& all, Both& parts, double slack) {
    ExpectClose(what, all.Download(*stream_), parts.Download(*stream_), all.dtype(), slack);
  }

  Both pattern_;
};

// ---- scan ----

class LongSsdGpuTest : public LongSsmGpuTest {
 protected:
  struct Inputs {
    Matrix rows, dt, dy;
    Both dt_bias, a_log, d, initial, d_final;
  };
  struct Outputs {
    Matrix y, states, d_rows, ddt, d_states;
    Both between, final_state, d_between, d_initial, d_dt_bias, d_a_log, dd, decay;
  };

  Inputs MakeInputs(int64_t pitch) {
    return {.rows = Filled(kPositions, pitch),
            .dt = Filled(kPositions, kHeads),
            .dy = Filled(kPositions, kInner),
            .dt_bias = Input(DType::kF32, {kHeads}, 0.5, -4),
            .a_log = Input(DType::kF32, {kHeads}, 1.5),
            .d = Input(DType::kF32, {kHeads}),
            .initial = Input(DType::kF32, {1, kHeads, kWidth, kColumns}),
            .d_final = Input(DType::kF32, {1, kHeads, kWidth, kColumns})};
  }
  Outputs MakeOutputs(int64_t pitch, bool d_states) {
    const auto state = [&] { return Zeros({1, kHeads, kWidth, kColumns}); };
    Outputs out = {.y = Make(kPositions, kInner),
                   .states = Make(kChunks, kHeads * kState),
                   .d_rows = Make(kPositions, pitch),
                   .ddt = Make(kPositions, kHeads),
                   .d_states = {},
                   .between = state(),
                   .final_state = state(),
                   .d_between = state(),
                   .d_initial = state(),
                   .d_dt_bias = Zeros({kHeads}),
                   .d_a_log = Zeros({kHeads}),
                   .dd = Zeros({kHeads}),
                   .decay = Zeros({1, kHeads})};
    if (d_states) out.d_states = Make(kChunks, kHeads * kState);
    return out;
  }
  // Positions [begin, begin + count).
  static SsdArgs Forward(Inputs& in, Outputs& out, int64_t begin, int64_t count,
                         const Tensor& initial, const Tensor& final_state) {
    return {.x = in.rows.Slots(begin, count, 0, kHeads, kWidth),
            .dt = in.dt.Sample(begin, count, kHeads),
            .b = in.rows.Slots(begin, count, kInner, 1, kColumns),
            .c = in.rows.Slots(begin, count, kInner + kColumns, 1, kColumns),
            .dt_bias = in.dt_bias.gpu(),
            .a_log = in.a_log.gpu(),
            .d = in.d.gpu(),
            .initial_state = initial,
            .chunk = kChunk,
            .y = out.y.Slots(begin, count, 0, kHeads, kWidth),
            .states = States(out.states, begin, count),
            .final_state = final_state,
            .decay = out.decay.gpu()};
  }
  static SsdBackwardArgs Backward(const SsdArgs& forward, Inputs& in, Outputs& out, int64_t begin,
                                  int64_t count, const Tensor& d_final, const Tensor& d_initial) {
    SsdBackwardArgs args = {.forward = forward,
                            .dy = in.dy.Slots(begin, count, 0, kHeads, kWidth),
                            .d_final_state = d_final,
                            .dx = out.d_rows.Slots(begin, count, 0, kHeads, kWidth),
                            .ddt = out.ddt.Sample(begin, count, kHeads),
                            .db = out.d_rows.Slots(begin, count, kInner, 1, kColumns),
                            .dc = out.d_rows.Slots(begin, count, kInner + kColumns, 1, kColumns),
                            .d_dt_bias = out.d_dt_bias.gpu(),
                            .d_a_log = out.d_a_log.gpu(),
                            .dd = out.dd.gpu(),
                            .d_initial_state = d_initial};
    if (out.d_states.buffer != nullptr) args.d_states = States(out.d_states, begin, count);
    return args;
  }
  static Tensor States(const Matrix& of, int64_t begin, int64_t count) {
    const int64_t chunks = (count + kChunk - 1) / kChunk;
    return of.At(begin / kChunk, 0, {1, chunks, kHeads, kState},
                 {chunks * kHeads * kState, kHeads * kState, kState, 1});
  }
  void RunParts(Inputs& in, Outputs& out) {
    const SsdArgs first = Forward(in, out, 0, kCut, in.initial.gpu(), out.between.gpu());
    const SsdArgs second =
        Forward(in, out, kCut, kPositions - kCut, out.between.gpu(), out.final_state.gpu());
    SsdForward(*stream_, first);
    SsdForward(*stream_, second);
    SsdBackward(*stream_, Backward(second, in, out, kCut, kPositions - kCut, in.d_final.gpu(),
                                   out.d_between.gpu()));
    SsdBackward(*stream_,
                Backward(first, in, out, 0, kCut, out.d_between.gpu(), out.d_initial.gpu()));
  }
  void RunWhole(Inputs& in, Outputs& out, bool segments) {
    const SsdArgs forward =
        Forward(in, out, 0, kPositions, in.initial.gpu(), out.final_state.gpu());
    const SsdBackwardArgs backward =
        Backward(forward, in, out, 0, kPositions, in.d_final.gpu(), out.d_initial.gpu());
    if (segments) {
      SsdForwardStates(*stream_, forward);
      SsdForwardOutputs(*stream_, forward);
      SsdBackwardStates(*stream_, backward);
      SsdBackwardInputs(*stream_, backward);
    } else {
      SsdForward(*stream_, forward);
      SsdBackward(*stream_, backward);
    }
  }
};

// The pitch of the rows decides whether the kernels for Hopper or the portable ones run.
TEST_F(LongSsdGpuTest, MoreStatesThan32BitsCount_AreThoseOfTwoParts) {
  constexpr double kSlack = 5e-3;
  for (const int64_t pitch : {kInner + 2 * kColumns, kInner + 2 * kColumns + 4}) {
    Inputs in = MakeInputs(pitch);
    Outputs parts = MakeOutputs(pitch, /*d_states=*/false);
    RunParts(in, parts);
    for (const bool segments : {false, true}) {
      const std::string what =
          absl::StrCat("rows of ", pitch, segments ? ", as a segment: " : ": ");
      Outputs all = MakeOutputs(pitch, segments);
      RunWhole(in, all, segments);
      ASSERT_OK(stream_->Synchronize()) << what;
      ExpectWindows(what + "y", all.y, parts.y, kInner, kSlack);
      for (const int64_t chunk : {int64_t{1}, kCut / kChunk, kChunks - 1}) {
        ExpectRows(what + "states", all.states, parts.states, chunk, 1, kHeads * kState, kSlack);
      }
      ExpectWindows(what + "d_rows", all.d_rows, parts.d_rows, kInner + 2 * kColumns, kSlack);
      ExpectWindows(what + "ddt", all.ddt, parts.ddt, kHeads, 2 * kSlack);
      ExpectSame(what + "d_dt_bias", all.d_dt_bias, parts.d_dt_bias, 4 * kSlack);
      ExpectSame(what + "d_a_log", all.d_a_log, parts.d_a_log, 4 * kSlack);
      ExpectSame(what + "dd", all.dd, parts.dd, kSlack);
      if (segments) continue;  // whose calls leave behind what a zero state does
      ExpectSame(what + "final_state", all.final_state, parts.final_state, kSlack);
      ExpectSame(what + "d_initial", all.d_initial, parts.d_initial, kSlack);
    }
  }
}

// ---- convolution ----

// Rows of 2306 have no packs of four channels.
TEST_F(LongSsmGpuTest, Convolution_IsThatOfTwoParts) {
  constexpr int64_t kChannels = kInner + 2 * kColumns, kHalo = kTaps - 1;
  struct Outputs {
    Matrix y, dx;
    Both dweight, dbias, d_halo;
  };
  for (const int64_t pitch : {kChannels, kChannels + 2}) {
    const Matrix x = Filled(kPositions, pitch), dy = Filled(kPositions, pitch);
    Both weight = Input(DType::kF32, {kChannels, kTaps}, 0.5),
         bias = Input(DType::kF32, {kChannels});
    const auto make = [&] {
      return Outputs{Make(kPositions, pitch), Make(kPositions, pitch), Zeros({kChannels, kTaps}),
                     Zeros({kChannels}), Zeros({1, kHalo, kChannels})};
    };
    const auto run = [&](Outputs& out, int64_t begin, int64_t count) {
      CausalConvBackwardArgs args = {.forward = {.x = x.Sample(begin, count, kChannels),
                                                 .weight = weight.gpu(),
                                                 .bias = bias.gpu(),
                                                 .y = out.y.Sample(begin, count, kChannels)},
                                     .dy = dy.Sample(begin, count, kChannels),
                                     .dx = out.dx.Sample(begin, count, kChannels),
                                     .dweight = out.dweight.gpu(),
                                     .dbias = out.dbias.gpu()};
      if (begin > 0) {
        args.forward.halo = x.Sample(begin - kHalo, kHalo, kChannels);
        args.d_halo = out.d_halo.gpu();
      }
      CausalConvForward(*stream_, args.forward);
      CausalConvBackward(*stream_, args);
    };
    Outputs parts = make(), all = make();
    run(parts, 0, kCut);
    run(parts, kCut, kPositions - kCut);
    run(all, 0, kPositions);
    ASSERT_OK(stream_->Synchronize());
    const std::string what = absl::StrCat("rows of ", pitch, ": ");
    ExpectWindows(what + "y", all.y, parts.y, kChannels, 1e-5);
    ExpectWindows(what + "dx", all.dx, parts.dx, kChannels, 1e-5);
    // In front of the cut both parts add to dx.
    std::vector<float> dx = Read(parts.dx, kCut - kHalo, kHalo, kChannels);
    const std::vector<float> d_halo = parts.d_halo.Download(*stream_);
    for (size_t i = 0; i < dx.size(); ++i) dx[i] += d_halo[i];
    ExpectClose(what + "dx in front of the cut", Read(all.dx, kCut - kHalo, kHalo, kChannels), dx,
                kAct, 5e-3);
    ExpectSame(what + "dweight", all.dweight, parts.dweight, 1e-4);
    ExpectSame(what + "dbias", all.dbias, parts.dbias, 1e-4);
  }
}

// ---- gated norm ----

// Slices of rows that begin at an odd column have no packs.
TEST_F(LongSsmGpuTest, GatedRmsNorm_IsThatOfTwoParts) {
  struct Outputs {
    Matrix out, dy, dz, rstd;
    Both dgamma;
  };
  const Matrix y = Filled(kPositions, kInner), z = Filled(kPositions, kInner + 2 * kColumns);
  const Matrix dout = Filled(kPositions, kInner);
  Both gamma = Input(DType::kF32, {kInner});
  const auto args_of = [&](const Outputs& out, int64_t groups, int64_t begin, int64_t count) {
    return GatedRmsNormBackwardArgs{
        .forward = {.y = y.Rows(begin, count, 0, kInner),
                    .z = z.Rows(begin, count, groups > 1 ? 7 : 0, kInner),
                    .gamma = gamma.gpu(),
                    .out = out.out.Rows(begin, count, 0, kInner),
                    .rstd = out.rstd.Rows(begin, count, 0, groups),
                    .groups = groups},
        .dout = dout.Rows(begin, count, 0, kInner),
        .dy = out.dy.Rows(begin, count, 0, kInner),
        .dz = out.dz.Rows(begin, count, 0, kInner),
        .dgamma = out.dgamma.gpu()};
  };
  const auto make = [&](int64_t groups) {
    return Outputs{Make(kPositions, kInner), Make(kPositions, kInner), Make(kPositions, kInner),
                   Make(kPositions, groups, DType::kF32), Zeros({kInner})};
  };
  const auto expect = [&](const std::string& what, Outputs& all, Outputs& parts, double slack) {
    ExpectWindows(what + "out", all.out, parts.out, kInner, slack);
    ExpectWindows(what + "dy", all.dy, parts.dy, kInner, slack);
    ExpectWindows(what + "dz", all.dz, parts.dz, kInner, slack);
    ExpectSame(what + "dgamma", all.dgamma, parts.dgamma, 1e-4);
  };
  for (const auto& [groups, norm_before_gate] : {std::pair<int64_t, bool>(8, true), {1, false}}) {
    const std::string what = absl::StrCat(groups, norm_before_gate ? ", norm first: " : ": ");
    Outputs parts = make(groups), all = make(groups);
    const auto run = [&](Outputs& out, int64_t begin, int64_t count) {
      GatedRmsNormBackwardArgs args = args_of(out, groups, begin, count);
      args.forward.norm_before_gate = norm_before_gate;
      GatedRmsNormForward(*stream_, args.forward);
      GatedRmsNormBackward(*stream_, args);
    };
    run(parts, 0, kCut);
    run(parts, kCut, kPositions - kCut);
    run(all, 0, kPositions);
    ASSERT_OK(stream_->Synchronize());
    expect(what, all, parts, 1e-5);
    if (groups > 1) continue;
    // The factor of a row behind a product, here of one rank that has all columns.
    Both sums = Zeros({kPositions}), dots = Zeros({kPositions});
    Zero(*stream_, all.dgamma.gpu());
    GatedRmsNormBackwardArgs args = args_of(all, groups, 0, kPositions);
    args.forward.group_width = kInner;
    args.forward.sums = sums.gpu().Reshape({kPositions, 1});
    GatedRmsNormUnscaled(*stream_, args.forward);
    args.out = args.forward.out;
    args.forward.sums = dots.gpu().Reshape({kPositions, 1});
    GatedRmsNormBackwardSums(*stream_, args);
    RmsScaleRows(*stream_, {.sums = sums.gpu(),
                            .rstd = args.forward.rstd.Reshape({kPositions}),
                            .width = kInner,
                            .rows = args.forward.out});
    ExpectWindows("scaled rows", all.out, parts.out, kInner, 5e-3);
    GatedRmsNormBackward(*stream_, args);
    ASSERT_OK(stream_->Synchronize());
    expect("by sums: ", all, parts, 5e-3);
  }
}

}  // namespace
}  // namespace muster::kernels
