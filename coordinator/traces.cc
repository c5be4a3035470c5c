#include "coordinator/traces.h"

#include <httplib.h>

#include <algorithm>
#include <deque>
#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file_system.h"
#include "base/loop.h"
#include "base/mutex.h"
#include "base/network.h"
#include "base/status_macros.h"
#include "coordinator/core/schema.h"
#include "coordinator/published_state.h"
#include "proto/spec/names.h"
#include "proto/time.h"
#include "security/certificates.h"
#include "security/server_verification.h"

namespace muster::coordinator {
namespace {

constexpr size_t kEventsAtOnce = 1000;
constexpr size_t kSpansAtOnce = 500;  // of one request
constexpr absl::Duration kRetryAfter = absl::Seconds(5);
constexpr int kTimeoutSeconds = 5;
// Why spans are dropped, as the metric has it.
constexpr char kQueueFull[] = "queue_full";
constexpr char kRefused[] = "refused";

// FNV-1a: the same in every process.
uint64_t Hash(const std::string& text) {
  uint64_t hash = 14695981039346656037ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash == 0 ? 1 : hash;
}

std::string TraceId(const std::string& job) {
  return absl::StrFormat("%016x%016x", Hash("trace/" + job), Hash(job + "/trace"));
}
std::string SpanId(const std::string& what) { return absl::StrFormat("%016x", Hash(what)); }

// What a job does in a state; the state itself where there is no better word.
std::string SpanName(const std::string& state) {
  static const auto* const names = new std::map<std::string, std::string>{
      {"pending", "submit"},  {"queued", "queue"},       {"placing", "place"},
      {"starting", "launch"}, {"running", "train"},      {"recovering", "restart"},
      {"held", "hold"},       {"preempting", "preempt"}, {"stopping", "stop"}};
  const auto found = names->find(state);
  return found == names->end() ? state : found->second;
}

bool IsFinal(const std::string& state) {
  return state == "succeeded" || state == "failed" || state == "cancelled";
}

Span SpanOf(const v1::Event& event, std::string name, absl::Time begin) {
  Span span;
  span.trace_id = TraceId(event.job_id());
  span.span_id = SpanId(absl::StrCat(event.job_id(), "/", event.sequence()));
  span.parent_id = SpanId(event.job_id());
  span.name = std::move(name);
  span.begin = begin;
  // A clock that was set back makes no span of negative length.
  span.end = std::max(begin, FromProto(event.time()));
  span.attributes = {{"muster.job.id", event.job_id()}, {"muster.job.name", event.job_name()}};
  if (event.epoch() != 0) span.attributes["muster.job.epoch"] = absl::StrCat(event.epoch());
  return span;
}

}  // namespace

std::vector<Span> TraceBuilder::Take(const v1::Event& event) {
  std::vector<Span> ended;
  if (event.job_id().empty()) return ended;
  const absl::Time now = FromProto(event.time());
  switch (event.kind()) {
    case v1::EVENT_KIND_JOB_STATE: {
      const auto [entry, first] = jobs_.try_emplace(event.job_id(), Open{now, now, 0});
      Open& open = entry->second;
      if (!first && event.from() != event.to()) {
        Span span = SpanOf(event, SpanName(event.from()), open.since);
        span.attributes["muster.job.next_state"] = event.to();
        if (!event.message().empty()) span.attributes["muster.message"] = event.message();
        ended.push_back(std::move(span));
        open.since = now;
      }
      if (!IsFinal(event.to())) break;
      Span job = SpanOf(event, "job", open.submitted);
      job.span_id = SpanId(event.job_id());
      job.parent_id.clear();
      job.attributes["muster.job.state"] = event.to();
      job.failed = event.to() == "failed";
      job.message = event.message();
      ended.push_back(std::move(job));
      jobs_.erase(entry);
      break;
    }
    case v1::EVENT_KIND_CHECKPOINT_COMMITTED:
    case v1::EVENT_KIND_EVALUATION: {
      const bool saved = event.kind() == v1::EVENT_KIND_CHECKPOINT_COMMITTED;
      Span span = SpanOf(event, saved ? "checkpoint" : "evaluation", now);
      span.attributes["muster.step"] = absl::StrCat(event.step());
      ended.push_back(std::move(span));
      break;
    }
    case v1::EVENT_KIND_ATTEMPT_ENDED: {
      Span span = SpanOf(event, "attempt ended", now);
      span.attributes["muster.cause"] = spec::EnumName(event.cause());
      span.attributes["muster.step"] = absl::StrCat(event.step());
      span.failed = event.cause() != v1::CAUSE_COMPLETED;
      span.message = event.message();
      ended.push_back(std::move(span));
      break;
    }
    default:
      break;
  }
  return ended;
}

std::string OtlpJson(const std::vector<Span>& spans, const std::string& cluster,
                     const std::string& version) {
  using Json = nlohmann::ordered_json;
  const auto attribute = [](const std::string& key, const std::string& value) {
    return Json{{"key", key}, {"value", {{"stringValue", value}}}};
  };
  Json list = Json::array();
  for (const Span& span : spans) {
    Json attributes = Json::array();
    for (const auto& [key, value] : span.attributes) attributes.push_back(attribute(key, value));
    Json one = {{"traceId", span.trace_id}, {"spanId", span.span_id}};
    if (!span.parent_id.empty()) one["parentSpanId"] = span.parent_id;
    one["name"] = span.name;
    one["kind"] = 1;  // internal
    // 64-bit numbers are text in Protobuf's JSON.
    one["startTimeUnixNano"] = absl::StrCat(absl::ToUnixNanos(span.begin));
    one["endTimeUnixNano"] = absl::StrCat(absl::ToUnixNanos(span.end));
    one["attributes"] = std::move(attributes);
    if (span.failed) one["status"] = {{"code", 2}, {"message", span.message}};
    list.push_back(std::move(one));
  }
  const Json body = {
      {"resourceSpans",
       {{{"resource",
          {{"attributes",
            {attribute("service.name", "muster"), attribute("service.instance.id", cluster)}}}},
         {"scopeSpans",
          {{{"scope", {{"name", "muster-coordinator"}, {"version", version}}},
            {"spans", std::move(list)}}}}}}}};
  return body.dump(-1, ' ', false, Json::error_handler_t::replace);
}

namespace {

struct Collector {
  bool tls = false;
  std::string host;
  int port = 0;
};

absl::StatusOr<Collector> ParseEndpoint(const std::string& endpoint) {
  const absl::Status wrong = absl::InvalidArgumentError(
      absl::StrCat("--otlp-endpoint: ", spec::Quoted(endpoint),
                   " is not http://HOST:PORT or https://HOST:PORT of a collector that takes OTLP "
                   "over HTTP, such as http://127.0.0.1:4318"));
  const size_t scheme = endpoint.find("://");
  if (scheme == std::string::npos) return wrong;
  Collector collector;
  collector.tls = endpoint.substr(0, scheme) == "https";
  if (!collector.tls && endpoint.substr(0, scheme) != "http") return wrong;
  std::string authority = endpoint.substr(scheme + 3);
  if (authority.empty() || authority.find_first_of("/?#@ ") != std::string::npos) return wrong;
  const size_t colon = authority.rfind(':');
  const bool has_port =
      colon != std::string::npos && (authority.front() != '[' || authority[colon - 1] == ']');
  if (!has_port) absl::StrAppend(&authority, collector.tls ? ":443" : ":80");
  const absl::StatusOr<HostPort> parsed = ParseHostPort(authority);
  if (!parsed.ok() || !absl::SimpleAtoi(parsed->port, &collector.port) || collector.port < 1 ||
      collector.port > 65535) {
    return wrong;
  }
  collector.host = parsed->host;
  return collector;
}

class Exporter : public TraceExporter {
 public:
  Exporter(const Options& options, Collector collector, Shell& shell, const Clock& clock,
           Logger& log)
      : options_(options),
        collector_(std::move(collector)),
        shell_(shell),
        log_(log),
        first_(shell.published().last_event() + 1),
        waker_(std::make_shared<Waker>(*this)),
        loop_(clock) {
    // A rate needs a first sample, of what has not happened yet too.
    shell_.metrics().TraceSpansDropped(kQueueFull, 0);
    shell_.metrics().TraceSpansDropped(kRefused, 0);
    if (!shell_.published().Watch("", waker_)) {
      log_.Warning("traces follow no events: there are too many watchers", {});
    }
    loop_.Post([this] { Read(); });
  }
  ~Exporter() override {
    waker_->Stop();
    loop_.Stop();
    waker_.reset();
    shell_.published().DropExpiredWatchers("");
  }

