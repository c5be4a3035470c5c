#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "google/protobuf/unknown_field_set.h"
#include "parallel/plan/validate.h"
#include "proto/spec/checker.h"
#include "proto/spec/deadline.h"
#include "proto/spec/dependencies.h"
#include "proto/spec/elastic.h"
#include "proto/spec/names.h"
#include "proto/spec/share.h"
#include "proto/spec/spec.h"
#include "proto/time.h"

namespace muster::spec {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

constexpr size_t kNameLengthMax = 63;
constexpr int64_t kRanksMax = kElasticRanksMax;
constexpr int kLabelsMax = 32;
constexpr size_t kLabelBytesMax = 63;
constexpr int kAfterMax = 16;
constexpr size_t kNotesBytesMax = 4 << 10;
constexpr absl::Duration kTimeLimitMax = absl::Hours(24 * 3650);
constexpr size_t kProblemsMax = 100;

bool IsWellFormed(const google::protobuf::Duration& proto) {
  constexpr int32_t kNanosMax = 999'999'999;
  return proto.nanos() >= -kNanosMax && proto.nanos() <= kNanosMax &&
         (proto.seconds() >= 0 || proto.nanos() <= 0) &&
         (proto.seconds() <= 0 || proto.nanos() >= 0);
}

bool IsName(const std::string& name) {
  if (name.empty() || name.size() > kNameLengthMax) return false;
  if (!absl::ascii_islower(name.front()) || name.back() == '-') return false;
  for (char c : name) {
    if (!absl::ascii_islower(c) && !absl::ascii_isdigit(c) && c != '-') return false;
  }
  return true;
}

// What CheckKnown looks at in messages of one type: fields that are enums, and those with messages,
// whose shape they have. Every submission is walked, and most fields are neither.
struct Shape {
  struct Field {
    const FieldDescriptor* field;
    const Shape* shape;  // null: an enum
  };
  std::vector<Field> fields;
};
using Shapes = std::map<const Descriptor*, Shape>;

const Shape& AddShape(const Descriptor& type, Shapes& shapes) {
  const auto [known, added] = shapes.try_emplace(&type);
  Shape& shape = known->second;
  for (int i = 0; added && i < type.field_count(); ++i) {
    const FieldDescriptor* field = type.field(i);
    if (field->is_map()) continue;
    if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      shape.fields.push_back({field, &AddShape(*field->message_type(), shapes)});
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_ENUM && !field->is_repeated()) {
      shape.fields.push_back({field, nullptr});
    }
  }
  return shape;
}

const Shape& ShapeOfSpecs() {
  static Shapes& shapes = *new Shapes;
  static const Shape& shape = AddShape(*v1::JobSpec::descriptor(), shapes);
  return shape;
}

// Where a message is in a spec. Its text is made only where something is wrong.
struct Place {
  const Place* parent;  // null: the spec
  const FieldDescriptor* field;
  int index;  // in a repeated field, else -1

  std::string Text() const {
    std::string text = parent == nullptr ? "" : absl::StrCat(parent->Text(), ".");
    absl::StrAppend(&text, field->name());
    if (index >= 0) absl::StrAppend(&text, "[", index, "]");
    return text;
  }
};

// Refuses enum numbers and fields that this version does not know. They come from a newer client,
// which asks for something that this version would not do. `place` of the message; null: the spec.
void CheckKnown(const Message& message, const Shape& shape, const Place* place, Checker& check) {
  const auto& reflection = *message.GetReflection();
  if (!reflection.GetUnknownFields(message).empty()) {
    check.Add(place == nullptr ? "spec" : place->Text(), "has a field with number ",
              reflection.GetUnknownFields(message).field(0).number(),
              ", which this version does not know; the client is newer than the coordinator");
  }
  for (const auto& [field, below] : shape.fields) {
    if (below == nullptr) {
      const int number = reflection.GetEnumValue(message, field);
      if (number != 0 && field->enum_type()->FindValueByNumber(number) == nullptr) {
        check.Add(Place{place, field, -1}.Text(), "unknown value ", number, "; expected ",
                  absl::StrJoin(EnumNames(*field->enum_type()), ", "));
      }
    } else if (!field->is_repeated()) {
      const Place at = {place, field, -1};
      if (reflection.HasField(message, field)) {
        CheckKnown(reflection.GetMessage(message, field), *below, &at, check);
      }
    } else {
      for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
        const Place at = {place, field, i};
        CheckKnown(reflection.GetRepeatedMessage(message, field, i), *below, &at, check);
      }
    }
  }
}

