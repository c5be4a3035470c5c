// A spec that sets most fields. Tests of this folder change some of them.
#ifndef MUSTER_TESTS_PROTO_EXAMPLE_SPEC_H_
#define MUSTER_TESTS_PROTO_EXAMPLE_SPEC_H_

namespace muster::spec {

inline constexpr char kExample[] = R"(name: gpt-kjv
queue: default
priority: 50
engine:
  model: {family: gpt2, layers: 6, hidden: 192, heads: 6, vocab: 256, sequence_length: 128}
  data:
    train: [{path: data/kjv.train, weight: 1}]
    validation: [{path: data/kjv.validation}]
  training:
    steps: 600
    global_batch: 32
    micro_batch: 8
    precision: fp32
    seed: 1234
    optimizer: {adamw: {lr: 1.0e-3, weight_decay: 0.1, betas: [0.9, 0.95], clip_norm: 1.0}}
    schedule: {cosine: {warmup_steps: 50, min_lr: 1.0e-4}}
    evaluate_every: 100
  parallel: {data: 2}
resources: {device: cpu, ranks: 2}
checkpoint: {path: checkpoints/gpt-kjv, every_steps: 50, keep: 2}
restart: {max_failures: 10, backoff: {initial: 0.5s, max: 30s}}
working_directory: /srv/work
labels: {team: language, run.id: "7"}
)";

}  // namespace muster::spec

#endif  // MUSTER_TESTS_PROTO_EXAMPLE_SPEC_H_
