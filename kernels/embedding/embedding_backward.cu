// Embedding backward.
//
// Backward of wte works without atomics on the tokens as GroupTokens sorts them. A block takes a
// window of kWindow tokens, and a thread a pack of columns of the window's items, one after the
// other. An item is
//   - a run of at most kWindow equal tokens that begins in the window, even if it ends in the next.
//     Its sum is added to its row of d_wte.
//   - the slice of a longer run that lies in the window. Its sum is written to `partial`, and a
//     second kernel adds these sums in order, several windows at a time.
// So no thread adds more than 2 kWindow rows however often a token occurs, and the sorted tokens
// fix the order of every sum. The rows of a window's items follow each other: a thread loads
// kRowsInFlight of them, and the rows of d_wte for the runs that end among them, before it adds the
// first. Bytes: [T,C] once, the touched rows of d_wte twice, partial sums of at most 1/8 of the
// long runs' rows in 16 bits.
//
// Backward of wpe: a thread adds a pack of columns of one position over the batch. That runs in the
// same kernel as the second step of wte, whose latency it hides.
#include <algorithm>

#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/embedding/embedding.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWindow = kWarp;
constexpr int kGatherThreads = 256;  // at most; one a pack
constexpr int kRowsInFlight = 4;     // more take so many registers that fewer blocks fit
constexpr int kFinishBlocks = 4;     // of a multiprocessor: leaves registers for rows in flight
constexpr int kPartialWarps = kThreads / kWarp;
// Long runs are divided among blocks: one for kWindowsOfSlice windows, and at most kMaxSlices.
constexpr int kWindowsOfSlice = 8;
constexpr int kMaxSlices = 128;
constexpr unsigned kAll = 0xffffffffu;

// ---- backward: runs of equal tokens -------------------------------------------------------------

// Accesses to sums that are not read again soon, which leave the cache to the rows of dout.
template <int N>
__device__ inline void LoadOnce(const float* p, float (&out)[N]) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      const float4 v = __ldcs(reinterpret_cast<const float4*>(p + j));
      out[j] = v.x;
      out[j + 1] = v.y;
      out[j + 2] = v.z;
      out[j + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = __ldcs(p + j);
  }
}
template <int N>
__device__ inline void StoreOnce(float* p, const float (&in)[N]) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
      __stcs(reinterpret_cast<float4*>(p + j), float4{in[j], in[j + 1], in[j + 2], in[j + 3]});
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) __stcs(p + j, in[j]);
  }
}

// Rows of the window that are added up.
struct Item {
  int16_t begin, rows;
  bool whole;     // the sum is a whole run's and is added to the target; else it is written there
  float* target;  // row of d_wte or of the partial sums
};

// The row in the partial sums [windows][2][columns]: slot 0 is for the long run that continues from
// the window before, slot 1 for the one that begins in the window and continues behind it.
__device__ inline int64_t PartialRow(int64_t window, int slot) { return window * 2 + slot; }

// Called by one warp, with a lane for each of the window's 32 tokens. Returns the number of items;
// *last becomes the window's last token.
__device__ int ListItems(const int32_t* tokens, int n, int64_t window, int columns, int vocab,
                         float* d_wte, float* partial, Item* items, int* last) {
  const int lane = threadIdx.x % kWarp;
  const int64_t begin = window * kWindow;
  const auto at = [&](int64_t i) { return i >= 0 && i < n ? tokens[i] : -1; };
  const int before = at(begin - kWindow + lane), token = at(begin + lane),
            behind = at(begin + kWindow + lane);
  // Bit i is set where token i of this window and the next differs from the one before it.
  const int left_of_token = __shfl_up_sync(kAll, token, 1);
  const int last_before = __shfl_sync(kAll, before, kWarp - 1);
  const int left_of_behind = __shfl_up_sync(kAll, behind, 1);
  *last = __shfl_sync(kAll, token, kWarp - 1);
  const bool begins = token != (lane == 0 ? last_before : left_of_token);
  const unsigned low = __ballot_sync(kAll, begins);
  const unsigned high = __ballot_sync(kAll, behind != (lane == 0 ? *last : left_of_behind));
  const uint64_t changes = uint64_t{high} << kWarp | low;
  const uint64_t later = changes >> lane >> 1;
  // Equal tokens from this one on, as far as the next window's end.
  const int length = later != 0 ? __ffsll(static_cast<long long>(later)) : 2 * kWindow - lane;
  const int first = __shfl_sync(kAll, token, 0);
  const unsigned same_before = __ballot_sync(kAll, before == first);
  const int length_before = __clz(~same_before);  // equal tokens right before the window; up to 32

  const bool counts = token >= 0 && token < vocab;
  const bool whole = begins && length <= kWindow;
  const bool goes_on = lane == 0 && !begins && length_before + length > kWindow;
  const bool is_item = counts && (begins || goes_on);
  const unsigned mask = __ballot_sync(kAll, is_item);
  if (is_item) {
    const int rows = whole ? length : min(length, kWindow - lane);
    float* const target =
        whole ? d_wte + static_cast<int64_t>(token) * columns
              : partial + PartialRow(window, goes_on ? 0 : 1) * static_cast<int64_t>(columns);
    items[__popc(mask & ((1u << lane) - 1))] = {static_cast<int16_t>(lane),
                                                static_cast<int16_t>(rows), whole, target};
  }
  return __popc(mask);
}

