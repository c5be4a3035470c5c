#include "worker/rank/engine_setup.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "proto/spec/presets.h"
#include "tests/support/status_matchers.h"

namespace muster::worker {
namespace {

TEST(Presets, AreModelsOfThePublishedSizes) {
  const std::map<std::string, int64_t> published = {
      {"gpt2-124m", 124'439'808},    {"gpt2-350m", 354'823'168},   {"gpt2-774m", 774'030'080},
      {"gpt2-1558m", 1'557'611'200}, {"llama-1b", 1'235'814'400},  {"llama-3b", 3'212'749'824},
      {"llama-8b", 8'030'261'248},   {"llama-70b", 70'553'706'496}};
  ASSERT_EQ(spec::PresetNames().size(), published.size());
  for (const auto& [name, parameters] : published) {
    ASSERT_NE(spec::FindPreset(name), nullptr) << name;
    ASSERT_OK_AND_ASSIGN(const auto model, parallel::MakeModel(Describe(*spec::FindPreset(name))));
    EXPECT_EQ(model->parameters().elements(), parameters) << name;
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

TEST(PartOf, AnyOrder_IsForTheJobToAllow) {
  v1::JobSpec spec;
  for (const bool allowed : {false, true}) {
    spec.mutable_engine()->mutable_training()->set_any_order(allowed);
    ASSERT_OK_AND_ASSIGN(const parallel::ModelParallel part, PartOf(spec, parallel::PerAxis()));
    EXPECT_EQ(part.deterministic, !allowed);
  }
}

}  // namespace
}  // namespace muster::worker
