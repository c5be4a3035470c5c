#include "security/tls_files.h"

#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "base/status_macros.h"

namespace muster::security {
namespace {

absl::StatusOr<std::string> Read(const std::string& path, const char* flag) {
  absl::StatusOr<std::string> text = PosixFileSystem()->Read(path);
  if (text.ok()) return text;
  return absl::InvalidArgumentError(
      absl::StrCat(flag, ": cannot read it: ", text.status().message()));
}

absl::Status CheckPair(const TlsFiles& files, absl::Time now) {
  ASSIGN_OR_RETURN(const std::string certificate, Read(files.certificate, "--tls-cert"));
  ASSIGN_OR_RETURN(const std::string key, Read(files.key, "--tls-key"));
  if (const absl::Status pair = CheckKeyPair(certificate, key); !pair.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--tls-cert ", files.certificate, " and --tls-key ", files.key, ": ", pair.message()));
  }
  absl::StatusOr<Certificate> read = ReadCertificate(certificate);
  if (!read.ok()) return absl::InvalidArgumentError(read.status().message());
  if (now >= read->not_after) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tls-cert ", files.certificate, ": the certificate ended on ",
                     absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", read->not_after, absl::UTCTimeZone()),
                     "; issue another (`muster admin pki rotate`)"));
  }
  return absl::OkStatus();
}

absl::Status CheckAuthorities(const TlsFiles& files) {
  ASSIGN_OR_RETURN(const std::string pem, Read(files.authorities, "--tls-ca"));
  const auto authorities = Authorities::Make(pem, "");
  if (authorities.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--tls-ca ", files.authorities, ": ", authorities.status().message()));
}

}  // namespace

absl::Status CheckServerFiles(const TlsFiles& files, absl::Time now) {
  if (files.certificate.empty() || files.key.empty() || files.authorities.empty()) {
    return absl::InvalidArgumentError(
        "TLS needs --tls-cert, --tls-key and --tls-ca, all three; `muster admin pki init` makes "
        "them");
  }
  RETURN_IF_ERROR(CheckPair(files, now));
  return CheckAuthorities(files);
}

absl::Status CheckClientFiles(const TlsFiles& files, absl::Time now) {
  if (files.authorities.empty()) {
    return absl::InvalidArgumentError(
        "--tls-cert and --tls-key need --tls-ca beside them: the authority of the coordinator's "
        "certificate");
  }
  if (files.certificate.empty() != files.key.empty()) {
    return absl::InvalidArgumentError("--tls-cert and --tls-key belong together: give both");
  }
  if (!files.certificate.empty()) RETURN_IF_ERROR(CheckPair(files, now));
  return CheckAuthorities(files);
}

std::map<std::string, Validity> ReadValidities(const TlsFiles& files,
                                               const std::string& revocations,
                                               const std::map<std::string, std::string>& more) {
  std::map<std::string, Validity> out;
  const auto add = [&out](const std::string& flag, const std::string& path) {
    if (path.empty()) return;
    const absl::StatusOr<std::string> text = PosixFileSystem()->Read(path);
    out[flag] = (text.ok() ? ReadValidity(*text) : text.status())
                    .value_or(Validity{absl::UnixEpoch(), absl::UnixEpoch()});
  };
  add("tls-cert", files.certificate);
  add("tls-ca", files.authorities);
  add("tls-crl", revocations);
  for (const auto& [flag, path] : more) add(flag, path);
  return out;
}

}  // namespace muster::security
