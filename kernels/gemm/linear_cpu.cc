// Linear layers on the host: GEMMs in tiles on oneDNN, with the epilogue applied to a tile while it
// is in the cache.
//
// The tiling depends on the shape alone and no sum is split over threads, so results do not depend
// on the number of threads. Each tile packs its operands again; with tiles of some hundred rows and
// columns that costs a few per cent of the multiplication.
#include <algorithm>
#include <cstdint>

#include "kernels/activation/activation.h"
#include "kernels/attention/rotary.h"
#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/gemm/gemm_cpu.h"
#include "kernels/gemm/linear.h"
#include "kernels/gemm/weight_gradient.h"
#include "kernels/memory/memory.h"
#include "kernels/simd/loops.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(Add)
MUSTER_TWINS(Zero)
MUSTER_TWINS(Rotary)
MUSTER_TWINS(Relu2Forward)
MUSTER_TWINS(Relu2Backward)
MUSTER_TWINS(SwigluForward)
MUSTER_TWINS(SwigluBackward)

namespace cpu {

void SumSquaresPair(Stream& stream, Tensor x, Tensor out, bool accumulate);

namespace {

constexpr int64_t kGeluElements = 16 * 1024;

// Tiles of an m x n result.
struct Tiling {
  int64_t m, n, tile_m, tile_n, columns, count;

  // About eight tiles or more where the result is large enough, none smaller than the minimum
  // sizes, and none so wide that a packed operand leaves the L2 cache.
  Tiling(int64_t rows, int64_t cols) : m(rows), n(cols) {
    constexpr int64_t kTilesWanted = 8, kRowsMin = 128, kRowsMax = 512, kColsMin = 192,
                      kColsMax = 768;
    tile_m = std::min(kRowsMax, m);
    tile_n = std::min(kColsMax, n);
    auto tiles = [&] { return ((m + tile_m - 1) / tile_m) * ((n + tile_n - 1) / tile_n); };
    while (tiles() < kTilesWanted && (tile_n > kColsMin || tile_m > kRowsMin)) {
      if (tile_n > kColsMin && (tile_n >= tile_m || tile_m <= kRowsMin)) {
        tile_n = std::max(kColsMin, (tile_n / 2 + 47) / 48 * 48);
      } else {
        tile_m = std::max(kRowsMin, (tile_m / 2 + 15) / 16 * 16);
      }
    }
    columns = (n + tile_n - 1) / tile_n;
    count = (m + tile_m - 1) / tile_m * columns;
  }
};

struct Tile {
  int64_t m0, m, n0, n;

