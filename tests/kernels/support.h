// What the tests of ops share: a device with an eager stream, tensors over vectors, and gradients
// by central differences of float64 references.
#ifndef MUSTER_TESTS_KERNELS_SUPPORT_H_
#define MUSTER_TESTS_KERNELS_SUPPORT_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "tests/support/seed.h"

namespace muster::kernels::testing {

struct Host {
  explicit Host(int threads = 2, StreamOptions options = {}) : device(MakeCpuDevice(threads)) {
    absl::StatusOr<std::unique_ptr<Stream>> made = device->MakeStream(options);
    CHECK_OK(made);
    stream = *std::move(made);
  }
  std::unique_ptr<Device> device;
  std::unique_ptr<Stream> stream;
};

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

inline Tensor View(Floats& x, std::initializer_list<int64_t> shape) {
  Tensor view(x.data(), DType::kF32, shape);
  CHECK_EQ(view.elements(), static_cast<int64_t>(x.size()));
  return view;
}
inline Tensor View(std::vector<int32_t>& x, std::initializer_list<int64_t> shape) {
  return Tensor(x.data(), DType::kI32, shape);
}

// Normal values; `salt` tells the tensors of one test apart.
inline Floats Random(int64_t n, uint64_t salt, float stddev = 1) {
  std::mt19937_64 generator(muster::testing::TestSeed() * 1000003 + salt);
  std::normal_distribution<float> normal(0, stddev);
  Floats x(n);
  for (float& value : x) value = normal(generator);
  return x;
}

inline Doubles Wide(const Floats& x) { return Doubles(x.begin(), x.end()); }

// |actual - expected| <= tolerance x (largest |expected| or 1e-3) for every element.
template <typename Actual, typename Expected>
void ExpectClose(const Actual& actual, const Expected& expected, double tolerance,
                 const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  double largest = 1e-3;
  for (double value : expected) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_LE(std::abs(static_cast<double>(actual[i]) - static_cast<double>(expected[i])),
              tolerance * largest)
        << what << "[" << i << "]: " << actual[i] << " instead of " << expected[i];
  }
}

inline double DotOf(const Doubles& a, const Floats& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * static_cast<double>(b[i]);
  return sum;
}

// The gradient of `loss` with respect to x, which `loss` reads, by central differences.
template <typename Loss>
Doubles NumericGradient(Doubles& x, Loss loss) {
  constexpr double kStep = 1e-5;
  Doubles gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double before = x[i];
    x[i] = before + kStep;
    const double above = loss();
    x[i] = before - kStep;
    gradient[i] = (above - loss()) / (2 * kStep);
    x[i] = before;
  }
  return gradient;
}

inline Doubles Plus(const Floats& before, Doubles gradient) {
  for (size_t i = 0; i < gradient.size(); ++i) gradient[i] += static_cast<double>(before[i]);
  return gradient;
}

inline double GeluReference(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

}  // namespace muster::kernels::testing

#endif  // MUSTER_TESTS_KERNELS_SUPPORT_H_
