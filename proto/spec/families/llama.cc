#include "proto/spec/families/describe.h"
#include "proto/spec/families/family.h"
#include "proto/spec/families/layers.h"

namespace muster::spec {
namespace {

void SetDefaults(v1::ModelSpec& model) {
  if (model.kv_heads() == 0) model.set_kv_heads(model.heads());
  if (!model.has_rope_theta()) model.set_rope_theta(kRopeTheta);
  DefaultTable(model, /*tied=*/false);
}

void Check(const v1::ModelSpec& model, Checker& check) {
  const bool divides = CheckHeads(model, check);
  CheckKeyHeads(model, divides, check);
  if (divides && model.hidden() / model.heads() % 2 != 0) {
    check.Add("engine.model.heads", model.heads(), " heads of hidden ", model.hidden(), " are ",
              model.hidden() / model.heads(), " wide each; rotary positions need an even width");
  }
  check.InRange("engine.model.ffn", model.ffn(), 1, kFfnMax);
  check.Positive("engine.model.norm_epsilon", model.norm_epsilon());
  CheckRope(model, check);
}

// `rope_factor`: that of the frequency scaling of Llama 3.1 and 3.2, 1 = none.
v1::ModelSpec Preset(int32_t layers, int32_t hidden, int32_t heads, int32_t ffn, bool tied,
                     double rope_factor) {
  v1::ModelSpec model;
  model.set_family(v1::MODEL_FAMILY_LLAMA);
  model.set_layers(layers);
  model.set_hidden(hidden);
  model.set_heads(heads);
  model.set_vocab(128256);
  model.set_sequence_length(8192);
  model.set_kv_heads(8);
  model.set_ffn(ffn);
  model.set_tied(tied);
  model.set_norm_epsilon(1e-5);
  model.set_rope_theta(500000);
  if (rope_factor != 1) {
    v1::RopeScalingSpec& scaling = *model.mutable_rope_scaling();
    scaling.set_factor(rope_factor);
    scaling.set_low_frequency_factor(1);
    scaling.set_high_frequency_factor(4);
    scaling.set_original_context(8192);
  }
  return model;
}

void DescribeModel(const v1::ModelSpec& model, parallel::ModelDescription& description) {
  description.sizes["heads"] = model.heads();
  description.sizes["kv_heads"] = model.kv_heads();
  description.sizes["ffn"] = model.ffn();
  DescribeTable(model, description);
  description.numbers["rope_theta"] = model.rope_theta();
  DescribeRopeScaling(model, description);
}

void AddLayers(const v1::ModelSpec& model, LayerTotals& totals) {
  const int64_t width = model.heads() > 0 ? model.hidden() / model.heads() : 0;
  AddAttention(model, model.kv_heads(), width, model.layers(), totals);
  AddMlp(model, model.ffn(), /*matrices=*/3, model.layers(), totals);
}

}  // namespace

const SpecFamily& Llama() {
  static const auto* const kFamily = new SpecFamily{
      .id = v1::MODEL_FAMILY_LLAMA,
      .fields = {"heads", "kv_heads", "ffn", "tied", "norm_epsilon", "rope_theta", "rope_scaling"},
      .set_defaults = SetDefaults,
      .check = Check,
      .describe = DescribeModel,
      .add_layers = AddLayers,
      .presets = {{"llama-1b", Preset(16, 2048, 32, 8192, /*tied=*/true, 32)},
                  {"llama-3b", Preset(28, 3072, 24, 8192, /*tied=*/true, 32)},
                  {"llama-8b", Preset(32, 4096, 32, 14336, /*tied=*/false, 8)},
                  {"llama-70b", Preset(80, 8192, 64, 28672, /*tied=*/false, 1)}}};
  return *kFamily;
}

}  // namespace muster::spec
