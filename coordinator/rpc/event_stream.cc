#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/core/schema.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/pull_stream.h"
#include "coordinator/rpc/streams.h"

namespace muster::coordinator {
namespace {

class EventStream : public PullStream<v1::Event> {
 public:
  EventStream(Shell& shell, const v1::WatchEventsRequest& request, absl::StatusOr<Permit> permit)
      : PullStream(shell, "WatchEvents", std::move(permit)),
        job_(request.job()),
        cursor_(request.after_sequence()) {}

 private:
  bool WatchesEvents() const override { return true; }

  absl::Status OnOpen(const std::shared_ptr<const v1::Job>&) override {
    const uint64_t last = shell().published().last_event();
    if (cursor_ <= last) return absl::OkStatus();
    return absl::OutOfRangeError(absl::StrCat("after_sequence: ", cursor_,
                                              " is beyond the newest event (", last,
                                              "); does it come from another cluster?"));
  }

  Step Next(v1::Event* message, absl::Status* status) override {
    if (ready_.empty()) {
      *status = ReadMore();
      if (!status->ok()) return Step::kEnd;
    }
    if (ready_.empty()) {
      // All rows just read were about other jobs. Other streams get their turn before more is read.
      if (cursor_ < shell().published().last_event()) PumpAfter(absl::ZeroDuration());
      return Step::kWait;
    }
    *message = std::move(ready_.front());
    ready_.pop_front();
    return Step::kSend;
  }

  absl::Status ReadMore() {
    const uint64_t last = shell().published().last_event();
    if (cursor_ >= last) return absl::OkStatus();
    absl::Status bad;
    size_t rows = 0;
    const absl::Status scanned = shell().store().Scan(
        Table::kEvents, schema::EventKey(cursor_ + 1), schema::EventKey(last + 1),
        [&](const std::string& key, const std::string& value) {
          v1::Event event;
          bad = schema::Parse(Table::kEvents, key, value, event);
          // Numbers leap to the event of a restore; those between were never used, or are of events
          // that the state does not know any more.
          if (bad.ok() && cursor_ != 0 && event.sequence() != cursor_ + 1 &&
              event.kind() != v1::EVENT_KIND_STATE_RESTORED) {
            bad = absl::OutOfRangeError(
                absl::StrCat("events ", cursor_ + 1, " to ", event.sequence() - 1,
                             " are no longer kept; start again with after_sequence 0"));
          }
          if (!bad.ok()) return false;
          cursor_ = event.sequence();
          if (IsAbout(event, job_)) ready_.push_back(std::move(event));
          return ++rows < kEventsReadAtOnce;
        });
    return scanned.ok() ? bad : scanned;
  }

  const std::string job_;
  uint64_t cursor_;              // sequence of the last event read
  std::deque<v1::Event> ready_;  // read, not sent
};

}  // namespace

grpc::ServerWriteReactor<v1::Event>* StartEventStream(Shell& shell,
                                                      const v1::WatchEventsRequest& request,
                                                      absl::StatusOr<Permit> permit) {
  const auto stream = std::make_shared<EventStream>(shell, request, std::move(permit));
  stream->Begin(request.job());
  return stream.get();
}

}  // namespace muster::coordinator
