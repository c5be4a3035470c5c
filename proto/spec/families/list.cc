// The families of this program and nothing else: a program that defines SpecFamilies() itself links
// the rest of the library without this file.
#include <array>

#include "proto/spec/families/family.h"

namespace muster::spec {

absl::Span<const SpecFamily* const> SpecFamilies() {
  static const std::array<const SpecFamily*, 4> kFamilies = {&Gpt2(), &Llama(), &Mamba2(),
                                                             &Hybrid()};
  return kFamilies;
}

}  // namespace muster::spec