// Adds the first `rows` of R rows, all of which are loaded before the first is added.
template <int R, typename T, int N, typename At>
__device__ inline void AddRows(int64_t rows, At at, float (&sum)[N]) {
  Pack<T, N> packs[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (r < rows) packs[r] = LoadPack<N>(at(r));
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (r >= rows) break;
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += packs[r][j];
  }
}

// How many windows behind `window` begin with `token`. Called by a whole warp, which looks at 32 at
// a time.
__device__ int WindowsBehind(const int32_t* tokens, int n, int window, int token) {
  const int lane = threadIdx.x % kWarp;
  int inside = window, outside = (n - 1) / kWindow + 1;
  while (outside - inside > 1) {
    const int step = (outside - inside + kWarp - 1) / kWarp;
    const int at = inside + (lane + 1) * step;
    const bool same = at < outside && tokens[at * kWindow] == token;
    const int count = __popc(__ballot_sync(kAll, same));  // sorted: the first ones
    inside += count * step;
    outside = min(outside, inside + step);
  }
  return inside - window;
}

// Which floats a thread accesses for its pack: kHalves times kFloats contiguous ones, the second 8
// columns behind the first. With packs of 8 columns two neighbouring threads exchange halves, so
// that each access of the two covers a whole sector: of their 16 columns the even one gets 0 to 3
// and 8 to 11, the odd one 4 to 7 and 12 to 15.
template <int N>
struct FloatsOfPack {
  static constexpr int kHalves = N == 8 ? 2 : 1;
  static constexpr int kFloats = N / kHalves;
  static constexpr int kThreadsSharing = kHalves;
  using Values = float[kHalves][kFloats];

  bool odd;
  int column;            // of the first half
  bool counts[kHalves];  // whether the half lies in the block's columns

  __device__ FloatsOfPack(int first_pack, int pack, int width)
      : odd(kHalves == 2 && pack % 2 == 1), column((first_pack + pack) * N - (odd ? 4 : 0)) {
    counts[0] = pack / kThreadsSharing * kThreadsSharing < width;
    if constexpr (kHalves == 2) counts[1] = (pack | 1) < width;
  }
  __device__ void Load(const float* row, Values& out) const {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      if (counts[h]) LoadOnce<kFloats>(row + column + 8 * h, out[h]);
    }
  }
  __device__ void Store(float* row, const Values& in) const {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      if (counts[h]) StoreOnce<kFloats>(row + column + 8 * h, in[h]);
    }
  }
  // Called by all threads of `mask`.
  __device__ void Exchange(unsigned mask, const float (&pack)[N], Values& out) const {
    if constexpr (kHalves == 1) {
#pragma unroll
      for (int i = 0; i < N; ++i) out[0][i] = pack[i];
    } else {
#pragma unroll
      for (int i = 0; i < kFloats; ++i) {
        const float got = __shfl_xor_sync(mask, odd ? pack[i] : pack[i + kFloats], 1);
        out[0][i] = odd ? got : pack[i];
        out[1][i] = odd ? pack[i + kFloats] : got;
      }
    }
  }
};

