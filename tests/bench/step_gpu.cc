// Training steps of a model on one GPU with fp32 master weights: forward, backward, global norm
// with clipping, AdamW that also writes the 16-bit copy; four batches of random tokens in turns. No
// host synchronisation inside a step; from the third step on it is one recording
// (kernels/device/replay.h). Prints the median step, tokens/s, model FLOP utilisation, memory and
// where the time goes; with
// --peer, the ratio to what torch_peer.py has written there.
//
// MFU = tokens/s x FLOPs per token / the device's dense peak by its data sheet (PeakFlops), with 6
// FLOPs per weight of a matrix product and token, and 6 layers x sequence x hidden of attention,
// whose causal half is counted once. HFU counts matrix products and attention that are recomputed,
// too; --recompute repeats none.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "base/check.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/device/peak_flops.h"
#include "kernels/device/replay.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"
#include "nlohmann/json.hpp"
#include "parallel/model/gpt2.h"
#include "parallel/model/llama.h"
#include "parallel/model/model.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/optim/gradient_norm.h"
#include "tests/bench/kernel_times.h"

namespace muster {
namespace {

using kernels::DType;
using kernels::Tensor;

constexpr double kGiB = 1024.0 * 1024 * 1024;

struct Options {
  std::string model = "gpt2-124m", dtype = "bf16", plans, peer, row;
  int64_t batch = 64, sequence = 1024, layers = 0, head_tokens = 0;
  int steps = 20, recompute_blocks = 0;
  bool recompute = false;
  bool kernels = false;
  bool recordings = true;
  bool any_order = false;
};

parallel::LlamaConfig Llama(int64_t layers, int64_t hidden, int64_t heads, int64_t ffn, bool tied) {
  return {.layers = layers,
          .hidden = hidden,
          .heads = heads,
          .kv_heads = 8,
          .ffn = ffn,
          .vocab = 128256,
          .tied = tied,
          .rope_theta = 500000};
}

std::unique_ptr<parallel::Model> MakeModel(const Options& options) {
  const parallel::ModelParallel how = {
      .recompute = options.recompute ? parallel::Recompute::kSelective : parallel::Recompute::kNone,
      .recompute_blocks = options.recompute_blocks,
      .deterministic = !options.any_order};
  const std::map<std::string, parallel::Gpt2Config> gpt2 = {{"gpt2-124m", {12, 768, 12}},
                                                            {"gpt2-350m", {24, 1024, 16}},
                                                            {"gpt2-774m", {36, 1280, 20}},
                                                            {"gpt2-1558m", {48, 1600, 25}}};
  const std::map<std::string, parallel::LlamaConfig> llama = {
      {"llama-1b", Llama(16, 2048, 32, 8192, true)},
      {"llama-3b", Llama(28, 3072, 24, 8192, true)},
      {"llama-8b", Llama(32, 4096, 32, 14336, false)}};
  if (const auto found = gpt2.find(options.model); found != gpt2.end()) {
    parallel::Gpt2Config config = found->second;
    config.vocab = 50257;
    config.sequence_length = options.sequence;
    if (options.layers > 0) config.layers = options.layers;
    return parallel::MakeGpt2(config, how);
  }
  const auto found = llama.find(options.model);
  CHECK(found != llama.end()) << "unknown model " << options.model
                              << "; known: gpt2-124m, -350m, -774m, -1558m, llama-1b, -3b, -8b";
  parallel::LlamaConfig config = found->second;
  config.sequence_length = options.sequence;
  if (options.layers > 0) config.layers = options.layers;
  return parallel::MakeLlama(config, how);
}

DType TypeOf(const std::string& name) {
  return name == "bf16" ? DType::kBF16 : name == "fp16" ? DType::kF16 : DType::kF32;
}

int64_t MemoryUsed() {
  size_t free = 0;
  size_t total = 0;
  CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
  return static_cast<int64_t>(total - free);
}

template <typename T>
T Take(absl::StatusOr<T> made) {
  CHECK_OK(made);
  return *std::move(made);
}

class Step {
 public:
  Step(kernels::Device& device, const Options& options)
      : stream_(Take(device.MakeStream())),
        model_(MakeModel(options)),
        layout_(model_->parameters(), int64_t{25} << 20, 1),
        shape_{.batch = options.batch,
               .sequence = options.sequence,
               .activation = TypeOf(options.dtype),
               .head_tokens = options.head_tokens},
        buffers_(Take(parallel::FlatBuffers::Make(
            device, *stream_, model_->parameters(), layout_,
            {.seed = 1234, .compute = TypeOf(options.dtype), .share_gradients = true}))),
        scalars_(Take(device.Allocate(sizeof(kernels::StepScalars)))),
        host_scalars_(Take(device.AllocateHost(kSteps * sizeof(kernels::StepScalars)))),
        sums_(Take(device.Allocate(4 * sizeof(float)))) {
    buffers_->RefreshCopies(*stream_);
    // As the trainer does in steps of one micro-batch.
    const parallel::GradientRoom room =
        parallel::FlatBuffers::Room(layout_, model_->parameters(), buffers_->options());
    model_->TakeWorkspace(arena_, shape_, &room);
    CHECK_OK(arena_.Commit(device));
    workspace_ = model_->TakeWorkspace(arena_, shape_, &room);
    buffers_->SetGradientRoom(workspace_.gradients);
    // As the trainer does where additions may be made in any order.
    norm_ = Take(parallel::GradientNorm::Make(*buffers_, device, *stream_,
                                              {.with_products = options.any_order}));
    const int64_t tokens = shape_.tokens();
    batches_ = Take(device.Allocate(2 * kBatches * tokens * int64_t{sizeof(int32_t)}));
    for (int i = 0; i < 2 * kBatches; ++i) FillTokens(Batch(i), i + 1);
    if (options.recordings) replay_ = std::make_unique<kernels::Replay>(*stream_);
  }

