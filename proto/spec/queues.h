// Between YAML text and the queues of a cluster. Part of muster_spec_parse. Pure and thread-safe.
#ifndef MUSTER_PROTO_SPEC_QUEUES_H_
#define MUSTER_PROTO_SPEC_QUEUES_H_

#include <string>

#include "absl/status/statusor.h"
#include "muster/v1/queue.pb.h"

namespace muster::spec {

// YAML or JSON text, as Parse of spec.h reads it: the fields of QueuePolicy. kInvalidArgument:
// every problem found, one per line, as "FILE:LINE:COLUMN: field: why". Whether the queues make
// sense together the coordinator says (ApplyQueues).
absl::StatusOr<v1::QueuePolicy> ParseQueues(const std::string& text, const std::string& file);

// ParseQueues(QueuesToYaml(p)) == p.
std::string QueuesToYaml(const v1::QueuePolicy& policy);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_QUEUES_H_
