// The choice among the attention kernels, and those that take every dtype and head width up to 256
// on any device. In order: the forward of 64-wide heads by our own kernel for Hopper where that is
// faster than cuDNN, cuDNN's graph where there is one for the problem, our own kernels on the
// tensor cores, and the kernels below.
//
// On an H200 the kernel for Hopper takes 0.89 to 0.92 of cuDNN's time from 2048 tokens on
// (docs/decisions/0008-which-attention-kernel-runs.md has the numbers, attention_forward_hopper.cu
// the choice), and cuDNN 0.6 to 0.8 of that of our other kernels. cuDNN has no mask for packed
// documents, and its backward in a fixed order takes memory that grows with the square of the
// sequence. A backward of our own for Hopper, 64-wide heads and any order takes 0.8 to 0.9 of the
// time of cuDNN's (attention_backward_hopper.h), measured on its own. It has not been measured in a
// model, so it runs with own_attention only.
//
// The kernels below: tiled attention with the online softmax of FlashAttention-2 (arXiv
// 2307.08691), in fp32 on the CUDA cores. A block takes one tile of queries (forward, dq) or of
// keys (dk, dv) of one head and walks over the tiles of the other side; the S x S matrix never
// leaves shared memory. dk and dv are summed over the queries and heads of a group inside one
// block, so nothing is atomic and the bits repeat.
//
// Threads are 16 x 16. In a GEMM of two tiles each thread owns R rows (ty * R + r) and R columns
// (tx + 16 c); in a GEMM with a [tile, D] matrix, R rows and columns tx + 16 k. Rows of matrices in
// shared memory are padded by one word, so that neighbouring tx access neighbouring banks.
#include <tuple>

#include "absl/strings/str_cat.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_backward_hopper.h"
#include "kernels/attention/attention_cudnn.h"
#include "kernels/attention/attention_flash.h"
#include "kernels/attention/attention_forward_hopper.h"
#include "kernels/attention/attention_problem.cuh"
#include "kernels/attention/head_width.h"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kSide = 16;
constexpr int kThreads = kSide * kSide;

// A tensor [B,S,heads,D] with strides, of any floating-point type.
struct View {
  void* data;
  DType dtype;
  int64_t batch_stride, row_stride, head_stride;

  __device__ int64_t At(int b, int head) const { return b * batch_stride + head * head_stride; }
  __device__ float Load(int64_t i) const { return FloatVector{data, dtype}[i]; }
  __device__ void Store(int64_t i, float x) const {
    if (dtype == DType::kF32) {
      static_cast<float*>(data)[i] = x;
    } else if (dtype == DType::kBF16) {
      static_cast<__nv_bfloat16*>(data)[i] = FromFloat<__nv_bfloat16>(x);
    } else {
      static_cast<__half*>(data)[i] = FromFloat<__half>(x);
    }
  }
};

View ViewOf(const Tensor& t) {
  if (t.empty()) return {};
  return {t.data(), t.dtype(), t.stride(0), t.stride(1), t.stride(2)};
}

using Problem = AttentionProblem<View>;

template <int kTile, int kWidth>
using Matrix = float[kTile][kWidth + 1];

// Rows [begin, begin + kTile) of one head; zeros past the end.
template <int kTile, int kWidth>
__device__ void LoadTile(const View& view, int64_t at, int begin, int rows, int width,
                         Matrix<kTile, kWidth>& tile) {
  for (int i = threadIdx.x; i < kTile * kWidth; i += kThreads) {
    const int row = i / kWidth;
    const int column = i % kWidth;
    const bool inside = begin + row < rows && column < width;
    tile[row][column] = inside ? view.Load(at + (begin + row) * view.row_stride + column) : 0.f;
  }
}

// out = a b^T, for this thread's rows and columns.
template <int kTile, int kWidth>
__device__ void TileGemm(const Matrix<kTile, kWidth>& a, const Matrix<kTile, kWidth>& b,
                         float (&out)[kTile / kSide][kTile / kSide]) {
  constexpr int R = kTile / kSide;
  const int ty = threadIdx.x / kSide;
  const int tx = threadIdx.x % kSide;
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < R; ++c) out[r][c] = 0;
  }
  for (int d = 0; d < kWidth; ++d) {
    float left[R], right[R];
#pragma unroll
    for (int r = 0; r < R; ++r) left[r] = a[ty * R + r][d];
#pragma unroll
    for (int c = 0; c < R; ++c) right[c] = b[tx + kSide * c][d];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < R; ++c) out[r][c] += left[r] * right[c];
    }
  }
}

