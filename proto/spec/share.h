// How much of a device a rank takes, in thousandths, so that sums are exact.
#ifndef MUSTER_PROTO_SPEC_SHARE_H_
#define MUSTER_PROTO_SPEC_SHARE_H_

#include <cmath>
#include <cstdint>

#include "muster/v1/spec.pb.h"

namespace muster::spec {

constexpr int32_t kWholeDevice = 1000;

// What each rank of the job takes of its device. Requires: Validate has accepted the spec.
inline int32_t ShareOf(const v1::ResourceSpec& resources) {
  if (!resources.has_share()) return kWholeDevice;
  return static_cast<int32_t>(std::lround(resources.share() * kWholeDevice));
}
inline int32_t ShareOf(const v1::JobSpec& spec) { return ShareOf(spec.resources()); }

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_SHARE_H_