constexpr int32_t kPriorityMax = 1000;

void CheckHead(const v1::JobSpec& spec, Checker& check) {
  if (spec.name().empty()) {
    check.Add("name", "required");
  } else if (!IsName(spec.name())) {
    check.Add(
        "name", Quoted(spec.name()),
        " is not a job name: 1-63 characters of [a-z0-9-], starting with a letter, not ending "
        "with '-'");
  }
  if (!IsName(spec.queue())) {
    check.Add(
        "queue", Quoted(spec.queue()),
        " is not a queue name: 1-63 characters of [a-z0-9-], starting with a letter, not ending "
        "with '-'");
  }
  if (spec.priority() < 0 || spec.priority() > kPriorityMax) {
    check.Add("priority", spec.priority(), " is out of range; 0 to ", kPriorityMax);
  }
  if (!spec.working_directory().empty() &&
      check.PathText("working_directory", spec.working_directory()) &&
      spec.working_directory()[0] != '/') {
    check.Add("working_directory", Quoted(spec.working_directory()), " is not an absolute path");
  }
  if (spec.labels_size() > kLabelsMax) {
    check.Add("labels", spec.labels_size(), " labels; at most ", kLabelsMax);
    return;
  }
  for (const auto& [name, value] : spec.labels()) {
    if (name.empty()) {
      check.Add("labels", "a label without a name");
    } else if (name.size() > kLabelBytesMax) {
      check.Add("labels", "the name ", Quoted(name), " is longer than ", kLabelBytesMax, " bytes");
    }
    if (value.size() > kLabelBytesMax) {
      check.Add(absl::StrCat("labels.", name.substr(0, kLabelBytesMax)), Quoted(value),
                " is longer than ", kLabelBytesMax, " bytes");
    }
  }
}

void CheckAfter(const v1::JobSpec& spec, Checker& check) {
  if (spec.after_size() > kAfterMax) {
    check.Add("after", spec.after_size(), " jobs; at most ", kAfterMax);
    return;
  }
  for (int i = 0; i < spec.after_size(); ++i) {
    if (ParseDependency(spec.after(i)).has_value()) continue;
    check.Add(absl::StrCat("after[", i, "]"), Quoted(spec.after(i)),
              " is not NAME:succeeded, NAME:failed or NAME:ended, with the name or id of a job");
  }
}

void CheckTimeLimit(const v1::JobSpec& spec, Checker& check) {
  if (!spec.has_time_limit()) return;
  const absl::Duration limit = FromProto(spec.time_limit());
  if (IsWellFormed(spec.time_limit()) && limit >= absl::Seconds(1) && limit <= kTimeLimitMax)
    return;
  check.Add("time_limit", absl::FormatDuration(limit), " is out of range; 1s to ",
            absl::FormatDuration(kTimeLimitMax));
}

void CheckDeadline(const v1::JobSpec& spec, Checker& check) {
  if (spec.deadline().empty()) return;
  const auto parsed = ParseDeadline(spec.deadline());
  if (!parsed.ok()) return check.Add("deadline", parsed.status().message());
  const auto* after = std::get_if<absl::Duration>(&*parsed);
  if (after != nullptr && *after < absl::Seconds(1)) {
    check.Add("deadline", absl::FormatDuration(*after),
              " is out of range; 1s to ten years from the submission");
  }
}

// The nearest sizes outside of the range, as "; 4 and 16 would do".
std::string NearestSizes(const v1::JobSpec& spec) {
  v1::JobSpec wide = spec;
  const v1::RankRange& range = spec.resources().rank_range();
  v1::RankRange& other = *wide.mutable_resources()->mutable_rank_range();
  std::vector<std::string> sizes;
  // SizesOf ends at kSizesMax sizes, and the largest are wanted.
  for (int32_t top = range.min() - 1; top >= 1 && sizes.empty(); top -= kSizesMax) {
    other.set_min(std::max(1, top - kSizesMax + 1));
    other.set_max(top);
    const std::vector<int32_t> below = SizesOf(wide);
    if (!below.empty()) sizes.push_back(absl::StrCat(below.back()));
  }
  other.set_min(range.max() + 1);
  other.set_max(kRanksMax);
  if (const std::vector<int32_t> above = SizesOf(wide); !above.empty()) {
    sizes.push_back(absl::StrCat(above.front()));
  }
  return sizes.empty() ? "" : absl::StrCat("; ", absl::StrJoin(sizes, " and "), " would do");
}

