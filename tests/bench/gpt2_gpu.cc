// Training steps of GPT-2 on one GPU in bf16 with fp32 master weights: zero gradients, forward,
// backward, global norm with clipping, AdamW that also writes the bf16 copy; random tokens. No host
// synchronisation inside a step. Prints one line: median step, tokens/s, model FLOP utilisation
// with the causal half of attention counted.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "base/check.h"
#include "kernels/arena.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "parallel/model/gpt2.h"
#include "parallel/model/model.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"

namespace muster {
namespace {

using kernels::DType;
using kernels::Tensor;

constexpr double kPeakFlops = 989e12;  // H200, dense bf16, by its data sheet

struct Size {
  int64_t layers, hidden, heads;
};

template <typename T>
T Take(absl::StatusOr<T> made) {
  CHECK_OK(made);
  return *std::move(made);
}

class Step {
 public:
  Step(kernels::Device& device, const Size& size, int64_t batch, int64_t sequence, DType dtype)
      : stream_(Take(device.MakeStream())),
        model_(parallel::MakeGpt2({.layers = size.layers,
                                   .hidden = size.hidden,
                                   .heads = size.heads,
                                   .vocab = 50257,
                                   .sequence_length = sequence})),
        layout_(model_->parameters(), int64_t{25} << 20, 1),
        shape_{.batch = batch, .sequence = sequence, .activation = dtype},
        buffers_(Take(parallel::FlatBuffers::Make(device, *stream_, model_->parameters(), layout_,
                                                  {.seed = 1234}))),
        scalars_(Take(device.Allocate(sizeof(kernels::StepScalars)))),
        host_scalars_(Take(device.AllocateHost(kSteps * sizeof(kernels::StepScalars)))),
        sums_(Take(device.Allocate(3 * sizeof(float)))) {
    if (dtype != DType::kF32) MakeCopy(device, dtype);
    model_->TakeWorkspace(arena_, shape_);
    CHECK_OK(arena_.Commit(device));
    workspace_ = model_->TakeWorkspace(arena_, shape_);
    FillTokens(workspace_.flow.tokens, 1);
    FillTokens(workspace_.flow.targets, 2);
  }

  void Enqueue() {
    SetScalars();
    kernels::Zero(*stream_, buffers_->all_gradients(0));
    const parallel::Pass pass = {.stream = *stream_,
                                 .weights = copy_ ? copy_views_ : buffers_->parameter_views(),
                                 .loss_scale = 1.0f / static_cast<float>(shape_.tokens()),
                                 .gradients = &buffers_->gradient_views(0)};
    model_->Forward(pass, workspace_);
    model_->Backward(pass, workspace_);
    kernels::Sum(*stream_, workspace_.flow.losses, Scalar(0), false);
    kernels::SumSquares(*stream_, buffers_->all_gradients(0), Scalar(1), false);
    auto* scalars = static_cast<kernels::StepScalars*>(scalars_->data());
    kernels::ClipCoefficient(*stream_, Scalar(1), 1.0f, Scalar(2), scalars);
    kernels::AdamW(*stream_, {.parameter = buffers_->all_masters(),
                              .gradient = buffers_->all_gradients(0),
                              .m = buffers_->all_m(),
                              .v = buffers_->all_v(),
                              .copy = copy_ ? copy_all_ : Tensor(),
                              .weight_decay = 0.1f,
                              .scalars = scalars});
  }
  float Loss() {
    float loss = 0;
    kernels::Copy(*stream_, Scalar(0), Tensor(&loss, DType::kF32, {1}));
    CHECK_OK(stream_->Synchronize());
    return loss / static_cast<float>(shape_.tokens());
  }

  kernels::Stream& stream() { return *stream_; }
  int64_t flops_per_token() const { return model_->training_flops_per_token(); }
  int64_t tokens() const { return shape_.tokens(); }

 private:
  static constexpr int kSteps = 1024;

