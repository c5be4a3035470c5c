#include <cstring>
#include <initializer_list>

#include "kernels/simd/loops.h"

namespace muster::kernels {

extern const Loops kLoops_generic;
#if defined(__x86_64__)
extern const Loops kLoops_avx2;
extern const Loops kLoops_avx512;
#endif

const Loops* LoopsNamed(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
  if (has_avx512 && std::strcmp(name, "avx512") == 0) return &kLoops_avx512;
  if (has_avx2 && std::strcmp(name, "avx2") == 0) return &kLoops_avx2;
#endif
  if (std::strcmp(name, "generic") == 0) return &kLoops_generic;
  return nullptr;
}

const Loops& ChooseLoops() {
  static const Loops& chosen = []() -> const Loops& {
    for (const char* name : {"avx512", "avx2"}) {
      if (const Loops* loops = LoopsNamed(name)) return *loops;
    }
    return kLoops_generic;
  }();
  return chosen;
}

}  // namespace muster::kernels
