#include "base/metrics.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace muster::metrics {
namespace {

class Discarded : public Counter, public Gauge, public Histogram {
 public:
  void Increment(double) override {}
  void Set(double) override {}
  void Observe(double) override {}
};

class Discarding : public Registry {
 public:
  Counter& GetCounter(const Family&, const std::vector<std::string>&) override { return nothing_; }
  Gauge& GetGauge(const Family&, const std::vector<std::string>&) override { return nothing_; }
  Histogram& GetHistogram(const Family&, const std::vector<std::string>&) override {
    return nothing_;
  }
  void Remove(const Family&, const std::vector<std::string>&) override {}

 private:
  Discarded nothing_;
};

}  // namespace

std::unique_ptr<Registry> DiscardRegistry() { return std::make_unique<Discarding>(); }

std::map<std::string, std::string> ServerTls::Files() const {
  std::map<std::string, std::string> files;
  if (!certificate.empty()) files["metrics-tls-cert"] = certificate;
  if (!client_authorities.empty()) files["metrics-tls-ca"] = client_authorities;
  return files;
}

std::string DescribeFamilies(const std::vector<const Family*>& families) {
  static constexpr const char* kKinds[] = {"counter", "gauge", "histogram"};
  std::string out = "| metric | type | labels | meaning |\n|---|---|---|---|\n";
  for (const Family* family : families) {
    absl::StrAppend(&out, "| `", family->name, "` | ", kKinds[static_cast<int>(family->kind)],
                    " | ", absl::StrJoin(family->labels, ", "), " | ", family->help, " |\n");
  }
  return out;
}

}  // namespace muster::metrics
