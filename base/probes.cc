#include "base/probes.h"

#include "absl/strings/str_cat.h"

namespace muster {

void Probes::Turned() {
  MutexLock lock(&mutex_);
  turned_ = clock_.Monotonic();
}

void Probes::Started() {
  MutexLock lock(&mutex_);
  started_ = true;
}

void Probes::Ready() {
  MutexLock lock(&mutex_);
  trouble_.clear();
}

void Probes::NotReady(const std::string& why) {
  MutexLock lock(&mutex_);
  trouble_ = why;
}

metrics::Pages Probes::Pages() {
  return {{"/livez", [this] { return Live(); }},
          {"/readyz",
           [this] {
             MutexLock lock(&mutex_);
             return Reply(trouble_);
           }},
          {"/startupz", [this] {
             MutexLock lock(&mutex_);
             return Reply(started_ ? "" : "starting");
           }}};
}

metrics::PageReply Probes::Live() const {
  MutexLock lock(&mutex_);
  if (turned_ == absl::InfiniteDuration()) return Reply("");  // /startupz watches over the start
  const absl::Duration silence = clock_.Monotonic() - turned_;
  if (silence <= kSilenceMax) return Reply("");
  return Reply(absl::StrCat("the event loop has not turned for ",
                            absl::FormatDuration(absl::Trunc(silence, absl::Seconds(1)))));
}

metrics::PageReply Probes::Reply(const std::string& trouble) const {
  // What probes, such as the kubelet, has no certificate.
  if (trouble.empty()) return {.body = "ok\n", .open = true};
  return {.status = 503, .body = absl::StrCat(trouble, "\n"), .open = true};
}

}  // namespace muster
