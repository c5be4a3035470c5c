// What a job sends along its axes, as the scheduler reckons it from the layers of its model.
#include "coordinator/core/traffic.h"

#include <gtest/gtest.h>

#include <string>

#include "proto/spec/presets.h"
#include "proto/spec/spec.h"

namespace muster::coordinator {
namespace {

// Bytes along `axis` where the job has two ranks along it.
double Bytes(const std::string& preset, v1::MeshAxis axis) {
  v1::JobSpec spec;
  v1::EngineSpec& engine = *spec.mutable_engine();
  *engine.mutable_model() = *spec::FindPreset(preset);
  engine.mutable_training()->set_global_batch(8);
  engine.mutable_training()->set_precision(v1::PRECISION_BF16);
  v1::ParallelSpec& parallel = *engine.mutable_parallel();
  if (axis == v1::MESH_AXIS_TENSOR) parallel.set_tensor(2);
  if (axis == v1::MESH_AXIS_CONTEXT) parallel.set_context(2);
  if (axis == v1::MESH_AXIS_DATA) parallel.set_data(2);
  spec::ApplyDefaults(spec);
  WaitingJob job;
  job.ranks = 2;
  AddTraffic(spec, job);
  EXPECT_TRUE(job.traffic_known);
  EXPECT_EQ(job.traffic.size(), 1u);
  return job.traffic.empty() ? 0 : job.traffic[0].bytes;
}

TEST(Traffic, OfTransformers_CountsTwelveSquaresOfHiddenABlock) {
  const double hidden = 768, states = 8.0 * 1024 * hidden * 2;
  EXPECT_DOUBLE_EQ(Bytes("gpt2-124m", v1::MESH_AXIS_TENSOR), 4 * 12 * states);
  EXPECT_DOUBLE_EQ(Bytes("gpt2-124m", v1::MESH_AXIS_CONTEXT), 3 * 2 * 12 * states / 2);
  EXPECT_DOUBLE_EQ(Bytes("gpt2-124m", v1::MESH_AXIS_DATA),
                   4 * (12 * 12 * hidden * hidden + 50257 * hidden));
}

TEST(Traffic, OfMamba2_IsOneLayerABlockAndStates) {
  const double hidden = 768, inner = 2 * hidden;
  EXPECT_DOUBLE_EQ(Bytes("mamba2-130m", v1::MESH_AXIS_TENSOR), 2 * 24 * (8.0 * 2048 * hidden * 2));
  // States and decays of 24 heads in fp32, of two chunks of 8 sequences, there and back.
  EXPECT_DOUBLE_EQ(Bytes("mamba2-130m", v1::MESH_AXIS_CONTEXT),
                   4.0 * 8 * 24 * (inner * 128 + 24) * 4);
  EXPECT_DOUBLE_EQ(Bytes("mamba2-130m", v1::MESH_AXIS_DATA),
                   4 * (24 * (3 * inner + 2 * 128 + 24) * hidden + 50288 * hidden));
}

// 14 Mamba-2, 2 attention and 14 MLP layers.
TEST(Traffic, OfAHybrid_IsThatOfItsLayers) {
  const double hidden = 2048, inner = 2 * hidden, tokens = 8 * 4096, width = 2;
  const std::string pattern = spec::FindPreset("hybrid-1b")->pattern();
  const auto count = [&](char letter) {
    double sum = 0;
    for (const char c : pattern) sum += c == letter ? 1 : 0;
    return sum;
  };
  EXPECT_DOUBLE_EQ(Bytes("hybrid-1b", v1::MESH_AXIS_TENSOR),
                   2 * static_cast<double>(pattern.size()) * tokens * hidden * width);
  const double mamba = (3 * inner + 2 * 8 * 128 + 64) * hidden;
  const double attention = 2 * (hidden + 512) * hidden, mlp = 2 * 8192 * hidden;
  EXPECT_DOUBLE_EQ(
      Bytes("hybrid-1b", v1::MESH_AXIS_DATA),
      4 * (count('M') * mamba + count('*') * attention + count('-') * mlp + 2 * 50257 * hidden));
  EXPECT_DOUBLE_EQ(
      Bytes("hybrid-1b", v1::MESH_AXIS_CONTEXT),
      count('*') * 3 * tokens / 2 * 1024 * width + count('M') * 4 * 8 * (inner * 128 + 64) * 4);
}

}  // namespace
}  // namespace muster::coordinator
