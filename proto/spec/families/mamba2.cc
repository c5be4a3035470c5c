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

}  // namespace

const SpecFamily& Mamba2() {
  static const auto* const kFamily = new SpecFamily{.id = v1::MODEL_FAMILY_MAMBA2,
                                                    .fields = {"tied", "norm_epsilon", "mamba"},
                                                    .set_defaults = SetDefaults,
                                                    .check = Check};
  return *kFamily;
}

}  // namespace muster::spec
