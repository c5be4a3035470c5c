#include "cli/queues.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <vector>

#include "absl/strings/str_split.h"

namespace muster::cli {
namespace {

v1::QueueStatus Queue(const std::string& name, const std::string& parent = "") {
  v1::QueueStatus queue;
  queue.set_name(name);
  queue.set_parent(parent);
  queue.set_weight(1);
  return queue;
}

std::vector<std::vector<std::string>> Cells(const std::vector<v1::QueueStatus>& queues) {
  std::vector<std::vector<std::string>> rows;
  for (const auto line : absl::StrSplit(QueueTable(queues), '\n', absl::SkipEmpty())) {
    rows.push_back(absl::StrSplit(line, ' ', absl::SkipEmpty()));
  }
  return rows;
}

TEST(QueueTable, IndentsQueuesBelowTheirParents) {
  const std::string table =
      QueueTable({Queue("research"), Queue("vision", "research"), Queue("faces", "vision")});
  EXPECT_THAT(table, ::testing::HasSubstr("\nresearch "));
  EXPECT_THAT(table, ::testing::HasSubstr("\n  vision "));
  EXPECT_THAT(table, ::testing::HasSubstr("\n    faces "));
}

TEST(QueueTable, HasARowForEveryKindOfDevice_WithTheQueuesNumbersInTheFirst) {
  v1::QueueStatus queue = Queue("vision");
  queue.set_running_jobs(2);
  queue.set_running_jobs_max(10);
  queue.set_waiting_jobs(3);
  queue.set_weight(2.5);
  queue.set_share(0.125);
  v1::QueueUse& cpu = *queue.add_uses();
  cpu.set_device("cpu");
  cpu.set_used(5);
  cpu.set_guaranteed(4);
  cpu.set_borrowed(1);
  cpu.set_waiting(6);
  v1::QueueUse& cuda = *queue.add_uses();
  cuda.set_device("cuda");
  cuda.set_limit(0);
  const auto rows = Cells({queue});
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_THAT(rows[1], ::testing::ElementsAre("vision", "cpu", "5", "4", "1", "-", "6", "2/10", "3",
                                              "2.5", "0.125"));
  EXPECT_THAT(rows[2], ::testing::ElementsAre("cuda", "0", "0", "0", "0", "0"));
}

TEST(QueueTable, QueueThatUsesNothing_HasDashes) {
  const auto rows = Cells({Queue("empty")});
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_THAT(rows[1], ::testing::ElementsAre("empty", "-", "-", "-", "-", "-", "-", "0", "0", "1",
                                              "0.000"));
}

TEST(SpareTable, NamesDomainsThatAreShort_AndThoseThatAreTooSmall) {
  EXPECT_EQ(SpareTable({}), "");
  v1::SpareStatus status;
  status.set_level(v1::TOPOLOGY_LEVEL_NVLINK_DOMAIN);
  status.set_device("cuda");
  status.set_domains(12);
  status.set_wanted(96);
  status.set_free(80);
  status.set_domains_short(2);
  status.add_short_names("n3");
  status.add_short_names("n7");
  status.add_too_small("n9");
  const std::string table = SpareTable({status});
  EXPECT_THAT(table, ::testing::HasSubstr("nvlink domain"));
  EXPECT_THAT(table, ::testing::HasSubstr("2: n3, n7"));
  EXPECT_THAT(table, ::testing::HasSubstr("In n9 every cuda device is a spare"));
}

TEST(HeadsText, NamesTheJobItsQueueAndWhatIsSetAside) {
  EXPECT_EQ(HeadsText({}), "");
  v1::HeadOfQueue head;
  head.set_queue("vision");
  head.mutable_job()->set_job_name("gpt");
  head.mutable_job()->set_device(v1::DEVICE_KIND_CUDA);
  head.mutable_set_aside()->add_workers()->set_worker("w3");
  head.mutable_set_aside()->set_slots(8);
  const std::string text = HeadsText({head});
  EXPECT_THAT(text, ::testing::HasSubstr("Job gpt of queue vision starts about "));
  EXPECT_THAT(text, ::testing::HasSubstr(" on w3 (8 cuda slots set aside).\n"));
}

}  // namespace
}  // namespace muster::cli
