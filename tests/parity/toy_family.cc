#include "tests/parity/toy_family.h"

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/host_device.h"
#include "kernels/memory/memory.h"
#include "parallel/model/description_reader.h"
#include "parallel/model/families/gpt2.h"
#include "parallel/model/linear.h"
#include "parallel/model/norm.h"
#include "proto/spec/families/describe.h"
#include "proto/spec/families/family.h"
#include "proto/spec/families/layers.h"

namespace muster::parallel {
namespace {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;

constexpr int64_t kScales = 4;  // of a column

float GainOf(const float* scale, int64_t column) {
  float gain = 0;
  for (int64_t i = 0; i < kScales; ++i) gain += scale[column * kScales + i];
  return gain;
}

class SquareMixer : public Mixer {
 public:
  explicit SquareMixer(const LayerPlace& place)
      : columns_(place.shard.ffn()), splits_(place.parallel.split_backward) {
    const std::string name = place.block + ".square";
    const int64_t ffn = place.config.ffn, hidden = place.config.hidden;
    up_ = AddColumnParallel(place.registry, {name + ".up", ffn, hidden, kInitialStddev, false},
                            {columns_}, place.shard);
    Parameter scale;
    scale.name = name + ".scale";
    scale.global_shape = {ffn, 2, 2};
    scale.box = {{columns_.begin, 0, 0}, {columns_.size(), 2, 2}};
    scale.initializer = Initializer::kUniform;
    scale.low = 0.2f;
    scale.high = 3;
    scale.sharing = place.shard.sharded();
    scale_ = place.registry.Add(scale);
    down_ =
        AddRowParallel(place.registry, {name + ".down", hidden, ffn, place.residual_stddev, false},
                       columns_, place.shard);
  }

  std::unique_ptr<Saved> MakeSaved() const override { return std::make_unique<SquareSaved>(); }
  void TakeOutputs(Arena& arena, const char* category, const BatchShape& shape,
                   Saved& base) const override {
    CHECK(shape.activation == DType::kF32);
    Of(base).pre = arena.Take(category, DType::kF32, {shape.tokens(), columns_.size()});
    Of(base).out = arena.Take(category, DType::kF32, {shape.tokens(), columns_.size()});
    if (splits_) Of(base).d_gain = arena.Take(category, DType::kF32, {columns_.size()});
  }
  void TakeActivation(Arena&, const char*, const BatchShape&, Saved&) const override {}
  void TakeScratch(Arena& arena, const BatchShape& shape, Tensor /*d_input*/,
                   Saved& base) const override {
    Of(base).d_out = arena.Take("scratch", DType::kF32, {shape.tokens(), columns_.size()});
    if (!splits_) Of(base).d_gain = arena.Take("scratch", DType::kF32, {columns_.size()});
  }

  void Project(const Pass& pass, const ModelBatch& /*batch*/, Saved& base, Tensor x, int64_t first,
               Purpose /*purpose*/) const override {
    const Tensor pre = Of(base).pre.Rows(first, x.dim(0)), out = Of(base).out.Rows(first, x.dim(0));
    LinearForward(pass, up_, x, pre);
    const Tensor scale = pass.weights[scale_];
    kernels::EnqueueOnHost(pass.stream, [pre, out, scale](kernels::ThreadPool&) {
      const int64_t columns = out.dim(1);
      for (int64_t i = 0; i < out.elements(); ++i) {
        const float value = pre.f32()[i];
        out.f32()[i] = value * value * GainOf(scale.f32(), i % columns);
      }
    });
  }
  Tensor Output(const Saved& base) const override { return Of(base).out; }
  const Linear& output() const override { return down_; }
  absl::StatusOr<std::unique_ptr<MixerState>> TakeState(Arena&, const DecodeShape&) const override {
    return std::make_unique<MixerState>();  // it treats every token alone
  }

  void OutputBackward(const Pass& pass, const ModelBatch& /*batch*/, Saved& base, Tensor dy,
                      int64_t first) const override {
    LinearBackwardInput(pass, down_, dy, Of(base).d_out.Rows(first, dy.dim(0)));
  }
  void MixBackward(const Pass& pass, const ModelBatch& /*batch*/, Saved& base, Tensor /*dy*/,
                   const BesideMix& /*beside*/) const override {
    Square(pass, Of(base));
    AddScaleGradient(pass, Of(base));
  }
  void InputBackward(const Pass& pass, Saved& base, int64_t first, Tensor dx) const override {
    LinearBackwardInput(pass, up_, Of(base).d_out.Rows(first, dx.dim(0)), dx);
  }
  void InputWeights(const Pass& pass, Saved& base, Tensor x) const override {
    LinearBackwardWeights(pass, up_, Of(base).d_out, x);
  }

  void SplitMixBackward(const Pass& pass, const ModelBatch& /*batch*/, Saved& base,
                        Tensor /*dy*/) const override {
    Square(pass, Of(base));
  }
  void KeepGradients(const Pass& pass, Saved& base) const override {
    kernels::Copy(pass.stream, Of(base).d_out, Of(base).pre);
  }
  void SplitInputWeights(const Pass& pass, Saved& base, Tensor x) const override {
    AddScaleGradient(pass, Of(base));
    LinearBackwardWeights(pass, up_, Of(base).pre, x);
  }

