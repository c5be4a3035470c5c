#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/context/context_attention.h"
#include "parallel/model/description_reader.h"
#include "parallel/model/families/family.h"
#include "parallel/model/families/gpt2.h"
#include "parallel/model/families/hybrid.h"
#include "parallel/model/families/llama.h"
#include "parallel/model/families/mamba2.h"
#include "parallel/model/head.h"
#include "parallel/model/language_model_sizes.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/optimizer.h"
#include "tests/support/forwarding_communicator.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

constexpr Gpt2Config kTiny = {
    .layers = 2, .hidden = 16, .heads = 2, .vocab = 37, .sequence_length = 8};

// A model with memory, parameters and one batch of random tokens, some of them masked.
class Bench {
 public:
  static constexpr uint64_t kDropoutSeed = 3;

  explicit Bench(const Gpt2Config& config, BatchShape shape = {2, 8})
      : Bench(MakeGpt2(config), shape) {}
  // `share`: gradients with activations.
  explicit Bench(std::unique_ptr<Model> model, BatchShape shape = {2, 8}, bool share = false)
      : model_(std::move(model)),
        layout_(model_->parameters(), 4096, 1),
        device_(kernels::MakeCpuDevice(1)),
        stream_(*device_->MakeStream()) {
    flat_ = *FlatBuffers::Make(*device_, *stream_, model_->parameters(), layout_,
                               {.seed = 5, .share_gradients = share});
    GradientOverlay overlay;
    if (share) overlay = FlatBuffers::OverlayOf(layout_, model_->parameters(), flat_->options());
    model_->TakeWorkspace(arena_, shape, share ? &overlay : nullptr);
    CHECK_OK(arena_.Commit(*device_));
    workspace_ = model_->TakeWorkspace(arena_, shape, share ? &overlay : nullptr);
    if (share) flat_->SetGradientOverlay(workspace_.gradients);
    // What nobody writes must not matter.
    const kernels::Tensor& gradients = workspace_.gradients;
    if (share) std::memset(gradients.data(), 0xff, gradients.bytes());
    Rng rng(testing::TestSeed());
    const int64_t vocab = model_->shape().vocab;
    for (int64_t i = 0; i < shape.tokens(); ++i) {
      workspace_.batch.tokens.as<int32_t>()[i] = static_cast<int32_t>(rng.Below(vocab));
      workspace_.batch.targets.as<int32_t>()[i] =
          i % 5 == 4 ? -1 : static_cast<int32_t>(rng.Below(vocab));
    }
    if (!model_->shape().dropout) return;
    workspace_.batch.sample.as<int32_t>()[0] = 40;
    workspace_.batch.sample.as<int32_t>()[1] = 0;
  }

  // Weights large enough that every part of the model matters to the loss.
  void Shake() {
    Rng rng(7);
    for (ParameterId id = 0; id < model_->parameters().size(); ++id) {
      float* values = weight(id).f32();
      for (int64_t i = 0; i < model_->parameters().at(id).elements(); ++i) {
        values[i] += static_cast<float>(0.4 * (rng.Uniform() - 0.5));
      }
    }
  }

  double Loss(std::optional<uint64_t> dropout_seed = kDropoutSeed) {
    Pass pass = {*stream_, flat_->parameter_views(), HeadMode::kLoss};
    pass.dropout_seed = dropout_seed;
    model_->Forward(pass, workspace_);
    double sum = 0;
    for (int64_t i = 0; i < workspace_.batch.shape.tokens(); ++i) {
      sum += workspace_.forward.losses.f32()[i];
    }
    return sum;
  }

  kernels::Tensor Logits(int64_t begin) {
    Pass pass = {*stream_, flat_->parameter_views(), HeadMode::kLogits};
    workspace_.batch.logits_begin = begin;
    model_->Forward(pass, workspace_);
    return workspace_.forward.logits;
  }

  void Gradients(GradientListener* listener = nullptr, bool overwrite = false) {
    Gradients(listener, overwrite, nullptr, nullptr);
  }
  // With the ranks that share the sequences.
  void Gradients(GradientListener* listener, bool overwrite, Communicator* context,
                 ContextOverlap* overlap) {
    Pass pass = {*stream_, flat_->parameter_views()};
    pass.gradients = &flat_->gradient_views(0);
    pass.overwrite_gradients = overwrite;
    pass.listener = listener;
    pass.dropout_seed = kDropoutSeed;
    pass.context = context;
    pass.context_overlap = overlap;
    model_->Forward(pass, workspace_);
    model_->Backward(pass, workspace_);
  }

  kernels::Tensor weight(ParameterId id) { return flat_->parameter_views()[id]; }
  kernels::Tensor gradient(ParameterId id) { return flat_->gradient_views(0)[id]; }
  const Model& model() const { return *model_; }
  Workspace& workspace() { return workspace_; }
  kernels::Device& device() { return *device_; }
  const kernels::Arena& arena() const { return arena_; }
  // Of activations, gradients and all else that a step needs beside the parameters' state.
  int64_t step_bytes() const {
    return arena_.peak_bytes() + FlatBuffers::Sizes(layout_, flat_->options()).gradients;
  }
  // The norm of the gradients as an optimizer sees it.
  double Norm() {
    float pair[2] = {0, 0};
    const kernels::Tensor sum(pair, kernels::DType::kF32, {2});
    for (const kernels::Tensor& slice : GradientSlices(*flat_, nullptr)) {
      kernels::SumSquaresPair(*stream_, slice, sum, /*accumulate=*/true);
    }
    return std::sqrt(static_cast<double>(pair[0]) + pair[1]);
  }

