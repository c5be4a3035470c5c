// Every way to split a run over two GPUs trains like one GPU. The same on two threads of the host,
// which never skips.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file_system.h"
#include "base/rng.h"
#include "kernels/device.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/sampler.h"
#include "parallel/model/model.h"
#include "parallel/pipeline/stages.h"
#include "parallel/train/trainer.h"
#include "tests/support/key_value_store.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

constexpr int64_t kVocab = 61;
constexpr int64_t kSteps = 10;

struct Layout {
  const char* name;
  PerAxis degrees = PerAxis(1, 1, 1, 1);  // pipeline, data, context, tensor
  bool sequence_parallel = false;
  ContextMethod method = ContextMethod::kRing;
  int zero = 0;
  PipelineSchedule schedule = PipelineSchedule::kOneForwardOneBackward;
};

struct Curve {
  absl::Status status;
  std::vector<double> losses, norms;
};

class Recorder : public TrainerHooks {
 public:
  explicit Recorder(Curve& curve) : curve_(curve) {}
  void OnStep(const StepReport& report) override {
    curve_.losses.push_back(report.loss);
    curve_.norms.push_back(report.gradient_norm);
  }

 private:
  Curve& curve_;
};

// Whether on GPUs.
class LayoutsGpuTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    for (int i = 0; i < 2; ++i) {
      if (!GetParam()) {
        devices_.push_back(kernels::MakeCpuDevice(1));
        continue;
      }
      auto device = kernels::MakeCudaDevice(i);
      if (!device.ok()) GTEST_SKIP() << "NO TWO GPUS, NOT TESTED: " << device.status();
      devices_.push_back(*std::move(device));
    }
    SetNcclEnvironment(/*reproducible=*/false);
    directory_ = absl::StrCat(::testing::TempDir(), "/muster-gpu-layouts-", getpid());
    ASSERT_OK(files_->RemoveTree(directory_));
    ASSERT_OK(files_->MakeDirectory(directory_));
    // A chain over the vocabulary that is followed four times out of five.
    auto writer = *IndexedDatasetWriter::Create(*files_, directory_ + "/text", TokenType::kU8);
    Rng rng(1);
    std::vector<int32_t> text = {1};
    while (text.size() < 40000) {
      const int32_t likely = (text.back() * 7 + 1) % kVocab;
      text.push_back(rng.Chance(0.8) ? likely : static_cast<int32_t>(rng.Below(kVocab)));
    }
    ASSERT_OK(writer->Append(text));
    ASSERT_OK(writer->EndDocument());
    ASSERT_OK(writer->Finish());
    dataset_ = *IndexedDataset::Open(directory_ + "/text");
    training_ = std::make_unique<Sampler>(
        *Sampler::Training({{dataset_.get(), 1}}, {Sequence(), kVocab, 9}));
  }
  void TearDown() override {
    if (directory_.empty()) return;
    EXPECT_OK(files_->RemoveTree(directory_));
  }

  // Heads of 64 columns on GPUs, where cuDNN has its graphs.
  static int64_t Sequence() { return GetParam() ? 128 : 16; }
  static ModelDescription Gpt2() {
    return {.family = "gpt2",
            .sizes = {{"layers", 2},
                      {"hidden", GetParam() ? 256 : 32},
                      {"heads", 4},
                      {"vocab", kVocab},
                      {"sequence_length", Sequence()}}};
  }
  static ModelDescription Llama() {
    ModelDescription model = Gpt2();
    model.family = "llama";
    model.sizes["kv_heads"] = 2;
    model.sizes["ffn"] = GetParam() ? 512 : 48;
    model.numbers = {{"norm_epsilon", 1e-5}, {"rope_theta", 10000}};
    model.flags = {{"tied", false}};
    return model;
  }

  Curve RunRank(const ModelDescription& description, const Layout& layout, Precision precision,
                kernels::Device& device, Communicator& world) {
    Curve curve;
    const Mesh mesh = *Mesh::Make({.degrees = layout.degrees}, world.size());
    const PerAxis place = mesh.CoordinateOf(world.rank());
    ModelParallel part =
        *StageParts(description, mesh.degree(Axis::kPipeline), 1, place[Axis::kPipeline]);
    part.tensor_rank = place[Axis::kTensor];
    part.tensor_size = mesh.degree(Axis::kTensor);
    part.sequence_parallel = layout.sequence_parallel;
    part.context_size = mesh.degree(Axis::kContext);
    part.context_method = layout.method;
    part.split_backward = layout.schedule == PipelineSchedule::kZeroBubble;
    const auto model = *MakeModel(description, part);
    TrainerOptions options;
    options.steps = kSteps;
    options.global_batch = 8;
    options.micro_batch = 2;
    options.seed = 77;
    options.schedule = {Decay::kCosine, 2e-3, 2e-4, 5, kSteps};
    options.bucket_bytes = 256 << 10;
    options.precision = precision;
    options.zero = layout.zero;
    options.pipeline_schedule = layout.schedule;
    options.resident_elements = 1000;
    options.job = JobId("gpu-layouts");
    options.epoch = Epoch(1);
    Recorder hooks(curve);
    const auto groups =
        *MeshGroups::Make(mesh, world, layout.zero > 0 ? layout.degrees[Axis::kData] : 1);
    auto trainer =
        Trainer::Make(options, *model, device, *groups, *training_, nullptr, *files_, hooks);
    curve.status = trainer.status();
    if (curve.status.ok()) curve.status = (*trainer)->Run().status();
    if (!curve.status.ok()) world.Abort(curve.status);
    return curve;
  }

  // NCCL's connections are made once: that takes longer than a run.
  Communicator& Connect(KeyValueStore& store, int rank) {
    if (nccl_[rank] == nullptr) {
      auto made = MakeNcclCommunicator(store, rank, 2, *devices_[rank], NcclOptions());
      CHECK_OK(made);
      nccl_[rank] = *std::move(made);
    }
    return *nccl_[rank];
  }

  Curve Train(const ModelDescription& description, const Layout& layout, Precision precision) {
    int ranks = 1;
    for (const Axis axis : kAxes) ranks *= layout.degrees[axis];
    testing::MemoryKeyValueStore store;
    auto local = MakeLocalCommunicators(ranks, absl::Seconds(60));
    std::vector<Curve> curves(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        Communicator& world = GetParam() && ranks == 2 ? Connect(store, rank) : *local[rank];
        curves[rank] = RunRank(description, layout, precision, *devices_[rank], world);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Curve& curve : curves) {
      EXPECT_OK(curve.status) << layout.name;
      EXPECT_EQ(curve.losses, curves[0].losses) << layout.name;
    }
    return curves[0];
  }

  // Bounds are relative: of the gradient's norm in the first step, and of every loss.
  void ExpectLikeOneRank(const ModelDescription& description, Precision precision,
                         double norm_bound, double loss_bound) {
    const Curve alone = Train(description, {.name = "one"}, precision);
    ASSERT_EQ(alone.losses.size(), static_cast<size_t>(kSteps));
    EXPECT_LT(alone.losses.back(), 0.95 * alone.losses.front());
    const std::vector<Layout> layouts = {
        {.name = "data 2", .degrees = PerAxis(1, 2, 1, 1)},
        {.name = "zero 3", .degrees = PerAxis(1, 2, 1, 1), .zero = 3},
        {.name = "tensor 2", .degrees = PerAxis(1, 1, 1, 2)},
        {.name = "tensor 2, sequence", .degrees = PerAxis(1, 1, 1, 2), .sequence_parallel = true},
        {.name = "ring 2", .degrees = PerAxis(1, 1, 2, 1)},
        {.name = "all-gather 2",
         .degrees = PerAxis(1, 1, 2, 1),
         .method = ContextMethod::kAllGather},
        {.name = "all-to-all 2",
         .degrees = PerAxis(1, 1, 2, 1),
         .method = ContextMethod::kAllToAll},
        {.name = "pipeline 2", .degrees = PerAxis(2, 1, 1, 1)},
        {.name = "pipeline 2, zero bubble",
         .degrees = PerAxis(2, 1, 1, 1),
         .schedule = PipelineSchedule::kZeroBubble}};
    for (const Layout& layout : layouts) {
      SCOPED_TRACE(absl::StrCat(description.family, ", ", layout.name));
      const Curve curve = Train(description, layout, precision);
      ASSERT_EQ(curve.losses.size(), alone.losses.size());
      EXPECT_NEAR(curve.norms[0], alone.norms[0], norm_bound * alone.norms[0]);
      double worst = 0;
      for (size_t i = 0; i < alone.losses.size(); ++i) {
        worst = std::max(worst, std::abs(curve.losses[i] / alone.losses[i] - 1));
      }
      EXPECT_LE(worst, loss_bound);
      std::cout << "  " << description.family << ", " << layout.name << ": losses within " << worst
                << std::endl;
    }
  }

  const std::unique_ptr<FileSystem> files_ = PosixFileSystem();
  std::vector<std::unique_ptr<kernels::Device>> devices_;
  std::unique_ptr<Communicator> nccl_[2];
  std::string directory_;
  std::unique_ptr<IndexedDataset> dataset_;
  std::unique_ptr<Sampler> training_;
};

TEST_P(LayoutsGpuTest, EveryAxisInFp32_TrainsLikeOneRank) {
  ExpectLikeOneRank(Gpt2(), Precision::kFp32, 1e-5, 1e-4);
  ExpectLikeOneRank(Llama(), Precision::kFp32, 1e-5, 1e-4);
}

TEST_P(LayoutsGpuTest, EveryAxisInBf16_TrainsLikeOneRank) {
  if (!GetParam()) GTEST_SKIP() << "the host computes in fp32";
  ExpectLikeOneRank(Gpt2(), Precision::kBf16, 2e-2, 5e-3);
  ExpectLikeOneRank(Llama(), Precision::kBf16, 2e-2, 5e-3);
}

INSTANTIATE_TEST_SUITE_P(Devices, LayoutsGpuTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Cuda" : "Host"; });

}  // namespace
}  // namespace muster::parallel