 private:
  // Wakes the exporter's own loop, once until it has read.
  class Waker : public Watcher {
   public:
    explicit Waker(Exporter& exporter) : exporter_(exporter) {}
    void Wake() override {
      MutexLock lock(&mutex_);
      if (stopped_ || woken_) return;
      woken_ = true;
      exporter_.loop_.Post([this] {
        {
          MutexLock inner(&mutex_);
          woken_ = false;
        }
        exporter_.Read();
      });
    }
    void Stop() {
      MutexLock lock(&mutex_);
      stopped_ = true;
    }

   private:
    Exporter& exporter_;
    Mutex mutex_;
    bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
    bool woken_ ABSL_GUARDED_BY(mutex_) = false;
  };

  // All on the loop.
  void Read() {
    const uint64_t last = shell_.published().last_event();
    size_t rows = 0;
    const absl::Status scanned = shell_.store().Scan(
        Table::kEvents, schema::EventKey(cursor_ + 1), schema::EventKey(last + 1),
        [&](const std::string& key, const std::string& value) {
          v1::Event event;
          // What cannot be read has no place in a trace.
          if (!schema::Parse(Table::kEvents, key, value, event).ok()) return false;
          cursor_ = event.sequence();
          for (Span& span : builder_.Take(event)) {
            if (event.sequence() >= first_) waiting_.push_back(std::move(span));
          }
          return ++rows < kEventsAtOnce;
        });
    if (waiting_.size() > options_.spans_max) {
      const size_t excess = waiting_.size() - options_.spans_max;
      waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<ptrdiff_t>(excess));
      Dropped(kQueueFull, excess);
    }
    if (scanned.ok() && rows == kEventsAtOnce) loop_.Post([this] { Read(); });
    if (!sending_) Send();
  }

