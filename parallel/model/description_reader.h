// Reads the values of a ModelDescription.
#ifndef MUSTER_PARALLEL_MODEL_DESCRIPTION_READER_H_
#define MUSTER_PARALLEL_MODEL_DESCRIPTION_READER_H_

#include <cmath>
#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/attention/rotary.h"
#include "parallel/model/language_model.h"
#include "parallel/model/model.h"

namespace muster::parallel {

// Takes values out of a description by name. It remembers the first problem: a value that is
// missing, or one that the family does not know.
class DescriptionReader {
 public:
  explicit DescriptionReader(const ModelDescription& description) : left_(description) {}

  // Descriptions also come from files, so their products must not overflow.
  int64_t Size(const char* name);
  int64_t Size(const char* name, int64_t otherwise) {
    return left_.sizes.count(name) > 0 ? Size(name) : otherwise;
  }
  double Number(const char* name) { return Take(left_.numbers, "number", name, 0.0); }
  double Number(const char* name, double otherwise) {
    return left_.numbers.count(name) > 0 ? Number(name) : otherwise;
  }
  bool Flag(const char* name) {
    const auto found = left_.flags.find(name);
    if (found == left_.flags.end()) {
      Refuse(absl::StrCat("flag '", name, "' is missing"));
      return false;
    }
    const bool value = found->second;
    left_.flags.erase(found);
    return value;
  }
  std::string Text(const char* name) {
    const auto found = left_.texts.find(name);
    if (found == left_.texts.end()) {
      Refuse(absl::StrCat("text '", name, "' is missing"));
      return "";
    }
    std::string value = found->second;
    left_.texts.erase(found);
    return value;
  }
  // The sizes PREFIXheads, PREFIXhead_width, PREFIXgroups, PREFIXstate and PREFIXtaps, within what
  // the kernels take, and the number PREFIXstep_min, 0 if it is missing.
  LanguageModelConfig::Mamba2 Mamba2(const std::string& prefix);
  // Those of DescribeRopeScaling; without them, no scaling.
  kernels::RotaryScaling RopeScaling();
  void Require(bool good, const std::string& why) {
    if (!good) Refuse(why);
  }

  // To be called after all values have been taken.
  absl::Status Finish() {
    for (const auto& [name, value] : left_.sizes) Refuse(absl::StrCat("unknown size '", name, "'"));
    for (const auto& [name, value] : left_.numbers) {
      Refuse(absl::StrCat("unknown number '", name, "'"));
    }
    for (const auto& [name, value] : left_.flags) Refuse(absl::StrCat("unknown flag '", name, "'"));
    for (const auto& [name, value] : left_.texts) Refuse(absl::StrCat("unknown text '", name, "'"));
    return status_;
  }

 private:
  template <typename Value>
  Value Take(std::map<std::string, Value>& values, const char* kind, const char* name,
             Value nothing) {
    const auto found = values.find(name);
    if (found == values.end() || !(found->second > nothing) ||
        !std::isfinite(static_cast<double>(found->second))) {
      Refuse(absl::StrCat(kind, " '", name, "' is missing or not positive"));
      return static_cast<Value>(1);
    }
    const Value value = found->second;
    values.erase(found);
    return value;
  }
  void Refuse(const std::string& why) {
    if (status_.ok()) {
      status_ = absl::InvalidArgumentError(absl::StrCat("model ", left_.family, ": ", why));
    }
  }

  ModelDescription left_;
  absl::Status status_;
};

// Adds the sizes and numbers of rotary scaling, if there is any.
void DescribeRopeScaling(const kernels::RotaryScaling& scaling, ModelDescription& description);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_DESCRIPTION_READER_H_
