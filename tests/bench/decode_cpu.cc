// Times a token of sampling on the host, in fp32 and by one thread like `muster sample`: from the
// state that the layers keep, at several positions, beside a forward pass over the whole window.
// Prints a line of JSON per position. The logits of both are compared first.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "base/check.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/generate/decoder.h"
#include "parallel/model/families/gpt2.h"
#include "parallel/model/families/llama.h"
#include "parallel/model/families/mamba2.h"
#include "parallel/model/model.h"
#include "tests/parallel/parameter_storage.h"

namespace muster::parallel {
namespace {

// Processor time of this process, which other load on the machine hardly changes.
double Now() {
  timespec time;
  CHECK_EQ(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time), 0);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

struct Times {
  double median, least, most;
};
Times Sorted(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return {x[x.size() / 2], x.front(), x.back()};
}

// The sizes of examples/NAME.yaml, and of presets.
std::unique_ptr<Model> MakeNamed(const std::string& name) {
  if (name == "gpt-kjv") {
    return MakeGpt2({.layers = 3, .hidden = 192, .heads = 6, .vocab = 256, .sequence_length = 128});
  }
  if (name == "gpt2-124m") {
    return MakeGpt2(
        {.layers = 12, .hidden = 768, .heads = 12, .vocab = 50257, .sequence_length = 1024});
  }
  if (name == "mamba2-130m") {
    return MakeMamba2(
        {.layers = 24, .hidden = 768, .heads = 24, .vocab = 50288, .sequence_length = 1024});
  }
  if (name == "mamba2-kjv") {
    return MakeMamba2({.layers = 4,
                       .hidden = 128,
                       .heads = 8,
                       .head_width = 32,
                       .state = 32,
                       .vocab = 256,
                       .sequence_length = 128});
  }
  LlamaConfig config;
  config.layers = 4;
  config.hidden = 128;
  config.heads = 8;
  config.kv_heads = 4;
  config.ffn = 352;
  config.vocab = 256;
  config.sequence_length = 128;
  return MakeLlama(config);
}

class Run {
 public:
  explicit Run(const std::string& name)
      : name_(name),
        model_(MakeNamed(name)),
        device_(kernels::MakeCpuDevice(1)),
        weights_(model_->parameters()) {
    auto stream = device_->MakeStream();
    CHECK_OK(stream);
    stream_ = *std::move(stream);
    for (ParameterId id = 0; id < model_->parameters().size(); ++id) {
      const Parameter& parameter = model_->parameters().at(id);
      Initialize(parameter, /*seed=*/1, 0, parameter.elements(), weights_[id].data());
    }
    std::mt19937 generator(1);
    for (int64_t i = 0; i < window(); ++i) {
      tokens_.push_back(static_cast<int32_t>(generator() % model_->shape().vocab));
    }
    shape_ = {.batch = 1, .sequence = window(), .head_tokens = 1};
    model_->TakeWorkspace(arena_, shape_);
    CHECK_OK(arena_.Commit(*device_));
    workspace_ = model_->TakeWorkspace(arena_, shape_);
    std::copy(tokens_.begin(), tokens_.end(), workspace_.batch.tokens.as<int32_t>());
    auto decoder = Decoder::Make(*device_, *stream_, *model_, weights_.views(),
                                 {.batch = 1, .context = window(), .tokens_per_pass = window()});
    CHECK_OK(decoder);
    decoder_ = *std::move(decoder);
  }

  int64_t window() const { return model_->shape().sequence_max; }
  bool limited() const { return model_->limits_text(); }

  // A pass over the whole window, of which the last token counts.
  double Whole() {
    const double begin = Now();
    workspace_.batch.logits_begin = window() - 1;
    model_->Forward({*stream_, weights_.views(), HeadMode::kLogits}, workspace_);
    CHECK_OK(stream_->Synchronize());
    return Now() - begin;
  }
  double Append(absl::Span<const int32_t> tokens) {
    const double begin = Now();
    const absl::StatusOr<kernels::Tensor> logits = decoder_->Append(tokens);
    CHECK_OK(logits);
    CHECK_OK(stream_->Synchronize());
    logits_ = *logits;
    return Now() - begin;
  }

