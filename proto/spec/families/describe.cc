#include "proto/spec/families/describe.h"

namespace muster::spec {

void DescribeTable(const v1::ModelSpec& model, parallel::ModelDescription& description) {
  description.flags["tied"] = model.tied();
  description.numbers["norm_epsilon"] = model.norm_epsilon();
}

void DescribeRopeScaling(const v1::ModelSpec& model, parallel::ModelDescription& description) {
  if (!model.has_rope_scaling()) return;
  const v1::RopeScalingSpec& scaling = model.rope_scaling();
  description.sizes["rope_original_context"] = scaling.original_context();
  description.numbers["rope_factor"] = scaling.factor();
  description.numbers["rope_low_frequency_factor"] = scaling.low_frequency_factor();
  description.numbers["rope_high_frequency_factor"] = scaling.high_frequency_factor();
}

void DescribeMamba(const v1::ModelSpec& model, const std::string& prefix,
                   parallel::ModelDescription& description) {
  const v1::MambaSpec& mamba = model.mamba();
  description.sizes[prefix + "heads"] = mamba.heads();
  description.sizes[prefix + "head_width"] = mamba.head_width();
  description.sizes[prefix + "groups"] = mamba.groups();
  description.sizes[prefix + "state"] = mamba.state();
  description.sizes[prefix + "taps"] = mamba.taps();
  if (mamba.step_min() > 0) description.numbers[prefix + "step_min"] = mamba.step_min();
}

void AddAttention(const v1::ModelSpec& model, int64_t kv_heads, int64_t width, int64_t layers,
                  LayerTotals& totals) {
  const int64_t queries = model.heads() * width, keys = kv_heads * width;
  totals.layers += layers;
  totals.weights += layers * 2 * (queries + keys) * model.hidden();
  totals.key_columns += layers * 2 * keys;
}

void AddMlp(const v1::ModelSpec& model, int64_t ffn, int64_t matrices, int64_t layers,
            LayerTotals& totals) {
  totals.layers += layers;
  totals.weights += layers * matrices * ffn * model.hidden();
}

void AddMamba(const v1::ModelSpec& model, int64_t layers, LayerTotals& totals) {
  const v1::MambaSpec& mamba = model.mamba();
  const int64_t inner = int64_t{mamba.heads()} * mamba.head_width();
  const int64_t columns = int64_t{mamba.groups()} * mamba.state();
  totals.layers += layers;
  // z, x, B, C and dt, then the way back.
  totals.weights += layers * (3 * inner + 2 * columns + mamba.heads()) * model.hidden();
  totals.state_numbers += layers * (inner * mamba.state() + mamba.heads());
}

}  // namespace muster::spec