void CheckRange(const v1::JobSpec& spec, Checker& check) {
  const v1::RankRange& range = spec.resources().rank_range();
  if (!check.InRange("resources.ranks.min", range.min(), 1, kRanksMax)) return;
  if (!check.InRange("resources.ranks.max", range.max(), 1, kRanksMax)) return;
  if (range.max() < range.min()) {
    check.Add("resources.ranks.max", range.max(), " is less than min (", range.min(), ")");
    return;
  }
  if (spec.resources().ranks() != range.max()) {
    check.Add("resources.ranks", spec.resources().ranks(), " is not rank_range.max (", range.max(),
              "); leave it out");
  }
  if (range.resumes() && spec.has_engine()) {
    check.Add("resources.ranks.resumes",
              "is for `command`; a job with `engine` is resized if it has `checkpoint`");
  }
  if (spec.has_checkpoint() && spec.checkpoint().storage() == v1::CHECKPOINT_STORAGE_LOCAL) {
    check.Add("checkpoint.storage",
              "local does not go with a range of resources.ranks: with other ranks shards are "
              "wanted on other hosts; use shared");
  }
  const std::vector<int32_t> sizes = SizesOf(spec);
  if (static_cast<int>(sizes.size()) > kSizesMax) {
    check.Add("resources.ranks", "more than ", kSizesMax, " numbers from ", range.min(), " to ",
              range.max(), " are possible; choose a narrower range");
  }
  if (sizes.empty()) {
    const std::string nearest = NearestSizes(spec);
    // Where no number is possible the layout itself is at fault, which CheckParallel reports.
    if (nearest.empty() && spec.has_engine()) return;
    check.Add("resources.ranks", "no number of ranks from ", range.min(), " to ", range.max(),
              spec.has_engine()
                  ? " is a multiple of the other degrees of engine.parallel whose data-parallel "
                    "degree the layout and engine.training.global_batch allow"
                  : " is a multiple of placement.segment",
              nearest);
    return;
  }
  if (!spec.has_engine()) return;
  const int32_t data = AtSize(spec, sizes.back()).engine().parallel().data();
  if (spec.engine().parallel().data() != data) {
    check.Add("engine.parallel.data", spec.engine().parallel().data(),
              " is given, but it varies with a range of resources.ranks (", data, " with ",
              sizes.back(), " ranks); leave it out");
  }
}

void CheckShare(const v1::JobSpec& spec, Checker& check) {
  constexpr const char* kField = "resources.share";
  if (!spec.resources().has_share()) return;
  const double share = spec.resources().share();
  if (!(share > 0 && share <= 1)) {
    check.Add(kField, share,
              " is out of range; above 0, at most 1, which is a whole device: 0.5 for half of one");
    return;
  }
  const double thousandths = share * kWholeDevice;
  const double nearest = std::max(1.0, std::round(thousandths));
  if (std::abs(thousandths - nearest) > 1e-6) {
    check.Add(kField, share, " is no multiple of 0.001; ", nearest / kWholeDevice, " would do");
  } else if (nearest < kWholeDevice && IsElastic(spec)) {
    check.Add(kField,
              "does not go with a range of resources.ranks, which takes whole devices; "
              "give one number of ranks, or leave share out");
  }
}

void CheckResources(const v1::JobSpec& spec, Checker& check) {
  const v1::ResourceSpec& resources = spec.resources();
  if (IsElastic(spec)) {
    CheckRange(spec, check);
  } else {
    check.InRange("resources.ranks", resources.ranks(), 1, kRanksMax);
  }
  CheckShare(spec, check);
  check.NotNegative("resources.threads_per_rank",
                    static_cast<int64_t>(resources.threads_per_rank()));
}

