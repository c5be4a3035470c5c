#include "worker/rank/job_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/train/failure.h"
#include "parallel/train/trainer.h"
#include "proto/spec/spec.h"
#include "tests/support/status_matchers.h"
#include "tests/worker/plan_specs.h"
#include "worker/rank/engine_setup.h"
#include "worker/rank/engine_spec.h"
#include "worker/rank/failure_cause.h"

namespace muster::worker {
namespace {

using parallel::Axis;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr int64_t kGiB = int64_t{1} << 30;

// A small job on this machine, with its own data set.
class SmallJobs : public ::testing::Test {
 protected:
  SmallJobs() : directory_(absl::StrCat(::testing::TempDir(), "/muster-plan-", getpid())) {
    EXPECT_OK(files_->RemoveTree(directory_));
    EXPECT_OK(files_->MakeDirectory(directory_));
    auto writer = *parallel::IndexedDatasetWriter::Create(*files_, directory_ + "/text",
                                                          parallel::TokenType::kU8);
    std::vector<int32_t> tokens(5000);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * i % 97);
    EXPECT_OK(writer->Append(tokens));
    EXPECT_OK(writer->EndDocument());
    EXPECT_OK(writer->Finish());
  }
  ~SmallJobs() override { files_->RemoveTree(directory_).IgnoreError(); }

  v1::JobSpec Job(v1::ModelFamily family, const Split& split) {
    v1::JobSpec spec;
    v1::EngineSpec& engine = *spec.mutable_engine();
    v1::ModelSpec& model = *engine.mutable_model();
    model.set_family(family);
    model.set_layers(5);
    model.set_hidden(48);
    model.set_heads(6);
    model.set_vocab(131);
    model.set_sequence_length(16);
    if (family == v1::MODEL_FAMILY_LLAMA) {
      model.set_kv_heads(3);
      model.set_ffn(80);
    }
    engine.mutable_data()->add_train()->set_path(directory_ + "/text");
    engine.mutable_training()->set_global_batch(24);
    engine.mutable_training()->set_micro_batch(2);
    v1::ParallelSpec& parallel = *engine.mutable_parallel();
    parallel.set_bucket_bytes(8192);
    parallel.set_pipeline(split.pipeline);
    parallel.set_data(split.data);
    parallel.set_context(split.context);
    parallel.set_tensor(split.tensor);
    parallel.set_sequence(split.sequence);
    parallel.set_zero(split.zero);
    spec.mutable_resources()->set_ranks(split.pipeline * split.data * split.context * split.tensor);
    return WithDefaults(std::move(spec));
  }

  static v1::RankAssignment Assignment(const v1::JobSpec& spec, int rank) {
    v1::RankAssignment assignment;
    assignment.set_job_id("job-1");
    assignment.set_epoch(1);
    assignment.set_rank(rank);
    assignment.set_world_size(spec.resources().ranks());
    assignment.set_threads(1);
    assignment.set_local_ranks(spec.resources().ranks());
    *assignment.mutable_spec() = spec;
    return assignment;
  }

