#include "parallel/model/parameters.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/random/random.h"
#include "kernels/tensor.h"

namespace muster::parallel {
namespace {

// FNV-1a: stable across builds and machines, which std::hash is not.
uint64_t StableHash(const std::string& text) {
  uint64_t hash = 0xCBF29CE484222325ull;
  for (const unsigned char c : text) hash = (hash ^ c) * 0x100000001B3ull;
  return hash;
}

}  // namespace

std::vector<Box> Parameter::Boxes(int64_t begin, int64_t end) const {
  std::vector<Box> boxes;
  int64_t first = 0;  // first element of the band in storage
  for (const Box& band : bands) {
    const int64_t size = band.elements();
    const int64_t from = std::max(begin, first), to = std::min(end, first + size);
    if (from < to) {
      for (Box& box : FlatRangeToBoxes(band, from - first, to - first)) {
        boxes.push_back(std::move(box));
      }
    }
    first += size;
  }
  return boxes;
}

int64_t Parameter::elements() const { return box.elements(); }
int64_t Parameter::storage_elements() const {
  return storage_rows * (box.extent.size() == 2 ? box.extent[1] : 1);
}

ParameterId ParameterRegistry::Add(Parameter parameter) {
  CHECK(parameter.global_shape.size() == 1 || parameter.global_shape.size() == 2)
      << parameter.name << " must have one or two dimensions";
  if (!parameter.bands.empty()) {
    CHECK(parameter.box.extent.empty()) << parameter.name << " has bands and a box";
    parameter.box = parameter.bands[0];
    for (size_t i = 1; i < parameter.bands.size(); ++i) {
      parameter.box.extent[0] += parameter.bands[i].extent[0];
    }
  }
  if (parameter.box.extent.empty()) parameter.box = Box::Whole(parameter.global_shape);
  if (parameter.bands.empty()) parameter.bands = {parameter.box};
  for (const Box& band : parameter.bands) {
    CHECK(Inside(band, parameter.global_shape)) << parameter.name << band.ToString();
  }
  if (parameter.storage_rows == 0) parameter.storage_rows = parameter.box.extent[0];
  CHECK_GE(parameter.storage_rows, parameter.box.extent[0]) << parameter.name;
  CHECK(names_.insert(parameter.name).second || parameter.in_two) << parameter.name;
  parameter.block = block_;
  parameter.resident = resident_;
  parameters_.push_back(std::move(parameter));
  return size() - 1;
}

int64_t ParameterRegistry::elements() const {
  int64_t total = 0;
  for (const Parameter& parameter : parameters_) total += parameter.elements();
  return total;
}

namespace {

// Calls fill(begin, end) for all rows, on up to `threads_max` threads where the rows have many
// elements: large models have billions of values, each of which depends on its index alone.
void ForRows(int64_t rows, int64_t elements, int64_t threads_max,
             const std::function<void(int64_t begin, int64_t end)>& fill) {
  constexpr int64_t kElementsOfThread = 1 << 20;
  const int64_t parts =
      std::max<int64_t>(1, std::min({elements / kElementsOfThread, rows, threads_max}));
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < parts; ++i) {
    threads.emplace_back(fill, i * rows / parts, (i + 1) * rows / parts);
  }
  fill(0, rows / parts);
  for (std::thread& thread : threads) thread.join();
}

constexpr double kStepMin = 1e-4;  // the floor of mamba_ssm's initial steps

// Random values of the elements from `first` on of the whole tensor.
void Draw(const Parameter& parameter, uint64_t seed, uint64_t stream_id, int64_t first,
          kernels::Tensor out) {
  if (parameter.initializer == Initializer::kNormal) {
    kernels::FillNormal(out, seed, stream_id, first, 0.0f, parameter.stddev);
    return;
  }
  kernels::FillUniform(out, seed, stream_id, first);
  const double low = static_cast<double>(parameter.low), high = static_cast<double>(parameter.high);
  float* values = out.f32();
  for (int64_t i = 0; i < out.elements(); ++i) {
    const auto u = static_cast<double>(values[i]);
    double value = low + (high - low) * u;
    if (parameter.initializer == Initializer::kLogOfUniform) {
      value = std::log(value);
    } else if (parameter.initializer == Initializer::kInverseSoftplusOfLogUniform) {
      const double step =
          std::max(kStepMin, std::exp(std::log(low) + (std::log(high) - std::log(low)) * u));
      value = step + std::log(-std::expm1(-step));
    }
    values[i] = static_cast<float>(value);
  }
}

}  // namespace

void Initialize(const Parameter& parameter, uint64_t seed, int64_t first, int64_t count,
                float* values, int threads) {
  CHECK(first >= 0 && count >= 0 && first + count <= parameter.elements())
      << parameter.name << ": " << count << " elements from " << first;
  if (parameter.initializer == Initializer::kOnes || parameter.initializer == Initializer::kZeros) {
    std::fill_n(values, count, parameter.initializer == Initializer::kOnes ? 1.0f : 0.0f);
    return;
  }
  const uint64_t stream_id = StableHash(parameter.name);
  const bool matrix = parameter.global_shape.size() == 2;
  int64_t begin = 0;  // first element of the band in the box
  // A band is whole runs of the last dimension of the global tensor.
  for (const Box& band :
       parameter.bands.empty() ? std::vector<Box>{parameter.box} : parameter.bands) {
    const int64_t rows = matrix ? band.extent[0] : 1;
    const int64_t run = matrix ? band.extent[1] : band.extent[0];
    // The requested elements of this band, and their rows.
    const int64_t from = std::clamp<int64_t>(first - begin, 0, rows * run);
    const int64_t to = std::clamp<int64_t>(first + count - begin, 0, rows * run);
    const int64_t row_begin = run == 0 ? 0 : from / run,
                  row_end = run == 0 ? 0 : (to + run - 1) / run;
    if (from < to) {
      const auto fill = [&](int64_t begin_of_thread, int64_t end_of_thread) {
        for (int64_t row = row_begin + begin_of_thread; row < row_begin + end_of_thread; ++row) {
          const int64_t at = std::max(from, row * run), end = std::min(to, (row + 1) * run);
          const int64_t global =
              matrix ? (band.offset[0] + row) * parameter.global_shape[1] + band.offset[1]
                     : band.offset[0];
          Draw(parameter, seed, stream_id, global + at - row * run,
               kernels::Tensor(values + begin + at - first, kernels::DType::kF32, {end - at}));
        }
      };
      ForRows(row_end - row_begin, to - from, threads, fill);
    }
    begin += rows * run;
  }
}

}  // namespace muster::parallel
