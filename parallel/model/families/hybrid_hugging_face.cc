// NemotronHForCausalLM, without mixtures of experts: hybrid stacks with squared ReLU and no
// positions.
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/model/families/hugging_face.h"
#include "parallel/model/families/hybrid.h"
#include "parallel/plan/pattern.h"

namespace muster::parallel {
namespace {

const std::string& PatternOf(const ModelDescription& description) {
  return Required(description.texts, "pattern");
}
bool Has(const ModelDescription& description, char letter) {
  return PatternOf(description).find(letter) != std::string::npos;
}

HuggingFaceLayout Layout(const Model& model) {
  const ModelDescription& description = model.description();
  const auto blocks = BlocksOfPattern(PatternOf(description));
  CHECK_OK(blocks);
  LayoutBuilder builder(model);
  const std::string table = "embedding.token.weight";
  const int64_t rows = builder.Shape(table)[0];
  // The head there is a tensor of its own, whatever tie_word_embeddings says. It gets a copy.
  const bool tied = Required(description.flags, "tied");
  std::vector<HuggingFaceSlice> slices = {{"backbone.embeddings.weight", false, 0, rows, 0}};
  if (tied) slices.push_back({"lm_head.weight", false, 0, rows, 0});
  builder.Slices(table, slices);
  int64_t layer = 0;  // theirs are one of ours within a block
  for (size_t i = 0; i < blocks->size(); ++i) {
    const std::string& letters = (*blocks)[i];
    const std::string block = absl::StrCat("blocks.", i, ".");
    for (size_t of_block = 0; of_block < letters.size(); ++of_block, ++layer) {
      const std::string theirs = absl::StrCat("backbone.layers.", layer, ".");
      const std::string mixer = theirs + "mixer.";
      const std::string number = letters.size() > 1 ? absl::StrCat(of_block + 1) : "";
      builder.Same(absl::StrCat(block, "norm", number, ".weight"), theirs + "norm.weight");
      switch (letters[of_block]) {
        case kMambaLetter:
          AddMamba2(builder, block + "mamba.", mixer);
          break;
        case kAttentionLetter: {
          const auto size = [&](const char* name) { return Required(description.sizes, name); };
          const int64_t width = size("head_width");
          AddQueriesKeysValues(builder, block + "attention.qkv.weight", mixer,
                               size("heads") * width, size("kv_heads") * width);
          builder.Same(block + "attention.output.weight", mixer + "o_proj.weight");
          break;
        }
        default:
          builder.Same(block + "mlp.up.weight", mixer + "up_proj.weight");
          builder.Same(block + "mlp.down.weight", mixer + "down_proj.weight");
      }
    }
  }
  builder.Same("norm.weight", "backbone.norm_f.weight");
  if (!tied) builder.Same("head.weight", "lm_head.weight");
  return builder.Finish();
}

// The pattern is a text in older files, and a list of names in newer ones.
std::string ReadPattern(ConfigReader& reader) {
  const char* const kText = "hybrid_override_pattern";
  if (reader.Given(kText)) return reader.Text(kText, "");
  const char* const key = reader.Given("layers_block_type") ? "layers_block_type" : "layer_types";
  std::string pattern;
  if (!reader.Given(key) || !reader.config()[key].is_array()) {
    reader.Refuse(key, absl::StrCat("a list of layers, or ", kText, ", is needed"));
    return pattern;
  }
  for (const Json& layer : reader.config()[key]) {
    if (layer == "linear_attention" || layer == "mamba") {
      pattern += kMambaLetter;
    } else if (layer == "full_attention" || layer == "attention") {
      pattern += kAttentionLetter;
    } else if (layer == "mlp") {
      pattern += kMlpLetter;
    } else {
      reader.Refuse(key, absl::StrCat("layers of type ", layer.dump().substr(0, 100),
                                      " are not there; linear_attention, full_attention and mlp "
                                      "are"));
      return pattern;
    }
  }
  return pattern;
}

absl::StatusOr<ModelDescription> Description(const Json& config) {
  ConfigReader reader(config);
  ModelDescription description;
  description.family = "hybrid";
  const std::string pattern = ReadPattern(reader);
  RETURN_IF_ERROR(reader.status());
  const auto blocks = BlocksOfPattern(pattern);
  if (!blocks.ok()) return Annotate(blocks.status(), "the pattern of layers");
  description.texts["pattern"] = pattern;
  // The defaults of transformers' NemotronHConfig.
  description.sizes = {{"layers", static_cast<int64_t>(blocks->size())},
                       {"hidden", reader.Size("hidden_size", 4096)},
                       {"vocab", reader.Size("vocab_size", 131072)},
                       {"sequence_length", reader.Size("max_position_embeddings", 4096)}};
  description.numbers["norm_epsilon"] = reader.Number("layer_norm_epsilon", 1e-5);
  description.flags["tied"] = false;  // transformers ties nothing, whatever the file says
  if (Has(description, kAttentionLetter)) {
    const int64_t heads = reader.Size("num_attention_heads", 32);
    const char* const width = reader.Given("head_dim") ? "head_dim" : "attention_head_dim";
    description.sizes["heads"] = heads;
    description.sizes["kv_heads"] = reader.Size("num_key_value_heads", 8);
    description.sizes["head_width"] = reader.Size(width, 128);
    description.flags["rotary"] = false;
  }
  if (Has(description, kMlpLetter)) {
    description.sizes["ffn"] = reader.Size("intermediate_size", 21504);
    description.texts["mlp"] = "relu2";
  }
  if (Has(description, kMambaLetter)) {
    description.sizes["mamba_heads"] = reader.Size("mamba_num_heads", 128);
    description.sizes["mamba_head_width"] = reader.Size("mamba_head_dim", 64);
    description.sizes["mamba_groups"] = reader.Size("n_groups", 8);
    description.sizes["mamba_state"] = reader.Size("ssm_state_size", 128);
    description.sizes["mamba_taps"] = reader.Size("conv_kernel", 4);
    // It limits the steps in every pass, not only when it draws initial values.
    const bool none = reader.Given("time_step_min") && config["time_step_min"] == 0.0;
    if (!none) description.numbers["mamba_step_min"] = reader.Number("time_step_min", 0.001);
  }
  reader.Must("mlp_hidden_act", "relu2");
  reader.Must("mamba_hidden_act", "silu");
  reader.Must("use_conv_bias", true);
  for (const char* bias : {"use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"}) {
    reader.Must(bias, false);
  }
  reader.Must("num_nextn_predict_layers", 0);
  if (reader.Given("sliding_window")) reader.Refuse("sliding_window", "only null is there");
  RETURN_IF_ERROR(reader.status());
  return description;
}

Json Config(const ModelDescription& description) {
  const auto size = [&](const char* name) { return Required(description.sizes, name); };
  Json types = Json::array();
  for (const char letter : PatternOf(description)) {
    types.push_back(letter == kMambaLetter       ? "linear_attention"
                    : letter == kAttentionLetter ? "full_attention"
                                                 : "mlp");
  }
  Json config = {{"model_type", "nemotron_h"},
                 {"architectures", {"NemotronHForCausalLM"}},
                 // transformers reads the list from version 5 on, and the text before it.
                 {"layers_block_type", types},
                 {"hybrid_override_pattern", PatternOf(description)},
                 {"num_hidden_layers", PatternOf(description).size()},
                 {"hidden_size", size("hidden")},
                 {"vocab_size", size("vocab")},
                 {"max_position_embeddings", size("sequence_length")},
                 {"layer_norm_epsilon", Required(description.numbers, "norm_epsilon")},
                 {"mlp_hidden_act", "relu2"},
                 {"mamba_hidden_act", "silu"},
                 {"use_conv_bias", true},
                 {"use_bias", false},
                 {"mlp_bias", false},
                 {"attention_bias", false},
                 {"mamba_proj_bias", false},
                 {"residual_in_fp32", false},
                 {"tie_word_embeddings", false}};
  if (Has(description, kAttentionLetter)) {
    config["num_attention_heads"] = size("heads");
    config["num_key_value_heads"] = size("kv_heads");
    config["head_dim"] = size("head_width");
    config["attention_head_dim"] = size("head_width");
  }
  if (Has(description, kMlpLetter)) config["intermediate_size"] = size("ffn");
  if (Has(description, kMambaLetter)) {
    const auto step_min = description.numbers.find("mamba_step_min");
    config["mamba_num_heads"] = size("mamba_heads");
    config["mamba_head_dim"] = size("mamba_head_width");
    config["n_groups"] = size("mamba_groups");
    config["ssm_state_size"] = size("mamba_state");
    config["conv_kernel"] = size("mamba_taps");
    config["time_step_min"] = step_min == description.numbers.end() ? 0.0 : step_min->second;
  }
  return config;
}

absl::Status Counterpart(const ModelDescription& description) {
  const auto rotary = description.flags.find("rotary");
  const auto mlp = description.texts.find("mlp");
  const char* foreign = nullptr;
  if (rotary != description.flags.end() && rotary->second) foreign = "positions: rotary";
  if (mlp != description.texts.end() && mlp->second != "relu2") foreign = "mlp: swiglu";
  if (foreign == nullptr) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("hybrid models with ", foreign,
                   " have no counterpart at Hugging Face here; NemotronHForCausalLM has squared "
                   "ReLU and no positions"));
}

}  // namespace

const HuggingFaceFamily kNemotronHHuggingFace = {
    .model_type = "nemotron_h",
    .layout = Layout,
    .description = Description,
    .config = Config,
    .is_derived = [](const ModelDescription&, absl::string_view) { return false; },
    .prefix = "",
    .counterpart = Counterpart,
};

}  // namespace muster::parallel
