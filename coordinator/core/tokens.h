// The bearer tokens that the cluster knows: their rows, hashes of secrets included.
#ifndef MUSTER_COORDINATOR_CORE_TOKENS_H_
#define MUSTER_COORDINATOR_CORE_TOKENS_H_

#include <map>
#include <string>

#include "absl/status/status.h"
#include "coordinator/core/turn.h"
#include "coordinator/store/store.h"
#include "muster/v1/stored.pb.h"

namespace muster::coordinator {

// The rows in memory are those of the store plus the batches of turns, ids are unique, and every
// change is told (TokenChanged, TokenForgotten) in the turn that makes it durable. Thread: the
// core's. Bounds: kTokensMax, kEndedTokensKept.
class Tokens {
 public:
  // kDataLoss names the row that cannot be read.
  absl::Status Load(Store& store);
  // Tells of every token, for those that have seen none yet.
  void Announce(Turn& turn) const;

  // Adds the token, made now by `actor`, and forgets those that ended long ago. kResourceExhausted:
  // there are as many as may be. kAlreadyExists: one has its id.
  absl::Status Create(v1::TokenRow row, const std::string& actor, Turn& turn);
  // Does nothing when the token was revoked before. kNotFound.
  absl::Status Revoke(const std::string& id, Turn& turn);

 private:
  static void Put(const v1::TokenRow& row, Turn& turn);
  void ForgetEnded(Turn& turn);

  std::map<std::string, v1::TokenRow> rows_;  // by id
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_TOKENS_H_
