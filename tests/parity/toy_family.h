// A family of models that exists only in one test program, with a mixer that exists only there. The
// program has a list of families of its own (parallel/model/families/list.cc,
// proto/spec/families/list.cc), with GPT-2 and the toy: nothing else knows of it.
//
// Its models alternate attention and "squares", each in a block of its own, with RMS norms, no
// biases, no positions and a head of its own. Squares of F columns:
//   output = (x W_up^T)^2 * gain, gain_f = sum over i, j of scale[f,i,j]
// Parameters: NAME.up.weight [F,C], NAME.scale [F,2,2], NAME.down.weight [C,F].
#ifndef MUSTER_TESTS_PARITY_TOY_FAMILY_H_
#define MUSTER_TESTS_PARITY_TOY_FAMILY_H_

#include "parallel/model/families/family.h"
#include "parallel/model/layer_kind.h"
#include "parallel/plan/model_description.h"

namespace muster::parallel {

extern const LayerKind kSquareLayer;
extern const ModelFamily kToyFamily;

// The wire contract has no number for it: in this program a job spec's family llama is the toy.
inline constexpr char kToyFamilyInSpecs[] = "llama";

}  // namespace muster::parallel

#endif  // MUSTER_TESTS_PARITY_TOY_FAMILY_H_
