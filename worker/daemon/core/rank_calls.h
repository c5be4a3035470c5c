// Calls of ranks that wait for the coordinator: bootstrap keys and notices.
#ifndef MUSTER_WORKER_DAEMON_CORE_RANK_CALLS_H_
#define MUSTER_WORKER_DAEMON_CORE_RANK_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "muster/v1/rank.pb.h"
#include "muster/v1/session.pb.h"
#include "worker/daemon/core/events.h"
#include "worker/daemon/core/keys.h"
#include "worker/daemon/core/outbox.h"

namespace muster::worker {

// Forwards each call on the session, again on each new session until it is answered. Calls die with
// the daemon: the rank repeats them to the next one. The caller has checked that the daemon holds
// the attempt.
class RankCalls {
 public:
  explicit RankCalls(Outbox& outbox) : outbox_(outbox) {}

  // kInvalidArgument: key or value is too long. kUnavailable: kKeyValueCallsMax calls or
  // kKeyValueBytesMax bytes wait.
  void Put(CallId call, const v1::PutRequest& request);
  // As Put. All callers that wait for one key share one request.
  void Get(CallId call, const v1::GetRequest& request);
  // Is answered once the notice is durable at the coordinator, which answers what it gets in order
  // and after it has made it durable: the notice is followed by a get without a key, whose reply
  // (INVALID_ARGUMENT, or ABORTED for an attempt that is over) proves it. kInvalidArgument: the
  // notice is empty or has more than kCheckpointBytesMax bytes. kUnavailable: kNoticesMax notices
  // wait.
  void Notify(CallId call, const v1::NotifyRequest& request);

  // The caller is gone. A put ends with it, because its caller repeats it. A get and a notice go
  // on, without a reply: another caller may ask for the key soon, and the caller of a notice may
  // have ended. One that repeats its notice is given the reply of the first.
  void Cancel(CallId call);
  // Ends puts and gets of the attempt with kAborted.
  void EndAttempt(const AttemptKey& key, absl::string_view why);
  // Ends them with kUnavailable: a newer membership has begun, and its ranks will call anew.
  void EndMembership(const AttemptKey& key);

  // The session has been welcomed: sends everything that waits.
  void SendAll();
  // The coordinator has answered a put or a get.
  void Answer(const v1::KeyValueReply& reply);

  // Puts and gets that wait, and the attempts that they belong to.
  size_t key_value_pending() const { return puts_.size() + gets_.size(); }
  std::vector<AttemptKey> KeyValueAttempts() const;

 private:
  using GetKey = std::pair<AttemptKey, std::string>;
  struct PendingPut {
    CallId call;
    v1::KeyValuePut put;
  };
  struct PendingGet {
    uint64_t request = 0;
    uint32_t membership = 0;  // of the ranks that wait
    std::set<CallId> calls;
  };
  struct PendingNotice {
    CallId call;
    v1::RankNotice notice;
  };
  // Ends puts and gets of the attempt.
  void End(const AttemptKey& key, const absl::Status& status);
  std::map<uint64_t, PendingPut>::iterator ErasePut(std::map<uint64_t, PendingPut>::iterator put);
  void SendPut(const PendingPut& put);
  void SendGet(const GetKey& key, const PendingGet& get);
  void SendNotice(uint64_t request, const PendingNotice& notice);

  Outbox& outbox_;
  std::map<uint64_t, PendingPut> puts_;  // by request
  size_t put_bytes_ = 0;                 // of their keys and values
  std::map<GetKey, PendingGet> gets_;
  std::map<uint64_t, PendingNotice> notices_;  // by request of the get that follows
  uint64_t next_request_ = 1;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_CORE_RANK_CALLS_H_
