// Embedding forward: out[t] = wte[tokens[t]] + wpe[t % S]. A thread takes a pack of columns of
// kRowsOfThread rows at a fixed distance, which in GPT-2's usual shapes have the same position, so
// that it reads their row of wpe once.
#include "kernels/embedding/embedding.h"

#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsOfThread = 4;

// A thread takes rows r, r + stride, .... `one_position`: the stride is a multiple of the sequence.
template <typename T, typename W, int N>
__global__ void __launch_bounds__(kThreads)
    ForwardKernel(const int32_t* tokens, const W* wte, const W* wpe, uint32_t sequence,
                  int64_t vocab, int64_t rows, uint32_t stride, bool one_position, int columns,
                  T* out) {
  const uint32_t packs = columns / N;
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t first = i / packs;
  const int column = static_cast<int>(i % packs) * N;
  if (first >= stride) return;
  int64_t token[kRowsOfThread];
  Pack<W, N> rows_of_wte[kRowsOfThread] = {}, rows_of_wpe[kRowsOfThread] = {};
#pragma unroll
  for (int r = 0; r < kRowsOfThread; ++r) {
    const int64_t row = first + r * static_cast<int64_t>(stride);
    token[r] = row < rows ? tokens[row] : -1;
  }
#pragma unroll
  for (int r = 0; r < kRowsOfThread; ++r) {
    if (token[r] >= 0 && token[r] < vocab) {
      rows_of_wte[r] = LoadPack<N>(wte + token[r] * columns + column);
    }
    const int64_t row = first + r * static_cast<int64_t>(stride);
    if (wpe == nullptr || row >= rows) continue;
    if (one_position && r > 0) {
      rows_of_wpe[r] = rows_of_wpe[0];
    } else {
      const uint32_t position = static_cast<uint32_t>(row % sequence);
      rows_of_wpe[r] = LoadPack<N>(wpe + static_cast<int64_t>(position) * columns + column);
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsOfThread; ++r) {
    const int64_t row = first + r * static_cast<int64_t>(stride);
    if (row >= rows) break;
    // A token that is out of range must not go unnoticed.
    const bool wrong = token[r] < -1 || token[r] >= vocab;
    float v[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      v[j] = wrong ? NAN : rows_of_wte[r][j];
      if (wpe != nullptr) v[j] += rows_of_wpe[r][j];
    }
    StorePack<N>(out + row * columns + column, FromFloats<T>(v));
  }
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
        const int64_t stride = CeilDiv(rows, kRowsOfThread), packs = columns / width;
        CHECK_LT(stride * packs, int64_t{1} << 31) << out.ToString();
        const auto blocks = static_cast<unsigned>(CeilDiv(stride * packs, kThreads));
        kernel<<<blocks, kThreads, 0, cuda.handle()>>>(
            tokens.as<int32_t>(), wte.as<W>(), positions, static_cast<uint32_t>(sequence),
            wte.dim(0), rows, static_cast<uint32_t>(stride), stride % sequence == 0, columns,
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

void ShardTokens(Stream& stream, Tensor tokens, int64_t first, int64_t count, Tensor out) {
  Elementwise<4>(CudaStream::Of(stream), "ShardTokens", tokens.elements(),
                 {tokens.data(), out.data()},
                 ShardElements{tokens.as<const int32_t>(), out.as<int32_t>(), first, count});
}

}  // namespace muster::kernels::cuda
