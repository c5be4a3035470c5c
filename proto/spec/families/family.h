// What a family of models adds to the rules of engine.model: a file each, which fills in its
// defaults and checks its fields. Private to proto/spec. What the fields become is the family's
// other file, in parallel/model.
#ifndef MUSTER_PROTO_SPEC_FAMILIES_FAMILY_H_
#define MUSTER_PROTO_SPEC_FAMILIES_FAMILY_H_

#include <set>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "muster/v1/spec.pb.h"
#include "proto/spec/checker.h"

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
};

const SpecFamily& Gpt2();
const SpecFamily& Llama();
const SpecFamily& Mamba2();
const SpecFamily& Hybrid();

absl::Span<const SpecFamily* const> SpecFamilies();
// Null for none, and for one of a newer version.
const SpecFamily* FindSpecFamily(v1::ModelFamily id);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_FAMILIES_FAMILY_H_
