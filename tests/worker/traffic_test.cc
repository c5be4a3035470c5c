// What the coordinator estimates of a job's traffic, against what the engine's planner knows.
#include "coordinator/core/traffic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "coordinator/scheduler/waiting_queue.h"
#include "proto/spec/names.h"
#include "proto/spec/spec.h"
#include "tests/support/status_matchers.h"
#include "tests/worker/plan_specs.h"
#include "worker/rank/job_plan.h"

namespace muster::worker {
namespace {

// The example specs that train with the engine, by file.
std::map<std::string, v1::JobSpec> Examples() {
  std::map<std::string, v1::JobSpec> specs;
  for (const auto& file : std::filesystem::directory_iterator(MUSTER_SOURCE_DIR "/examples")) {
    if (file.path().extension() != ".yaml") continue;
    std::ifstream in(file.path());
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    const std::string name = file.path().filename().string();
    auto tasks = spec::LoadTasks(text, name, {}, "/");
    EXPECT_OK(tasks.status());
    if (!tasks.ok() || !tasks->front().has_engine()) continue;
    spec::ApplyDefaults(tasks->front());
    specs[name] = tasks->front();
  }
  return specs;
}

// Bytes that a rank sends in a step, the mean of all ranks.
std::map<v1::MeshAxis, double> Planned(const JobPlan& plan) {
  std::map<v1::MeshAxis, double> bytes;
  double ranks = 0;
  for (const RankPlan& rank : plan.ranks) {
    const parallel::StepVolume& sent = rank.sent;
    const double alike = rank.ranks;
    ranks += alike;
    bytes[v1::MESH_AXIS_TENSOR] += alike * static_cast<double>(sent.tensor + sent.keys);
    bytes[v1::MESH_AXIS_CONTEXT] += alike * static_cast<double>(sent.context);
    bytes[v1::MESH_AXIS_DATA] +=
        alike * static_cast<double>(sent.gradients + sent.replicas + sent.parameters);
    bytes[v1::MESH_AXIS_PIPELINE] += alike * static_cast<double>(sent.pipeline);
  }
  for (auto& [axis, sum] : bytes) sum /= ranks;
  return bytes;
}

// The least and the greatest of the estimate over what is planned, and which it was.
struct Ratios {
  double least = 1, greatest = 1;
  std::string lowest, highest;

  void Add(const std::string& name, const v1::JobSpec& spec) {
    const auto plan = PlanJob(spec);
    ASSERT_OK(plan.status());
    std::map<v1::MeshAxis, double> planned = Planned(*plan);
    coordinator::WaitingJob job;
    job.ranks = spec.resources().ranks();
    coordinator::AddTraffic(spec, job);
    ASSERT_TRUE(job.traffic_known || job.ranks == 1) << name;
    for (const coordinator::AxisTraffic& axis : job.traffic) {
      ASSERT_GT(planned[axis.axis], 0) << name << " " << spec::EnumName(axis.axis);
      const double ratio = axis.bytes / planned[axis.axis];
      const std::string what = name + " " + spec::EnumName(axis.axis);
      if (ratio < least) lowest = what, least = ratio;
      if (ratio > greatest) highest = what, greatest = ratio;
    }
  }
};

TEST(Traffic, OfTheExamples_IsWithinABoundOfWhatThePlannerKnows) {
  Ratios ratios;
  const std::map<std::string, v1::JobSpec> examples = Examples();
  ASSERT_GE(examples.size(), 6u);
  for (const auto& [name, spec] : examples) ratios.Add(name, spec);
  EXPECT_GT(ratios.least, 0.5) << ratios.lowest;
  EXPECT_LT(ratios.greatest, 2.0) << ratios.highest;
}

TEST(Traffic, OfPresetsInManyLayouts_IsWithinABoundOfWhatThePlannerKnows) {
  const std::vector<Split> splits = {{.data = 8},
                                     {.data = 8, .zero = 3},
                                     {.data = 2, .tensor = 4, .sequence = true},
                                     {.pipeline = 4, .data = 2},
                                     {.data = 2, .context = 4},
                                     {.pipeline = 2, .data = 2, .context = 2, .tensor = 2}};
  Ratios ratios;
  for (const char* preset : {"gpt2-124m", "llama-8b"}) {
    for (size_t i = 0; i < splits.size(); ++i) {
      ratios.Add(preset + std::string(" layout ") + std::to_string(i),
                 Preset(preset, splits[i], /*global_batch=*/64, /*micro_batch=*/1));
    }
  }
  EXPECT_GT(ratios.least, 0.5) << ratios.lowest;
  EXPECT_LT(ratios.greatest, 2.0) << ratios.highest;
}

}  // namespace
}  // namespace muster::worker