// sum += p m (kTransposed: p^T m) for this thread's rows and the columns tx + 16 k of m.
template <bool kTransposed, int kTile, int kWidth>
__device__ void AddGemm(const Matrix<kTile, kTile>& p, const Matrix<kTile, kWidth>& m,
                        float (&sum)[kTile / kSide][kWidth / kSide]) {
  constexpr int R = kTile / kSide;
  const int ty = threadIdx.x / kSide;
  const int tx = threadIdx.x % kSide;
  for (int j = 0; j < kTile; ++j) {
    float left[R];
#pragma unroll
    for (int r = 0; r < R; ++r) left[r] = kTransposed ? p[j][ty * R + r] : p[ty * R + r][j];
#pragma unroll
    for (int k = 0; k < kWidth / kSide; ++k) {
      const float right = m[j][tx + kSide * k];
#pragma unroll
      for (int r = 0; r < R; ++r) sum[r][k] += left[r] * right;
    }
  }
}

template <int kTile, int kWidth>
__device__ void StoreTile(const View& view, int64_t at, int begin, int rows, int width,
                          const float (&tile)[kTile / kSide][kWidth / kSide]) {
  const int ty = threadIdx.x / kSide;
  const int tx = threadIdx.x % kSide;
#pragma unroll
  for (int r = 0; r < kTile / kSide; ++r) {
    const int row = begin + ty * (kTile / kSide) + r;
#pragma unroll
    for (int k = 0; k < kWidth / kSide; ++k) {
      const int column = tx + kSide * k;
      if (row < rows && column < width) view.Store(at + row * view.row_stride + column, tile[r][k]);
    }
  }
}

