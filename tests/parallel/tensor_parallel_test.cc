// A model cut over the ranks of a tensor-parallel group computes the losses and gradients of one
// rank, and sends as many bytes as the method says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/model/families/gpt2.h"
#include "parallel/model/families/llama.h"
#include "parallel/model/tensor_parallel.h"
#include "tests/parallel/parameter_storage.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kVocab = 61;
// 12 tokens: rows for 1, 2, 3 and 4 ranks; head chunks that end anywhere.
constexpr BatchShape kBatch = {.batch = 2, .sequence = 6, .head_tokens = 5};

ModelDescription Gpt2() { return Describe(Gpt2Config{2, 20, 5, kVocab, 8}); }

// Ten query heads in five groups, or another number, and an odd MLP.
ModelDescription Llama(bool tied, int64_t kv_heads = 5) {
  LlamaConfig config;
  config.layers = 2;
  config.hidden = 40;
  config.heads = 10;
  config.kv_heads = kv_heads;
  config.ffn = 53;
  config.vocab = kVocab;
  config.sequence_length = 8;
  config.tied = tied;
  config.rope_theta = 100;
  return Describe(config);
}

struct Layout {
  int ranks = 1;
  bool sequence = false;
  std::vector<double> weights;
  Recompute recompute = Recompute::kNone;
};

std::string ToString(const Layout& layout) {
  return absl::StrCat(layout.ranks, " ranks", layout.sequence ? ", sequence" : "",
                      layout.weights.empty() ? "" : ", weighted");
}

// A tensor of the whole model, put together from the ranks' parts.
using Whole = std::vector<double>;

struct Found {
  std::vector<float> losses;
  std::map<std::string, Whole> gradients;
  int64_t bytes = 0;  // sent by this rank in one forward and backward
  int64_t elements = 0;
  std::map<std::string, int64_t> memory;  // by category
};

// Adds this rank's gradients to those of the whole model: a sharded one to its place, a partial
// or shared one as a summand, a replicated one on rank 0.
void Place(const Parameter& parameter, const std::vector<float>& values, int rank,
           std::map<std::string, Whole>& to) {
  const Box whole = Box::Whole(parameter.global_shape);
  Whole& target = to.try_emplace(parameter.name, Whole(whole.elements())).first->second;
  if (parameter.sharing == TensorSharing::kReplicated && rank != 0) return;
  int64_t at = 0;
  for (const Box& box : parameter.Boxes(0, parameter.elements())) {
    std::vector<double> part(values.begin() + at, values.begin() + at + box.elements());
    std::vector<double> before(part.size());
    CopyBox(box, 8, whole, reinterpret_cast<const char*>(target.data()), box,
            reinterpret_cast<char*>(before.data()));
    for (size_t i = 0; i < part.size(); ++i) part[i] += before[i];
    CopyBox(box, 8, box, reinterpret_cast<const char*>(part.data()), whole,
            reinterpret_cast<char*>(target.data()));
    at += box.elements();
  }
  EXPECT_EQ(at, parameter.elements());
}

