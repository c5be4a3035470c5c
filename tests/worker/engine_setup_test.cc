#include "worker/rank/engine_setup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "parallel/comm/communicator.h"
#include "parallel/model/families/family.h"
#include "parallel/model/language_model_sizes.h"
#include "parallel/model/layer_kind.h"
#include "parallel/train/failure.h"
#include "proto/spec/presets.h"
#include "proto/spec/spec.h"
#include "tests/support/status_matchers.h"
#include "worker/rank/agreement.h"
#include "worker/rank/arithmetic.h"
#include "worker/rank/balance.h"
#include "worker/rank/engine_spec.h"
#include "worker/rank/failure_cause.h"
#include "worker/rank/job_plan.h"
#include "worker/rank/memory_check.h"
#include "worker/rank/stage_blocks.h"

namespace muster::worker {
namespace {

v1::ModelSpec WithDefaults(const v1::ModelSpec& model) {
  v1::JobSpec spec;
  *spec.mutable_engine()->mutable_model() = model;
  spec::ApplyDefaults(spec);
  return spec.engine().model();
}

TEST(Presets, AreModelsOfThePublishedSizes) {
  const std::map<std::string, int64_t> published = {
      {"gpt2-124m", 124'439'808},     {"gpt2-350m", 354'823'168},    {"gpt2-774m", 774'030'080},
      {"gpt2-1558m", 1'557'611'200},  {"llama-1b", 1'235'814'400},   {"llama-3b", 3'212'749'824},
      {"llama-8b", 8'030'261'248},    {"llama-70b", 70'553'706'496}, {"mamba2-130m", 128'989'632},
      {"mamba2-370m", 368'346'624},   {"mamba2-780m", 780'161'280},  {"mamba2-1.3b", 1'343'757'312},
      {"mamba2-2.7b", 2'702'599'680}, {"hybrid-1b", 1'046'931'904},  {"hybrid-8b", 8'100'852'736}};
  ASSERT_EQ(spec::PresetNames().size(), published.size());
  for (const auto& [name, parameters] : published) {
    ASSERT_NE(spec::FindPreset(name), nullptr) << name;
    ASSERT_OK_AND_ASSIGN(const auto model,
                         parallel::MakeModel(Describe(WithDefaults(*spec::FindPreset(name)))));
    EXPECT_EQ(model->parameters().elements(), parameters) << name;
  }
}

// Those who place jobs know of a model's layers what the engine builds, without linking it.
TEST(Presets, TotalsOfTheirLayers_AreThoseOfTheEngine) {
  for (const std::string& name : spec::PresetNames()) {
    SCOPED_TRACE(name);
    const v1::ModelSpec model = WithDefaults(*spec::FindPreset(name));
    const spec::LayerTotals totals = spec::TotalsOf(model);
    const parallel::LanguageModelConfig config = parallel::ConfigOf(Describe(model));
    EXPECT_EQ(totals.layers, parallel::LayersOf(config));
    int64_t weights = 0, keys = 0, states = 0;
    for (const auto& block : config.blocks) {
      for (const parallel::LayerKind* kind : block) {
        weights += kind->size(config).weights;
        if (kind == &parallel::kAttentionLayer) keys += 2 * config.kv_heads * HeadWidth(config);
        if (kind == &parallel::kMamba2Layer) {
          const auto& mamba = config.mamba2;
          states += mamba.heads * (mamba.head_width * mamba.state + 1);
        }
      }
    }
    EXPECT_EQ(totals.weights, weights);
    EXPECT_EQ(totals.key_columns, keys);
    EXPECT_EQ(totals.state_numbers, states);
  }
}

TEST(Presets, LlamaOverEightTensorParallelRanks_LeavesEachAnEighth) {
  parallel::ModelParallel part;
  part.tensor_size = 8;
  part.tensor_rank = 3;
  ASSERT_OK_AND_ASSIGN(const auto model,
                       parallel::MakeModel(Describe(*spec::FindPreset("llama-70b")), part));
  EXPECT_NEAR(static_cast<double>(model->parameters().elements()), 70'553'706'496 / 8.0, 2e7);
}

// Computed by hand: 6 FLOPs for each of the weights, which are 12 blocks of 12 x 768^2 and the
// head's 50257 x 768, and those of attention.
TEST(Arithmetic, CountsGemmsCausalAttentionAndRecomputation) {
  const v1::ModelSpec spec = *spec::FindPreset("gpt2-124m");
  const double block = 12.0 * 768 * 768, attention = 1024.0 * 768;
  const double counted = 6 * (12 * block + 50257.0 * 768) + 6 * 12 * attention;
  for (const auto recompute :
       {parallel::Recompute::kNone, parallel::Recompute::kSelective, parallel::Recompute::kFull}) {
    ASSERT_OK_AND_ASSIGN(const auto model,
                         parallel::MakeModel(Describe(spec), {.recompute = recompute}));
    const auto of = [&](const char* device, parallel::Precision precision, bool tf32) {
      return Arithmetic::Of(*model, device, precision, tf32, 4);
    };
    const Arithmetic h200 = of("cuda:0 NVIDIA H200 GPU-1", parallel::Precision::kBf16, false);
    EXPECT_EQ(h200.model_flops, counted);
    // All of forward but each block's last GEMM.
    const bool full = recompute == parallel::Recompute::kFull;
    EXPECT_EQ(h200.hardware_flops,
              counted + (full ? 12 * (2 * block * 8 / 12 + 2 * attention) : 0));
    EXPECT_EQ(h200.peak_flops, 989e12);
    // Tokens per second of a run on four H200s.
    EXPECT_NEAR(h200.Utilization(h200.model_flops, 2351957, 1), 0.474, 5e-4);
    EXPECT_EQ(of("cuda:0 NVIDIA H200 GPU-1", parallel::Precision::kFp32, true).peak_flops,
              494.5e12);
    EXPECT_EQ(of("cuda:0 NVIDIA H200 GPU-1", parallel::Precision::kFp32, false).peak_flops, 67e12);
    EXPECT_EQ(of("cuda:0 NVIDIA H100 PCIe", parallel::Precision::kFp16, false).peak_flops, 756e12);
    EXPECT_THAT(h200.ToText(), ::testing::HasSubstr("(4 x 989 TFLOP/s, dense"));
    const Arithmetic other = of("cuda:1 NVIDIA Toy GPU-2", parallel::Precision::kBf16, false);
    EXPECT_EQ(other.Utilization(other.model_flops, 1000, 1), 0);
    EXPECT_THAT(other.ToText(), ::testing::HasSubstr("No MFU: what cuda:1 NVIDIA Toy GPU-2 does"));
    const Arithmetic cpu = of("cpu", parallel::Precision::kFp32, false);
    EXPECT_THAT(cpu.ToText(), ::testing::Not(::testing::HasSubstr("MFU")));
    EXPECT_EQ(cpu.Utilization(cpu.model_flops, 1000, 1), 0);
  }
}

TEST(PartOf, HeadsThatNoKernelOfTheDeviceTakes_AreRefusedWithTheFieldAndWhatWouldDo) {
  v1::JobSpec spec;
  v1::ModelSpec& model = *spec.mutable_engine()->mutable_model();
  model = *spec::FindPreset("gpt2-124m");
  model.set_hidden(4096);
  const auto status = [&](int heads, v1::DeviceKind device) {
    model.set_heads(heads);
    spec.mutable_resources()->set_device(device);
    return PartOf(spec, parallel::PerAxis(0, 0, 0, 0)).status();
  };
  EXPECT_OK(status(16, v1::DEVICE_KIND_CUDA));
  EXPECT_OK(status(8, v1::DEVICE_KIND_CPU));
  const absl::Status refused = status(8, v1::DEVICE_KIND_CUDA);
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_EQ(CauseOf(refused), v1::CAUSE_USER_ERROR);
  EXPECT_THAT(refused.message(), ::testing::AllOf(::testing::HasSubstr("engine.model.heads"),
                                                  ::testing::HasSubstr("512 columns wide"),
                                                  ::testing::HasSubstr("at most 256")));
}

TEST(KernelWarnings, WideHeadsIn16BitsOnGpus_AreSaidToBeSlow) {
  v1::JobSpec spec;
  v1::ModelSpec& model = *spec.mutable_engine()->mutable_model();
  model.set_hidden(4096);
  spec.mutable_resources()->set_device(v1::DEVICE_KIND_CUDA);
  v1::TrainingSpec& training = *spec.mutable_engine()->mutable_training();
  training.set_precision(v1::PRECISION_BF16);
  model.set_heads(32);
  EXPECT_THAT(KernelWarnings(spec), ::testing::IsEmpty());
  model.set_heads(16);
  EXPECT_THAT(KernelWarnings(spec),
              ::testing::ElementsAre(::testing::HasSubstr("256 columns wide")));
  training.set_precision(v1::PRECISION_FP32);
  EXPECT_THAT(KernelWarnings(spec), ::testing::IsEmpty());
  training.set_precision(v1::PRECISION_BF16);
  spec.mutable_resources()->set_device(v1::DEVICE_KIND_CPU);
  EXPECT_THAT(KernelWarnings(spec), ::testing::IsEmpty());
}

TEST(KernelWarnings, ScansThatNoFusedKernelTakesOnGpus_AreSaidToBeSlow) {
  v1::JobSpec spec;
  v1::ModelSpec& model = *spec.mutable_engine()->mutable_model();
  model.set_family(v1::MODEL_FAMILY_MAMBA2);
  model.set_hidden(256);
  model.set_layers(2);
  spec.mutable_resources()->set_device(v1::DEVICE_KIND_CUDA);
  v1::TrainingSpec& training = *spec.mutable_engine()->mutable_training();
  const auto warnings = [&](v1::Precision precision) {
    training.set_precision(precision);
    v1::JobSpec filled = spec;
    spec::ApplyDefaults(filled);
    return KernelWarnings(filled);
  };
  const auto names = [](const char* field) {
    return ::testing::ElementsAre(
        ::testing::AllOf(::testing::StartsWith(field), ::testing::HasSubstr("multiples of 8")));
  };
  EXPECT_THAT(warnings(v1::PRECISION_BF16), ::testing::IsEmpty());
  EXPECT_THAT(warnings(v1::PRECISION_FP16), ::testing::IsEmpty());
  EXPECT_THAT(warnings(v1::PRECISION_FP32), names("engine.training.precision"));
  EXPECT_THAT(warnings(v1::PRECISION_TF32), names("engine.training.precision"));
  model.mutable_mamba()->set_state(100);
  EXPECT_THAT(warnings(v1::PRECISION_BF16), names("engine.model.mamba.state: with 100 columns"));
  model.mutable_mamba()->set_head_width(20);
  EXPECT_THAT(warnings(v1::PRECISION_BF16), names("engine.model.mamba.head_width: with 20"));
  spec.mutable_resources()->set_device(v1::DEVICE_KIND_CPU);
  EXPECT_THAT(warnings(v1::PRECISION_FP32), ::testing::IsEmpty());
}

TEST(PartOf, AnyOrder_IsTakenFromTheSpec) {
  v1::JobSpec spec;
  for (const bool allowed : {false, true}) {
    spec.mutable_engine()->mutable_training()->set_any_order(allowed);
    ASSERT_OK_AND_ASSIGN(const parallel::ModelParallel part, PartOf(spec, parallel::PerAxis()));
    EXPECT_EQ(part.deterministic, !allowed);
  }
}

TEST(PartOf, Dropout_IsTakenFromTheSpec) {
  v1::JobSpec spec;
  ASSERT_OK_AND_ASSIGN(parallel::ModelParallel part, PartOf(spec, parallel::PerAxis()));
  EXPECT_EQ(part.dropout, 0);
  spec.mutable_engine()->mutable_training()->set_dropout(0.25);
  ASSERT_OK_AND_ASSIGN(part, PartOf(spec, parallel::PerAxis()));
  EXPECT_EQ(part.dropout, 0.25);
}

v1::JobSpec SmallJob(int layers) {
  v1::JobSpec spec;
  spec.set_name("small");
  spec.set_working_directory("/");
  v1::EngineSpec& engine = *spec.mutable_engine();
  v1::ModelSpec& model = *engine.mutable_model();
  model.set_family(v1::MODEL_FAMILY_LLAMA);
  model.set_layers(layers);
  model.set_hidden(48);
  model.set_heads(6);
  model.set_kv_heads(3);
  model.set_ffn(80);
  model.set_vocab(131);
  model.set_sequence_length(16);
  engine.mutable_data()->add_train()->set_path("/data/text");
  engine.mutable_training()->set_steps(1);
  engine.mutable_training()->set_global_batch(4);
  engine.mutable_training()->set_micro_batch(2);
  engine.mutable_training()->mutable_optimizer()->mutable_adamw()->set_lr(1e-3);
  engine.mutable_parallel()->set_balance(v1::BALANCE_MEASURED);
  return spec;
}

v1::JobSpec Split(v1::JobSpec spec, int pipeline, int context, int tensor) {
  v1::ParallelSpec& parallel = *spec.mutable_engine()->mutable_parallel();
  parallel.set_pipeline(pipeline);
  parallel.set_context(context);
  parallel.set_tensor(tensor);
  spec.mutable_resources()->set_ranks(pipeline * context * tensor);
  spec::ApplyDefaults(spec);
  EXPECT_OK(spec::Validate(spec));
  return spec;
}

TEST(NcclOptionsOf, ThreadBlocks_AreTakenFromTheSpecAndCountedInItsMemory) {
  v1::JobSpec spec = SmallJob(2);
  spec.mutable_resources()->set_device(v1::DEVICE_KIND_CUDA);
  spec.mutable_resources()->set_ranks(2);
  spec::ApplyDefaults(spec);
  const auto libraries = [&] {
    const auto plan = PlanJob(spec);
    EXPECT_OK(plan);
    return plan->ranks[0].memory.device.back().bytes;
  };
  EXPECT_EQ(NcclOptionsOf(spec).thread_blocks_max, 0);  // NCCL's own choice
  const int64_t with_all = libraries();
  spec.mutable_engine()->mutable_parallel()->set_nccl_ctas(8);
  EXPECT_OK(spec::Validate(spec));
  EXPECT_EQ(NcclOptionsOf(spec).thread_blocks_max, 8);
  // Two communicators, of the world and of its gradients.
  EXPECT_EQ(with_all - libraries(), int64_t{2} * 24 * 30 << 20);
}

// Pinning more memory than the host has would make the kernel kill processes.
TEST(CheckFits, OffloadThatTheHostCannotHold_IsRefusedWithWhatItTakesAndWhatFits) {
  v1::JobSpec spec = SmallJob(2);
  spec.mutable_resources()->set_device(v1::DEVICE_KIND_CUDA);
  spec.mutable_resources()->set_ranks(1);
  spec.mutable_engine()->mutable_training()->set_precision(v1::PRECISION_BF16);
  spec.mutable_engine()->mutable_parallel()->mutable_offload()->set_optimizer(1);
  spec::ApplyDefaults(spec);
  ASSERT_OK(spec::Validate(spec));
  ASSERT_OK_AND_ASSIGN(const JobPlan plan, PlanJob(spec));
  const parallel::MemoryUse& use = plan.ranks[0].memory;
  v1::RankAssignment assignment;
  *assignment.mutable_spec() = spec;
  assignment.set_local_ranks(2);
  const kernels::DeviceMemory device = {int64_t{80} << 30, int64_t{79} << 30};
  const auto check = [&](int64_t free, std::optional<int64_t> host) {
    return CheckFits(assignment, use, parallel::PerAxis(), kernels::DeviceKind::kCuda,
                     "cuda:0 NVIDIA H200 GPU-1", {device.total, free}, host);
  };
  EXPECT_OK(check(device.free, use.host_bytes()));
  EXPECT_OK(check(device.free, std::nullopt));
  assignment.mutable_spec()->mutable_resources()->set_share(0.5);
  assignment.set_device_memory_limit_bytes(NeededBytes(use, kernels::DeviceKind::kCuda) - 1);
  const absl::Status beyond = check(device.free, std::nullopt);
  EXPECT_EQ(beyond.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(beyond.message()),
              ::testing::HasSubstr("of 80.00 GiB for a resources.share of 0.5"));
  assignment.set_device_memory_limit_bytes(NeededBytes(use, kernels::DeviceKind::kCuda));
  EXPECT_OK(check(device.free, std::nullopt));
  assignment.mutable_spec()->mutable_resources()->clear_share();
  assignment.clear_device_memory_limit_bytes();
  const absl::Status refused = check(device.free, use.host_bytes() - 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CauseOf(refused), v1::CAUSE_OUT_OF_MEMORY);
  EXPECT_THAT(std::string(refused.message()),
              ::testing::AllOf(::testing::HasSubstr(BytesText(use.host_bytes())),
                               ::testing::HasSubstr("of the host's memory"),
                               ::testing::HasSubstr("2 ranks on this machine"),
                               ::testing::HasSubstr("optimizer "),
                               ::testing::HasSubstr("engine.parallel.offload.optimizer=0")));
  const absl::Status full = check(int64_t{1} << 20, use.host_bytes());
  EXPECT_THAT(std::string(full.message()),
              ::testing::AllOf(::testing::HasSubstr("cuda:0 NVIDIA H200 GPU-1 has "),
                               ::testing::HasSubstr("free of 80.00 GiB (other processes hold 79."),
                               ::testing::HasSubstr("libraries ")));
  // The driver's memory and our own are not blamed on other processes.
  const kernels::DeviceMemory small = {int64_t{600} << 20, int64_t{90} << 20};
  EXPECT_THAT(std::string(CheckFits(assignment, use, parallel::PerAxis(),
                                    kernels::DeviceKind::kCuda, "cuda:0", small, std::nullopt)
                              .message()),
              ::testing::AllOf(::testing::HasSubstr("free of 600.0 MiB:"),
                               ::testing::Not(::testing::HasSubstr("other processes"))));
}

// A head that takes as long as three blocks counts as three.
TEST(Balance, Stages_FollowMeasuredLayers) {
  v1::JobSpec spec = Split(SmallJob(9), 2, 1, 1);
  ASSERT_OK(Even({{.embedding = 1e-6, .block = 1e-3, .head = 2e-3},
                  {.embedding = 1e-6, .block = 1e-3, .head = 4e-3}},
                 spec));
  EXPECT_THAT(spec.engine().parallel().pipeline_blocks(), ::testing::ElementsAre(6, 3));
  // Numbers that the spec gives stay.
  ASSERT_OK(Even({{.embedding = 1, .block = 1e-3, .head = 0}}, spec));
  EXPECT_THAT(spec.engine().parallel().pipeline_blocks(), ::testing::ElementsAre(6, 3));
}

TEST(Balance, SharesOfTensorRanks_FollowTheSlowestOfEachPlace) {
  const auto shares = [](const std::vector<RankMeasure>& ranks) {
    v1::JobSpec spec = Split(SmallJob(2), 1, 1, 3);
    EXPECT_OK(Even(ranks, spec));
    EXPECT_OK(spec::Validate(spec));
    const auto& numbers = spec.engine().parallel().tensor_shares();
    return std::vector<double>(numbers.begin(), numbers.end());
  };
  // Noise of two percent changes nothing.
  EXPECT_TRUE(shares({{.tensor = 0, .share = 100, .block = 1.00},
                      {.tensor = 1, .share = 100, .block = 1.02},
                      {.tensor = 2, .share = 100, .block = 0.99}})
                  .empty());
  // Four percent are more than noise.
  EXPECT_EQ(shares({{.tensor = 0, .share = 100, .block = 1.00},
                    {.tensor = 1, .share = 100, .block = 1.04},
                    {.tensor = 2, .share = 100, .block = 1.02}}),
            (std::vector<double>{128, 123, 128}));
  // Twice the share in twice the time is the same speed.
  EXPECT_EQ(shares({{.tensor = 0, .share = 200, .block = 2},
                    {.tensor = 1, .share = 100, .block = 4},
                    {.tensor = 2, .share = 100, .block = 1},
                    {.tensor = 0, .share = 200, .block = 4},
                    {.tensor = 1, .share = 100, .block = 1},
                    {.tensor = 2, .share = 100, .block = 1}}),
            (std::vector<double>{64, 32, 128}));
  // Every rank gets some share, however slow it is.
  EXPECT_EQ(shares({{.tensor = 0, .share = 1, .block = 1000},
                    {.tensor = 1, .share = 1, .block = 1},
                    {.tensor = 2, .share = 1, .block = 1}}),
            (std::vector<double>{1, 128, 128}));
}

// Shares of nine and three of twelve heads cannot be divided by two context ranks: the job must
// stay valid.
TEST(Balance, SharesThatAttentionCannotTake_StayEqual) {
  v1::JobSpec spec = SmallJob(2);
  spec.mutable_engine()->mutable_model()->set_hidden(48);
  spec.mutable_engine()->mutable_model()->set_heads(12);
  spec.mutable_engine()->mutable_model()->set_kv_heads(12);
  spec = Split(spec, 1, 2, 2);
  spec.mutable_engine()->mutable_parallel()->set_context_method(v1::CONTEXT_METHOD_ALL_TO_ALL);
  ASSERT_OK(spec::Validate(spec));
  const std::vector<RankMeasure> ranks = {{.tensor = 0, .share = 1, .block = 1},
                                          {.tensor = 1, .share = 1, .block = 3}};
  ASSERT_OK_AND_ASSIGN(const std::string given_up, Even(ranks, spec));
  EXPECT_THAT(spec.engine().parallel().tensor_shares(), ::testing::IsEmpty());
  EXPECT_THAT(given_up, ::testing::HasSubstr("keep equal shares, since by speed"));
  EXPECT_THAT(given_up, ::testing::HasSubstr("all_to_all spreads 9 heads"));
  // Ring attention takes any number of heads.
  spec.mutable_engine()->mutable_parallel()->set_context_method(v1::CONTEXT_METHOD_RING);
  ASSERT_OK(Even(ranks, spec));
  EXPECT_THAT(spec.engine().parallel().tensor_shares(), ::testing::ElementsAre(128, 43));
}

// The faster rank's larger share must fit its memory; the other rank takes what it cannot hold.
TEST(Balance, RankWithLittleMemory_GetsASmallerShare) {
  v1::JobSpec spec = SmallJob(2);
  spec.mutable_engine()->mutable_model()->set_heads(24);
  spec.mutable_engine()->mutable_model()->set_kv_heads(24);
  spec.mutable_engine()->mutable_model()->set_ffn(1000);
  spec = Split(spec, 1, 1, 2);
  const auto needed = [](const v1::JobSpec& of, int tensor) {
    const auto bytes = RankBytes(of, parallel::PerAxis(0, 0, 0, tensor));
    EXPECT_OK(bytes);
    return bytes.value_or(0);
  };
  std::vector<RankMeasure> ranks = {{.tensor = 0, .share = 100, .block = 1},
                                    {.tensor = 1, .share = 100, .block = 2}};
  v1::JobSpec by_speed = spec;
  ASSERT_OK_AND_ASSIGN(std::string given_up, Even(ranks, by_speed));
  EXPECT_EQ(given_up, "");
  EXPECT_THAT(by_speed.engine().parallel().tensor_shares(), ::testing::ElementsAre(128, 64));
  const int64_t wanted = needed(by_speed, 0);

  ranks[0].memory_bytes = wanted * 9 / 10;
  ranks[1].memory_bytes = wanted;
  v1::JobSpec limited = spec;
  ASSERT_OK_AND_ASSIGN(given_up, Even(ranks, limited));
  EXPECT_OK(spec::Validate(limited));
  EXPECT_LE(needed(limited, 0), ranks[0].memory_bytes);
  EXPECT_GT(needed(limited, 0), ranks[0].memory_bytes * 9 / 10);  // no smaller than needed
  EXPECT_THAT(given_up, ::testing::HasSubstr(absl::StrCat("stage 0, tensor rank 0 would need ",
                                                          BytesText(wanted), " of its ",
                                                          BytesText(ranks[0].memory_bytes))));
  // The same with ranks that are equally fast.
  ranks[1].block = 1;
  v1::JobSpec equal = spec;
  ranks[0].memory_bytes = needed(spec, 0) * 9 / 10;
  ASSERT_OK_AND_ASSIGN(given_up, Even(ranks, equal));
  EXPECT_LE(needed(equal, 0), ranks[0].memory_bytes);
  EXPECT_NE(given_up, "");
  // Where nothing fits, times alone decide; SetUpEngine refuses the spec later.
  ranks[0].memory_bytes = ranks[1].memory_bytes = 1000;
  ranks[1].block = 2;
  v1::JobSpec none = spec;
  ASSERT_OK_AND_ASSIGN(given_up, Even(ranks, none));
  EXPECT_EQ(given_up, "");
  EXPECT_THAT(none.engine().parallel().tensor_shares(), ::testing::ElementsAre(128, 64));
}

TEST(Balance, StageWithLittleMemory_GetsFewerBlocks) {
  v1::JobSpec spec = Split(SmallJob(9), 2, 1, 1);
  std::vector<RankMeasure> ranks = {{.stage = 0, .embedding = 1e-6, .block = 1e-3, .head = 2e-3},
                                    {.stage = 1, .embedding = 1e-6, .block = 1e-3, .head = 4e-3}};
  v1::JobSpec by_time = spec;
  ASSERT_OK(Even(ranks, by_time));
  EXPECT_THAT(by_time.engine().parallel().pipeline_blocks(), ::testing::ElementsAre(6, 3));
  ASSERT_OK_AND_ASSIGN(const int64_t wanted, RankBytes(by_time, parallel::PerAxis(0, 0, 0, 0)));
  ranks[0].memory_bytes = wanted - 1;
  ASSERT_OK_AND_ASSIGN(const std::string given_up, Even(ranks, spec));
  EXPECT_THAT(spec.engine().parallel().pipeline_blocks(), ::testing::ElementsAre(5, 4));
  EXPECT_THAT(given_up, ::testing::HasSubstr("by time alone stage 0, tensor rank 0 would need"));
}

v1::JobSpec HybridJob(const std::string& pattern) {
  v1::JobSpec spec = SmallJob(0);
  v1::ModelSpec& model = *spec.mutable_engine()->mutable_model();
  model.set_family(v1::MODEL_FAMILY_HYBRID);
  model.set_pattern(pattern);
  model.mutable_mamba()->set_head_width(16);
  return spec;
}

// Three blocks of a millisecond and three of three, in either order.
TEST(Balance, StagesOfBlocksThatDiffer_FollowTheTimeOfEachKind) {
  // In order of first appearance: "M-", then "*-".
  std::vector<RankMeasure> ranks = {
      {.embedding = 1e-6, .block = 4e-3, .head = 1e-6, .kinds = {1e-3, 3e-3}}};
  v1::JobSpec spec = Split(HybridJob("M-M-M-*-*-*-"), 2, 1, 1);
  ASSERT_OK(Even(ranks, spec));
  EXPECT_THAT(spec.engine().parallel().pipeline_blocks(), ::testing::ElementsAre(4, 2));
  spec = Split(HybridJob("*-*-*-M-M-M-"), 2, 1, 1);
  ranks[0].kinds = {3e-3, 1e-3};
  ASSERT_OK(Even(ranks, spec));
  EXPECT_THAT(spec.engine().parallel().pipeline_blocks(), ::testing::ElementsAre(2, 4));
}

// What plans of deep hybrids rely on: they ask once for all ranges of a key.
TEST(StageBlocks, RangesOfTheSameKindsInTheSameOrder_NeedTheSameMemory) {
  v1::JobSpec spec = Split(HybridJob("M-*-MM-*-MM-*-M"), 3, 1, 1);
  spec.mutable_engine()->mutable_training()->set_recompute(v1::RECOMPUTE_SELECTIVE);
  spec.mutable_engine()->mutable_training()->set_recompute_blocks(2);
  ASSERT_OK(spec::Validate(spec));
  const std::vector<int> kinds = KindsOf(spec.engine().model());
  EXPECT_EQ(kinds, (std::vector<int>{0, 1, 2, 0, 1, 2, 0, 1, 2}));
  std::map<StageBlocks, int64_t> known;
  int ranges = 0;
  for (int stage = 0; stage < 3; ++stage) {
    for (int begin = 0; begin < 11; ++begin) {
      for (int end = begin + 1; end <= 11; ++end) {
        const auto bytes =
            RankBytes(spec, parallel::PerAxis(stage, 0, 0, 0), parallel::BlockRange{begin, end});
        if (!bytes.ok()) continue;  // a stage without the blocks that it needs
        ++ranges;
        const auto [entry, added] =
            known.try_emplace(StageBlocksOf({stage, begin, end}, kinds), *bytes);
        EXPECT_EQ(entry->second, *bytes) << stage << ": " << begin << " to " << end;
      }
    }
  }
  EXPECT_GT(ranges, static_cast<int>(known.size()));
}

// Two ranks of which the first is 5/3 as fast: the shares of 128 and 77 become heads in proportion.
TEST(Balance, RanksOfAMamba2_GetHeadsBySpeed) {
  struct Held {
    int64_t heads, groups, rows;  // rows of B and C each
    bool operator==(const Held&) const = default;
  };
  const auto held = [](int heads, int groups) {
    v1::JobSpec spec = SmallJob(2);
    v1::ModelSpec& model = *spec.mutable_engine()->mutable_model();
    model.Clear();
    model.set_family(v1::MODEL_FAMILY_MAMBA2);
    model.set_layers(2);
    model.set_hidden(96);
    model.set_vocab(131);
    model.set_sequence_length(16);
    model.mutable_mamba()->set_head_width(8);
    model.mutable_mamba()->set_heads(heads);
    model.mutable_mamba()->set_groups(groups);
    model.mutable_mamba()->set_state(4);
    spec = Split(spec, 1, 1, 2);
    EXPECT_OK(spec::Validate(spec));
    EXPECT_OK(Even(
        {{.tensor = 0, .share = 100, .block = 3}, {.tensor = 1, .share = 100, .block = 5}}, spec));
    EXPECT_THAT(spec.engine().parallel().tensor_shares(), ::testing::ElementsAre(128, 77));
    EXPECT_OK(spec::Validate(spec));
    std::vector<Held> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      const auto model_of_rank = BuildModel(spec, parallel::PerAxis(0, 0, 0, rank));
      EXPECT_OK(model_of_rank.status());
      if (!model_of_rank.ok()) return ranks;
      const parallel::Model::Shape& shape = (*model_of_rank)->shape();
      int64_t channels = 0;  // of the convolution: x, B and C
      const parallel::ParameterRegistry& parameters = (*model_of_rank)->parameters();
      for (parallel::ParameterId id = 0; id < parameters.size(); ++id) {
        if (parameters.at(id).name == "blocks.0.mamba.conv.bias") {
          channels += parameters.at(id).elements();
        }
      }
      int64_t heads = 0, groups = 0;
      for (const parallel::ScanPart& part : shape.own_scans) {
        heads += part.heads;
        groups += part.groups;
      }
      ranks.push_back({heads, groups, (channels - 8 * heads) / 2});
    }
    return ranks;
  };
  // One group: both ranks hold the rows of its B and C, 4 each.
  EXPECT_EQ(held(24, 1), (std::vector<Held>{{15, 1, 4}, {9, 1, 4}}));
  EXPECT_EQ(held(8, 1), (std::vector<Held>{{5, 1, 4}, {3, 1, 4}}));
  // Eight groups of three heads: five and three whole groups, with their B and C alone.
  EXPECT_EQ(held(24, 8), (std::vector<Held>{{15, 5, 20}, {9, 3, 12}}));
  // Two groups of twelve: three heads of the second are the first rank's, and both ranks have B and
  // C of both.
  EXPECT_EQ(held(24, 2), (std::vector<Held>{{15, 2, 8}, {9, 1, 8}}));
}

// One of each kind is timed, in whatever order the pattern has them.
TEST(Balance, RankOfAHybrid_TimesEveryKindOfBlock) {
  const v1::JobSpec spec = Split(HybridJob("MM-*--*-M"), 2, 1, 2);
  const auto device = kernels::MakeCpuDevice(1);
  ASSERT_OK_AND_ASSIGN(const RankMeasure rank,
                       MeasureRank(spec, parallel::PerAxis(1, 0, 0, 1), *device));
  ASSERT_EQ(rank.kinds.size(), 4u);  // "M", "M-", "*-" and "-"
  double sum = 0;
  for (const double seconds : rank.kinds) {
    EXPECT_GT(seconds, 0);
    sum += seconds;
  }
  EXPECT_NEAR(rank.block, sum, 1e-8);
  EXPECT_GT(rank.share, 0);
}

TEST(Balance, RanksOfEveryLayout_CanBeMeasured) {
  for (const bool documents : {false, true}) {
    v1::JobSpec spec = Split(SmallJob(4), 2, 2, 2);
    spec.mutable_engine()->mutable_data()->set_separate_documents(documents);
    spec.mutable_engine()->mutable_parallel()->set_sequence(true);
    spec.mutable_engine()->mutable_parallel()->set_tensor_overlap(v1::TENSOR_OVERLAP_CHUNKED);
    const auto device = kernels::MakeCpuDevice(1);
    ASSERT_OK_AND_ASSIGN(const RankMeasure rank,
                         MeasureRank(spec, parallel::PerAxis(1, 0, 1, 1), *device));
    EXPECT_EQ(rank.stage, 1);
    EXPECT_EQ(rank.tensor, 1);
    EXPECT_GT(rank.share, 0);
    EXPECT_GT(rank.embedding, 0);
    EXPECT_GT(rank.block, rank.embedding);
    EXPECT_GT(rank.head, rank.embedding);
    EXPECT_EQ(device->allocated_bytes(), 0);
  }
}

// What each of `ranks` is told, which adjust() may change.
std::vector<absl::Status> Agreement(
    int ranks, const std::function<void(int rank, v1::JobSpec& spec, uint64_t& data)>& adjust) {
  const auto world = parallel::MakeLocalCommunicators(ranks, absl::Seconds(60));
  std::vector<absl::Status> statuses(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      v1::JobSpec spec;
      spec.set_name("one");
      spec.mutable_engine()->mutable_training()->set_seed(77);
      for (const char* name : {"a", "b", "c", "d"}) (*spec.mutable_labels())[name] = name;
      uint64_t data = 7;
      adjust(rank, spec, data);
      const auto device = kernels::MakeCpuDevice(1);
      statuses[rank] = CheckAgreement(*world[rank], *device, spec, data);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

TEST(CheckAgreement, EqualSpecs_AreFoundEqualWhateverTheOrderOfTheirLabels) {
  for (const absl::Status& status : Agreement(3, [](int rank, v1::JobSpec&spec, uint64_t&) {
         if (rank != 1) return;
         spec.clear_labels();
         for (const char* name : {"d", "c", "b", "a"}) (*spec.mutable_labels())[name] = name;
       })) {
    EXPECT_OK(status);
  }
}

TEST(CheckAgreement, OtherSpecs_AreNamedByRankHashAndField) {
  for (const absl::Status& status : Agreement(20, [](int rank, v1::JobSpec&spec, uint64_t&) {
         if (rank == 0) return;
         spec.mutable_engine()->mutable_training()->set_seed(rank);
       })) {
    EXPECT_EQ(parallel::DomainOf(status), parallel::FailureDomain::kConfiguration) << status;
    const std::string message(status.message());
    EXPECT_THAT(message, ::testing::HasSubstr("rank 8 has "));
    EXPECT_THAT(message, ::testing::HasSubstr(" and 11 more, but rank 0 has "));
    EXPECT_THAT(message, ::testing::HasSubstr("From rank 0 to rank 1: "));
    EXPECT_THAT(message, ::testing::HasSubstr("engine.training.seed: 77 -> 1"));
  }
}

TEST(CheckAgreement, OtherData_IsNamedByRankAndFingerprint) {
  for (const absl::Status& status :
       Agreement(3, [](int rank, v1::JobSpec&, uint64_t&data) { data += rank == 2 ? 1 : 0; })) {
    EXPECT_EQ(parallel::DomainOf(status), parallel::FailureDomain::kData) << status;
    EXPECT_THAT(std::string(status.message()),
                ::testing::HasSubstr("rank 2 has 0000000000000008, but rank 0 has "
                                     "0000000000000007"));
  }
}

}  // namespace
}  // namespace muster::worker
