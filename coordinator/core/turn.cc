#include "coordinator/core/turn.h"

#include "coordinator/core/limits.h"
#include "coordinator/core/schema.h"

namespace muster::coordinator {

google::protobuf::Timestamp ToProto(absl::Time time) {
  google::protobuf::Timestamp out;
  const int64_t nanos = absl::ToUnixNanos(time);
  int64_t seconds = nanos / 1'000'000'000;
  int64_t rest = nanos % 1'000'000'000;
  if (rest < 0) {
    rest += 1'000'000'000;
    --seconds;
  }
  out.set_seconds(seconds);
  out.set_nanos(static_cast<int32_t>(rest));
  return out;
}

absl::Time FromProto(const google::protobuf::Timestamp& timestamp) {
  return absl::FromUnixSeconds(timestamp.seconds()) + absl::Nanoseconds(timestamp.nanos());
}

std::string Bounded(absl::string_view text) {
  if (text.size() <= kMessageBytesMax) return std::string(text);
  size_t size = kMessageBytesMax;
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  return std::string(text.substr(0, size));
}

void Turn::Log(v1::Event event) {
  const uint64_t sequence = ++log_.last_;
  event.set_sequence(sequence);
  *event.mutable_time() = ToProto(now_);
  batch().Put(Table::kEvents, schema::EventKey(sequence), schema::Serialize(event));
  if (sequence > kEventsMax)
    batch().Delete(Table::kEvents, schema::EventKey(sequence - kEventsMax));
  logged_ = true;
  Act(EventAppended{std::move(event)});
}

CoreOutput Turn::Finish() {
  if (logged_) {
    batch().Put(Table::kMeta, schema::kLastEvent, schema::EncodeU64(log_.last_));
  }
  return std::move(output_);
}

}  // namespace muster::coordinator
