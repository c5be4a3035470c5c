// GPU tests: every op runs on the CUDA device and on its CPU twin in fp32, over the same values.
#ifndef MUSTER_TESTS_GPU_SUPPORT_H_
#define MUSTER_TESTS_GPU_SUPPORT_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/device/device.h"
#include "kernels/low_precision.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::kernels {

inline float RoundTo(DType dtype, float x) {
  if (dtype == DType::kBF16) return FromBF16(ToBF16(x));
  return dtype == DType::kF16 ? FromF16(ToF16(x)) : x;
}

// One tensor in two places: fp32 values on the host, `dtype` on the device, between guard bytes.
class Both {
 public:
  static constexpr int64_t kGuard = 256;

  Both() = default;
  // `offset` elements after an aligned address: views of flat storage start anywhere.
  Both(Device& device, DType dtype, std::initializer_list<int64_t> shape, std::vector<float> values,
       int64_t offset = 0)
      : dtype_(dtype), values_(std::move(values)), offset_(offset) {
    cpu_ = Tensor(values_.data(), DType::kF32, shape);
    bytes_ = kGuard + (offset + cpu_.elements()) * SizeOf(dtype) + kGuard;
    auto buffer = device.Allocate(bytes_);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    buffer_ = std::move(*buffer);
    gpu_ = Tensor(Begin(), dtype, shape);
    image_.assign(bytes_, 0xff);  // NaN in every dtype
    for (int64_t i = 0; i < cpu_.elements(); ++i) {
      values_[i] = RoundTo(dtype, values_[i]);
      Write(i, values_[i]);
    }
  }

  // A view of this tensor on both sides, with strides in elements.
  Tensor Cpu(int64_t begin, std::initializer_list<int64_t> shape,
             std::initializer_list<int64_t> strides) {
    return Tensor(values_.data() + begin, DType::kF32, shape, strides);
  }
  Tensor Gpu(int64_t begin, std::initializer_list<int64_t> shape,
             std::initializer_list<int64_t> strides) {
    return Tensor(static_cast<char*>(gpu_.data()) + begin * SizeOf(dtype_), dtype_, shape, strides);
  }

  const Tensor& cpu() const { return cpu_; }
  const Tensor& gpu() const { return gpu_; }
  std::vector<float>& values() { return values_; }
  DType dtype() const { return dtype_; }

  // Poison: an output that is not written stays NaN.
  void Poison() { std::fill(image_.begin(), image_.end(), 0xff); }
  void Upload(Stream& stream) {
    Copy(stream, Tensor(image_.data(), DType::kU8, {bytes_}),
         Tensor(buffer_->data(), DType::kU8, {bytes_}));
    ASSERT_OK(stream.Synchronize());
  }
  // What the device holds, as fp32; checks the guards.
  std::vector<float> Download(Stream& stream) {
    std::vector<uint8_t> image(bytes_);
    Copy(stream, Tensor(buffer_->data(), DType::kU8, {bytes_}),
         Tensor(image.data(), DType::kU8, {bytes_}));
    EXPECT_OK(stream.Synchronize());
    const int64_t begin = kGuard + offset_ * SizeOf(dtype_);
    const int64_t end = begin + cpu_.elements() * SizeOf(dtype_);
    for (int64_t i = 0; i < bytes_; ++i) {
      if (i >= begin && i < end) continue;
      EXPECT_EQ(image[i], 0xff) << "written outside at byte " << i - begin;
    }
    std::vector<float> out(cpu_.elements());
    for (int64_t i = 0; i < cpu_.elements(); ++i) {
      const uint8_t* at = image.data() + begin + i * SizeOf(dtype_);
      if (dtype_ == DType::kF32 || dtype_ == DType::kI32) {
        std::memcpy(&out[i], at, 4);
      } else {
        uint16_t bits;
        std::memcpy(&bits, at, 2);
        out[i] = dtype_ == DType::kBF16 ? FromBF16(bits) : FromF16(bits);
      }
    }
    return out;
  }

 private:
  void* Begin() { return static_cast<char*>(buffer_->data()) + kGuard + offset_ * SizeOf(dtype_); }
  void Write(int64_t i, float value) {
    uint8_t* at = image_.data() + kGuard + (offset_ + i) * SizeOf(dtype_);
    if (dtype_ == DType::kF32 || dtype_ == DType::kI32) {
      std::memcpy(at, &value, 4);
    } else {
      const uint16_t bits = dtype_ == DType::kBF16 ? ToBF16(value) : ToF16(value);
      std::memcpy(at, &bits, 2);
    }
  }