Found RunRank(const ModelDescription& description, const Layout& layout, Communicator& group,
              std::map<std::string, std::vector<float>>& replicated) {
  ModelParallel parallel;
  parallel.tensor_rank = group.rank();
  parallel.tensor_size = group.size();
  parallel.sequence_parallel = layout.sequence;
  parallel.tensor_weights = layout.weights;
  parallel.recompute = layout.recompute;
  const auto model = *MakeModel(description, parallel);
  const auto device = kernels::MakeCpuDevice(1);
  const auto stream = *device->MakeStream();
  const ParameterRegistry& registry = model->parameters();
  ParameterStorage weights(registry), gradients(registry);
  for (ParameterId id = 0; id < registry.size(); ++id) {
    Initialize(registry.at(id), 5, 0, registry.at(id).elements(), weights[id].data());
    // Larger than a model begins with, so that every part matters to the loss.
    if (registry.at(id).global_shape.size() == 2) {
      for (float& value : weights[id]) value *= 6;
    }
  }
  kernels::Arena arena;
  model->TakeWorkspace(arena, kBatch);
  CHECK_OK(arena.Commit(*device));
  Workspace workspace = model->TakeWorkspace(arena, kBatch);
  Rng rng(testing::TestSeed());
  for (int64_t i = 0; i < kBatch.tokens(); ++i) {
    workspace.batch.tokens.as<int32_t>()[i] = static_cast<int32_t>(rng.Below(kVocab));
    workspace.batch.targets.as<int32_t>()[i] =
        i % 5 == 4 ? -1 : static_cast<int32_t>(rng.Below(kVocab));
  }
  Pass pass = {*stream, weights.views()};
  pass.gradients = &gradients.views();
  pass.tensor = &group;
  const int64_t before = group.bytes_sent();
  model->Forward(pass, workspace);
  model->Backward(pass, workspace);
  EXPECT_OK(stream->Synchronize());
  Found found;
  found.bytes = group.bytes_sent() - before;
  found.elements = registry.elements();
  found.memory = arena.bytes_by_category();
  const float* losses = workspace.forward.losses.f32();
  found.losses.assign(losses, losses + kBatch.tokens());
  for (ParameterId id = 0; id < registry.size(); ++id) {
    const Parameter& parameter = registry.at(id);
    Place(parameter, gradients[id], group.rank(), found.gradients);
    if (parameter.sharing == TensorSharing::kReplicated) {
      replicated[parameter.name] = gradients[id];
    }
    for (int64_t i = parameter.elements(); i < parameter.storage_elements(); ++i) {
      EXPECT_EQ(gradients[id][i], 0.0f) << "padding of " << parameter.name;
    }
  }
  return found;
}

