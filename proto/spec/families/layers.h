// Defaults and rules of layers that several families have. Private to proto/spec/families.
#ifndef MUSTER_PROTO_SPEC_FAMILIES_LAYERS_H_
#define MUSTER_PROTO_SPEC_FAMILIES_LAYERS_H_

#include <cstdint>
#include <string>

#include "muster/v1/spec.pb.h"
#include "proto/spec/checker.h"

namespace muster::spec {

constexpr int64_t kLayersMax = 1024;
constexpr int64_t kHiddenMax = 1 << 20;
constexpr int64_t kFfnMax = 1 << 24;
constexpr double kRopeTheta = 10000;

// tied and norm_epsilon.
void DefaultTable(v1::ModelSpec& model, bool tied);
void DefaultMamba(v1::ModelSpec& model);

// The mixers of published Mamba-2 models (arXiv 2405.21060): heads of 64 columns that are together
// twice as wide as the hidden state, 128 states, 4 taps. Requires: hidden is set.
void PresetMamba(int32_t groups, v1::ModelSpec& model);

// The divisors of `of` on either side of `value`: "4 or 6". Requires: both are at least 1, and
// `value` is none.
std::string DivisorsAround(int64_t value, int64_t of);

// Heads that divide hidden; whether they do.
bool CheckHeads(const v1::ModelSpec& model, Checker& check);
// `heads`: the number of heads has no problem.
void CheckKeyHeads(const v1::ModelSpec& model, bool heads, Checker& check);
void CheckRope(const v1::ModelSpec& model, Checker& check);
void CheckMamba(const v1::ModelSpec& model, Checker& check);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_FAMILIES_LAYERS_H_