  DType dtype_ = DType::kF32;
  std::vector<float> values_;
  int64_t offset_ = 0;
  int64_t bytes_ = 0;
  Tensor cpu_, gpu_;
  std::unique_ptr<Buffer> buffer_;
  std::vector<uint8_t> image_;
};

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto made = MakeCudaDevice(0, options_);
    if (!made.ok()) GTEST_SKIP() << "NO GPU, NOT TESTED: " << made.status();
    device_ = std::move(*made);
    ASSERT_OK_AND_ASSIGN(stream_, device_->MakeStream());
    cpu_device_ = MakeCpuDevice(4);
    ASSERT_OK_AND_ASSIGN(cpu_stream_, cpu_device_->MakeStream());
  }

  std::vector<float> Random(int64_t n, float scale = 1, float shift = 0) {
    std::normal_distribution<float> normal(shift, scale);
    std::vector<float> values(n);
    for (float& v : values) v = normal(random_);
    return values;
  }
  Both Input(DType dtype, std::initializer_list<int64_t> shape, float scale = 1, float shift = 0,
             int64_t offset = 0) {
    const int64_t n = Tensor(nullptr, DType::kF32, shape).elements();
    Both both(*device_, dtype, shape, Random(n, scale, shift), offset);
    both.Upload(*stream_);
    return both;
  }
  // Both sides are written by the op; the device's starts as NaN.
  Both Output(DType dtype, std::initializer_list<int64_t> shape, int64_t offset = 0) {
    const int64_t n = Tensor(nullptr, DType::kF32, shape).elements();
    Both both(*device_, dtype, shape, std::vector<float>(n), offset);
    both.Poison();
    both.Upload(*stream_);
    return both;
  }
  // Integers travel as the bits of fp32.
  Both Integers(const std::vector<int32_t>& values) {
    std::vector<float> bits(values.size());
    std::memcpy(bits.data(), values.data(), values.size() * 4);
    Both both(*device_, DType::kI32, {static_cast<int64_t>(values.size())}, std::move(bits));
    both.Upload(*stream_);
    return both;
  }
  static Tensor AsIntegers(const Tensor& t) {
    return Tensor(t.data(), DType::kI32, {t.elements()});
  }

  // The rule of two: the error against fp32 is at most twice that of rounding the fp32 result to
  // the output's dtype, plus `slack` (relative to the norm) for sums taken in another order or for
  // 16-bit intermediates.
  void ExpectClose(const std::string& what, Both& both, double slack = 2e-6) {
    ExpectClose(what, both.Download(*stream_), both.values(), both.dtype(), slack);
  }
  static void ExpectClose(const std::string& what, const std::vector<float>& actual,
                          const std::vector<float>& expected, DType dtype, double slack) {
    ASSERT_EQ(actual.size(), expected.size());
    double error = 0, rounding = 0, norm = 0;
    for (size_t i = 0; i < actual.size(); ++i) {
      const double wanted = expected[i];
      const double rounded = RoundTo(dtype, expected[i]);
      error += (actual[i] - wanted) * (actual[i] - wanted);
      rounding += (rounded - wanted) * (rounded - wanted);
      norm += wanted * wanted;
    }
    error = std::sqrt(error);
    // A few elements may round well by luck: at least about the mean error of one rounding counts.
    const double unit = dtype == DType::kBF16 ? 0x1p-9 : dtype == DType::kF16 ? 0x1p-11 : 0;
    rounding = std::max(rounding, 0.5 * unit * unit * norm);
    const double bound = 2 * std::sqrt(rounding) + slack * std::sqrt(norm) + 1e-30;
    EXPECT_LE(error, bound) << what << ": relative error " << error / std::sqrt(norm)
                            << ", allowed " << bound / std::sqrt(norm);
    if (!(error <= bound)) {  // where it starts
      for (size_t i = 0; i < actual.size(); ++i) {
        if (!(std::abs(actual[i] - expected[i]) <= 0.1 * std::abs(expected[i]) + 1e-3)) {
          ADD_FAILURE() << what << "[" << i << "] is " << actual[i] << ", expected " << expected[i];
          break;
        }
      }
    }
  }

  CudaOptions options_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Device> cpu_device_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Stream> cpu_stream_;
  std::mt19937 random_{static_cast<uint32_t>(muster::testing::TestSeed())};
};

inline const std::vector<DType>& FloatTypes() {
  static const auto& types = *new std::vector<DType>{DType::kF32, DType::kBF16, DType::kF16};
  return types;
}

}  // namespace muster::kernels

#endif  // MUSTER_TESTS_GPU_SUPPORT_H_
