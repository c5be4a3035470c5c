#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/rng.h"
#include "proto/spec/share.h"
#include "proto/spec/spec.h"
#include "tests/proto/example_spec.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::spec {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

v1::JobSpec Example() {
  v1::JobSpec spec = *Parse(kExample, "example", {});
  ApplyDefaults(spec);
  return spec;
}

TEST(SpecValidate, EmptySpec_NamesWhatIsRequired) {
  v1::JobSpec spec;
  ApplyDefaults(spec);
  const absl::Status status = Validate(spec);
  for (const char* path : {"name: required", "engine: required", "resources.ranks: required"}) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(path)));
  }
}

TEST(SpecValidate, ZeroBubbleWithRecompute_IsRefused) {
  for (const char* recompute : {"none", "selective", "full"}) {
    ASSERT_OK_AND_ASSIGN(
        v1::JobSpec spec,
        Parse(kExample, "f",
              {"resources.ranks=4", "engine.parallel={pipeline: 2, pipeline_schedule: zero_bubble}",
               absl::StrCat("engine.training.recompute=", recompute)}));
    ApplyDefaults(spec);
    if (recompute == absl::string_view("none")) {
      EXPECT_OK(Validate(spec));
    } else {
      EXPECT_THAT(Validate(spec), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("use recompute: none, or 1f1b")));
    }
  }
}

// What is wrong with `placement` of a job of 8 ranks in tensor groups of 2; empty: nothing.
std::string PlacementProblem(const std::string& placement) {
  absl::StatusOr<v1::JobSpec> spec =
      Parse(kExample, "f",
            {"resources.ranks=8", "engine.parallel={tensor: 2}", "placement=" + placement});
  if (!spec.ok()) return std::string(spec.status().message());
  ApplyDefaults(*spec);
  for (const Problem& problem : FindProblems(*spec)) {
    if (problem.path.rfind("placement", 0) == 0) return problem.path + ": " + problem.message;
  }
  return "";
}

TEST(SpecValidate, Placement_IsAcceptedWhereItCanBeKept) {
  for (const char* sound :
       {"{required: rack}", "{preferred: nvlink_domain}", "{required: zone, spread: rack}",
        "{required: rack, segment: 4}", "{preferred: rack, segment: 2, spread: rack}",
        "{spread: host}", "{required: cluster}"}) {
    EXPECT_EQ(PlacementProblem(sound), "") << sound;
  }
  EXPECT_THAT(PlacementProblem("{required: row}"),
              HasSubstr("host, nvlink_domain, rack, block, zone, cluster"));
  EXPECT_THAT(PlacementProblem("{required: rack, preferred: zone}"), HasSubstr("keep one of both"));
  EXPECT_THAT(PlacementProblem("{required: rack, segment: 3}"),
              HasSubstr("3 is not a divisor of resources.ranks (8) and a multiple of "
                        "engine.parallel.tensor (2)"));
  EXPECT_THAT(PlacementProblem("{required: rack, segment: -4}"), HasSubstr("placement.segment"));
  EXPECT_THAT(PlacementProblem("{segment: 4}"), HasSubstr("needs required or preferred"));
  EXPECT_THAT(PlacementProblem("{required: rack, spread: rack}"),
              HasSubstr("rack is not narrower than rack"));
  EXPECT_THAT(PlacementProblem("{required: rack, segment: 4, spread: host}"),
              HasSubstr("the level that holds one, rack, not host"));
  EXPECT_THAT(PlacementProblem("{spread: cluster}"), HasSubstr("there is one cluster"));
}

struct Bad {
  const char* override_text;
  const char* message;
};
class SpecValidateBad : public ::testing::TestWithParam<Bad> {};

TEST_P(SpecValidateBad, Override_IsRefusedByNameValueAndRule) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(kExample, "f", {GetParam().override_text}));
  ApplyDefaults(spec);
  EXPECT_THAT(Validate(spec),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(GetParam().message)));
}

