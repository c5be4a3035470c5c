// Zero, Copy, Cast, Axpy, Scale on the host. Bound by memory: one pass each.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "kernels/host_device.h"
#include "kernels/low_precision.h"
#include "kernels/ops_cpu.h"
#include "kernels/simd/loops.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kChunkElements = 64 * 1024;

// body(begin, count) over [0, n) in fixed chunks.
template <typename Body>
void ForRanges(ThreadPool& pool, int64_t n, Body body) {
  pool.Run((n + kChunkElements - 1) / kChunkElements, [&](int64_t chunk) {
    const int64_t begin = chunk * kChunkElements;
    body(begin, std::min(kChunkElements, n - begin));
  });
}

}  // namespace

void Zero(Stream& stream, Tensor out) {
  EnqueueOnHost(stream, [out](ThreadPool& pool) {
    char* data = static_cast<char*>(out.data());
    ForRanges(pool, out.bytes(),
              [&](int64_t begin, int64_t count) { std::memset(data + begin, 0, count); });
  });
}

void Copy(Stream& stream, Tensor from, Tensor to) {
  EnqueueOnHost(stream, [from, to](ThreadPool& pool) {
    const char* source = static_cast<const char*>(from.data());
    char* target = static_cast<char*>(to.data());
    if (source == target) return;
    ForRanges(pool, from.bytes(), [&](int64_t begin, int64_t count) {
      std::memcpy(target + begin, source + begin, count);
    });
  });
}

void Cast(Stream& stream, Tensor from, Tensor to) {
  EnqueueOnHost(stream, [from, to](ThreadPool& pool) {
    ForRanges(pool, from.elements(), [&](int64_t begin, int64_t count) {
      for (int64_t i = begin; i < begin + count; ++i) WriteFloat(to, i, ReadAsFloat(from, i));
    });
  });
}

void Axpy(Stream& stream, float alpha, Tensor x, Tensor y) {
  EnqueueOnHost(stream, [alpha, x, y](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    ForRanges(pool, x.elements(), [&](int64_t begin, int64_t count) {
      loops.axpy(count, alpha, x.f32() + begin, y.f32() + begin);
    });
  });
}

void Scale(Stream& stream, float alpha, Tensor x) {
  EnqueueOnHost(stream, [alpha, x](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    ForRanges(pool, x.elements(),
              [&](int64_t begin, int64_t count) { loops.scale(count, alpha, x.f32() + begin); });
  });
}

}  // namespace muster::kernels::cpu
