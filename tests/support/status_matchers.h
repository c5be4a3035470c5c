// IsOk, IsOkAndHolds and StatusIs, shaped like upstream Abseil's status_matchers.h.
#ifndef MUSTER_TESTS_SUPPORT_STATUS_MATCHERS_H_
#define MUSTER_TESTS_SUPPORT_STATUS_MATCHERS_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/check.h"

namespace muster::testing {

MATCHER(IsOk, "is OK") {
  const absl::Status status = ::muster::internal_check::AsStatus(arg);
  *result_listener << status.ToString();
  return status.ok();
}

MATCHER_P(StatusIs, code, std::string("has status ") + absl::StatusCodeToString(code)) {
  const absl::Status status = ::muster::internal_check::AsStatus(arg);
  *result_listener << status.ToString();
  return status.code() == code;
}

// The message is matched by a matcher, e.g. StatusIs(code, HasSubstr("heads")).
MATCHER_P2(StatusIs, code, message_matcher,
           std::string("has status ") + absl::StatusCodeToString(code) + " and a message that " +
               ::testing::DescribeMatcher<std::string>(message_matcher)) {
  const absl::Status status = ::muster::internal_check::AsStatus(arg);
  *result_listener << status.ToString();
  return status.code() == code &&
         ::testing::Matches(message_matcher)(std::string(status.message()));
}

#define ASSERT_OK(expression) ASSERT_THAT(expression, ::muster::testing::IsOk())
#define EXPECT_OK(expression) EXPECT_THAT(expression, ::muster::testing::IsOk())
#define MUSTER_TEST_CONCAT_INNER(a, b) a##b
#define MUSTER_TEST_CONCAT(a, b) MUSTER_TEST_CONCAT_INNER(a, b)
#define ASSERT_OK_AND_ASSIGN(target, expression) \
  MUSTER_ASSERT_OK_AND_ASSIGN(MUSTER_TEST_CONCAT(_statusor_, __LINE__), target, expression)
#define MUSTER_ASSERT_OK_AND_ASSIGN(temporary, target, expression) \
  auto temporary = (expression);                                   \
  ASSERT_TRUE(temporary.ok()) << temporary.status();               \
  target = std::move(temporary).value()

}  // namespace muster::testing

#endif  // MUSTER_TESTS_SUPPORT_STATUS_MATCHERS_H_
