// CHECK ends the process when one of our own invariants is broken, in release builds too. Never for
// input, network or disk. Shaped like absl/log/check.h, which Debian's Abseil does not have.
#ifndef MUSTER_BASE_CHECK_H_
#define MUSTER_BASE_CHECK_H_

#include <sstream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster::internal_check {

// Collects the message and ends the process in its destructor.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const std::string& condition);
  [[noreturn]] ~CheckFailure();
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

struct Voidify {
  void operator&(std::ostream&) const {}
};

inline absl::Status AsStatus(const absl::Status& status) { return status; }
template <typename T>
absl::Status AsStatus(const absl::StatusOr<T>& result) {
  return result.status();
}

}  // namespace muster::internal_check

#define CHECK(condition)                      \
  (condition)                                 \
      ? (void)0                               \
      : ::muster::internal_check::Voidify() & \
            ::muster::internal_check::CheckFailure(__FILE__, __LINE__, #condition).stream()
#define MUSTER_CHECK_OP(op, a, b) CHECK((a)op(b)) << "(" << (a) << " vs " << (b) << ") "
#define CHECK_EQ(a, b) MUSTER_CHECK_OP(==, a, b)
#define CHECK_NE(a, b) MUSTER_CHECK_OP(!=, a, b)
#define CHECK_LT(a, b) MUSTER_CHECK_OP(<, a, b)
#define CHECK_LE(a, b) MUSTER_CHECK_OP(<=, a, b)
#define CHECK_GT(a, b) MUSTER_CHECK_OP(>, a, b)
#define CHECK_GE(a, b) MUSTER_CHECK_OP(>=, a, b)
#define CHECK_OK(expression)                                                                      \
  if (const absl::Status _muster_check_status = ::muster::internal_check::AsStatus((expression)); \
      _muster_check_status.ok()) {                                                                \
  } else /* NOLINT */                                                                             \
    ::muster::internal_check::CheckFailure(__FILE__, __LINE__, #expression " is OK").stream()     \
        << _muster_check_status.ToString() << " "

#endif  // MUSTER_BASE_CHECK_H_
