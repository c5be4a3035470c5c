#include "parallel/optim/flat_layout.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/parallel/optim_rank.h"

namespace muster::parallel {
namespace {

TEST(FlatLayout, Parameters_LieInBackwardOrderAlignedAndPadded) {
  const ParameterRegistry registry = SomeParameters();
  for (const int ranks : {1, 2, 3, 4, 7}) {
    const FlatLayout layout(registry, 1024, ranks);
    ASSERT_GT(layout.buckets().size(), 1u);
    int64_t end = 0;
    ParameterId next = registry.size() - 1;
    for (const FlatLayout::Bucket& bucket : layout.buckets()) {
      EXPECT_EQ(bucket.range.begin, end);
      EXPECT_EQ(bucket.range.size() % 128, 0);
      EXPECT_EQ(bucket.range.size() % ranks, 0);
      for (const ParameterId id : bucket.parameters) {
        EXPECT_EQ(id, next--);
        EXPECT_EQ((layout.offset(id) - bucket.range.begin) % 64, 0);
        EXPECT_GE(layout.offset(id), bucket.range.begin);
        EXPECT_LE(layout.offset(id) + registry.at(id).storage_elements(), bucket.range.end);
      }
      end = bucket.range.end;
    }
    EXPECT_EQ(next, -1);
    EXPECT_EQ(layout.elements(), end);
  }
}

TEST(FlatLayout, PartsOfAllRanks_HoldEveryRealElementOnce) {
  const ParameterRegistry registry = SomeParameters();
  for (const int ranks : {1, 2, 3, 5}) {
    const FlatLayout layout(registry, 1024, ranks);
    std::vector<std::vector<int>> seen;
    for (ParameterId id = 0; id < registry.size(); ++id) {
      seen.emplace_back(registry.at(id).elements(), 0);
    }
    for (size_t bucket = 0; bucket < layout.buckets().size(); ++bucket) {
      for (int rank = 0; rank < ranks; ++rank) {
        const FlatRange part = layout.Part(static_cast<int>(bucket), rank);
        for (const FlatSlice& slice : layout.Slices(part)) {
          EXPECT_GE(slice.flat, part.begin);
          EXPECT_LE(slice.flat + slice.count, part.end);
          EXPECT_EQ(slice.flat, layout.offset(slice.parameter) + slice.first);
          for (int64_t i = 0; i < slice.count; ++i) ++seen[slice.parameter][slice.first + i];
        }
      }
    }
    for (const auto& counts : seen) {
      for (const int count : counts) EXPECT_EQ(count, 1);
    }
  }
}

TEST(FlatLayout, Buckets_EndAtTheSameParametersForEveryNumberOfRanks) {
  const ParameterRegistry registry = SomeParameters();
  const FlatLayout one(registry, 1024, 1);
  const FlatLayout three(registry, 1024, 3);
  ASSERT_EQ(one.buckets().size(), three.buckets().size());
  for (size_t i = 0; i < one.buckets().size(); ++i) {
    EXPECT_EQ(one.buckets()[i].parameters, three.buckets()[i].parameters);
  }
}

// Makes one bucket per block, each of one matrix of rows[block] x 128.
FlatLayout Blocks(ParameterRegistry& registry, const std::vector<int64_t>& rows) {
  for (size_t i = 0; i < rows.size(); ++i) {
    registry.BeginBlock(static_cast<int>(i), /*resident=*/false);
    registry.Add(Matrix("block" + std::to_string(i), rows[i], 128));
  }
  return FlatLayout(registry, {.shards = 2, .by_block = true});
}

TEST(RotatingSlots, OfNeighbouringBlocks_AreDifferentAndLargeEnough) {
  for (const std::vector<int64_t>& rows :
       std::vector<std::vector<int64_t>>{{4},
                                         {4, 2},
                                         {9, 2, 9},
                                         {9, 2, 2, 9},
                                         {3, 2, 2, 3},
                                         {9, 2, 2, 2, 2, 2, 2, 9},
                                         {2, 2, 2, 2, 9}}) {
    ParameterRegistry registry;
    const FlatLayout layout = Blocks(registry, rows);
    const RotatingSlots slots = AssignSlots(layout);
    ASSERT_EQ(slots.slot.size(), rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      const int slot = slots.slot[i];
      const int64_t end = slot + 1 < slots.size() ? slots.begin[slot + 1] : slots.elements;
      EXPECT_LE(slots.begin[slot] + layout.buckets()[i].range.size(), end);
      if (i == 0) continue;
      EXPECT_NE(slot, slots.slot[i - 1]) << rows.size() << " blocks, bucket " << i;
    }
  }
}

TEST(RotatingSlots, WithLargeTablesAtBothEnds_HaveOneBufferForThese) {
  const auto elements = [](const std::vector<int64_t>& rows, bool one_each = false) {
    ParameterRegistry registry;
    return AssignSlots(Blocks(registry, rows), one_each).elements / 128;
  };
  EXPECT_EQ(elements({9, 2, 2, 9}), 9 + 2 + 2);
  EXPECT_EQ(elements({9, 2, 3, 2, 3, 9}), 9 + 2 + 3);
  EXPECT_EQ(elements({9, 2, 9}), 9 + 2);  // by turns, as the tables are not neighbours
  EXPECT_EQ(elements({3, 2, 2, 3}), 3 + 3);
  EXPECT_EQ(elements({9, 2, 2, 2}), 9 + 2);  // the first stage of a pipeline
  EXPECT_EQ(elements({9, 2, 2, 9}, /*one_each=*/true), 9 + 2 + 2 + 9);
  EXPECT_EQ(elements({}), 0);
}

}  // namespace
}  // namespace muster::parallel