// The cause alone is named, not also what its absence leaves undefined.
TEST(SpecValidate, OneMistake_IsOneProblem) {
  const std::string blocks(1025, 'M');
  for (const auto& [text, problem] : std::initializer_list<std::pair<std::string, std::string>>{
           {"engine.model={preset: mamba2-130m, mamba: {head_width: 257}}",
            "engine.model.mamba.head_width: 257 is out of range; 1 to 256"},
           {"engine.model={preset: mamba2-130m, hidden: -1}",
            "engine.model.hidden: -1 is out of range; 1 to 1048576"},
           {"engine.model={preset: hybrid-1b, hidden: -1}",
            "engine.model.hidden: -1 is out of range; 1 to 1048576"},
           {"engine.model={preset: mamba2-130m, family: hybrid, pattern: 'M-'}",
            "engine.model.preset: mamba2-130m is of family mamba2, not hybrid"},
           {"engine.model={preset: hybrid-1b, pattern: '" + blocks + "'}",
            "engine.model.pattern: has 1025 blocks; at most 1024"},
           {"engine.model={preset: hybrid-1b, pattern: 'M\u00e9'}",
            "engine.model.pattern: has '\u00e9' at position 2; M is Mamba-2, * attention, - an "
            "MLP"}}) {
    ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(kExample, "f", {text}));
    ApplyDefaults(spec);
    std::vector<std::string> found;
    for (const Problem& each : FindProblems(spec)) {
      if (each.path.rfind("engine.model", 0) == 0) found.push_back(each.path + ": " + each.message);
    }
    EXPECT_THAT(found, ::testing::ElementsAre(problem)) << text.substr(0, 80);
  }
}

// A preset says how wide heads are, not how many they are where the hidden size is another.
TEST(SpecDefaults, HeadsOfAPresetsScan_FollowWhatIsGiven) {
  const auto heads = [](const char* text) {
    auto spec = Parse(kExample, "f", {text});
    EXPECT_OK(spec.status());
    if (!spec.ok()) return 0;
    ApplyDefaults(*spec);
    return spec->engine().model().mamba().heads();
  };
  EXPECT_EQ(heads("engine.model={preset: mamba2-130m}"), 24);
  EXPECT_EQ(heads("engine.model={preset: mamba2-130m, hidden: 1024}"), 32);
  EXPECT_EQ(heads("engine.model={preset: mamba2-130m, mamba: {head_width: 128}}"), 12);
  EXPECT_EQ(heads("engine.model={preset: mamba2-130m, mamba: {heads: 10}}"), 10);
  EXPECT_EQ(heads("engine.model={preset: hybrid-8b}"), 128);
}