// The items of a block's window.
struct WindowItems {
  Item items[kWindow];
  int32_t position[2 * kWindow];  // of the window's tokens and the next one's
  uint64_t ends;                  // bit i: an item ends with row i
  int begin, end;                 // the rows of all items, which are contiguous
};

template <typename T, int N>
__device__ void AddItems(const WindowItems& w, const T* dout, int columns, int first_pack,
                         int width) {
  using Floats = FloatsOfPack<N>;
  const int pack = threadIdx.x;
  const Floats floats(first_pack, pack, width);
  const unsigned mask = __ballot_sync(kAll, floats.counts[0]);
  if (!floats.counts[0]) return;
  const T* const from = dout + (first_pack + pack) * N;
  const uint64_t ends = w.ends;
  const int end = w.end;
  int loaded = 0, added = 0;  // items
  float sum[N] = {};
  for (int first = w.begin; first < end; first += kRowsInFlight) {
    Pack<T, N> rows[kRowsInFlight] = {};
    typename Floats::Values before[kRowsInFlight] = {};
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      if (first + r >= end) break;
      if (pack < width) {
        rows[r] = LoadPack<N>(from + static_cast<int64_t>(w.position[first + r]) * columns);
      }
      if (ends >> (first + r) & 1) {
        const Item& item = w.items[loaded++];
        if (item.whole) floats.Load(item.target, before[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      if (first + r >= end) break;
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += rows[r][i];
      if ((ends >> (first + r) & 1) == 0) continue;
      typename Floats::Values total;
      floats.Exchange(mask, sum, total);
#pragma unroll
      for (int h = 0; h < Floats::kHalves; ++h) {
#pragma unroll
        for (int i = 0; i < Floats::kFloats; ++i) total[h][i] += before[r][h][i];
      }
      floats.Store(w.items[added++].target, total);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] = 0;
    }
  }
}

// A block takes a window and a slice of the columns, a thread a pack. long_runs[window] becomes the
// number of windows of the long run that begins in it, or 0.
template <typename T, int N>
__global__ void __launch_bounds__(kGatherThreads, 2)
    GatherKernel(const int32_t* tokens, const int32_t* positions, const T* dout, int n, int columns,
                 int column_slices, int vocab, float* d_wte, float* partial, int32_t* long_runs) {
  __shared__ WindowItems shared;
  WaitForPreviousKernel();
  LetNextKernelBegin();
  const int64_t window = blockIdx.x / column_slices;
  const int column_slice = static_cast<int>(blockIdx.x % column_slices);
  const int packs = columns / N, packs_of_slice = (packs + column_slices - 1) / column_slices;
  const int first_pack = column_slice * packs_of_slice;
  const int lane = threadIdx.x;
  bool has_long_run = false;
  int last_token = 0;
  if (threadIdx.x < kWarp) {
    const int64_t at = window * kWindow + lane;
    const int32_t here = at < n ? positions[at] : 0;
    const int32_t behind = at + kWindow < n ? positions[at + kWindow] : 0;
    const int count =
        ListItems(tokens, n, window, columns, vocab, d_wte, partial, shared.items, &last_token);
    __syncwarp();
    shared.position[lane] = here;
    shared.position[lane + kWindow] = behind;
    const Item item = lane < count ? shared.items[lane] : Item{};
    const int end = item.begin + item.rows;
    const uint64_t last_row = lane < count ? uint64_t{1} << (end - 1) : 0;
    const unsigned low = __reduce_or_sync(kAll, static_cast<unsigned>(last_row));
    const unsigned high = __reduce_or_sync(kAll, static_cast<unsigned>(last_row >> 32));
    const int last_end = __reduce_max_sync(kAll, end);
    if (lane == 0) {
      shared.ends = uint64_t{high} << 32 | low;
      shared.begin = item.begin;
      shared.end = last_end;
    }
    // An item that continues behind the window is the last one.
    has_long_run =
        count > 0 && shared.items[count - 1].target == partial + PartialRow(window, 1) * columns;
  }
  __syncthreads();
  AddItems<T, N>(shared, dout, columns, first_pack, min(packs_of_slice, packs - first_pack));
  if (threadIdx.x < kWarp && column_slice == 0) {
    const int behind =
        has_long_run ? 1 + WindowsBehind(tokens, n, static_cast<int>(window), last_token) : 0;
    if (lane == 0) long_runs[window] = behind;
  }
}

// ---- backward: long runs, and positions ---------------------------------------------------------

// Adds the partial sums of the long runs that begin in windows `slice`, slice + slices, ...,
// columns [column_block * 32 * N, +32 * N). A warp adds its share in order; then the warps' sums
// are added in order.
template <int N>
__device__ void AddPartialSums(int slice, int slices, int column_block, const int32_t* tokens,
                               int n, int columns, const int32_t* long_runs, const float* partial,
                               float* d_wte) {
  __shared__ int2 runs[kThreads];  // the windows that they begin in, and how many they have
  __shared__ int run_count;
  __shared__ float sums[kPartialWarps][kWarp * N];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int column = (column_block * kWarp + lane) * N;
  const int windows = (n + kWindow - 1) / kWindow;
  for (int first = slice; first < windows; first += slices * kThreads) {
    __syncthreads();  // the last round's count has been read
    if (threadIdx.x == 0) run_count = 0;
    __syncthreads();
    const int mine = first + static_cast<int>(threadIdx.x) * slices;
    // Runs may be listed in any order, because their sums are independent.
    const int windows_of_run = mine < windows ? long_runs[mine] : 0;
    if (windows_of_run != 0) runs[atomicAdd(&run_count, 1)] = int2{mine, windows_of_run};
    __syncthreads();
    for (int r = 0; r < run_count; ++r) {
      const int window = runs[r].x, count = runs[r].y;
      const int token = tokens[window * kWindow + kWindow - 1];
      const int share = (count + kPartialWarps - 1) / kPartialWarps;
      float sum[N] = {};
      if (column < columns) {
#pragma unroll 8
        for (int p = warp * share; p < min(count, (warp + 1) * share); ++p) {
          const int64_t row = PartialRow(window + p, p == 0 ? 1 : 0);
          float addend[N];
          LoadFloats<N>(partial + row * columns + column, addend);
#pragma unroll
          for (int j = 0; j < N; ++j) sum[j] += addend[j];
        }
      }
      float* const to = d_wte + static_cast<int64_t>(token) * columns + column;
      float before[N] = {};
      if (warp == 0 && column < columns) LoadFloats<N>(to, before);
#pragma unroll
      for (int j = 0; j < N; ++j) sums[warp][j * kWarp + lane] = sum[j];
      __syncthreads();
      if (warp == 0 && column < columns) {
        float total[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
          total[j] = 0;
#pragma unroll
          for (int w = 0; w < kPartialWarps; ++w) total[j] += sums[w][j * kWarp + lane];
        }
#pragma unroll
        for (int j = 0; j < N; ++j) total[j] += before[j];
        StorePack<N>(to, FromFloats<float>(total));
      }
      __syncthreads();
    }
  }
}

template <typename T, int N>
__device__ void AddPositions(int64_t block, const T* dout, int64_t batch, int64_t row_elements,
                             float* d_wpe) {
  const int64_t i = (block * kThreads + threadIdx.x) * N;
  if (i >= row_elements) return;
  float sum[N] = {}, before[N];
  LoadOnce<N>(d_wpe + i, before);
  for (int64_t b = 0; b < batch; b += 8) {
    const auto at = [&](int r) { return dout + (b + r) * row_elements + i; };
    if (b + 8 <= batch) {
      AddRows<8, T>(8, at, sum);
    } else {
      AddRows<8, T>(batch - b, at, sum);
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) sum[j] += before[j];
  StoreOnce<N>(d_wpe + i, sum);
}

template <typename T>
struct FinishData {
  const int32_t* tokens;  // sorted
  const float* partial;
  const int32_t* long_runs;  // [windows], as GatherKernel writes them
  int n, columns;
  float* d_wte;
  unsigned slices, column_blocks;
  unsigned partial_blocks;  // the first blocks; 0 without d_wte
  const T* dout;
  int64_t batch, row_elements;
  float* d_wpe;
};

// P: columns of a pack of partial sums, N: of a row of dout.
template <typename T, int P, int N>
__global__ void __launch_bounds__(kThreads, kFinishBlocks) FinishKernel(const FinishData<T> d) {
  if (blockIdx.x < d.partial_blocks) {
    WaitForPreviousKernel();
    AddPartialSums<P>(static_cast<int>(blockIdx.x / d.column_blocks), static_cast<int>(d.slices),
                      static_cast<int>(blockIdx.x % d.column_blocks), d.tokens, d.n, d.columns,
                      d.long_runs, d.partial, d.d_wte);
  } else {
    // GatherKernel writes nothing that this reads.
    if (d.partial_blocks == 0) WaitForPreviousKernel();
    AddPositions<T, N>(blockIdx.x - d.partial_blocks, d.dout, d.batch, d.row_elements, d.d_wpe);
  }
}

template <typename T>
void Backward(CudaStream& stream, const Tensor& groups, const Tensor& dout, int64_t sequence,
              const Tensor& d_wte, const Tensor& d_wpe) {
  const int n = static_cast<int>(dout.dim(0));
  const int columns = static_cast<int>(dout.dim(1));
  const int64_t row_elements = sequence * columns;
  FinishData<T> finish = {.n = n,
                          .columns = columns,
                          .dout = dout.as<T>(),
                          .batch = n / sequence,
                          .row_elements = row_elements};
  // Packs are used where rows are aligned and consist of whole packs.
  constexpr int kPack = kPackSize<T>;
  const bool packs =
      columns % kPack == 0 && Aligned16(dout) && Aligned16(d_wte) && Aligned16(d_wpe);
  if (!d_wte.empty()) {
    const int64_t windows = CeilDiv(n, kWindow);
    const int64_t partial_floats = windows * 2 * columns;
    auto* partial =
        static_cast<float*>(stream.Scratch((partial_floats + windows) * int64_t{sizeof(float)}));
    if (partial == nullptr) return;
    auto* long_runs = reinterpret_cast<int32_t*>(partial + partial_floats);
    finish.tokens = groups.as<const int32_t>();
    finish.partial = partial;
    finish.long_runs = long_runs;
    finish.d_wte = d_wte.f32();
    finish.column_blocks = static_cast<unsigned>(CeilDiv(columns, kWarp * (packs ? 4 : 1)));
    finish.slices =
        static_cast<unsigned>(std::min<int64_t>(CeilDiv(windows, kWindowsOfSlice), kMaxSlices));
    finish.partial_blocks = finish.column_blocks * finish.slices;
    const auto gather = [&](auto kernel, int width) {
      const int64_t column_slices = CeilDiv(columns / width, kGatherThreads);
      const int64_t threads = CeilDiv(CeilDiv(columns / width, column_slices), kWarp) * kWarp;
      LaunchOverlapped(stream, kernel, windows * column_slices, threads, 0, finish.tokens,
                       finish.tokens + n, finish.dout, n, columns, column_slices, d_wte.dim(0),
                       finish.d_wte, partial, long_runs);
    };
    packs ? gather(GatherKernel<T, kPack>, kPack) : gather(GatherKernel<T, 1>, 1);
    if (!stream.CheckLaunch("EmbeddingBackward: tokens")) return;
  }
  int64_t blocks = finish.partial_blocks;
  if (!d_wpe.empty()) {
    finish.d_wpe = d_wpe.f32();
    blocks += CeilDiv(row_elements, int64_t{kThreads} * (packs ? kPack : 1));
  }
  if (blocks == 0) return;
  const auto launch = [&](auto kernel) {
    LaunchOverlapped(stream, kernel, blocks, kThreads, 0, finish);
  };
  packs ? launch(FinishKernel<T, 4, kPack>) : launch(FinishKernel<T, 1, 1>);
  stream.CheckLaunch("EmbeddingBackward: long runs and positions");
}

}  // namespace

void EmbeddingBackward(Stream& stream, Tensor groups, Tensor dout, int64_t sequence, Tensor d_wte,
                       Tensor d_wpe) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (dout.dim(0) == 0) return;
  DispatchFloat(dout.dtype(), [&](auto tag) {
    Backward<decltype(tag)>(cuda, groups, dout, sequence, d_wte, d_wpe);
  });
}

}  // namespace muster::kernels::cuda
