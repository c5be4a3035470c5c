#include "proto/spec/families/describe.h"
#include "proto/spec/families/family.h"
#include "proto/spec/families/layers.h"

namespace muster::spec {
namespace {

v1::ModelSpec Preset(int32_t layers, int32_t hidden, int32_t heads) {
  v1::ModelSpec model;
  model.set_family(v1::MODEL_FAMILY_GPT2);
  model.set_layers(layers);
  model.set_hidden(hidden);
  model.set_heads(heads);
  model.set_vocab(50257);
  model.set_sequence_length(1024);
  return model;
}

void DescribeModel(const v1::ModelSpec& model, parallel::ModelDescription& description) {
  description.sizes["heads"] = model.heads();
}

void AddLayers(const v1::ModelSpec& model, LayerTotals& totals) {
  totals.tables = 1;
  const int64_t width = model.heads() > 0 ? model.hidden() / model.heads() : 0;
  AddAttention(model, model.heads(), width, model.layers(), totals);
  AddMlp(model, 4 * int64_t{model.hidden()}, /*matrices=*/2, model.layers(), totals);
}

}  // namespace

const SpecFamily& Gpt2() {
  static const auto* const kFamily = new SpecFamily{
      .id = v1::MODEL_FAMILY_GPT2,
      .fields = {"heads"},
      .set_defaults = [](v1::ModelSpec&) {},
      .check = [](const v1::ModelSpec& model, Checker& check) { CheckHeads(model, check); },
      .describe = DescribeModel,
      .add_layers = AddLayers,
      .presets = {{"gpt2-124m", Preset(12, 768, 12)},
                  {"gpt2-350m", Preset(24, 1024, 16)},
                  {"gpt2-774m", Preset(36, 1280, 20)},
                  {"gpt2-1558m", Preset(48, 1600, 25)}}};
  return *kFamily;
}

}  // namespace muster::spec