  Tensor Scalar(int i) { return Tensor(static_cast<float*>(sums_->data()) + i, DType::kF32, {1}); }
  void FillTokens(const Tensor& to, uint32_t seed) {
    std::mt19937 generator(seed);
    std::uniform_int_distribution<int32_t> token(0, 50256);
    std::vector<int32_t> values(shape_.tokens());
    for (int32_t& value : values) value = token(generator);
    kernels::Copy(*stream_, Tensor(values.data(), DType::kI32, {shape_.tokens()}), to);
    CHECK_OK(stream_->Synchronize());
  }
  // The weights in 16 bits, laid out as the master weights are.
  void MakeCopy(kernels::Device& device, DType dtype) {
    const Tensor master = buffers_->all_masters();
    copy_ = Take(device.Allocate(layout_.elements() * SizeOf(dtype)));
    copy_all_ = Tensor(copy_->data(), dtype, {layout_.elements()});
    kernels::Cast(*stream_, master, copy_all_);
    std::vector<Tensor> views;
    for (int id = 0; id < model_->parameters().size(); ++id) {
      const Tensor& view = buffers_->parameter_views()[id];
      auto* data = static_cast<char*>(copy_->data()) + (view.f32() - master.f32()) * SizeOf(dtype);
      views.push_back(view.rank() == 1 ? Tensor(data, dtype, {view.dim(0)})
                                       : Tensor(data, dtype, {view.dim(0), view.dim(1)}));
    }
    copy_views_ = parallel::ParameterViews(std::move(views));
  }
  void SetScalars() {
    CHECK_LT(step_, kSteps);
    auto* host = static_cast<kernels::StepScalars*>(host_scalars_->data()) + step_++;
    beta1_power_ *= 0.9;
    beta2_power_ *= 0.95;
    *host = {.learning_rate = 1e-4f,
             .beta1_correction = static_cast<float>(1 - beta1_power_),
             .beta2_correction = static_cast<float>(1 - beta2_power_),
             .gradient_scale = 1};
    const auto bytes = static_cast<int64_t>(sizeof(kernels::StepScalars));
    kernels::Copy(*stream_, Tensor(host, DType::kU8, {bytes}),
                  Tensor(scalars_->data(), DType::kU8, {bytes}));
  }

  std::unique_ptr<kernels::Stream> stream_;
  std::unique_ptr<parallel::Model> model_;
  parallel::FlatLayout layout_;
  parallel::BatchShape shape_;
  std::unique_ptr<parallel::FlatBuffers> buffers_;
  std::unique_ptr<kernels::Buffer> scalars_, host_scalars_, sums_, copy_;
  Tensor copy_all_;
  parallel::ParameterViews copy_views_;
  kernels::Arena arena_;
  parallel::Workspace workspace_;
  double beta1_power_ = 1, beta2_power_ = 1;
  int step_ = 0;
};

int Main(int argc, char** argv) {
  const std::map<std::string, Size> sizes = {{"gpt2-124m", {12, 768, 12}},
                                             {"gpt2-350m", {24, 1024, 16}},
                                             {"gpt2-774m", {36, 1280, 20}},
                                             {"gpt2-1558m", {48, 1600, 25}}};
  std::string size = "gpt2-124m", dtype = "bf16", plans;
  int64_t batch = 64, sequence = 1024;
  int steps = 20;
  CLI::App app("GPT-2 training steps on one GPU");
  app.add_option("--model", size, "size")->check(CLI::IsMember(sizes));
  app.add_option("--batch", batch, "samples")->check(CLI::PositiveNumber);
  app.add_option("--sequence", sequence, "tokens of a sample")->check(CLI::PositiveNumber);
  app.add_option("--dtype", dtype, "compute type")->check(CLI::IsMember({"bf16", "fp16", "fp32"}));
  app.add_option("--steps", steps, "timed steps, after five")->check(CLI::Range(1, 1000));
  app.add_option("--plans", plans, "folder of measured algorithms");
  CLI11_PARSE(app, argc, argv);
  auto device = kernels::MakeCudaDevice(0, {.plan_cache = plans});
  if (!device.ok()) {
    std::fprintf(stderr, "NO GPU, NOT MEASURED: %s\n", device.status().ToString().c_str());
    return 0;
  }
  const DType type = dtype == "bf16" ? DType::kBF16 : dtype == "fp16" ? DType::kF16 : DType::kF32;
  Step step(**device, sizes.at(size), batch, sequence, type);
  step.Enqueue();
  const float first = step.Loss();
  for (int i = 0; i < 4; ++i) step.Enqueue();
  CHECK_OK(step.stream().Synchronize());
  std::vector<std::unique_ptr<kernels::Event>> events;
  for (int i = 0; i <= steps; ++i) events.push_back(Take((*device)->MakeEvent(/*timing=*/true)));
  step.stream().Record(*events[0]);
  for (int i = 1; i <= steps; ++i) {
    step.Enqueue();
    step.stream().Record(*events[i]);
  }
  const float last = step.Loss();
  std::vector<double> seconds;
  for (int i = 1; i <= steps; ++i) seconds.push_back(events[i]->SecondsSince(*events[i - 1]));
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  const double tokens_per_second = static_cast<double>(step.tokens()) / median;
  std::printf(
      "%s %s %ld x %ld: %.2f ms (%.2f to %.2f), %.0f tokens/s, MFU %.1f %%, loss %.4f to %.4f\n",
      size.c_str(), dtype.c_str(), static_cast<long>(batch), static_cast<long>(sequence),
      median * 1e3, seconds.front() * 1e3, seconds.back() * 1e3, tokens_per_second,
      100 * tokens_per_second * static_cast<double>(step.flops_per_token()) / kPeakFlops, first,
      last);
  return 0;
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) { return muster::Main(argc, argv); }