  void Enqueue() {
    SetScalars();
    const int batch = 2 * (step_ % kBatches);
    kernels::Copy(*stream_, Batch(batch), workspace_.flow.tokens);
    kernels::Copy(*stream_, Batch(batch + 1), workspace_.flow.targets);
    if (replay_ == nullptr) return EnqueueKernels();
    replay_->Run({}, [this] { EnqueueKernels(); });
  }
  float Loss() {
    float loss = 0;
    kernels::Copy(*stream_, Scalar(0), Tensor(&loss, DType::kF32, {1}));
    CHECK_OK(stream_->Synchronize());
    return loss / static_cast<float>(shape_.tokens());
  }

  // What was planned, by category, in bytes.
  std::map<std::string, int64_t> Planned() const {
    std::map<std::string, int64_t> planned = arena_.bytes_by_category();
    planned["state"] = parallel::FlatBuffers::Bytes(layout_, buffers_->options());
    return planned;
  }

  kernels::Stream& stream() { return *stream_; }
  const parallel::Model& model() const { return *model_; }
  int64_t tokens() const { return shape_.tokens(); }

 private:
  static constexpr int kSteps = 1024;
  static constexpr int kBatches = 4;  // in turns

  // Tokens, targets, tokens of the next batch, and so on.
  Tensor Batch(int i) {
    return Tensor(static_cast<int32_t*>(batches_->data()) + i * shape_.tokens(), DType::kI32,
                  {shape_.tokens()});
  }
  void EnqueueKernels() {
    const parallel::Pass pass = {.stream = *stream_,
                                 .weights = buffers_->parameter_views(),
                                 .loss_scale = 1.0f / static_cast<float>(shape_.tokens()),
                                 .gradients = &buffers_->gradient_views(0),
                                 .overwrite_gradients = true,
                                 .squares = norm_->squares()};
    model_->Forward(pass, workspace_);
    kernels::Sum(*stream_, workspace_.flow.losses, Scalar(0), false);
    model_->Backward(pass, workspace_);
    norm_->Sum(*stream_, Pair());
    auto* scalars = static_cast<kernels::StepScalars*>(scalars_->data());
    kernels::ClipCoefficient(*stream_, Scalar(1), 1.0f, Scalar(3), scalars);
    for (int i = 0; i < static_cast<int>(layout_.buckets().size()); ++i) {
      kernels::AdamWArgs update = buffers_->update(i);
      update.weight_decay = 0.1f;
      update.scalars = scalars;
      kernels::AdamW(*stream_, update);
    }
  }
  Tensor Scalar(int i) { return Tensor(static_cast<float*>(sums_->data()) + i, DType::kF32, {1}); }
  Tensor Pair() { return Tensor(Scalar(1).data(), DType::kF32, {2}); }
  void FillTokens(const Tensor& to, uint32_t seed) {
    std::mt19937 generator(seed);
    std::uniform_int_distribution<int32_t> token(0,
                                                 static_cast<int32_t>(model_->shape().vocab) - 1);
    std::vector<int32_t> values(shape_.tokens());
    for (int32_t& value : values) value = token(generator);
    kernels::Copy(*stream_, Tensor(values.data(), DType::kI32, {shape_.tokens()}), to);
    CHECK_OK(stream_->Synchronize());
  }
  void SetScalars() {
    CHECK_LT(step_, kSteps);
    auto* host = static_cast<kernels::StepScalars*>(host_scalars_->data()) + step_++;
    beta1_power_ *= 0.9;
    beta2_power_ *= 0.95;
    *host = {.learning_rate = 3e-4f,
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
  std::unique_ptr<parallel::GradientNorm> norm_;
  std::unique_ptr<kernels::Buffer> scalars_, host_scalars_, sums_, batches_;
  kernels::Arena arena_;
  parallel::Workspace workspace_;
  std::unique_ptr<kernels::Replay> replay_;  // goes before the stream
  double beta1_power_ = 1, beta2_power_ = 1;
  int step_ = 0;
};

std::vector<double> Times(kernels::Device& device, Step& step, int steps) {
  std::vector<std::unique_ptr<kernels::Event>> events;
  for (int i = 0; i <= steps; ++i) events.push_back(Take(device.MakeEvent(/*timing=*/true)));
  step.stream().Record(*events[0]);
  for (int i = 1; i <= steps; ++i) {
    step.Enqueue();
    step.stream().Record(*events[i]);
  }
  CHECK_OK(step.stream().Synchronize());
  std::vector<double> seconds;
  for (int i = 1; i <= steps; ++i) seconds.push_back(events[i]->SecondsSince(*events[i - 1]));
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

void PrintKernels(Step& step, bool all) {
  constexpr int kSteps = 3;
  KernelTimes times;
  const bool measured = MeasureKernels(
      [&] {
        for (int i = 0; i < kSteps; ++i) step.Enqueue();
        CHECK_OK(step.stream().Synchronize());
      },
      &times);
  if (!measured) {
    std::printf("  no breakdown: CUPTI is not there or refuses\n");
    return;
  }
  const double ms = 1e3 / kSteps;
  std::printf("  a step: products %.2f ms, attention %.2f, bandwidth %.2f, idle %.2f; %d kernels\n",
              times.product * ms, times.attention * ms, times.bandwidth * ms, times.idle * ms,
              times.kernels / kSteps);
  if (!all) return;
  std::vector<std::pair<double, std::string>> sorted;
  for (const auto& [name, seconds] : times.seconds_by_kernel) sorted.push_back({seconds, name});
  std::sort(sorted.rbegin(), sorted.rend());
  for (const auto& [seconds, name] : sorted) {
    std::printf("  %9.3f ms  %.150s\n", seconds * ms, name.c_str());
  }
}

struct Peer {
  double tokens_per_second = 0;
  double gib = 0;
};
// The last line of the file that is about the same work.
Peer FindPeer(const Options& options) {
  std::ifstream in(options.peer);
  Peer peer;
  for (std::string line; std::getline(in, line);) {
    const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || json.value("model", "") != options.model ||
        json.value("batch", int64_t{0}) != options.batch ||
        json.value("seq", int64_t{0}) != options.sequence) {
      continue;
    }
    peer = {json.value("tokens_per_s", 0.0), json.value("peak_mem_gib", 0.0)};
  }
  return peer;
}

struct Result {
  double median, least, most;  // seconds
  double tokens_per_second, mfu, hfu, peak_flops, flops_per_token, gib, gib_with_context;
  float first, last;  // losses
};

void Print(const Options& options, const Result& r, const Peer& peer) {
  const std::string work =
      options.model + " " + options.dtype + " " + std::to_string(options.batch) + " x " +
      std::to_string(options.sequence) + (options.recompute ? ", recomputing" : "") +
      (options.recompute_blocks > 0 ? " " + std::to_string(options.recompute_blocks) + " blocks"
                                    : "") +
      (options.any_order ? ", any order" : "");
  std::printf(
      "%s: %.2f ms (%.2f to %.2f), %.0f tokens/s, MFU %.1f %%, HFU %.1f %%, %.1f GiB (with the "
      "context %.1f), loss %.4f to %.4f\n"
      "  of %.4g TFLOP/s; %.4g GFLOP per token: 6 per weight of a product, 6 x layers x sequence x "
      "hidden of attention\n",
      work.c_str(), r.median * 1e3, r.least * 1e3, r.most * 1e3, r.tokens_per_second, 100 * r.mfu,
      100 * r.hfu, r.gib, r.gib_with_context, r.first, r.last, r.peak_flops * 1e-12,
      r.flops_per_token * 1e-9);
  const bool compared = peer.tokens_per_second > 0;
  const double ratio = compared ? r.tokens_per_second / peer.tokens_per_second : 0;
  const double memory = compared ? r.gib / peer.gib : 0;
  if (compared) {
    std::printf("  peer %.0f tokens/s, %.1f GiB: ratio %.3f, memory %.3f\n", peer.tokens_per_second,
                peer.gib, ratio, memory);
  }
  if (options.row.empty()) return;
  std::FILE* out = std::fopen(options.row.c_str(), "ae");
  CHECK(out != nullptr) << options.row;
  std::fprintf(out, "| %s | %.1f ms (%.1f to %.1f) | %.0f | %.1f %% | %.1f | %.0f | %.1f | ",
               work.c_str(), r.median * 1e3, r.least * 1e3, r.most * 1e3, r.tokens_per_second,
               100 * r.mfu, r.gib, peer.tokens_per_second, peer.gib);
  std::fprintf(out, compared ? "**%.3f** | %.2f |\n" : "not measured | |\n", ratio, memory);
  std::fclose(out);
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Training steps on one GPU");
  app.add_option("--model", options.model, "gpt2-124m .. -1558m, llama-1b, -3b, -8b");
  app.add_option("--layers", options.layers, "instead of the model's")->check(CLI::PositiveNumber);
  app.add_option("--batch", options.batch, "samples")->check(CLI::PositiveNumber);
  app.add_option("--sequence", options.sequence, "tokens of a sample")->check(CLI::PositiveNumber);
  app.add_option("--dtype", options.dtype, "compute type")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}));
  app.add_option("--head-tokens", options.head_tokens,
                 "tokens whose logits stand at once; 0: chosen");
  app.add_option("--steps", options.steps, "timed steps, after five")->check(CLI::Range(1, 1000));
  app.add_option("--plans", options.plans, "folder of measured algorithms");
  app.add_option("--peer", options.peer, "file of torch_peer.py's output");
  app.add_option("--row", options.row, "file that gets the result as a row of a table");
  app.add_flag("--recompute", options.recompute,
               "keep no outputs of norms and of the MLP's activation");
  app.add_option("--recompute-blocks", options.recompute_blocks,
                 "give up only what these would, as training.recompute_blocks; implies --recompute")
      ->check(CLI::PositiveNumber);
  app.add_flag("--any-order", options.any_order,
               "attention's backward adds in any order: two runs differ in their last bits");
  app.add_flag("!--no-recordings", options.recordings,
               "enqueue every kernel of every step, instead of one recording of them");
  app.add_flag("--kernels", options.kernels, "list every kernel");
  CLI11_PARSE(app, argc, argv);
  options.recompute = options.recompute || options.recompute_blocks > 0;
  auto device = kernels::MakeCudaDevice(0, {.plan_cache = options.plans});
  if (!device.ok()) {
    std::fprintf(stderr, "NO GPU, NOT MEASURED: %s\n", device.status().ToString().c_str());
    return 0;
  }
  const int64_t before = MemoryUsed();  // of the context
  Step step(**device, options);
  step.Enqueue();
  const float first = step.Loss();
  for (int i = 0; i < 4; ++i) step.Enqueue();
  CHECK_OK(step.stream().Synchronize());
  const std::vector<double> seconds = Times(**device, step, options.steps);
  Result result = {};
  result.median = seconds[seconds.size() / 2];
  result.least = seconds.front();
  result.most = seconds.back();
  result.tokens_per_second = static_cast<double>(step.tokens()) / result.median;
  result.peak_flops = kernels::PeakFlops((*device)->name(), TypeOf(options.dtype), /*tf32=*/false);
  result.flops_per_token = static_cast<double>(step.model().training_flops_per_token());
  const double possible = result.peak_flops / result.tokens_per_second;  // per token
  if (possible > 0) {
    result.mfu = result.flops_per_token / possible;
    result.hfu = static_cast<double>(step.model().hardware_flops_per_token()) / possible;
  }
  result.gib = static_cast<double>(MemoryUsed() - before) / kGiB;
  result.gib_with_context = static_cast<double>(MemoryUsed()) / kGiB;
  result.first = first;
  result.last = step.Loss();
  Print(options, result, FindPeer(options));
  std::printf("  planned:");
  for (const auto& [category, bytes] : step.Planned()) {
    std::printf(" %s %.2f GiB,", category.c_str(), static_cast<double>(bytes) / kGiB);
  }
  std::printf(" the rest are libraries and their workspaces\n");
  std::fflush(stdout);
  PrintKernels(step, options.kernels);
  return 0;
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) { return muster::Main(argc, argv); }