// Over the 16 threads that share rows.
__device__ float RowMax(float x) {
  for (int offset = kSide / 2; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}
__device__ float RowSum(float x) {
  for (int offset = kSide / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Grid: (query tiles, heads, batch).
template <int kTile, int kWidth>
__global__ void __launch_bounds__(kThreads) ForwardKernel(const Problem d) {
  constexpr int R = kTile / kSide;
  extern __shared__ float memory[];
  auto& q = *reinterpret_cast<Matrix<kTile, kWidth>*>(memory);
  auto& k = *(&q + 1);
  auto& v = *(&q + 2);
  auto& p = *reinterpret_cast<Matrix<kTile, kTile>*>(&q + 3);
  const int ty = threadIdx.x / kSide;
  const int tx = threadIdx.x % kSide;
  const int begin = blockIdx.x * kTile;
  const int head = blockIdx.y;
  const int key_head = head / (d.heads / d.key_heads);
  const int b = blockIdx.z;
  LoadTile<kTile, kWidth>(d.q, d.q.At(b, head), begin, d.queries, d.width, q);
  float max[R], sum[R], out[R][kWidth / kSide] = {};
#pragma unroll
  for (int r = 0; r < R; ++r) {
    max[r] = -INFINITY;
    sum[r] = 0;
  }
  const int keys = d.causal ? min(d.keys, begin + kTile) : d.keys;
  // Documents begin in the order of their tokens.
  for (int key = d.FirstKey(b, begin) / kTile * kTile; key < keys; key += kTile) {
    __syncthreads();  // every thread has read the tiles of the last round
    LoadTile<kTile, kWidth>(d.k, d.k.At(b, key_head), key, d.keys, d.width, k);
    LoadTile<kTile, kWidth>(d.v, d.v.At(b, key_head), key, d.keys, d.width, v);
    __syncthreads();
    float s[R][R];
    TileGemm<kTile, kWidth>(q, k, s);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = begin + ty * R + r;
      const int first = d.FirstKey(b, row);
      float tile_max = max[r];
#pragma unroll
      for (int c = 0; c < R; ++c) {
        const int column = key + tx + kSide * c;
        const bool seen = column >= first && column < d.keys && (!d.causal || column <= row);
        s[r][c] = seen ? s[r][c] * d.scale : -INFINITY;
        tile_max = fmaxf(tile_max, s[r][c]);
      }
      tile_max = RowMax(tile_max);
      // Until a row has seen a key, its maximum is -inf.
      const float base = tile_max == -INFINITY ? 0.f : tile_max;
      const float shrink = __expf(max[r] - base);
      max[r] = tile_max;
      float tile_sum = 0;
#pragma unroll
      for (int c = 0; c < R; ++c) {
        const float e = __expf(s[r][c] - base);
        tile_sum += e;
        p[ty * R + r][tx + kSide * c] = e;
      }
      sum[r] = sum[r] * shrink + RowSum(tile_sum);
#pragma unroll
      for (int w = 0; w < kWidth / kSide; ++w) out[r][w] *= shrink;
    }
    __syncwarp();  // a warp reads only rows of p that it has written
    AddGemm<false, kTile, kWidth>(p, v, out);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int row = begin + ty * R + r;
    if (tx == 0 && row < d.queries) d.lse[d.Statistic(b, head, row)] = max[r] + logf(sum[r]);
#pragma unroll
    for (int w = 0; w < kWidth / kSide; ++w) out[r][w] = sum[r] == 0 ? 0.f : out[r][w] / sum[r];
  }
  StoreTile<kTile, kWidth>(d.out, d.out.At(b, head), begin, d.queries, d.width, out);
}

// delta = row sums of dout * out. One warp a row. Grid: (rows / warps, heads, batch).
__global__ void __launch_bounds__(kThreads) DeltaKernel(const Problem d) {
  const int row = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= d.queries) return;
  const int64_t out = d.out.At(blockIdx.z, blockIdx.y) + row * d.out.row_stride;
  const int64_t dout = d.dout.At(blockIdx.z, blockIdx.y) + row * d.dout.row_stride;
  float sum = 0;
  for (int c = threadIdx.x % kWarp; c < d.width; c += kWarp) {
    sum += d.out.Load(out + c) * d.dout.Load(dout + c);
  }
  sum = WarpSum(sum);
  if (threadIdx.x % kWarp == 0) d.delta[d.Statistic(blockIdx.z, blockIdx.y, row)] = sum;
}

// For a tile of queries and one of keys: writes the gradient of the scores to shared memory, and
// with kProbabilities the probabilities, too.
template <bool kProbabilities, int kTile, int kWidth>
__device__ void ScoreGradient(const Problem& d, int b, int head, int query, int key,
                              const Matrix<kTile, kWidth>& q, const Matrix<kTile, kWidth>& k,
                              const Matrix<kTile, kWidth>& v, const Matrix<kTile, kWidth>& dout,
                              Matrix<kTile, kTile>* p, Matrix<kTile, kTile>& ds) {
  constexpr int R = kTile / kSide;
  const int ty = threadIdx.x / kSide;
  const int tx = threadIdx.x % kSide;
  float s[R][R], dp[R][R];
  TileGemm<kTile, kWidth>(q, k, s);
  TileGemm<kTile, kWidth>(dout, v, dp);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int row = query + ty * R + r;
    const bool inside = row < d.queries;
    const int first = d.FirstKey(b, row);
    const float lse = inside ? d.lse[d.Statistic(b, head, row)] : 0.f;
    const float delta = inside ? d.delta[d.Statistic(b, head, row)] : 0.f;
#pragma unroll
    for (int c = 0; c < R; ++c) {
      const int column = key + tx + kSide * c;
      const bool seen =
          inside && column >= first && column < d.keys && (!d.causal || column <= row);
      const float probability = seen ? __expf(s[r][c] * d.scale - lse) : 0.f;
      if (kProbabilities) (*p)[ty * R + r][tx + kSide * c] = probability;
      ds[ty * R + r][tx + kSide * c] = probability * (dp[r][c] - delta) * d.scale;
    }
  }
}