void CheckPlacement(const v1::JobSpec& spec, Checker& check) {
  const v1::PlacementSpec& placement = spec.placement();
  const auto name = [](v1::TopologyLevel level) { return EnumName(level); };
  const v1::TopologyLevel within = std::max(placement.required(), placement.preferred());
  if (placement.required() != 0 && placement.preferred() != 0) {
    check.Add("placement.preferred", "cannot be given together with required; keep one of both");
  }
  const int64_t tensor = std::max(1, spec.engine().parallel().tensor());
  // Of a range, SizesOf leaves out what a segment does not divide.
  const int64_t segment = placement.segment();
  const int64_t ranks = IsElastic(spec) ? segment : spec.resources().ranks();
  if (segment != 0 && (segment < 0 || ranks % segment != 0 || segment % tensor != 0)) {
    check.Add("placement.segment", segment, " is not a divisor of resources.ranks (", ranks,
              ") and a multiple of engine.parallel.tensor (", tensor, ")");
  } else if (segment != 0 && within == 0) {
    check.Add("placement.segment", "needs required or preferred: the level that holds a segment");
  }
  if (placement.spread() == 0) return;
  if (placement.spread() == v1::TOPOLOGY_LEVEL_CLUSTER) {
    check.Add("placement.spread", "there is one cluster; choose host, nvlink_domain, rack, block ",
              "or zone");
  } else if (segment != 0 && placement.spread() != within) {
    check.Add("placement.spread", "with a segment it is the level that holds one, ", name(within),
              ", not ", name(placement.spread()));
  } else if (segment == 0 && within != 0 && placement.spread() >= within) {
    check.Add("placement.spread", name(placement.spread()), " is not narrower than ", name(within),
              ", in one of which the gang is to be");
  }
}

void CheckCheckpoint(const v1::JobSpec& spec, Checker& check) {
  check.Path("checkpoint.path", spec.checkpoint().path(), spec);
  check.InRange("checkpoint.every_steps", spec.checkpoint().every_steps(), 1);
  check.InRange("checkpoint.keep", spec.checkpoint().keep(), 1);
}

// True, with the duration in `duration`, when it is one from 0 to 24 hours.
bool CheckDuration(absl::string_view path, const google::protobuf::Duration& proto,
                   absl::Duration* duration, Checker& check) {
  *duration = FromProto(proto);
  if (IsWellFormed(proto) && *duration >= absl::ZeroDuration() && *duration <= absl::Hours(24)) {
    return true;
  }
  check.Add(path, absl::FormatDuration(*duration), " is out of range; 0s to 24h");
  return false;
}

void CheckRestart(const v1::RestartSpec& restart, Checker& check) {
  check.NotNegative("restart.max_failures", static_cast<int64_t>(restart.max_failures()));
  absl::Duration initial, max;
  const bool initial_ok =
      CheckDuration("restart.backoff.initial", restart.backoff().initial(), &initial, check);
  const bool max_ok = CheckDuration("restart.backoff.max", restart.backoff().max(), &max, check);
  if (initial_ok && max_ok && initial > max) {
    check.Add("restart.backoff.initial", absl::FormatDuration(initial), " is longer than max (",
              absl::FormatDuration(max), ")");
  }
}

void CheckPreemption(const v1::PreemptionSpec& preemption, Checker& check) {
  absl::Duration grace, min_runtime;
  if (CheckDuration("preemption.grace", preemption.grace(), &grace, check) &&
      grace < absl::Seconds(1)) {
    check.Add("preemption.grace", absl::FormatDuration(grace), " is out of range; 1s to 24h");
  }
  CheckDuration("preemption.min_runtime", preemption.min_runtime(), &min_runtime, check);
  absl::Duration grow_after;
  CheckDuration("preemption.grow_after", preemption.grow_after(), &grow_after, check);
}

}  // namespace

