#include "parallel/interop/hugging_face_names.h"

#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/checkpoint/json.h"

namespace muster::parallel {
namespace {

using kernels::DType;

constexpr char kGpt2Prefix[] = "transformer.";

// Requires: a name that MakeModel requires of every description of the family.
template <typename Value>
const Value& Required(const std::map<std::string, Value>& values, const std::string& name) {
  const auto found = values.find(name);
  CHECK(found != values.end()) << name;
  return found->second;
}

// Builds a layout parameter by parameter. Shapes come from the model's registry, so that a layout
// can only name what the model has.
class LayoutBuilder {
 public:
  explicit LayoutBuilder(const Model& model) : model_(model) {
    for (ParameterId id = 0; id < model.parameters().size(); ++id) {
      ids_[model.parameters().at(id).name] = id;
    }
  }

  // Adds a parameter that is one of their tensors.
  void Same(const std::string& name, const std::string& tensor, bool transposed = false) {
    Slices(name, {{tensor, transposed, 0, Shape(name)[0], 0}});
  }

  // Adds a parameter whose slices may be of several tensors.
  void Slices(const std::string& name, std::vector<HuggingFaceSlice> slices) {
    const std::vector<int64_t>& shape = Shape(name);
    for (const HuggingFaceSlice& slice : slices) {
      auto [found, added] = rows_.emplace(slice.tensor, layout_.tensors.size());
      if (added) layout_.tensors.push_back({slice.tensor, shape});
      if (added) layout_.tensors.back().shape[0] = 0;
      std::vector<int64_t>& stored = layout_.tensors[found->second].shape;
      // Kept as [rows, columns] until the end; see Finish().
      stored[0] = std::max(stored[0], slice.source_row + slice.rows);
      if (slice.transposed) transposed_.emplace(slice.tensor, true);
    }
    layout_.parameters.push_back({name, shape, std::move(slices)});
  }

  const std::vector<int64_t>& Shape(const std::string& name) const {
    return model_.parameters().at(Required(ids_, name)).global_shape;
  }

  HuggingFaceLayout Finish() {
    for (HuggingFaceTensor& tensor : layout_.tensors) {
      if (transposed_.count(tensor.name) > 0) std::swap(tensor.shape[0], tensor.shape[1]);
    }
    return std::move(layout_);
  }