 private:
  std::unique_ptr<Model> model_;
  FlatLayout layout_;
  std::unique_ptr<kernels::Device> device_;
  std::unique_ptr<kernels::Stream> stream_;
  std::unique_ptr<FlatBuffers> flat_;
  kernels::Arena arena_;
  Workspace workspace_;
};

TEST(Gpt2, ParameterCount_MatchesThePublishedSizeOfGpt2Small) {
  EXPECT_EQ(ParameterCount(ConfigOf(Gpt2Config{12, 768, 12, 50257, 1024})), 124'439'808);
  const Gpt2Config config = {3, 32, 4, 100, 16};
  EXPECT_EQ(MakeGpt2(config)->parameters().elements(), ParameterCount(ConfigOf(config)));
}

// Grouped heads, an odd MLP width, stretched frequencies: nothing is a multiple of anything.
LlamaConfig TinyLlama(bool tied) {
  LlamaConfig config;
  config.layers = 2;
  config.hidden = 24;
  config.heads = 4;
  config.kv_heads = 2;
  config.ffn = 37;
  config.vocab = 37;
  config.sequence_length = 8;
  config.tied = tied;
  config.rope_theta = 100;
  config.rope_scaling = {.factor = 4, .original_context = 16};
  return config;
}

// Heads that share groups, three taps, widths that are multiples of nothing.
Mamba2Config TinyMamba2() {
  Mamba2Config config;
  config.layers = 2;
  config.hidden = 14;
  config.heads = 4;
  config.head_width = 5;
  config.groups = 2;
  config.state = 3;
  config.taps = 3;
  config.vocab = 37;
  config.sequence_length = 8;
  return config;
}

// Heads wider together than the hidden state, squared ReLU or SwiGLU with rotary positions.
HybridConfig TinyHybrid(int64_t layers, bool llama) {
  HybridConfig config;
  for (int64_t i = 0; i < layers; ++i) config.pattern += i % 2 == 0 ? "*" : "M-";
  config.hidden = 14;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_width = 6;
  config.rotary = llama;
  config.ffn = 11;
  config.mlp = llama ? MlpKind::kSwiglu : MlpKind::kRelu2;
  config.mamba = {.heads = 4, .head_width = 5, .groups = 2, .state = 3, .taps = 3};
  config.vocab = 37;
  config.sequence_length = 8;
  return config;
}

// A family that exists only here: MLPs and attention in blocks of their own, MLPs first, with
// GPT-2's norms, biases and positions. Everything but this function follows from the configuration.
absl::StatusOr<LanguageModelConfig> ToyFromDescription(const ModelDescription& description) {
  DescriptionReader reader(description);
  LanguageModelConfig config;
  const int64_t layers = reader.Size("layers");
  for (int64_t i = 0; i < layers; ++i) {
    config.blocks.push_back({i % 2 == 0 ? &kMlpLayer : &kAttentionLayer});
  }
  config.hidden = reader.Size("hidden");
  config.heads = config.kv_heads = reader.Size("heads");
  config.ffn = reader.Size("ffn");
  config.vocab = reader.Size("vocab");
  config.sequence_length = reader.Size("sequence_length");
  config.norm = {NormKind::kLayer, 1e-5f};
  config.bias = true;
  config.tied = true;
  RETURN_IF_ERROR(reader.Finish());
  return config;
}
constexpr ModelFamily kToyFamily = {.name = "toy", .config = ToyFromDescription};

class Families : public ::testing::TestWithParam<std::string> {
 protected:
  static bool BlocksDiffer() {
    return absl::StartsWith(GetParam(), "hybrid") || GetParam() == "toy";
  }
  static std::unique_ptr<Model> Make(const ModelParallel& how = {}, int64_t layers = 2) {
    if (GetParam() == "gpt2") {
      Gpt2Config config = kTiny;
      config.layers = layers;
      return MakeGpt2(config, how);
    }
    if (GetParam() == "mamba2") {
      Mamba2Config config = TinyMamba2();
      config.layers = layers;
      return MakeMamba2(config, how);
    }
    if (absl::StartsWith(GetParam(), "hybrid")) {
      return MakeHybrid(TinyHybrid(layers, GetParam() == "hybrid_llama"), how);
    }
    if (GetParam() == "toy") {
      const ModelDescription description = {.family = "toy",
                                            .sizes = {{"layers", layers},
                                                      {"hidden", 12},
                                                      {"heads", 2},
                                                      {"ffn", 20},
                                                      {"vocab", kTiny.vocab},
                                                      {"sequence_length", kTiny.sequence_length}}};
      return *MakeModel(kToyFamily, description, how);
    }
    LlamaConfig config = TinyLlama(GetParam() == "llama_tied");
    config.layers = layers;
    return MakeLlama(config, how);
  }
  static void ExpectSlopes(Bench& bench);
};
INSTANTIATE_TEST_SUITE_P(Models, Families,
                         ::testing::Values("gpt2", "llama", "llama_tied", "mamba2", "hybrid",
                                           "hybrid_llama", "toy"),
                         [](const auto& info) { return info.param; });

