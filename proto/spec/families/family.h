// What a family of models is to a job spec: a file each, with its fields of engine.model, their
// defaults and rules, its presets, and what the fields become. Its counterpart in the engine, which
// this must not link, is in parallel/model/families; the two meet in parallel::ModelDescription.
// Private to proto/spec.
#ifndef MUSTER_PROTO_SPEC_FAMILIES_FAMILY_H_
#define MUSTER_PROTO_SPEC_FAMILIES_FAMILY_H_

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "muster/v1/spec.pb.h"
#include "parallel/plan/model_description.h"
#include "proto/spec/checker.h"
#include "proto/spec/spec.h"

namespace muster::spec {

struct SpecFamily {
  v1::ModelFamily id;
  // Fields of ModelSpec that it has beside those of all families. Those of other families alone are
  // refused before `check` is called.
  std::set<absl::string_view> fields;
  // Whether its number of layers follows from another field, whose check says what is wrong.
  bool counts_layers = false;
  void (*set_defaults)(v1::ModelSpec& model);
  // layers, hidden, vocab and sequence_length have been checked.
  void (*check)(const v1::ModelSpec& model, Checker& check);
  // Of a model with defaults that is valid: its description, which has the family and the sizes
  // layers, hidden, vocab and sequence_length already, and what its layers come to.
  void (*describe)(const v1::ModelSpec& model, parallel::ModelDescription& description);
  void (*add_layers)(const v1::ModelSpec& model, LayerTotals& totals);
  // What `describe` puts before the names of the fields of `mamba`. Null: the family has none.
  const char* mamba_prefix = nullptr;
  // Takes out of a preset of the family what does not go with the given fields, which will replace
  // its own. Null: nothing.
  void (*fit_preset)(const v1::ModelSpec& given, v1::ModelSpec& preset) = nullptr;
  // Names and the fields that they stand for.
  std::vector<std::pair<std::string, v1::ModelSpec>> presets = {};
};

const SpecFamily& Gpt2();
const SpecFamily& Llama();
const SpecFamily& Mamba2();
const SpecFamily& Hybrid();

// The families of this program. Defined alone in list.cc, so that a test may bring its own list.
absl::Span<const SpecFamily* const> SpecFamilies();
// Null for none, and for one of a newer version.
const SpecFamily* FindSpecFamily(v1::ModelFamily id);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_FAMILIES_FAMILY_H_
