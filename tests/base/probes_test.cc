#include "base/probes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/clock.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

class ProbesTest : public ::testing::Test {
 protected:
  metrics::PageReply Get(const std::string& path) { return probes_.Pages().at(path)(); }

  SimulatedClock clock_;
  Probes probes_{clock_};
};

TEST_F(ProbesTest, Start_IsAliveButNeitherStartedNorReady) {
  clock_.Advance(absl::Hours(1));
  EXPECT_EQ(Get("/livez").status, 200);
  EXPECT_EQ(Get("/startupz").status, 503);
  EXPECT_EQ(Get("/readyz").status, 503);
}

TEST_F(ProbesTest, Ready_UntilThereIsTrouble) {
  probes_.Started();
  probes_.Ready();
  EXPECT_EQ(Get("/startupz").status, 200);
  EXPECT_EQ(Get("/readyz").body, "ok\n");
  probes_.NotReady("no session");
  EXPECT_EQ(Get("/readyz").status, 503);
  EXPECT_EQ(Get("/readyz").body, "no session\n");
  EXPECT_EQ(Get("/startupz").status, 200);
}

TEST_F(ProbesTest, LoopThatStopsTurning_IsNotAlive) {
  probes_.Turned();
  clock_.Advance(Probes::kSilenceMax);
  EXPECT_EQ(Get("/livez").status, 200);
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(Get("/livez").status, 503);
  EXPECT_THAT(Get("/livez").body, HasSubstr("has not turned for 31s"));
  probes_.Turned();
  EXPECT_EQ(Get("/livez").status, 200);
}

}  // namespace
}  // namespace muster
