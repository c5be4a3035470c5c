#include "coordinator/core/key_value.h"

#include "absl/strings/str_cat.h"
#include "coordinator/core/limits.h"

namespace muster::coordinator {

void KeyValue::Reply(SessionId session, uint64_t request, const absl::Status& status,
                     const std::string& value, Turn& turn) {
  SendAction send;
  send.session = session;
  v1::KeyValueReply* reply = send.message.mutable_value();
  reply->set_request(request);
  reply->set_value(value);
  reply->set_status_code(static_cast<int32_t>(status.code()));
  reply->set_status_message(std::string(status.message()));
  turn.Act(std::move(send));
}

void KeyValue::Put(SessionId session, const v1::KeyValuePut& put, Turn& turn) {
  const auto answer = [&](const absl::Status& status) {
    Reply(session, put.request(), status, "", turn);
  };
  const std::string where =
      absl::StrCat("job ", put.job_id(), " epoch ", put.epoch(), ": bootstrap key ");
  if (put.key().empty() || put.key().size() > kKeyBytesMax || put.value().size() > kValueBytesMax) {
    answer(absl::InvalidArgumentError(
        absl::StrCat(where, "of ", put.key().size(), " bytes with a value of ", put.value().size(),
                     "; allowed are 1-", kKeyBytesMax, " and ", kValueBytesMax)));
    return;
  }
  const schema::KeyValueKey key{JobId(put.job_id()), Epoch(put.epoch()), put.key()};
  Space& space = spaces_[{key.job, key.epoch}];
  if (const auto known = space.values.find(put.key()); known != space.values.end()) {
    answer(known->second == put.value()
               ? absl::OkStatus()
               : absl::AlreadyExistsError(absl::StrCat(where, "'", put.key(), "' has a value")));
    return;
  }
  const size_t bytes = put.key().size() + put.value().size();
  if (space.values.size() >= kKeysPerEpochMax || space.bytes + bytes > kKeyValueBytesPerEpochMax) {
    answer(absl::ResourceExhaustedError(absl::StrCat(where, "'", put.key(), "' is beyond ",
                                                     kKeysPerEpochMax, " keys or ",
                                                     kKeyValueBytesPerEpochMax, " bytes")));
    return;
  }
  space.bytes += bytes;
  space.values[put.key()] = put.value();
  turn.batch().Put(Table::kKeyValue, schema::Encode(key), put.value());
  answer(absl::OkStatus());
  const auto waiting = space.waiters.find(put.key());
  if (waiting == space.waiters.end()) return;
  for (const auto& [waiter, request] : waiting->second) {
    Reply(waiter, request, absl::OkStatus(), put.value(), turn);
  }
  space.waiter_count -= waiting->second.size();
  space.waiters.erase(waiting);
}

void KeyValue::Get(SessionId session, const v1::KeyValueGet& get, Turn& turn) {
  if (get.key().empty() || get.key().size() > kKeyBytesMax) {
    Reply(session, get.request(),
          absl::InvalidArgumentError(absl::StrCat("bootstrap key of ", get.key().size(),
                                                  " bytes; allowed are 1-", kKeyBytesMax)),
          "", turn);
    return;
  }
  Space& space = spaces_[{JobId(get.job_id()), Epoch(get.epoch())}];
  if (const auto known = space.values.find(get.key()); known != space.values.end()) {
    Reply(session, get.request(), absl::OkStatus(), known->second, turn);
    return;
  }
  if (space.waiter_count >= kWaitersPerEpochMax) {
    Reply(session, get.request(),
          absl::ResourceExhaustedError(absl::StrCat("job ", get.job_id(), " epoch ", get.epoch(),
                                                    ": too many wait for bootstrap keys, ",
                                                    kWaitersPerEpochMax)),
          "", turn);
    return;
  }
  if (space.waiters[get.key()].emplace(session, get.request()).second) ++space.waiter_count;
}

void KeyValue::Drop(const JobId& job, Epoch epoch, const absl::Status& over, Turn& turn) {
  const auto it = spaces_.find({job, epoch});
  if (it == spaces_.end()) return;
  for (const auto& [key, value] : it->second.values) {
    turn.batch().Delete(Table::kKeyValue, schema::Encode(schema::KeyValueKey{job, epoch, key}));
  }
  for (const auto& [key, waiters] : it->second.waiters) {
    for (const auto& [session, request] : waiters) Reply(session, request, over, "", turn);
  }
  spaces_.erase(it);
}

void KeyValue::DropSession(SessionId session) {
  for (auto& [epoch, space] : spaces_) {
    for (auto it = space.waiters.begin(); it != space.waiters.end();) {
      std::set<Waiter>& waiters = it->second;
      const auto begin = waiters.lower_bound({session, 0});
      auto end = begin;
      for (; end != waiters.end() && end->first == session; ++end) --space.waiter_count;
      waiters.erase(begin, end);
      it = waiters.empty() ? space.waiters.erase(it) : std::next(it);
    }
  }
}

void KeyValue::Recover(const schema::KeyValueKey& key, std::string value) {
  Space& space = spaces_[{key.job, key.epoch}];
  space.bytes += key.key.size() + value.size();
  space.values[key.key] = std::move(value);
}

std::set<std::pair<JobId, Epoch>> KeyValue::Epochs() const {
  std::set<std::pair<JobId, Epoch>> out;
  for (const auto& [epoch, space] : spaces_) out.insert(epoch);
  return out;
}

}  // namespace muster::coordinator
