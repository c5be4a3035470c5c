#include <httplib.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
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

// The series of a family that exist, by the values of their labels: a fleet has 10,000 jobs with a
// dozen series each, and they are set with every report.
template <typename Real>
struct Series {
  prometheus::Family<Real>* real = nullptr;
  absl::flat_hash_map<std::vector<std::string>, std::unique_ptr<Wrapped<Real>>> by_labels;
};

class PrometheusRegistry : public Registry {
 public:
  explicit PrometheusRegistry(std::shared_ptr<prometheus::Registry> registry)
      : registry_(std::move(registry)) {}

  Counter& GetCounter(const Family& family, const std::vector<std::string>& labels) override {
    return Get(&PrometheusRegistry::counters_, prometheus::BuildCounter(), family, labels);
  }
  Gauge& GetGauge(const Family& family, const std::vector<std::string>& labels) override {
    return Get(&PrometheusRegistry::gauges_, prometheus::BuildGauge(), family, labels);
  }
  Histogram& GetHistogram(const Family& family, const std::vector<std::string>& labels) override {
    return Get(&PrometheusRegistry::histograms_, prometheus::BuildHistogram(), family, labels,
               prometheus::Histogram::BucketBoundaries(family.buckets));
  }
  void Remove(const Family& family, const std::vector<std::string>& labels) override {
    MutexLock lock(&mutex_);
    const auto found = gauges_.find(family.name);
    if (found == gauges_.end()) return;
    Series<prometheus::Gauge>& series = found->second;
    const auto gauge = series.by_labels.find(labels);
    if (gauge == series.by_labels.end()) return;
    series.real->Remove(&gauge->second->real());
    series.by_labels.erase(gauge);
  }

 private:
  template <typename Real>
  using Families = absl::flat_hash_map<std::string, Series<Real>>;

  template <typename Real, typename Builder, typename... Options>
  Wrapped<Real>& Get(Families<Real> PrometheusRegistry::*families, Builder builder,
                     const Family& family, const std::vector<std::string>& labels,
                     const Options&... options) {
    CHECK_EQ(family.labels.size(), labels.size()) << family.name;
    MutexLock lock(&mutex_);
    Families<Real>& known = this->*families;
    auto found = known.find(family.name);
    if (found == known.end()) {
      found = known.try_emplace(std::string(family.name)).first;
      found->second.real = &builder.Name(std::string(family.name))
                                .Help(std::string(family.help))
                                .Register(*registry_);
    }
    std::unique_ptr<Wrapped<Real>>& slot = found->second.by_labels[labels];
    if (slot == nullptr) {
      prometheus::Labels named;
      for (size_t i = 0; i < labels.size(); ++i) named[std::string(family.labels[i])] = labels[i];
      slot = std::make_unique<Wrapped<Real>>(found->second.real->Add(named, options...));
    }
    return *slot;
  }

  std::shared_ptr<prometheus::Registry> registry_;
  Mutex mutex_;
  Families<prometheus::Counter> counters_ ABSL_GUARDED_BY(mutex_);
  Families<prometheus::Gauge> gauges_ ABSL_GUARDED_BY(mutex_);
  Families<prometheus::Histogram> histograms_ ABSL_GUARDED_BY(mutex_);
};

absl::Status TlsError(absl::string_view flag, absl::string_view path, const char* what) {
  std::array<char, 256> text = {};
  const unsigned long code = ERR_peek_last_error();
  if (code != 0) ERR_error_string_n(code, text.data(), text.size());
  ERR_clear_error();
  return absl::InvalidArgumentError(
      absl::StrCat(flag, " ", path, ": ", what, code == 0 ? "" : ": ", text.data()));
}

