// Times weight-gradient GEMMs at the shapes of the benchmarked models: our own kernel and the
// library's in turns, each for some hundred milliseconds without a pause, so that the chip is at
// its power limit. With the sum of squares, the library needs a second pass; our kernel's epilogue
// has it.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/device/device.h"
#include "kernels/device/device_cuda.h"
#include "kernels/gemm/linear_cuda.h"
#include "kernels/gemm/weight_gradient.h"
#include "kernels/gemm/weight_gradient_hopper.h"
#include "kernels/low_precision.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/optimizer/square_parts.h"
#include "kernels/tensor.h"

namespace muster::kernels {
namespace {

using cuda::CudaStream;

struct Shape {
  const char* name;
  int64_t tokens, rows, columns;
  bool accumulate = false;  // without the sum of squares
};

constexpr int kRounds = 2;
constexpr float kTurnMs = 250;
constexpr float kWarmMs = 100;  // before timing: the power limit acts over tens of milliseconds

const Shape kShapes[] = {
    {"350m qkv", 32768, 3072, 1024},        {"350m output", 32768, 1024, 1024},
    {"350m up", 32768, 4096, 1024},         {"350m down", 32768, 1024, 4096},
    {"350m head", 8192, 50304, 1024, true}, {"1558m qkv", 16384, 4800, 1600},
    {"1558m output", 16384, 1600, 1600},    {"1558m up", 16384, 6400, 1600},
    {"1558m down", 16384, 1600, 6400},      {"1b qkv", 16384, 3072, 2048},
    {"1b output", 16384, 2048, 2048},       {"1b up", 16384, 16384, 2048},
    {"1b down", 16384, 2048, 8192},         {"1b head", 4096, 128256, 2048, true},
    {"3b qkv", 8192, 5120, 3072},           {"3b output", 8192, 3072, 3072},
    {"3b up", 8192, 16384, 3072},           {"3b down", 8192, 3072, 8192},
    {"3b head", 4096, 128256, 3072, true}};

template <typename T>
T Take(absl::StatusOr<T> made) {
  CHECK_OK(made);
  return *std::move(made);
}

class Bench {
 public:
  explicit Bench(Device& device)
      : stream_(Take(device.MakeStream())),
        cuda_(CudaStream::Of(*stream_)),
        inputs_(Take(device.Allocate(kInputBytes))),
        output_(Take(device.Allocate(int64_t{2} << 30))),
        squares_(Take(device.Allocate(kSquareParts * 8))) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 1);
    std::vector<uint16_t> values(int64_t{4} << 20);
    for (uint16_t& value : values) value = ToBF16(normal(random));
    const auto bytes = static_cast<int64_t>(values.size() * 2);
    for (int64_t at = 0; at + bytes <= kInputBytes; at += bytes) {
      Copy(*stream_, Tensor(values.data(), DType::kU8, {bytes}),
           Tensor(static_cast<char*>(inputs_->data()) + at, DType::kU8, {bytes}));
    }
    CHECK_OK(stream_->Synchronize());
    CHECK(cudaEventCreate(&begin_) == cudaSuccess && cudaEventCreate(&end_) == cudaSuccess);
  }

  void Run(const Shape& shape) {
    const Tensor dy(inputs_->data(), DType::kBF16, {shape.tokens, shape.rows});
    const Tensor x(static_cast<char*>(inputs_->data()) + kInputBytes / 2, DType::kBF16,
                   {shape.tokens, shape.columns});
    const Tensor dw(output_->data(), DType::kF32, {shape.rows, shape.columns});
    const Tensor squares(squares_->data(), DType::kF32, {kSquareParts, 2});
    const cuda::Gemm product = {.m = shape.columns,
                                .n = shape.rows,
                                .k = shape.tokens,
                                .transpose_a = false,
                                .transpose_b = true,
                                .input = DType::kBF16,
                                .output = DType::kF32,
                                .a = x.data(),
                                .b = dy.data(),
                                .d = dw.data(),
                                .beta = shape.accumulate ? 1.0f : 0.0f};
    void* const workspace = cuda_.Scratch(cuda::LinearPlans::kWorkspaceBytes);
    std::vector<std::pair<std::string, std::function<absl::Status()>>> ways;
    const auto library = [&] {
      return cuda_.cuda_device().linear_plans().Run(cuda_, product, workspace);
    };
    ways.emplace_back("library", library);
    if (!shape.accumulate) {
      ways.emplace_back("library and pass", [&] {
        absl::Status status = library();
        cuda::SquareParts(cuda_, dw, squares);
        return status;
      });
    }
    cuda::HopperWeightGradient own = {.dy = dy, .x = x, .dw = dw, .accumulate = shape.accumulate};
    if (!shape.accumulate) own.squares = squares;
    ways.emplace_back("own", [&] { return cuda::RunHopperWeightGradient(cuda_, own); });
    std::vector<std::vector<float>> times(ways.size());
    for (int round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < ways.size(); ++i) {
        Time(ways[i].second, 1);  // chooses the library's algorithm
        const float once = Time(ways[i].second, 2);
        Time(ways[i].second, static_cast<int>(kWarmMs / once) + 1);
        times[i].push_back(Time(ways[i].second, static_cast<int>(kTurnMs / once) + 1));
      }
    }
    std::printf("%-13s", shape.name);
    const double flops = 2.0 * shape.tokens * shape.rows * shape.columns;
    for (size_t i = 0; i < ways.size(); ++i) {
      const float ms = std::accumulate(times[i].begin(), times[i].end(), 0.f) / kRounds;
      std::printf("  %s %.4f ms %.0f", ways[i].first.c_str(), ms, flops / ms * 1e-9);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

 private:
  static constexpr int64_t kInputBytes = int64_t{4} << 30;

  float Time(const std::function<absl::Status()>& way, int runs) {
    cudaEventRecord(begin_, cuda_.handle());
    for (int i = 0; i < runs; ++i) CHECK_OK(way());
    cudaEventRecord(end_, cuda_.handle());
    CHECK(cudaEventSynchronize(end_) == cudaSuccess);
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, begin_, end_);
    return milliseconds / static_cast<float>(runs);
  }

  std::unique_ptr<Stream> stream_;
  CudaStream& cuda_;
  std::unique_ptr<Buffer> inputs_, output_, squares_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace
}  // namespace muster::kernels

int main(int argc, char** argv) {
  using namespace muster::kernels;  // NOLINT: of this file
  auto device = MakeCudaDevice(0, {});
  if (!device.ok()) {
    std::fprintf(stderr, "NO GPU, NOT MEASURED: %s\n", device.status().ToString().c_str());
    return 0;
  }
  Bench bench(**device);
  const std::string only = argc > 1 ? argv[1] : "";
  std::printf("means of %d turns of %.0f ms; TFLOP/s\n", kRounds, kTurnMs);
  for (const Shape& shape : kShapes) {
    if (std::string(shape.name).find(only) != std::string::npos) bench.Run(shape);
  }
  return 0;
}
