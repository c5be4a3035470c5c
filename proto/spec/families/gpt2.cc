#include "proto/spec/families/family.h"
#include "proto/spec/families/layers.h"

namespace muster::spec {

const SpecFamily& Gpt2() {
  static const auto* const kFamily = new SpecFamily{
      .id = v1::MODEL_FAMILY_GPT2,
      .fields = {"heads"},
      .set_defaults = [](v1::ModelSpec&) {},
      .check = [](const v1::ModelSpec& model, Checker& check) { CheckHeads(model, check); }};
  return *kFamily;
}

}  // namespace muster::spec
