#include "parallel/comm/collective_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/check.h"

namespace muster::parallel {
namespace {

constexpr int64_t kGranule = 16;

// Elements summed at a time: the accumulators stay in the first-level cache.
constexpr int64_t kBlock = 2048;

struct BFloat16 {
  uint16_t bits;
};
// IEEE binary16. Not _Float16: clang 14 has none for this target.
struct Float16 {
  uint16_t bits;
};

float ToFloat(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t rest = value.bits & 0x7FFF;
  // Moving the exponent by a multiplication takes subnormal numbers along.
  const uint32_t bits = rest >= 0x7C00
                            ? 0x7F800000 | (rest & 0x3FF) << 13
                            : std::bit_cast<uint32_t>(std::bit_cast<float>(rest << 13) * 0x1p112f);
  return std::bit_cast<float>(sign | bits);
}
float ToFloat(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Both round to nearest, ties to even.
template <typename T>
T FromFloat(float value);
template <>
Float16 FromFloat<Float16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t rest = bits & 0x7FFFFFFF;
  uint32_t rounded;
  if (rest > 0x7F800000) {
    rounded = 0x7E00;
  } else if (rest >= 0x477FF000) {  // 65520 and above round to infinity
    rounded = 0x7C00;
  } else if (rest < 0x38800000) {  // subnormal: the sum's last bit is worth 2^-24, as theirs is
    rounded =
        std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  } else {
    rounded = (rest + 0xFFF + (rest >> 13 & 1) - 0x38000000) >> 13;
  }
  return {static_cast<uint16_t>(sign | rounded)};
}
template <>
BFloat16 FromFloat<BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return {static_cast<uint16_t>((bits >> 16) | 0x40)};  // stays a NaN
  return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
}

// Applies `op` in order; a NaN wins over every number, so that it is seen on every rank.
template <typename A>
void Accumulate(ReduceOp op, const A* next, int64_t count, A* sum) {
  switch (op) {
    case ReduceOp::kSum:
      for (int64_t i = 0; i < count; ++i) sum[i] += next[i];
      return;
    case ReduceOp::kMax:
      for (int64_t i = 0; i < count; ++i)
        sum[i] = next[i] > sum[i] || next[i] != next[i] ? next[i] : sum[i];
      return;
    case ReduceOp::kMin:
      for (int64_t i = 0; i < count; ++i)
        sum[i] = next[i] < sum[i] || next[i] != next[i] ? next[i] : sum[i];
      return;
  }
}

// Reduces inputs 0, 1, ... of one block like a binary counter: subtrees of equal size merge at
// once. `load` brings input k to the given level; the result is in level 0.
template <typename A, typename Load>
void ReduceTree(size_t inputs, ReduceOp op, int64_t count, A* levels, Load load) {
  int64_t depth = 0;
  const auto level = [&](int64_t i) { return levels + i * kBlock; };
  // Of `top` levels the last two become one.
  const auto merge = [&](int64_t top) { Accumulate(op, level(top - 1), count, level(top - 2)); };
  for (size_t k = 0; k < inputs; ++k) {
    load(k, level(depth));
    ++depth;
    for (size_t bits = k; (bits & 1) != 0; bits >>= 1) merge(depth--);
  }
  while (depth > 1) merge(depth--);
}

// One more than the digits of `inputs`: the next input is loaded before subtrees merge.
size_t Levels(size_t inputs) { return static_cast<size_t>(std::bit_width(inputs)) + 1; }

// fp32 storage, and integers: the accumulator has the type of the storage.
template <typename T>
void ReduceDirect(absl::Span<const void* const> inputs, ReduceOp op, int64_t count, T* out) {
  std::vector<T> levels(Levels(inputs.size()) * kBlock);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t block = std::min(kBlock, count - begin);
    const size_t bytes = static_cast<size_t>(block) * sizeof(T);
    ReduceTree(inputs.size(), op, block, levels.data(), [&](size_t k, T* to) {
      std::memcpy(to, static_cast<const T*>(inputs[k]) + begin, bytes);
    });
    std::memcpy(out + begin, levels.data(), bytes);
  }
}

template <typename T>
void ReduceSixteenBits(absl::Span<const void* const> inputs, ReduceOp op, int64_t count, T* out) {
  std::vector<float> levels(Levels(inputs.size()) * kBlock);
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t block = std::min(kBlock, count - begin);
    ReduceTree(inputs.size(), op, block, levels.data(), [&](size_t k, float* to) {
      const T* input = static_cast<const T*>(inputs[k]) + begin;
      for (int64_t i = 0; i < block; ++i) to[i] = ToFloat(input[i]);
    });
    for (int64_t i = 0; i < block; ++i) out[begin + i] = FromFloat<T>(levels[i]);
  }
}

}  // namespace

PartRange PartOf(int64_t elements, int parts, int part) {
  const int64_t even = (elements + parts - 1) / parts;
  const int64_t stride = (even + kGranule - 1) / kGranule * kGranule;
  return {std::min(elements, stride * part), std::min(elements, stride * (part + 1))};
}

bool BroadcastsInParts(int64_t bytes, int size) {
  return size > 2 && bytes > kFlatBroadcastBytesMax;
}

int64_t AllReduceBytes(int64_t elements, int64_t element_bytes, int size, int rank) {
  if (elements * element_bytes <= kOneRoundBytesMax) return elements * element_bytes * (size - 1);
  const int64_t own = PartOf(elements, size, rank).count();
  return (elements - own + own * (size - 1)) * element_bytes;
}

int64_t BroadcastBytes(int64_t elements, int64_t element_bytes, int size, int rank, int root) {
  if (!BroadcastsInParts(elements * element_bytes, size)) {
    return rank == root ? elements * element_bytes * (size - 1) : 0;
  }
  const int64_t own = PartOf(elements, size, rank).count();
  return (rank == root ? elements - own + own * (size - 1) : own * (size - 2)) * element_bytes;
}

void ReduceAsTree(absl::Span<const void* const> inputs, kernels::DType dtype, ReduceOp op,
                  int64_t count, void* out) {
  CHECK(!inputs.empty());
  switch (dtype) {
    case kernels::DType::kF32:
      return ReduceDirect(inputs, op, count, static_cast<float*>(out));
    case kernels::DType::kI32:
      return ReduceDirect(inputs, op, count, static_cast<int32_t*>(out));
    case kernels::DType::kI64:
      return ReduceDirect(inputs, op, count, static_cast<int64_t*>(out));
    case kernels::DType::kU8:
      return ReduceDirect(inputs, op, count, static_cast<uint8_t*>(out));
    case kernels::DType::kBF16:
      return ReduceSixteenBits(inputs, op, count, static_cast<BFloat16*>(out));
    case kernels::DType::kF16:
      return ReduceSixteenBits(inputs, op, count, static_cast<Float16*>(out));
    case kernels::DType::kU16:
      return ReduceDirect(inputs, op, count, static_cast<uint16_t*>(out));
  }
  CHECK(false) << "dtype " << static_cast<int>(dtype);
}

}  // namespace muster::parallel
