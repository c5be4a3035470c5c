// Which jobs a listing is about, by their labels.
#ifndef MUSTER_COORDINATOR_RPC_LABEL_SELECTOR_H_
#define MUSTER_COORDINATOR_RPC_LABEL_SELECTOR_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "google/protobuf/map.h"

namespace muster::coordinator {

class LabelSelector {
 public:
  // ListJobsRequest.label_selector. kInvalidArgument names the part that is not understood.
  static absl::StatusOr<LabelSelector> Parse(const std::string& text);

  bool Matches(const google::protobuf::Map<std::string, std::string>& labels) const;

 private:
  enum class Kind { kEqual, kNotEqual, kHas, kHasNot };
  struct Term {
    Kind kind;
    std::string name;
    std::string value;
  };
  std::vector<Term> terms_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_LABEL_SELECTOR_H_