// Grid: (key tiles, key heads, batch).
template <int kTile, int kWidth>
__global__ void __launch_bounds__(kThreads) KeyValueGradientKernel(const Problem d) {
  constexpr int R = kTile / kSide;
  extern __shared__ float memory[];
  auto& q = *reinterpret_cast<Matrix<kTile, kWidth>*>(memory);
  auto& k = *(&q + 1);
  auto& v = *(&q + 2);
  auto& dout = *(&q + 3);
  auto& p = *reinterpret_cast<Matrix<kTile, kTile>*>(&q + 4);
  auto& ds = *(&p + 1);
  const int key = blockIdx.x * kTile;
  const int key_head = blockIdx.y;
  const int b = blockIdx.z;
  const int group = d.heads / d.key_heads;
  LoadTile<kTile, kWidth>(d.k, d.k.At(b, key_head), key, d.keys, d.width, k);
  LoadTile<kTile, kWidth>(d.v, d.v.At(b, key_head), key, d.keys, d.width, v);
  float dk[R][kWidth / kSide] = {}, dv[R][kWidth / kSide] = {};
  for (int head = key_head * group; head < (key_head + 1) * group; ++head) {
    for (int query = d.causal ? key : 0; query < d.queries; query += kTile) {
      if (d.FirstKey(b, query) >= key + kTile) break;  // this document begins behind the tile
      __syncthreads();
      LoadTile<kTile, kWidth>(d.q, d.q.At(b, head), query, d.queries, d.width, q);
      LoadTile<kTile, kWidth>(d.dout, d.dout.At(b, head), query, d.queries, d.width, dout);
      __syncthreads();
      ScoreGradient<true, kTile, kWidth>(d, b, head, query, key, q, k, v, dout, &p, ds);
      __syncthreads();
      AddGemm<true, kTile, kWidth>(p, dout, dv);
      AddGemm<true, kTile, kWidth>(ds, q, dk);
    }
  }
  StoreTile<kTile, kWidth>(d.dk, d.dk.At(b, key_head), key, d.keys, d.width, dk);
  StoreTile<kTile, kWidth>(d.dv, d.dv.At(b, key_head), key, d.keys, d.width, dv);
}

// Grid: (query tiles, heads, batch).
template <int kTile, int kWidth>
__global__ void __launch_bounds__(kThreads) QueryGradientKernel(const Problem d) {
  constexpr int R = kTile / kSide;
  extern __shared__ float memory[];
  auto& q = *reinterpret_cast<Matrix<kTile, kWidth>*>(memory);
  auto& k = *(&q + 1);
  auto& v = *(&q + 2);
  auto& dout = *(&q + 3);
  auto& ds = *reinterpret_cast<Matrix<kTile, kTile>*>(&q + 4);
  const int query = blockIdx.x * kTile;
  const int head = blockIdx.y;
  const int key_head = head / (d.heads / d.key_heads);
  const int b = blockIdx.z;
  LoadTile<kTile, kWidth>(d.q, d.q.At(b, head), query, d.queries, d.width, q);
  LoadTile<kTile, kWidth>(d.dout, d.dout.At(b, head), query, d.queries, d.width, dout);
  float dq[R][kWidth / kSide] = {};
  const int keys = d.causal ? min(d.keys, query + kTile) : d.keys;
  for (int key = d.FirstKey(b, query) / kTile * kTile; key < keys; key += kTile) {
    __syncthreads();
    LoadTile<kTile, kWidth>(d.k, d.k.At(b, key_head), key, d.keys, d.width, k);
    LoadTile<kTile, kWidth>(d.v, d.v.At(b, key_head), key, d.keys, d.width, v);
    __syncthreads();
    ScoreGradient<false, kTile, kWidth>(d, b, head, query, key, q, k, v, dout, nullptr, ds);
    __syncwarp();
    AddGemm<false, kTile, kWidth>(ds, k, dq);
  }
  StoreTile<kTile, kWidth>(d.dq, d.dq.At(b, head), query, d.queries, d.width, dq);
}

template <typename Kernel>
void Launch(CudaStream& stream, const char* op, Kernel kernel, dim3 grid, int shared_bytes,
            const Problem& d) {
  if (!stream.Check(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          op)) {
    return;
  }
  kernel<<<grid, kThreads, shared_bytes, stream.handle()>>>(d);
  stream.CheckLaunch(op);
}

template <int kTile, int kWidth>
constexpr int SharedBytes(int matrices, int squares) {
  return static_cast<int>(sizeof(Matrix<kTile, kWidth>)) * matrices +
         static_cast<int>(sizeof(Matrix<kTile, kTile>)) * squares;
}

dim3 Grid(int64_t rows, int tile, int64_t heads, int64_t batch) {
  return dim3(static_cast<unsigned>(CeilDiv(rows, tile)), static_cast<unsigned>(heads),
              static_cast<unsigned>(batch));
}

