// Times ops on a CUDA device, on random data, beside two ceilings that are measured in the same
// run.
#ifndef MUSTER_TESTS_BENCH_OP_BENCH_H_
#define MUSTER_TESTS_BENCH_OP_BENCH_H_

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "base/check.h"
#include "kernels/device/device.h"
#include "kernels/device/replay.h"
#include "kernels/gemm/linear.h"
#include "kernels/low_precision.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"

namespace muster::kernels {

class Bench {
 public:
  Bench(Device& device, int runs) : device_(device), runs_(runs) {
    stream_ = Take(device.MakeStream());
    for (int i = 0; i < 2; ++i) events_.push_back(Take(device.MakeEvent(/*timing=*/true)));
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    pattern_.resize(kPattern);
    for (float& value : pattern_) value = normal(random);
  }

  // Random values, because a GEMM of zeros takes less power and runs faster.
  Tensor Random(DType dtype, std::initializer_list<int64_t> shape, float scale = 1) {
    Tensor tensor = Empty(dtype, shape);
    std::vector<uint8_t> bytes(kPattern * SizeOf(dtype));
    for (int64_t i = 0; i < kPattern; ++i) {
      const float value = pattern_[i] * scale;
      if (dtype == DType::kF32) {
        std::memcpy(&bytes[i * 4], &value, 4);
      } else {
        const uint16_t bits = ToBF16(value);
        std::memcpy(&bytes[i * 2], &bits, 2);
      }
    }
    auto* data = static_cast<uint8_t*>(tensor.data());
    for (int64_t at = 0; at < tensor.bytes();) {
      const int64_t count = std::min<int64_t>(tensor.bytes() - at, bytes.size());
      const Tensor to(data + at, DType::kU8, {count});
      // The first slice comes from the host, the others are copies of it.
      const Tensor from(at == 0 ? bytes.data() : data, DType::kU8, {count});
      Copy(*stream_, from, to);
      CHECK_OK(stream_->Synchronize());
      at += count;
    }
    return tensor;
  }
  // The cube of a uniform number gives frequent and rare tokens, as text has.
  static std::vector<int32_t> Tokens(int64_t n, int32_t below) {
    std::vector<int32_t> values(n);
    std::mt19937 random(2);
    for (int32_t& value : values) {
      const double u = std::uniform_real_distribution<double>()(random);
      value = static_cast<int32_t>(u * u * u * below);
    }
    return values;
  }
  Tensor Upload(const std::vector<int32_t>& values) {
    Tensor tensor = Empty(DType::kI32, {static_cast<int64_t>(values.size())});
    Copy(*stream_, Tensor(const_cast<int32_t*>(values.data()), DType::kI32, {tensor.elements()}),
         tensor);
    CHECK_OK(stream_->Synchronize());
    return tensor;
  }
  Tensor Empty(DType dtype, std::initializer_list<int64_t> shape) {
    const Tensor sizes(nullptr, dtype, shape);
    buffers_.push_back(Take(device_.Allocate(sizes.bytes())));
    return Tensor(buffers_.back()->data(), dtype, shape);
  }
  void Clear() {
    CHECK_OK(stream_->Synchronize());
    buffers_.clear();
  }

  // Median seconds of one call. Calls are recorded and replayed as a whole, as the ops of a step
  // are, so that the host's launch time does not count.
  double Time(const std::function<void(Stream&)>& work, bool recorded = true) {
    for (int i = 0; i < 3; ++i) work(*stream_);
    const double once = Elapsed([&] { work(*stream_); });
    const int repeats = std::clamp(static_cast<int>(kRecordedSeconds / once), 1, 50);
    const auto several = [&] {
      for (int i = 0; i < repeats; ++i) work(*stream_);
    };
    Replay replay(*stream_);
    const auto run = [&] { recorded ? void(replay.Run({}, several)) : several(); };
    for (int i = 0; i < 3; ++i) run();
    std::vector<double> seconds;
    for (int i = 0; i < runs_; ++i) seconds.push_back(Elapsed(run) / repeats);
    CHECK_OK(stream_->Synchronize());
    std::nth_element(seconds.begin(), seconds.begin() + runs_ / 2, seconds.end());
    return seconds[runs_ / 2];
  }

  // The first call sets the ceiling.
  void Bytes(const std::string& name, double bytes, const std::function<void(Stream&)>& work) {
    // A recorded copy would run on a copy engine, which is slower than the multiprocessors.
    const double seconds = Time(work, /*recorded=*/copy_ != 0);
    const double rate = bytes / seconds * 1e-9;
    if (copy_ == 0) copy_ = rate;
    std::printf("%-34s %9.3f ms %8.0f GB/s    %5.1f %%\n", name.c_str(), seconds * 1e3, rate,
                100 * rate / copy_);
  }
  // For ops that are too small to be bound by bytes.
  void Latency(const std::string& name, const std::function<void(Stream&)>& work) {
    std::printf("%-34s %9.3f ms\n", name.c_str(), Time(work) * 1e3);
  }
  void UseCeilingsOf(const Bench& other) {
    copy_ = other.copy_;
    gemm_ = other.gemm_;
  }
  void Flops(const std::string& name, double flops, const std::function<void(Stream&)>& work) {
    const double seconds = Time(work);
    const double rate = flops / seconds * 1e-12;
    if (gemm_ == 0) gemm_ = rate;
    std::printf("%-34s %9.3f ms %8.0f TFLOP/s %5.1f %%\n", name.c_str(), seconds * 1e3, rate,
                100 * rate / gemm_);
  }

 private:
  static constexpr int64_t kPattern = 1 << 22;
  static constexpr double kRecordedSeconds = 2e-3;

  double Elapsed(absl::FunctionRef<void()> work) {
    stream_->Record(*events_[0]);
    work();
    stream_->Record(*events_[1]);
    events_[1]->Synchronize();
    return events_[1]->SecondsSince(*events_[0]);
  }

  template <typename T>
  static T Take(absl::StatusOr<T> made) {
    CHECK_OK(made);
    return std::move(*made);
  }

  Device& device_;
  const int runs_;
  std::unique_ptr<Stream> stream_;
  std::vector<std::unique_ptr<Event>> events_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<float> pattern_;
  double copy_ = 0;  // GB/s
  double gemm_ = 0;  // TFLOP/s
};

// The ceiling of bytes: a device copy, counting bytes read and written.
inline void Copies(Bench& bench) {
  const int64_t n = int64_t{1} << 30;
  Tensor from = bench.Random(DType::kF32, {n / 2}), to = bench.Empty(DType::kF32, {n / 2});
  bench.Bytes("copy 2 GiB", 2.0 * from.bytes(), [&](Stream& s) { Copy(s, from, to); });
  bench.Clear();
}
// That, and the ceiling of arithmetic.
inline void Ceilings(Bench& bench) {
  Copies(bench);
  const int64_t d = 8192;
  Tensor x = bench.Random(DType::kBF16, {d, d}), w = bench.Random(DType::kBF16, {d, d}),
         y = bench.Empty(DType::kBF16, {d, d});
  bench.Flops("GEMM 8192^3", 2.0 * d * d * d,
              [&](Stream& s) { LinearForward(s, {.x = x, .w = w, .y = y}); });
  bench.Clear();
}

}  // namespace muster::kernels

#endif  // MUSTER_TESTS_BENCH_OP_BENCH_H_