void Families::ExpectSlopes(Bench& bench) {
  bench.Shake();
  bench.Gradients();
  Rng rng(testing::TestSeed());
  for (ParameterId id = 0; id < bench.model().parameters().size(); ++id) {
    const Parameter& parameter = bench.model().parameters().at(id);
    const int64_t n = parameter.elements();
    const float* gradient = bench.gradient(id).f32();
    double norm = 0;
    for (int64_t i = 0; i < n; ++i) norm += static_cast<double>(gradient[i]) * gradient[i];
    norm = std::sqrt(norm);
    ASSERT_GT(norm, 1e-4) << parameter.name;
    // Along the gradient, and along a random direction of unit length.
    for (const bool random : {false, true}) {
      std::vector<double> direction(n);
      double length = 0;
      for (int64_t i = 0; i < n; ++i) {
        direction[i] = random ? rng.Uniform() - 0.5 : gradient[i];
        length += direction[i] * direction[i];
      }
      length = std::sqrt(length);
      double expected = 0;
      for (int64_t i = 0; i < n; ++i) {
        direction[i] /= length;
        expected += direction[i] * gradient[i];
      }
      const double h = 5e-3;
      float* values = bench.weight(id).f32();
      const std::vector<float> original(values, values + n);
      const auto loss_at = [&](double offset) {
        for (int64_t i = 0; i < n; ++i) {
          values[i] = static_cast<float>(original[i] + offset * direction[i]);
        }
        return bench.Loss();
      };
      const double slope = (loss_at(h) - loss_at(-h)) / (2 * h);
      std::copy(original.begin(), original.end(), values);
      EXPECT_NEAR(slope, expected, 0.01 * norm + 2e-3)
          << parameter.name << (random ? ", random direction" : ", along the gradient");
    }
  }
}

TEST_P(Families, Gradients_AreTheSlopeOfTheLossInEveryParameter) {
  Bench bench(Make());
  ExpectSlopes(bench);
}

// Of what is left of the model.
TEST_P(Families, GradientsWithDropout_AreTheSlopeOfTheLossInEveryParameter) {
  for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
    SCOPED_TRACE(static_cast<int>(recompute));
    Bench bench(Make({.recompute = recompute, .dropout = 0.3})), whole(Make());
    ExpectSlopes(bench);
    whole.Shake();
    EXPECT_NE(bench.Loss(), whole.Loss());
    EXPECT_NE(bench.Loss(), bench.Loss(Bench::kDropoutSeed + 1));
    EXPECT_EQ(bench.Loss(std::nullopt), whole.Loss());
    bench.workspace().batch.sample.as<int32_t>()[0] += 2;
    const double other = bench.Loss();
    bench.workspace().batch.sample.as<int32_t>()[0] -= 2;
    EXPECT_NE(bench.Loss(), other);
  }
}

TEST_P(Families, GradientsInTheRoomOfActivations_AreTheSameInLessMemory) {
  for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
    // Activations larger than gradients, as usual, and smaller.
    for (const BatchShape& shape : {BatchShape{16, 8}, BatchShape{1, 4}}) {
      SCOPED_TRACE(absl::StrCat(static_cast<int>(recompute), " ", shape.batch));
      const auto make = [&] { return Make({.recompute = recompute}, 6); };
      Bench apart(make(), shape), shared(make(), shape, /*share=*/true);
      for (int step = 0; step < 2; ++step) {
        for (Bench* bench : {&apart, &shared}) {
          bench->Shake();
          bench->Gradients(nullptr, /*overwrite=*/true);
        }
        for (ParameterId id = 0; id < apart.model().parameters().size(); ++id) {
          const Parameter& parameter = apart.model().parameters().at(id);
          const kernels::Tensor a = apart.gradient(id), b = shared.gradient(id);
          ASSERT_EQ(std::memcmp(a.data(), b.data(), parameter.elements() * sizeof(float)), 0)
              << parameter.name;
        }
        EXPECT_NEAR(shared.Norm(), apart.Norm(), 1e-9 * apart.Norm());
      }
      const int64_t saved = apart.step_bytes() - shared.step_bytes();
      // The smaller of the two but for what one block needs of both and what is not in order.
      // Blocks that differ share less.
      const int64_t share = BlocksDiffer() ? 25 : 20;
      EXPECT_GT(saved, recompute == Recompute::kFull ? 0 : apart.step_bytes() / share);
    }
  }
}