  Tile(const Tiling& tiling, int64_t index)
      : m0(index / tiling.columns * tiling.tile_m),
        m(std::min(tiling.tile_m, tiling.m - m0)),
        n0(index % tiling.columns * tiling.tile_n),
        n(std::min(tiling.tile_n, tiling.n - n0)) {}
};

void ForwardTile(const LinearForwardArgs& args, const Tile& tile) {
  const Loops& loops = ChooseLoops();
  const int64_t k = args.x.dim(1), n = args.w.dim(0);
  float* y = args.y.f32() + tile.m0 * n + tile.n0;
  Gemm(tile.m, tile.n, k, {args.x.f32() + tile.m0 * k, k},
       {args.w.f32() + tile.n0 * k, k, Transpose::kYes}, 0, y, n);
  const float* bias = args.bias.empty() ? nullptr : args.bias.f32() + tile.n0;
  for (int64_t row = 0; row < tile.m; ++row) {
    if (args.epilogue == Epilogue::kGelu) {
      loops.add_bias_gelu(tile.n, bias, y + row * n,
                          args.pre.f32() + (tile.m0 + row) * n + tile.n0);
    } else if (bias != nullptr) {
      loops.add_bias(tile.n, bias, y + row * n);
    }
  }
}

// dx = dy w, then times gelu'(pre).
void InputGradientTile(const LinearBackwardArgs& args, const Tile& tile) {
  const Loops& loops = ChooseLoops();
  const int64_t k = args.w.dim(1), n = args.w.dim(0);
  float* dx = args.dx.f32() + tile.m0 * k + tile.n0;
  Gemm(tile.m, tile.n, n, {args.dy.f32() + tile.m0 * n, n}, {args.w.f32() + tile.n0, k},
       args.accumulate_dx ? 1 : 0, dx, k);
  if (args.pre.empty()) return;
  for (int64_t row = 0; row < tile.m; ++row) {
    const float* pre = args.pre.f32() + (tile.m0 + row) * k + tile.n0;
    loops.gelu_backward(tile.n, pre, dx + row * k, dx + row * k);
  }
}

void AddColumnSums(bool accumulate, int64_t rows, int64_t columns, int64_t stride, const float* x,
                   float* out) {
  if (!accumulate) std::fill(out, out + columns, 0.0f);
  ChooseLoops().add_column_sums(rows, columns, stride, x, out);
}

// dw += dy^T x; the first tile of a row of tiles also sums the columns of dy.
void WeightGradientTile(const LinearBackwardArgs& args, const Tile& tile) {
  const int64_t t = args.x.dim(0), k = args.x.dim(1), n = args.w.dim(0);
  const float* dy = args.dy.f32() + tile.m0;
  Gemm(tile.m, tile.n, t, {dy, n, Transpose::kYes}, {args.x.f32() + tile.n0, k},
       args.accumulate ? 1 : 0, args.dw.f32() + tile.m0 * k + tile.n0, k);
  if (!args.dbias.empty() && tile.n0 == 0) {
    AddColumnSums(args.accumulate, t, tile.m, n, dy, args.dbias.f32() + tile.m0);
  }
}

// pre_dbias += column sums of dx, a slice of the columns at a time.
void BiasGradientInFront(ThreadPool& pool, const LinearBackwardArgs& args) {
  constexpr int64_t kColumns = 512;
  const int64_t t = args.dx.dim(0), k = args.dx.dim(1);
  pool.RunRanges(k, kColumns, [&](int64_t begin, int64_t count) {
    AddColumnSums(args.accumulate, t, count, k, args.dx.f32() + begin,
                  args.pre_dbias.f32() + begin);
  });
}

}  // namespace

void LinearForward(Stream& stream, const LinearForwardArgs& args) {
  if (args.epilogue == Epilogue::kRelu2) {
    cpu::LinearForward(stream, {.x = args.x, .w = args.w, .bias = args.bias, .y = args.pre});
    cpu::Relu2Forward(stream, args.pre, args.y);
    return;
  }
  if (args.epilogue == Epilogue::kSwiglu) {
    cpu::LinearForward(stream, {.x = args.x, .w = args.w, .bias = args.bias, .y = args.pre});
    cpu::SwigluForward(stream, args.pre, args.y);
    return;
  }
  if (!args.residual.empty()) {
    cpu::LinearForward(stream, {.x = args.x, .w = args.w, .bias = args.bias, .y = args.y});
    cpu::Add(stream, args.residual, args.y, args.y);
    return;
  }
  if (args.epilogue == Epilogue::kRotary) {
    cpu::LinearForward(stream, {.x = args.x, .w = args.w, .bias = args.bias, .y = args.y});
    cpu::Rotary(stream, args.RotaryHeads(), args.rotary, /*inverse=*/false);
    return;
  }
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const SingleThreadedScope scope;
    if (args.y.elements() == 0) return;
    const Tiling tiling(args.x.dim(0), args.w.dim(0));
    pool.Run(tiling.count, [&](int64_t i) { ForwardTile(args, Tile(tiling, i)); });
  });
}

void LinearBackward(Stream& stream, const LinearBackwardArgs& args) {
  if (!args.packed.empty()) {
    cpu::LinearBackward(stream, {.dy = args.dy, .w = args.w, .dx = args.dx});
    cpu::SwigluBackward(stream, args.packed, args.dx, args.d_packed,
                        args.recompute_x ? args.x : Tensor());
    return;
  }
  if (!args.pre.empty() && args.activation == Epilogue::kRelu2) {
    cpu::LinearBackward(stream, {.dy = args.dy, .w = args.w, .dx = args.dx});
    cpu::Relu2Backward(stream, args.pre, args.dx, args.dx, args.recompute_x ? args.x : Tensor());
    if (args.dw.empty()) return;
    cpu::LinearBackward(stream, {.dy = args.dy,
                                 .x = args.x,
                                 .w = args.w,
                                 .dw = args.dw,
                                 .dbias = args.dbias,
                                 .accumulate = args.accumulate});
    return;
  }
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const SingleThreadedScope scope;
    if (args.dy.elements() == 0) return;
    const int64_t t = args.dy.dim(0), k = args.w.dim(1), n = args.w.dim(0);
    if (args.recompute_x) {
      pool.RunRanges(args.x.elements(), kGeluElements, [&](int64_t begin, int64_t count) {
        ChooseLoops().gelu_forward(count, args.pre.f32() + begin, args.x.f32() + begin);
      });
    }
    const Tiling weight(n, k), input(t, k);
    const int64_t input_tiles = args.dx.empty() ? 0 : input.count;
    const int64_t weight_tiles = args.dw.empty() ? 0 : weight.count;
    // One loop for both, so that no thread waits between them. The longer tasks of dx come first.
    pool.Run(input_tiles + weight_tiles, [&](int64_t i) {
      if (i < input_tiles) {
        InputGradientTile(args, Tile(input, i));
      } else {
        WeightGradientTile(args, Tile(weight, i - input_tiles));
      }
    });
    if (!args.pre_dbias.empty()) BiasGradientInFront(pool, args);
  });
}

void WeightGradient(Stream& stream, const WeightGradientArgs& args, bool* has_squares) {
  *has_squares = true;
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

}  // namespace cpu
}  // namespace muster::kernels
