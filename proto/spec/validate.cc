#include <cmath>
#include <limits>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "google/protobuf/unknown_field_set.h"
#include "parallel/plan/validate.h"
#include "proto/spec/names.h"
#include "proto/spec/presets.h"
#include "proto/spec/spec.h"

namespace muster::spec {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr size_t kNameLengthMax = 63;
constexpr size_t kPathBytesMax = 4096;
constexpr int64_t kLayersMax = 1024;
constexpr int64_t kHiddenMax = 1 << 20;
constexpr int64_t kFfnMax = 1 << 24;
constexpr int64_t kRanksMax = 65536;
constexpr double kLossScaleMax = 0x1p40;  // as the engine's
constexpr int32_t kNcclCtasMax = 64;      // the channels that NCCL has
constexpr int kSourcesMax = 4096;
constexpr int kLabelsMax = 32;
constexpr size_t kLabelBytesMax = 63;
constexpr size_t kProblemsMax = 100;

bool IsName(const std::string& name) {
  if (name.empty() || name.size() > kNameLengthMax) return false;
  if (!absl::ascii_islower(name.front()) || name.back() == '-') return false;
  for (char c : name) {
    if (!absl::ascii_islower(c) && !absl::ascii_isdigit(c) && c != '-') return false;
  }
  return true;
}

// a * b, or nothing when it does not fit. Requires: a, b >= 0.
bool MultiplyOverflows(int64_t a, int64_t b, int64_t* product) {
  return __builtin_mul_overflow(a, b, product);
}

// Collects problems; each method judges one part of the spec.
class Judge {
 public:
  std::vector<Problem> Run(const v1::JobSpec& spec) {
    Known(spec, "");
    Head(spec);
    if (!spec.has_engine()) {
      Add("engine", "required: says what to train");
    } else {
      Engine(spec);
    }
    Resources(spec.resources());
    if (spec.has_checkpoint()) Checkpoint(spec);
    Restart(spec.restart());
    if (problems_.size() > kProblemsMax) problems_.resize(kProblemsMax);
    return std::move(problems_);
  }

 private:
  template <typename... Parts>
  void Add(std::string path, const Parts&... parts) {
    problems_.push_back({std::move(path), absl::StrCat(parts...)});
  }

