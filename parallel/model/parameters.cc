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
  int64_t elements = storage_rows;
  for (size_t d = 1; d < box.extent.size(); ++d) elements *= box.extent[d];
  return elements;
}

kernels::Tensor Parameter::StorageIn(void* data, kernels::DType dtype) const {
  const std::vector<int64_t>& extent = box.extent;
  switch (extent.size()) {
    case 1:
      return kernels::Tensor(data, dtype, {storage_rows});
    case 2:
      return kernels::Tensor(data, dtype, {storage_rows, extent[1]});
    case 3:
      return kernels::Tensor(data, dtype, {storage_rows, extent[1], extent[2]});
    default:
      CHECK_EQ(extent.size(), 4u) << name;
      return kernels::Tensor(data, dtype, {storage_rows, extent[1], extent[2], extent[3]});
  }
}

ParameterId ParameterRegistry::Add(Parameter parameter) {
  CHECK(!parameter.global_shape.empty() &&
        parameter.global_shape.size() <= static_cast<size_t>(kernels::Tensor::kRankMax))
      << parameter.name << " has " << parameter.global_shape.size() << " dimensions";
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

// The index in the whole tensor of the first element of run `row` of the band's last dimension.
int64_t FirstOfRow(const Box& band, const Parameter& parameter, int64_t row) {
  const std::vector<int64_t>& shape = parameter.global_shape;
  int64_t stride = shape.back(), first = band.offset.back();
  for (size_t d = shape.size() - 1; d-- > 0;) {
    first += (band.offset[d] + row % band.extent[d]) * stride;
    row /= band.extent[d];
    stride *= shape[d];
  }
  return first;
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
  int64_t begin = 0;  // first element of the band in the box
  // A band is whole runs of the last dimension of the global tensor.
  for (const Box& band :
       parameter.bands.empty() ? std::vector<Box>{parameter.box} : parameter.bands) {
    const int64_t run = band.extent.back();
    const int64_t rows = run == 0 ? 0 : band.elements() / run;
    // The requested elements of this band, and their rows.
    const int64_t from = std::clamp<int64_t>(first - begin, 0, rows * run);
    const int64_t to = std::clamp<int64_t>(first + count - begin, 0, rows * run);
    const int64_t row_begin = run == 0 ? 0 : from / run,
                  row_end = run == 0 ? 0 : (to + run - 1) / run;
    if (from < to) {
      const auto fill = [&](int64_t begin_of_thread, int64_t end_of_thread) {
        for (int64_t row = row_begin + begin_of_thread; row < row_begin + end_of_thread; ++row) {
          const int64_t at = std::max(from, row * run), end = std::min(to, (row + 1) * run);
          Draw(parameter, seed, stream_id, FirstOfRow(band, parameter, row) + at - row * run,
               kernels::Tensor(values + begin + at - first, kernels::DType::kF32, {end - at}));
        }
      };
      ForRows(row_end - row_begin, to - from, threads, fill);
    }
    begin += rows * run;
  }
}

}  // namespace muster::parallel