std::vector<Found> RunRanks(const ModelDescription& description, const Layout& layout) {
  auto groups = MakeLocalCommunicators(layout.ranks, absl::Seconds(60));
  std::vector<Found> found(layout.ranks);
  std::vector<std::map<std::string, std::vector<float>>> replicated(layout.ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < layout.ranks; ++rank) {
    threads.emplace_back(
        [&, rank] { found[rank] = RunRank(description, layout, *groups[rank], replicated[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 1; rank < layout.ranks; ++rank) {
    EXPECT_EQ(found[rank].losses, found[0].losses);
    // Nobody exchanges these: they have to be the same bits.
    EXPECT_EQ(replicated[rank], replicated[0]);
    for (const auto& [name, part] : found[rank].gradients) {
      Whole& sum = found[0].gradients.at(name);
      for (size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
    }
  }
  return found;
}

// Bytes that a rank sends in one collective over `floats`.
template <typename Collective>
int64_t BytesOf(int ranks, int64_t floats, Collective collective) {
  auto groups = MakeLocalCommunicators(ranks, absl::Seconds(60));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = kernels::MakeCpuDevice(1);
      const auto stream = *device->MakeStream();
      std::vector<float> data(floats);
      collective(*groups[rank], *stream,
                 kernels::Tensor(data.data(), kernels::DType::kF32, {floats}));
      EXPECT_OK(stream->Synchronize());
    });
  }
  for (std::thread& thread : threads) thread.join();
  return groups[0]->bytes_sent();
}

class TensorParallel : public ::testing::TestWithParam<std::string> {
 protected:
  static ModelDescription Describe() {
    if (GetParam() == "gpt2") return Gpt2();
    // Fewer key/value heads than ranks: one, or two for three ranks and four.
    if (GetParam() == "llama_one_kv_head") return Llama(true, 1);
    if (GetParam() == "llama_two_kv_heads") return Llama(false, 2);
    return Llama(GetParam() == "llama_tied");
  }
};
INSTANTIATE_TEST_SUITE_P(Models, TensorParallel,
                         ::testing::Values("gpt2", "llama", "llama_tied", "llama_one_kv_head",
                                           "llama_two_kv_heads"),
                         [](const auto& info) { return info.param; });

TEST_P(TensorParallel, EveryLayout_GivesTheLossesAndGradientsOfOneRank) {
  const Found alone = RunRanks(Describe(), {})[0];
  for (const Layout& layout : std::vector<Layout>{{2},
                                                  {3},
                                                  {4},
                                                  {2, true},
                                                  {3, true},
                                                  {4, true},
                                                  {2, false, {3, 1}},
                                                  {3, true, {1, 4, 2}}}) {
    SCOPED_TRACE(ToString(layout));
    const std::vector<Found> cut = RunRanks(Describe(), layout);
    for (size_t i = 0; i < alone.losses.size(); ++i) {
      EXPECT_NEAR(cut[0].losses[i], alone.losses[i], 1e-5 * (1 + alone.losses[i]));
    }
    ASSERT_EQ(cut[0].gradients.size(), alone.gradients.size());
    for (const auto& [name, expected] : alone.gradients) {
      const Whole& actual = cut[0].gradients.at(name);
      double norm = 0, difference = 0;
      for (size_t i = 0; i < expected.size(); ++i) {
        norm += expected[i] * expected[i];
        difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
      }
      ASSERT_GT(norm, 0) << name;
      EXPECT_LT(std::sqrt(difference / norm), 1e-5) << name;
    }
  }
}

TEST_P(TensorParallel, Recomputation_GivesTheSameBitsWithLessMemory) {
  for (const Layout& layout : std::vector<Layout>{{1}, {2, true}}) {
    const std::vector<Found> kept = RunRanks(Describe(), layout);
    Layout again = layout;
    int64_t before = kept[0].memory.at("activations");
    for (const Recompute recompute : {Recompute::kSelective, Recompute::kFull}) {
      again.recompute = recompute;
      const std::vector<Found> found = RunRanks(Describe(), again);
      EXPECT_EQ(found[0].losses, kept[0].losses);
      EXPECT_EQ(found[0].gradients, kept[0].gradients);
      EXPECT_LT(found[0].memory.at("activations"), before);
      before = found[0].memory.at("activations");
    }
    // One hidden state per block is left, the embedding's output, and the head's.
    const int64_t state =
        (kBatch.tokens() / layout.ranks * Describe().sizes.at("hidden") * 4 + 255) / 256 * 256;
    const int64_t layers = Describe().sizes.at("layers");
    EXPECT_LE(before, (layers + 3) * state + 4 * 256);
  }
}

TEST_P(TensorParallel, BytesSentInAStep_AreThoseOfTheMethod) {
  const ModelDescription description = Describe();
  const int64_t layers = description.sizes.at("layers"), hidden = description.sizes.at("hidden");
  const int64_t tokens = kBatch.tokens();
  for (const int ranks : {2, 4}) {
    // What the communicator counts for one collective over hidden states, and for the exchange of
    // three numbers per token, in all chunks together.
    const int64_t reduce =
        BytesOf(ranks, tokens * hidden, [](auto& group, auto& stream, auto data) {
          group.AllReduce(stream, data, ReduceOp::kSum);
        });
    const int64_t half = BytesOf(ranks, tokens * hidden, [](auto& group, auto& stream, auto data) {
      group.AllGather(stream, data);
    });
    const int64_t losses =
        BytesOf(ranks, 3 * ranks * tokens,
                [](auto& group, auto& stream, auto data) { group.AllGather(stream, data); });
    EXPECT_EQ(half, tokens * hidden * 4 * (ranks - 1) / ranks);
    EXPECT_EQ(losses, tokens * 3 * 4 * (ranks - 1));
    for (const Found& found : RunRanks(description, {ranks})) {
      // Two all-reduces forward and two backward in each block, one of the embedding and one of the
      // gradient of the head's input.
      EXPECT_EQ(found.bytes, (4 * layers + 2) * reduce + losses);
    }
    for (const Found& found : RunRanks(description, {ranks, true})) {
      // A gather and a reduce-scatter for each of them, and the pairs' inputs once more for the
      // gradients of their weights.
      EXPECT_EQ(found.bytes, ((4 * layers + 2) * 2 + 2 * layers) * half + losses);
    }
  }
}

TEST_P(TensorParallel, Ranks_HoldTheirShareOfTheParameters) {
  const int64_t whole = RunRanks(Describe(), {})[0].elements;
  int64_t most = 0, sum = 0;
  for (const Found& found : RunRanks(Describe(), {4})) {
    most = std::max(most, found.elements);
    sum += found.elements;
  }
  EXPECT_GE(sum, whole);
  EXPECT_LT(sum, whole + whole / 8);  // norms, biases of the second matrices, positions
  EXPECT_LT(most, whole / 2);         // two of five heads
}

TEST(MakeModel, TensorParallelismThatDoesNotFit_IsRefusedWithAllNumbers) {
  const auto refusal = [](const ModelDescription& description, const ModelParallel& parallel) {
    return MakeModel(description, parallel).status();
  };
  ModelParallel parallel;
  parallel.tensor_size = 11;
  EXPECT_THAT(refusal(Llama(true), parallel),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("over 11 ranks leaves some of them without work: the model has 10 "
                                 "attention heads, 53 MLP columns, 61 rows of the vocabulary; "
                                 "the tensor degree can be at most 10")));
  parallel.tensor_size = 2;
  parallel.tensor_rank = 2;
  EXPECT_THAT(refusal(Gpt2(), parallel),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("tensor rank 2 of a")));
  parallel.tensor_rank = 0;
  parallel.tensor_weights = {1, 2, 3};
  EXPECT_THAT(refusal(Gpt2(), parallel),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("3 weights for a")));
  parallel.tensor_weights = {1, -2};
  EXPECT_THAT(refusal(Gpt2(), parallel),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("weight -2")));
  parallel.tensor_weights = {};
  parallel.tensor_overlap = TensorOverlap::kChunked;
  EXPECT_THAT(refusal(Gpt2(), parallel),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("use backward")));
}

