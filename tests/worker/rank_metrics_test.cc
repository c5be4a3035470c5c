#include "worker/rank/rank_metrics.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace muster::worker {
namespace {

// Keeps the last value of every family, of any labels.
class Kept : public metrics::Registry {
 public:
  metrics::Counter& GetCounter(const metrics::Family& family,
                               const std::vector<std::string>&) override {
    return Of(family);
  }
  metrics::Gauge& GetGauge(const metrics::Family& family,
                           const std::vector<std::string>&) override {
    return Of(family);
  }
  metrics::Histogram& GetHistogram(const metrics::Family& family,
                                   const std::vector<std::string>&) override {
    return Of(family);
  }
  void Remove(const metrics::Family&, const std::vector<std::string>&) override {}

  double at(const std::string& name) const { return values_.at(name)->value; }

 private:
  struct Value : metrics::Counter, metrics::Gauge, metrics::Histogram {
    void Increment(double by) override { value += by; }
    void Set(double to) override { value = to; }
    void Observe(double seen) override { value += seen; }
    double value = 0;
  };
  Value& Of(const metrics::Family& family) {
    auto& value = values_[std::string(family.name)];
    if (value == nullptr) value = std::make_unique<Value>();
    return *value;
  }
  std::map<std::string, std::unique_ptr<Value>> values_;
};

TEST(RankMetrics, SkippedSteps_AreCountedWithTheirLossScale) {
  Kept kept;
  RankMetrics metrics(kept, "job", 0);
  parallel::StepReport report;
  for (const double scale : {65536.0, 65536.0, 32768.0}) {
    ++report.step;
    report.skipped = report.step < 3;
    report.loss_scale = scale;
    metrics.Step(report, /*tokens_per_second=*/100, /*model_flops_utilization=*/0.4,
                 /*hardware_flops_utilization=*/0.5);
  }
  EXPECT_EQ(kept.at("muster_rank_steps_total"), 3);
  EXPECT_EQ(kept.at("muster_rank_skipped_steps_total"), 2);
  EXPECT_EQ(kept.at("muster_rank_loss_scale"), 32768);
  EXPECT_EQ(kept.at("muster_rank_model_flops_utilization"), 0.4);
  EXPECT_EQ(kept.at("muster_rank_hardware_flops_utilization"), 0.5);
}

}  // namespace
}  // namespace muster::worker