TEST(SpecValidate, SeparateDocuments_AreAcceptedOnEveryDevice) {
  for (const char* device : {"resources.device=cpu", "resources.device=cuda"}) {
    ASSERT_OK_AND_ASSIGN(v1::JobSpec spec,
                         Parse(kExample, "f", {"engine.data.separate_documents=true", device}));
    ApplyDefaults(spec);
    EXPECT_OK(Validate(spec)) << device;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Table, SpecValidateBad,
    ::testing::Values(
        Bad{"name=Upper", "name: 'Upper' is not a job name: 1-63 characters of [a-z0-9-]"},
        Bad{"name=1a", "name: '1a'"}, Bad{"name=a-", "name: 'a-'"}, Bad{"name=a_b", "name: "},
        Bad{"name=a234567890123456789012345678901234567890123456789012345678901234", "name: "},
        Bad{"name='../x'", "name: '../x'"}, Bad{"queue=Gold", "queue: 'Gold' is not a queue name"},
        Bad{"priority=1001", "priority: 1001 is out of range; 0 to 1000"},
        Bad{"priority=-1", "priority: -1"}, Bad{"engine.model=null", "engine.model: required"},
        Bad{"engine.model.family=null", "engine.model.family: required; one of gpt2, llama"},
        Bad{"engine.model.layers=0", "engine.model.layers: required; 1 to 1024"},
        Bad{"engine.model.layers=-6", "-6 is out of range; 1 to 1024"},
        Bad{"engine.model.layers=1025", "1025 is out of range"},
        Bad{"engine.model.hidden=1048577", "engine.model.hidden: 1048577 is out of range"},
        Bad{"engine.model.heads=5",
            "engine.model.heads: 5 does not divide hidden (192); 4 or 6 would"},
        Bad{"engine.model.heads=-6", "-6 is too small; at least 1"},
        Bad{"engine.model.vocab=0", "engine.model.vocab: required; at least 1"},
        Bad{"engine.model.sequence_length=-1", "engine.model.sequence_length: -1 is too small"},
        Bad{"engine.model.ffn=8", "engine.model.ffn: is for family llama and hybrid, not gpt2"},
        Bad{"engine.model.tied=false",
            "engine.model.tied: is for family llama and mamba2 and hybrid, not gpt2"},
        Bad{"engine.model.mamba={state: 4}",
            "engine.model.mamba: is for family mamba2 and hybrid, not gpt2"},
        Bad{"engine.model.family=mamba2",
            "engine.model.heads: is for family gpt2 and llama and hybrid, not mamba2"},
        Bad{"engine.model={preset: mamba2-130m, mamba: {groups: 5}}",
            "engine.model.mamba.groups: 5 does not divide heads (24); 4 or 6 would"},
        Bad{"engine.model={preset: mamba2-130m, mamba: {groups: 13}}",
            "heads (24); 12 or 24 would"},
        Bad{"engine.model={preset: mamba2-130m, mamba: {groups: 25}}", "heads (24); 24 would"},
        Bad{"engine.model={preset: mamba2-130m, mamba: {heads: 7, groups: 3}}",
            "(7); 1 or 7 would"},
        Bad{"engine.model={preset: mamba2-130m, mamba: {state: -1}}",
            "engine.model.mamba.state: -1 is out of range; 1 to 256"},
        Bad{"engine.model={preset: mamba2-130m, mamba: {heads: -3}}", "mamba.heads: -3"},
        Bad{"engine.model={preset: mamba2-130m, mamba: {head_width: 257}}",
            "head_width: 257 is out of range; 1 to 256"},
        Bad{"engine.model={preset: mamba2-130m, mamba: {head_width: -2147483648}}",
            "head_width: -"},
        Bad{"engine.model={preset: mamba2-130m, mamba: {heads: 512, head_width: 64}}",
            "the heads of a group are 32768 columns wide together; at most 16384, which 2 groups "
            "have"},
        Bad{"engine.model={preset: mamba2-130m, mamba: {heads: 387, head_width: 128}}",
            "at most 16384, which 9 groups have"},
        Bad{"engine.model={preset: mamba2-130m, mamba: {taps: 5}}", "taps: 5 is out of range"},
        Bad{"engine.model={family: mamba2, layers: 2, hidden: 16, vocab: 256, sequence_length: 8}",
            "engine.model.mamba.head_width: 64 is wider than 2 x hidden (32), which leaves no "
            "head; "
            "give mamba.heads, or at most 32"},
        Bad{"engine={model: {preset: mamba2-130m}, parallel: {tensor: 32}}",
            "engine.parallel.tensor: 32 ranks cannot share the 24 state-space heads"},
        Bad{"engine={model: {preset: mamba2-130m, sequence_length: 24}, parallel: {context: 16}}",
            "engine.parallel.context: a sequence of 24 tokens does not divide into 32 chunks, two "
            "for each of the 16 ranks; one of 32 tokens would, or context 12"},
        Bad{"engine.model={preset: mamba2-130m, mamba: {step_min: -1}}",
            "step_min: -1 is out of range; 0 to 100"},
        Bad{"engine.model={preset: mamba2-130m, mamba: {step_min: 1e30}}",
            "is out of range; 0 to 100"},
        Bad{"engine.model={preset: hybrid-1b, pattern: 'M-XM'}",
            "engine.model.pattern: has 'X' at position 3; M is Mamba-2, * attention, - an MLP"},
        Bad{"engine.model={family: hybrid, hidden: 64, vocab: 256, sequence_length: 8}",
            "engine.model.pattern: names no layers"},
        Bad{"engine.model={preset: hybrid-1b, layers: 7}",
            "engine.model.layers: 7, but the pattern has 15 blocks; leave it out"},
        Bad{"engine.model={preset: hybrid-1b, pattern: 'M-M', heads: 4}",
            "engine.model.heads: is for attention layers (*), which the pattern 'M-M' lacks"},
        Bad{"engine.model={preset: hybrid-1b, pattern: '**', ffn: 4}",
            "engine.model.ffn: is for MLP layers (-), which the pattern '**' lacks"},
        Bad{"engine.model={preset: hybrid-1b, pattern: '*-', mamba: {state: 4}}",
            "engine.model.mamba: is for Mamba-2 layers (M)"},
        Bad{"engine.model={preset: hybrid-1b, heads: 24, kv_heads: 8}",
            "engine.model.head_width: required, as heads (24) does not divide hidden (2048); 16 or "
            "32 would"},
        Bad{"engine.model={preset: hybrid-1b, kv_heads: 5}",
            "5 does not divide heads (32); 4 or 8 would"},
        Bad{"engine.model={preset: hybrid-1b, rope_theta: 10000}",
            "engine.model.rope_theta: needs positions: rotary"},
        Bad{"engine.model={preset: hybrid-1b, positions: rotary, head_width: 63}",
            "engine.model.head_width: 63 is odd; rotary positions need an even width"},
        Bad{"engine.model={preset: hybrid-1b, mamba: {groups: 5}}",
            "engine.model.mamba.groups: 5 does not divide heads (64); 4 or 8 would"},
        Bad{"engine.model.pattern='M-'", "engine.model.pattern: is for family hybrid, not gpt2"},
        Bad{"engine.model.mlp=swiglu", "engine.model.mlp: is for family hybrid, not gpt2"},
        Bad{"engine.model.preset=llama-2b", "engine.model.preset: 'llama-2b' is not one of gpt2-1"},
        Bad{"engine.model.family=llama", "engine.model.ffn: required; 1 to"},
        Bad{"engine.model={preset: llama-1b, kv_heads: 5}",
            "5 does not divide heads (32); 4 or 8 would"},
        Bad{"engine.parallel.offload={optimizer: 1.5}",
            "engine.parallel.offload.optimizer: 1.5 is out of range; 0 to 1"},
        Bad{"engine.training.recompute_blocks=-1", "recompute_blocks: -1 is negative"},
        Bad{"engine.training.recompute_rest=selective", "set recompute: full and recompute_blocks"},
        Bad{"engine.training.recompute_rest=full", "use selective or none"},
        Bad{"engine.training.recompute_blocks=2",
            "2 blocks are to recompute, but recompute is none"},
        Bad{"engine.training.verify_every=-1", "engine.training.verify_every: -1"},
        Bad{"engine.training.dropout=-0.1", "engine.training.dropout: -0.1 is out of range"},
        Bad{"engine.training.dropout=1",
            "engine.training.dropout: 1 is out of range; a probability from 0 (off) to less than "
            "1"},
        Bad{"engine.training.gradient_compression={}",
            "gradient_compression: required: one of top_k, sign"},
        Bad{"engine.training.gradient_compression={top_k: {}}", "density: 0 is out of range"},
        Bad{"engine.training.gradient_compression={top_k: {density: 0.4}}",
            "sending 0.4 of the elements as pairs to 1 other ranks takes longer than reducing all "
            "of them; with 2 ranks and zero 0 use at most 0.333"},
        Bad{"engine.training.gradient_compression={top_k: {density: 0.01, momentum: 1}}",
            "top_k.momentum: 1 is out of range; 0 to less than 1"},
        Bad{"engine.training.gradient_compression={top_k: {density: 0.01, warmup_steps: -2}}",
            "top_k.warmup_steps: -2 is negative"},
        Bad{"engine.training.gradient_compression={sign: {}, min_elements: -1}",
            "min_elements: -1 is negative"},
        Bad{"engine.model={preset: llama-1b, hidden: 96}", "96 are 3 wide each; rotary positions"},
        Bad{"engine.model.initialize_from=\"a\\tb\"",
            "engine.model.initialize_from: 'a\\tb' contains a control character"},
        Bad{"engine.model={preset: llama-1b, rope_theta: 0}", "rope_theta: 0 is not larger than 0"},
        Bad{"engine.model={preset: llama-1b, rope_scaling: {factor: 0.5}}", "0.5 is less than 1"},
        Bad{"engine.parallel={data: 1, tensor: 3}",
            "2 ranks, but the degrees of engine.parallel multiply to 3 (data 1 x tensor 3)"},
        Bad{"engine.parallel={sequence: true}", "engine.parallel.sequence: needs tensor"},
        Bad{"engine.parallel={tensor_overlap: chunked}",
            "engine.parallel.tensor_overlap: chunked cuts GEMMs by the rows"},
        Bad{"engine.parallel={tensor_overlap: halves}",
            "engine.parallel.tensor_overlap: halves run the collectives of one half"},
        Bad{"engine.data=null", "engine.data.train: required: at least one data set"},
        Bad{"engine.data.train=[]", "engine.data.train: required"},
        Bad{"engine.data.train[0].path=null", "engine.data.train[0].path: required"},
        Bad{"engine.data.train[0].path=\"a\\tb\"", "contains a control character"},
        Bad{"engine.data.train[0].weight=0", "weight: 0 is not larger than 0"},
        Bad{"engine.data.validation[0].weight=-2", "validation[0].weight: -2 is not larger"},
        Bad{"engine.training=null", "engine.training: required"},
        Bad{"engine.training.steps=0", "engine.training.steps: required; at least 1"},
        Bad{"engine.training.steps=-5", "engine.training.steps: -5 is too small"},
        Bad{"engine.training.steps=9223372036854775807", "too large to count the tokens"},
        Bad{"engine.training.global_batch=24",
            "24 is not a multiple of micro_batch x data (8 x 2)"},
        Bad{"engine.training.micro_batch=9223372036854775807", "is not a multiple of"},
        Bad{"engine.training.micro_batch=0", "engine.training.micro_batch: required"},
        Bad{"engine.training.precision=bf16", "bf16 needs resources.device: cuda"},
        Bad{"engine.training.precision=fp16", "fp16 needs resources.device: cuda"},
        Bad{"engine.training.precision=tf32", "tf32 needs resources.device: cuda"},
        Bad{"engine.training.loss_scale={}", "loss_scale: is for precision fp16, not fp32"},
        Bad{"engine.training.loss_scale={initial: 0.5}", "loss_scale.initial: 0.5 is less than 1"},
        Bad{"engine.training.loss_scale={initial: 1.0e300}", "is more than 2^40"},
        Bad{"engine.training.loss_scale={hysteresis: -1}", "hysteresis: -1 is too small"},
        Bad{"engine.parallel.zero=4", "engine.parallel.zero: 4 is out of range; stages 0 to 3"},
        Bad{"engine.parallel={zero: 3, zero_shards: 3}",
            "zero_shards: 3 does not divide the 2 data-parallel ranks; the nearest that does is 2"},
        Bad{"engine.parallel={data: 2, pipeline: 2}",
            "the degrees of engine.parallel multiply to 4"},
        Bad{"engine.parallel.pipeline=-1", "engine.parallel.pipeline: -1 is out of range"},
        Bad{"engine.parallel={pipeline: 2, pipeline_schedule: gpipe, pipeline_chunks: 2}",
            "2 chunks per stage need pipeline_schedule: interleaved"},
        Bad{"engine.parallel={pipeline: 2, pipeline_schedule: interleaved, pipeline_chunks: 1}",
            "interleaved needs 2 chunks per stage or more"},
        Bad{"engine.parallel={pipeline_chunks: 2}", "interleaved needs 2 pipeline stages"},
        Bad{"engine.parallel={pipeline: 2, pipeline_schedule: zero_bubble, offload: {activations: "
            "true}}",
            "engine.parallel.offload.activations: does not go with pipeline_schedule zero_bubble"},
        Bad{"engine.parallel={pipeline_schedule: zero_bubble}",
            "zero_bubble needs 2 pipeline stages or more, but pipeline is 1; use 1f1b"},
        Bad{"engine.parallel={context: 4, tensor: 2, context_method: all_to_all}",
            "context_method: all_to_all spreads 6 heads over 8 ranks (context x tensor)"},
        Bad{"engine.parallel={context: 3}", "the degrees of engine.parallel multiply to 6"},
        Bad{"engine.parallel.zero_shards=2", "stage 0 of ZeRO shards nothing"},
        Bad{"engine.training.evaluate_every=-1", "evaluate_every: -1 is negative"},
        Bad{"engine.training.evaluate_samples=-1", "evaluate_samples: -1 is negative"},
        Bad{"engine.training.optimizer=null", "engine.training.optimizer: required"},
        Bad{"engine.training.optimizer.adamw.lr=0", "lr: 0 is not larger than 0"},
        Bad{"engine.training.optimizer.adamw.weight_decay=-1", "weight_decay: -1 is negative"},
        Bad{"engine.training.optimizer.adamw.betas=[0.9]", "1 values; expected two"},
        Bad{"engine.training.optimizer.adamw.betas=[0.9, 1]", "betas[1]: 1 is out of range"},
        Bad{"engine.training.optimizer.adamw.betas=[-0.1, 0.9]", "betas[0]: -0.1 is out of range"},
        Bad{"engine.training.optimizer.adamw.eps=0", "eps: 0 is not larger than 0"},
        Bad{"engine.training.optimizer.adamw.clip_norm=-1", "clip_norm: -1 is negative"},
        Bad{"engine.training.schedule.cosine.warmup_steps=-1", "warmup_steps: -1 is negative"},
        Bad{"engine.training.schedule.cosine.min_lr=0.01",
            "min_lr: 0.01 is larger than lr (0.001)"},
        Bad{"engine.training.schedule.linear.min_lr=-1", "linear.min_lr: -1 is negative"},
        Bad{"engine.training.schedule.cosine.decay_steps=50", "50 is not larger than warmup_steps"},
        Bad{"engine.training.schedule.constant.warmup_steps=-1", "warmup_steps: -1 is negative"},
        Bad{"engine.parallel.data=3", "2 ranks, but the degrees of engine.parallel multiply to 3"},
        Bad{"engine.parallel.data=-2", "engine.parallel.data: -2 is too small"},
        Bad{"engine.parallel.bucket_bytes=-1", "bucket_bytes: -1 is negative"},
        Bad{"engine.parallel.nccl_ctas=-1",
            "engine.parallel.nccl_ctas: -1 is out of range; 1 to 64 thread blocks, or 0 for "},
        Bad{"engine.parallel.nccl_ctas=65", "engine.parallel.nccl_ctas: 65 is out of range"},
        Bad{"engine.parallel.resident_elements=-1", "resident_elements: -1 is negative"},
        Bad{"engine.parallel.pipeline_blocks=[1, 1]", "2 numbers for 1 parts"},
        Bad{"engine.parallel={data: 1, tensor: 2, tensor_shares: [1, 2, 3]}",
            "engine.parallel.tensor_shares: 3 numbers for 2 tensor-parallel ranks"},
        Bad{"engine.parallel={data: 1, tensor: 2, tensor_shares: [1, 0]}",
            "engine.parallel.tensor_shares[1]: 0 is not larger than 0"},
        Bad{"engine.parallel.order=[tensor, data]",
            "engine.parallel.order: must name each axis once: data, context, tensor, pipeline"},
        Bad{"engine.parallel.order=[tensor, data, data, pipeline]", "must name each axis once"},
        Bad{"engine.parallel.pipeline_blocks=[99]", "the numbers add up to 99, but the model has"},
        Bad{"resources.ranks=65537", "resources.ranks: 65537 is out of range; 1 to 65536"},
        Bad{"resources.threads_per_rank=-1", "threads_per_rank: -1 is negative"},
        Bad{"checkpoint.path=null", "checkpoint.path: required"},
        Bad{"checkpoint.every_steps=0", "checkpoint.every_steps: required; at least 1"},
        Bad{"checkpoint.keep=-1", "checkpoint.keep: -1 is too small"},
        Bad{"restart.max_failures=-1", "restart.max_failures: -1 is negative"},
        Bad{"restart.backoff.initial=-1s", "initial: -1s is out of range; 0s to 24h"},
        Bad{"restart.backoff.max=25h", "max: 25h is out of range"},
        Bad{"restart.backoff.initial=1m", "initial: 1m is longer than max (30s)"},
        Bad{"working_directory=a/b", "working_directory: 'a/b' is not an absolute path"},
        Bad{"working_directory=null", "'data/kjv.train' is relative, but working_directory"},
        Bad{"labels={'': x}", "a label without a name"},
        Bad{"labels.a=a234567890123456789012345678901234567890123456789012345678901234",
            "labels.a: "}));

// Values that messages can hold and text cannot.
TEST(SpecValidate, ValuesThatTextCannotHold_AreRefused) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const std::pair<std::function<void(v1::JobSpec&)>, const char*> table[] = {
      {[&](auto& s) { s.mutable_engine()->mutable_data()->mutable_train(0)->set_weight(nan); },
       "weight: nan is not a finite number"},
      {[&](auto& s) { s.mutable_engine()->mutable_training()->set_dropout(nan); },
       "engine.training.dropout: nan is not a finite number"},
      {[&](auto& s) {
         s.mutable_engine()->mutable_training()->mutable_optimizer()->mutable_adamw()->set_lr(
             infinity);
       },
       "lr: inf is not a finite number"},
      {[&](auto& s) {
         s.mutable_engine()->mutable_training()->mutable_optimizer()->mutable_adamw()->set_betas(
             0, nan);
       },
       "betas[0]: nan"},
      {[&](auto& s) {
         s.mutable_engine()->mutable_training()->mutable_schedule()->mutable_cosine()->set_min_lr(
             nan);
       },
       "min_lr: nan"},
      {[&](auto& s) { s.mutable_resources()->set_device(static_cast<v1::DeviceKind>(9)); },
       "resources.device: unknown value 9; expected cpu, cuda"},
      {[&](auto& s) { s.mutable_restart()->mutable_backoff()->mutable_max()->set_nanos(-1); },
       "restart.backoff.max: "},
      {[&](auto& s) {
         s.mutable_restart()->mutable_backoff()->mutable_max()->set_seconds(
             std::numeric_limits<int64_t>::min());
       },
       "is out of range; 0s to 24h"},
      {[&](auto& s) { s.GetReflection()->MutableUnknownFields(&s)->AddVarint(77, 1); },
       "has a field with number 77, which this version does not know"},
      {[&](auto& s) {
         for (int i = 0; i < 33; ++i) (*s.mutable_labels())[absl::StrCat("l", i)] = "x";
       },
       "labels: 35 labels; at most 32"},
  };
  for (const auto& [change, message] : table) {
    v1::JobSpec spec = Example();
    ASSERT_OK(Validate(spec));
    change(spec);
    EXPECT_THAT(Validate(spec), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message)));
  }
}

