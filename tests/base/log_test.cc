#include "base/log.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "nlohmann/json.hpp"

namespace muster {
namespace {

class LogTest : public ::testing::Test {
 protected:
  // What `write` makes the logger print.
  template <typename Write>
  nlohmann::ordered_json Line(LogOrigin origin, Write write) {
    const std::shared_ptr<Logger> log = Logger::ToStderr(LogLevel::kInfo, std::move(origin));
    ::testing::internal::CaptureStderr();
    write(*log);
    text_ = ::testing::internal::GetCapturedStderr();
    return nlohmann::ordered_json::parse(text_, nullptr, /*allow_exceptions=*/false);
  }
  std::string text_;
};

TEST_F(LogTest, Line_HasTheKeysOfTheSchemaInOrder) {
  const auto line = Line({.component = "worker", .worker = "w1"}, [](Logger& log) {
    log.Warning("a rank ended", {{"cause", "crash"}, {"rank", 3}, {"job", "gpt-abcde"}});
  });
  std::vector<std::string> keys;
  for (const auto& [key, value] : line.items()) keys.push_back(key);
  EXPECT_EQ(keys, (std::vector<std::string>{"time", "level", "component", "worker", "rank", "job",
                                            "message", "fields"}));
  EXPECT_EQ(line["level"], "warning");
  EXPECT_EQ(line["worker"], "w1");
  EXPECT_EQ(line["rank"], 3);
  EXPECT_EQ(line["message"], "a rank ended");
  EXPECT_EQ(line["fields"], (nlohmann::ordered_json{{"cause", "crash"}}));
  EXPECT_EQ(text_.back(), '\n');
}

TEST_F(LogTest, Origin_IsOnEveryLineUnlessAFieldSaysOtherwise) {
  const LogOrigin rank = {
      .component = "rank", .worker = "w1", .job = "gpt-abcde", .epoch = 2, .rank = 0};
  auto line = Line(rank, [](Logger& log) { log.Info("x"); });
  EXPECT_EQ(line["job"], "gpt-abcde");
  EXPECT_EQ(line["epoch"], 2);
  EXPECT_EQ(line["rank"], 0);
  EXPECT_FALSE(line.contains("fields"));
  line = Line(rank, [](Logger& log) { log.Info("x", {{"rank", 7}}); });
  EXPECT_EQ(line["rank"], 7);
  line = Line({.component = "coordinator"}, [](Logger& log) { log.Info("x"); });
  EXPECT_EQ(line.size(), 4u);
}

TEST_F(LogTest, BytesThatAreNoText_AndLineEnds_StayOneLineOfJson) {
  const auto line = Line({.component = "rank"}, [](Logger& log) {
    log.Error("bad \xff byte\nand a line", {{"path", "\x80"}});
  });
  ASSERT_TRUE(line.is_object());
  EXPECT_EQ(text_.find('\n'), text_.size() - 1);
}

TEST_F(LogTest, LevelBelow_IsNotWritten) {
  Line({.component = "rank"}, [](Logger& log) { log.Debug("x"); });
  EXPECT_EQ(text_, "");
}

TEST_F(LogTest, Text_SaysTheSameOnALineForPeople) {
  const std::shared_ptr<Logger> log =
      Logger::ToStderr(LogLevel::kInfo, {.component = "worker", .worker = "w1"}, LogFormat::kText);
  ::testing::internal::CaptureStderr();
  log->Warning("a rank \"x\" ended\n\x1b[31m", {{"cause", "crash"},
                                                {"rank", 3},
                                                {"why", "two words\x1b"},
                                                {"empty", ""},
                                                {"proven", true},
                                                {"bad", "\xff"},
                                                {"job", "gpt-abcde"}});
  const std::string text = ::testing::internal::GetCapturedStderr();
  // After the time.
  EXPECT_EQ(text.substr(std::string("2026-11-24T13:05:01.250Z").size()),
            " WARNING worker: a rank \"x\" ended\\n\\u001b[31m worker=w1 rank=3 job=gpt-abcde "
            "cause=crash why=\"two words\\u001b\" empty=\"\" proven=true bad=\"\xef\xbf\xbd\"\n");
}

TEST(ParseLogFormat, KnowsTwo) {
  EXPECT_EQ(*ParseLogFormat("json"), LogFormat::kJson);
  EXPECT_EQ(*ParseLogFormat("text"), LogFormat::kText);
  EXPECT_EQ(ParseLogFormat("xml").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace muster
