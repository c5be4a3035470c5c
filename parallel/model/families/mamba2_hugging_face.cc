// Mamba2ForCausalLM.
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/model/families/hugging_face.h"
#include "parallel/model/families/mamba2.h"

namespace muster::parallel {
namespace {

HuggingFaceLayout Layout(const Model& model) {
  const ModelDescription& description = model.description();
  LayoutBuilder builder(model);
  builder.Same("embedding.token.weight", "backbone.embeddings.weight");
  for (int64_t i = 0; i < Required(description.sizes, "layers"); ++i) {
    const std::string ours = absl::StrCat("blocks.", i, ".");
    const std::string theirs = absl::StrCat("backbone.layers.", i, ".");
    builder.Same(ours + "norm.weight", theirs + "norm.weight");
    AddMamba2(builder, ours + "mamba.", theirs + "mixer.");
  }
  builder.Same("norm.weight", "backbone.norm_f.weight");
  if (!Required(description.flags, "tied")) builder.Same("head.weight", "lm_head.weight");
  return builder.Finish();
}

// The lower limit of `time_step_limit`, of which the upper one must be infinite.
double StepMin(ConfigReader& reader) {
  if (!reader.Given("time_step_limit")) return 0;
  const Json& limit = reader.config()["time_step_limit"];
  // Infinity is no JSON; files have it as the number, or as a text.
  const bool open =
      limit.is_array() && limit.size() == 2 && limit[0].is_number() &&
      limit[0].get<double>() >= 0 &&
      (limit[1] == "Infinity" || (limit[1].is_number() && std::isinf(limit[1].get<double>())) ||
       (limit[1].is_object() && limit[1].contains("__float__")));
  if (open) return limit[0].get<double>();
  reader.Refuse("time_step_limit", "only steps without an upper limit, [N, Infinity], are there");
  return 0;
}

absl::StatusOr<ModelDescription> Description(const Json& config) {
  ConfigReader reader(config);
  ModelDescription description;
  description.family = "mamba2";
  // The defaults of transformers' Mamba2Config.
  const int64_t hidden = reader.Size("hidden_size", 4096);
  const int64_t heads = reader.Size("num_heads", 128), width = reader.Size("head_dim", 64);
  description.sizes = {{"layers", reader.Size("num_hidden_layers", 64)},
                       {"hidden", hidden},
                       {"heads", heads},
                       {"head_width", width},
                       {"groups", reader.Size("n_groups", 8)},
                       {"state", reader.Size("state_size", 128)},
                       {"taps", reader.Size("conv_kernel", 4)},
                       {"vocab", reader.Size("vocab_size", 32768)},
                       // The model has no longest context; a job may train any length.
                       {"sequence_length", reader.Size("max_position_embeddings", 2048)}};
  description.numbers["norm_epsilon"] = reader.Number("layer_norm_epsilon", 1e-5);
  description.flags["tied"] = reader.Flag("tie_word_embeddings", false);
  reader.Must("hidden_act", "silu");
  reader.Must("use_bias", false);
  reader.Must("use_conv_bias", true);
  if (const double step_min = StepMin(reader); step_min > 0) {
    description.numbers["step_min"] = step_min;
  }
  if (reader.Given("expand") && config["expand"].is_number() &&
      config["expand"].get<double>() * static_cast<double>(hidden) !=
          static_cast<double>(heads * width)) {
    reader.Refuse("expand", absl::StrCat("num_heads x head_dim (", heads * width,
                                         ") / hidden_size (", hidden, ") is needed"));
  }
  RETURN_IF_ERROR(reader.status());
  return description;
}

Json Config(const ModelDescription& description) {
  const auto size = [&](const char* name) { return Required(description.sizes, name); };
  const int64_t inner = size("heads") * size("head_width");
  Json expand = static_cast<double>(inner) / static_cast<double>(size("hidden"));
  if (inner % size("hidden") == 0) expand = inner / size("hidden");
  Json config = {{"model_type", "mamba2"},
                 {"architectures", {"Mamba2ForCausalLM"}},
                 {"num_hidden_layers", size("layers")},
                 {"hidden_size", size("hidden")},
                 {"num_heads", size("heads")},
                 {"head_dim", size("head_width")},
                 {"n_groups", size("groups")},
                 {"state_size", size("state")},
                 {"conv_kernel", size("taps")},
                 {"expand", expand},
                 {"vocab_size", size("vocab")},
                 {"max_position_embeddings", size("sequence_length")},
                 {"layer_norm_epsilon", Required(description.numbers, "norm_epsilon")},
                 {"hidden_act", "silu"},
                 {"use_bias", false},
                 {"use_conv_bias", true},
                 {"residual_in_fp32", true},
                 {"tie_word_embeddings", Required(description.flags, "tied")}};
  // Absent: no limits. The infinite one has the form that transformers 5 gives it.
  if (const auto step_min = description.numbers.find("step_min");
      step_min != description.numbers.end()) {
    config["time_step_limit"] = {step_min->second, {{"__float__", "Infinity"}}};
  }
  return config;
}

}  // namespace

const HuggingFaceFamily kMamba2HuggingFace = {
    .model_type = "mamba2",
    .layout = Layout,
    .description = Description,
    .config = Config,
    .is_derived = IsTiedHead,
    .prefix = "",
};

}  // namespace muster::parallel