  // The bytes that each rank's trainer allocates on its device, by rank.
  std::vector<int64_t> Allocated(const v1::JobSpec& spec) {
    const int ranks = spec.resources().ranks();
    std::vector<int64_t> bytes(ranks, -1);
    auto world = parallel::MakeLocalCommunicators(ranks, absl::Seconds(60));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        auto setup = SetUpEngine(Assignment(spec, rank), *files_);
        EXPECT_OK(setup.status());
        if (!setup.ok()) return world[rank]->Abort(setup.status());
        auto groups = parallel::MeshGroups::Make(*setup->mesh, *world[rank], setup->zero_shards);
        EXPECT_OK(groups.status());
        parallel::TrainerHooks hooks;
        const auto trainer =
            parallel::Trainer::Make(setup->options, *setup->model, *setup->device, **groups,
                                    *setup->training, nullptr, *files_, hooks);
        EXPECT_OK(trainer.status());
        bytes[rank] = setup->device->allocated_bytes();
      });
    }
    for (std::thread& thread : threads) thread.join();
    return bytes;
  }

  void ExpectPlanned(const v1::JobSpec& spec) {
    ASSERT_OK_AND_ASSIGN(const JobPlan plan, PlanJob(spec));
    const std::vector<int64_t> allocated = Allocated(spec);
    const parallel::Mesh mesh = SplitOf(spec)->mesh;
    int ranks = 0;
    for (const RankPlan& rank : plan.ranks) ranks += rank.ranks;
    EXPECT_EQ(ranks, spec.resources().ranks());
    for (int i = 0; i < ranks; ++i) {
      // Finds the plan's entry for this rank: the last one of its stage whose first tensor rank is
      // not behind this one's; where several entries qualify, the one with equal bytes.
      const parallel::PerAxis coordinate = mesh.CoordinateOf(i);
      bool found = false;
      for (const RankPlan& rank : plan.ranks) {
        found = found || (rank.pipeline == coordinate[Axis::kPipeline] &&
                          rank.tensor <= coordinate[Axis::kTensor] &&
                          rank.memory.device_bytes() == allocated[i]);
      }
      EXPECT_TRUE(found) << "rank " << i << " (" << coordinate.ToString() << ") took "
                         << allocated[i] << " of " << plan.degrees.ToString() << ": "
                         << plan.ranks[0].memory.ToString();
    }
    EXPECT_THAT(allocated, ::testing::Contains(plan.largest().memory.device_bytes()));
  }

  const std::unique_ptr<FileSystem> files_ = PosixFileSystem();
  const std::string directory_;
};

TEST_F(SmallJobs, PlansOfEveryLayout_AreWhatItsRanksAllocate) {
  const std::vector<Split> splits = {
      {},
      {.data = 4, .zero = 1},
      {.data = 3, .zero = 0},
      {.data = 4, .zero = 2},
      {.data = 4, .zero = 3},
      {.tensor = 3},
      {.tensor = 2, .sequence = true},
      {.data = 2, .context = 2, .zero = 1},
      {.data = 2, .context = 2, .tensor = 2},
  };
  for (const v1::ModelFamily family : {v1::MODEL_FAMILY_GPT2, v1::MODEL_FAMILY_LLAMA}) {
    for (const Split& split : splits) ExpectPlanned(Job(family, split));
    ExpectPlanned(Job(family, {.pipeline = 2, .data = 2}));
    ExpectPlanned(Job(family, {.pipeline = 4, .tensor = 2}));
  }
  ExpectPlanned(Job(v1::MODEL_FAMILY_LLAMA, {.pipeline = 2, .data = 2, .zero = 3}));
  // With all parameters sharded: tables smaller than a block, and larger than two.
  for (const int vocab : {131, 1031}) {
    for (const int zero : {2, 3}) {
      for (const int stages : {1, 2}) {
        v1::JobSpec spec =
            Job(v1::MODEL_FAMILY_LLAMA, {.pipeline = stages, .data = 4, .zero = zero});
        spec.mutable_engine()->mutable_parallel()->set_resident_elements(0);
        spec.mutable_engine()->mutable_model()->set_vocab(vocab);
        ExpectPlanned(spec);
        spec.mutable_engine()->mutable_training()->set_global_batch(8);  // shares gradients' memory
        ExpectPlanned(spec);
      }
    }
  }
  // Five ranks for three key/value heads.
  ExpectPlanned(Job(v1::MODEL_FAMILY_LLAMA, {.tensor = 5}));
}

TEST_F(SmallJobs, PlansOfUnevenSharesAndAnotherOrderOfRanks_AreWhatRanksAllocate) {
  v1::JobSpec spec = Job(v1::MODEL_FAMILY_LLAMA, {.pipeline = 2, .data = 2, .tensor = 2});
  v1::ParallelSpec& parallel = *spec.mutable_engine()->mutable_parallel();
  for (const double share : {1, 3}) parallel.add_tensor_shares(share);
  ASSERT_OK_AND_ASSIGN(const JobPlan plan, PlanJob(spec));
  EXPECT_EQ(plan.largest().tensor, 1);
  ExpectPlanned(spec);
  for (const v1::MeshAxis axis :
       {v1::MESH_AXIS_PIPELINE, v1::MESH_AXIS_DATA, v1::MESH_AXIS_TENSOR, v1::MESH_AXIS_CONTEXT}) {
    parallel.add_order(axis);
  }
  ASSERT_OK_AND_ASSIGN(const SplitRun split, SplitOf(spec));
  EXPECT_EQ(split.mesh.CoordinateOf(1), parallel::PerAxis(1, 0, 0, 0));
  EXPECT_EQ(split.mesh.CoordinateOf(4), parallel::PerAxis(0, 0, 0, 1));
  ExpectPlanned(spec);
}