  // The largest difference of the logits behind a whole window, relative to the largest logit.
  double Difference() {
    Whole();
    const float* expected = workspace_.forward.logits.f32();
    decoder_->Restart();
    const absl::Span<const int32_t> all = tokens_;
    Append(all.first(window() / 2));
    for (int64_t i = window() / 2; i < window(); ++i) Append(all.subspan(i, 1));
    double largest = 0, difference = 0;
    for (int64_t i = 0; i < model_->shape().vocab; ++i) {
      largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
      difference =
          std::max(difference, std::abs(static_cast<double>(expected[i]) - logits_.f32()[i]));
    }
    return difference / largest;
  }

  // Tokens behind `position` others.
  void At(int64_t position, int runs, const Times& whole, double difference) {
    decoder_->Restart();
    std::vector<int32_t> text;
    for (int64_t i = 0; i < position; ++i) text.push_back(tokens_[i % window()]);
    const double prompt = Append(text);
    std::vector<double> seconds;
    for (int i = 0; i < runs; ++i) {
      if (limited() && decoder_->length() == window()) {
        decoder_->Restart();
        Append(text);
      }
      seconds.push_back(Append({&tokens_[0], 1}));
    }
    const Times token = Sorted(seconds);
    std::printf(
        "{\"benchmark\": \"decode_cpu\", \"model\": \"%s\", \"position\": %lld, "
        "\"prompt_ms\": %.3f, \"token_ms\": {\"median\": %.3f, \"min\": %.3f, \"max\": %.3f}, "
        "\"tokens_per_second\": %.1f, \"whole_window_ms\": {\"median\": %.3f, \"min\": %.3f, "
        "\"max\": %.3f}, \"ratio\": %.1f, \"difference\": %.1e}\n",
        name_.c_str(), static_cast<long long>(position), prompt * 1e3, token.median * 1e3,
        token.least * 1e3, token.most * 1e3, 1 / token.median, whole.median * 1e3,
        whole.least * 1e3, whole.most * 1e3, whole.median / token.median, difference);
  }

  Times TimeWhole(int runs) {
    std::vector<double> seconds;
    for (int i = 0; i < runs; ++i) seconds.push_back(Whole());
    return Sorted(seconds);
  }

 private:
  const std::string name_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<kernels::Device> device_;
  std::unique_ptr<kernels::Stream> stream_;
  ParameterStorage weights_;
  std::vector<int32_t> tokens_;
  kernels::Arena arena_;
  BatchShape shape_;
  Workspace workspace_;
  std::unique_ptr<Decoder> decoder_;
  kernels::Tensor logits_;
};

}  // namespace
}  // namespace muster::parallel

int main(int argc, char** argv) {
  std::string model = "gpt-kjv";
  int runs = 30;
  std::vector<int64_t> positions;
  CLI::App app("a token of sampling on the host");
  app.add_option("--model", model, "whose sizes")
      ->check(CLI::IsMember({"gpt-kjv", "llama-kjv", "mamba2-kjv", "gpt2-124m", "mamba2-130m"}))
      ->capture_default_str();
  app.add_option("--runs", runs, "timed tokens and passes")->check(CLI::Range(1, 100000));
  app.add_option("--positions", positions,
                 "tokens in front [default: one, half a window, and those at its end]")
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  muster::parallel::Run run(model);
  if (positions.empty())
    positions = {1, run.window() / 2, std::max<int64_t>(1, run.window() - runs)};
  const double difference = run.Difference();
  CHECK(difference <= 1e-5) << "logits differ by " << difference;
  const auto whole = run.TimeWhole(runs);
  for (const int64_t position : positions) {
    CHECK(!run.limited() || position < run.window()) << "the window is " << run.window();
    run.At(position, runs, whole, difference);
  }
  return 0;
}
