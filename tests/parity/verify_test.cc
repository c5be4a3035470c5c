// CheckReplicas: what several ranks hold is the same on all of them; where it is not, the run ends
// with the names of tensors and ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parallel/train/failure.h"
#include "tests/parity/harness.h"
#include "tests/support/forwarding_communicator.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel::parity {
namespace {

using ::muster::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// Flips one bit of element 7 in the result of the `which`-th all-reduce of a group, on one of its
// ranks.
class FaultyLink : public muster::testing::ForwardingCommunicator {
 public:
  FaultyLink(std::unique_ptr<Communicator> inner, std::string group, int rank, int which)
      : ForwardingCommunicator(std::move(inner)),
        group_(std::move(group)),
        rank_(rank),
        which_(which) {}
  void AllReduce(kernels::Stream& stream, kernels::Tensor data, ReduceOp op) override {
    inner_->AllReduce(stream, data, op);
    if (name() != group_ || rank() != rank_ || ++calls_ != which_) return;
    stream.Enqueue([data] { static_cast<uint32_t*>(data.data())[7] ^= 1u << 22; });
  }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key,
                                                      const std::string& name) override {
    auto made = inner_->Split(color, key, name);
    if (!made.ok()) return made.status();
    return std::make_unique<FaultyLink>(*std::move(made), group_, rank_, which_);
  }

 private:
  const std::string group_;
  const int rank_, which_;
  int calls_ = 0;
};

Case Verified(const PerAxis& degrees, int zero = 0, int shards = 0) {
  Case run;
  run.model = SmallLlama();
  run.layout.degrees = degrees;
  run.layout.zero = zero;
  run.layout.zero_shards = shards;
  run.layout.global_batch = 8;
  run.layout.micro_batch = 2;
  run.steps = 6;
  run.adjust = [](TrainerOptions& options) { options.verify_every = 2; };
  return run;
}

TEST(Verify, EveryLayout_HoldsTheSameBits) {
  Harness harness;
  for (const Case& run : {Verified(PerAxis(1, 4, 1, 1)), Verified(PerAxis(1, 4, 1, 1), 1),
                          Verified(PerAxis(1, 4, 1, 1), 2, 2), Verified(PerAxis(1, 4, 1, 1), 3, 2),
                          Verified(PerAxis(1, 2, 1, 2)), Verified(PerAxis(1, 2, 1, 2), 3),
                          Verified(PerAxis(2, 2, 1, 1)), Verified(PerAxis(2, 1, 1, 2)),
                          Verified(PerAxis(1, 1, 2, 2)), Verified(PerAxis(1, 2, 2, 1), 3)}) {
    harness.Train(run);  // which expects success
  }
  Case tied = Verified(PerAxis(2, 2, 1, 1));
  tied.model = SmallGpt2();
  harness.Train(tied);
  Case compressed = Verified(PerAxis(1, 2, 1, 2));
  compressed.layout.sequence_parallel = true;
  compressed.adjust = [](TrainerOptions& options) {
    options.verify_every = 2;
    options.compression.method = CompressionMethod::kTopK;
    options.compression.min_elements = 0;
  };
  harness.Train(compressed);
}

TEST(Verify, OneFlippedBitOfAGradient_NamesTensorRanksAndChecksums) {
  Harness harness;
  for (const bool verify : {true, false}) {
    Case run = Verified(PerAxis(1, 4, 1, 1));
    run.adjust = [=](TrainerOptions& options) { options.verify_every = verify ? 2 : 0; };
    run.wrap = [](std::unique_ptr<Communicator> world) {
      return std::make_unique<FaultyLink>(std::move(world), "replicate", 2, 1);
    };
    run.may_fail = true;
    for (const RankResult& result : harness.Train(run)) {
      if (!verify) {
        EXPECT_OK(result.status);
        continue;
      }
      EXPECT_THAT(result.status, StatusIs(absl::StatusCode::kDataLoss,
                                          AllOf(HasSubstr("step 2: "), HasSubstr("parameter of "),
                                                ContainsRegex("is [0-9a-f]+ on rank (2|0 1 3), "
                                                              "[0-9a-f]+ on rank (2|0 1 3)"))));
      EXPECT_EQ(DomainOf(result.status), FailureDomain::kDevice);
      EXPECT_EQ(result.losses.size(), 2u);
    }
  }
}

TEST(Verify, ReplicasOfShards_AreComparedToo) {
  Harness harness;
  // Two shards with two replicas each: ranks 1 and 3 hold the same shard.
  Case run = Verified(PerAxis(1, 4, 1, 1), /*zero=*/3, /*shards=*/2);
  run.wrap = [](std::unique_ptr<Communicator> world) {
    const bool faulty = world->rank() == 3;
    return std::make_unique<FaultyLink>(std::move(world), "replicate", faulty ? 1 : -1, 1);
  };
  run.may_fail = true;
  const absl::Status status = harness.Train(run)[0].status;
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss,
                               AllOf(HasSubstr("first moment of"),
                                     ContainsRegex("on rank (1|3), [0-9a-f]+ on rank (1|3)"))));
}

}  // namespace
}  // namespace muster::parallel::parity