  // Enum numbers and fields that this build has no name for come from a newer client: to ignore
  // them would be to run something else than was asked for.
  void Known(const Message& message, const std::string& path) {
    const auto& reflection = *message.GetReflection();
    const std::string prefix = path.empty() ? "" : path + ".";
    if (!reflection.GetUnknownFields(message).empty()) {
      Add(path.empty() ? "spec" : path, "has a field with number ",
          reflection.GetUnknownFields(message).field(0).number(),
          ", which this version does not know; the client is newer than the coordinator");
    }
    std::vector<const FieldDescriptor*> fields;
    reflection.ListFields(message, &fields);
    for (const FieldDescriptor* field : fields) {
      if (field->is_map()) continue;
      const std::string field_path = prefix + field->name();
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_ENUM && !field->is_repeated()) {
        const int number = reflection.GetEnumValue(message, field);
        if (field->enum_type()->FindValueByNumber(number) == nullptr) {
          Add(field_path, "unknown value ", number, "; expected ",
              absl::StrJoin(EnumNames(*field->enum_type()), ", "));
        }
      }
      if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
      if (!field->is_repeated()) {
        Known(reflection.GetMessage(message, field), field_path);
        continue;
      }
      for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
        Known(reflection.GetRepeatedMessage(message, field, i),
              absl::StrCat(field_path, "[", i, "]"));
      }
    }
  }

  // One whole number in [low, high].
  bool InRange(const std::string& path, int64_t value, int64_t low,
               int64_t high = std::numeric_limits<int64_t>::max()) {
    if (value >= low && value <= high) return true;
    if (high == std::numeric_limits<int64_t>::max() ||
        high == std::numeric_limits<int32_t>::max()) {
      Add(path, value == 0 ? "required; " : absl::StrCat(value, " is too small; "), "at least ",
          low);
    } else {
      Add(path, value == 0 ? "required" : absl::StrCat(value, " is out of range"), "; ", low,
          " to ", high);
    }
    return false;
  }

  bool NotNegative(const std::string& path, int64_t value) {
    if (value >= 0) return true;
    Add(path, value, " is negative");
    return false;
  }

  bool Finite(const std::string& path, double value) {
    if (std::isfinite(value)) return true;
    Add(path, value, " is not a finite number");
    return false;
  }
  bool NotNegative(const std::string& path, double value) {
    if (!Finite(path, value)) return false;
    if (value >= 0) return true;
    Add(path, value, " is negative");
    return false;
  }
  bool Positive(const std::string& path, double value) {
    if (!Finite(path, value)) return false;
    if (value > 0) return true;
    Add(path, value, " is not larger than 0");
    return false;
  }

  void Path(const std::string& path, const std::string& value, const v1::JobSpec& spec) {
    if (value.empty()) {
      Add(path, "required");
      return;
    }
    if (!PathText(path, value)) return;
    if (value[0] != '/' && spec.working_directory().empty()) {
      Add(path, Quoted(value), " is relative, but working_directory is not set");
    }
  }

  bool PathText(const std::string& path, const std::string& value) {
    if (value.size() > kPathBytesMax) {
      Add(path, Quoted(value), " is longer than ", kPathBytesMax, " bytes");
      return false;
    }
    for (char c : value) {
      if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) {
        Add(path, Quoted(value), " contains a control character");
        return false;
      }
    }
    return true;
  }

  void Head(const v1::JobSpec& spec) {
    if (spec.name().empty()) {
      Add("name", "required");
    } else if (!IsName(spec.name())) {
      Add("name", Quoted(spec.name()),
          " is not a job name: 1-63 characters of [a-z0-9-], starting with a letter, not ending "
          "with '-'");
    }
    if (spec.queue() != "default") {
      Add("queue", "there is no queue ", Quoted(spec.queue()), "; the only one is 'default'");
    }
    if (spec.priority() < 0 || spec.priority() > 100) {
      Add("priority", spec.priority(), " is out of range; 0 to 100");
    }
    if (!spec.working_directory().empty() &&
        PathText("working_directory", spec.working_directory()) &&
        spec.working_directory()[0] != '/') {
      Add("working_directory", Quoted(spec.working_directory()), " is not an absolute path");
    }
    if (spec.labels_size() > kLabelsMax) {
      Add("labels", spec.labels_size(), " labels; at most ", kLabelsMax);
      return;
    }
    for (const auto& [name, value] : spec.labels()) {
      if (name.empty()) {
        Add("labels", "a label without a name");
      } else if (name.size() > kLabelBytesMax) {
        Add("labels", "the name ", Quoted(name), " is longer than ", kLabelBytesMax, " bytes");
      }
      if (value.size() > kLabelBytesMax) {
        Add(absl::StrCat("labels.", name.substr(0, kLabelBytesMax)), Quoted(value),
            " is longer than ", kLabelBytesMax, " bytes");
      }
    }
  }

  void Engine(const v1::JobSpec& spec) {
    const v1::EngineSpec& engine = spec.engine();
    if (engine.has_model()) {
      Model(engine.model());
    } else {
      Add("engine.model", "required");
    }
    if (!engine.model().initialize_from().empty()) {
      Path("engine.model.initialize_from", engine.model().initialize_from(), spec);
    }
    Sources("engine.data.train", engine.data().train(), spec);
    if (engine.data().train().empty()) Add("engine.data.train", "required: at least one data set");
    Sources("engine.data.validation", engine.data().validation(), spec);
    Parallel(spec);
    if (engine.has_training()) {
      Training(spec);
    } else {
      Add("engine.training", "required");
    }
  }

  void Model(const v1::ModelSpec& model) {
    if (!model.preset().empty() && FindPreset(model.preset()) == nullptr) {
      // What it would have filled in is not missing on its own account.
      Add("engine.model.preset", Quoted(model.preset()), " is not one of ",
          absl::StrJoin(PresetNames(), ", "));
      return;
    }
    if (model.family() == v1::MODEL_FAMILY_UNSPECIFIED) {
      Add("engine.model.family", "required; one of ",
          absl::StrJoin(EnumNames(*v1::ModelFamily_descriptor()), ", "));
    }
    InRange("engine.model.layers", model.layers(), 1, kLayersMax);
    const bool hidden = InRange("engine.model.hidden", model.hidden(), 1, kHiddenMax);
    const bool heads = InRange("engine.model.heads", model.heads(), 1);
    if (hidden && heads && model.hidden() % model.heads() != 0) {
      Add("engine.model.heads", model.heads(), " does not divide hidden (", model.hidden(), ")");
    }
    InRange("engine.model.vocab", model.vocab(), 1);
    InRange("engine.model.sequence_length", model.sequence_length(), 1);
    if (model.family() == v1::MODEL_FAMILY_LLAMA) {
      Llama(model, hidden && heads && model.hidden() % model.heads() == 0);
    } else if (model.family() == v1::MODEL_FAMILY_GPT2) {
      const auto only_llama = [&](const char* field, bool given) {
        if (given) Add(absl::StrCat("engine.model.", field), "is for family llama, not gpt2");
      };
      only_llama("kv_heads", model.kv_heads() != 0);
      only_llama("ffn", model.ffn() != 0);
      only_llama("tied", model.has_tied());
      only_llama("norm_epsilon", model.has_norm_epsilon());
      only_llama("rope_theta", model.has_rope_theta());
      only_llama("rope_scaling", model.has_rope_scaling());
    }
  }

  // `divides`: heads and hidden are sound.
  void Llama(const v1::ModelSpec& model, bool divides) {
    const bool kv_heads = InRange("engine.model.kv_heads", model.kv_heads(), 1);
    if (divides && kv_heads && model.heads() % model.kv_heads() != 0) {
      Add("engine.model.kv_heads", model.kv_heads(), " does not divide heads (", model.heads(),
          ")");
    }
    if (divides && model.hidden() / model.heads() % 2 != 0) {
      Add("engine.model.heads", model.heads(), " heads of hidden ", model.hidden(), " are ",
          model.hidden() / model.heads(), " wide each; rotary positions need an even width");
    }
    InRange("engine.model.ffn", model.ffn(), 1, kFfnMax);
    Positive("engine.model.norm_epsilon", model.norm_epsilon());
    Positive("engine.model.rope_theta", model.rope_theta());
    if (!model.has_rope_scaling()) return;
    const v1::RopeScalingSpec& scaling = model.rope_scaling();
    const std::string path = "engine.model.rope_scaling.";
    if (Finite(path + "factor", scaling.factor()) && scaling.factor() < 1) {
      Add(path + "factor", scaling.factor(), " is less than 1");
    }
    Positive(path + "low_frequency_factor", scaling.low_frequency_factor());
    Positive(path + "high_frequency_factor", scaling.high_frequency_factor());
    if (scaling.high_frequency_factor() <= scaling.low_frequency_factor()) {
      Add(path + "high_frequency_factor", scaling.high_frequency_factor(),
          " is not above low_frequency_factor (", scaling.low_frequency_factor(), ")");
    }
    InRange(path + "original_context", scaling.original_context(), 1);
  }

  void Sources(const std::string& path,
               const google::protobuf::RepeatedPtrField<v1::DataSource>& sources,
               const v1::JobSpec& spec) {
    if (sources.size() > kSourcesMax) {
      Add(path, sources.size(), " data sets; at most ", kSourcesMax);
      return;
    }
    for (int i = 0; i < sources.size(); ++i) {
      const std::string source = absl::StrCat(path, "[", i, "]");
      Path(source + ".path", sources[i].path(), spec);
      Positive(source + ".weight", sources[i].weight());
    }
  }

  void Parallel(const v1::JobSpec& spec) {
    const v1::ParallelSpec& parallel = spec.engine().parallel();
    NotNegative("engine.parallel.bucket_bytes", parallel.bucket_bytes());
    NotNegative("engine.parallel.resident_elements", parallel.resident_elements());
    if (parallel.nccl_ctas() < 0 || parallel.nccl_ctas() > kNcclCtasMax) {
      Add("engine.parallel.nccl_ctas", parallel.nccl_ctas(), " is out of range; 1 to ",
          kNcclCtasMax, " thread blocks, or 0 for NCCL's own choice");
    }
    if (spec.resources().ranks() < 1) return;  // named by Resources
    if (!InRange("engine.parallel.data", parallel.data(), 1)) return;
    for (parallel::LayoutProblem& problem : parallel::FindProblems(
             LayoutOf(spec), SizeOf(spec.engine().model()), {.ranks = spec.resources().ranks()})) {
      Add(problem.field, problem.message);
    }
    PipelineBlocks(spec);
    ZeroBubble(spec);
    TensorShares(parallel);
    Order(parallel);
    const std::string offload = "engine.parallel.offload.optimizer";
    const double share = parallel.offload().optimizer();
    if (parallel.offload().activations() &&
        parallel.pipeline_schedule() == v1::PIPELINE_SCHEDULE_ZERO_BUBBLE) {
      Add("engine.parallel.offload.activations",
          "does not go with pipeline_schedule zero_bubble, whose backward in two parts needs them "
          "twice; use 1f1b, gpipe or interleaved");
    }
    if (Finite(offload, share) && (share < 0 || share > 1)) {
      Add(offload, share, " is out of range; 0 to 1");
    }
  }

  void TensorShares(const v1::ParallelSpec& parallel) {
    const std::string path = "engine.parallel.tensor_shares";
    for (int i = 0; i < parallel.tensor_shares_size(); ++i) {
      Positive(absl::StrCat(path, "[", i, "]"), parallel.tensor_shares(i));
    }
  }

  void Order(const v1::ParallelSpec& parallel) {
    if (parallel.order().empty()) return;
    std::set<int> named(parallel.order().begin(), parallel.order().end());
    const google::protobuf::EnumDescriptor& axes = *v1::MeshAxis_descriptor();
    const size_t all = EnumNames(axes).size();
    bool known = true;
    for (const int axis : named) known = known && axis > 0 && v1::MeshAxis_IsValid(axis);
    if (known && named.size() == all && static_cast<size_t>(parallel.order_size()) == all) return;
    Add("engine.parallel.order",
        "must name each axis once: ", absl::StrJoin(EnumNames(axes), ", "));
  }

  // The first part may be the embedding alone and the last one the head.
  void PipelineBlocks(const v1::JobSpec& spec) {
    const v1::ParallelSpec& parallel = spec.engine().parallel();
    const auto& blocks = parallel.pipeline_blocks();
    if (blocks.empty()) return;
    const std::string path = "engine.parallel.pipeline_blocks";
    int64_t total = 0;
    for (int i = 0; i < blocks.size(); ++i) {
      const bool end = blocks.size() > 1 && (i == 0 || i + 1 == blocks.size());
      if (!InRange(absl::StrCat(path, "[", i, "]"), blocks[i], end ? 0 : 1)) return;
      total += blocks[i];
    }
    if (total != spec.engine().model().layers()) {
      Add(path, "the numbers add up to ", total, ", but the model has ",
          spec.engine().model().layers(), " layers");
    }
  }

  void ZeroBubble(const v1::JobSpec& spec) {
    if (spec.engine().parallel().pipeline_schedule() != v1::PIPELINE_SCHEDULE_ZERO_BUBBLE) return;
    const v1::Recompute recompute = spec.engine().training().recompute();
    if (recompute == v1::RECOMPUTE_SELECTIVE || recompute == v1::RECOMPUTE_FULL) {
      Add("engine.parallel.pipeline_schedule",
          "zero_bubble puts the gradients of weights off and keeps the activations that they need, "
          "which engine.training.recompute gives up; use recompute: none, or 1f1b");
    }
  }

  void Training(const v1::JobSpec& spec) {
    const v1::TrainingSpec& training = spec.engine().training();
    const bool steps = InRange("engine.training.steps", training.steps(), 1);
    const bool global = InRange("engine.training.global_batch", training.global_batch(), 1);
    InRange("engine.training.micro_batch", training.micro_batch(), 1);
    int64_t tokens = 0;
    const int64_t length = spec.engine().model().sequence_length();
    if (steps && global && length >= 1 &&
        (MultiplyOverflows(training.global_batch(), length, &tokens) ||
         MultiplyOverflows(tokens, training.steps(), &tokens))) {
      Add("engine.training.steps", "steps x global_batch x sequence_length (", training.steps(),
          " x ", training.global_batch(), " x ", length, ") is too large to count the tokens");
    }
    Precision(spec);
    NotNegative("engine.training.evaluate_every", training.evaluate_every());
    NotNegative("engine.training.evaluate_samples", training.evaluate_samples());
    NotNegative("engine.training.verify_every", training.verify_every());
    const std::string dropout = "engine.training.dropout";
    if (Finite(dropout, training.dropout()) &&
        (training.dropout() < 0 || training.dropout() >= 1)) {
      Add(dropout, training.dropout(),
          " is out of range; a probability from 0 (off) to less than 1, such as 0.1");
    }
    if (training.has_gradient_compression()) Compression(spec);
    RecomputeBlocks(spec);
    if (training.optimizer().has_adamw()) {
      AdamW(training.optimizer().adamw());
      Schedule(training);
    } else {
      Add("engine.training.optimizer", "required; adamw is the one there is");
    }
  }

  void RecomputeBlocks(const v1::JobSpec& spec) {
    const std::string path = "engine.training.recompute_blocks";
    const int64_t blocks = spec.engine().training().recompute_blocks();
    if (!NotNegative(path, blocks) || blocks == 0) return;
    if (spec.engine().training().recompute() == v1::RECOMPUTE_NONE) {
      Add(path, blocks,
          " blocks are to recompute, but recompute is none; set it to selective or "
          "full");
    }
    if (spec.engine().parallel().offload().activations()) {
      Add(path,
          "does not go with parallel.offload.activations, which takes what every block keeps "
          "by turns into the same memory; use 0");
    }
  }

  void Compression(const v1::JobSpec& spec) {
    const v1::TrainingSpec& training = spec.engine().training();
    const v1::GradientCompressionSpec& compression = training.gradient_compression();
    const std::string path = "engine.training.gradient_compression";
    if (compression.method_case() == v1::GradientCompressionSpec::METHOD_NOT_SET) {
      Add(path, "required: one of top_k, sign");
    }
    if (compression.has_top_k()) {
      const v1::TopKSpec& top_k = compression.top_k();
      const double density = top_k.density(), momentum = top_k.momentum();
      if (Finite(path + ".top_k.density", density) && (density <= 0 || density > 1)) {
        Add(path + ".top_k.density", density, " is out of range; above 0, at most 1");
      }
      if (Finite(path + ".top_k.momentum", momentum) && (momentum < 0 || momentum >= 1)) {
        Add(path + ".top_k.momentum", momentum, " is out of range; 0 to less than 1");
      }
      NotNegative(path + ".top_k.warmup_steps", top_k.warmup_steps());
    }
    NotNegative(path + ".min_elements", compression.min_elements());
    if (training.precision() == v1::PRECISION_FP16) {
      Add(path, "would keep residuals in units of fp16's changing loss scale; use precision: bf16");
    }
    if (training.gradient_reduction() == v1::GRADIENT_REDUCTION_BF16) {
      Add(path, "sends fp32 values; use gradient_reduction: fp32");
    }
  }

  void Precision(const v1::JobSpec& spec) {
    const v1::TrainingSpec& training = spec.engine().training();
    const auto* value = v1::Precision_descriptor()->FindValueByNumber(training.precision());
    if (value == nullptr) return;  // named by Known
    if (training.precision() != v1::PRECISION_FP32 &&
        spec.resources().device() != v1::DEVICE_KIND_CUDA) {
      Add("engine.training.precision", ShortEnumName(*value), " needs resources.device: cuda");
    }
    if (!training.has_loss_scale()) return;
    const std::string path = "engine.training.loss_scale";
    if (training.precision() != v1::PRECISION_FP16) {
      Add(path, "is for precision fp16, not ", ShortEnumName(*value));
    }
    const double initial = training.loss_scale().initial();
    if (Finite(path + ".initial", initial) && (initial < 1 || initial > kLossScaleMax)) {
      Add(path + ".initial", initial,
          initial < 1 ? " is less than 1" : " is more than 2^40: the first steps would be skipped");
    }
    InRange(path + ".growth_interval", training.loss_scale().growth_interval(), 1);
    InRange(path + ".hysteresis", training.loss_scale().hysteresis(), 1);
  }

  void AdamW(const v1::AdamWSpec& adamw) {
    const std::string path = "engine.training.optimizer.adamw.";
    Positive(path + "lr", adamw.lr());
    NotNegative(path + "weight_decay", adamw.weight_decay());
    Positive(path + "eps", adamw.eps());
    NotNegative(path + "clip_norm", adamw.clip_norm());
    if (adamw.betas_size() != 2) {
      Add(path + "betas", adamw.betas_size(), " values; expected two, [beta1, beta2]");
      return;
    }
    for (int i = 0; i < adamw.betas_size(); ++i) {
      const std::string beta = absl::StrCat(path, "betas[", i, "]");
      if (!Finite(beta, adamw.betas(i))) continue;
      if (adamw.betas(i) < 0 || adamw.betas(i) >= 1) {
        Add(beta, adamw.betas(i), " is out of range; 0 to less than 1");
      }
    }
  }

  void Schedule(const v1::TrainingSpec& training) {
    const v1::ScheduleSpec& schedule = training.schedule();
    const std::string path = "engine.training.schedule.";
    if (schedule.has_constant()) {
      NotNegative(path + "constant.warmup_steps", schedule.constant().warmup_steps());
    }
    if (!schedule.has_cosine() && !schedule.has_linear()) return;
    const std::string kind = path + (schedule.has_cosine() ? "cosine." : "linear.");
    const v1::DecaySpec& decay = schedule.has_cosine() ? schedule.cosine() : schedule.linear();
    const double lr = training.optimizer().adamw().lr();
    const bool warmup = NotNegative(kind + "warmup_steps", decay.warmup_steps());
    if (NotNegative(kind + "min_lr", decay.min_lr()) && std::isfinite(lr) && decay.min_lr() > lr) {
      Add(kind + "min_lr", decay.min_lr(), " is larger than lr (", lr, ")");
    }
    if (NotNegative(kind + "decay_steps", decay.decay_steps()) && warmup &&
        decay.decay_steps() > 0 && decay.decay_steps() <= decay.warmup_steps()) {
      Add(kind + "decay_steps", decay.decay_steps(), " is not larger than warmup_steps (",
          decay.warmup_steps(), ")");
    }
  }

  void Resources(const v1::ResourceSpec& resources) {
    InRange("resources.ranks", resources.ranks(), 1, kRanksMax);
    NotNegative("resources.threads_per_rank", static_cast<int64_t>(resources.threads_per_rank()));
  }

  void Checkpoint(const v1::JobSpec& spec) {
    Path("checkpoint.path", spec.checkpoint().path(), spec);
    InRange("checkpoint.every_steps", spec.checkpoint().every_steps(), 1);
    InRange("checkpoint.keep", spec.checkpoint().keep(), 1);
  }

  // The duration, or nothing (and reported) when it is not one from 0 to 24 hours.
  bool BackoffDuration(const std::string& path, const google::protobuf::Duration& proto,
                       absl::Duration* duration) {
    constexpr int32_t kNanosMax = 999'999'999;
    *duration = absl::Seconds(proto.seconds()) + absl::Nanoseconds(proto.nanos());
    const bool well_formed = proto.nanos() >= -kNanosMax && proto.nanos() <= kNanosMax &&
                             (proto.seconds() >= 0 || proto.nanos() <= 0) &&
                             (proto.seconds() <= 0 || proto.nanos() >= 0);
    if (well_formed && *duration >= absl::ZeroDuration() && *duration <= absl::Hours(24)) {
      return true;
    }
    Add(path, absl::FormatDuration(*duration), " is out of range; 0s to 24h");
    return false;
  }

  void Restart(const v1::RestartSpec& restart) {
    NotNegative("restart.max_failures", static_cast<int64_t>(restart.max_failures()));
    absl::Duration initial, max;
    const bool initial_ok =
        BackoffDuration("restart.backoff.initial", restart.backoff().initial(), &initial);
    const bool max_ok = BackoffDuration("restart.backoff.max", restart.backoff().max(), &max);
    if (initial_ok && max_ok && initial > max) {
      Add("restart.backoff.initial", absl::FormatDuration(initial), " is longer than max (",
          absl::FormatDuration(max), ")");
    }
  }

  std::vector<Problem> problems_;
};

}  // namespace

