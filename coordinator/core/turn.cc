#include "coordinator/core/turn.h"

#include "coordinator/core/limits.h"
#include "coordinator/core/schema.h"
#include "proto/time.h"

namespace muster::coordinator {

std::string Bounded(absl::string_view text) {
  if (text.size() <= kMessageBytesMax) return std::string(text);
  size_t size = kMessageBytesMax;
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  return std::string(text.substr(0, size));
}

const ReplyAction* Turn::ReplyTo(CallId call) const {
  for (const CoreAction& action : output_.actions) {
    const auto* reply = std::get_if<ReplyAction>(&action);
    if (reply != nullptr && reply->call == call) return reply;
  }
  return nullptr;
}

void Turn::Log(v1::Event event) {
  const uint64_t sequence = ++log_.last_;
  event.set_sequence(sequence);
  *event.mutable_time() = ToProto(now_);
  event.set_actor(actor_);
  batch().Put(Table::kEvents, schema::EventKey(sequence), schema::Serialize(event));
  if (sequence > kEventsMax) {
    batch().Delete(Table::kEvents, schema::EventKey(sequence - kEventsMax));
  }
  logged_ = true;
  Act(EventAppended{std::move(event)});
}

CoreOutput Turn::Finish() {
  if (logged_) {
    batch().Put(Table::kMeta, schema::kLastEvent, schema::EncodeU64(log_.last_));
  }
  state_log_.Append(now_, actor_, log_.last_, output_.batch, std::move(log_entry_));
  return std::move(output_);
}

}  // namespace muster::coordinator
