// What a family's models are called at Hugging Face, and the tools to say it with. The map of all
// families is parallel/interop/hugging_face_names.h's.
#ifndef MUSTER_PARALLEL_MODEL_FAMILIES_HUGGING_FACE_H_
#define MUSTER_PARALLEL_MODEL_FAMILIES_HUGGING_FACE_H_

#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "parallel/checkpoint/json.h"
#include "parallel/model/model.h"

namespace muster::parallel {

// Rows [row, row + rows) of one of our tensors are rows [source_row, source_row + rows) of `tensor`
// there; its columns, when it is stored transposed ([in, out], as GPT-2's layers are). A vector's
// elements are its rows.
struct HuggingFaceSlice {
  std::string tensor;
  bool transposed = false;
  int64_t row = 0;
  int64_t rows = 0;
  int64_t source_row = 0;
};

// One parameter of ours; the slices tile its rows, in order.
struct HuggingFaceParameter {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<HuggingFaceSlice> slices;
};

struct HuggingFaceTensor {
  std::string name;
  std::vector<int64_t> shape;
};

struct HuggingFaceLayout {
  std::vector<HuggingFaceParameter> parameters;  // ours, in order of the registry
  std::vector<HuggingFaceTensor> tensors;        // theirs, in order of first use
};

struct HuggingFaceFamily {
  const char* model_type;  // of config.json
  HuggingFaceLayout (*layout)(const Model& model);
  absl::StatusOr<ModelDescription> (*description)(const Json& config);
  // Without the dtype.
  Json (*config)(const ModelDescription& description);
  // Whether a tensor that the layout does not list may exist, because it adds no information.
  bool (*is_derived)(const ModelDescription& description, absl::string_view name);
  // The prefix that files saved without a head lack; may be empty.
  const char* prefix;
  // kUnimplemented names what a model of the family has that no model there has. Null: nothing.
  absl::Status (*counterpart)(const ModelDescription& description) = nullptr;
};

// Requires: a name that MakeModel requires of every description of the family.
template <typename Value>
const Value& Required(const std::map<std::string, Value>& values, const std::string& name) {
  const auto found = values.find(name);
  CHECK(found != values.end()) << name;
  return found->second;
}

// Builds a layout parameter by parameter. Shapes come from the model's registry, so that a layout
// can only name what the model has.
class LayoutBuilder {
 public:
  explicit LayoutBuilder(const Model& model) : model_(model) {
    for (ParameterId id = 0; id < model.parameters().size(); ++id) {
      ids_[model.parameters().at(id).name] = id;
    }
  }

  // Adds a parameter that is one of their tensors.
  void Same(const std::string& name, const std::string& tensor, bool transposed = false) {
    Slices(name, {{tensor, transposed, 0, Shape(name)[0], 0}});
  }

  // The same for a matrix [rows, columns] that is [rows, 1, columns] there.
  void SameWithAxis(const std::string& name, const std::string& tensor) {
    Same(name, tensor);
    with_axis_.insert(tensor);
  }

  // Adds a parameter whose slices may be of several tensors.
  void Slices(const std::string& name, std::vector<HuggingFaceSlice> slices) {
    const std::vector<int64_t>& shape = Shape(name);
    CHECK_LE(shape.size(), 2u) << name << ": slices are rows and columns";
    for (const HuggingFaceSlice& slice : slices) {
      auto [found, added] = rows_.emplace(slice.tensor, layout_.tensors.size());
      if (added) layout_.tensors.push_back({slice.tensor, shape});
      if (added) layout_.tensors.back().shape[0] = 0;
      std::vector<int64_t>& stored = layout_.tensors[found->second].shape;
      // Kept as [rows, columns] until the end; see Finish().
      stored[0] = std::max(stored[0], slice.source_row + slice.rows);
      if (slice.transposed) transposed_.emplace(slice.tensor, true);
    }
    layout_.parameters.push_back({name, shape, std::move(slices)});
  }

  const std::vector<int64_t>& Shape(const std::string& name) const {
    return model_.parameters().at(Required(ids_, name)).global_shape;
  }

  HuggingFaceLayout Finish() {
    for (HuggingFaceTensor& tensor : layout_.tensors) {
      if (transposed_.count(tensor.name) > 0) std::swap(tensor.shape[0], tensor.shape[1]);
      if (with_axis_.count(tensor.name) > 0) tensor.shape.insert(tensor.shape.begin() + 1, 1);
    }
    return std::move(layout_);
  }