parallel::Layout LayoutOf(const v1::JobSpec& spec) {
  const v1::ParallelSpec& split = spec.engine().parallel();
  const v1::TrainingSpec& training = spec.engine().training();
  parallel::Layout layout;
  // The axes that a spec can ask for.
  layout.negotiable = {parallel::Axis::kData, parallel::Axis::kPipeline, parallel::Axis::kContext,
                       parallel::Axis::kTensor};
  layout.degrees =
      parallel::PerAxis(split.pipeline(), split.data(), split.context(), split.tensor());
  layout.pipeline_chunks = split.pipeline_chunks();
  layout.interleaved = split.pipeline_schedule() == v1::PIPELINE_SCHEDULE_INTERLEAVED;
  layout.zero_bubble = split.pipeline_schedule() == v1::PIPELINE_SCHEDULE_ZERO_BUBBLE;
  layout.pipeline_parts = split.pipeline_blocks_size();
  layout.all_to_all = split.context_method() == v1::CONTEXT_METHOD_ALL_TO_ALL;
  layout.scan_all_to_all = split.scan_method() == v1::SCAN_METHOD_ALL_TO_ALL;
  layout.tensor_shares = split.tensor_shares_size();
  layout.sequence_parallel = split.sequence();
  layout.tensor_chunks = split.tensor_overlap() == v1::TENSOR_OVERLAP_CHUNKED;
  layout.tensor_halves = split.tensor_overlap() == v1::TENSOR_OVERLAP_HALVES;
  layout.zero = split.zero();
  layout.zero_shards = split.zero_shards();
  layout.global_batch = training.global_batch();
  layout.micro_batch = training.micro_batch();
  const v1::GradientCompressionSpec& compression = training.gradient_compression();
  if (compression.has_top_k()) layout.top_k_density = compression.top_k().density();
  layout.sign_compression = compression.has_sign();
  return layout;
}

parallel::ModelSize SizeOf(const v1::ModelSpec& model) {
  return {.layers = model.layers(),
          .heads = model.heads(),
          .sequence = model.sequence_length(),
          .kv_heads = model.kv_heads(),
          .ffn = model.ffn(),
          .vocab = model.vocab(),
          .ssm_heads = model.mamba().heads(),
          .ssm_groups = model.mamba().groups()};
}

std::vector<Problem> FindProblems(const v1::JobSpec& spec) {
  Checker check;
  CheckKnown(spec, ShapeOfSpecs(), nullptr, check);
  CheckHead(spec, check);
  if (spec.has_engine() && spec.command_size() > 0) {
    check.Add("command", "only one of 'engine' and 'command' may be given");
  } else if (spec.has_engine()) {
    CheckEngine(spec, check);
  } else if (spec.command_size() > 0) {
    CheckCommand(spec, check);
  } else {
    check.Add("engine", "required: says what to train; or give 'command', a program to run");
  }
  if (spec.command_size() == 0 && !spec.env().empty()) {
    check.Add("env", "is for 'command', which is not given");
  }
  CheckResources(spec, check);
  CheckPlacement(spec, check);
  if (spec.has_checkpoint()) CheckCheckpoint(spec, check);
  CheckRestart(spec.restart(), check);
  CheckPreemption(spec.preemption(), check);
  CheckTimeLimit(spec, check);
  CheckDeadline(spec, check);
  if (spec.has_array_task()) CheckArrayTask(spec, check);
  CheckAfter(spec, check);
  if (spec.notes().size() > kNotesBytesMax) {
    check.Add("notes", "is ", spec.notes().size(), " bytes long; at most ", kNotesBytesMax);
  }
  // Lists and texts are bounded one by one; only data sources, or the texts of a command, can be
  // many and long at once.
  if (const size_t bytes = spec.ByteSizeLong(); bytes > kSpecBytesMax) {
    const bool command = spec.command_size() > 0;
    check.Add(command ? "command" : "engine.data", "the spec takes ", bytes,
              " bytes, and every host gets a copy; at most ", kSpecBytesMax,
              command ? ": put long texts into a file that the command reads"
                      : ": blend fewer data sets, or give them shorter paths");
  }
  std::vector<Problem> problems = std::move(check.problems());
  if (problems.size() > kProblemsMax) problems.resize(kProblemsMax);
  return problems;
}

absl::Status Validate(const v1::JobSpec& spec) {
  const std::vector<Problem> problems = FindProblems(spec);
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrJoin(problems, "\n", [](std::string* out, const Problem& problem) {
        absl::StrAppend(out, problem.path, ": ", problem.message);
      }));
}

}  // namespace muster::spec
