// Embedding. Forward: out[t] = wte[tokens[t]] + wpe[t % S].
// Backward of wte without atomics: positions are sorted by token (stable, so each token's positions
// stay in order) and each block adds up the runs of equal tokens inside its kChunk sorted
// positions. A run inside one chunk is added to d_wte at once; the parts of a run that crosses
// chunks go to scratch and the chunk where the run begins adds them in order. However skewed the
// tokens are, no block reads more than kChunk rows in the first stage. Bytes: [T,C] once, the
// touched rows of d_wte twice. Backward of wpe: one thread a column of a position adds over the
// batch.
#include <cub/device/device_radix_sort.cuh>

#include "kernels/device_cuda.h"
#include "kernels/elementwise.cuh"
#include "kernels/ops_cuda.h"
#include "kernels/pack.cuh"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 32;
constexpr int kRowsInFlight = 4;

template <typename T, typename W, int N>
__global__ void __launch_bounds__(kThreads)
    ForwardKernel(const int32_t* tokens, const W* wte, const W* wpe, int64_t sequence,
                  int64_t vocab, int64_t rows, int columns, T* out) {
  const int packs = columns / N;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= rows * packs) return;
  const int64_t row = i / packs;
  const int column = static_cast<int>(i % packs) * N;
  const int64_t token = tokens[row];
  float v[N];
  if (token >= 0 && token < vocab) {
    LoadFloats<N>(wte + token * columns + column, v);
  } else {
    // Wrong data must not pass for an embedding.
    const float value = token == -1 ? 0.0f : NAN;
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = value;
  }
  if (wpe != nullptr) {
    float p[N];
    LoadFloats<N>(wpe + row % sequence * columns + column, p);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] += p[j];
  }
  StorePack<N>(out + row * columns + column, FromFloats<T>(v));
}

__global__ void __launch_bounds__(kThreads) PositionsKernel(int n, int32_t* positions) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < n) positions[i] = i;
}

// pieces [chunks][2][columns]: what this chunk adds to the run it begins in the middle of (0) and
// to the run it ends in the middle of (1). A run that covers the whole chunk is in 0.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    SegmentKernel(const int32_t* tokens, const int32_t* positions, const T* dout, int n,
                  int columns, int vocab, float* d_wte, float* pieces) {
  __shared__ int32_t token[kChunk + 2];  // with the neighbours
  __shared__ int32_t position[kChunk];
  const int begin = blockIdx.x * kChunk;
  const int count = min(kChunk, n - begin);
  for (int i = threadIdx.x; i < count + 2; i += kThreads) {
    const int at = begin + i - 1;
    token[i] = at >= 0 && at < n ? tokens[at] : -1;
  }
  for (int i = threadIdx.x; i < count; i += kThreads) position[i] = positions[begin + i];
  __syncthreads();
  float* const piece = pieces + static_cast<int64_t>(blockIdx.x) * 2 * columns;
  for (int column = threadIdx.x * N; column < columns; column += kThreads * N) {
    float sum[N] = {};
    for (int batch = 0; batch < count; batch += kRowsInFlight) {
      // Loaded together, what is added to as well: the stores below would hold back later loads.
      Pack<T, N> rows[kRowsInFlight];
      float*
          target[kRowsInFlight];  // of the run that ends here; nullptr: it goes on, or is nobody's
      Pack<float, N> before[kRowsInFlight];
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        const int i = min(batch + r, count - 1);
        rows[r] = LoadPack<N>(dout + static_cast<int64_t>(position[i]) * columns + column);
        target[r] = nullptr;
        before[r] = Pack<float, N>{};
        const int32_t id = token[i + 1];
        const bool goes_on = token[i + 2] == id;  // in the next chunk when this is the last row
        if (batch + r >= count || (goes_on && i + 1 < count) || id < 0 || id >= vocab) continue;
        const bool began_before = token[0] == id;  // sorted: all rows from the first on are its
        target[r] = began_before || goes_on ? piece + (began_before ? 0 : columns) + column
                                            : d_wte + static_cast<int64_t>(id) * columns + column;
        if (!began_before && !goes_on) before[r] = LoadPack<N>(target[r]);
      }
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        if (batch + r >= count) break;
        const int i = batch + r;
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += rows[r][j];
        if (i + 1 < count && token[i + 2] == token[i + 1]) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += before[r][j];
        if (target[r] != nullptr) StorePack<N>(target[r], FromFloats<float>(sum));
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = 0;
      }
    }
  }
}

