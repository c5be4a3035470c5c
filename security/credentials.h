// TLS for gRPC, from files that are read again while it is used.
#ifndef MUSTER_SECURITY_CREDENTIALS_H_
#define MUSTER_SECURITY_CREDENTIALS_H_

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>

#include <memory>

#include "security/tls_files.h"

namespace muster::security {

// The certificate and key are read again every second; connections that are open keep theirs. A
// caller's certificate is asked for and its key must be proven, but who signed it is for the caller
// of this to check at every call (Authorities): so that a bad one is answered with a reason, and
// one that is revoked is refused on connections that are open. `files` passed CheckServerFiles.
std::shared_ptr<grpc::ServerCredentials> ServerCredentials(const TlsFiles& files);

// The coordinator's certificate must be of `files.authorities` and name the host that was dialled.
// All are read again every second. `files` passed CheckClientFiles.
std::shared_ptr<grpc::ChannelCredentials> ChannelCredentials(const TlsFiles& files);

}  // namespace muster::security

#endif  // MUSTER_SECURITY_CREDENTIALS_H_
