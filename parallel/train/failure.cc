#include "parallel/train/failure.h"

#include <array>
#include <utility>

#include "absl/strings/cord.h"

namespace muster::parallel {
namespace {

constexpr char kPayload[] = "muster/failure-domain";
constexpr std::array<FailureDomain, 8> kDomains = {
    FailureDomain::kUnknown,       FailureDomain::kData,          FailureDomain::kStorage,
    FailureDomain::kMemory,        FailureDomain::kCommunication, FailureDomain::kNumeric,
    FailureDomain::kConfiguration, FailureDomain::kDevice};

}  // namespace

absl::string_view Name(FailureDomain domain) {
  switch (domain) {
    case FailureDomain::kUnknown:
      return "unknown";
    case FailureDomain::kData:
      return "data";
    case FailureDomain::kStorage:
      return "storage";
    case FailureDomain::kMemory:
      return "memory";
    case FailureDomain::kCommunication:
      return "communication";
    case FailureDomain::kNumeric:
      return "numeric";
    case FailureDomain::kConfiguration:
      return "configuration";
    case FailureDomain::kDevice:
      return "device";
  }
  return "unknown";
}

absl::Status Mark(absl::Status status, FailureDomain domain) {
  if (!status.ok() && !status.GetPayload(kPayload).has_value()) {
    status.SetPayload(kPayload, absl::Cord(Name(domain)));
  }
  return status;
}

FailureDomain DomainOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kPayload);
  if (!payload.has_value()) return FailureDomain::kUnknown;
  for (const FailureDomain domain : kDomains) {
    if (*payload == Name(domain)) return domain;
  }
  return FailureDomain::kUnknown;
}

}  // namespace muster::parallel
