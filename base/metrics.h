// Metrics: code sets counters, gauges and histograms of a Registry; main.cc decides whether that is
// Prometheus or discards everything. Names follow Prometheus' conventions (unit last, _total for
// counters).
#ifndef MUSTER_BASE_METRICS_H_
#define MUSTER_BASE_METRICS_H_

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>
#include "absl/strings/string_view.h"

#include "absl/status/statusor.h"

namespace muster::metrics {

class Counter {
 public:
  virtual ~Counter() = default;
  virtual void Increment(double by = 1) = 0;  // Requires: by >= 0
};
class Gauge {
 public:
  virtual ~Gauge() = default;
  virtual void Set(double value) = 0;
};
class Histogram {
 public:
  virtual ~Histogram() = default;
  virtual void Observe(double value) = 0;
};

enum class Kind { kCounter, kGauge, kHistogram };

// One metric family, declared once as a constant beside the code that feeds it and listed in that
// component's catalogue, from which docs/metrics.md is written.
struct Family {
  Kind kind;
  absl::string_view name;
  absl::string_view help;
  std::vector<absl::string_view> labels;  // label names, in order
  std::vector<double> buckets = {};       // histograms: ascending upper bounds
};

// Thread-safe; the returned references live as long as the registry. Asking twice for the same
// family and labels gives the same object. Label values are in the order of Family::labels.
class Registry {
 public:
  virtual ~Registry() = default;
  virtual Counter& GetCounter(const Family& family,
                              const std::vector<std::string>& labels = {}) = 0;
  virtual Gauge& GetGauge(const Family& family, const std::vector<std::string>& labels = {}) = 0;
  virtual Histogram& GetHistogram(const Family& family,
                                  const std::vector<std::string>& labels = {}) = 0;
  // Removes the series of a gauge (of a job that ended, say); its reference must not be used again.
  // Does nothing when there is no such series.
  virtual void Remove(const Family& family, const std::vector<std::string>& labels) = 0;
};

// Discards every value, for tests and simulation.
std::unique_ptr<Registry> DiscardRegistry();

// What an HTTP page answers.
struct PageReply {
  int status = 200;
  std::string body;
  std::string content_type = "text/plain; charset=utf-8";
  bool open = false;  // answered to callers without a certificate, too, where others are not
};
// By path, such as "/livez". Called on the server's threads, one at a time: they must not block.
using Pages = std::map<std::string, std::function<PageReply()>>;

// Files, PEM, with which the endpoint speaks TLS. They are read again for each connection.
struct ServerTls {
  std::string certificate;  // with those between it and its authority behind it; empty: plain HTTP
  std::string key;
  // Those that sign scrapers' certificates: others get open pages alone. Empty: anybody may read.
  std::string client_authorities;

  // By the names of the flags that name them.
  std::map<std::string, std::string> Files() const;
};

// A Prometheus registry with its HTTP endpoint at /metrics, and other pages beside it.
class PrometheusServer {
 public:
  virtual ~PrometheusServer() = default;
  virtual Registry& registry() = 0;
  // Replaces the pages beside /metrics. Returns when none of those before is being answered.
  virtual void SetPages(Pages pages) = 0;
  // HOST:PORT with the port that was bound, behind https:// with TLS.
  virtual std::string address() const = 0;
  // `address` is HOST:PORT, port 0 = the system picks. kInvalidArgument (also a file of `tls` that
  // is missing or is not what it should be) or kUnavailable (in use).
  static absl::StatusOr<std::unique_ptr<PrometheusServer>> Start(const std::string& address,
                                                                 const ServerTls& tls = {});
};

// A Markdown table of a catalogue (name, type, labels, meaning).
std::string DescribeFamilies(const std::vector<const Family*>& families);

}  // namespace muster::metrics

#endif  // MUSTER_BASE_METRICS_H_