// Adds the pieces of every run that crosses chunks: done by the chunk that the run begins in.
__global__ void __launch_bounds__(kThreads)
    PiecesKernel(const int32_t* tokens, const float* pieces, int n, int columns, int vocab,
                 float* d_wte) {
  const int end = (blockIdx.x + 1) * kChunk;  // of this chunk
  if (end >= n || tokens[end - 1] != tokens[end]) return;
  const int32_t token = tokens[end - 1];
  if (token < 0 || token >= vocab) return;
  // A run that began before this chunk and covers it is added by an earlier block.
  const int begin = end - kChunk;
  if (begin > 0 && tokens[begin - 1] == token) return;
  int inside = end;  // the run's last position, by bisection
  for (int outside = n; outside - inside > 1;) {
    const int middle = inside + (outside - inside) / 2;
    (tokens[middle] == token ? inside : outside) = middle;
  }
  const int last = inside / kChunk;
  for (int c = threadIdx.x; c < columns; c += kThreads) {
    float sum = pieces[(static_cast<int64_t>(blockIdx.x) * 2 + 1) * columns + c];
#pragma unroll 8
    for (int chunk = blockIdx.x + 1; chunk <= last; ++chunk) {
      sum += pieces[static_cast<int64_t>(chunk) * 2 * columns + c];
    }
    d_wte[static_cast<int64_t>(token) * columns + c] += sum;
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    PositionGradientKernel(const T* dout, int64_t batch, int64_t row_elements, float* d_wpe) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (i >= row_elements) return;
  float sum[N] = {};
#pragma unroll 8
  for (int64_t b = 0; b < batch; ++b) {
    float g[N];
    LoadFloats<N>(dout + b * row_elements + i, g);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += g[j];
  }
#pragma unroll
  for (int j = 0; j < N; ++j) d_wpe[i + j] += sum[j];
}

// Scratch of the backward of wte, in the order it lies in memory.
struct SortScratch {
  int64_t positions, sorted_tokens, sorted_positions, sort, pieces, total;
};

SortScratch LayOut(int n, int columns, size_t sort_bytes) {
  int64_t at = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t begin = at;
    at += CeilDiv(bytes, 256) * 256;
    return begin;
  };
  SortScratch s;
  s.positions = take(n * sizeof(int32_t));
  s.sorted_tokens = take(n * sizeof(int32_t));
  s.sorted_positions = take(n * sizeof(int32_t));
  s.sort = take(static_cast<int64_t>(sort_bytes));
  s.pieces = take(CeilDiv(n, kChunk) * 2 * columns * static_cast<int64_t>(sizeof(float)));
  s.total = at;
  return s;
}

template <typename T>
void TokenGradient(CudaStream& stream, const Tensor& tokens, const Tensor& dout,
                   const Tensor& d_wte) {
  const int n = static_cast<int>(tokens.elements());
  const int columns = static_cast<int>(dout.dim(1));
  const auto* keys = tokens.as<const uint32_t>();
  int bits = 1;
  // One more than the vocabulary needs where that is a power of two: no row is a neighbour of -1.
  while (bits < 31 && (int64_t{1} << bits) <= d_wte.dim(0)) ++bits;
  const auto sort = [&](void* storage, size_t& bytes, uint32_t* keys_out, int32_t* values,
                        int32_t* values_out) {
    return cub::DeviceRadixSort::SortPairs(storage, bytes, keys, keys_out, values, values_out, n, 0,
                                           bits, stream.handle());
  };
  size_t sort_bytes = 0;
  if (!stream.Check(sort(nullptr, sort_bytes, nullptr, nullptr, nullptr), "EmbeddingBackward")) {
    return;
  }
  const SortScratch layout = LayOut(n, columns, sort_bytes);
  auto* scratch = static_cast<uint8_t*>(stream.Scratch(layout.total));
  if (scratch == nullptr) return;
  auto* positions = reinterpret_cast<int32_t*>(scratch + layout.positions);
  auto* sorted_tokens = reinterpret_cast<int32_t*>(scratch + layout.sorted_tokens);
  auto* sorted_positions = reinterpret_cast<int32_t*>(scratch + layout.sorted_positions);
  auto* pieces = reinterpret_cast<float*>(scratch + layout.pieces);
  PositionsKernel<<<static_cast<unsigned>(CeilDiv(n, kThreads)), kThreads, 0, stream.handle()>>>(
      n, positions);
  if (!stream.CheckLaunch("EmbeddingBackward: positions")) return;
  if (!stream.Check(sort(scratch + layout.sort, sort_bytes,
                         reinterpret_cast<uint32_t*>(sorted_tokens), positions, sorted_positions),
                    "EmbeddingBackward: sort")) {
    return;
  }
  const auto chunks = static_cast<unsigned>(CeilDiv(n, kChunk));
  constexpr int N = kPackSize<T> / 2;  // 8 bytes of 16-bit types: enough threads for C = 768
  if (columns % N == 0 && Aligned16(dout) && Aligned16(d_wte)) {
    SegmentKernel<T, N><<<chunks, kThreads, 0, stream.handle()>>>(
        sorted_tokens, sorted_positions, dout.as<T>(), n, columns, static_cast<int>(d_wte.dim(0)),
        d_wte.f32(), pieces);
  } else {
    SegmentKernel<T, 1><<<chunks, kThreads, 0, stream.handle()>>>(
        sorted_tokens, sorted_positions, dout.as<T>(), n, columns, static_cast<int>(d_wte.dim(0)),
        d_wte.f32(), pieces);
  }
  stream.CheckLaunch("EmbeddingBackward: segments");
  PiecesKernel<<<chunks, kThreads, 0, stream.handle()>>>(
      sorted_tokens, pieces, n, columns, static_cast<int>(d_wte.dim(0)), d_wte.f32());
  stream.CheckLaunch("EmbeddingBackward: pieces");
}