 private:
  struct SquareSaved : Saved {
    Tensor pre, out, d_out;  // [T,F]; d_out becomes the gradient of pre
    Tensor d_gain;           // [F]
  };
  static SquareSaved& Of(Saved& saved) { return static_cast<SquareSaved&>(saved); }
  static const SquareSaved& Of(const Saved& saved) {
    return static_cast<const SquareSaved&>(saved);
  }

  // Sets d_gain and turns d_out into the gradient of pre.
  void Square(const Pass& pass, const SquareSaved& saved) const {
    const Tensor scale = pass.weights[scale_], pre = saved.pre, d_out = saved.d_out,
                 d_gain = saved.d_gain;
    kernels::EnqueueOnHost(pass.stream, [=](kernels::ThreadPool&) {
      const int64_t rows = pre.dim(0), columns = pre.dim(1);
      for (int64_t f = 0; f < columns; ++f) {
        const float gain = GainOf(scale.f32(), f);
        double sum = 0;
        for (int64_t t = 0; t < rows; ++t) {
          const float value = pre.f32()[t * columns + f];
          float& d = d_out.f32()[t * columns + f];
          sum += static_cast<double>(value) * value * d;
          d *= 2 * value * gain;
        }
        d_gain.f32()[f] = static_cast<float>(sum);
      }
    });
  }
  void AddScaleGradient(const Pass& pass, const SquareSaved& saved) const {
    const Tensor gradient = (*pass.gradients)[scale_], d_gain = saved.d_gain;
    const bool overwrite = pass.overwrite_gradients;
    kernels::EnqueueOnHost(pass.stream, [=](kernels::ThreadPool&) {
      for (int64_t i = 0; i < gradient.elements(); ++i) {
        const float before = overwrite ? 0 : gradient.f32()[i];
        gradient.f32()[i] = before + d_gain.f32()[i / kScales];
      }
    });
    Ready(pass, scale_);
  }

  const Span columns_;
  const bool splits_;
  Linear up_, down_;
  ParameterId scale_ = -1;
};

LayerSize SizeOfSquare(const LanguageModelConfig& config) {
  const int64_t matrix = config.ffn * config.hidden;
  return {.weights = 2 * matrix,
          .parameters = kScales * config.ffn,
          .last = matrix,
          .other = 2 * config.ffn};
}
SplitUnit SplitOfSquare(const LanguageModelConfig& config) {
  return {SplitKind::kMlpColumns, config.ffn};
}
std::unique_ptr<Mixer> MakeSquare(const LayerPlace& place) {
  return std::make_unique<SquareMixer>(place);
}

absl::StatusOr<LanguageModelConfig> ToyFromDescription(const ModelDescription& description) {
  DescriptionReader reader(description);
  LanguageModelConfig config;
  const int64_t layers = reader.Size("layers");
  for (int64_t i = 0; i < layers; ++i) {
    config.blocks.push_back({i % 2 == 0 ? &kSquareLayer : &kAttentionLayer});
  }
  config.hidden = reader.Size("hidden");
  config.heads = config.kv_heads = reader.Size("heads");
  config.ffn = reader.Size("ffn");
  config.vocab = reader.Size("vocab");
  config.sequence_length = reader.Size("sequence_length");
  config.norm = {NormKind::kRms, 1e-5f};
  config.position = PositionKind::kNone;
  config.bias = config.tied = false;
  RETURN_IF_ERROR(reader.Finish());
  return config;
}

}  // namespace

const LayerKind kSquareLayer = {
    .name = "square", .size = SizeOfSquare, .split = SplitOfSquare, .make = MakeSquare};
const ModelFamily kToyFamily = {.name = "toy", .config = ToyFromDescription};

absl::Span<const ModelFamily* const> Families() {
  static constexpr std::array<const ModelFamily*, 2> kFamilies = {&kGpt2Family, &kToyFamily};
  return kFamilies;
}

}  // namespace muster::parallel

namespace muster::spec {
namespace {

void DescribeToy(const v1::ModelSpec& model, parallel::ModelDescription& description) {
  description.family = parallel::kToyFamily.name;
  description.sizes["heads"] = model.heads();
  description.sizes["ffn"] = model.ffn();
}

void AddToyLayers(const v1::ModelSpec& model, LayerTotals& totals) {
  const int attentions = model.layers() / 2;
  AddAttention(model, model.heads(), model.hidden() / model.heads(), attentions, totals);
  AddMlp(model, model.ffn(), /*matrices=*/2, model.layers() - attentions, totals);
}

const SpecFamily& Toy() {
  static const auto* const kFamily = new SpecFamily{
      .id = v1::MODEL_FAMILY_LLAMA,
      .fields = {"heads", "ffn"},
      .set_defaults =
          [](v1::ModelSpec& model) {
            if (model.ffn() == 0) model.set_ffn(2 * model.hidden());
          },
      .check = [](const v1::ModelSpec& model, Checker& check) { CheckHeads(model, check); },
      .describe = DescribeToy,
      .add_layers = AddToyLayers};
  return *kFamily;
}

}  // namespace

absl::Span<const SpecFamily* const> SpecFamilies() {
  static const std::array<const SpecFamily*, 2> kFamilies = {&Gpt2(), &Toy()};
  return kFamilies;
}

}  // namespace muster::spec
