// The rules of JobSpec.engine: model, data, parallelism, training.
#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "parallel/plan/validate.h"
#include "proto/spec/checker.h"
#include "proto/spec/elastic.h"
#include "proto/spec/families/family.h"
#include "proto/spec/families/layers.h"
#include "proto/spec/names.h"
#include "proto/spec/presets.h"

namespace muster::spec {
namespace {

constexpr double kLossScaleMax = 0x1p40;  // the engine's limit
constexpr int32_t kNcclCtasMax = 64;      // NCCL's limit of channels
constexpr int kSourcesMax = 4096;

// True when a * b does not fit; else it is in `product`. Requires: a, b >= 0.
bool MultiplyOverflows(int64_t a, int64_t b, int64_t* product) {
  return __builtin_mul_overflow(a, b, product);
}

// Reports fields that are given but belong to other families.
void CheckForeignFields(const v1::ModelSpec& model, const SpecFamily& own, Checker& check) {
  const google::protobuf::Descriptor& fields = *model.GetDescriptor();
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::FieldDescriptor& field = *fields.field(i);
    if (!model.GetReflection()->HasField(model, &field) || own.fields.contains(field.name())) {
      continue;
    }
    std::vector<std::string> names;
    for (const SpecFamily* family : SpecFamilies()) {
      if (family->fields.contains(field.name())) names.push_back(EnumName(family->id));
    }
    if (names.empty()) continue;  // every family has it
    check.Add(absl::StrCat("engine.model.", field.name()), "is for family ",
              absl::StrJoin(names, " and "), ", not ", EnumName(own.id));
  }
}

void CheckModel(const v1::EngineSpec& engine, Checker& check) {
  const v1::ModelSpec& model = engine.model();
  if (!model.preset().empty() && FindPreset(model.preset()) == nullptr) {
    // The fields that a preset would set are not reported as missing.
    check.Add("engine.model.preset", Quoted(model.preset()), " is not one of ",
              absl::StrJoin(PresetNames(), ", "));
    return;
  }
  if (model.family() == v1::MODEL_FAMILY_UNSPECIFIED) {
    check.Add("engine.model.family", "required; one of ",
              absl::StrJoin(EnumNames(*v1::ModelFamily_descriptor()), ", "));
  }
  if (const v1::ModelSpec* const preset = FindPreset(model.preset());
      preset != nullptr && model.family() != v1::MODEL_FAMILY_UNSPECIFIED &&
      model.family() != preset->family()) {
    check.Add("engine.model.preset", model.preset(), " is of family ", EnumName(preset->family()),
              ", not ", EnumName(model.family()));
    return;
  }
  const SpecFamily* const family = FindSpecFamily(model.family());
  if (family == nullptr || !family->counts_layers) {
    check.InRange("engine.model.layers", model.layers(), 1, kLayersMax);
  }
  check.InRange("engine.model.hidden", model.hidden(), 1, kHiddenMax);
  check.InRange("engine.model.vocab", model.vocab(), 1);
  check.InRange("engine.model.sequence_length", model.sequence_length(), 1);
  if (family == nullptr) return;  // what else it needs is unknown
  CheckForeignFields(model, *family, check);
  family->check(model, check);
}

void CheckSources(const std::string& path,
                  const google::protobuf::RepeatedPtrField<v1::DataSource>& sources,
                  const v1::JobSpec& spec, Checker& check) {
  if (sources.size() > kSourcesMax) {
    check.Add(path, sources.size(), " data sets; at most ", kSourcesMax);
    return;
  }
  for (int i = 0; i < sources.size(); ++i) {
    const std::string source = absl::StrCat(path, "[", i, "]");
    check.Path(source + ".path", sources[i].path(), spec);
    check.Positive(source + ".weight", sources[i].weight());
  }
}

void CheckTensorShares(const v1::ParallelSpec& parallel, Checker& check) {
  const std::string path = "engine.parallel.tensor_shares";
  for (int i = 0; i < parallel.tensor_shares_size(); ++i) {
    check.Positive(absl::StrCat(path, "[", i, "]"), parallel.tensor_shares(i));
  }
}

void CheckOrder(const v1::ParallelSpec& parallel, Checker& check) {
  if (parallel.order().empty()) return;
  std::set<int> named(parallel.order().begin(), parallel.order().end());
  const google::protobuf::EnumDescriptor& axes = *v1::MeshAxis_descriptor();
  const size_t all = EnumNames(axes).size();
  bool known = true;
  for (const int axis : named) known = known && axis > 0 && v1::MeshAxis_IsValid(axis);
  if (known && named.size() == all && static_cast<size_t>(parallel.order_size()) == all) return;
  check.Add("engine.parallel.order",
            "must name each axis once: ", absl::StrJoin(EnumNames(axes), ", "));
}

// The first part may have no blocks but the embedding, and the last one only the head.
void CheckPipelineBlocks(const v1::JobSpec& spec, Checker& check) {
  const v1::ParallelSpec& parallel = spec.engine().parallel();
  const auto& blocks = parallel.pipeline_blocks();
  if (blocks.empty()) return;
  const std::string path = "engine.parallel.pipeline_blocks";
  int64_t total = 0;
  for (int i = 0; i < blocks.size(); ++i) {
    const bool end = blocks.size() > 1 && (i == 0 || i + 1 == blocks.size());
    if (!check.InRange(absl::StrCat(path, "[", i, "]"), blocks[i], end ? 0 : 1)) return;
    total += blocks[i];
  }
  if (total != spec.engine().model().layers()) {
    check.Add(path, "the numbers add up to ", total, ", but the model has ",
              spec.engine().model().layers(), " blocks");
  }
}

void CheckZeroBubble(const v1::JobSpec& spec, Checker& check) {
  if (spec.engine().parallel().pipeline_schedule() != v1::PIPELINE_SCHEDULE_ZERO_BUBBLE) return;
  const v1::Recompute recompute = spec.engine().training().recompute();
  if (recompute == v1::RECOMPUTE_SELECTIVE || recompute == v1::RECOMPUTE_FULL) {
    check.Add(
        "engine.parallel.pipeline_schedule",
        "zero_bubble puts the gradients of weights off and keeps the activations that they need, "
        "which engine.training.recompute gives up; use recompute: none, or 1f1b");
  }
}

void CheckParallel(const v1::JobSpec& spec, Checker& check) {
  const v1::ParallelSpec& parallel = spec.engine().parallel();
  check.NotNegative("engine.parallel.bucket_bytes", parallel.bucket_bytes());
  check.NotNegative("engine.parallel.resident_elements", parallel.resident_elements());
  if (parallel.nccl_ctas() < 0 || parallel.nccl_ctas() > kNcclCtasMax) {
    check.Add("engine.parallel.nccl_ctas", parallel.nccl_ctas(), " is out of range; 1 to ",
              kNcclCtasMax, " thread blocks, or 0 for NCCL's own choice");
  }
  if (spec.resources().ranks() < 1) return;  // CheckResources reports it
  if (!check.InRange("engine.parallel.data", parallel.data(), 1)) return;
  // Of an elastic job the layout of its largest size. Where it has none and other numbers of ranks
  // would do, CheckResources says so; else one replica shows what is wrong.
  v1::JobSpec resized;
  if (IsElastic(spec)) {
    const std::vector<int32_t> sizes = SizesOf(spec);
    resized = sizes.empty() ? OneReplica(spec) : AtSize(spec, sizes.back());
  }
  const v1::JobSpec& largest = IsElastic(spec) ? resized : spec;
  for (parallel::LayoutProblem& problem :
       parallel::FindProblems(LayoutOf(largest), SizeOf(spec.engine().model()),
                              {.ranks = largest.resources().ranks()})) {
    check.Add(problem.field, problem.message);
  }
  CheckPipelineBlocks(spec, check);
  CheckZeroBubble(spec, check);
  CheckTensorShares(parallel, check);
  CheckOrder(parallel, check);
  const std::string offload = "engine.parallel.offload.optimizer";
  const double share = parallel.offload().optimizer();
  if (parallel.offload().activations() &&
      parallel.pipeline_schedule() == v1::PIPELINE_SCHEDULE_ZERO_BUBBLE) {
    check.Add("engine.parallel.offload.activations",
              "does not go with pipeline_schedule zero_bubble, whose two backward passes need them "
              "twice; "
              "use 1f1b, gpipe or interleaved");
  }
  if (check.Finite(offload, share) && (share < 0 || share > 1)) {
    check.Add(offload, share, " is out of range; 0 to 1");
  }
}

void CheckPrecision(const v1::JobSpec& spec, Checker& check) {
  const v1::TrainingSpec& training = spec.engine().training();
  const auto* value = v1::Precision_descriptor()->FindValueByNumber(training.precision());
  if (value == nullptr) return;  // CheckKnown reports it
  if (training.precision() != v1::PRECISION_FP32 &&
      spec.resources().device() != v1::DEVICE_KIND_CUDA) {
    check.Add("engine.training.precision", ShortEnumName(*value), " needs resources.device: cuda");
  }
  if (!training.has_loss_scale()) return;
  const std::string path = "engine.training.loss_scale";
  if (training.precision() != v1::PRECISION_FP16) {
    check.Add(path, "is for precision fp16, not ", ShortEnumName(*value));
  }
  const double initial = training.loss_scale().initial();
  if (check.Finite(path + ".initial", initial) && (initial < 1 || initial > kLossScaleMax)) {
    check.Add(
        path + ".initial", initial,
        initial < 1 ? " is less than 1" : " is more than 2^40: the first steps would be skipped");
  }
  check.InRange(path + ".growth_interval", training.loss_scale().growth_interval(), 1);
  check.InRange(path + ".hysteresis", training.loss_scale().hysteresis(), 1);
}

void CheckRecomputeRest(const v1::TrainingSpec& training, Checker& check) {
  if (training.recompute_rest() == v1::RECOMPUTE_NONE) return;
  const std::string path = "engine.training.recompute_rest";
  if (training.recompute_rest() == v1::RECOMPUTE_FULL) {
    check.Add(path, "full is what the first recompute_blocks do; use selective or none");
  } else if (training.recompute() != v1::RECOMPUTE_FULL || training.recompute_blocks() == 0) {
    check.Add(path,
              "is of the blocks behind the first recompute_blocks, which recompute full; set "
              "recompute: full and recompute_blocks, or use none");
  }
}

void CheckRecomputeBlocks(const v1::JobSpec& spec, Checker& check) {
  const std::string path = "engine.training.recompute_blocks";
  const int64_t blocks = spec.engine().training().recompute_blocks();
  if (!check.NotNegative(path, blocks) || blocks == 0) return;
  if (spec.engine().training().recompute() == v1::RECOMPUTE_NONE) {
    check.Add(path, blocks,
              " blocks are to recompute, but recompute is none; set it to selective or "
              "full");
  }
  if (spec.engine().parallel().offload().activations()) {
    check.Add(path,
              "does not go with parallel.offload.activations, which takes what every block keeps "
              "by turns into the same memory; use 0");
  }
}

void CheckCompression(const v1::JobSpec& spec, Checker& check) {
  const v1::TrainingSpec& training = spec.engine().training();
  const v1::GradientCompressionSpec& compression = training.gradient_compression();
  const std::string path = "engine.training.gradient_compression";
  if (compression.method_case() == v1::GradientCompressionSpec::METHOD_NOT_SET) {
    check.Add(path, "required: one of top_k, sign");
  }
  if (compression.has_top_k()) {
    const v1::TopKSpec& top_k = compression.top_k();
    const double density = top_k.density(), momentum = top_k.momentum();
    if (check.Finite(path + ".top_k.density", density) && (density <= 0 || density > 1)) {
      check.Add(path + ".top_k.density", density, " is out of range; above 0, at most 1");
    }
    if (check.Finite(path + ".top_k.momentum", momentum) && (momentum < 0 || momentum >= 1)) {
      check.Add(path + ".top_k.momentum", momentum, " is out of range; 0 to less than 1");
    }
    check.NotNegative(path + ".top_k.warmup_steps", top_k.warmup_steps());
  }
  check.NotNegative(path + ".min_elements", compression.min_elements());
  if (training.precision() == v1::PRECISION_FP16) {
    check.Add(path,
              "would keep residuals in units of fp16's changing loss scale; use precision: bf16");
  }
  if (training.gradient_reduction() == v1::GRADIENT_REDUCTION_BF16) {
    check.Add(path, "sends fp32 values; use gradient_reduction: fp32");
  }
}

void CheckAdamW(const v1::AdamWSpec& adamw, Checker& check) {
  const std::string path = "engine.training.optimizer.adamw.";
  check.Positive(path + "lr", adamw.lr());
  check.NotNegative(path + "weight_decay", adamw.weight_decay());
  check.Positive(path + "eps", adamw.eps());
  check.NotNegative(path + "clip_norm", adamw.clip_norm());
  if (adamw.betas_size() != 2) {
    check.Add(path + "betas", adamw.betas_size(), " values; expected two, [beta1, beta2]");
    return;
  }
  for (int i = 0; i < adamw.betas_size(); ++i) {
    const std::string beta = absl::StrCat(path, "betas[", i, "]");
    if (!check.Finite(beta, adamw.betas(i))) continue;
    if (adamw.betas(i) < 0 || adamw.betas(i) >= 1) {
      check.Add(beta, adamw.betas(i), " is out of range; 0 to less than 1");
    }
  }
}

void CheckSchedule(const v1::TrainingSpec& training, Checker& check) {
  const v1::ScheduleSpec& schedule = training.schedule();
  const std::string path = "engine.training.schedule.";
  if (schedule.has_constant()) {
    check.NotNegative(path + "constant.warmup_steps", schedule.constant().warmup_steps());
  }
  if (!schedule.has_cosine() && !schedule.has_linear()) return;
  const std::string kind = path + (schedule.has_cosine() ? "cosine." : "linear.");
  const v1::DecaySpec& decay = schedule.has_cosine() ? schedule.cosine() : schedule.linear();
  const double lr = training.optimizer().adamw().lr();
  const bool warmup = check.NotNegative(kind + "warmup_steps", decay.warmup_steps());
  if (check.NotNegative(kind + "min_lr", decay.min_lr()) && std::isfinite(lr) &&
      decay.min_lr() > lr) {
    check.Add(kind + "min_lr", decay.min_lr(), " is larger than lr (", lr, ")");
  }
  if (check.NotNegative(kind + "decay_steps", decay.decay_steps()) && warmup &&
      decay.decay_steps() > 0 && decay.decay_steps() <= decay.warmup_steps()) {
    check.Add(kind + "decay_steps", decay.decay_steps(), " is not larger than warmup_steps (",
              decay.warmup_steps(), ")");
  }
}

void CheckTraining(const v1::JobSpec& spec, Checker& check) {
  const v1::TrainingSpec& training = spec.engine().training();
  const bool steps = check.InRange("engine.training.steps", training.steps(), 1);
  const bool global = check.InRange("engine.training.global_batch", training.global_batch(), 1);
  check.InRange("engine.training.micro_batch", training.micro_batch(), 1);
  int64_t tokens = 0;
  const int64_t length = spec.engine().model().sequence_length();
  if (steps && global && length >= 1 &&
      (MultiplyOverflows(training.global_batch(), length, &tokens) ||
       MultiplyOverflows(tokens, training.steps(), &tokens))) {
    check.Add("engine.training.steps", "steps x global_batch x sequence_length (", training.steps(),
              " x ", training.global_batch(), " x ", length, ") is too large to count the tokens");
  }
  CheckPrecision(spec, check);
  check.NotNegative("engine.training.evaluate_every", training.evaluate_every());
  check.NotNegative("engine.training.evaluate_samples", training.evaluate_samples());
  check.NotNegative("engine.training.verify_every", training.verify_every());
  const std::string dropout = "engine.training.dropout";
  if (check.Finite(dropout, training.dropout()) &&
      (training.dropout() < 0 || training.dropout() >= 1)) {
    check.Add(dropout, training.dropout(),
              " is out of range; a probability from 0 (off) to less than 1, such as 0.1");
  }
  if (training.has_gradient_compression()) CheckCompression(spec, check);
  CheckRecomputeBlocks(spec, check);
  CheckRecomputeRest(spec.engine().training(), check);
  if (training.optimizer().has_adamw()) {
    CheckAdamW(training.optimizer().adamw(), check);
    CheckSchedule(training, check);
  } else {
    check.Add("engine.training.optimizer", "required; adamw is the one there is");
  }
}

}  // namespace

void CheckEngine(const v1::JobSpec& spec, Checker& check) {
  const v1::EngineSpec& engine = spec.engine();
  if (engine.has_model()) {
    CheckModel(engine, check);
  } else {
    check.Add("engine.model", "required");
  }
  if (!engine.model().initialize_from().empty()) {
    check.Path("engine.model.initialize_from", engine.model().initialize_from(), spec);
  }
  CheckSources("engine.data.train", engine.data().train(), spec, check);
  if (engine.data().train().empty())
    check.Add("engine.data.train", "required: at least one data set");
  CheckSources("engine.data.validation", engine.data().validation(), spec, check);
  const std::string& tokenizer = engine.data().tokenizer();
  const bool digest = tokenizer.size() == 64 &&
                      tokenizer.find_first_not_of("0123456789abcdef") == std::string::npos;
  if (!tokenizer.empty() && tokenizer != "bytes" && !digest) {
    check.Add("engine.data.tokenizer", Quoted(tokenizer),
              " is neither bytes nor a SHA-256 in 64 lower-case hexadecimal digits");
  }
  CheckParallel(spec, check);
  if (engine.has_training()) {
    CheckTraining(spec, check);
  } else {
    check.Add("engine.training", "required");
  }
}

}  // namespace muster::spec
