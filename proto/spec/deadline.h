// What JobSpec.deadline says.
#ifndef MUSTER_PROTO_SPEC_DEADLINE_H_
#define MUSTER_PROTO_SPEC_DEADLINE_H_

#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "muster/v1/spec.pb.h"

namespace muster::spec {

constexpr absl::Duration kDeadlineMax = absl::Hours(24 * 3650);

// A time, or how long after the submission. kInvalidArgument: `text` is neither.
absl::StatusOr<std::variant<absl::Time, absl::Duration>> ParseDeadline(const std::string& text);

// Replaces the deadline of a spec that is submitted at `now` by the time that it stands for.
// kInvalidArgument, "deadline: why": it is no later than `now`, or too far ahead.
absl::Status FixDeadline(v1::JobSpec& spec, absl::Time now);

// "2026-12-01T08:00:00Z".
std::string DeadlineText(absl::Time deadline);

// The deadline of a spec that FixDeadline has seen; InfiniteFuture: it has none.
absl::Time DeadlineOf(const v1::JobSpec& spec);

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_DEADLINE_H_
