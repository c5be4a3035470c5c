// The predicted device memory of libraries, against what was measured on H200s
// (docs/benchmarks/method.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/ssm/ssd_workspace.h"
#include "parallel/mesh/mesh.h"
#include "parallel/model/families/gpt2.h"
#include "parallel/model/families/llama.h"
#include "parallel/model/families/mamba2.h"
#include "parallel/model/mamba2_mixer.h"
#include "parallel/train/memory.h"

namespace muster::parallel {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr Gpt2Config kGpt2{1, 768, 12, 128, 1024};
constexpr LlamaConfig kLlama1b{1, 2048, 32, 8, 64, 128, 32768};
constexpr LlamaConfig kLlama3b{1, 3072, 24, 8, 64, 128, 4096};

Mesh MeshOf(const PerAxis& degrees) {
  int ranks = 1;
  for (const Axis axis : {Axis::kPipeline, Axis::kData, Axis::kContext, Axis::kTensor}) {
    ranks *= degrees[axis];
  }
  return *Mesh::Make({.degrees = degrees}, ranks);
}

template <typename Config>
int64_t AttentionMiB(const Config& config, int64_t micro_batch, const PerAxis& degrees,
                     ModelParallel parallel, Precision precision = Precision::kBf16) {
  const Mesh mesh = MeshOf(degrees);
  parallel.tensor_size = mesh.degree(Axis::kTensor);
  parallel.context_size = mesh.degree(Axis::kContext);
  const auto model = MakeModel(Describe(config), parallel);
  EXPECT_TRUE(model.ok()) << model.status();
  TrainerOptions options;
  options.micro_batch = options.global_batch = micro_batch;
  options.precision = precision;
  const TrainerPlace place = {.options = options,
                              .model = **model,
                              .mesh = mesh,
                              .sequence_length = config.sequence_length};
  EXPECT_EQ(LibraryBytes(place, kernels::DeviceKind::kCpu), 0);
  EXPECT_EQ(LibraryBytes(place, kernels::DeviceKind::kCuda) -
                CommunicatorBytes(mesh, 1, parallel.context_method, options.copy_engines),
            kCudaContextBytes + 128 * kMiB);
  return AttentionBytes(place) / kMiB;
}

TEST(LibraryMemory, AttentionOfOneRank_FollowsTheOrderOfAdditions) {
  const PerAxis one(1, 1, 1, 1);
  EXPECT_EQ(AttentionMiB(kGpt2, 64, one, {}), 1539);
  EXPECT_EQ(AttentionMiB(kGpt2, 64, one, {.deterministic = false}), 195);
  EXPECT_EQ(AttentionMiB(kLlama3b, 2, one, {}), 1632);
  EXPECT_EQ(AttentionMiB(kLlama3b, 2, one, {.deterministic = false}), 192);
  // Our own kernels run for heads of 64 whose scores would take more than 2 GiB, for documents and
  // in fp32.
  EXPECT_EQ(AttentionMiB(kLlama1b, 1, one, {}), 0);
  EXPECT_EQ(AttentionMiB(kLlama1b, 1, one, {.documents = true, .deterministic = false}), 0);
  EXPECT_EQ(AttentionMiB(kGpt2, 64, one, {}, Precision::kFp32), 0);
}

TEST(LibraryMemory, AttentionOverRanks_CountsTheHeadsAndKeysOfOneCall) {
  const PerAxis context(1, 1, 4, 1);
  const auto any = [](ContextMethod method) {
    return ModelParallel{.context_method = method, .deterministic = false};
  };
  // dq in fp32 and row sums of 4096 queries of 32 heads; dk and dv of 8192 or 28,672 keys.
  EXPECT_EQ(AttentionMiB(kLlama1b, 1, context, any(ContextMethod::kRing)), 32 + 64);
  EXPECT_EQ(AttentionMiB(kLlama1b, 1, context, any(ContextMethod::kAllGather)), 32 + 224);
  // 8 heads of all 32,768 tokens in two groups: dq, row sums, dk and dv of 4 heads.
  EXPECT_EQ(AttentionMiB(kLlama1b, 1, context, any(ContextMethod::kAllToAll)), (64 + 1 + 64) / 2);
  EXPECT_EQ(AttentionMiB(kLlama3b, 2, PerAxis(1, 1, 1, 4), {.deterministic = false}), 192 / 4);
  // In a fixed order of additions: 2 bytes of scores for each of 24 heads x 2048 queries x 4096
  // keys.
  EXPECT_EQ(AttentionMiB(kLlama3b, 1, PerAxis(1, 1, 1, 2), {}), 1632 / 4);
}

// The backward of a scan works on the heads that the rank holds, whatever its share of them is.
TEST(LibraryMemory, ScanOfUnevenShares_IsThatOfTheRanksOwnHeadsAndGroups) {
  // In one call each.
  using Share = std::vector<ScanPart>;
  const auto expect = [](int64_t groups, const std::vector<double>& weights,
                         const std::vector<Share>& shares) {
    const auto ranks = static_cast<int>(shares.size());
    Mamba2Config config;
    config.layers = 1;
    config.hidden = 256;
    config.heads = 8;
    config.groups = groups;
    config.vocab = 128;
    config.sequence_length = 4096;
    const Mesh mesh = MeshOf(PerAxis(1, 1, 1, ranks));
    TrainerOptions options;
    options.micro_batch = options.global_batch = 2;
    options.precision = Precision::kBf16;
    for (int rank = 0; rank < ranks; ++rank) {
      SCOPED_TRACE(rank);
      const auto model = MakeModel(
          Describe(config), {.tensor_rank = rank, .tensor_size = ranks, .tensor_weights = weights});
      ASSERT_TRUE(model.ok()) << model.status();
      const TrainerPlace place = {.options = options,
                                  .model = **model,
                                  .mesh = mesh,
                                  .coordinate = PerAxis(0, 0, 0, rank),
                                  .sequence_length = config.sequence_length};
      int64_t most = 0;
      for (const ScanPart& part : shares[rank]) {
        most = std::max(most, kernels::SsdWorkspaceBytes({.samples = 2,
                                                          .positions = 4096,
                                                          .heads = part.heads,
                                                          .groups = part.groups,
                                                          .width = 64,
                                                          .columns = 128,
                                                          .chunk = kMamba2Chunk,
                                                          .in_16_bits = true}));
      }
      EXPECT_EQ(ScanBytes(place), most);
    }
  };
  expect(8, {5, 2, 1}, {{{5, 5}}, {{2, 2}}, {{1, 1}}});
  // One group for all ranks: each has its B and C.
  expect(1, {5, 2, 1}, {{{5, 1}}, {{2, 1}}, {{1, 1}}});
  expect(8, {}, {{{3, 3}}, {{3, 3}}, {{2, 2}}});
  // Two groups: the first rank has one and a half of them.
  expect(2, {6, 2}, {{{4, 1}, {2, 1}}, {{2, 1}}});
}

// Attention likewise: 8 heads in 8 groups at 6 to 2.
TEST(LibraryMemory, AttentionOfUnevenShares_IsThatOfTheRanksOwnHeads) {
  const LlamaConfig config{1, 1024, 8, 8, 64, 128, 4096};
  const int64_t all = AttentionMiB(config, 2, PerAxis(1, 1, 1, 1), {.deterministic = false});
  EXPECT_GT(all, 0);
  const auto of = [&](int rank) {
    return AttentionMiB(config, 2, PerAxis(1, 1, 1, 2),
                        {.tensor_rank = rank, .tensor_weights = {6, 2}, .deterministic = false});
  };
  EXPECT_EQ(of(0), all * 6 / 8);
  EXPECT_EQ(of(1), all * 2 / 8);
}

// 960 MiB for each communicator, 384 MiB for each peer that a rank sends to.
TEST(LibraryMemory, Communicators_AreCountedWithThePeersThatTheySendTo) {
  const auto mib = [](const PerAxis& degrees, int zero_shards,
                      ContextMethod context = ContextMethod::kRing, bool copy_engines = false) {
    return CommunicatorBytes(MeshOf(degrees), zero_shards, context, copy_engines) / kMiB;
  };
  EXPECT_EQ(mib(PerAxis(1, 1, 1, 1), 1), 0);
  EXPECT_EQ(mib(PerAxis(1, 4, 1, 1), 1), 2 * 960);            // 1.90 GiB on four H200s
  EXPECT_EQ(mib(PerAxis(1, 4, 1, 1), 4), 3 * 960);            // 2.68 GiB
  EXPECT_EQ(mib(PerAxis(1, 1, 1, 4), 1), 2 * 960);            // 2.38 GiB
  EXPECT_EQ(mib(PerAxis(1, 2, 1, 2), 1), 3 * 960);            // 3.31 GiB
  EXPECT_EQ(mib(PerAxis(1, 1, 4, 1), 1), 3 * 960 + 2 * 384);  // 4.20 GiB
  EXPECT_EQ(mib(PerAxis(1, 1, 4, 1), 1, ContextMethod::kAllToAll), 3 * 960 + 3 * 384);  // 3.87 GiB
  EXPECT_EQ(mib(PerAxis(1, 1, 4, 1), 1, ContextMethod::kAllGather), 3 * 960);
  // With copy engines, NCCL needs no buffers for a context group; pipeline stages still need them.
  EXPECT_EQ(mib(PerAxis(1, 1, 4, 1), 1, ContextMethod::kAllToAll, true), 3 * 960);
  EXPECT_EQ(mib(PerAxis(4, 1, 1, 1), 1, ContextMethod::kRing, true), 2 * 960 + 2 * 384);
  EXPECT_EQ(mib(PerAxis(1, 1, 2, 1), 1), 3 * 960 + 384);
  // Proportional to thread blocks; with 8, a communicator was measured at 0.2 GiB.
  const Mesh context = MeshOf(PerAxis(1, 1, 4, 1));
  const auto with = [&](int thread_blocks) {
    return CommunicatorBytes(context, 1, ContextMethod::kRing, false, thread_blocks) / kMiB;
  };
  EXPECT_EQ(with(8), 3 * 240 + 2 * 96);
  EXPECT_EQ(with(64), with(0));
  EXPECT_EQ(mib(PerAxis(4, 1, 1, 1), 1), 2 * 960 + 2 * 384);
}

}  // namespace
}  // namespace muster::parallel