TEST(TensorShard, Halves_AreOfSamplesAndHaveRowsOnEveryRank) {
  ModelParallel parallel;
  parallel.tensor_size = 3;
  parallel.tensor_rank = 1;
  parallel.tensor_overlap = TensorOverlap::kHalves;
  const auto part = [&] {
    return TensorShard::Make(
        parallel,
        {{SplitKind::kHeads, 6, 6}, {SplitKind::kMlpColumns, 48}, {SplitKind::kVocabulary, 61}});
  };
  const BatchShape four = {.batch = 4, .sequence = 9}, odd = {.batch = 3, .sequence = 8};
  EXPECT_EQ(part().slices(four), 2);
  EXPECT_EQ(part().slices(odd), 1);
  // Without sequence parallelism a rank has all rows.
  EXPECT_EQ(part().FirstToken(four, 0), 0);
  EXPECT_EQ(part().FirstToken(four, 1), 18);
  parallel.sequence_parallel = true;
  EXPECT_EQ(part().slices(four), 2);
  EXPECT_EQ(part().FirstToken(four, 0), 6);
  EXPECT_EQ(part().FirstToken(four, 1), 18 + 6);
  EXPECT_EQ(part().FirstToken(odd, 0), 8);
  // 3 x 8 tokens are 8 rows for each of three ranks, their halves are not.
  EXPECT_EQ(part().slices({.batch = 4, .sequence = 8}), 1);
  parallel.split_backward = true;
  EXPECT_EQ(part().slices(four), 1);
  parallel.split_backward = false;
  parallel.tensor_overlap = TensorOverlap::kBackward;
  EXPECT_EQ(part().slices(four), 1);
}

TEST(SplitUnits, FollowsWeightsByLargestRemainderAndLeavesNobodyEmpty) {
  EXPECT_THAT(SplitUnits(7, 3, {}), ElementsAre(Span{0, 3}, Span{3, 5}, Span{5, 7}));
  EXPECT_THAT(SplitUnits(10, 2, {3, 1}), ElementsAre(Span{0, 8}, Span{8, 10}));
  EXPECT_THAT(SplitUnits(9, 3, {1000, 1, 1}), ElementsAre(Span{0, 7}, Span{7, 8}, Span{8, 9}));
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int64_t units = ranks; units < 40; ++units) {
      const std::vector<Span> spans = SplitUnits(units, ranks, {});
      EXPECT_EQ(spans.front().begin, 0);
      EXPECT_EQ(spans.back().end, units);
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(spans[rank].size(), units / ranks + (rank < units % ranks ? 1 : 0));
      }
    }
  }
}