// Tiles by head width: the first row that is wide enough and fits into the device's shared memory
// (164 KiB a block of sm_80, 227 KiB of sm_90, 99 KiB of sm_86 and sm_89) is taken.
template <int tile, int width>
struct Tiles {
  static constexpr int kTile = tile, kWidth = width;
};
using ForwardTiles =
    std::tuple<Tiles<64, 64>, Tiles<64, 128>, Tiles<32, 128>, Tiles<32, 256>, Tiles<16, 256>>;
using BackwardTiles = std::tuple<Tiles<64, 64>, Tiles<32, 128>, Tiles<32, 256>, Tiles<16, 256>>;

template <typename Tiles>
constexpr int kForwardBytes = SharedBytes<Tiles::kTile, Tiles::kWidth>(3, 1);
template <typename Tiles>
constexpr int kBackwardBytes = SharedBytes<Tiles::kTile, Tiles::kWidth>(4, 2);

template <typename Tiles>
bool TryForward(CudaStream& stream, const Problem& d) {
  constexpr int kTile = Tiles::kTile, kWidth = Tiles::kWidth;
  if (d.width > kWidth || kForwardBytes < Tiles >> stream.cuda_device().shared_bytes_per_block()) {
    return false;
  }
  Launch(stream, "AttentionForward", ForwardKernel<kTile, kWidth>,
         Grid(d.queries, kTile, d.heads, d.batch), kForwardBytes<Tiles>, d);
  return true;
}

template <typename Tiles>
bool TryBackward(CudaStream& stream, const Problem& d) {
  constexpr int kTile = Tiles::kTile, kWidth = Tiles::kWidth;
  if (d.width > kWidth || kBackwardBytes < Tiles >> stream.cuda_device().shared_bytes_per_block()) {
    return false;
  }
  DeltaKernel<<<Grid(d.queries, kThreads / kWarp, d.heads, d.batch), kThreads, 0,
                stream.handle()>>>(d);
  stream.CheckLaunch("AttentionBackward: delta");
  Launch(stream, "AttentionBackward: dk, dv", KeyValueGradientKernel<kTile, kWidth>,
         Grid(d.keys, kTile, d.key_heads, d.batch), kBackwardBytes<Tiles>, d);
  Launch(stream, "AttentionBackward: dq", QueryGradientKernel<kTile, kWidth>,
         Grid(d.queries, kTile, d.heads, d.batch), SharedBytes<kTile, kWidth>(4, 1), d);
  return true;
}

template <typename... Rows>
void TiledForward(CudaStream& stream, const Problem& d, std::tuple<Rows...>) {
  CHECK_LE(d.width, kCudaHeadWidthMax);
  if ((TryForward<Rows>(stream, d) || ...)) return;
  stream.Fail(absl::UnimplementedError(
      absl::StrCat("AttentionForward: no tile of heads of ", d.width, " fits the device")));
}

template <typename... Rows>
void TiledBackward(CudaStream& stream, const Problem& d, std::tuple<Rows...>) {
  CHECK_LE(d.width, kCudaHeadWidthMax);
  if ((TryBackward<Rows>(stream, d) || ...)) return;
  stream.Fail(absl::UnimplementedError(
      absl::StrCat("AttentionBackward: no tile of heads of ", d.width, " fits the device")));
}

}  // namespace

void AttentionForward(Stream& stream, const AttentionArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.q.elements() == 0) return;
  const bool own = cuda.cuda_device().options().own_attention;
  if ((own || HopperAttentionForwardIsFaster(args)) && HopperAttentionForward(cuda, args)) return;
  if (!own && cuda.attention_plans().Forward(cuda, args)) return;
  if (FlashForward(cuda, args)) return;
  TiledForward(cuda, ProblemOf<View>(args, ViewOf), ForwardTiles());
}

void AttentionBackward(Stream& stream, const AttentionBackwardArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.forward.q.elements() == 0) return;
  const bool own = cuda.cuda_device().options().own_attention;
  if (own && HopperAttentionBackward(cuda, args)) return;
  if (!own && cuda.attention_plans().Backward(cuda, args)) return;
  if (FlashBackward(cuda, args)) return;
  TiledBackward(cuda, ProblemOf<View>(args, ViewOf), BackwardTiles());
}

}  // namespace muster::kernels::cuda