template <typename T>
void PositionGradient(CudaStream& stream, const Tensor& dout, int64_t sequence,
                      const Tensor& d_wpe) {
  const int64_t row_elements = sequence * dout.dim(1);
  const int64_t batch = dout.dim(0) / sequence;
  const auto blocks = [&](int width) {
    return static_cast<unsigned>(CeilDiv(row_elements, int64_t{kThreads} * width));
  };
  constexpr int N = kPackSize<T>;
  if (row_elements % N == 0 && Aligned16(dout)) {
    PositionGradientKernel<T, N><<<blocks(N), kThreads, 0, stream.handle()>>>(
        dout.as<T>(), batch, row_elements, d_wpe.f32());
  } else {
    PositionGradientKernel<T, 1><<<blocks(1), kThreads, 0, stream.handle()>>>(
        dout.as<T>(), batch, row_elements, d_wpe.f32());
  }
  stream.CheckLaunch("EmbeddingBackward: positions");
}

struct ShardElements {
  const int32_t* tokens;
  int32_t* out;
  int64_t first, count;
  template <int N>
  __device__ void Apply(int64_t i) const {
    Pack<int32_t, N> pack = LoadPack<N>(tokens + i);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int64_t local = pack.words[j] - first;
      pack.words[j] = local >= 0 && local < count ? static_cast<int32_t>(local) : -1;
    }
    StorePack<N>(out + i, pack);
  }
};

}  // namespace

void EmbeddingForward(Stream& stream, Tensor tokens, Tensor wte, Tensor wpe, int64_t sequence,
                      Tensor out) {
  CudaStream& cuda = CudaStream::Of(stream);
  CHECK(wpe.empty() || wpe.dtype() == wte.dtype());
  const int64_t rows = out.dim(0);
  const int columns = static_cast<int>(out.dim(1));
  if (rows == 0) return;
  DispatchFloat(wte.dtype(), [&](auto weight) {
    DispatchFloat(out.dtype(), [&](auto tag) {
      using W = decltype(weight);
      using T = decltype(tag);
      const W* positions = wpe.empty() ? nullptr : wpe.as<W>();
      const auto launch = [&](auto kernel, int width) {
        const auto blocks = static_cast<unsigned>(CeilDiv(rows * (columns / width), kThreads));
        kernel<<<blocks, kThreads, 0, cuda.handle()>>>(tokens.as<int32_t>(), wte.as<W>(), positions,
                                                       sequence, wte.dim(0), rows, columns,
                                                       out.as<T>());
      };
      constexpr int N = kPackSize<T>;
      if (columns % N == 0 && Aligned16(wte) && Aligned16(wpe) && Aligned16(out)) {
        launch(ForwardKernel<T, W, N>, N);
      } else {
        launch(ForwardKernel<T, W, 1>, 1);
      }
    });
  });
  cuda.CheckLaunch("EmbeddingForward");
}

void EmbeddingBackward(Stream& stream, Tensor tokens, Tensor dout, int64_t sequence, Tensor d_wte,
                       Tensor d_wpe) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (dout.dim(0) == 0) return;
  DispatchFloat(dout.dtype(), [&](auto tag) {
    using T = decltype(tag);
    if (!d_wte.empty()) TokenGradient<T>(cuda, tokens, dout, d_wte);
    if (!d_wpe.empty()) PositionGradient<T>(cuda, dout, sequence, d_wpe);
  });
}

void ShardTokens(Stream& stream, Tensor tokens, int64_t first, int64_t count, Tensor out) {
  Elementwise<4>(CudaStream::Of(stream), "ShardTokens", tokens.elements(),
                 {tokens.data(), out.data()},
                 ShardElements{tokens.as<const int32_t>(), out.as<int32_t>(), first, count});
}

}  // namespace muster::kernels::cuda
