#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "parallel/plan/pattern.h"
#include "proto/spec/families/describe.h"
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
  if (model.head_width() == 0) {
    // Without a hidden size its default is not what is wrong.
    if (heads && model.hidden() > 0) {
      check.Add("engine.model.head_width", "required, as heads (", model.heads(),
                ") does not divide hidden (", model.hidden(), "); ",
                DivisorsAround(model.heads(), model.hidden()), " would");
    }
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
  if (static_cast<int64_t>(blocks->size()) > kLayersMax) {
    check.Add("engine.model.pattern", "has ", blocks->size(), " blocks; at most ", kLayersMax);
  } else if (model.layers() != static_cast<int64_t>(blocks->size())) {
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

// As Nemotron-H (arXiv 2504.03624): squared ReLU, no positions, eight groups.
v1::ModelSpec Preset(const std::string& pattern, int32_t hidden, int32_t heads, int32_t kv_heads,
                     int32_t ffn, int32_t vocab, int32_t sequence) {
  v1::ModelSpec model;
  model.set_family(v1::MODEL_FAMILY_HYBRID);
  model.set_pattern(pattern);
  model.set_hidden(hidden);
  model.set_heads(heads);
  model.set_kv_heads(kv_heads);
  model.set_ffn(ffn);
  model.set_vocab(vocab);
  model.set_sequence_length(sequence);
  model.set_norm_epsilon(1e-5);
  PresetMamba(/*groups=*/8, model);
  return model;
}

// A pattern takes along only what its layers need.
void FitPreset(const v1::ModelSpec& given, v1::ModelSpec& preset) {
  const auto lacks = [&](char letter) {
    return !given.pattern().empty() && !absl::StrContains(given.pattern(), letter);
  };
  if (lacks(parallel::kMambaLetter)) preset.clear_mamba();
  if (lacks(parallel::kMlpLetter)) preset.clear_ffn();
  if (lacks(parallel::kAttentionLetter)) {
    preset.clear_heads();
    preset.clear_kv_heads();
  }
}

constexpr char kMambaPrefix[] = "mamba_";

void DescribeModel(const v1::ModelSpec& model, parallel::ModelDescription& description) {
  const auto has = [&](char letter) { return absl::StrContains(model.pattern(), letter); };
  description.texts["pattern"] = model.pattern();
  DescribeTable(model, description);
  if (has(parallel::kAttentionLetter)) {
    description.sizes["heads"] = model.heads();
    description.sizes["kv_heads"] = model.kv_heads();
    description.sizes["head_width"] = model.head_width();
    description.flags["rotary"] = model.positions() == v1::POSITIONS_ROTARY;
    if (description.flags["rotary"]) {
      description.numbers["rope_theta"] = model.rope_theta();
      if (model.rope_scaling().factor() != 1) DescribeRopeScaling(model, description);
    }
  }
  if (has(parallel::kMlpLetter)) {
    description.sizes["ffn"] = model.ffn();
    description.texts["mlp"] = model.mlp() == v1::MLP_KIND_SWIGLU ? "swiglu" : "relu2";
  }
  if (has(parallel::kMambaLetter)) DescribeMamba(model, kMambaPrefix, description);
}

void AddLayers(const v1::ModelSpec& model, LayerTotals& totals) {
  const auto count = [&](char letter) {
    return std::count(model.pattern().begin(), model.pattern().end(), letter);
  };
  AddAttention(model, model.kv_heads(), model.head_width(), count(parallel::kAttentionLetter),
               totals);
  AddMlp(model, model.ffn(), model.mlp() == v1::MLP_KIND_SWIGLU ? 3 : 2,
         count(parallel::kMlpLetter), totals);
  AddMamba(model, count(parallel::kMambaLetter), totals);
}

}  // namespace

const SpecFamily& Hybrid() {
  static const auto* const kFamily = new SpecFamily{
      .id = v1::MODEL_FAMILY_HYBRID,
      .fields = {"heads", "kv_heads", "ffn", "tied", "norm_epsilon", "rope_theta", "rope_scaling",
                 "mamba", "pattern", "head_width", "mlp", "positions"},
      .counts_layers = true,
      .set_defaults = SetDefaults,
      .check = Check,
      .describe = DescribeModel,
      .add_layers = AddLayers,
      .mamba_prefix = kMambaPrefix,
      .fit_preset = FitPreset,
      .presets = {
          {"hybrid-1b", Preset("M-M-M-M*-M-M-M-M*-M-M-M-M-M-", 2048, 32, 8, 8192, 50257, 4096)},
          {"hybrid-8b", Preset("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 4096, 32, 8,
                               21504, 131072, 8192)}}};
  return *kFamily;
}

}  // namespace muster::spec
