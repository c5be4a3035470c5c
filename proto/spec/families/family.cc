#include "proto/spec/families/family.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/spec/names.h"
#include "proto/spec/presets.h"

namespace muster::spec {

const SpecFamily* FindSpecFamily(v1::ModelFamily id) {
  for (const SpecFamily* family : SpecFamilies()) {
    if (family->id == id) return family;
  }
  return nullptr;
}

parallel::ModelDescription Describe(const v1::ModelSpec& model) {
  parallel::ModelDescription description;
  description.family = EnumName(model.family());
  description.sizes = {{"layers", model.layers()},
                       {"hidden", model.hidden()},
                       {"vocab", model.vocab()},
                       {"sequence_length", model.sequence_length()}};
  const SpecFamily* const family = FindSpecFamily(model.family());
  if (family != nullptr) family->describe(model, description);
  return description;
}

std::string FieldOf(const std::string& family, const std::string& name) {
  for (const SpecFamily* each : SpecFamilies()) {
    if (EnumName(each->id) != family || each->mamba_prefix == nullptr) continue;
    absl::string_view field = name;
    if (absl::ConsumePrefix(&field, each->mamba_prefix) &&
        v1::MambaSpec::descriptor()->FindFieldByName(std::string(field)) != nullptr) {
      return absl::StrCat("mamba.", field);
    }
  }
  return name;
}

LayerTotals TotalsOf(const v1::ModelSpec& model) {
  LayerTotals totals;
  totals.tables = model.tied() ? 1 : 2;  // a family without the field says it itself
  const SpecFamily* const family = FindSpecFamily(model.family());
  if (family != nullptr) family->add_layers(model, totals);
  return totals;
}

const v1::ModelSpec* FindPreset(const std::string& name) {
  for (const SpecFamily* family : SpecFamilies()) {
    for (const auto& [known, model] : family->presets) {
      if (known == name) return &model;
    }
  }
  return nullptr;
}

std::vector<std::string> PresetNames() {
  std::vector<std::string> names;
  for (const SpecFamily* family : SpecFamilies()) {
    for (const auto& [name, model] : family->presets) names.push_back(name);
  }
  return names;
}

}  // namespace muster::spec