TEST(SplitRanks, GivesEveryHeadARunAndTheSlowestRankLittle) {
  EXPECT_THAT(SplitRanks(1, 4, 3, {}), ElementsAre(Span{0, 3}));
  EXPECT_THAT(SplitRanks(2, 4, 8, {}), ElementsAre(Span{0, 4}, Span{4, 8}));
  EXPECT_THAT(SplitRanks(2, 5, 3, {}), ElementsAre(Span{0, 2}, Span{2, 3}));
  // The fast rank takes a head alone.
  EXPECT_THAT(SplitRanks(2, 5, 3, {3, 1, 1}), ElementsAre(Span{0, 1}, Span{1, 3}));
  // No more ranks than a head has query heads.
  EXPECT_THAT(SplitRanks(2, 2, 4, {9, 1, 1, 1}), ElementsAre(Span{0, 2}, Span{2, 4}));
  for (int64_t heads = 1; heads <= 5; ++heads) {
    for (int64_t group = 1; group <= 6; ++group) {
      for (int ranks = static_cast<int>(heads); ranks <= heads * group; ++ranks) {
        const std::vector<Span> runs = SplitRanks(heads, group, ranks, {});
        int64_t longest = 0;
        for (const Span& run : runs) {
          EXPECT_TRUE(run.size() >= 1 && run.size() <= group);
          longest = std::max(longest, (group + run.size() - 1) / run.size());
        }
        // No cut does better than one that gives every head as many ranks as there are for each.
        EXPECT_EQ(longest, (group + ranks / heads - 1) / (ranks / heads));
      }
    }
  }
}

TEST(PartsByGroup, AreWholeGroupsBetweenPartsOfTheFirstAndTheLast) {
  using Parts = std::vector<GroupPart>;
  EXPECT_EQ(PartsByGroup({0, 12}, 4), (Parts{{{0, 12}, {0, 3}}}));
  EXPECT_EQ(PartsByGroup({4, 8}, 4), (Parts{{{4, 8}, {1, 2}}}));
  EXPECT_EQ(PartsByGroup({5, 7}, 4), (Parts{{{5, 7}, {1, 2}}}));
  EXPECT_EQ(PartsByGroup({3, 5}, 4), (Parts{{{3, 4}, {0, 1}}, {{4, 5}, {1, 2}}}));
  EXPECT_EQ(PartsByGroup({2, 17}, 4),
            (Parts{{{2, 4}, {0, 1}}, {{4, 16}, {1, 4}}, {{16, 17}, {4, 5}}}));
}

// Of heads in groups of `each`, with groups that cost as much as `group_work` heads.
std::vector<SplitShare> SharesOfHeads(int64_t heads, int64_t groups, double group_work,
                                      ModelParallel parallel) {
  const SplitList units = {
      {.kind = SplitKind::kScanHeads, .size = heads, .groups = groups, .group_work = group_work},
      {.kind = SplitKind::kVocabulary, .size = 128}};
  std::vector<SplitShare> shares;
  for (parallel.tensor_rank = 0; parallel.tensor_rank < parallel.tensor_size;
       ++parallel.tensor_rank) {
    shares.push_back(TensorShard::Make(parallel, units).share(SplitKind::kScanHeads));
  }
  return shares;
}
std::vector<Span> SpansOf(const std::vector<SplitShare>& shares) {
  std::vector<Span> spans;
  for (const SplitShare& share : shares) spans.push_back(share.span);
  return spans;
}

