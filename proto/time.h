// Protobuf's timestamps and durations as Abseil's, and back. Exact to the nanosecond.
#ifndef MUSTER_PROTO_TIME_H_
#define MUSTER_PROTO_TIME_H_

#include <cstdint>

#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"
#include "google/protobuf/timestamp.pb.h"

namespace muster {

inline absl::Time FromProto(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
}

inline absl::Duration FromProto(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

// Requires: `time` is finite.
inline google::protobuf::Timestamp ToProto(absl::Time time) {
  google::protobuf::Timestamp out;
  out.set_seconds(absl::ToUnixSeconds(time));  // rounds down, so that nanos are never negative
  out.set_nanos(
      static_cast<int32_t>(absl::ToInt64Nanoseconds(time - absl::FromUnixSeconds(out.seconds()))));
  return out;
}

// Requires: `duration` is finite.
inline google::protobuf::Duration ToProto(absl::Duration duration) {
  google::protobuf::Duration out;
  out.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  out.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
  return out;
}

}  // namespace muster

#endif  // MUSTER_PROTO_TIME_H_
