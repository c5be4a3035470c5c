#include <httplib.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <atomic>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/metrics.h"
#include "base/mutex.h"
#include "base/network.h"
#include "base/status_macros.h"

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

// Two scrapers are served at a time; more wait.
constexpr size_t kThreads = 2;
constexpr int kIdleMicroseconds = 250'000;
constexpr int kTimeoutSeconds = 5;  // of a client that sends or reads nothing

// Serves metrics over HTTP. prometheus-cpp's own exposer cannot: Debian's has a web server without
// IPv6.
class Server : public PrometheusServer {
 public:
  Server() : known_(std::make_shared<prometheus::Registry>()), registry_(known_) {
    server_.new_task_queue = [] { return new httplib::ThreadPool(kThreads); };
    server_.set_read_timeout(kTimeoutSeconds);
    server_.set_write_timeout(kTimeoutSeconds);
    // How long the library waits before it checks whether to stop: without a bound it can miss a
    // stop.
    server_.set_idle_interval(/*sec=*/0, kIdleMicroseconds);
    // Instead of the library's options, with which another process could share the port
    // (SO_REUSEPORT).
    server_.set_socket_options([](int socket) {
      const int on = 1;
      (void)setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    });
    server_.Get("/metrics", [this](const httplib::Request&, httplib::Response& response) {
      response.set_content(prometheus::TextSerializer().Serialize(known_->Collect()),
                           "text/plain; version=0.0.4; charset=utf-8");
    });
    server_.Get("/.*", [this](const httplib::Request& request, httplib::Response& response) {
      Answer(request.path, response);
    });
  }
  ~Server() override {
    if (!thread_.joinable()) return;
    // The library ignores a stop before its thread listens.
    while (!server_.is_running() && !ended_) std::this_thread::yield();
    server_.stop();
    thread_.join();
  }
  absl::Status Listen(HostPort at) {
    int port = 0;
    CHECK(absl::SimpleAtoi(at.port, &port));
    if (port == 0) {
      port = server_.bind_to_any_port(at.host);
    } else if (!server_.bind_to_port(at.host, port)) {
      port = -1;
    }
    if (port <= 0) {
      return absl::UnavailableError(
          absl::StrCat("cannot serve metrics on ", at.ToString(),
                       ": the port is in use, or no interface of this host has the address"));
    }
    at.port = absl::StrCat(port);
    address_ = at.ToString();
    thread_ = std::thread([this] {
      server_.listen_after_bind();
      ended_ = true;
    });
    return absl::OkStatus();
  }
  Registry& registry() override { return registry_; }
  void SetPages(Pages pages) override {
    MutexLock lock(&pages_mutex_);
    pages_ = std::move(pages);
  }
  std::string address() const override { return address_; }

 private:
  void Answer(const std::string& path, httplib::Response& response) {
    MutexLock lock(&pages_mutex_);
    const auto page = pages_.find(path);
    if (page == pages_.end()) {
      std::string known = "/metrics";
      for (const auto& [other, unused] : pages_) absl::StrAppend(&known, " ", other);
      response.status = 404;
      response.set_content(absl::StrCat("no such page; there are ", known, "\n"), "text/plain");
      return;
    }
    const PageReply reply = page->second();
    response.status = reply.status;
    response.set_content(reply.body, reply.content_type);
  }

  std::shared_ptr<prometheus::Registry> known_;
  PrometheusRegistry registry_;
  Mutex pages_mutex_;
  Pages pages_ ABSL_GUARDED_BY(pages_mutex_);
  httplib::Server server_;
  std::string address_;
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PrometheusServer>> PrometheusServer::Start(
    const std::string& address) {
  ASSIGN_OR_RETURN(const HostPort at, ParseHostPort(address));
  auto server = std::make_unique<Server>();
  RETURN_IF_ERROR(Annotate(server->Listen(at), "metrics"));
  return server;
}

}  // namespace muster::metrics
