#include "proto/spec/families/describe.h"
#include "proto/spec/families/family.h"
#include "proto/spec/families/layers.h"

namespace muster::spec {
namespace {

void SetDefaults(v1::ModelSpec& model) {
  DefaultMamba(model);
  DefaultTable(model, /*tied=*/true);
}

void Check(const v1::ModelSpec& model, Checker& check) {
  check.Positive("engine.model.norm_epsilon", model.norm_epsilon());
  CheckMamba(model, check);
}

// The inner width is twice the hidden one.
v1::ModelSpec Preset(int32_t layers, int32_t hidden) {
  v1::ModelSpec model;
  model.set_family(v1::MODEL_FAMILY_MAMBA2);
  model.set_layers(layers);
  model.set_hidden(hidden);
  model.set_vocab(50288);
  model.set_sequence_length(2048);
  model.set_tied(true);
  model.set_norm_epsilon(1e-5);
  PresetMamba(/*groups=*/1, model);
  return model;
}

constexpr char kMambaPrefix[] = "";

void DescribeModel(const v1::ModelSpec& model, parallel::ModelDescription& description) {
  DescribeMamba(model, kMambaPrefix, description);
  DescribeTable(model, description);
}

void AddLayers(const v1::ModelSpec& model, LayerTotals& totals) {
  AddMamba(model, model.layers(), totals);
}

}  // namespace

const SpecFamily& Mamba2() {
  static const auto* const kFamily = new SpecFamily{.id = v1::MODEL_FAMILY_MAMBA2,
                                                    .fields = {"tied", "norm_epsilon", "mamba"},
                                                    .set_defaults = SetDefaults,
                                                    .check = Check,
                                                    .describe = DescribeModel,
                                                    .add_layers = AddLayers,
                                                    .mamba_prefix = kMambaPrefix,
                                                    .presets = {{"mamba2-130m", Preset(24, 768)},
                                                                {"mamba2-370m", Preset(48, 1024)},
                                                                {"mamba2-780m", Preset(48, 1536)},
                                                                {"mamba2-1.3b", Preset(48, 2048)},
                                                                {"mamba2-2.7b", Preset(64, 2560)}}};
  return *kFamily;
}

}  // namespace muster::spec
