// What the log says of slow and failed calls.
#include "coordinator/rpc/call_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/log.h"

namespace muster::coordinator {
namespace {

using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::SizeIs;

class Lines : public Logger {
 public:
  struct Line {
    LogLevel level;
    std::string message;
    std::map<std::string, std::string> fields;
  };
  void Write(LogLevel level, absl::string_view message, Fields fields) override {
    Line line{level, std::string(message), {}};
    for (const LogField& field : fields) {
      std::visit(
          [&](const auto& value) {
            if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::string>) {
              line.fields[std::string(field.key)] = value;
            } else {
              line.fields[std::string(field.key)] = absl::StrCat(value);
            }
          },
          field.value);
    }
    lines.push_back(std::move(line));
  }
  std::vector<Line> lines;
};

class CallLogTest : public ::testing::Test {
 protected:
  void Ended(absl::Duration took, const absl::Status& status, const std::string& traceparent = "",
             absl::Duration at = absl::ZeroDuration()) {
    log_.Ended({.method = "Submit",
                .address = "ipv4:10.0.0.1",
                .traceparent = traceparent,
                .took = took,
                .status = status},
               absl::UnixEpoch() + at);
  }
  Lines lines_;
  CallLog log_{lines_, absl::Seconds(1), /*seed=*/7};
};

TEST_F(CallLogTest, AFastCallThatSucceeds_LeavesNoLine) {
  Ended(absl::Milliseconds(999), absl::OkStatus());
  EXPECT_TRUE(log_.Ignores(absl::Milliseconds(999), true));
  EXPECT_FALSE(log_.Ignores(absl::Milliseconds(999), false));
  EXPECT_FALSE(log_.Ignores(absl::Seconds(1), true));
  EXPECT_THAT(lines_.lines, IsEmpty());
}

TEST_F(CallLogTest, ASlowCall_IsAWarningWithTheCallersTrace) {
  Ended(absl::Milliseconds(1500), absl::OkStatus(),
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
  ASSERT_THAT(lines_.lines, SizeIs(1));
  EXPECT_EQ(lines_.lines[0].level, LogLevel::kWarning);
  EXPECT_EQ(lines_.lines[0].message, "a call was slow");
  EXPECT_EQ(lines_.lines[0].fields,
            (std::map<std::string, std::string>{{"method", "Submit"},
                                                {"code", "OK"},
                                                {"seconds", "1.5"},
                                                {"trace_id", "4bf92f3577b34da6a3ce929d0e0e4736"},
                                                {"parent_id", "00f067aa0ba902b7"},
                                                {"caller", "ipv4:10.0.0.1"},
                                                {"error", ""},
                                                {"lines_left_out", "0"}}));
}

TEST_F(CallLogTest, WithoutATrace_AnIdIsMadeForEachCall) {
  Ended(absl::Seconds(2), absl::OkStatus());
  Ended(absl::Seconds(2), absl::OkStatus(), "no trace");
  ASSERT_THAT(lines_.lines, SizeIs(2));
  for (Lines::Line& line : lines_.lines) {
    EXPECT_THAT(line.fields["trace_id"], MatchesRegex("[0-9a-f]+"));
    EXPECT_THAT(line.fields["trace_id"], SizeIs(32));
  }
  EXPECT_NE(lines_.lines[0].fields["trace_id"], lines_.lines[1].fields["trace_id"]);
}

TEST_F(CallLogTest, ErrorsOfTheCoordinatorAreWarnings_ThoseOfCallersForDebugging) {
  Ended(absl::ZeroDuration(), absl::InternalError("broken"));
  Ended(absl::ZeroDuration(), absl::NotFoundError("no job has the name 'x'"));
  Ended(absl::Seconds(3), absl::NotFoundError("no job has the name 'x'"));
  ASSERT_THAT(lines_.lines, SizeIs(3));
  EXPECT_EQ(lines_.lines[0].level, LogLevel::kWarning);
  EXPECT_EQ(lines_.lines[0].message, "a call failed");
  EXPECT_EQ(lines_.lines[0].fields["error"], "broken");
  EXPECT_EQ(lines_.lines[0].fields["code"], "INTERNAL");
  EXPECT_EQ(lines_.lines[1].level, LogLevel::kDebug);
  EXPECT_EQ(lines_.lines[1].message, "a call was refused");
  EXPECT_EQ(lines_.lines[2].level, LogLevel::kWarning);
  EXPECT_EQ(lines_.lines[2].message, "a call was slow");
}

TEST_F(CallLogTest, AFloodOfFailures_LeavesFewLinesAndTheirNumber) {
  for (int i = 0; i < 1000; ++i) Ended(absl::ZeroDuration(), absl::InternalError("broken"));
  EXPECT_THAT(lines_.lines, SizeIs(100));
  Ended(absl::ZeroDuration(), absl::InternalError("broken"), "", absl::Seconds(1));
  ASSERT_THAT(lines_.lines, SizeIs(101));
  EXPECT_EQ(lines_.lines.back().fields["lines_left_out"], "900");
}

}  // namespace
}  // namespace muster::coordinator