// Reads the files for one connection, so that one that was replaced counts from then on.
absl::Status Use(const ServerTls& tls, SSL* ssl) {
  ERR_clear_error();
  if (SSL_use_certificate_chain_file(ssl, tls.certificate.c_str()) != 1) {
    return TlsError("--metrics-tls-cert", tls.certificate, "this is no certificate");
  }
  if (SSL_use_PrivateKey_file(ssl, tls.key.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_check_private_key(ssl) != 1) {
    return TlsError("--metrics-tls-key", tls.key, "this is not the certificate's private key");
  }
  if (tls.client_authorities.empty()) return absl::OkStatus();
  const std::unique_ptr<X509_STORE, void (*)(X509_STORE*)> store(X509_STORE_new(), X509_STORE_free);
  if (X509_STORE_load_file(store.get(), tls.client_authorities.c_str()) != 1 ||
      SSL_set1_verify_cert_store(ssl, store.get()) != 1) {
    return TlsError("--metrics-tls-ca", tls.client_authorities, "these are no authorities");
  }
  // Without SSL_VERIFY_FAIL_IF_NO_PEER_CERT: open pages are for callers without a certificate, too.
  SSL_set_verify(ssl, SSL_VERIFY_PEER, nullptr);
  return absl::OkStatus();
}

std::unique_ptr<httplib::Server> MakeServer(const ServerTls& tls) {
  if (tls.certificate.empty()) return std::make_unique<httplib::Server>();
  return std::make_unique<httplib::SSLServer>([&tls](SSL_CTX& context) {
    SSL_CTX_set_min_proto_version(&context, TLS1_2_VERSION);
    // A session that is resumed would go on with files that were replaced.
    SSL_CTX_set_session_cache_mode(&context, SSL_SESS_CACHE_OFF);
    SSL_CTX_set_options(&context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
    SSL_CTX_set_num_tickets(&context, 0);
    const auto use = [](SSL* ssl, void* files) {
      return Use(*static_cast<const ServerTls*>(files), ssl).ok() ? 1 : 0;
    };
    SSL_CTX_set_cert_cb(&context, use, const_cast<ServerTls*>(&tls));
    return true;
  });
}

bool HasProvenItself(const SSL* ssl) {
  const std::unique_ptr<X509, void (*)(X509*)> certificate(SSL_get1_peer_certificate(ssl),
                                                           X509_free);
  return certificate != nullptr && SSL_get_verify_result(ssl) == X509_V_OK;
}

// Two scrapers are served at a time; more wait.
constexpr size_t kThreads = 2;
constexpr int kIdleMicroseconds = 250'000;
constexpr int kTimeoutSeconds = 5;  // of a client that sends or reads nothing

// Serves metrics over HTTP. prometheus-cpp's own exposer cannot: Debian's has a web server without
// IPv6.
class Server : public PrometheusServer {
 public:
  explicit Server(const ServerTls& tls)
      : tls_(tls),
        known_(std::make_shared<prometheus::Registry>()),
        registry_(known_),
        http_(MakeServer(tls_)),
        server_(*http_) {
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
    server_.Get("/metrics", [this](const httplib::Request& request, httplib::Response& response) {
      if (!May(request)) return Refuse(response);
      response.set_content(prometheus::TextSerializer().Serialize(known_->Collect()),
                           "text/plain; version=0.0.4; charset=utf-8");
    });
    server_.Get("/.*", [this](const httplib::Request& request, httplib::Response& response) {
      Answer(request, response);
    });
  }
  ~Server() override {
    if (!thread_.joinable()) return;
    // The library ignores a stop before its thread listens.
    while (!server_.is_running() && !ended_) std::this_thread::yield();
    server_.stop();
    thread_.join();
  }
  // Whether the files are what they should be now.
  absl::Status CheckTls() const {
    if (tls_.certificate.empty() != tls_.key.empty() ||
        (tls_.certificate.empty() && !tls_.client_authorities.empty())) {
      return absl::InvalidArgumentError(
          "TLS of metrics needs --metrics-tls-cert and --metrics-tls-key, both");
    }
    if (tls_.certificate.empty()) return absl::OkStatus();
    const std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context(SSL_CTX_new(TLS_server_method()),
                                                               SSL_CTX_free);
    const std::unique_ptr<SSL, void (*)(SSL*)> ssl(SSL_new(context.get()), SSL_free);
    return Use(tls_, ssl.get());
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
    address_ = absl::StrCat(tls_.certificate.empty() ? "" : "https://", at.ToString());
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
  bool May(const httplib::Request& request) const {
    return tls_.client_authorities.empty() || HasProvenItself(request.ssl);
  }
  static void Refuse(httplib::Response& response) {
    response.status = 403;
    response.set_content("this page needs a client certificate of --metrics-tls-ca\n",
                         "text/plain");
  }
  void Answer(const httplib::Request& request, httplib::Response& response) {
    MutexLock lock(&pages_mutex_);
    const auto page = pages_.find(request.path);
    if (page == pages_.end()) {
      std::string known = "/metrics";
      for (const auto& [other, unused] : pages_) absl::StrAppend(&known, " ", other);
      response.status = 404;
      response.set_content(absl::StrCat("no such page; there are ", known, "\n"), "text/plain");
      return;
    }
    const PageReply reply = page->second();
    if (!reply.open && !May(request)) return Refuse(response);
    response.status = reply.status;
    response.set_content(reply.body, reply.content_type);
  }

  const ServerTls tls_;
  std::shared_ptr<prometheus::Registry> known_;
  PrometheusRegistry registry_;
  Mutex pages_mutex_;
  Pages pages_ ABSL_GUARDED_BY(pages_mutex_);
  const std::unique_ptr<httplib::Server> http_;
  httplib::Server& server_;
  std::string address_;
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PrometheusServer>> PrometheusServer::Start(
    const std::string& address, const ServerTls& tls) {
  ASSIGN_OR_RETURN(const HostPort at, ParseHostPort(address));
  auto server = std::make_unique<Server>(tls);
  RETURN_IF_ERROR(server->CheckTls());
  RETURN_IF_ERROR(Annotate(server->Listen(at), "metrics"));
  return server;
}

}  // namespace muster::metrics
