#include "cli/places.h"

#include <gtest/gtest.h>

namespace muster::cli {
namespace {

v1::JobSpec Split(int pipeline, int data, int context, int tensor) {
  v1::JobSpec spec;
  v1::ParallelSpec& parallel = *spec.mutable_engine()->mutable_parallel();
  parallel.set_pipeline(pipeline);
  parallel.set_data(data);
  parallel.set_context(context);
  parallel.set_tensor(tensor);
  spec.mutable_resources()->set_ranks(pipeline * data * context * tensor);
  return spec;
}

TEST(Places, OfRanks_UseTheNamesOfTheirGroups) {
  v1::JobSpec spec = Split(2, 3, 1, 2);
  v1::ParallelSpec& parallel = *spec.mutable_engine()->mutable_parallel();
  parallel.set_zero(1);
  auto mesh = MeshOf(spec);
  ASSERT_TRUE(mesh.has_value());
  EXPECT_EQ(LayoutText(*mesh, parallel), "pipeline 2 x data 3 x tensor 2, ZeRO-1");
  EXPECT_EQ(PlaceText(*mesh, 0), "pp 0 dp 0 tp 0");
  EXPECT_EQ(PlaceText(*mesh, 1), "pp 0 dp 0 tp 1");
  EXPECT_EQ(PlaceText(*mesh, 11), "pp 1 dp 2 tp 1");
  EXPECT_EQ(PlaceText(*mesh, 12), "-");
  parallel.set_sequence(true);
  parallel.set_zero_shards(3);
  EXPECT_EQ(LayoutText(*mesh, parallel), "pipeline 2 x data 3 x tensor 2, sequence, ZeRO-1 over 3");
  // With an order of axes given by the job.
  for (const v1::MeshAxis axis :
       {v1::MESH_AXIS_DATA, v1::MESH_AXIS_CONTEXT, v1::MESH_AXIS_PIPELINE, v1::MESH_AXIS_TENSOR}) {
    parallel.add_order(axis);
  }
  mesh = MeshOf(spec);
  ASSERT_TRUE(mesh.has_value());
  EXPECT_EQ(PlaceText(*mesh, 1), "pp 0 dp 1 tp 0");
  EXPECT_EQ(PlaceText(*mesh, 3), "pp 1 dp 0 tp 0");
  EXPECT_EQ(PlaceText(*MeshOf(Split(1, 1, 1, 1)), 0), "-");
  EXPECT_FALSE(MeshOf(v1::JobSpec()).has_value());
}

}  // namespace
}  // namespace muster::cli
