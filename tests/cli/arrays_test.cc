#include "cli/arrays.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "absl/strings/str_cat.h"

namespace muster::cli {
namespace {

using ::testing::HasSubstr;

std::vector<v1::Job> Tasks() {
  std::vector<v1::Job> tasks(3);
  for (int i = 0; i < 3; ++i) {
    v1::Job& task = tasks[static_cast<size_t>(i)];
    task.set_name(absl::StrCat("sweep-", i));
    task.set_state(i == 0 ? v1::JOB_STATE_RUNNING : v1::JOB_STATE_QUEUED);
    v1::ArrayTask& array = *task.mutable_spec()->mutable_array_task();
    array.set_array("sweep");
    array.set_array_id("sweep-abcde");
    array.set_index(i);
    array.set_tasks(4);
    array.set_max_running(1);
    v1::ArrayValue& value = *array.add_values();
    value.set_key("lr");
    value.set_value(absl::StrCat("0.", i));
  }
  tasks[0].set_train_loss(3.5);
  tasks[0].set_best_train_loss(3.25);
  tasks[0].set_attempts(2);
  return tasks;
}

TEST(Arrays, States_AreCounted_TheMostFirst) {
  EXPECT_EQ(StatesText(Tasks()), "2 queued, 1 running");
}

TEST(Arrays, Row_HasTheBestLossesAndCounts) {
  const std::vector<std::string> row = ArrayRow(Tasks(), absl::UnixEpoch());
  EXPECT_EQ(row[0], "sweep");
  EXPECT_EQ(row[1], "2 queued, 1 running");
  EXPECT_EQ(row[2], "0/3 ended");
  EXPECT_THAT(row[3], HasSubstr("3.25"));
  EXPECT_EQ(row[6], "2");
}

TEST(Arrays, Description_HasARowForEveryTaskWithItsValues) {
  std::ostringstream out, err;
  Terminal terminal{.out = out, .err = err};
  ASSERT_TRUE(DescribeArray(Tasks(), Format::kTable, terminal).ok());
  EXPECT_THAT(out.str(), HasSubstr("at most 1 at a time"));
  EXPECT_THAT(out.str(), HasSubstr("1 task that ended long ago"));
  EXPECT_THAT(out.str(), HasSubstr("LR"));
  EXPECT_THAT(out.str(), HasSubstr("sweep-2  0.2  queued"));
}

}  // namespace
}  // namespace muster::cli