TEST(SpecValidate, UnknownPreset_IsTheOnlyProblemOfItsModel) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(kExample, "f", {"engine.model={preset: gpt3}"}));
  ApplyDefaults(spec);
  const std::string message(Validate(spec).message());
  EXPECT_THAT(message, HasSubstr("engine.model.preset: 'gpt3' is not one of gpt2-124m"));
  EXPECT_THAT(message, ::testing::Not(HasSubstr("engine.model.layers")));
  EXPECT_THAT(message, ::testing::Not(HasSubstr("required")));
}

TEST(SpecValidate, TenMegabyteName_IsNotEchoedWhole) {
  v1::JobSpec spec = Example();
  spec.set_name(std::string(10 << 20, 'a'));
  const absl::Status status = Validate(spec);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("(10485760 bytes)")));
  EXPECT_LT(status.message().size(), 500u);
}

// Sets the degrees in `words`, as messages suggest them: "data 2 x tensor 4".
void Set(const std::string& words, v1::ParallelSpec& parallel) {
  parallel.set_pipeline(1);
  parallel.set_context(1);
  parallel.set_tensor(1);
  for (const absl::string_view word : absl::StrSplit(words, " x ")) {
    const std::vector<std::string> parts = absl::StrSplit(word, ' ');
    int32_t degree = 0;
    ASSERT_TRUE(parts.size() == 2 && absl::SimpleAtoi(parts[1], &degree)) << words;
    const auto* field = parallel.GetDescriptor()->FindFieldByName(parts[0]);
    ASSERT_NE(field, nullptr) << words;
    parallel.GetReflection()->SetInt32(&parallel, field, degree);
  }
}

