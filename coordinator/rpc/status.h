// absl::Status as gRPC's.
#ifndef MUSTER_COORDINATOR_RPC_STATUS_H_
#define MUSTER_COORDINATOR_RPC_STATUS_H_

#include <grpcpp/support/status.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "coordinator/limits.h"

namespace muster::coordinator {

// The codes have the same numbers. A message longer than kStatusMessageBytesMax is cut between
// characters: gRPC sends it in trailers, and a client drops the whole status when they are too
// large.
inline grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message());
  if (message.size() > kStatusMessageBytesMax) {
    size_t end = kStatusMessageBytesMax;
    while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xC0) == 0x80) --end;
    message = absl::StrCat(message.substr(0, end), "... (", message.size() - end, " bytes more)");
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message);
}

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_STATUS_H_
