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

}  // namespace

const SpecFamily& Llama() {
  static const auto* const kFamily = new SpecFamily{
      .id = v1::MODEL_FAMILY_LLAMA,
      .fields = {"heads", "kv_heads", "ffn", "tied", "norm_epsilon", "rope_theta", "rope_scaling"},
      .set_defaults = SetDefaults,
      .check = Check};
  return *kFamily;
}

}  // namespace muster::spec
