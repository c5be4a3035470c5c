#include "proto/spec/presets.h"

#include <utility>

namespace muster::spec {
namespace {

v1::ModelSpec Gpt2(int32_t layers, int32_t hidden, int32_t heads) {
  v1::ModelSpec model;
  model.set_family(v1::MODEL_FAMILY_GPT2);
  model.set_layers(layers);
  model.set_hidden(hidden);
  model.set_heads(heads);
  model.set_vocab(50257);
  model.set_sequence_length(1024);
  return model;
}

// `rope_factor`: that of the frequency scaling of Llama 3.1 and 3.2, 1 = none.
v1::ModelSpec Llama3(int32_t layers, int32_t hidden, int32_t heads, int32_t ffn, bool tied,
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

// The inner width is twice the hidden one.
v1::ModelSpec Mamba2(int32_t layers, int32_t hidden) {
  v1::ModelSpec model;
  model.set_family(v1::MODEL_FAMILY_MAMBA2);
  model.set_layers(layers);
  model.set_hidden(hidden);
  model.set_vocab(50288);
  model.set_sequence_length(2048);
  model.set_tied(true);
  model.set_norm_epsilon(1e-5);
  v1::MambaSpec& mamba = *model.mutable_mamba();
  mamba.set_head_width(64);
  mamba.set_heads(2 * hidden / 64);
  mamba.set_groups(1);
  mamba.set_state(128);
  mamba.set_taps(4);
  return model;
}

// As Nemotron-H (arXiv 2504.03624): squared ReLU, no positions, eight groups.
v1::ModelSpec Hybrid(const std::string& pattern, int32_t hidden, int32_t heads, int32_t kv_heads,
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
  v1::MambaSpec& mamba = *model.mutable_mamba();
  mamba.set_head_width(64);
  mamba.set_heads(2 * hidden / 64);
  mamba.set_groups(8);
  mamba.set_state(128);
  mamba.set_taps(4);
  return model;
}

const std::vector<std::pair<std::string, v1::ModelSpec>>& Presets() {
  static const auto& presets = *new std::vector<std::pair<std::string, v1::ModelSpec>>{
      {"gpt2-124m", Gpt2(12, 768, 12)},
      {"gpt2-350m", Gpt2(24, 1024, 16)},
      {"gpt2-774m", Gpt2(36, 1280, 20)},
      {"gpt2-1558m", Gpt2(48, 1600, 25)},
      {"llama-1b", Llama3(16, 2048, 32, 8192, /*tied=*/true, 32)},
      {"llama-3b", Llama3(28, 3072, 24, 8192, /*tied=*/true, 32)},
      {"llama-8b", Llama3(32, 4096, 32, 14336, /*tied=*/false, 8)},
      {"llama-70b", Llama3(80, 8192, 64, 28672, /*tied=*/false, 1)},
      {"mamba2-130m", Mamba2(24, 768)},
      {"mamba2-370m", Mamba2(48, 1024)},
      {"mamba2-780m", Mamba2(48, 1536)},
      {"mamba2-1.3b", Mamba2(48, 2048)},
      {"mamba2-2.7b", Mamba2(64, 2560)},
      {"hybrid-1b", Hybrid("M-M-M-M*-M-M-M-M*-M-M-M-M-M-", 2048, 32, 8, 8192, 50257, 4096)},
      {"hybrid-8b", Hybrid("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 4096, 32, 8,
                           21504, 131072, 8192)},
  };
  return presets;
}

}  // namespace

const v1::ModelSpec* FindPreset(const std::string& name) {
  for (const auto& [known, model] : Presets()) {
    if (known == name) return &model;
  }
  return nullptr;
}

std::vector<std::string> PresetNames() {
  std::vector<std::string> names;
  for (const auto& [name, model] : Presets()) names.push_back(name);
  return names;
}

}  // namespace muster::spec
