// The smallest job that the coordinator accepts.
#ifndef MUSTER_TESTS_SUPPORT_JOB_SPEC_H_
#define MUSTER_TESTS_SUPPORT_JOB_SPEC_H_

#include <string>

#include "muster/v1/spec.pb.h"

namespace muster::testing {

// A GPT of one block on two ranks, ten steps, without checkpoints. Its data set need not exist.
inline v1::JobSpec SmallJobSpec(const std::string& name) {
  v1::JobSpec spec;
  spec.set_name(name);
  spec.set_working_directory("/data");
  auto* model = spec.mutable_engine()->mutable_model();
  model->set_family(v1::MODEL_FAMILY_GPT2);
  model->set_layers(1);
  model->set_hidden(8);
  model->set_heads(2);
  model->set_vocab(256);
  model->set_sequence_length(8);
  spec.mutable_engine()->mutable_data()->add_train()->set_path("train");
  auto* training = spec.mutable_engine()->mutable_training();
  training->set_steps(10);
  training->set_global_batch(4);
  training->set_micro_batch(1);
  training->mutable_optimizer()->mutable_adamw()->set_lr(1e-3);
  spec.mutable_resources()->set_ranks(2);
  return spec;
}

}  // namespace muster::testing

#endif  // MUSTER_TESTS_SUPPORT_JOB_SPEC_H_
