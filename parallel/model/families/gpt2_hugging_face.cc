// GPT2LMHeadModel.
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/model/families/gpt2.h"
#include "parallel/model/families/hugging_face.h"

namespace muster::parallel {
namespace {

HuggingFaceLayout Layout(const Model& model) {
  const int64_t layers = Required(model.description().sizes, "layers");
  LayoutBuilder builder(model);
  builder.Same("embedding.token.weight", "transformer.wte.weight");
  builder.Same("embedding.position.weight", "transformer.wpe.weight");
  for (int64_t i = 0; i < layers; ++i) {
    const std::string ours = absl::StrCat("blocks.", i, ".");
    const std::string theirs = absl::StrCat("transformer.h.", i, ".");
    const auto linear = [&](const std::string& name, const std::string& tensor) {
      builder.Same(ours + name + ".weight", theirs + tensor + ".weight", /*transposed=*/true);
      builder.Same(ours + name + ".bias", theirs + tensor + ".bias");
    };
    const auto norm = [&](const std::string& name, const std::string& tensor) {
      builder.Same(ours + name + ".weight", theirs + tensor + ".weight");
      builder.Same(ours + name + ".bias", theirs + tensor + ".bias");
    };
    norm("norm1", "ln_1");
    linear("attention.qkv", "attn.c_attn");
    linear("attention.output", "attn.c_proj");
    norm("norm2", "ln_2");
    linear("mlp.up", "mlp.c_fc");
    linear("mlp.down", "mlp.c_proj");
  }
  builder.Same("norm.weight", "transformer.ln_f.weight");
  builder.Same("norm.bias", "transformer.ln_f.bias");
  return builder.Finish();
}

absl::StatusOr<ModelDescription> Description(const Json& config) {
  ConfigReader reader(config);
  ModelDescription description;
  description.family = "gpt2";
  const int64_t hidden = reader.Size("n_embd");
  description.sizes = {{"layers", reader.Size("n_layer")},
                       {"hidden", hidden},
                       {"heads", reader.Size("n_head")},
                       {"vocab", reader.Size("vocab_size")},
                       {"sequence_length", reader.Size("n_positions")}};
  // Both names mean the tanh form.
  if (!reader.Given("activation_function") ||
      config["activation_function"] != "gelu_pytorch_tanh") {
    reader.Must("activation_function", "gelu_new");
  }
  if (reader.Given("n_inner") &&
      (reader.Size("n_inner") % 4 != 0 || reader.Size("n_inner") / 4 != hidden)) {
    reader.Refuse("n_inner", "only 4 x n_embd is there");
  }
  reader.Must("layer_norm_epsilon", 1e-5);
  reader.Must("tie_word_embeddings", true);
  reader.Must("scale_attn_weights", true);
  reader.Must("scale_attn_by_inverse_layer_idx", false);
  reader.Must("add_cross_attention", false);
  RETURN_IF_ERROR(reader.status());
  return description;
}

Json Config(const ModelDescription& description) {
  const auto size = [&](const char* name) { return Required(description.sizes, name); };
  return {{"model_type", "gpt2"},
          {"architectures", {"GPT2LMHeadModel"}},
          {"n_layer", size("layers")},
          {"n_embd", size("hidden")},
          {"n_head", size("heads")},
          {"n_inner", nullptr},
          {"vocab_size", size("vocab")},
          {"n_positions", size("sequence_length")},
          {"n_ctx", size("sequence_length")},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", 1e-5},
          {"tie_word_embeddings", true},
          {"scale_attn_weights", true},
          // Exported models drop nothing.
          {"attn_pdrop", 0.0},
          {"embd_pdrop", 0.0},
          {"resid_pdrop", 0.0}};
}

bool IsDerived(const ModelDescription& /*description*/, absl::string_view name) {
  return name == "lm_head.weight" || absl::EndsWith(name, ".attn.bias") ||
         absl::EndsWith(name, ".attn.masked_bias");
}

}  // namespace

const HuggingFaceFamily kGpt2HuggingFace = {
    .model_type = "gpt2",
    .layout = Layout,
    .description = Description,
    .config = Config,
    .is_derived = IsDerived,
    .prefix = "transformer.",
};

}  // namespace muster::parallel
