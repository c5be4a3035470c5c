#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "parallel/plan/pattern.h"
#include "proto/spec/families/family.h"
#include "proto/spec/families/layers.h"
#include "proto/spec/names.h"

namespace muster::spec {
namespace {

void SetDefaults(v1::ModelSpec& model) {
  const auto has = [&](char letter) { return absl::StrContains(model.pattern(), letter); };
  if (const auto blocks = parallel::BlocksOfPattern(model.pattern());
      blocks.ok() && model.layers() == 0) {
    model.set_layers(static_cast<int32_t>(blocks->size()));
  }
  if (has(parallel::kMambaLetter)) DefaultMamba(model);
  if (has(parallel::kAttentionLetter)) {
    if (model.kv_heads() == 0) model.set_kv_heads(model.heads());
    if (model.head_width() == 0 && model.heads() > 0 && model.hidden() % model.heads() == 0) {
      model.set_head_width(model.hidden() / model.heads());
    }
    if (model.positions() == v1::POSITIONS_UNSPECIFIED) model.set_positions(v1::POSITIONS_NONE);
    if (model.positions() == v1::POSITIONS_ROTARY && !model.has_rope_theta()) {
      model.set_rope_theta(kRopeTheta);
    }
  }
  if (has(parallel::kMlpLetter) && model.mlp() == v1::MLP_KIND_UNSPECIFIED) {
    model.set_mlp(v1::MLP_KIND_RELU2);
  }
  DefaultTable(model, /*tied=*/false);
}

constexpr int32_t kHeadWidthMax = 1 << 16;

void CheckAttention(const v1::ModelSpec& model, Checker& check) {
  const bool heads = check.InRange("engine.model.heads", model.heads(), 1);
  CheckKeyHeads(model, heads, check);
  if (model.head_width() == 0 && heads && model.hidden() > 0) {
    check.Add("engine.model.head_width", "required, as heads (", model.heads(),
              ") does not divide hidden (", model.hidden(), "); ",
              DivisorsAround(model.heads(), model.hidden()), " would");
  } else if (heads) {
    check.InRange("engine.model.head_width", model.head_width(), 1, kHeadWidthMax);
  }
  if (model.positions() != v1::POSITIONS_ROTARY) {
    for (const auto& [field, given] : {std::pair("rope_theta", model.has_rope_theta()),
                                       std::pair("rope_scaling", model.has_rope_scaling())}) {
      if (given) check.Add(absl::StrCat("engine.model.", field), "needs positions: rotary");
    }
    return;
  }
  if (model.head_width() % 2 != 0) {
    check.Add("engine.model.head_width", model.head_width(),
              " is odd; rotary positions need an even width");
  }
  CheckRope(model, check);
}

// Fields of layers that the pattern lacks, and what those that it has need.
void Check(const v1::ModelSpec& model, Checker& check) {
  check.Positive("engine.model.norm_epsilon", model.norm_epsilon());
  const auto blocks = parallel::BlocksOfPattern(model.pattern());
  if (!blocks.ok()) {
    check.Add("engine.model.pattern", blocks.status().message());
    return;
  }
  if (model.layers() != static_cast<int64_t>(blocks->size())) {
    check.Add("engine.model.layers", model.layers(), ", but the pattern has ", blocks->size(),
              " blocks; leave it out");
  }
  const auto has = [&](char letter) { return absl::StrContains(model.pattern(), letter); };
  const bool attention = has(parallel::kAttentionLetter), mlp = has(parallel::kMlpLetter);
  const bool mamba = has(parallel::kMambaLetter);
  const auto needs = [&](const char* field, bool given, bool there, const char* what) {
    if (!given || there) return;
    check.Add(absl::StrCat("engine.model.", field), "is for ", what, ", which the pattern ",
              Quoted(model.pattern()), " lacks");
  };
  const char* const layers = "attention layers (*)";
  needs("heads", model.heads() != 0, attention, layers);
  needs("kv_heads", model.kv_heads() != 0, attention, layers);
  needs("head_width", model.head_width() != 0, attention, layers);
  needs("positions", model.positions() != v1::POSITIONS_UNSPECIFIED, attention, layers);
  needs("rope_theta", model.has_rope_theta(), attention, layers);
  needs("rope_scaling", model.has_rope_scaling(), attention, layers);
  needs("ffn", model.ffn() != 0, mlp, "MLP layers (-)");
  needs("mlp", model.mlp() != v1::MLP_KIND_UNSPECIFIED, mlp, "MLP layers (-)");
  needs("mamba", model.has_mamba(), mamba, "Mamba-2 layers (M)");
  if (mamba) CheckMamba(model, check);
  if (mlp) check.InRange("engine.model.ffn", model.ffn(), 1, kFfnMax);
  if (attention) CheckAttention(model, check);
}

}  // namespace

const SpecFamily& Hybrid() {
  static const auto* const kFamily = new SpecFamily{
      .id = v1::MODEL_FAMILY_HYBRID,
      .fields = {"heads", "kv_heads", "ffn", "tied", "norm_epsilon", "rope_theta", "rope_scaling",
                 "mamba", "pattern", "head_width", "mlp", "positions"},
      .counts_layers = true,
      .set_defaults = SetDefaults,
      .check = Check};
  return *kFamily;
}

}  // namespace muster::spec