 private:
  const Model& model_;
  std::map<std::string, ParameterId> ids_;
  std::map<std::string, size_t> rows_;  // index into layout_.tensors
  std::map<std::string, bool> transposed_;
  std::set<std::string> with_axis_;
  HuggingFaceLayout layout_;
};

// The parameters of a Mamba-2 mixer, whose names begin with `ours` and `theirs`.
inline void AddMamba2(LayoutBuilder& builder, const std::string& ours, const std::string& theirs) {
  // The rows of z, x, B, C and dt have the same order there.
  builder.Same(ours + "in_proj.weight", theirs + "in_proj.weight");
  // [W,K] here, [W,1,K] there.
  builder.SameWithAxis(ours + "conv.weight", theirs + "conv1d.weight");
  builder.Same(ours + "conv.bias", theirs + "conv1d.bias");
  builder.Same(ours + "dt_bias", theirs + "dt_bias");
  builder.Same(ours + "a_log", theirs + "A_log");
  builder.Same(ours + "d", theirs + "D");
  builder.Same(ours + "norm.weight", theirs + "norm.weight");
  builder.Same(ours + "out_proj.weight", theirs + "out_proj.weight");
}

// The rows of grouped queries, keys and values are one matrix here and three there.
inline void AddQueriesKeysValues(LayoutBuilder& builder, const std::string& ours,
                                 const std::string& theirs, int64_t query_rows, int64_t key_rows) {
  builder.Slices(ours, {{theirs + "q_proj.weight", false, 0, query_rows, 0},
                        {theirs + "k_proj.weight", false, query_rows, key_rows, 0},
                        {theirs + "v_proj.weight", false, query_rows + key_rows, key_rows, 0}});
}

// Reads keys of config.json and remembers the first problem.
class ConfigReader {
 public:
  explicit ConfigReader(const Json& config) : config_(config) {}

  int64_t Size(const char* key) {
    const auto found = config_.find(key);
    if (found == config_.end() || !found->is_number_integer() || found->get<int64_t>() <= 0) {
      Refuse(key, "a positive number is needed");
      return 1;
    }
    return found->get<int64_t>();
  }
  int64_t Size(const char* key, int64_t otherwise) { return Given(key) ? Size(key) : otherwise; }

  double Number(const char* key) {
    const auto found = config_.find(key);
    if (found == config_.end() || !found->is_number() || !(found->get<double>() > 0)) {
      Refuse(key, "a positive number is needed");
      return 1;
    }
    return found->get<double>();
  }
  double Number(const char* key, double otherwise) { return Given(key) ? Number(key) : otherwise; }
  bool Flag(const char* key, bool otherwise) {
    if (!Given(key)) return otherwise;
    if (!config_[key].is_boolean()) Refuse(key, "true or false is needed");
    return config_[key] == true;
  }
  std::string Text(const char* key, const std::string& otherwise) {
    if (!Given(key)) return otherwise;
    if (!config_[key].is_string()) {
      Refuse(key, "a text is needed");
      return otherwise;
    }
    return config_[key].get<std::string>();
  }

  // The key may be absent, which stands for `wanted`.
  void Must(const char* key, const Json& wanted) {
    if (Given(key) && config_[key] != wanted) {
      Refuse(key, absl::StrCat("only ", wanted.dump(), " is there"));
    }
  }

  bool Given(const char* key) const {
    const auto found = config_.find(key);
    return found != config_.end() && !found->is_null();
  }
  const Json& config() const { return config_; }

  void Refuse(const char* key, const std::string& why) {
    if (!status_.ok()) return;
    const std::string value = Given(key) ? config_[key].dump() : "absent";
    status_ = absl::InvalidArgumentError(
        absl::StrCat("'", key, "' is ", value.substr(0, 100), "; ", why));
  }
  const absl::Status& status() const { return status_; }

 private:
  const Json& config_;
  absl::Status status_;
};

// Whether `name` is a head stored a second time, equal to the token table that it is tied to.
inline bool IsTiedHead(const ModelDescription& description, absl::string_view name) {
  const auto tied = description.flags.find("tied");
  return name == "lm_head.weight" && tied != description.flags.end() && tied->second;
}

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_FAMILIES_HUGGING_FACE_H_
