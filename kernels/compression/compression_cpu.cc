// Selection and packing of gradients on the host. Work is split by index ranges and counts are
// integers, so the bits do not depend on the number of threads.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/compression/compression.h"
#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/low_precision.h"
#include "kernels/optimizer/step_math.h"
#include "kernels/tensor.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kSliceElements = 32 * 1024;
// Elements that are summed over parts at a time: a few tiles stay in the L1 cache.
constexpr int64_t kTileElements = 1024;

int64_t SlicesOf(int64_t n) { return (n + kSliceElements - 1) / kSliceElements; }

// Ordered like |x|; NaN above everything.
uint32_t Magnitude(float x) { return BitsOf(x) & 0x7fffffffu; }

// Which elements are the largest: all above `threshold`, and the first `ties` that equal it.
struct Selection {
  uint32_t threshold = 0;
  int64_t ties = 0;
};

// Radix selection from the highest digit: a histogram of one digit over those elements whose higher
// digits are those of the k-th largest.
Selection Select(ThreadPool& pool, const float* x, int64_t n, int64_t k) {
  constexpr int kDigits = 3;
  constexpr std::array<int, kDigits> kShift = {20, 10, 0};
  constexpr std::array<int, kDigits> kBits = {11, 10, 10};
  const int64_t slices = SlicesOf(n);
  std::vector<uint32_t> counts;
  uint32_t prefix = 0;
  int64_t wanted = k;
  for (int digit = 0; digit < kDigits; ++digit) {
    const int64_t bins = int64_t{1} << kBits[digit];
    const int above = kShift[digit] + kBits[digit];
    counts.assign(slices * bins, 0);
    pool.Run(slices, [&](int64_t slice) {
      uint32_t* count = counts.data() + slice * bins;
      const int64_t end = std::min(n, (slice + 1) * kSliceElements);
      for (int64_t i = slice * kSliceElements; i < end; ++i) {
        const uint32_t magnitude = Magnitude(x[i]);
        // For the highest digit both sides are 0, because magnitudes have 31 bits.
        if (magnitude >> above != prefix >> above) continue;
        ++count[magnitude >> kShift[digit] & (bins - 1)];
      }
    });
    int64_t bin = bins - 1;
    for (;; --bin) {
      int64_t here = 0;
      for (int64_t slice = 0; slice < slices; ++slice) here += counts[slice * bins + bin];
      if (here >= wanted || bin == 0) break;
      wanted -= here;
    }
    prefix |= static_cast<uint32_t>(bin) << kShift[digit];
  }
  return {prefix, wanted};
}

// The index of each slice's first selected element among all selected ones, and of its first one
// equal to the threshold among all of these.
struct Starts {
  std::vector<int64_t> selected, ties;
};

Starts CountSlices(ThreadPool& pool, const float* x, int64_t n, const Selection& selection) {
  const int64_t slices = SlicesOf(n);
  std::vector<int64_t> above(slices, 0);
  Starts starts{std::vector<int64_t>(slices, 0), std::vector<int64_t>(slices, 0)};
  pool.Run(slices, [&](int64_t slice) {
    const int64_t end = std::min(n, (slice + 1) * kSliceElements);
    for (int64_t i = slice * kSliceElements; i < end; ++i) {
      above[slice] += Magnitude(x[i]) > selection.threshold ? 1 : 0;
      starts.ties[slice] += Magnitude(x[i]) == selection.threshold ? 1 : 0;
    }
  });
  int64_t selected = 0, ties = 0;
  for (int64_t slice = 0; slice < slices; ++slice) {
    const int64_t equal = std::exchange(starts.ties[slice], ties);
    starts.selected[slice] = selected;
    const int64_t left = std::max<int64_t>(0, selection.ties - ties);
    selected += above[slice] + std::min(equal, left);
    ties += equal;
  }
  return starts;
}

void Take(ThreadPool& pool, const TakeLargestArgs& args) {
  float* x = args.x.f32();
  float* also = args.also.empty() ? nullptr : args.also.f32();
  const int64_t n = args.x.elements();
  const Selection selection = Select(pool, x, n, args.k);
  const Starts starts = CountSlices(pool, x, n, selection);
  pool.Run(SlicesOf(n), [&](int64_t slice) {
    int64_t at = starts.selected[slice], tie = starts.ties[slice];
    const int64_t end = std::min(n, (slice + 1) * kSliceElements);
    for (int64_t i = slice * kSliceElements; i < end; ++i) {
      const uint32_t magnitude = Magnitude(x[i]);
      bool taken = magnitude > selection.threshold;
      if (magnitude == selection.threshold) taken = tie++ < selection.ties;
      if (!args.dense.empty()) args.dense.f32()[i] = taken ? x[i] : 0.0f;
      if (!taken) continue;
      if (args.dense.empty()) {
        args.indices.as<int32_t>()[at] = static_cast<int32_t>(args.offset + i);
        args.values.f32()[at] = x[i];
        ++at;
      }
      x[i] = 0;
      if (also != nullptr) also[i] = 0;
    }
  });
}