// The degrees that a message suggests are valid, whatever else the spec asks for.
TEST(SpecValidate, SuggestedLayout_IsValid) {
  Rng rng(testing::TestSeed());
  const auto pick = [&](std::initializer_list<const char*> choices) {
    return std::string(*(choices.begin() + rng.Below(choices.size())));
  };
  int suggested = 0;
  for (int i = 0; i < 3000; ++i) {
    const std::string pipeline = pick({"1", "1", "2", "3", "4"});
    std::vector<std::string> bent = {
        absl::StrCat("engine.model=",
                     pick({"{preset: gpt2-124m, layers: 7, heads: 6}",
                           "{preset: llama-1b, heads: 32, kv_heads: 8}",
                           "{preset: llama-1b, heads: 32, kv_heads: 2, ffn: 3}",
                           "{preset: llama-8b, heads: 8, kv_heads: 4, vocab: 5}"})),
        absl::StrCat("engine.model.sequence_length=", pick({"48", "64", "512"})),
        absl::StrCat("engine.training.global_batch=", pick({"16", "24", "32"})),
        absl::StrCat("engine.training.micro_batch=", pick({"1", "2", "4"})),
        absl::StrCat("resources.ranks=", pick({"2", "4", "6", "8", "12", "16", "24"})),
        absl::StrCat("engine.parallel={pipeline: ", pipeline,
                     ", tensor: ", pick({"1", "2", "3", "4", "6", "8"}),
                     ", context: ", pick({"1", "1", "2", "4"}), "}"),
        absl::StrCat("engine.parallel.context_method=", pick({"ring", "all_to_all", "all_to_all"})),
        absl::StrCat("engine.parallel.zero=", pick({"0", "1", "3"}))};
    if (rng.Chance(0.3)) bent.push_back("engine.parallel.sequence=true");
    if (rng.Chance(0.2)) bent.push_back("engine.parallel.tensor_shares=[1, 2]");
    if (rng.Chance(0.2)) bent.push_back("engine.parallel.offload={activations: true}");
    if (rng.Chance(0.2)) bent.push_back("engine.training.recompute=full");
    if (rng.Chance(0.5)) bent.push_back("engine.parallel.data=" + pick({"1", "2", "4"}));
    if (rng.Chance(0.5)) {
      bent.push_back("engine.parallel.pipeline_schedule=" +
                     pick({"interleaved", "zero_bubble", "gpipe"}));
    }
    if (rng.Chance(0.2)) bent.push_back("engine.parallel.pipeline_blocks=[3, 4]");
    ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(kExample, "f", bent));
    ApplyDefaults(spec);
    const std::string before(Validate(spec).message());
    const std::string mark = " that works is ";
    if (before.find(mark) == std::string::npos) continue;
    ++suggested;
    std::string words = before.substr(before.find(mark) + mark.size());
    words = words.substr(0, words.find_first_of("\n;"));
    Set(words, *spec.mutable_engine()->mutable_parallel());
    std::set<std::string> known;
    for (const absl::string_view line : absl::StrSplit(before, '\n')) known.emplace(line);
    for (const Problem& problem : FindProblems(spec)) {
      const std::string line = absl::StrCat(problem.path, ": ", problem.message);
      ASSERT_TRUE(known.count(line) != 0 && line.find(mark) == std::string::npos)
          << absl::StrJoin(bent, "\n") << "\nwas refused:\n"
          << before << "\nand so is " << words << ":\n"
          << line;
    }
  }
  EXPECT_GT(suggested, 1000);
}