  void Dropped(const char* reason, size_t spans) {
    dropped_ += spans;
    shell_.metrics().TraceSpansDropped(reason, spans);
  }

  std::unique_ptr<httplib::ClientImpl> MakeClient() const {
    std::unique_ptr<httplib::ClientImpl> client;
    if (collector_.tls) {
      client = std::make_unique<httplib::SSLClient>(collector_.host, collector_.port);
      client->enable_server_certificate_verification(true);
      const std::string authorities =
          options_.ca_file.empty() ? security::SystemAuthorities() : options_.ca_file;
      if (!authorities.empty()) client->set_ca_cert_path(authorities);
    } else {
      client = std::make_unique<httplib::ClientImpl>(collector_.host, collector_.port);
    }
    client->set_connection_timeout(kTimeoutSeconds);
    client->set_read_timeout(kTimeoutSeconds);
    client->set_write_timeout(kTimeoutSeconds);
    return client;
  }

  // Why a request had no answer.
  std::string WhyNot(httplib::Error error) const {
    switch (error) {
      case httplib::Error::SSLServerVerification: {
        const std::string error = security::VerifyError(
            static_cast<const httplib::SSLClient&>(*client_).get_openssl_verify_result());
        return error.empty() ? absl::StrCat("its certificate is not for ", collector_.host)
                             : absl::StrCat("its certificate: ", error);
      }
      case httplib::Error::SSLLoadingCerts:
        return absl::StrCat("no authorities can be read from ",
                            options_.ca_file.empty() ? "this system" : options_.ca_file);
      case httplib::Error::SSLConnection:
        return "it does not speak TLS as it should";
      case httplib::Error::Connection:
      case httplib::Error::ConnectionTimeout:
        return "no connection";
      default:
        return httplib::to_string(error);
    }
  }

