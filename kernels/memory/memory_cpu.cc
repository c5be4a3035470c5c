// Copies, casts and element-wise sums on the host. Each is bound by memory: one pass.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/low_precision.h"
#include "kernels/memory/memory.h"
#include "kernels/simd/loops.h"
#include "kernels/tensor.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kRangeElements = 64 * 1024;

}  // namespace

void Zero(Stream& stream, Tensor out) {
  EnqueueOnHost(stream, [out](ThreadPool& pool) {
    char* data = static_cast<char*>(out.data());
    pool.RunRanges(out.bytes(), kRangeElements,
                   [&](int64_t begin, int64_t count) { std::memset(data + begin, 0, count); });
  });
}

void ZeroAll(Stream& stream, const std::vector<Tensor>& outs) {
  for (const Tensor& out : outs) cpu::Zero(stream, out);
}

void Copy(Stream& stream, Tensor from, Tensor to) {
  EnqueueOnHost(stream, [from, to](ThreadPool& pool) {
    const char* source = static_cast<const char*>(from.data());
    char* target = static_cast<char*>(to.data());
    if (source == target) return;
    pool.RunRanges(from.bytes(), kRangeElements, [&](int64_t begin, int64_t count) {
      std::memcpy(target + begin, source + begin, count);
    });
  });
}

void CopyStrided(Stream& stream, Tensor from, Tensor to, bool accumulate) {
  EnqueueOnHost(stream, [from, to, accumulate](ThreadPool& pool) {
    const int last = from.rank() - 1;
    const int64_t width = from.dim(last), rows = width == 0 ? 0 : from.elements() / width;
    const int64_t rows_per_task =
        std::max<int64_t>(1, kRangeElements / std::max<int64_t>(1, width));
    pool.Run((rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
      const int64_t end = std::min(rows, (task + 1) * rows_per_task);
      for (int64_t row = task * rows_per_task; row < end; ++row) {
        int64_t source = 0, target = 0, rest = row;
        for (int i = last - 1; i >= 0; --i) {
          source += rest % from.dim(i) * from.stride(i);
          target += rest % from.dim(i) * to.stride(i);
          rest /= from.dim(i);
        }
        const int64_t step_from = from.stride(last), step_to = to.stride(last);
        if (!accumulate && from.dtype() == to.dtype() && step_from == 1 && step_to == 1) {
          const int64_t bytes = SizeOf(from.dtype());
          std::memcpy(static_cast<char*>(to.data()) + target * bytes,
                      static_cast<const char*>(from.data()) + source * bytes, width * bytes);
          continue;
        }
        for (int64_t i = 0; i < width; ++i) {
          float value = ReadAsFloat(from, source + i * step_from);
          if (accumulate) value += ReadAsFloat(to, target + i * step_to);
          WriteFloat(to, target + i * step_to, value);
        }
      }
    });
  });
}

void Cast(Stream& stream, Tensor from, Tensor to) {
  EnqueueOnHost(stream, [from, to](ThreadPool& pool) {
    pool.RunRanges(from.elements(), kRangeElements, [&](int64_t begin, int64_t count) {
      for (int64_t i = begin; i < begin + count; ++i) WriteFloat(to, i, ReadAsFloat(from, i));
    });
  });
}

void Axpy(Stream& stream, float alpha, Tensor x, Tensor y) {
  EnqueueOnHost(stream, [alpha, x, y](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    pool.RunRanges(x.elements(), kRangeElements, [&](int64_t begin, int64_t count) {
      loops.axpy(count, alpha, x.f32() + begin, y.f32() + begin);
    });
  });
}

void Scale(Stream& stream, float alpha, Tensor x) {
  EnqueueOnHost(stream, [alpha, x](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    pool.RunRanges(x.elements(), kRangeElements, [&](int64_t begin, int64_t count) {
      loops.scale(count, alpha, x.f32() + begin);
    });
  });
}

void Add(Stream& stream, Tensor a, Tensor b, Tensor out) {
  EnqueueOnHost(stream, [a, b, out](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    pool.RunRanges(out.elements(), kRangeElements, [&](int64_t begin, int64_t count) {
      loops.add(count, a.f32() + begin, b.f32() + begin, out.f32() + begin);
    });
  });
}

}  // namespace muster::kernels::cpu