parallel::Layout LayoutOf(const v1::JobSpec& spec) {
  const v1::ParallelSpec& split = spec.engine().parallel();
  const v1::TrainingSpec& training = spec.engine().training();
  parallel::Layout layout;
  // The axes that a spec can ask for.
  layout.negotiable = {parallel::Axis::kData, parallel::Axis::kPipeline, parallel::Axis::kContext,
                       parallel::Axis::kTensor};
  layout.degrees =
      parallel::PerAxis(split.pipeline(), split.data(), split.context(), split.tensor());
  layout.pipeline_chunks = split.pipeline_chunks();
  layout.interleaved = split.pipeline_schedule() == v1::PIPELINE_SCHEDULE_INTERLEAVED;
  layout.zero_bubble = split.pipeline_schedule() == v1::PIPELINE_SCHEDULE_ZERO_BUBBLE;
  layout.pipeline_parts = split.pipeline_blocks_size();
  layout.all_to_all = split.context_method() == v1::CONTEXT_METHOD_ALL_TO_ALL;
  layout.tensor_shares = split.tensor_shares_size();
  layout.sequence_parallel = split.sequence();
  layout.tensor_chunks = split.tensor_overlap() == v1::TENSOR_OVERLAP_CHUNKED;
  layout.tensor_halves = split.tensor_overlap() == v1::TENSOR_OVERLAP_HALVES;
  layout.zero = split.zero();
  layout.zero_shards = split.zero_shards();
  layout.global_batch = training.global_batch();
  layout.micro_batch = training.micro_batch();
  const v1::GradientCompressionSpec& compression = training.gradient_compression();
  if (compression.has_top_k()) layout.top_k_density = compression.top_k().density();
  layout.sign_compression = compression.has_sign();
  return layout;
}

parallel::ModelSize SizeOf(const v1::ModelSpec& model) {
  return {.layers = model.layers(),
          .heads = model.heads(),
          .sequence = model.sequence_length(),
          .kv_heads = model.kv_heads(),
          .ffn = model.ffn(),
          .vocab = model.vocab()};
}

std::vector<Problem> FindProblems(const v1::JobSpec& spec) { return Judge().Run(spec); }

absl::Status Validate(const v1::JobSpec& spec) {
  const std::vector<Problem> problems = FindProblems(spec);
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrJoin(problems, "\n", [](std::string* out, const Problem& problem) {
        absl::StrAppend(out, problem.path, ": ", problem.message);
      }));
}

}  // namespace muster::spec
