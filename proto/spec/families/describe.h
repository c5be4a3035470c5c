// What fields that several families have become: names of a description, and what layers come to.
// Private to proto/spec/families.
#ifndef MUSTER_PROTO_SPEC_FAMILIES_DESCRIBE_H_
#define MUSTER_PROTO_SPEC_FAMILIES_DESCRIBE_H_

#include <cstdint>
#include <string>

#include "muster/v1/spec.pb.h"
#include "parallel/plan/model_description.h"
#include "proto/spec/spec.h"

namespace muster::spec {

// tied and norm_epsilon.
void DescribeTable(const v1::ModelSpec& model, parallel::ModelDescription& description);
// Nothing without rope_scaling.
void DescribeRopeScaling(const v1::ModelSpec& model, parallel::ModelDescription& description);
// The fields of `mamba`, with `prefix` before their names.
void DescribeMamba(const v1::ModelSpec& model, const std::string& prefix,
                   parallel::ModelDescription& description);

// `layers` layers each. `width`: of a head.
void AddAttention(const v1::ModelSpec& model, int64_t kv_heads, int64_t width, int64_t layers,
                  LayerTotals& totals);
// `matrices` of hidden x ffn: 3 with a gate, else 2.
void AddMlp(const v1::ModelSpec& model, int64_t ffn, int64_t matrices, int64_t layers,
            LayerTotals& totals);
void AddMamba(const v1::ModelSpec& model, int64_t layers, LayerTotals& totals);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_FAMILIES_DESCRIBE_H_
