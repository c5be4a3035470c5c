// Models by name: what `engine.model.preset` stands for. Each family has its own
// (proto/spec/families).
#ifndef MUSTER_PROTO_SPEC_PRESETS_H_
#define MUSTER_PROTO_SPEC_PRESETS_H_

#include <string>
#include <vector>

#include "muster/v1/spec.pb.h"

namespace muster::spec {

// The fields that the preset sets; null when there is none of this name. Sizes: Radford et al.
// (2019) for GPT-2, the model cards of Meta for Llama 3.2 (1B, 3B), Llama 3.1 (8B) and Llama 3
// (70B), Dao and Gu (2024) for Mamba-2.
const v1::ModelSpec* FindPreset(const std::string& name);
std::vector<std::string> PresetNames();

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_PRESETS_H_
