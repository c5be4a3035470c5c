// What a daemon was told to hold, and what its silence about an attempt proves.
#include "coordinator/core/desired_list.h"

#include <gtest/gtest.h>

#include <map>

namespace muster::coordinator {
namespace {

const JobId kJob("job-abcde");
const absl::Time kNow = absl::FromUnixSeconds(1'700'000'000);

std::map<JobId, DesiredList::Attempt> Wanted(v1::DesiredPhase phase, uint64_t epoch = 1) {
  return {{kJob, {Epoch(epoch), phase, absl::Seconds(10)}}};
}

TEST(DesiredList, FirstListIsSentEvenIfEmpty_LaterOnesWhenTheyDiffer) {
  DesiredList list;
  EXPECT_TRUE(list.Update({}));
  EXPECT_EQ(list.revision(), 1u);
  EXPECT_FALSE(list.Update({}));
  EXPECT_TRUE(list.Update(Wanted(v1::DESIRED_PHASE_PREPARED)));
  EXPECT_FALSE(list.Update(Wanted(v1::DESIRED_PHASE_PREPARED)));
  EXPECT_TRUE(list.Update(Wanted(v1::DESIRED_PHASE_RUNNING)));
  EXPECT_TRUE(list.Update({}));
  EXPECT_EQ(list.revision(), 4u);
}

TEST(DesiredList, AttemptThatIsNotHeld_IsGoneOnlyIfItsDaemonKnewOfIt) {
  DesiredList list;
  list.Update({});
  list.Update(Wanted(v1::DESIRED_PHASE_PREPARED));
  EXPECT_FALSE(list.Knew(kJob, Epoch(1), /*stopping=*/false, 1));
  EXPECT_TRUE(list.Knew(kJob, Epoch(1), /*stopping=*/false, 2));
  EXPECT_FALSE(list.Knew(kJob, Epoch(2), /*stopping=*/false, 2)) << "of another epoch";
  EXPECT_FALSE(list.Knew(JobId("other"), Epoch(1), /*stopping=*/false, 2));
}

TEST(DesiredList, StopIsProvenFromTheRevisionThatSaidSo) {
  DesiredList list;
  list.Update(Wanted(v1::DESIRED_PHASE_PREPARED));
  EXPECT_FALSE(list.Knew(kJob, Epoch(1), /*stopping=*/true, 1));
  list.Update(Wanted(v1::DESIRED_PHASE_STOPPED));
  EXPECT_FALSE(list.Knew(kJob, Epoch(1), /*stopping=*/true, 1));
  EXPECT_TRUE(list.Knew(kJob, Epoch(1), /*stopping=*/true, 2));
  list.Update(Wanted(v1::DESIRED_PHASE_PREPARED, 2));
  EXPECT_FALSE(list.Knew(kJob, Epoch(2), /*stopping=*/true, 3)) << "a new attempt begins anew";
}

TEST(DesiredList, ListThatIsNotAppliedInTime_IsSentAgainUnchanged) {
  DesiredList list;
  list.Update({});
  list.Sent(kNow);
  const absl::Duration patience = absl::Seconds(1);
  EXPECT_FALSE(list.Applied(0, patience, kNow)) << "it may be on its way";
  EXPECT_FALSE(list.Applied(1, patience, kNow + absl::Minutes(1))) << "it has arrived";
  EXPECT_TRUE(list.Applied(0, patience, kNow + patience));
  EXPECT_TRUE(list.Update({}));
  EXPECT_EQ(list.revision(), 1u);
  EXPECT_FALSE(list.Update({})) << "once";
}

}  // namespace
}  // namespace muster::coordinator
