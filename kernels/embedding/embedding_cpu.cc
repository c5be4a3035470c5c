// Token and position embedding on the host.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/embedding/embedding.h"
#include "kernels/simd/loops.h"
#include "kernels/tensor.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kRows = 32;
constexpr int64_t kColumns = 64;

}  // namespace

void EmbeddingForward(Stream& stream, Tensor tokens, Tensor wte, Tensor wpe, int64_t sequence,
                      Tensor out) {
  EnqueueOnHost(stream, [=](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    const int64_t t = out.dim(0), c = out.dim(1), vocab = wte.dim(0);
    const int32_t* ids = tokens.as<int32_t>();
    pool.Run((t + kRows - 1) / kRows, [&](int64_t task) {
      for (int64_t row = task * kRows; row < std::min(t, (task + 1) * kRows); ++row) {
        CHECK(ids[row] >= -1 && ids[row] < vocab) << "token " << ids[row] << " at " << row;
        const float* token = wte.f32() + ids[row] * c;
        const float* position = wpe.empty() ? nullptr : wpe.f32() + row % sequence * c;
        float* to = out.f32() + row * c;
        if (ids[row] < 0) {
          std::fill(to, to + c, 0.0f);
          if (position != nullptr) std::memcpy(to, position, c * sizeof(float));
        } else if (position == nullptr) {
          std::memcpy(to, token, c * sizeof(float));
        } else {
          loops.add(c, token, position, to);
        }
      }
    });
  });
}

// A counting sort.
void GroupTokens(Stream& stream, Tensor tokens, int64_t vocab, Tensor groups) {
  EnqueueOnHost(stream, [=](ThreadPool&) {
    const int64_t t = tokens.elements();
    const int32_t* ids = tokens.as<int32_t>();
    const auto key = [&](int64_t i) {
      return ids[i] >= 0 && ids[i] < vocab ? static_cast<int64_t>(ids[i]) : vocab;
    };
    std::vector<int64_t> places(vocab + 2);  // of the next token of a kind
    for (int64_t i = 0; i < t; ++i) ++places[key(i) + 1];
    for (int64_t k = 1; k <= vocab; ++k) places[k] += places[k - 1];
    int32_t *sorted = groups.as<int32_t>(), *positions = sorted + t;
    for (int64_t i = 0; i < t; ++i) {
      const int64_t to = places[key(i)]++;
      sorted[to] = static_cast<int32_t>(key(i));
      positions[to] = static_cast<int32_t>(i);
    }
  });
}

// Threads own columns, so every row of the gradients is summed in the order of t.
void EmbeddingBackward(Stream& stream, Tensor groups, Tensor dout, int64_t sequence, Tensor d_wte,
                       Tensor d_wpe) {
  EnqueueOnHost(stream, [=](ThreadPool& pool) {
    const Loops& loops = ChooseLoops();
    const int64_t t = dout.dim(0), c = dout.dim(1);
    pool.Run((c + kColumns - 1) / kColumns, [&](int64_t task) {
      const int64_t begin = task * kColumns;
      const int64_t count = std::min(kColumns, c - begin);
      for (int64_t i = 0; !d_wte.empty() && i < t; ++i) {
        const int32_t token = groups.as<const int32_t>()[i];
        if (token >= d_wte.dim(0)) break;  // this token and all behind it are no rows of the table
        const int64_t row = groups.as<const int32_t>()[t + i];
        loops.axpy(count, 1.0f, dout.f32() + row * c + begin, d_wte.f32() + token * c + begin);
      }
      for (int64_t row = 0; !d_wpe.empty() && row < t; ++row) {
        loops.axpy(count, 1.0f, dout.f32() + row * c + begin,
                   d_wpe.f32() + row % sequence * c + begin);
      }
    });
  });
}

void ShardTokens(Stream& stream, Tensor tokens, int64_t first, int64_t count, Tensor out) {
  EnqueueOnHost(stream, [=](ThreadPool&) {
    const int32_t* from = tokens.as<int32_t>();
    int32_t* to = out.as<int32_t>();
    for (int64_t i = 0; i < tokens.elements(); ++i) {
      const int64_t local = from[i] - first;
      to[i] = local >= 0 && local < count ? static_cast<int32_t>(local) : -1;
    }
  });
}

}  // namespace muster::kernels::cpu