TEST_F(SmallJobs, PlansOfSchedulesRecomputationAndWires_AreWhatRanksAllocate) {
  for (const v1::PipelineSchedule schedule :
       {v1::PIPELINE_SCHEDULE_GPIPE, v1::PIPELINE_SCHEDULE_INTERLEAVED,
        v1::PIPELINE_SCHEDULE_ZERO_BUBBLE}) {
    v1::JobSpec spec = Job(v1::MODEL_FAMILY_LLAMA, {.pipeline = 2});
    spec.mutable_engine()->mutable_parallel()->set_pipeline_schedule(schedule);
    if (schedule == v1::PIPELINE_SCHEDULE_INTERLEAVED) {
      spec.mutable_engine()->mutable_parallel()->set_pipeline_chunks(2);
    }
    ExpectPlanned(spec);
  }
  v1::JobSpec uneven = Job(v1::MODEL_FAMILY_LLAMA, {.pipeline = 3});
  for (const int blocks : {1, 4, 0}) {
    uneven.mutable_engine()->mutable_parallel()->add_pipeline_blocks(blocks);
  }
  ExpectPlanned(uneven);
  for (const v1::Recompute recompute : {v1::RECOMPUTE_SELECTIVE, v1::RECOMPUTE_FULL}) {
    v1::JobSpec spec = Job(v1::MODEL_FAMILY_GPT2, {.data = 2});
    spec.mutable_engine()->mutable_training()->set_recompute(recompute);
    spec.mutable_engine()->mutable_training()->set_gradient_reduction(v1::GRADIENT_REDUCTION_BF16);
    ExpectPlanned(spec);
    const int64_t all = PlanJob(spec)->needed_bytes();
    spec.mutable_engine()->mutable_training()->set_recompute_blocks(2);
    ExpectPlanned(spec);
    EXPECT_GT(PlanJob(spec)->needed_bytes(), all);
  }
}

TEST_F(SmallJobs, PlansWithDocumentsApartAndActivationsOnTheHost_AreWhatRanksAllocate) {
  for (const Split& split : {Split{.pipeline = 2}, Split{.data = 2, .context = 2}}) {
    v1::JobSpec spec = Job(v1::MODEL_FAMILY_LLAMA, split);
    const int64_t on_device = PlanJob(spec)->largest().memory.device_bytes();
    spec.mutable_engine()->mutable_parallel()->mutable_offload()->set_activations(true);
    EXPECT_LT(PlanJob(spec)->largest().memory.device_bytes(), on_device);
    spec.mutable_engine()->mutable_data()->set_separate_documents(true);
    ExpectPlanned(spec);
  }
}

TEST_F(SmallJobs, RankThatDoesNotFit_IsRefusedWithCategoriesAndTheCheapestChange) {
  const v1::JobSpec spec = Job(v1::MODEL_FAMILY_LLAMA, {.data = 4});
  ASSERT_OK_AND_ASSIGN(const JobPlan plan, PlanJob(spec));
  v1::JobSpec sharded = spec;
  sharded.mutable_engine()->mutable_parallel()->set_zero(1);
  ASSERT_OK_AND_ASSIGN(const JobPlan with_zero, PlanJob(sharded));
  ASSERT_LT(with_zero.needed_bytes(), plan.needed_bytes());
  // Four ranks share the machine.
  const kernels::DeviceMemory machine = {4 * with_zero.needed_bytes(), 0};
  const auto refused = SetUpEngine(Assignment(spec, 2), *files_, machine);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CauseOf(refused.status()), v1::CAUSE_OUT_OF_MEMORY);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("rank 2 (pp=0 dp=2"), HasSubstr(BytesText(plan.needed_bytes())),
                    HasSubstr("4 ranks on this machine"), HasSubstr("optimizer "),
                    HasSubstr("activations "), HasSubstr("engine.parallel.zero=1 would fit")));
  EXPECT_OK(SetUpEngine(Assignment(sharded, 2), *files_, machine).status());
  // Where no change helps, the message says that.
  const auto hopeless = SetUpEngine(Assignment(spec, 2), *files_, kernels::DeviceMemory{4096, 0});
  EXPECT_THAT(std::string(hopeless.status().message()), HasSubstr("needs more ranks"));
}