  void Send() {
    sending_ = false;
    if (waiting_.empty()) return;
    sending_ = true;
    const size_t count = std::min(waiting_.size(), kSpansAtOnce);
    const std::vector<Span> spans(waiting_.begin(),
                                  waiting_.begin() + static_cast<ptrdiff_t>(count));
    if (client_ == nullptr) client_ = MakeClient();
    const httplib::Result result = client_->Post(
        "/v1/traces", OtlpJson(spans, shell_.cluster_id(), options_.version), "application/json");
    const int status = result ? result->status : 0;
    const std::string why = result ? absl::StrCat("status ", status) : WhyNot(result.error());
    // Authorities that were replaced are read by a new client alone.
    if (!result) client_.reset();
    // What it refuses for good is not sent again.
    const bool refused = status >= 400 && status < 500 && status != 429;
    if (refused) Dropped(kRefused, count);
    if (status / 100 == 2 || refused) {
      waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<ptrdiff_t>(count));
    }
    if ((status / 100 != 2) != failing_ || dropped_ > told_) {
      failing_ = status / 100 != 2;
      told_ = dropped_;
      log_.Warning(failing_ ? "traces cannot be sent" : "traces are sent again",
                   {{"endpoint", options_.endpoint}, {"why", why}, {"dropped", dropped_}});
    }
    if (status / 100 == 2 || refused) {
      loop_.Post([this] { Send(); });
    } else {
      loop_.PostAfter(kRetryAfter, [this] { Send(); });
    }
  }

  const Options options_;
  const Collector collector_;
  Shell& shell_;
  Logger& log_;
  std::unique_ptr<httplib::ClientImpl> client_;  // on the loop
  const uint64_t first_;                         // event of which spans are sent
  TraceBuilder builder_;
  uint64_t cursor_ = 0;  // the last event read
  std::deque<Span> waiting_;
  bool sending_ = false;  // a Send is posted
  bool failing_ = false;
  size_t dropped_ = 0;
  size_t told_ = 0;  // of them
  std::shared_ptr<Waker> waker_;
  ThreadLoop loop_;  // last: its thread uses everything above
};

}  // namespace

absl::Status TraceExporter::Check(const Options& options) {
  ASSIGN_OR_RETURN(const Collector collector, ParseEndpoint(options.endpoint));
  if (options.ca_file.empty()) return absl::OkStatus();
  if (!collector.tls) {
    return absl::InvalidArgumentError(
        absl::StrCat("--otlp-ca: ", spec::Quoted(options.endpoint),
                     " has no certificate to check; give --otlp-endpoint https://HOST:PORT"));
  }
  const absl::StatusOr<std::string> pem = PosixFileSystem()->Read(options.ca_file);
  if (!pem.ok()) return Annotate(pem.status(), "--otlp-ca");
  return Annotate(security::Authorities::Make(*pem, "").status(),
                  absl::StrCat("--otlp-ca: ", options.ca_file));
}

absl::StatusOr<std::unique_ptr<TraceExporter>> TraceExporter::Start(const Options& options,
                                                                    Shell& shell,
                                                                    const Clock& clock,
                                                                    Logger& log) {
  RETURN_IF_ERROR(Check(options));
  ASSIGN_OR_RETURN(Collector collector, ParseEndpoint(options.endpoint));
  return std::make_unique<Exporter>(options, std::move(collector), shell, clock, log);
}

}  // namespace muster::coordinator