TEST_P(Families, RecomputeOfSomeBlocks_GivesUpTheirMemoryAndKeepsEveryBit) {
  const auto make = [&](Recompute recompute, int blocks) {
    return Make({.recompute = recompute, .recompute_blocks = blocks}, 4);
  };
  const BatchShape shape = {16, 8};
  const auto kept = [](const Bench& bench) {
    return bench.arena().bytes_by_category().at("activations");
  };
  for (const Recompute recompute : {Recompute::kSelective, Recompute::kFull}) {
    Bench whole(make(Recompute::kNone, 0), shape), all(make(recompute, 0), shape);
    whole.Shake();
    whole.Gradients(nullptr, /*overwrite=*/true);
    const int64_t of_all = kept(whole) - kept(all), of_one = of_all / 4;
    for (int blocks = 1; blocks <= 5; ++blocks) {
      SCOPED_TRACE(absl::StrCat(static_cast<int>(recompute), ", ", blocks, " blocks"));
      Bench some(make(recompute, blocks), shape);
      some.Shake();
      some.Gradients(nullptr, /*overwrite=*/true);
      for (ParameterId id = 0; id < whole.model().parameters().size(); ++id) {
        const Parameter& parameter = whole.model().parameters().at(id);
        ASSERT_EQ(std::memcmp(whole.gradient(id).data(), some.gradient(id).data(),
                              parameter.elements() * sizeof(float)),
                  0)
            << parameter.name;
      }
      if (recompute == Recompute::kFull && blocks < 4) {
        Bench both(Make({.recompute = recompute,
                         .recompute_blocks = blocks,
                         .recompute_rest = Recompute::kSelective},
                        4),
                   shape);
        both.Shake();
        both.Gradients(nullptr, /*overwrite=*/true);
        EXPECT_EQ(both.Norm(), whole.Norm());
        EXPECT_LT(kept(both), kept(some));
      }
      if (BlocksDiffer()) continue;  // its blocks keep different amounts
      const int64_t saved = kept(whole) - kept(some);
      EXPECT_GE(saved, std::min(of_all, blocks * of_one));
      EXPECT_LT(saved, std::min(of_all, blocks * of_one) + of_one);
      // Activations of other blocks do: no norm is computed again.
      if (recompute == Recompute::kSelective && blocks == 1) {
        EXPECT_LT(some.arena().bytes_by_category().at("scratch"),
                  all.arena().bytes_by_category().at("scratch"));
      }
    }
  }
}

