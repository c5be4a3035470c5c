// Weights of another model than the spec's are refused before training, with what differs.
#include "worker/rank/initial_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/file_system.h"
#include "proto/spec/spec.h"
#include "tests/support/status_matchers.h"
#include "worker/rank/engine_spec.h"
#include "worker/rank/failure_cause.h"

namespace muster::worker {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kFolder[] = MUSTER_SOURCE_DIR "/tests/interop/data/nemotron-h";

// The model of kFolder, which transformers wrote, but for its pattern.
parallel::ModelDescription HybridOf(const std::string& pattern) {
  v1::JobSpec spec;
  v1::ModelSpec& model = *spec.mutable_engine()->mutable_model();
  model.set_family(v1::MODEL_FAMILY_HYBRID);
  model.set_pattern(pattern);
  model.set_hidden(24);
  model.set_heads(6);
  model.set_kv_heads(2);
  model.set_head_width(8);
  model.set_ffn(40);
  model.set_vocab(61);
  model.set_sequence_length(32);
  v1::MambaSpec& mamba = *model.mutable_mamba();
  mamba.set_heads(6);
  mamba.set_head_width(8);
  mamba.set_groups(2);
  mamba.set_state(5);
  mamba.set_step_min(0.5);
  spec::ApplyDefaults(spec);
  return Describe(spec.engine().model());
}

TEST(InitialWeights, OfAnotherPattern_AreRefusedWithBothAndTheField) {
  const auto files = PosixFileSystem();
  EXPECT_OK(InitialWeights::Open(*files, kFolder, HybridOf("M-*M-")).status());
  for (const char* pattern : {"M-M-*", "M-*M-M-", "M-M-"}) {
    const absl::Status refused = InitialWeights::Open(*files, kFolder, HybridOf(pattern)).status();
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_EQ(CauseOf(refused), v1::CAUSE_USER_ERROR);
    EXPECT_THAT(
        std::string(refused.message()),
        AllOf(HasSubstr(std::string("engine.model.initialize_from: ") + kFolder),
              HasSubstr(std::string("pattern is ") + pattern + " in the spec and M-*M- there"),
              HasSubstr("Set engine.model to what it holds")));
  }
}

TEST(InitialWeights, OfAnotherModel_AreRefusedWithTheNamesOfTheSpec) {
  parallel::ModelDescription wanted = HybridOf("M-*M-");
  wanted.sizes["mamba_groups"] = 3;
  wanted.flags["rotary"] = true;
  wanted.numbers["rope_theta"] = 10000;
  EXPECT_THAT(
      std::string(InitialWeights::Open(*PosixFileSystem(), kFolder, wanted).status().message()),
      AllOf(HasSubstr("mamba.groups is 3 in the spec and 2 there"),
            HasSubstr("positions is rotary in the spec and none there")));
  EXPECT_EQ(spec::FieldOf("mamba2", "heads"), "mamba.heads");
  EXPECT_EQ(spec::FieldOf("mamba2", "hidden"), "hidden");
  EXPECT_EQ(spec::FieldOf("llama", "heads"), "heads");
}

}  // namespace
}  // namespace muster::worker