TEST(TensorShard, CutsGroupsOfScanHeadsWhereThatIsFaster) {
  using Spans = std::vector<Span>;
  ModelParallel parallel;
  parallel.tensor_size = 2;
  // Two equal ranks have a group each; by 5:3 the first takes heads of the other's group.
  EXPECT_EQ(SpansOf(SharesOfHeads(24, 2, 1, parallel)), (Spans{{0, 12}, {12, 24}}));
  EXPECT_FALSE(SharesOfHeads(24, 2, 1, parallel)[0].shares);
  parallel.tensor_weights = {5, 3};
  const std::vector<SplitShare> uneven = SharesOfHeads(24, 2, 1, parallel);
  EXPECT_EQ(SpansOf(uneven), (Spans{{0, 15}, {15, 24}}));
  EXPECT_TRUE(uneven[0].shares && uneven[1].shares);
  EXPECT_EQ(uneven[0].groups, (Span{0, 2}));
  EXPECT_EQ(uneven[0].parts, (std::vector<GroupPart>{{{0, 12}, {0, 1}}, {{12, 15}, {1, 2}}}));
  EXPECT_EQ(uneven[1].groups, (Span{1, 2}));
  EXPECT_EQ(uneven[1].parts, (std::vector<GroupPart>{{{15, 24}, {1, 2}}}));
  // B and C of both groups on both ranks, (9 + 2 x 8) / 3, take longer than a whole group,
  // (12 + 8) / 3; with eight groups, whole ones are as good.
  EXPECT_EQ(SpansOf(SharesOfHeads(24, 2, 8, parallel)), (Spans{{0, 12}, {12, 24}}));
  EXPECT_FALSE(SharesOfHeads(24, 8, 1, parallel)[0].shares);
  // Where groups cost nothing beside their heads that is known, they stay whole.
  EXPECT_EQ(SpansOf(SharesOfHeads(24, 2, 0, parallel)), (Spans{{0, 12}, {12, 24}}));
  // So they do where context ranks exchange heads.
  parallel.context_size = 2;
  parallel.scan_method = ScanMethod::kAllToAll;
  EXPECT_EQ(SpansOf(SharesOfHeads(24, 2, 1, parallel)), (Spans{{0, 12}, {12, 24}}));
  parallel.scan_method = ScanMethod::kStatePassing;
  EXPECT_EQ(SpansOf(SharesOfHeads(24, 2, 1, parallel)), (Spans{{0, 15}, {15, 24}}));
  // With fewer groups than ranks, the second of three has heads of both.
  parallel = {};
  parallel.tensor_size = 3;
  const std::vector<SplitShare> few = SharesOfHeads(24, 2, 1, parallel);
  EXPECT_EQ(SpansOf(few), (Spans{{0, 8}, {8, 16}, {16, 24}}));
  EXPECT_EQ(few[1].groups, (Span{0, 2}));
}

TEST(UnitSize, IsAPowerOfTwoThatLeavesEveryRankEight) {
  EXPECT_EQ(UnitSize(14336, 8), 128);
  EXPECT_EQ(UnitSize(3072, 4), 64);
  EXPECT_EQ(UnitSize(53, 2), 2);
  EXPECT_EQ(UnitSize(5, 4), 1);
}

TEST(UnitSize, GivesAllRanksAsManyWhereSmallerUnitsDo) {
  EXPECT_EQ(UnitSize(128256, 2), 128);
  EXPECT_EQ(UnitSize(128256, 4), 64);
  EXPECT_EQ(UnitSize(128256, 8), 32);
  EXPECT_EQ(UnitSize(11008, 4), 64);
  EXPECT_EQ(UnitSize(50257, 2), 64);
  EXPECT_EQ(UnitSize(50257, 4), 128);  // none does
}

TEST(TensorShard, StoresAsManyRowsOfTheTableOnAllRanksWithoutWeights) {
  for (const int64_t vocab : {128256, 50257, 32000, 61, 4099}) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      const SplitList sizes = {{SplitKind::kHeads, 24, 24},
                               {SplitKind::kMlpColumns, 1024},
                               {SplitKind::kVocabulary, vocab}};
      ModelParallel parallel;
      parallel.tensor_size = ranks;
      int64_t end = 0;
      const int64_t storage = TensorShard::Make(parallel, sizes).vocab_storage;
      for (parallel.tensor_rank = 0; parallel.tensor_rank < ranks; ++parallel.tensor_rank) {
        const TensorShard part = TensorShard::Make(parallel, sizes);
        EXPECT_EQ(part.vocab_storage, storage) << vocab << " over " << ranks;
        EXPECT_LE(part.vocab().size(), part.vocab_storage);
        EXPECT_EQ(part.vocab().begin, end);
        end = part.vocab().end;
      }
      EXPECT_EQ(end, vocab);
    }
  }
}

}  // namespace
}  // namespace muster::parallel
