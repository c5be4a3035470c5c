// Job specs for tests of what jobs will take.
#ifndef MUSTER_TESTS_WORKER_PLAN_SPECS_H_
#define MUSTER_TESTS_WORKER_PLAN_SPECS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

#include "muster/v1/spec.pb.h"
#include "proto/spec/presets.h"
#include "proto/spec/spec.h"
#include "tests/support/status_matchers.h"

namespace muster::worker {

// Adds what a valid spec needs and its defaults.
inline v1::JobSpec WithDefaults(v1::JobSpec spec) {
  spec.set_name("plan");
  spec.set_working_directory("/");
  v1::EngineSpec& engine = *spec.mutable_engine();
  if (engine.data().train().empty()) engine.mutable_data()->add_train()->set_path("/data/text");
  engine.mutable_training()->mutable_optimizer()->mutable_adamw()->set_lr(1e-3);
  if (engine.training().steps() == 0) engine.mutable_training()->set_steps(10);
  spec::ApplyDefaults(spec);
  EXPECT_OK(spec::Validate(spec));
  return spec;
}

// Degrees of parallelism, and the stage of ZeRO.
struct Split {
  int pipeline = 1, data = 1, context = 1, tensor = 1;
  bool sequence = false;
  int zero = 0;
};

// A job on GPUs that trains the preset `name` in bf16.
inline v1::JobSpec Preset(const std::string& name, const Split& split, int64_t global_batch,
                          int64_t micro_batch) {
  v1::JobSpec spec;
  v1::EngineSpec& engine = *spec.mutable_engine();
  *engine.mutable_model() = *spec::FindPreset(name);
  engine.mutable_training()->set_global_batch(global_batch);
  engine.mutable_training()->set_micro_batch(micro_batch);
  engine.mutable_training()->set_precision(v1::PRECISION_BF16);
  v1::ParallelSpec& parallel = *engine.mutable_parallel();
  parallel.set_pipeline(split.pipeline);
  parallel.set_data(split.data);
  parallel.set_context(split.context);
  parallel.set_tensor(split.tensor);
  parallel.set_sequence(split.sequence);
  parallel.set_zero(split.zero);
  spec.mutable_resources()->set_device(v1::DEVICE_KIND_CUDA);
  spec.mutable_resources()->set_ranks(split.pipeline * split.data * split.context * split.tensor);
  return WithDefaults(std::move(spec));
}

}  // namespace muster::worker

#endif  // MUSTER_TESTS_WORKER_PLAN_SPECS_H_
