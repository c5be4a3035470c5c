// Launches of attention_flash.cuh, and the tiles by head width, chosen among 75 variants on an H200
// (docs/decisions/0008-which-attention-kernel-runs.md). For MMAs by warps it matters how often a
// warp uses a word that it reads from shared memory: a warp owns 32 rows where their sums fit into
// 255 registers, and 16 rows of dk and dv from width 96 on. For MMAs by warpgroups it matters how
// much other work a multiprocessor has while one of them waits.
#include "kernels/attention/attention_flash.h"

#include <algorithm>

#include "kernels/attention/attention_flash.cuh"
#include "kernels/attention/head_width.h"

namespace muster::kernels::cuda {
namespace flash {

// A warp or warpgroup owns rows of queries: forward, dq.
template <int width, int keys, int part, bool keep>
struct QueryShape {
  static constexpr int kWidth = width, kM = 2, kWarps = 4, kKeys = keys, kPart = part, kBlocks = 2;
  static constexpr int kQueries = kWarps * 16 * kM;
  static constexpr bool kKeep = keep, kGroups = false;
};
template <int width, int warps, int blocks>
struct QueryGroupShape {
  static constexpr int kWidth = width, kM = 1, kWarps = warps, kKeys = 64, kPart = 64;
  static constexpr int kQueries = warps * 16, kBlocks = blocks;
  static constexpr bool kKeep = false, kGroups = true;
};
// A warp or warpgroup owns rows of keys: dk, dv.
template <int width, int tiles, int part>
struct KeyShape {
  static constexpr int kWidth = width, kM = tiles, kWarps = 4, kQueries = 64, kPart = part;
  static constexpr int kBlocks = 2, kKeys = kWarps * 16 * kM;
  static constexpr bool kKeep = false, kGroups = false;
};
template <int width, int queries>
struct KeyGroupShape {
  static constexpr int kWidth = width, kM = 1, kWarps = 8, kQueries = queries, kPart = 64;
  static constexpr int kBlocks = 1, kKeys = kWarps * 16;
  static constexpr bool kKeep = false, kGroups = true;
};

}  // namespace flash

namespace {

using flash::KeyGroupShape;
using flash::KeyShape;
using flash::Problem;
using flash::QueryGroupShape;
using flash::QueryShape;

template <int width>
struct Shapes;
template <>
struct Shapes<64> {
  using Forward = QueryShape<64, 64, 64, true>;
  using QueryGradient = QueryShape<64, 64, 32, true>;
  using KeyGradient = KeyShape<64, 2, 32>;
};
template <>
struct Shapes<96> {
  using Forward = QueryShape<96, 64, 64, false>;
  using QueryGradient = QueryShape<96, 32, 32, false>;
  using KeyGradient = KeyShape<96, 1, 64>;
};
template <>
struct Shapes<128> {
  using Forward = QueryShape<128, 32, 32, false>;
  using QueryGradient = QueryShape<128, 32, 32, false>;
  using KeyGradient = KeyShape<128, 1, 64>;
};

template <int width>
struct GroupShapes;
template <>
struct GroupShapes<64> {
  using Forward = QueryGroupShape<64, 8, 2>;
  using QueryGradient = QueryGroupShape<64, 8, 2>;
  using KeyGradient = KeyGroupShape<64, 128>;
};
template <>
struct GroupShapes<128> {
  using Forward = QueryGroupShape<128, 12, 1>;
  using QueryGradient = QueryGroupShape<128, 8, 1>;
  using KeyGradient = KeyGroupShape<128, 64>;
};

bool Takes(const AttentionArgs& args) {
  const int64_t width = args.q.dim(3);
  return args.q.dtype() != DType::kF32 && width % kTensorCoreHeadWidthStep == 0 &&
         width <= kTensorCoreHeadWidthMax && ScaleOf(args) > 0 && WholePacks(args.q) &&
         WholePacks(args.k) && WholePacks(args.v) && WholePacks(args.out);
}

// Calls f(T{}, shapes) for the element type and the narrowest tiles that hold the heads.
template <typename F>
bool Dispatch(CudaStream& stream, const AttentionArgs& args, const F& f) {
  const auto by_width = [&](auto element) {
    const int64_t width = args.q.dim(3);
    if (HasWarpgroups(stream.cuda_device())) {
      return width <= 64 ? f(element, GroupShapes<64>{}) : f(element, GroupShapes<128>{});
    }
    if (width <= 64) return f(element, Shapes<64>{});
    if (width <= 96) return f(element, Shapes<96>{});
    return f(element, Shapes<128>{});
  };
  return args.q.dtype() == DType::kBF16 ? by_width(__nv_bfloat16{}) : by_width(__half{});
}

// One block for each tile of `rows` of each of `heads` heads of each sample.
template <typename Shape, typename T, typename Kernel>
void Launch(CudaStream& stream, const char* op, Kernel kernel, const Problem<T>& d, int rows,
            int tile, int heads, int shared_bytes) {
  if (!stream.Check(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          op)) {
    return;
  }
  const auto tiles = static_cast<int>(CeilDiv(rows, tile));
  const auto blocks = static_cast<unsigned>(int64_t{tiles} * heads * d.batch);
  kernel<<<blocks, Shape::kWarps * kWarp, shared_bytes, stream.handle()>>>(d, tiles);
  stream.CheckLaunch(op);
}

}  // namespace

bool FlashForward(CudaStream& stream, const AttentionArgs& args) {
  if (!Takes(args)) return false;
  return Dispatch(stream, args, [&](auto element, auto shapes) {
    using T = decltype(element);
    using Shape = typename decltype(shapes)::Forward;
    constexpr int kBytes = flash::ForwardBytes<Shape>();
    if (kBytes > stream.cuda_device().shared_bytes_per_block()) return false;
    const Problem<T> d = ProblemOf<HeadsView<T>>(args, ViewHeads<T>);
    Launch<Shape>(stream, "AttentionForward", flash::ForwardKernel<T, Shape>, d, d.queries,
                  Shape::kQueries, d.heads, kBytes);
    return true;
  });
}

bool FlashBackward(CudaStream& stream, const AttentionBackwardArgs& args) {
  if (!Takes(args.forward) || !WholePacks(args.dout) || !WholePacks(args.dq) ||
      !WholePacks(args.dk) || !WholePacks(args.dv)) {
    return false;
  }
  return Dispatch(stream, args.forward, [&](auto element, auto shapes) {
    using T = decltype(element);
    using QueryGradient = typename decltype(shapes)::QueryGradient;
    using KeyGradient = typename decltype(shapes)::KeyGradient;
    constexpr int kQueryBytes = flash::QueryGradientBytes<QueryGradient>();
    constexpr int kKeyBytes = flash::KeyValueGradientBytes<KeyGradient>();
    if (std::max(kQueryBytes, kKeyBytes) > stream.cuda_device().shared_bytes_per_block()) {
      return false;
    }
    const Problem<T> d = ProblemOf<HeadsView<T>>(args, ViewHeads<T>);
    const int64_t rows = int64_t{d.batch} * d.queries * d.heads;
    const int lanes = d.width <= 64 ? 8 : 16;
    flash::DeltaKernel<T><<<static_cast<unsigned>(CeilDiv(rows * lanes, flash::kDeltaThreads)),
                            flash::kDeltaThreads, 0, stream.handle()>>>(d, rows, lanes);
    stream.CheckLaunch("AttentionBackward: delta");
    Launch<KeyGradient>(stream, "AttentionBackward: dk, dv",
                        flash::KeyValueGradientKernel<T, KeyGradient>, d, d.keys,
                        KeyGradient::kKeys, d.key_heads, kKeyBytes);
    Launch<QueryGradient>(stream, "AttentionBackward: dq",
                          flash::QueryGradientKernel<T, QueryGradient>, d, d.queries,
                          QueryGradient::kQueries, d.heads, kQueryBytes);
    return true;
  });
}

}  // namespace muster::kernels::cuda
