#include "worker/rank/initial_weights.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/interop/hugging_face.h"
#include "parallel/model/families/family.h"
#include "parallel/train/checkpoint_names.h"
#include "parallel/train/failure.h"
#include "proto/spec/spec.h"

namespace muster::worker {
namespace {

using parallel::Box;
using parallel::CheckpointReader;
using parallel::FailureDomain;
using parallel::HuggingFaceFolder;
using parallel::Mark;
using parallel::ModelDescription;

constexpr char kField[] = "engine.model.initialize_from";
constexpr char kSequenceLength[] = "sequence_length";

class FromHuggingFace : public InitialWeights {
 public:
  FromHuggingFace(std::unique_ptr<HuggingFaceFolder> folder, const std::string& directory)
      : folder_(std::move(folder)), source_(absl::StrCat("Hugging Face folder ", directory)) {}
  absl::Status Read(const std::string& name, const Box& box, float* out) override {
    return folder_->Read(name, box, out);
  }
  const std::string& source() const override { return source_; }

 private:
  const std::unique_ptr<HuggingFaceFolder> folder_;
  const std::string source_;
};

class FromCheckpoint : public InitialWeights {
 public:
  FromCheckpoint(std::unique_ptr<CheckpointReader> reader, const std::string& directory)
      : reader_(std::move(reader)), source_(absl::StrCat("checkpoint ", directory)) {}
  absl::Status Read(const std::string& name, const Box& box, float* out) override {
    return reader_->Read(name, kernels::DType::kF32, box, out);
  }
  const std::string& source() const override { return source_; }

 private:
  const std::unique_ptr<CheckpointReader> reader_;
  const std::string source_;
};

template <typename Value>
std::string TextOf(const std::map<std::string, Value>& values, const std::string& name) {
  const auto found = values.find(name);
  return found == values.end() ? "none" : absl::StrCat(found->second);
}

// Equal up to rounding: numbers have been written as decimal text.
template <typename Value>
bool Equal(const Value& a, const Value& b) {
  if constexpr (std::is_arithmetic_v<Value>) {
    const auto x = static_cast<double>(a), y = static_cast<double>(b);
    return std::abs(x - y) <= 1e-6 * std::max(std::abs(x), std::abs(y));
  } else {
    return a == b;
  }
}

template <typename Value>
void Compare(const std::string& family, const std::map<std::string, Value>& wanted,
             const std::map<std::string, Value>& there, std::vector<std::string>& differences) {
  std::set<std::string> names;
  for (const auto* values : {&wanted, &there}) {
    for (const auto& [name, value] : *values) names.insert(name);
  }
  for (const std::string& name : names) {
    if (name == kSequenceLength) continue;
    const auto a = wanted.find(name), b = there.find(name);
    if (a != wanted.end() && b != there.end() && Equal(a->second, b->second)) continue;
    differences.push_back(absl::StrFormat("%s is %s in the spec and %s there",
                                          spec::FieldOf(family, name), TextOf(wanted, name),
                                          TextOf(there, name)));
  }
}

absl::Status SameModel(const ModelDescription& wanted, const ModelDescription& there) {
  std::vector<std::string> differences;
  if (wanted.family != there.family) {
    differences.push_back(
        absl::StrCat("family is ", wanted.family, " in the spec and ", there.family, " there"));
  } else {
    // Positions are a flag of descriptions and a word of specs.
    const auto positions = [](const ModelDescription& of) {
      auto flags = of.flags;
      std::map<std::string, std::string> texts = of.texts;
      if (const auto rotary = flags.extract("rotary"); !rotary.empty()) {
        texts["positions"] = rotary.mapped() ? "rotary" : "none";
      }
      return std::pair(flags, texts);
    };
    const auto [wanted_flags, wanted_texts] = positions(wanted);
    const auto [flags_there, texts_there] = positions(there);
    Compare(wanted.family, wanted.sizes, there.sizes, differences);
    Compare(wanted.family, wanted.numbers, there.numbers, differences);
    Compare(wanted.family, wanted_flags, flags_there, differences);
    Compare(wanted.family, wanted_texts, texts_there, differences);
    const auto longer = wanted.sizes.find(kSequenceLength), has = there.sizes.find(kSequenceLength);
    const bool learned = parallel::ConfigOf(wanted).position == parallel::PositionKind::kLearned;
    if (learned && longer != wanted.sizes.end() && has != there.sizes.end() &&
        longer->second > has->second) {
      differences.push_back(absl::StrFormat(
          "sequence_length is %d in the spec, and there are learned positions for %d there",
          longer->second, has->second));
    }
  }
  if (differences.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("holds another model: ", absl::StrJoin(differences, "; "),
                   ". Set engine.model to what it holds"));
}

absl::StatusOr<std::unique_ptr<InitialWeights>> OpenUnmarked(FileSystem& files,
                                                             const std::string& directory,
                                                             const ModelDescription& model) {
  if (files.Exists(directory + "/manifest.json")) {
    ASSIGN_OR_RETURN(auto reader,
                     CheckpointReader::Open(files, directory, parallel::Verify::kSizes));
    RETURN_IF_ERROR(SameModel(model, parallel::ReadDescription(reader->state())));
    return std::make_unique<FromCheckpoint>(std::move(reader), directory);
  }
  if (files.Exists(directory + "/config.json")) {
    ASSIGN_OR_RETURN(auto folder, HuggingFaceFolder::Open(files, directory));
    RETURN_IF_ERROR(SameModel(model, folder->model().description()));
    return std::make_unique<FromHuggingFace>(std::move(folder), directory);
  }
  return absl::NotFoundError(
      "is neither a checkpoint (no manifest.json) nor a Hugging Face model folder (no config.json) "
      "on this worker");
}

}  // namespace

absl::StatusOr<std::unique_ptr<InitialWeights>> InitialWeights::Open(
    FileSystem& files, const std::string& directory, const ModelDescription& model) {
  auto opened = OpenUnmarked(files, directory, model);
  if (opened.ok()) return opened;
  FailureDomain domain = FailureDomain::kStorage;
  switch (opened.status().code()) {
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnimplemented:
      domain = FailureDomain::kConfiguration;
      break;
    case absl::StatusCode::kDataLoss:
      domain = FailureDomain::kData;
      break;
    default:
      break;
  }
  return Mark(Annotate(opened.status(), absl::StrCat(kField, ": ", directory)), domain);
}

}  // namespace muster::worker