TEST(Mamba2, ParameterCount_MatchesThePublishedSizes) {
  // state-spaces/mamba2-130m and -2.7b, with a vocabulary padded to 50288.
  Mamba2Config config = {
      .layers = 24, .hidden = 768, .heads = 24, .vocab = 50288, .sequence_length = 2048};
  EXPECT_EQ(ParameterCount(ConfigOf(config)), 128'989'632);
  config = {.layers = 64, .hidden = 2560, .heads = 80, .vocab = 50288, .sequence_length = 2048};
  EXPECT_EQ(ParameterCount(ConfigOf(config)), 2'702'599'680);
  EXPECT_EQ(MakeMamba2(TinyMamba2())->parameters().elements(),
            ParameterCount(ConfigOf(TinyMamba2())));
}

TEST(Hybrid, ParameterCount_MatchesThePublishedSizeOfNemotronH) {
  HybridConfig config;
  config.pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-";
  config.hidden = 4096;
  config.heads = 32;
  config.kv_heads = 8;
  config.head_width = 128;
  config.ffn = 21504;
  config.mamba = {.heads = 128, .head_width = 64, .groups = 8, .state = 128, .taps = 4};
  config.vocab = 131072;
  config.sequence_length = 8192;
  // nvidia/Nemotron-H-8B-Base-8K.
  EXPECT_EQ(ParameterCount(ConfigOf(config)), 8'100'852'736);
  for (const bool llama : {false, true}) {
    const HybridConfig tiny = TinyHybrid(5, llama);
    EXPECT_EQ(MakeHybrid(tiny)->parameters().elements(), ParameterCount(ConfigOf(tiny)));
  }
}

TEST(Llama, ParameterCount_MatchesThePublishedSizes) {
  LlamaConfig config;
  config.sequence_length = 4096;
  config.vocab = 128256;
  config.kv_heads = 8;
  const auto count = [&](int64_t layers, int64_t hidden, int64_t heads, int64_t ffn, bool tied) {
    config.layers = layers;
    config.hidden = hidden;
    config.heads = heads;
    config.ffn = ffn;
    config.tied = tied;
    return ParameterCount(ConfigOf(config));
  };
  EXPECT_EQ(count(16, 2048, 32, 8192, true), 1'235'814'400);     // Llama 3.2 1B
  EXPECT_EQ(count(28, 3072, 24, 8192, true), 3'212'749'824);     // Llama 3.2 3B
  EXPECT_EQ(count(32, 4096, 32, 14336, false), 8'030'261'248);   // Llama 3.1 8B
  EXPECT_EQ(count(80, 8192, 64, 28672, false), 70'553'706'496);  // Llama 3 70B
  EXPECT_EQ(MakeLlama(TinyLlama(false))->parameters().elements(),
            ParameterCount(ConfigOf(TinyLlama(false))));
}

// Rotary attention sees distances only: the same text later gives the same logits.
TEST(Llama, ShiftedPositions_GiveTheSameLogits) {
  Bench bench(MakeLlama(TinyLlama(false)));
  bench.Shake();
  const kernels::Tensor logits = bench.Logits(0);
  const std::vector<float> before(logits.f32(), logits.f32() + logits.elements());
  std::vector<int32_t> positions = {100, 101, 102, 103, 104, 105, 106, 107};
  bench.workspace().batch.positions = {positions.data(), kernels::DType::kI32, {8}};
  const kernels::Tensor shifted = bench.Logits(0);
  bool moved = false;
  for (int64_t i = 0; i < shifted.elements(); ++i) {
    EXPECT_NEAR(shifted.f32()[i], before[i], 2e-4);
    moved = moved || shifted.f32()[i] != before[i];
  }
  EXPECT_TRUE(moved);
  // Another order of the same tokens does not.
  std::swap(positions[0], positions[5]);
  const kernels::Tensor mixed = bench.Logits(0);
  double largest = 0;
  for (int64_t i = 0; i < mixed.elements(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(mixed.f32()[i]) - before[i]));
  }
  EXPECT_GT(largest, 1e-2);
}

TEST(Gpt2, Backward_ReportsEveryParameterOnceAndTheTiedTableLast) {
  struct Listener : GradientListener {
    void GradientReady(ParameterId parameter) override { ready.push_back(parameter); }
    std::vector<ParameterId> ready;
  } listener;
  Bench bench(kTiny);
  bench.Gradients(&listener);
  const std::set<ParameterId> distinct(listener.ready.begin(), listener.ready.end());
  EXPECT_EQ(static_cast<int>(listener.ready.size()), bench.model().parameters().size());
  EXPECT_EQ(distinct.size(), listener.ready.size());
  EXPECT_EQ(bench.model().parameters().at(listener.ready.back()).name, "embedding.token.weight");
}

// What backward enqueues: exchanges of context ranks, and products that complete the gradient of a
// weight.
class BackwardLog : public testing::ForwardingCommunicator, public GradientListener {
 public:
  explicit BackwardLog(std::unique_ptr<Communicator> inner)
      : ForwardingCommunicator(std::move(inner)) {}
  void Watch(const Model& model, const kernels::Stream* beside) {
    model_ = &model;
    beside_ = beside;
  }

  void AllToAllBatch(kernels::Stream& stream, const std::vector<AllToAllItem>& items) override {
    entries.push_back(&stream == beside_ ? "exchange beside" : "exchange");
    inner_->AllToAllBatch(stream, items);
  }
  void AllGather(kernels::Stream& stream, kernels::Tensor data) override {
    entries.push_back(&stream == beside_ ? "exchange beside" : "exchange");
    inner_->AllGather(stream, data);
  }
  void GradientReady(ParameterId parameter) override {
    const std::string& name = model_->parameters().at(parameter).name;
    if (absl::StartsWith(name, "blocks.1.") && absl::EndsWith(name, ".weight") &&
        !absl::StrContains(name, "norm")) {
      entries.push_back(name.substr(9, name.size() - 9 - 7));
    }
  }

  std::vector<std::string> entries;

 private:
  const Model* model_ = nullptr;
  const kernels::Stream* beside_ = nullptr;
};

// Two ranks that share the sequences; per rank its gradients, all of them, and what it logged.
struct TwoRanks {
  std::vector<float> gradients[2];
  std::vector<std::string> entries[2];
};
TwoRanks RunTwoRanks(const std::function<std::unique_ptr<Model>()>& make, bool overlapped) {
  TwoRanks result;
  auto groups = MakeLocalCommunicators(2, absl::Seconds(60));
  std::vector<std::thread> threads;
  for (const int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      BackwardLog log(std::move(groups[rank]));
      Bench bench(make(), {2, 4});
      std::vector<int32_t> positions = ContextPositions(8, rank, 2);
      bench.workspace().batch.positions =
          kernels::Tensor(positions.data(), kernels::DType::kI32, {4});
      bench.Shake();
      std::unique_ptr<ContextOverlap> overlap;
      if (overlapped) overlap = *ContextOverlap::Make(bench.device());
      log.Watch(bench.model(), overlapped ? overlap->stream.get() : nullptr);
      for (const bool overwrite : {true, false}) {
        log.entries.clear();
        bench.Gradients(&log, overwrite, &log, overlap.get());
      }
      result.entries[rank] = log.entries;
      for (ParameterId id = 0; id < bench.model().parameters().size(); ++id) {
        const float* values = bench.gradient(id).f32();
        const int64_t size = bench.model().parameters().at(id).elements();
        result.gradients[rank].insert(result.gradients[rank].end(), values, values + size);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return result;
}

TEST_P(Families, ExchangesOfAttentionsBackward_HaveGradientsOfWeightsBesideThem) {
  if (GetParam() == "mamba2" || BlocksDiffer()) {
    GTEST_SKIP() << "not every block has attention and an MLP";
  }
  for (const double dropout : {0.0, 0.3}) {
    std::vector<float> kept;  // gradients where nothing is computed again
    for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
      const auto make = [&] {
        return Make({.recompute = recompute,
                     .context_size = 2,
                     .context_method = ContextMethod::kAllToAll,
                     .dropout = dropout});
      };
      SCOPED_TRACE(absl::StrCat(static_cast<int>(recompute), " dropout ", dropout));
      const TwoRanks alone = RunTwoRanks(make, /*overlapped=*/false);
      const TwoRanks overlapped = RunTwoRanks(make, /*overlapped=*/true);
      if (kept.empty()) kept = alone.gradients[0];
      EXPECT_EQ(alone.gradients[0], kept);
      // With GELU `up` needs memory that attention writes to.
      const bool gelu = GetParam() == "gpt2";
      for (const int rank : {0, 1}) {
        EXPECT_EQ(alone.gradients[rank], overlapped.gradients[rank]);
        for (const TwoRanks* run : {&alone, &overlapped}) {
          const std::string beside = run == &overlapped ? " beside" : "";
          std::vector<std::string> expected = {"mlp.down"};
          if (gelu) expected.push_back("mlp.up");
          expected.push_back("exchange" + beside);
          expected.push_back("attention.output");
          expected.push_back(gelu ? "exchange" : "exchange" + beside);
          if (!gelu) expected.push_back("mlp.up");
          expected.push_back("attention.qkv");
          std::vector<std::string> entries = run->entries[rank];
          const auto begin = std::find(entries.begin(), entries.end(), "mlp.down");
          const auto end = std::find(begin, entries.end(), "attention.qkv");
          ASSERT_NE(end, entries.end());
          EXPECT_EQ(std::vector<std::string>(begin, end + 1), expected);
        }
      }
    }
  }
}

TEST(Mamba2, PassedStatesOfBackward_HaveGradientsOfWeightsBesideThem) {
  std::vector<float> kept;
  for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
    SCOPED_TRACE(static_cast<int>(recompute));
    const auto make = [&] {
      return MakeMamba2(TinyMamba2(), {.recompute = recompute, .context_size = 2});
    };
    const TwoRanks alone = RunTwoRanks(make, /*overlapped=*/false);
    const TwoRanks overlapped = RunTwoRanks(make, /*overlapped=*/true);
    if (kept.empty()) kept = alone.gradients[0];
    EXPECT_EQ(alone.gradients[0], kept);
    for (const int rank : {0, 1}) {
      EXPECT_EQ(alone.gradients[rank], overlapped.gradients[rank]);
      for (const TwoRanks* run : {&alone, &overlapped}) {
        const std::string beside = run == &overlapped ? " beside" : "";
        const std::vector<std::string>& entries = run->entries[rank];
        const auto output = std::find(entries.begin(), entries.end(), "mamba.out_proj");
        ASSERT_TRUE(output != entries.begin() && entries.end() - output >= 4);
        EXPECT_EQ(std::vector<std::string>(output - 1, output + 4),
                  (std::vector<std::string>{"exchange" + beside, "mamba.out_proj", "exchange",
                                            "mamba.conv", "mamba.in_proj"}));
      }
    }
  }
}

TEST(Gpt2, HeadInChunks_GivesTheLossesOfOneChunkAndTheirGradients) {
  Bench whole(kTiny), chunks(kTiny, {.batch = 2, .sequence = 8, .head_tokens = 5});
  whole.Shake();
  chunks.Shake();
  EXPECT_EQ(chunks.arena().bytes_by_category().at("logits"), 5 * 48 * 4 + 64);  // of 256-byte units
  EXPECT_NEAR(whole.Loss(), chunks.Loss(), 1e-4);
  whole.Gradients();
  chunks.Gradients();
  for (ParameterId id = 0; id < whole.model().parameters().size(); ++id) {
    const float* expected = whole.gradient(id).f32();
    const float* actual = chunks.gradient(id).f32();
    for (int64_t i = 0; i < whole.gradient(id).elements(); ++i) {
      // The table's gradient is summed chunk by chunk.
      ASSERT_NEAR(actual[i], expected[i], 1e-4) << whole.model().parameters().at(id).name;
    }
  }
}

TEST(Head, ChunkOfItsOwn_KeepsLogitsWithin1GiBOr2UpTo8192Tokens) {
  BatchShape shape = {.batch = 64, .sequence = 4096, .activation = kernels::DType::kBF16};
  EXPECT_EQ(HeadChunk(shape, 50304), 8192);   // 0.8 GiB; 16384 would be 1.5
  EXPECT_EQ(HeadChunk(shape, 128256), 8192);  // 2.0 GiB, as many tokens as are worth it
  EXPECT_EQ(HeadChunk(shape, 256000), 4096);  // 2.0 GiB
  EXPECT_EQ(HeadChunk(shape, 32000), 16384);  // 1.0 GiB
  EXPECT_EQ(HeadChunk(shape, 256), 262144);   // all there are
  shape.head_tokens = 5;
  EXPECT_EQ(HeadChunk(shape, 128256), 5);
}

TEST(Gpt2, Logits_FromAnyToken_AreTheSameRows) {
  Bench whole(kTiny), chunks(kTiny, {.batch = 2, .sequence = 8, .head_tokens = 3});
  const kernels::Tensor all = whole.Logits(0);
  ASSERT_EQ(all.dim(0), 16);
  const std::vector<float> expected(all.f32(), all.f32() + all.elements());
  for (const int64_t begin : {0, 6, 14}) {
    const kernels::Tensor rows = chunks.Logits(begin);
    ASSERT_EQ(rows.dim(0), begin == 14 ? 2 : 3);
    for (int64_t i = 0; i < rows.elements(); ++i) {
      EXPECT_NEAR(rows.f32()[i], expected[begin * 48 + i], 1e-6);
    }
  }
}

TEST(Gpt2, VocabularyPadding_HasNoGradientAndNoInfluence) {
  Bench bench(kTiny);
  bench.Shake();
  ASSERT_EQ(bench.model().shape().vocab_storage, 48);
  const double loss = bench.Loss();
  bench.Gradients();
  const kernels::Tensor table = bench.gradient(0);
  ASSERT_EQ(table.dim(0), 48);
  for (int64_t i = 37 * 16; i < 48 * 16; ++i) EXPECT_EQ(table.f32()[i], 0.0f);
  for (int64_t i = 37 * 16; i < 48 * 16; ++i) bench.weight(0).f32()[i] = 3.0f;
  EXPECT_EQ(bench.Loss(), loss);
}

TEST(Gpt2, Forward_IsCausal) {
  Bench bench(kTiny);
  bench.Shake();
  bench.Loss();
  const std::vector<float> before(bench.workspace().forward.losses.f32(),
                                  bench.workspace().forward.losses.f32() + 16);
  // The last token of the first sample is seen by no other position.
  int32_t& last = bench.workspace().batch.tokens.as<int32_t>()[7];
  last = (last + 1) % 37;
  bench.Loss();
  for (int64_t i = 0; i < 16; ++i) {
    if (i == 7) {
      EXPECT_NE(bench.workspace().forward.losses.f32()[i], before[i]);
    } else {
      EXPECT_EQ(bench.workspace().forward.losses.f32()[i], before[i]) << i;
    }
  }
}

TEST(Gpt2, Workspace_TakesWhatTheHeaderSays) {
  const BatchShape shape = {2, 8};
  Bench bench(kTiny, shape);
  // Per token: 16 C + H + 4 in each block, C of the embedding, 2 C + 3 of the head; every tensor is
  // padded to 256 bytes.
  const int64_t floats = 16 * (2 * (16 * 16 + 2 + 4) + 16 + 2 * 16 + 3);
  const int64_t activations = bench.arena().bytes_by_category().at("activations");
  EXPECT_GE(activations, floats * 4);
  EXPECT_LE(activations, floats * 4 + 40 * 256);
  EXPECT_EQ(bench.arena().bytes_by_category().at("logits"), 16 * 48 * 4);
}

TEST(Parameters, InitialValues_DependOnSeedNameAndElementOnly) {
  Parameter whole;
  whole.name = "w";
  whole.global_shape = {6, 8};
  whole.initializer = Initializer::kNormal;
  whole.stddev = 0.5f;
  ParameterRegistry registry;
  const Parameter& all = registry.at(registry.Add(whole));
  std::vector<float> values(48);
  Initialize(all, 11, 0, 48, values.data());

  Parameter box = whole;
  box.box = {{2, 3}, {3, 4}};
  ParameterRegistry sharded;
  std::vector<float> part(12);
  Initialize(sharded.at(sharded.Add(box)), 11, 0, 12, part.data());
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t column = 0; column < 4; ++column) {
      EXPECT_EQ(part[row * 4 + column], values[(row + 2) * 8 + column + 3]);
    }
  }
  std::vector<float> other(48);
  Initialize(all, 12, 0, 48, other.data());
  EXPECT_NE(values, other);
  double square = 0;
  for (const float value : values) square += value * value;
  EXPECT_NEAR(std::sqrt(square / 48), 0.5, 0.2);
}

TEST(MakeModel, LlamaDescription_MakesTheSameModelAgain) {
  const ModelDescription description = MakeLlama(TinyLlama(true))->description();
  ASSERT_OK_AND_ASSIGN(auto model, MakeModel(description));
  EXPECT_EQ(model->description().sizes, description.sizes);
  EXPECT_EQ(model->description().numbers, description.numbers);
  EXPECT_EQ(model->description().flags, description.flags);
  EXPECT_EQ(model->shape().rope_scaling.original_context, 16);
  for (const auto& [spoil, expected] :
       std::vector<std::pair<std::function<void(ModelDescription&)>, std::string>>{
           {[](auto& d) { d.sizes["kv_heads"] = 3; }, "kv_heads (3) does not divide heads (4)"},
           {[](auto& d) { d.sizes["heads"] = 8; }, "hidden / heads = 3"},
           {[](auto& d) { d.numbers.erase("rope_theta"); }, "number 'rope_theta'"},
           {[](auto& d) { d.flags.clear(); }, "flag 'tied'"},
           {[](auto& d) { d.flags["bias"] = true; }, "unknown flag 'bias'"},
           {[](auto& d) { d.numbers["rope_factor"] = 0.5; }, "rope_factor"},
           {[](auto& d) { d.numbers["norm_epsilon"] = NAN; }, "'norm_epsilon'"}}) {
    ModelDescription bad = description;
    spoil(bad);
    EXPECT_THAT(MakeModel(bad).status(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(expected)));
  }
}

TEST(MakeModel, BadDescription_NamesWhatIsWrong) {
  ModelDescription description = MakeGpt2(kTiny)->description();
  EXPECT_OK(MakeModel(description).status());
  ModelDescription unknown = description;
  unknown.family = "gpt9";
  EXPECT_THAT(MakeModel(unknown).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("gpt9")));
  ModelDescription missing = description;
  missing.sizes.erase("heads");
  EXPECT_THAT(MakeModel(missing).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("heads")));
  ModelDescription odd = description;
  odd.sizes["heads"] = 3;
  EXPECT_THAT(MakeModel(odd).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("does not divide")));
  EXPECT_THAT(MakeModel(description, {.dropout = 1}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("dropout 1 is not")));
}

