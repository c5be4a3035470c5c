// From text to a JobSpec that can be run: strict parsing, defaults, checks. The parser walks the
// messages of spec.proto, so that a new field needs no change of it.
//
// Two libraries: muster_spec has ApplyDefaults, FindProblems and Validate (needs only Protobuf; the
// coordinator links it), muster_spec_parse has Parse, Load and ToYaml (needs yaml-cpp; the CLI
// links it). Everything here is pure and thread-safe.
#ifndef MUSTER_PROTO_SPEC_SPEC_H_
#define MUSTER_PROTO_SPEC_SPEC_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "muster/v1/spec.pb.h"
#include "parallel/plan/model_description.h"
#include "parallel/plan/validate.h"

namespace muster::spec {

// The size of a spec with defaults, as a message. Specs travel to every daemon of a job.
constexpr size_t kSpecBytesMax = 256 << 10;

// A field and what is wrong with it. `path` is written as in the spec: "engine.data.train[0].path".
struct Problem {
  std::string path;
  std::string message;
};

// YAML or JSON text (JSON is read as YAML). kInvalidArgument: every problem found, one per line, as
// "FILE:LINE:COLUMN: engine.model.heads: expected a whole number, got 'six'", unknown fields with
// the nearest valid name. `file` is used in messages only. `overrides` are
// "engine.training.steps=100" or "engine.data.train[0].path=data/x"; the value is YAML, `null`
// removes the field; an override wins over the file. At most 1 MiB of text, nesting 64, and 100,000
// values after aliases are expanded.
absl::StatusOr<v1::JobSpec> Parse(const std::string& text, const std::string& file,
                                  const std::vector<std::string>& overrides);

// Parse, then the rules of Validate, so that broken rules are reported with their line as well.
// An empty working_directory is set to `working_directory`. Defaults are checked, not filled in.
absl::StatusOr<v1::JobSpec> Load(const std::string& text, const std::string& file,
                                 const std::vector<std::string>& overrides,
                                 const std::string& working_directory);

// The jobs that a file asks for, checked as by Load: one, or the tasks of its `array`, of which
// the first that is refused is reported.
absl::StatusOr<std::vector<v1::JobSpec>> LoadTasks(const std::string& text, const std::string& file,
                                                   const std::vector<std::string>& overrides,
                                                   const std::string& working_directory);

// Fills in every default that spec.proto documents. Idempotent.
void ApplyDefaults(v1::JobSpec& spec);

// The rules that a spec with defaults breaks, e.g. {"engine.model.heads", "5 does not divide hidden
// (192)"}. Looks at no file and no cluster. Long values are cut in messages.
std::vector<Problem> FindProblems(const v1::JobSpec& spec);

// How a spec with defaults splits the work, and the sizes of its model, for parallel::FindProblems.
parallel::Layout LayoutOf(const v1::JobSpec& spec);
parallel::ModelSize SizeOf(const v1::ModelSpec& model);

// The architecture and sizes of the whole model, as the engine and its checkpoints name them.
// Requires: defaults, no problem.
parallel::ModelDescription Describe(const v1::ModelSpec& model);
// The field of ModelSpec that becomes `name` in the descriptions of a family: "mamba.groups" of
// "mamba_groups" in a hybrid. `name` itself where they are called the same.
std::string FieldOf(const std::string& family, const std::string& name);

// What the layers of a model come to, for those that place jobs and do not link the engine: exactly
// what the engine builds.
struct LayerTotals {
  int64_t tables = 0;         // of vocab x hidden: the embedding and the head, or one for both
  int64_t layers = 0;         // branches of the residual stream: mixers and MLPs
  int64_t weights = 0;        // elements of their GEMMs
  int64_t key_columns = 0;    // of the keys and values of a token, of all attention layers
  int64_t state_numbers = 0;  // of the states of a sequence and their decays, of all scans
};
// Requires: defaults, no problem.
LayerTotals TotalsOf(const v1::ModelSpec& model);

// FindProblems as a status: kInvalidArgument with one "path: message" per line.
absl::Status Validate(const v1::JobSpec& spec);

// The spec as YAML, with the fields in the order of spec.proto. Parse(ToYaml(s)) == s for every s
// that Validate accepts.
std::string ToYaml(const v1::JobSpec& spec);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_SPEC_H_
