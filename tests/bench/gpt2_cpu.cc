// Times one training step of GPT-2 124M on the host: zero gradients, forward, backward, global norm
// with clipping, AdamW; fp32, random tokens. Prints one line of JSON with tokens/s and the share of
// an sgemm ceiling measured in the same run.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "base/check.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/gemm/linear.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"
#include "parallel/model/families/gpt2.h"
#include "parallel/model/model.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"

namespace muster {
namespace {

using kernels::DType;
using kernels::Tensor;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// GFLOP/s of a large linear layer.
double Ceiling(kernels::Stream& stream) {
  constexpr int64_t kSize = 2048;
  std::vector<float> x(kSize * kSize, 0.5f), w(kSize * kSize, 0.25f), y(kSize * kSize);
  double best = 1e30;
  for (int i = 0; i < 5; ++i) {
    const double begin = Now();
    kernels::LinearForward(stream, {.x = Tensor(x.data(), DType::kF32, {kSize, kSize}),
                                    .w = Tensor(w.data(), DType::kF32, {kSize, kSize}),
                                    .y = Tensor(y.data(), DType::kF32, {kSize, kSize})});
    CHECK_OK(stream.Synchronize());
    best = std::min(best, Now() - begin);
  }
  return 2.0 * kSize * kSize * kSize / best / 1e9;
}

class Step {
 public:
  Step(int64_t batch, int64_t sequence, int threads)
      : device_(kernels::MakeCpuDevice(threads)),
        model_(parallel::MakeGpt2(
            {.layers = 12, .hidden = 768, .heads = 12, .vocab = 50257, .sequence_length = 1024})),
        layout_(model_->parameters(), int64_t{25} << 20, 1),
        shape_{.batch = batch, .sequence = sequence} {
    auto stream = device_->MakeStream();
    CHECK_OK(stream);
    stream_ = *std::move(stream);
    auto buffers = parallel::FlatBuffers::Make(*device_, *stream_, model_->parameters(), layout_,
                                               {.seed = 1234});
    CHECK_OK(buffers);
    buffers_ = *std::move(buffers);
    model_->TakeWorkspace(arena_, shape_);
    CHECK_OK(arena_.Commit(*device_));
    workspace_ = model_->TakeWorkspace(arena_, shape_);
    std::mt19937 generator(1);
    std::uniform_int_distribution<int32_t> token(0, 50256);
    for (int64_t t = 0; t < shape_.tokens(); ++t) {
      workspace_.batch.tokens.as<int32_t>()[t] = token(generator);
      workspace_.batch.targets.as<int32_t>()[t] = token(generator);
    }
  }

  // Mean loss.
  float Run() {
    ++step_;
    beta1_power_ *= 0.9;
    beta2_power_ *= 0.95;
    scalars_ = {.learning_rate = 1e-4f,
                .beta1_correction = static_cast<float>(1 - beta1_power_),
                .beta2_correction = static_cast<float>(1 - beta2_power_),
                .gradient_scale = 1};
    kernels::Zero(*stream_, buffers_->all_gradients(0));
    const parallel::Pass pass = {.stream = *stream_,
                                 .weights = buffers_->parameter_views(),
                                 .loss_scale = 1.0f / static_cast<float>(shape_.tokens()),
                                 .gradients = &buffers_->gradient_views(0)};
    model_->Forward(pass, workspace_);
    model_->Backward(pass, workspace_);
    const Tensor squares(&squares_, DType::kF32, {1}), norm(&norm_, DType::kF32, {1}),
        loss(&loss_, DType::kF32, {1});
    kernels::Sum(*stream_, workspace_.forward.losses, loss, false);
    kernels::SumSquares(*stream_, buffers_->all_gradients(0), squares, false);
    kernels::ClipCoefficient(*stream_, squares, 1.0f, norm, &scalars_);
    kernels::AdamW(*stream_, {.parameter = buffers_->all_masters(),
                              .gradient = buffers_->all_gradients(0),
                              .m = buffers_->all_m(),
                              .v = buffers_->all_v(),
                              .weight_decay = 0.1f,
                              .scalars = &scalars_});
    CHECK_OK(stream_->Synchronize());
    return loss_ / static_cast<float>(shape_.tokens());
  }

  kernels::Stream& stream() { return *stream_; }
  int64_t flops_per_token() const { return model_->training_flops_per_token(); }

 private:
  std::unique_ptr<kernels::Device> device_;
  std::unique_ptr<kernels::Stream> stream_;
  std::unique_ptr<parallel::Model> model_;
  parallel::FlatLayout layout_;
  std::unique_ptr<parallel::FlatBuffers> buffers_;
  kernels::Arena arena_;
  parallel::BatchShape shape_;
  parallel::Workspace workspace_;
  kernels::StepScalars scalars_{};
  float squares_ = 0, norm_ = 0, loss_ = 0;
  double beta1_power_ = 1, beta2_power_ = 1;
  int step_ = 0;
};

}  // namespace
}  // namespace muster

int main(int argc, char** argv) {
  int64_t batch = 4, sequence = 64;
  int threads = 2, steps = 10;
  CLI::App app("GPT-2 124M training steps on the host");
  app.add_option("--batch", batch, "samples")->check(CLI::PositiveNumber);
  app.add_option("--sequence", sequence, "tokens of a sample")->check(CLI::Range(1, 1024));
  app.add_option("--threads", threads, "host threads")->check(CLI::PositiveNumber);
  app.add_option("--steps", steps, "timed steps after one warm-up")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  muster::Step step(batch, sequence, threads);
  const float first_loss = step.Run();
  float loss = 0;
  std::vector<double> seconds;
  for (int i = 0; i < steps; ++i) {
    const double begin = muster::Now();
    loss = step.Run();
    seconds.push_back(muster::Now() - begin);
  }
  const double median = muster::Median(seconds);
  const double gflops =
      static_cast<double>(step.flops_per_token() * batch * sequence) / median / 1e9;
  const double ceiling = muster::Ceiling(step.stream());
  std::printf(
      "{\"benchmark\": \"gpt2_124m_cpu\", \"batch\": %lld, \"sequence\": %lld, \"threads\": %d, "
      "\"steps\": %d, \"step_seconds\": {\"median\": %.4f, \"min\": %.4f, \"max\": %.4f}, "
      "\"tokens_per_second\": %.1f, \"gflops\": %.1f, \"sgemm_gflops\": %.1f, "
      "\"share_of_sgemm\": %.3f, \"first_loss\": %.4f, \"last_loss\": %.4f}\n",
      static_cast<long long>(batch), static_cast<long long>(sequence), threads, steps, median,
      *std::min_element(seconds.begin(), seconds.end()),
      *std::max_element(seconds.begin(), seconds.end()),
      static_cast<double>(batch * sequence) / median, gflops, ceiling, gflops / ceiling, first_loss,
      loss);
  return 0;
}