TEST(Initialize, LargeMatrix_HasTheValuesOfItsElementsWhateverThreadsFillIt) {
  Parameter parameter;
  parameter.name = "large";
  parameter.global_shape = {3001, 1024};
  parameter.box = {{1, 0}, {3000, 1024}};
  parameter.storage_rows = 3008;
  parameter.initializer = Initializer::kNormal;
  parameter.stddev = 0.5f;
  std::vector<float> values(parameter.elements());
  Initialize(parameter, 7, 0, parameter.elements(), values.data());
  Parameter row = parameter;
  row.storage_rows = 1;
  std::vector<float> expected(1024);
  for (int64_t i = 0; i < 3000; ++i) {
    row.box = {{i + 1, 0}, {1, 1024}};
    Initialize(row, 7, 0, 1024, expected.data());
    ASSERT_TRUE(std::equal(expected.begin(), expected.end(), values.begin() + i * 1024)) << i;
  }
}

TEST(Initialize, AnyPartOfAMatrixInBands_HasTheValuesThatTheWholeHasThere) {
  for (const Initializer initializer : {Initializer::kNormal, Initializer::kOnes}) {
    Parameter whole;
    whole.name = "bands";
    whole.global_shape = {40, 7};
    whole.bands = {{{3, 0}, {5, 7}}, {{20, 0}, {2, 7}}, {{30, 0}, {9, 7}}};
    whole.initializer = initializer;
    whole.stddev = 2;
    ParameterRegistry registry;
    const Parameter& parameter = registry.at(registry.Add(whole));
    const int64_t n = parameter.elements();
    ASSERT_EQ(n, 16 * 7);
    std::vector<float> values(n);
    Initialize(parameter, 3, 0, n, values.data());
    for (int64_t first = 0; first <= n; ++first) {
      for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{6}, int64_t{40}, n - first}) {
        if (first + count > n) continue;
        std::vector<float> part(count + 1, -77);
        Initialize(parameter, 3, first, count, part.data());
        ASSERT_TRUE(std::equal(part.begin(), part.end() - 1, values.begin() + first))
            << count << " from " << first;
        ASSERT_EQ(part.back(), -77);
      }
    }
  }
}