 private:
  const Model& model_;
  std::map<std::string, ParameterId> ids_;
  std::map<std::string, size_t> rows_;  // index into layout_.tensors
  std::map<std::string, bool> transposed_;
  HuggingFaceLayout layout_;
};

HuggingFaceLayout Gpt2Layout(const Model& model, int64_t layers) {
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

HuggingFaceLayout LlamaLayout(const Model& model) {
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
    builder.Slices(ours + "attention.qkv.weight",
                   {{attention + "q_proj.weight", false, 0, query_rows, 0},
                    {attention + "k_proj.weight", false, query_rows, key_rows, 0},
                    {attention + "v_proj.weight", false, query_rows + key_rows, key_rows, 0}});
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

// Reads keys of config.json and remembers the first problem.
class ConfigReader {
 public:
  explicit ConfigReader(const Json& config) : config_(config) {}

  int64_t Size(const char* key) {
    const auto found = config_.find(key);
    if (found == config_.end() || !found->is_number_integer() || found->get<int64_t>() <= 0) {
      Refuse(key, "a positive number is needed");
      return 1;
    }
    return found->get<int64_t>();
  }
  int64_t Size(const char* key, int64_t otherwise) { return Given(key) ? Size(key) : otherwise; }

  double Number(const char* key) {
    const auto found = config_.find(key);
    if (found == config_.end() || !found->is_number() || !(found->get<double>() > 0)) {
      Refuse(key, "a positive number is needed");
      return 1;
    }
    return found->get<double>();
  }
  double Number(const char* key, double otherwise) { return Given(key) ? Number(key) : otherwise; }
  bool Flag(const char* key, bool otherwise) {
    if (!Given(key)) return otherwise;
    if (!config_[key].is_boolean()) Refuse(key, "true or false is needed");
    return config_[key] == true;
  }
  std::string Text(const char* key, const std::string& otherwise) {
    if (!Given(key)) return otherwise;
    if (!config_[key].is_string()) {
      Refuse(key, "a text is needed");
      return otherwise;
    }
    return config_[key].get<std::string>();
  }

  // The key may be absent, which stands for `wanted`.
  void Must(const char* key, const Json& wanted) {
    if (Given(key) && config_[key] != wanted) {
      Refuse(key, absl::StrCat("only ", wanted.dump(), " is there"));
    }
  }

  bool Given(const char* key) const {
    const auto found = config_.find(key);
    return found != config_.end() && !found->is_null();
  }
  const Json& config() const { return config_; }

  void Refuse(const char* key, const std::string& why) {
    if (!status_.ok()) return;
    const std::string value = Given(key) ? config_[key].dump() : "absent";
    status_ = absl::InvalidArgumentError(
        absl::StrCat("'", key, "' is ", value.substr(0, 100), "; ", why));
  }
  const absl::Status& status() const { return status_; }

 private:
  const Json& config_;
  absl::Status status_;
};

absl::StatusOr<ModelDescription> Gpt2Description(const Json& config) {
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

Json Gpt2ConfigJson(const ModelDescription& description) {
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

absl::StatusOr<ModelDescription> LlamaDescription(const Json& config) {
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

Json LlamaConfigJson(const ModelDescription& description) {
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

const char* TorchName(DType dtype) {
  return dtype == DType::kF32 ? "float32" : dtype == DType::kBF16 ? "bfloat16" : "float16";
}

absl::Status Unknown(const std::string& family) {
  return absl::UnimplementedError(
      absl::StrCat("models of family '", family, "' have no counterpart at Hugging Face here"));
}

}  // namespace

absl::StatusOr<HuggingFaceLayout> LayoutForHuggingFace(const Model& model) {
  const ModelDescription& description = model.description();
  if (description.family == "gpt2") return Gpt2Layout(model, Required(description.sizes, "layers"));
  if (description.family == "llama") return LlamaLayout(model);
  return Unknown(description.family);
}

bool IsDerivedTensor(const ModelDescription& description, absl::string_view name) {
  if (description.family == "gpt2") {
    return name == "lm_head.weight" || absl::EndsWith(name, ".attn.bias") ||
           absl::EndsWith(name, ".attn.masked_bias");
  }
  // A tied head may be stored a second time, equal to the token table.
  const auto tied = description.flags.find("tied");
  return absl::EndsWith(name, ".rotary_emb.inv_freq") ||
         (name == "lm_head.weight" && tied != description.flags.end() && tied->second);
}

std::string CanonicalTensorName(const ModelDescription& description, absl::string_view name) {
  const bool bare = description.family == "gpt2" && !absl::StartsWith(name, kGpt2Prefix) &&
                    !absl::StartsWith(name, "lm_head.");
  return absl::StrCat(bare ? kGpt2Prefix : "", name);
}

absl::StatusOr<ModelDescription> DescriptionFromConfig(absl::string_view config_json) {
  ASSIGN_OR_RETURN(const Json config, ParseObject(config_json));
  ConfigReader reader(config);
  const std::string type = reader.Text("model_type", "");
  RETURN_IF_ERROR(reader.status());
  if (type == "gpt2") return Gpt2Description(config);
  if (type == "llama") return LlamaDescription(config);
  return absl::InvalidArgumentError(
      absl::StrCat("'model_type' is \"", type.substr(0, 100), "\"; gpt2 and llama are there"));
}

absl::StatusOr<std::string> ConfigForHuggingFace(const ModelDescription& description, DType dtype) {
  Json config;
  if (description.family == "gpt2") {
    config = Gpt2ConfigJson(description);
  } else if (description.family == "llama") {
    config = LlamaConfigJson(description);
  } else {
    return Unknown(description.family);
  }
  config["torch_dtype"] = TorchName(dtype);  // before transformers 5
  config["dtype"] = TorchName(dtype);
  return config.dump(2) + "\n";
}

}  // namespace muster::parallel