// out[i] = the tree sum over parts of what fill(part, first, count, tile) writes, tile by tile.
template <typename Fill>
void SumTiles(ThreadPool& pool, int64_t parts, const Tensor& out, Fill fill) {
  const int64_t n = out.elements();
  pool.Run((n + kTileElements - 1) / kTileElements, [&](int64_t tile) {
    const int64_t first = tile * kTileElements, count = std::min(kTileElements, n - first);
    int64_t levels = 1;
    for (int64_t rest = parts; rest > 1; rest = (rest + 1) / 2) ++levels;
    float* memory = ThreadScratch((levels + 1) * kTileElements);
    // Subtrees of equal size merge at once, like the digits of a binary counter (SumAsTree).
    int64_t depth = 0;
    // Adds the last of `open` sums to the one before it.
    const auto merge = [&](int64_t open) {
      float* into = memory + (open - 2) * kTileElements;
      const float* from = into + kTileElements;
      for (int64_t i = 0; i < count; ++i) into[i] += from[i];
    };
    for (int64_t part = 0; part < parts; ++part) {
      fill(part, first, count, memory + depth * kTileElements);
      ++depth;
      for (int64_t bits = part; (bits & 1) != 0; bits >>= 1) merge(depth--);
    }
    for (; depth > 1; --depth) merge(depth);
    std::memcpy(out.f32() + first, memory, count * sizeof(float));
  });
}

}  // namespace

void TakeLargest(Stream& stream, const TakeLargestArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) { Take(pool, args); });
}

void SumSparse(Stream& stream, Tensor entries, int64_t first, Tensor out) {
  EnqueueOnHost(stream, [=](ThreadPool& pool) {
    const int64_t k = entries.dim(2);
    SumTiles(pool, entries.dim(0), out,
             [&](int64_t part, int64_t begin, int64_t count, float* tile) {
               const int32_t* indices = entries.as<int32_t>() + part * 2 * k;
               const int32_t* values = indices + k;
               std::fill_n(tile, count, 0.0f);
               begin += first;
               for (int64_t i = std::lower_bound(indices, indices + k, begin) - indices;
                    i < k && indices[i] < begin + count; ++i) {
                 std::memcpy(tile + (indices[i] - begin), values + i, sizeof(float));
               }
             });
  });
}

void TakeSigns(Stream& stream, Tensor x, Tensor packed) {
  EnqueueOnHost(stream, [=](ThreadPool& pool) {
    const int64_t n = x.elements();
    float* values = x.f32();
    std::vector<double> sums(SlicesOf(n), 0);
    pool.Run(SlicesOf(n), [&](int64_t slice) {
      const int64_t end = std::min(n, (slice + 1) * kSliceElements);
      for (int64_t i = slice * kSliceElements; i < end; ++i) sums[slice] += std::fabs(values[i]);
    });
    double sum = 0;
    for (const double part : sums) sum += part;
    const auto scale = static_cast<float>(sum / static_cast<double>(n));
    std::memcpy(packed.data(), &scale, sizeof(scale));
    int32_t* words = packed.as<int32_t>() + 1;
    static_assert(kSliceElements % 32 == 0, "a word belongs to one slice");
    pool.Run(SlicesOf(n), [&](int64_t slice) {
      const int64_t end = std::min(n, (slice + 1) * kSliceElements);
      for (int64_t i = slice * kSliceElements; i < end; i += 32) {
        uint32_t word = 0;
        for (int64_t bit = 0; bit < std::min<int64_t>(32, end - i); ++bit) {
          const bool negative = std::signbit(values[i + bit]);
          word |= static_cast<uint32_t>(negative) << bit;
          values[i + bit] -= negative ? -scale : scale;
        }
        words[i / 32] = static_cast<int32_t>(word);
      }
    });
  });
}

void SumSigns(Stream& stream, Tensor packed, int64_t first, Tensor out) {
  EnqueueOnHost(stream, [=](ThreadPool& pool) {
    SumTiles(pool, packed.dim(0), out,
             [&](int64_t part, int64_t begin, int64_t count, float* tile) {
               const int32_t* words = packed.as<int32_t>() + part * packed.stride(0);
               const float scale = FloatOf(static_cast<uint32_t>(words[0]));
               for (int64_t i = 0; i < count; ++i) {
                 const int64_t at = first + begin + i;
                 const auto word = static_cast<uint32_t>(words[1 + at / 32]);
                 tile[i] = (word >> (at % 32) & 1) != 0 ? -scale : scale;
               }
             });
  });
}

}  // namespace muster::kernels::cpu