TEST(SpecValidate, WarmupLongerThanTheRun_IsAllowed) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(kExample, "f", {"engine.training.steps=10"}));
  ApplyDefaults(spec);
  EXPECT_OK(Validate(spec));
}

// What is valid must fit into what a daemon accepts, with many jobs on one host.
TEST(Validate, ManyDataSetsWithLongPaths_AreRefusedByTheirBytes) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(kExample, "f", {}));
  ApplyDefaults(spec);
  const auto with_sources = [&](int count, size_t bytes) {
    spec.mutable_engine()->mutable_data()->clear_train();
    for (int i = 0; i < count; ++i) {
      v1::DataSource& source = *spec.mutable_engine()->mutable_data()->add_train();
      source.set_path(absl::StrCat("/", std::string(bytes, 'x'), i));
      source.set_weight(1);
    }
    return Validate(spec);
  };
  EXPECT_OK(with_sources(1000, 200));
  const absl::Status status = with_sources(4096, 4000);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("engine.data: the spec takes 1"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("at most 262144"));
}

TEST(SpecDeadline, IsATimeWithItsZoneOrADuration) {
  v1::JobSpec spec = Example();
  for (const char* good :
       {"2026-12-01T08:00:00Z", "2026-12-01T08:00:00.5+01:00", "36h", "90m30s"}) {
    spec.set_deadline(good);
    EXPECT_OK(Validate(spec)) << good;
  }
  for (const char* bad : {"tomorrow", "2026-12-01", "2026-12-01T08:00:00", "infinite-future", "-2h",
                          "0s", "inf", "100000h", "36"}) {
    spec.set_deadline(bad);
    EXPECT_THAT(Validate(spec),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("deadline: ")))
        << bad;
  }
}

