// Traces of jobs for OpenTelemetry: one trace for each job, made of the events that tell its life,
// and sent as OTLP over HTTP with JSON (https://opentelemetry.io/docs/specs/otlp).
#ifndef MUSTER_COORDINATOR_TRACES_H_
#define MUSTER_COORDINATOR_TRACES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "coordinator/shell.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

struct Span {
  std::string trace_id;   // 32 hex digits; the same for a job in every process
  std::string span_id;    // 16
  std::string parent_id;  // empty: the job itself
  std::string name;
  absl::Time begin, end;
  std::map<std::string, std::string> attributes;
  bool failed = false;
  std::string message;  // of `failed`
};

// Folds events, in order, into spans. A span is made when it has ended: "submit", "queue", "place",
// "launch" (until the ranks train), "train", "restart" and so on for each time that a job was in
// that state, "checkpoint", "evaluation" and "attempt ended" for moments, and around them "job"
// once it is final. Pure; bounded by the jobs that are not finished.
class TraceBuilder {
 public:
  // Spans that the event ends.
  std::vector<Span> Take(const v1::Event& event);

 private:
  struct Open {
    absl::Time submitted;
    absl::Time since;  // of the state that it is in
    uint64_t epoch = 0;
  };
  std::map<std::string, Open> jobs_;
};

// The body of an OTLP request.
std::string OtlpJson(const std::vector<Span>& spans, const std::string& cluster,
                     const std::string& version);

// Sends spans from a thread of its own. What the collector does not take waits, at most `spans_max`
// spans, the oldest of which are dropped; nothing else waits for it. Dropped spans are counted by
// Metrics::TraceSpansDropped.
class TraceExporter {
 public:
  struct Options {
    // "http://HOST:PORT" or "https://HOST:PORT", to whose /v1/traces spans are sent. With https the
    // collector must have a certificate for HOST by an authority of `ca_file`.
    std::string endpoint;
    std::string ca_file;  // PEM; empty: the authorities of this system. Of https alone
    std::string version;  // of this build
    size_t spans_max = 10'000;
  };

  virtual ~TraceExporter() = default;
  // kInvalidArgument, kNotFound: endpoint or ca_file are not as Start wants them.
  static absl::Status Check(const Options& options);
  // Only what ends from now on is sent; what began before is known from the events that are kept.
  // `shell`, `clock` and `log` outlive the exporter. Errors as of Check.
  static absl::StatusOr<std::unique_ptr<TraceExporter>> Start(const Options& options, Shell& shell,
                                                              const Clock& clock, Logger& log);
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_TRACES_H_