// Boxes of three dimensions, cut in the first or in the middle.
TEST(Initialize, AnyBoxOfAThreeDimensionalParameter_HasTheValuesThatTheWholeHasThere) {
  Parameter whole;
  whole.name = "experts";
  whole.global_shape = {5, 4, 3};
  whole.initializer = Initializer::kUniform;
  whole.low = -1;
  whole.high = 1;
  ParameterRegistry registry;
  const Parameter& all = registry.at(registry.Add(whole));
  EXPECT_EQ(all.storage_elements(), 60);
  std::vector<float> values(60);
  Initialize(all, 3, 0, 60, values.data());
  EXPECT_EQ(all.StorageIn(values.data(), kernels::DType::kF32).dim(2), 3);
  for (const Box& box :
       {Box{{1, 0, 0}, {3, 4, 3}}, Box{{0, 1, 0}, {5, 2, 3}}, Box{{2, 3, 1}, {2, 1, 2}}}) {
    SCOPED_TRACE(box.ToString());
    Parameter cut = whole;
    cut.box = box;
    ParameterRegistry other;
    const Parameter& part = other.at(other.Add(cut));
    std::vector<float> found(part.elements());
    // In two calls, as ranks of a flat layout do.
    Initialize(part, 3, 0, 2, found.data());
    Initialize(part, 3, 2, part.elements() - 2, found.data() + 2);
    std::vector<float> expected(part.elements());
    CopyBox(box, sizeof(float), Box::Whole(whole.global_shape),
            reinterpret_cast<const char*>(values.data()), box,
            reinterpret_cast<char*>(expected.data()));
    EXPECT_EQ(found, expected);
  }
}

}  // namespace
}  // namespace muster::parallel
