#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/spec/presets.h"
#include "proto/spec/spec.h"
#include "tests/proto/example_spec.h"
#include "tests/support/status_matchers.h"

namespace muster::spec {
namespace {

using ::google::protobuf::util::MessageDifferencer;
using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

TEST(SpecDefaults, SmallestSpec_GetsEveryDocumentedDefault) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(R"(
name: a
engine:
  model: {family: gpt2, layers: 1, hidden: 8, heads: 2, vocab: 4, sequence_length: 16}
  data: {train: [{path: /d}]}
  training: {steps: 1, global_batch: 4, micro_batch: 1, optimizer: {adamw: {lr: 1}}}
resources: {ranks: 4}
checkpoint: {path: /c, every_steps: 1}
)",
                                               "f", {}));
  ApplyDefaults(spec);
  EXPECT_OK(Validate(spec));
  EXPECT_EQ(spec.queue(), "default");
  EXPECT_EQ(spec.priority(), 50);
  EXPECT_EQ(spec.engine().data().train(0).weight(), 1.0);
  EXPECT_EQ(spec.engine().training().precision(), v1::PRECISION_FP32);
  const v1::AdamWSpec& adamw = spec.engine().training().optimizer().adamw();
  EXPECT_EQ(adamw.weight_decay(), 0.1);
  EXPECT_THAT(adamw.betas(), ::testing::ElementsAre(0.9, 0.95));
  EXPECT_EQ(adamw.eps(), 1e-8);
  EXPECT_EQ(adamw.clip_norm(), 1.0);
  EXPECT_TRUE(spec.engine().training().schedule().has_constant());
  EXPECT_EQ(spec.engine().parallel().data(), 4);
  EXPECT_EQ(spec.resources().device(), v1::DEVICE_KIND_CPU);
  EXPECT_EQ(spec.checkpoint().keep(), 2);
  EXPECT_EQ(spec.restart().max_failures(), 3);
  EXPECT_EQ(spec.restart().backoff().initial().seconds(), 1);
  EXPECT_EQ(spec.restart().backoff().max().seconds(), 60);

  v1::JobSpec again = spec;
  ApplyDefaults(again);
  EXPECT_TRUE(MessageDifferencer::Equals(spec, again));
}

TEST(SpecDefaults, Preset_SetsWhatIsNotGiven) {
  ASSERT_OK_AND_ASSIGN(
      v1::JobSpec spec,
      Parse(kExample, "f", {"engine.model={preset: llama-1b, layers: 3, tied: false}"}));
  ApplyDefaults(spec);
  EXPECT_OK(Validate(spec));
  const v1::ModelSpec& model = spec.engine().model();
  EXPECT_EQ(model.family(), v1::MODEL_FAMILY_LLAMA);
  EXPECT_EQ(model.layers(), 3);
  EXPECT_EQ(model.hidden(), 2048);
  EXPECT_EQ(model.kv_heads(), 8);
  EXPECT_FALSE(model.tied());
  EXPECT_EQ(model.rope_theta(), 500000);
  EXPECT_EQ(model.rope_scaling().factor(), 32);
  v1::JobSpec again = spec;
  ApplyDefaults(again);
  EXPECT_TRUE(MessageDifferencer::Equals(spec, again));
  for (const std::string& name : PresetNames()) {
    ASSERT_OK_AND_ASSIGN(spec,
                         Parse(kExample, "f", {absl::StrCat("engine.model={preset: ", name, "}")}));
    ApplyDefaults(spec);
    EXPECT_OK(Validate(spec)) << name;
  }
}

TEST(SpecDefaults, LlamaWithoutPreset_GetsDocumentedDefaults) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec,
                       Parse(kExample, "f", {"engine.model.family=llama", "engine.model.ffn=500"}));
  ApplyDefaults(spec);
  EXPECT_OK(Validate(spec));
  EXPECT_EQ(spec.engine().model().kv_heads(), 6);
  EXPECT_EQ(spec.engine().model().norm_epsilon(), 1e-5);
  EXPECT_EQ(spec.engine().model().rope_theta(), 10000);
}

TEST(SpecDefaults, GradientCompression_ExcludesEmbeddingAndHead) {
  const std::string top_k = "engine.training.gradient_compression={top_k: {density: 0.01}}";
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(kExample, "f", {top_k}));
  ApplyDefaults(spec);
  EXPECT_OK(Validate(spec));
  EXPECT_THAT(spec.engine().training().gradient_compression().exclude(),
              ::testing::ElementsAre("embedding.*", "head.*"));
  EXPECT_EQ(spec.engine().training().gradient_compression().min_elements(), 1024);
  for (const char* with : {"engine.training.gradient_reduction=bf16",
                           "engine.training.precision=fp16", "engine.parallel.zero=2"}) {
    ASSERT_OK_AND_ASSIGN(spec, Parse(kExample, "f", {top_k, with}));
    ApplyDefaults(spec);
    EXPECT_THAT(Validate(spec), StatusIs(absl::StatusCode::kInvalidArgument,
                                         HasSubstr("engine.training.gradient_compression: ")))
        << with;
  }
}