TEST(JobPlan, Llama70bOn512Ranks_IsPlannedWithoutItsMemory) {
  ASSERT_OK_AND_ASSIGN(
      const JobPlan plan,
      PlanJob(Preset("llama-70b",
                     {.pipeline = 8, .data = 8, .tensor = 8, .sequence = true, .zero = 1}, 512,
                     1)));
  EXPECT_EQ(plan.parameters, 70'553'706'496);
  // Tensor ranks are alike: 501 units of the vocabulary each.
  EXPECT_EQ(plan.ranks.size(), 8u);
  int64_t blocks = 0;
  double parameters = 0;
  for (const RankPlan& rank : plan.ranks) {
    EXPECT_EQ(rank.ranks, 64);
    blocks += rank.blocks;
    parameters += rank.ranks / 8.0 * static_cast<double>(rank.parameters);
  }
  EXPECT_EQ(blocks, 80);
  EXPECT_NEAR(parameters, 70'553'706'496.0, 1e-3 * 70e9);
  EXPECT_TRUE(plan.ranks.front().embedding);
  EXPECT_TRUE(plan.ranks.back().head);
  // 1F1B keeps most activations on the first stage; 7 of 64 + 7 slots are idle at least.
  EXPECT_EQ(&plan.largest(), &plan.ranks.front());
  EXPECT_GT(plan.imbalance(), 0.1);
  EXPECT_GT(plan.bubble, 7.0 / 71);
  EXPECT_LT(plan.bubble, 0.2);
  EXPECT_LT(plan.needed_bytes(), 80 * kGiB);
}

// Peer memory needs the buffers of a tensor group at the same offsets on all of its ranks.
TEST(JobPlan, TensorRanksOfUnevenShares_HaveOneSizeOfWorkspace) {
  v1::JobSpec spec = Preset("gpt2-1558m", {.tensor = 2, .sequence = true}, 16, 16);
  const auto workspaces = [&] {
    std::vector<int64_t> bytes;
    const JobPlan plan = *PlanJob(spec);
    EXPECT_EQ(plan.ranks.size(), 2u);  // of 13 and of 12 heads
    for (const RankPlan& rank : plan.ranks) {
      EXPECT_FALSE(rank.too_uneven);
      int64_t& sum = bytes.emplace_back();
      for (const auto& [name, use] : rank.memory.device) {
        if (name == "activations" || name == "logits" || name == "scratch") sum += use;
      }
      const auto needed = RankBytes(spec, parallel::PerAxis(0, 0, 0, rank.tensor));
      EXPECT_EQ(*needed, rank.memory.device_bytes());
    }
    return bytes;
  };
  const std::vector<int64_t> together = workspaces();
  spec.mutable_engine()->mutable_parallel()->set_copy_engines(false);
  const std::vector<int64_t> apart = workspaces();
  EXPECT_EQ(together[0], together[1]);
  EXPECT_GT(apart[0], apart[1]);
  EXPECT_GE(together[0], apart[0]);
  EXPECT_LT(static_cast<double>(together[0]), 1.01 * static_cast<double>(apart[0]));

  spec.mutable_engine()->mutable_parallel()->clear_copy_engines();
  for (const double share : {2.0, 1.0}) {
    spec.mutable_engine()->mutable_parallel()->add_tensor_shares(share);
  }
  const JobPlan uneven = *PlanJob(WithDefaults(spec));
  EXPECT_TRUE(uneven.ranks[0].too_uneven && uneven.ranks[1].too_uneven);
  EXPECT_GT(uneven.ranks[0].memory.device_bytes(), 1.3 * uneven.ranks[1].memory.device_bytes());
}

TEST(JobPlan, EveryPreset_IsPlanned) {
  for (const std::string& name : spec::PresetNames()) {
    ASSERT_OK_AND_ASSIGN(const JobPlan plan, PlanJob(Preset(name, {}, 8, 1)));
    const auto parameters = static_cast<double>(plan.parameters);
    // 16-bit weights, the lower 16 bits of their fp32 masters, and both moments.
    EXPECT_GT(static_cast<double>(plan.needed_bytes()), 12 * parameters) << name;
    EXPECT_GT(static_cast<double>(plan.flops_per_token), 6 * 0.9 * parameters) << name;
  }
}

// 16 tensor ranks share 8 key/value heads by twos: K and V of 128 rows each in 80 blocks, which
// ZeRO leaves whole.
TEST(JobPlan, WhatZeroLeavesWhole_IsNamed) {
  const auto whole = [](int tensor, int zero) {
    const auto plan =
        PlanJob(Preset("llama-70b", {.data = 4, .tensor = tensor, .zero = zero}, 64, 1));
    EXPECT_OK(plan);
    return plan->ranks[0].whole;
  };
  EXPECT_EQ(whole(16, 1).total(), 0);
  for (const int zero : {2, 3}) {
    EXPECT_EQ(whole(16, zero).keys, int64_t{80} * 2 * 128 * 8192);
    EXPECT_EQ(whole(16, zero).tables, 0);
    EXPECT_EQ(whole(16, zero).small, int64_t{80 * 2 + 1} * 8192);  // norms
    EXPECT_EQ(whole(8, zero).keys, 0);
    // A tied table, and the norm of the head.
    const auto tied = PlanJob(Preset("llama-1b", {.data = 4, .zero = zero}, 64, 1));
    EXPECT_EQ(tied->ranks[0].whole.tables, int64_t{128256 + 1} * 2048);
  }
}

// Of 70.5 billion parameters a rank holds 16 bytes each of its share. What does not fall with the
// number of ranks are the buffers through which blocks and tables rotate, one table each: in ZeRO-3
// two of bf16 parameters and two of fp32 gradients.
TEST(JobPlan, Llama70bInZero3_TakesLessOnMoreRanks) {
  const double table = 128256.0 * 8192, parameters = 70'553'706'496;
  double before = 0;
  for (const int ranks : {64, 128, 256, 512}) {
    ASSERT_OK_AND_ASSIGN(const JobPlan plan,
                         PlanJob(Preset("llama-70b", {.data = ranks, .zero = 3}, 2 * ranks, 1)));
    double state = 0;
    for (const auto& category : plan.ranks[0].memory.device) {
      if (category.name == "gathered") {
        EXPECT_NEAR(static_cast<double>(category.bytes), 2 * 2 * table, 1e6);
      }
      for (const char* name : {"parameters", "gathered", "master", "optimizer", "gradients"}) {
        if (category.name == name) state += static_cast<double>(category.bytes);
      }
    }
    EXPECT_NEAR(state, 16 * parameters / ranks + 2 * (2 + 4) * table, 0.02 * state) << ranks;
    const auto all = static_cast<double>(plan.ranks[0].memory.device_bytes());
    if (before > 0) {
      EXPECT_NEAR(before - all, 16 * parameters / ranks, 0.02 * all) << ranks;
    }
    before = all;
  }
}

TEST(JobPlan, EachStageOfZero_ShardsItsPartOfTheState) {
  const auto plan = [](int zero) {
    return *PlanJob(Preset("llama-8b", {.data = 8, .zero = zero}, 64, 1));
  };
  const auto category = [](const JobPlan& plan, const std::string& name) {
    for (const auto& category : plan.ranks[0].memory.device) {
      if (category.name == name) return category.bytes;
    }
    return int64_t{-1};
  };
  const JobPlan zero0 = plan(0), zero1 = plan(1), zero3 = plan(3);
  const auto parameters = static_cast<double>(zero0.parameters);
  EXPECT_NEAR(category(zero0, "parameters"), 2 * parameters, 0.01 * parameters);
  EXPECT_NEAR(category(zero0, "master"), 2 * parameters, 0.01 * parameters);
  EXPECT_NEAR(category(zero0, "optimizer"), 8 * parameters, 0.01 * parameters);
  EXPECT_NEAR(category(zero1, "optimizer"), parameters, 0.01 * parameters);
  EXPECT_EQ(category(zero1, "gradients"), category(zero0, "gradients"));
  EXPECT_LT(category(zero3, "gradients"), category(zero1, "gradients") / 2);
  EXPECT_GT(category(zero3, "gathered"), 0);
}

// Per parameter: fp32 gradients one way, bf16 parameters the other, for ZeRO-3 twice for each
// micro-batch. Per layer of tensor parallelism with sequence parallelism ten collectives.
TEST(JobPlan, BytesSent_AreThoseOfEachMethod) {
  const auto sent = [](const Split& split) {
    const JobPlan plan = *PlanJob(Preset("llama-8b", split, 64, 1));
    return std::make_pair(plan.ranks[0].sent, static_cast<double>(plan.parameters));
  };
  const auto [ddp, parameters] = sent({.data = 8});
  EXPECT_NEAR(ddp.replicas, 2 * 4 * parameters * 7 / 8, 0.01 * parameters);
  EXPECT_EQ(ddp.total(), ddp.replicas);
  const auto [zero1, same] = sent({.data = 8, .zero = 1});
  EXPECT_NEAR(zero1.gradients, 4 * parameters * 7 / 8, 0.01 * parameters);
  EXPECT_NEAR(zero1.parameters, 2 * parameters * 7 / 8, 0.01 * parameters);
  const auto [zero3, again] = sent({.data = 8, .zero = 3});
  EXPECT_NEAR(zero3.gradients, 8 * zero1.gradients, 0.01 * zero3.gradients);
  EXPECT_GT(zero3.parameters, 12 * zero1.parameters);
  EXPECT_LT(zero3.parameters, 16 * zero1.parameters);
  const auto [tensor, all] = sent({.data = 2, .tensor = 4, .sequence = true});
  // 32 micro-batches of bf16 rows of 4096 columns, 32 layers, embedding and head.
  const double row = 32.0 * 2 * 4096;
  const auto tokens = static_cast<double>(spec::FindPreset("llama-8b")->sequence_length());
  EXPECT_NEAR(tensor.tensor, row * tokens * (10 * 32 + 4) * 3 / 4, 0.01 * tensor.tensor);
  EXPECT_EQ(tensor.keys, 0);
  EXPECT_GT(sent({.tensor = 16, .sequence = true}).first.keys, 0);  // of 8 key/value heads
  EXPECT_EQ(sent({}).first.total(), 0);
  // A hundredth of the elements as pairs of 8 bytes to seven others; embedding and head, which are
  // excluded by default, go whole.
  v1::JobSpec top_k = Preset("llama-8b", {.data = 8}, 64, 1);
  top_k.mutable_engine()->mutable_training()->set_precision(v1::PRECISION_FP32);
  top_k.mutable_resources()->set_device(v1::DEVICE_KIND_CPU);
  auto& compression = *top_k.mutable_engine()->mutable_training()->mutable_gradient_compression();
  compression.mutable_top_k()->set_density(0.01);
  ASSERT_OK_AND_ASSIGN(const JobPlan plan, PlanJob(WithDefaults(top_k)));
  const double tables = 2.0 * 128256 * 4096;
  EXPECT_NEAR(plan.ranks[0].sent.replicas,
              0.01 * (parameters - tables) * 8 * 7 + 2 * 4 * tables * 7 / 8, 0.01 * parameters);
}

TEST(JobPlan, ResidentElements_StayWholeOnEveryRank) {
  v1::JobSpec spec = Preset("llama-1b", {.data = 8, .zero = 3}, 64, 1);
  const auto parameters = [&](int64_t resident) {
    spec.mutable_engine()->mutable_parallel()->set_resident_elements(resident);
    return PlanJob(spec)->ranks[0].memory.device[0];
  };
  const auto few = parameters(100'000), all = parameters(int64_t{1} << 40);
  ASSERT_EQ(few.name, "parameters");
  // With all of them resident nothing is sharded but the optimizer's state.
  EXPECT_NEAR(all.bytes, 2.0 * 1'235'814'400, 1e7);
  EXPECT_LT(few.bytes, all.bytes / 2);
}

}  // namespace
}  // namespace muster::worker
