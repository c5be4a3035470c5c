#include "proto/spec/families/family.h"

#include <array>

namespace muster::spec {

absl::Span<const SpecFamily* const> SpecFamilies() {
  static const std::array<const SpecFamily*, 4> kFamilies = {&Gpt2(), &Llama(), &Mamba2(),
                                                             &Hybrid()};
  return kFamilies;
}

const SpecFamily* FindSpecFamily(v1::ModelFamily id) {
  for (const SpecFamily* family : SpecFamilies()) {
    if (family->id == id) return family;
  }
  return nullptr;
}

}  // namespace muster::spec