TEST(SpecDefaults, TensorOverlap_IsHalvesOnCudaWhereTheyAreValidAndFaster) {
  struct Case {
    std::vector<std::string> overrides;
    v1::TensorOverlap expected;
  };
  const std::string cuda = "resources={ranks: 4, device: cuda}";
  const std::string model = "engine.model={preset: llama-1b, sequence_length: 4096}";
  const std::string tensor = "engine.parallel={tensor: 2, sequence: true}";
  const std::string batch = "engine.training.global_batch=16",
                    two = "engine.training.micro_batch=2";
  const v1::TensorOverlap halves = v1::TENSOR_OVERLAP_HALVES,
                          backward = v1::TENSOR_OVERLAP_BACKWARD;
  for (const Case& c : {
           Case{{cuda, model, tensor, batch, two}, halves},
           Case{{cuda, model, batch, two, "engine.parallel={tensor: 2}"}, halves},
           Case{{cuda, model, batch, two, "engine.parallel={tensor: 2, pipeline: 2}"}, halves},
           Case{{"resources={ranks: 4, device: cpu}", model, tensor, batch, two}, backward},
           Case{{cuda, model, tensor, batch, "engine.training.micro_batch=1"}, backward},
           Case{{cuda, model, batch, two, "engine.parallel={tensor: 1}"}, backward},
           Case{{cuda, model, batch, two,
                 "engine.parallel={tensor: 2, pipeline: 2, pipeline_schedule: zero_bubble}"},
                backward},
           Case{{cuda, model, tensor, batch, two, "engine.parallel.tensor_overlap=backward"},
                backward},
           Case{{cuda, model, tensor, batch, two, "engine.parallel.tensor_overlap=none"},
                v1::TENSOR_OVERLAP_NONE},
           // 2048 tokens of a half-batch x 2048 x 2048 / 2 is the least work for halves.
           Case{{cuda, model, tensor, batch, two, "engine.model.sequence_length=2048"}, halves},
           Case{{cuda, model, tensor, batch, two, "engine.model.sequence_length=2044"}, backward},
           Case{{cuda, model, batch, two, "engine.model.sequence_length=2048",
                 "engine.parallel={tensor: 4, sequence: true}"},
                backward},
           Case{{cuda, model, batch, two, "engine.model.sequence_length=2048",
                 "engine.parallel={tensor: 2, context: 2}"},
                backward},
           Case{{cuda, model, tensor, batch, two, "engine.model.hidden=1024"}, backward},
       }) {
    ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse(kExample, "f", c.overrides));
    ApplyDefaults(spec);
    EXPECT_OK(Validate(spec)) << absl::StrJoin(c.overrides, " ");
    EXPECT_EQ(spec.engine().parallel().tensor_overlap(), c.expected)
        << absl::StrJoin(c.overrides, " ");
  }
  // Tokens that the ranks do not divide: the default is chosen anyway, and Validate reports it.
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec,
                       Parse(kExample, "f",
                             {cuda, model, tensor, batch, two, "engine.model.sequence_length=4095",
                              "engine.parallel.tensor=4"}));
  ApplyDefaults(spec);
  EXPECT_THAT(Validate(spec), StatusIs(absl::StatusCode::kInvalidArgument,
                                       HasSubstr("engine.parallel.sequence: the 8190 tokens")));
}

TEST(SpecDefaults, DataDegree_IsTheRanksOverTheOtherDegrees) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec,
                       Parse(kExample, "f", {"resources.ranks=4", "engine.parallel={tensor: 2}"}));
  ApplyDefaults(spec);
  EXPECT_OK(Validate(spec));
  EXPECT_EQ(spec.engine().parallel().data(), 2);
}

TEST(SpecDefaults, GivenZeros_AreKept) {
  v1::JobSpec spec;
  spec.set_priority(0);
  spec.mutable_restart()->set_max_failures(0);
  auto* adamw = spec.mutable_engine()->mutable_training()->mutable_optimizer()->mutable_adamw();
  adamw->set_weight_decay(0);
  adamw->set_clip_norm(0);
  ApplyDefaults(spec);
  EXPECT_EQ(spec.priority(), 0);
  EXPECT_EQ(spec.restart().max_failures(), 0);
  EXPECT_EQ(adamw->weight_decay(), 0);
  EXPECT_EQ(adamw->clip_norm(), 0);
}

TEST(SpecDefaults, OnlyOneBackoffLimitGiven_MovesTheOther) {
  for (const char* text : {"{max: 100ms}", "{initial: 2m}"}) {
    ASSERT_OK_AND_ASSIGN(v1::JobSpec spec,
                         Parse(kExample, "f", {absl::StrCat("restart.backoff=", text)}));
    ApplyDefaults(spec);
    EXPECT_OK(Validate(spec)) << text;
  }
}

}  // namespace
}  // namespace muster::spec
