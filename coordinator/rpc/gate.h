// The gate in front of every RPC: who calls, whether they may, how often, and the audit of those
// that were refused. security/authorize.h decides; the gate finds out who calls.
#ifndef MUSTER_COORDINATOR_RPC_GATE_H_
#define MUSTER_COORDINATOR_RPC_GATE_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/loop.h"
#include "base/mutex.h"
#include "coordinator/core/caller.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/issuer_keys.h"
#include "coordinator/rpc/rate_limit.h"
#include "coordinator/rpc/slots.h"
#include "security/access.h"
#include "security/authorize.h"
#include "security/certificates.h"
#include "security/jwt.h"

namespace grpc {
class CallbackServerContext;
}

namespace muster::coordinator {

class Shell;

// How callers prove who they are.
struct GateOptions {
  // Without TLS nobody is asked: every caller may do everything.
  bool tls = false;
  // Files, read again every `reload`; one that cannot be read is logged, and what was read before
  // counts.
  std::string ca;      // authorities that sign the certificates of callers
  std::string crl;     // what they revoked; empty = nothing
  std::string access;  // security/access.h; empty = certificates and tokens say all
  absl::Duration reload = absl::Seconds(2);
  IssuerKeys::Intervals keys;
  // How often it is looked whether the caller of a stream still may read, and reads; a reader that
  // took nothing kStuckTicksMax times in a row is dropped.
  absl::Duration recheck = kRecheckInterval;
  double calls_per_second = 500;  // of one caller, where it is known who calls; 0 = no limit
};

// A caller who may call an RPC, and what they showed.
struct Admitted : Caller {
  using Caller::Caller;
  const security::Rule* rule = nullptr;
  std::string chain;   // their certificates, PEM
  std::string bearer;  // their token

  // Of Slots: a caller whose name is known has slots of their own, wherever they call from.
  std::string slot_key;
};

// What a stream holds.
struct Permit {
  Slots::Slot slot;
  // Whether its caller still may; null: nobody is asked.
  std::function<absl::Status()> recheck;
  std::function<void()> cancel;  // ends the call from outside
  absl::Duration recheck_interval = kRecheckInterval;
};

// Thread-safe.
class Gate {
 public:
  // kInvalidArgument, kNotFound, kUnavailable: a file, which the message names. `shell` and `slots`
  // outlive the gate.
  static absl::StatusOr<std::unique_ptr<Gate>> Make(Shell& shell, Slots& slots,
                                                    const GateOptions& options);
  ~Gate();

  // `target`: the job, worker or token that the call names. `queue`: as of security::Authorize.
  // kUnauthenticated, kPermissionDenied, kResourceExhausted; those are audited.
  absl::StatusOr<Admitted> Admit(const grpc::CallbackServerContext& context, const char* method,
                                 const std::string& target = "",
                                 const std::optional<std::string>& queue = std::nullopt);
  // For one more target of an admitted call, in `queue`: kPermissionDenied, which is audited. It is
  // not counted as a call.
  absl::StatusOr<Admitted> AdmitFurther(const Admitted& caller, const std::string& target,
                                        const std::string& queue);
  // As Admit, and the slot of a stream. `job`: named by the call, whose queue counts where the rule
  // has one; a job that does not exist is the stream's to answer.
  absl::StatusOr<Permit> Open(grpc::CallbackServerContext& context, const char* method,
                              SlotKind kind, const std::string& job = "");
  // Whether an admitted caller still may: their certificate or token is good and their roles reach.
  // Not audited.
  absl::Status Recheck(const Admitted& caller);
  // An entry in the audit log for a call that the core does not see, or that was refused.
  void Audit(const Caller& caller, const absl::Status& status);
  // The slot of an admitted call.
  absl::StatusOr<Slots::Slot> TakeSlot(SlotKind kind, const Admitted& caller);
  bool asks() const { return options_.tls; }

 private:
  // What is believed, as of the last reading of the files.
  struct Trust {
    std::shared_ptr<const security::Authorities> authorities;
    security::Access access;
    std::shared_ptr<const security::JwtVerifier> jwt;  // null: there are no keys, and why
    absl::Status no_keys;
    std::string files;  // all that was read
  };
  struct Identity {
    security::Principal principal;
    std::string proof;
  };
  struct Verified {
    std::shared_ptr<const Trust> trust;
    absl::Time until;
    absl::StatusOr<Identity> identity;
  };

  Gate(Shell& shell, Slots& slots, const GateOptions& options);

  absl::StatusOr<std::shared_ptr<const Trust>> Load();
  void ReloadLater();
  void Reload();
  std::shared_ptr<const Trust> trust() const;

  absl::StatusOr<Identity> Authenticate(const std::string& chain, const std::string& bearer);
  absl::StatusOr<Identity> OfCertificate(const std::string& chain);
  absl::StatusOr<Identity> OfToken(const std::string& bearer);
  absl::StatusOr<Identity> OfIdentityToken(const Trust& trust, const std::string& bearer);
  absl::Status Refuse(const Admitted& caller, const absl::Status& status);

  Shell& shell_;
  Slots& slots_;
  const GateOptions options_;
  RateLimit calls_;
  RateLimit refusals_;  // entries in the audit log

  IssuerKeys keys_;
  mutable Mutex mutex_;
  std::shared_ptr<const Trust> trust_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Verified> verified_ ABSL_GUARDED_BY(mutex_);  // by chain
  std::string last_failure_;                                          // on the loop

  std::unique_ptr<ThreadLoop> loop_;  // last: its work uses the rest
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_GATE_H_