TEST(SpecShare, IsAboveZeroAtMostOneInThousandths) {
  v1::JobSpec spec = Example();
  EXPECT_EQ(ShareOf(spec), kWholeDevice);
  for (const auto& [good, thousandths] :
       {std::pair(1.0, 1000), std::pair(0.5, 500), std::pair(0.333, 333), std::pair(0.001, 1),
        std::pair(0.1 + 0.2, 300)}) {
    spec.mutable_resources()->set_share(good);
    EXPECT_OK(Validate(spec)) << good;
    EXPECT_EQ(ShareOf(spec), thousandths);
  }
  const auto refused = [&](double share) {
    spec.mutable_resources()->set_share(share);
    return std::string(Validate(spec).message());
  };
  for (const double bad : {0.0, -0.5, 1.001, 50.0, std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(refused(bad), HasSubstr("resources.share: ")) << bad;
    EXPECT_THAT(refused(bad), HasSubstr("above 0, at most 1")) << bad;
  }
  EXPECT_THAT(refused(1.0 / 3),
              HasSubstr("resources.share: 0.333333 is no multiple of 0.001; 0.333 would do"));
  EXPECT_THAT(refused(1e-9), HasSubstr("; 0.001 would do"));
}

TEST(SpecShare, IsReadAndWrittenAsANumber) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(kExample, "f", {"resources.share=0.25"}));
  EXPECT_EQ(ShareOf(spec), 250);
  EXPECT_THAT(ToYaml(spec), HasSubstr("share: 0.25"));
  ASSERT_OK_AND_ASSIGN(const v1::JobSpec again, Parse(ToYaml(spec), "again", {}));
  EXPECT_EQ(ShareOf(again), 250);
  EXPECT_THAT(std::string(Parse(kExample, "f", {"resources.share=half"}).status().message()),
              HasSubstr("resources.share"));
}

TEST(SpecShare, OfAnElasticJob_IsRefused) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec,
                       Parse(kExample, "f", {"resources.ranks={min: 1, max: 2}"}));
  ApplyDefaults(spec);
  ASSERT_OK(Validate(spec));
  spec.mutable_resources()->set_share(0.5);
  EXPECT_THAT(std::string(Validate(spec).message()),
              HasSubstr("resources.share: does not go with a range of resources.ranks"));
  spec.mutable_resources()->set_share(1);
  EXPECT_OK(Validate(spec));
}

}  // namespace
}  // namespace muster::spec
