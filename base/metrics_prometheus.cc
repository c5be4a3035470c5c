#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/metrics.h"
#include "base/mutex.h"

namespace muster::metrics {
namespace {

template <typename Real>
class Wrapped : public Counter, public Gauge, public Histogram {
 public:
  explicit Wrapped(Real& real) : real_(real) {}
  void Increment(double by) override {
    if constexpr (std::is_same_v<Real, prometheus::Counter>) real_.Increment(by);
  }
  void Set(double value) override {
    if constexpr (std::is_same_v<Real, prometheus::Gauge>) real_.Set(value);
  }
  void Observe(double value) override {
    if constexpr (std::is_same_v<Real, prometheus::Histogram>) real_.Observe(value);
  }
  Real& real() { return real_; }

 private:
  Real& real_;
};

using Key = std::pair<std::string, std::vector<std::string>>;

class PrometheusRegistry : public Registry {
 public:
  explicit PrometheusRegistry(std::shared_ptr<prometheus::Registry> registry)
      : registry_(std::move(registry)) {}

  Counter& GetCounter(const Family& family, const std::vector<std::string>& labels) override {
    return Get(
        counters_, family, labels, [&](const prometheus::Labels& named) -> auto& {
          return prometheus::BuildCounter()
              .Name(std::string(family.name))
              .Help(std::string(family.help))
              .Register(*registry_)
              .Add(named);
        });
  }
  Gauge& GetGauge(const Family& family, const std::vector<std::string>& labels) override {
    return Get(
        gauges_, family, labels, [&](const prometheus::Labels& named) -> auto& {
          return GaugeFamily(family).Add(named);
        });
  }
  Histogram& GetHistogram(const Family& family, const std::vector<std::string>& labels) override {
    return Get(
        histograms_, family, labels, [&](const prometheus::Labels& named) -> auto& {
          return prometheus::BuildHistogram()
              .Name(std::string(family.name))
              .Help(std::string(family.help))
              .Register(*registry_)
              .Add(named, prometheus::Histogram::BucketBoundaries(family.buckets));
        });
  }
  void Remove(const Family& family, const std::vector<std::string>& labels) override {
    MutexLock lock(&mutex_);
    auto found = gauges_.find(Key(std::string(family.name), labels));
    if (found == gauges_.end()) return;
    GaugeFamily(family).Remove(&found->second->real());
    gauges_.erase(found);
  }

 private:
  prometheus::Family<prometheus::Gauge>& GaugeFamily(const Family& family) {
    return prometheus::BuildGauge()
        .Name(std::string(family.name))
        .Help(std::string(family.help))
        .Register(*registry_);
  }

  template <typename Real, typename Make>
  Wrapped<Real>& Get(std::map<Key, std::unique_ptr<Wrapped<Real>>>& known, const Family& family,
                     const std::vector<std::string>& labels, Make make) {
    CHECK_EQ(family.labels.size(), labels.size()) << family.name;
    MutexLock lock(&mutex_);
    auto& slot = known[Key(std::string(family.name), labels)];
    if (slot == nullptr) {
      prometheus::Labels named;
      for (size_t i = 0; i < labels.size(); ++i) named[std::string(family.labels[i])] = labels[i];
      slot = std::make_unique<Wrapped<Real>>(make(named));
    }
    return *slot;
  }

  std::shared_ptr<prometheus::Registry> registry_;
  Mutex mutex_;
  std::map<Key, std::unique_ptr<Wrapped<prometheus::Counter>>> counters_;
  std::map<Key, std::unique_ptr<Wrapped<prometheus::Gauge>>> gauges_;
  std::map<Key, std::unique_ptr<Wrapped<prometheus::Histogram>>> histograms_;
};

class Server : public PrometheusServer {
 public:
  explicit Server(const std::string& address)
      : known_(std::make_shared<prometheus::Registry>()), registry_(known_), exposer_(address, 1) {
    exposer_.RegisterCollectable(known_);
    const std::string host = address.substr(0, address.rfind(':'));
    address_ = absl::StrCat(host, ":", exposer_.GetListeningPorts().front());
  }
  Registry& registry() override { return registry_; }
  std::string address() const override { return address_; }

 private:
  std::shared_ptr<prometheus::Registry> known_;
  PrometheusRegistry registry_;
  prometheus::Exposer exposer_;
  std::string address_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PrometheusServer>> PrometheusServer::Start(
    const std::string& address) {
  if (address.rfind(':') == std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("metrics address '", address, "' is not HOST:PORT"));
  }
  // prometheus-cpp's web server throws when the port is taken; that ends here.
  try {
    return std::make_unique<Server>(address);
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve metrics on ", address, ": ", error.what()));
  }
}

}  // namespace muster::metrics
