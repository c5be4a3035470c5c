// RETURN_IF_ERROR and ASSIGN_OR_RETURN, and a helper that adds context to a status.
#ifndef MUSTER_BASE_STATUS_MACROS_H_
#define MUSTER_BASE_STATUS_MACROS_H_

#include <string>
#include <utility>
#include "absl/strings/string_view.h"

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace muster {

// The same code and payloads with "context: " in front of the message; OK stays OK.
inline absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(context, ": ", status.message()));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    annotated.SetPayload(url, payload);
  });
  return annotated;
}

}  // namespace muster

#define RETURN_IF_ERROR(expression)                                                              \
  do {                                                                                           \
    if (absl::Status _muster_status = (expression); !_muster_status.ok()) return _muster_status; \
  } while (false)

#define MUSTER_CONCAT_INNER(a, b) a##b
#define MUSTER_CONCAT(a, b) MUSTER_CONCAT_INNER(a, b)
#define MUSTER_ASSIGN_OR_RETURN(temporary, target, expression) \
  auto temporary = (expression);                               \
  if (!temporary.ok()) return std::move(temporary).status();   \
  target = std::move(temporary).value()
#define ASSIGN_OR_RETURN(target, expression) \
  MUSTER_ASSIGN_OR_RETURN(MUSTER_CONCAT(_muster_statusor_, __LINE__), target, expression)

#endif  // MUSTER_BASE_STATUS_MACROS_H_
