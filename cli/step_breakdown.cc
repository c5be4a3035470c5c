#include "cli/step_breakdown.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <initializer_list>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "nlohmann/json.hpp"

namespace muster::cli {
namespace {

constexpr char kStepsTrack[] = "steps";  // worker/rank/profiler.cc: steps as the device runs them

struct Span {
  std::string name;
  int track = 0;
  double begin = 0, end = 0;  // microseconds
};

struct Spans {
  std::vector<Span> all;
  std::map<int, std::string> tracks;
};

// Parses line by line, since the trace of a large model has hundreds of megabytes.
Spans Read(absl::string_view trace) {
  Spans spans;
  for (absl::string_view line : absl::StrSplit(trace, '\n')) {
    line = absl::StripPrefix(line, "[");
    line = absl::StripSuffix(absl::StripSuffix(line, ","), "]");
    if (line.empty()) continue;
    const nlohmann::json event = nlohmann::json::parse(line.begin(), line.end(), nullptr,
                                                       /*allow_exceptions=*/false);
    if (!event.is_object()) continue;
    const std::string kind = event.value("ph", ""), name = event.value("name", "");
    const int track = event.value("tid", 0);
    if (kind == "M" && name == "thread_name" && event.contains("args")) {
      spans.tracks[track] = event["args"].value("name", "");
    } else if (kind == "X") {
      const double begin = event.value("ts", 0.0);
      spans.all.push_back({name, track, begin, begin + event.value("dur", 0.0)});
    }
  }
  return spans;
}

enum Class { kGemm, kAttention, kBandwidth, kCommunication, kClasses };

// By the names of kernels of cuBLASLt, cuDNN, NCCL and our own. Collectives of copy engines consist
// of copies on streams without kernels, of kernels that wait for peers, and of kernels that sum
// what was copied.
Class ClassOf(const std::string& kernel, bool copies_alone) {
  const auto any = [&](std::initializer_list<const char*> parts) {
    return std::any_of(parts.begin(), parts.end(),
                       [&](const char* part) { return absl::StrContains(kernel, part); });
  };
  if (any({"nccl", "PeerBarrier", "SumParts", "bytes, between devices"}) ||
      (copies_alone && any({"bytes, device to device"}))) {
    return kCommunication;
  }
  if (any({"fmha", "sdpa", "flash", "attention", "Attention", "cudnn", "QueryGradient",
           "KeyValueGradient", "DeltaKernel"})) {
    return kAttention;
  }
  if (any({"nvjet", "gemm", "Gemm", "cutlass", "splitK", "cublas"})) return kGemm;
  return kBandwidth;
}

// Microseconds of [begin, end] in which each class is the first one that runs; the last element is
// the time in which none runs.
std::array<double, kClasses + 1> Sweep(const std::vector<Span>& kernels, double begin, double end) {
  struct Edge {
    double at;
    Class of;
    int change;
  };
  std::vector<Edge> edges;
  std::set<int> computing;  // tracks with kernels
  for (const Span& span : kernels) {
    if (!absl::StartsWith(span.name, "copy of ")) computing.insert(span.track);
  }
  for (const Span& span : kernels) {
    const double from = std::max(span.begin, begin), to = std::min(span.end, end);
    if (from >= to) continue;
    const Class of = ClassOf(span.name, computing.count(span.track) == 0);
    edges.push_back({from, of, 1});
    edges.push_back({to, of, -1});
  }
  std::sort(edges.begin(), edges.end(), [](const Edge& a, const Edge& b) { return a.at < b.at; });
  std::array<double, kClasses + 1> times{};
  std::array<int, kClasses> running{};
  double at = begin;
  const auto advance = [&](double to) {
    const auto first =
        std::find_if(running.begin(), running.end(), [](int count) { return count > 0; });
    times[static_cast<size_t>(first - running.begin())] += to - at;
    at = to;
  };
  for (const Edge& edge : edges) {
    advance(edge.at);
    running[edge.of] += edge.change;
  }
  advance(end);
  return times;
}

void BreakDownGpu(const std::vector<Span>& kernels, double begin, double end,
                  StepBreakdown& result) {
  // Counts from the first record to the last: recording may begin after the first step does, and
  // end before the last one does.
  double first = end, last = begin;
  for (const Span& span : kernels) {
    first = std::min(first, span.begin);
    last = std::max(last, span.end);
  }
  begin = std::max(begin, first);
  end = std::min(end, last);
  if (begin >= end) return;
  const auto times = Sweep(kernels, begin, end);
  constexpr const char* kNames[] = {"gemm", "attention", "bandwidth", "communication", "idle"};
  result.gpu = true;
  for (size_t i = 0; i < times.size(); ++i) {
    result.parts.emplace_back(kNames[i], result.step * times[i] / (end - begin));
  }
}

void BreakDownHost(const std::vector<Span>& host, StepBreakdown& result) {
  double rest = result.step;
  for (const auto& [span_name, part] :
       std::initializer_list<std::pair<const char*, const char*>>{{"forward", "forward"},
                                                                  {"backward", "backward"},
                                                                  {"update", "update"},
                                                                  {"wait for data", "data"}}) {
    double sum = 0;
    for (const Span& span : host) {
      if (span.name == span_name) sum += span.end - span.begin;
    }
    const double seconds = std::min(rest, sum * 1e-6 / result.steps);
    result.parts.emplace_back(part, seconds);
    rest -= seconds;
  }
  result.parts.emplace_back("other", rest);
}

}  // namespace

StepBreakdown BreakDown(absl::string_view trace) {
  const Spans spans = Read(trace);
  StepBreakdown result;
  std::vector<Span> device, host, steps, enqueued;
  for (const Span& span : spans.all) {
    const auto track = spans.tracks.find(span.track);
    const std::string name = track == spans.tracks.end() ? "" : track->second;
    if (absl::StartsWith(name, "device, ")) {
      device.push_back(span);
      continue;
    }
    if (absl::StartsWith(span.name, "step ")) {
      (name == kStepsTrack ? steps : enqueued).push_back(span);
    }
    host.push_back(span);
  }
  // Steps as the device runs them, if there are any: the host enqueues steps faster than they run.
  if (steps.empty()) steps = std::move(enqueued);
  double begin = 0, end = 0;
  for (const Span& span : steps) {
    begin = result.steps == 0 ? span.begin : std::min(begin, span.begin);
    end = std::max(end, span.end);
    ++result.steps;
  }
  if (result.steps == 0) return result;
  result.step = (end - begin) * 1e-6 / result.steps;
  BreakDownGpu(device, begin, end, result);
  if (!result.gpu) BreakDownHost(host, result);
  return result;
}

}  // namespace muster::cli
