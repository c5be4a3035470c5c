#include "base/proc.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace muster {
namespace {

TEST(Proc, ThisProcess_IsListedWithItsParentAndArguments) {
  const pid_t self = ::getpid();
  const std::optional<ProcessStat> stat = ReadProcessStat(self);
  ASSERT_TRUE(stat.has_value());
  EXPECT_EQ(stat->parent, ::getppid());
  EXPECT_EQ(stat->session, ::getsid(0));
  EXPECT_GT(stat->start_time, 0u);
  const std::vector<pid_t> all = AllProcesses();
  EXPECT_TRUE(std::is_sorted(all.begin(), all.end()));
  EXPECT_THAT(all, ::testing::Contains(self));
  ASSERT_FALSE(ArgumentsOf(self).empty());
  EXPECT_THAT(ArgumentsOf(self)[0], ::testing::HasSubstr("base_test"));
}

TEST(Proc, ProcessThatDoesNotExist_HasNothing) {
  const pid_t none = 1 << 30;  // above the kernel's largest pid
  EXPECT_FALSE(ReadProcessStat(none).has_value());
  EXPECT_TRUE(ArgumentsOf(none).empty());
  EXPECT_TRUE(EnvironmentOf(none).empty());
}

}  // namespace
}  // namespace muster
