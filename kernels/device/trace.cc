#include "kernels/device/trace.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace muster::kernels {
namespace {

// In JSON's quotes. Names of kernels come from demanglers and may hold anything.
std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      absl::StrAppend(&out, "\\", std::string(1, c));
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", static_cast<int>(c));
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// The format counts microseconds.
std::string Microseconds(int64_t nanoseconds) {
  return absl::StrFormat("%d.%03d", nanoseconds / 1000, nanoseconds % 1000);
}

std::string Metadata(const char* what, int process, int track, const std::string& name) {
  return absl::StrFormat(R"({"ph":"M","name":"%s","pid":%d,"tid":%d,"args":{"name":%s}})", what,
                         process, track, Quoted(name));
}

}  // namespace

void Trace::Keep(Span span) {
  span.begin = std::min(span.begin, span.end);
  MutexLock lock(&mutex_);
  if (spans_.size() == kSpansMax) {
    ++dropped_;
    return;
  }
  spans_.push_back(std::move(span));
}

void Trace::Add(const std::string& track, const std::string& name, int64_t begin, int64_t end) {
  Keep({track, name, begin, end, /*queued=*/false});
}

void Trace::AddQueued(const std::string& track, const std::string& name, int64_t begin,
                      int64_t end) {
  Keep({track, name, begin, end, /*queued=*/true});
}

int64_t Trace::dropped() const {
  MutexLock lock(&mutex_);
  return dropped_;
}

std::string Trace::ToJson(int process, const std::string& title) const {
  std::vector<Span> spans;
  {
    MutexLock lock(&mutex_);
    spans = spans_;
  }
  // Outer spans before those that they contain.
  std::stable_sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
  });
  std::string json = absl::StrCat("[", Metadata("process_name", process, 0, title), ",\n",
                                  R"({"ph":"M","name":"process_sort_index","pid":)", process,
                                  R"(,"args":{"sort_index":)", process, "}}");
  std::map<std::string, int> tracks;
  for (const Span& span : spans) tracks.emplace(span.track, 0);
  int number = 0;
  for (auto& [name, track] : tracks) {
    track = ++number;
    absl::StrAppend(&json, ",\n", Metadata("thread_name", process, track, name));
  }
  std::map<std::string, int64_t> free_from;  // of tracks with queued spans
  for (const Span& span : spans) {
    int64_t begin = span.begin;
    if (span.queued) {
      int64_t& free = free_from[span.track];
      begin = std::min(std::max(begin, free), span.end);
      free = std::max(free, span.end);
    }
    absl::StrAppendFormat(&json,
                          ",\n"
                          R"({"ph":"X","name":%s,"pid":%d,"tid":%d,"ts":%s,"dur":%s})",
                          Quoted(span.name), process, tracks[span.track], Microseconds(begin),
                          Microseconds(span.end - begin));
  }
  return json + "]\n";
}

}  // namespace muster::kernels
