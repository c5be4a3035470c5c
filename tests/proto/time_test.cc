#include "proto/time.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(ProtoTime, TimesBeforeAndAfterTheEpoch_AreExactToTheNanosecond) {
  for (const absl::Duration since_epoch :
       {absl::ZeroDuration(), absl::Nanoseconds(1), absl::Nanoseconds(-1), absl::Seconds(7),
        absl::Seconds(-7) - absl::Nanoseconds(3), absl::Hours(24 * 365 * 60)}) {
    const absl::Time time = absl::UnixEpoch() + since_epoch;
    const google::protobuf::Timestamp proto = ToProto(time);
    EXPECT_GE(proto.nanos(), 0) << since_epoch;
    EXPECT_LT(proto.nanos(), 1'000'000'000) << since_epoch;
    EXPECT_EQ(FromProto(proto), time) << since_epoch;
  }
}

}  // namespace
}  // namespace muster
