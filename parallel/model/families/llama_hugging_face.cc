// LlamaForCausalLM.
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/model/families/hugging_face.h"
#include "parallel/model/families/llama.h"

namespace muster::parallel {
namespace {

HuggingFaceLayout Layout(const Model& model) {
  const ModelDescription& description = model.description();
  const auto size = [&](const char* name) { return Required(description.sizes, name); };
  const int64_t depth = size("hidden") / size("heads");
  const int64_t query_rows = size("heads") * depth, key_rows = size("kv_heads") * depth;
  const int64_t ffn = size("ffn");
  LayoutBuilder builder(model);
  builder.Same("embedding.token.weight", "model.embed_tokens.weight");
  for (int64_t i = 0; i < size("layers"); ++i) {
    const std::string ours = absl::StrCat("blocks.", i, ".");
    const std::string theirs = absl::StrCat("model.layers.", i, ".");
    const std::string attention = theirs + "self_attn.";
    builder.Same(ours + "norm1.weight", theirs + "input_layernorm.weight");
    // Rotary positions pair the same rows of a head there and here, so rows keep their order.
    AddQueriesKeysValues(builder, ours + "attention.qkv.weight", attention, query_rows, key_rows);
    builder.Same(ours + "attention.output.weight", attention + "o_proj.weight");
    builder.Same(ours + "norm2.weight", theirs + "post_attention_layernorm.weight");
    builder.Slices(ours + "mlp.up.weight", {{theirs + "mlp.gate_proj.weight", false, 0, ffn, 0},
                                            {theirs + "mlp.up_proj.weight", false, ffn, ffn, 0}});
    builder.Same(ours + "mlp.down.weight", theirs + "mlp.down_proj.weight");
  }
  builder.Same("norm.weight", "model.norm.weight");
  if (!Required(description.flags, "tied")) builder.Same("head.weight", "lm_head.weight");
  return builder.Finish();
}

// Reads the rotary keys of a config. transformers 5 writes "rope_parameters"; versions before it
// write "rope_theta" and "rope_scaling", and the oldest of these call "rope_type" "type".
absl::Status ReadRope(const Json& config, ModelDescription& description) {
  ConfigReader outer(config);
  const Json empty = Json::object();
  const char* key = outer.Given("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const Json& rope = outer.Given(key) ? config[key] : empty;
  if (!rope.is_object()) outer.Refuse(key, "an object is needed");
  RETURN_IF_ERROR(outer.status());
  ConfigReader inner(rope);
  description.numbers["rope_theta"] = inner.Number("rope_theta", outer.Number("rope_theta", 10000));
  const char* type_key = inner.Given("rope_type") ? "rope_type" : "type";
  const std::string type = inner.Text(type_key, "default");
  if (type == "llama3") {
    description.numbers["rope_factor"] = inner.Number("factor");
    description.numbers["rope_low_frequency_factor"] = inner.Number("low_freq_factor");
    description.numbers["rope_high_frequency_factor"] = inner.Number("high_freq_factor");
    description.sizes["rope_original_context"] = inner.Size("original_max_position_embeddings");
  } else if (type != "default") {
    inner.Refuse(type_key, "default and llama3 are there");
  }
  inner.Must("partial_rotary_factor", 1.0);
  RETURN_IF_ERROR(outer.status());
  return Annotate(inner.status(), key);
}

absl::StatusOr<ModelDescription> Description(const Json& config) {
  ConfigReader reader(config);
  ModelDescription description;
  description.family = "llama";
  const int64_t hidden = reader.Size("hidden_size");
  const int64_t heads = reader.Size("num_attention_heads");
  description.sizes = {{"layers", reader.Size("num_hidden_layers")},
                       {"hidden", hidden},
                       {"heads", heads},
                       {"kv_heads", reader.Size("num_key_value_heads", heads)},
                       {"ffn", reader.Size("intermediate_size")},
                       {"vocab", reader.Size("vocab_size")},
                       {"sequence_length", reader.Size("max_position_embeddings")}};
  description.numbers["norm_epsilon"] = reader.Number("rms_norm_eps", 1e-6);
  description.flags["tied"] = reader.Flag("tie_word_embeddings", false);
  reader.Must("hidden_act", "silu");
  reader.Must("attention_bias", false);
  reader.Must("mlp_bias", false);
  reader.Must("partial_rotary_factor", 1.0);
  if (hidden % heads != 0) {
    reader.Refuse("num_attention_heads",
                  absl::StrCat("a divisor of hidden_size (", hidden, ") is needed"));
  } else if (reader.Size("head_dim", hidden / heads) != hidden / heads) {
    reader.Refuse("head_dim", "only hidden_size / num_attention_heads is there");
  }
  RETURN_IF_ERROR(reader.status());
  RETURN_IF_ERROR(ReadRope(config, description));
  return description;
}

Json Config(const ModelDescription& description) {
  const auto size = [&](const char* name) { return Required(description.sizes, name); };
  const auto number = [&](const char* name) { return Required(description.numbers, name); };
  Json scaling = {{"rope_type", "default"}};
  if (description.numbers.count("rope_factor") > 0) {
    scaling = {{"rope_type", "llama3"},
               {"factor", number("rope_factor")},
               {"low_freq_factor", number("rope_low_frequency_factor")},
               {"high_freq_factor", number("rope_high_frequency_factor")},
               {"original_max_position_embeddings", size("rope_original_context")}};
  }
  Json parameters = scaling;
  parameters["rope_theta"] = number("rope_theta");
  return {{"model_type", "llama"},
          {"architectures", {"LlamaForCausalLM"}},
          {"num_hidden_layers", size("layers")},
          {"hidden_size", size("hidden")},
          {"num_attention_heads", size("heads")},
          {"num_key_value_heads", size("kv_heads")},
          {"head_dim", size("hidden") / size("heads")},
          {"intermediate_size", size("ffn")},
          {"vocab_size", size("vocab")},
          {"max_position_embeddings", size("sequence_length")},
          {"hidden_act", "silu"},
          {"rms_norm_eps", number("norm_epsilon")},
          {"attention_bias", false},
          {"mlp_bias", false},
          {"tie_word_embeddings", Required(description.flags, "tied")},
          // transformers reads the last key from version 5 on, and the other two before it.
          {"rope_theta", number("rope_theta")},
          {"rope_scaling", scaling["rope_type"] == "default" ? Json(nullptr) : scaling},
          {"rope_parameters", parameters}};
}

bool IsDerived(const ModelDescription& description, absl::string_view name) {
  return absl::EndsWith(name, ".rotary_emb.inv_freq") || IsTiedHead(description, name);
}

}  // namespace

const HuggingFaceFamily kLlamaHuggingFace = {
    .model_type = "llama",
    .layout = Layout,
    .description = Description,
    .config = Config,
    .is_derived = IsDerived,
    .prefix = "",
};

}  // namespace muster::parallel
