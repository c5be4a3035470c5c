#include "kernels/arena.h"

#include <cstring>
#include <tuple>
#include <vector>

#include "tests/kernels/support.h"
#include "tests/support/status_matchers.h"

namespace muster::kernels {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Host;
using ::testing::Pair;

// A small step: activations are kept, and backward reuses the scratch memory of forward.
std::vector<Tensor> Step(Arena& arena) {
  std::vector<Tensor> views;
  views.push_back(arena.Take("activations", DType::kF32, {10, 10}));
  const int64_t mark = arena.Mark();
  views.push_back(arena.Take("scratch", DType::kF32, {64}));
  views.push_back(arena.Take("scratch", DType::kI32, {64}));
  arena.ReleaseTo(mark);
  views.push_back(arena.Take("scratch", DType::kBF16, {64}));
  return views;
}

TEST(Arena, PlanThenCommit_SameSequence_GivesSameLayoutInRealMemory) {
  Host host(1);
  Arena arena;
  EXPECT_TRUE(arena.planning());
  const std::vector<Tensor> planned = Step(arena);
  EXPECT_FALSE(planned[0].empty());
  EXPECT_EQ(arena.peak_bytes(), 512 + 256 + 256);
  EXPECT_THAT(arena.bytes_by_category(),
              ElementsAre(Pair("activations", 512), Pair("scratch", 512)));
  ASSERT_OK(arena.Commit(*host.device));
  EXPECT_FALSE(arena.planning());
  const std::vector<Tensor> real = Step(arena);
  for (size_t i = 0; i < real.size(); ++i) {
    EXPECT_EQ(real[i].ToString(), planned[i].ToString());
    EXPECT_EQ(static_cast<char*>(real[i].data()) - static_cast<char*>(real[0].data()),
              static_cast<char*>(planned[i].data()) - static_cast<char*>(planned[0].data()));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(real[i].data()) % 256, 0u);
    std::memset(real[i].data(), 0, real[i].bytes());
  }
  EXPECT_EQ(real[1].data(), real[3].data());
}

TEST(Arena, Layout_TellsOtherPlacesApartInArenasOfTheSameSize) {
  const auto device = MakeCpuDevice(1);
  const auto layout = [&](int64_t first, int64_t second) {
    Arena arena;
    for (const bool commit : {true, false}) {
      arena.Take("a", DType::kF32, {first});
      arena.Take("b", DType::kF32, {second});
      if (commit) {
        EXPECT_TRUE(arena.Commit(*device).ok());
      }
    }
    EXPECT_EQ(arena.memory().bytes(), 4 * (first + second));
    return arena.layout();
  };
  EXPECT_EQ(layout(64, 128), layout(64, 128));
  EXPECT_NE(layout(64, 128), layout(128, 64));
}

TEST(Arena, PadTo_GivesArenasOfOtherSizesTheSamePlaces) {
  const auto device = MakeCpuDevice(1);
  // Two kinds of scratch memory, one after the other, behind what is kept.
  const auto take = [](Arena& arena, int64_t stays, int64_t scratch) {
    arena.Take("stays", DType::kF32, {stays});
    const int64_t mark = arena.Mark();
    arena.Take("scratch", DType::kF32, {scratch});
    arena.ReleaseTo(mark);
    arena.Take("scratch", DType::kBF16, {64});
    return arena.Take("scratch", DType::kF32, {64});
  };
  const auto place = [&](int64_t stays, int64_t scratch, const std::vector<int64_t>& allocations) {
    Arena arena;
    if (!allocations.empty()) {
      take(arena, 8 * stays, scratch);  // is forgotten
      arena.PadTo(allocations);
    }
    take(arena, stays, scratch);
    const std::vector<int64_t> planned = arena.allocations();
    EXPECT_OK(arena.Commit(*device));
    EXPECT_EQ(arena.memory().bytes(), arena.peak_bytes());
    const Tensor last = take(arena, stays, scratch);
    const auto* const begin = static_cast<char*>(arena.memory().data());
    return std::tuple(static_cast<char*>(last.data()) - begin, arena.peak_bytes(), arena.layout(),
                      planned);
  };
  const auto [near, small, one, allocations] = place(64, 1024, {});
  const auto [far, large, other, more] = place(256, 512, {});
  EXPECT_THAT(allocations, ElementsAre(256, 4096, 256, 256));
  EXPECT_THAT(more, ElementsAre(1024, 2048, 256, 256));
  EXPECT_EQ(near, 512);
  EXPECT_EQ(far, 1280);
  EXPECT_NE(one, other);
  const std::vector<int64_t> most = {1024, 4096, 256, 256};
  EXPECT_EQ(place(64, 1024, most), place(256, 512, most));
  EXPECT_EQ(std::get<1>(place(64, 1024, most)), 1024 + 4096);
  EXPECT_EQ(std::get<3>(place(64, 1024, most)), most);
}

TEST(Arena, Layout_TellsOtherKindsApartInTheSamePlaces) {
  const auto device = MakeCpuDevice(1);
  const auto layout = [&](const char* category, DType dtype) {
    Arena arena;
    for (const bool commit : {true, false}) {
      arena.Take(category, dtype, {256 / SizeOf(dtype)});
      if (commit) {
        EXPECT_OK(arena.Commit(*device));
      }
    }
    return arena.layout();
  };
  EXPECT_EQ(layout("a", DType::kF32), layout("a", DType::kF32));
  EXPECT_NE(layout("a", DType::kF32), layout("b", DType::kF32));
  EXPECT_NE(layout("a", DType::kF32), layout("a", DType::kI32));
}

TEST(Arena, NextStep_AfterReleaseToZero_GivesTheSameViews) {
  Host host(1);
  Arena arena;
  Step(arena);
  ASSERT_OK(arena.Commit(*host.device));
  const std::vector<Tensor> first = Step(arena);
  arena.ReleaseTo(0);
  const std::vector<Tensor> second = Step(arena);
  for (size_t i = 0; i < first.size(); ++i) EXPECT_EQ(first[i].data(), second[i].data());
}

TEST(Arena, Commit_MoreThanThereIs_NamesTheCategories) {
  Host host(1);
  Arena arena;
  arena.Take("logits", DType::kF32, {1 << 20, 1 << 20, 1 << 8});
  EXPECT_THAT(arena.Commit(*host.device),
              ::muster::testing::StatusIs(absl::StatusCode::kResourceExhausted,
                                          HasSubstr("logits 1125899906842624")));
}

TEST(ArenaDeathTest, Take_MoreThanPlanned_EndsTheProcess) {
  Host host(1);
  Arena arena;
  arena.Take("a", DType::kF32, {64});
  ASSERT_OK(arena.Commit(*host.device));
  arena.Take("a", DType::kF32, {64});
  EXPECT_DEATH(arena.Take("late", DType::kF32, {1}), "planned for less: late");
}

}  // namespace
}  // namespace muster::kernels
