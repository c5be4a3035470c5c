#include "security/pki.h"

#include <fcntl.h>
#include <openssl/rand.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "base/file_system.h"
#include "base/network.h"
#include "base/status_macros.h"
#include "security/certificates.h"
#include "security/openssl.h"

namespace muster::security {

struct Pki::Names {
  std::string common_name;
  std::vector<std::string> organizations;
  std::vector<std::string> uris;
  std::vector<std::string> hosts;
  bool server = false;
};

namespace {

// Clocks of machines differ.
constexpr absl::Duration kBackdated = absl::Minutes(5);
constexpr absl::Duration kLifetimeMin = absl::Minutes(1);
constexpr char kTrustDomain[] = "spiffe://muster";

struct Authority {
  X509Ptr certificate;
  KeyPtr key;
};

absl::Status Failed(const std::string& what) {
  return absl::InternalError(absl::StrCat(what, ": ", OpenSslError()));
}

// ---- files

absl::Status WriteNew(const std::string& path, const std::string& text, mode_t mode) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode);
  if (fd < 0 && errno == EEXIST) {
    return absl::AlreadyExistsError(
        absl::StrCat(path, " exists, and is not overwritten; move it away, or see `rotate`"));
  }
  bool written = fd >= 0;
  for (size_t done = 0; written && done < text.size();) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    written = n > 0;
    done += n > 0 ? static_cast<size_t>(n) : 0;
  }
  written = written && ::fsync(fd) == 0;
  const std::string why = std::strerror(errno);
  if (fd >= 0) ::close(fd);
  if (!written) return absl::UnavailableError(absl::StrCat(path, ": ", why));
  return absl::OkStatus();
}

absl::Status Write(const std::string& path, const std::string& text, mode_t mode, bool replace) {
  if (!replace) return WriteNew(path, text, mode);
  const std::string partial = path + ".new";
  ::unlink(partial.c_str());
  RETURN_IF_ERROR(WriteNew(partial, text, mode));
  if (::rename(partial.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(absl::StrCat(path, ": ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Read(const std::string& path) {
  absl::StatusOr<std::string> text = PosixFileSystem()->Read(path);
  if (absl::IsNotFound(text.status()) && absl::EndsWith(path, "/ca.key")) {
    return absl::NotFoundError(absl::StrCat(
        path,
        " is not there: make an authority with `muster admin pki init`, or give its directory "
        "with --pki-dir"));
  }
  return text;
}

// ---- PEM

template <typename Object, typename Writer>
std::string Pem(Object* object, Writer writer) {
  const BioPtr bio(BIO_new(BIO_s_mem()));
  writer(bio.get(), object);
  char* data = nullptr;
  const long length = BIO_get_mem_data(bio.get(), &data);  // NOLINT(google-runtime-int)
  return std::string(data, static_cast<size_t>(std::max(length, 0L)));
}
std::string PemOf(X509* certificate) { return Pem(certificate, PEM_write_bio_X509); }
std::string PemOf(X509_CRL* list) { return Pem(list, PEM_write_bio_X509_CRL); }
std::string PemOf(EVP_PKEY* key) {
  return Pem(key, [](BIO* bio, EVP_PKEY* k) {
    return PEM_write_bio_PrivateKey(bio, k, nullptr, nullptr, 0, nullptr, nullptr);
  });
}

template <typename Ptr, typename Read>
std::vector<Ptr> ReadAll(const std::string& pem, Read read) {
  std::vector<Ptr> out;
  const BioPtr reader = Reader(pem);
  while (Ptr next{read(reader.get(), nullptr, NoPassphrase, nullptr)}) {
    out.push_back(std::move(next));
  }
  ERR_clear_error();
  return out;
}
std::vector<X509Ptr> CertificatesIn(const std::string& pem) {
  return ReadAll<X509Ptr>(pem, PEM_read_bio_X509);
}

// Newest first.
absl::StatusOr<std::vector<Authority>> ReadAuthorities(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::string keys_pem, Read(directory + "/ca.key"));
  ASSIGN_OR_RETURN(const std::string certificates_pem, Read(directory + "/ca.crt"));
  std::vector<KeyPtr> keys = ReadAll<KeyPtr>(keys_pem, PEM_read_bio_PrivateKey);
  std::vector<X509Ptr> certificates = CertificatesIn(certificates_pem);
  std::vector<Authority> out;
  if (keys.size() == certificates.size()) {
    for (size_t i = 0; i < keys.size(); ++i) {
      if (X509_check_private_key(certificates[i].get(), keys[i].get()) != 1) {
        ERR_clear_error();
        break;
      }
      out.push_back({std::move(certificates[i]), std::move(keys[i])});
    }
  }
  if (out.empty() || out.size() != keys.size()) {
    return absl::DataLossError(absl::StrCat(
        directory,
        ": ca.key and ca.crt are not the keys and certificates of the same authorities, "
        "in the same order"));
  }
  return out;
}

// ---- objects

absl::Status SetNumberAndTimes(X509* certificate, absl::Time from, absl::Time until) {
  unsigned char bytes[16];
  if (RAND_bytes(bytes, sizeof(bytes)) != 1) return Failed("a serial number");
  bytes[0] = static_cast<unsigned char>((bytes[0] & 0x7F) | 0x40);  // positive, and never short
  const BignumPtr number(BN_bin2bn(bytes, sizeof(bytes), nullptr));
  X509_set_version(certificate, 2);  // version 3
  if (BN_to_ASN1_INTEGER(number.get(), X509_get_serialNumber(certificate)) == nullptr ||
      ASN1_TIME_set(X509_getm_notBefore(certificate), absl::ToTimeT(from)) == nullptr ||
      ASN1_TIME_set(X509_getm_notAfter(certificate), absl::ToTimeT(until)) == nullptr) {
    return Failed("a certificate");
  }
  return absl::OkStatus();
}

absl::Status AddName(X509_NAME* name, const char* field, const std::string& text) {
  if (X509_NAME_add_entry_by_txt(name, field, MBSTRING_UTF8,
                                 reinterpret_cast<const unsigned char*>(text.data()),
                                 static_cast<int>(text.size()), -1, 0) == 1) {
    return absl::OkStatus();
  }
  ERR_clear_error();
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is too long for a certificate (", field, ": 64 characters)"));
}

absl::Status AddExtension(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  if (extension == nullptr) return Failed(absl::StrCat("the extension ", OBJ_nid2sn(nid)));
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
  return absl::OkStatus();
}

absl::StatusOr<Authority> NewAuthority(const std::string& cluster, absl::Time now) {
  Authority out{X509Ptr(X509_new()), KeyPtr(EVP_EC_gen("P-256"))};
  X509* certificate = out.certificate.get();
  if (out.key == nullptr) return Failed("a key");
  RETURN_IF_ERROR(SetNumberAndTimes(certificate, now - kBackdated, now + Pki::kAuthorityLifetime));
  X509_NAME* name = X509_get_subject_name(certificate);
  // Two authorities must not share a name: their revocation lists are told apart by it.
  RETURN_IF_ERROR(
      AddName(name, "CN",
              absl::StrCat("muster ", cluster, " authority ",
                           absl::FormatTime("%Y%m%dT%H%M%E3S", now, absl::UTCTimeZone()))));
  X509_set_issuer_name(certificate, name);
  X509_set_pubkey(certificate, out.key.get());
  RETURN_IF_ERROR(
      AddExtension(certificate, certificate, NID_basic_constraints, "critical,CA:TRUE,pathlen:0"));
  RETURN_IF_ERROR(
      AddExtension(certificate, certificate, NID_key_usage, "critical,keyCertSign,cRLSign"));
  RETURN_IF_ERROR(AddExtension(certificate, certificate, NID_subject_key_identifier, "hash"));
  if (X509_sign(certificate, out.key.get(), EVP_sha256()) == 0) return Failed("a signature");
  return out;
}

absl::StatusOr<CrlPtr> NewList(const Authority& authority, const X509_CRL* before,
                               const X509* revoked, absl::Time now) {
  CrlPtr list(X509_CRL_new());
  X509_CRL_set_version(list.get(), 1);
  X509_CRL_set_issuer_name(list.get(), X509_get_subject_name(authority.certificate.get()));
  const TimePtr made(ASN1_TIME_set(nullptr, absl::ToTimeT(now - kBackdated)));
  X509_CRL_set1_lastUpdate(list.get(), made.get());
  // For as long as the authority: a list that nobody renews must not shut the cluster.
  X509_CRL_set1_nextUpdate(list.get(), X509_get0_notAfter(authority.certificate.get()));
  const auto add = [&](const ASN1_INTEGER* serial, const ASN1_TIME* at) {
    X509_REVOKED* entry = X509_REVOKED_new();
    X509_REVOKED_set_serialNumber(entry, const_cast<ASN1_INTEGER*>(serial));
    X509_REVOKED_set_revocationDate(entry, const_cast<ASN1_TIME*>(at));
    X509_CRL_add0_revoked(list.get(), entry);
  };
  bool known = false;
  if (before != nullptr) {
    STACK_OF(X509_REVOKED)* entries = X509_CRL_get_REVOKED(const_cast<X509_CRL*>(before));
    for (int i = 0; i < sk_X509_REVOKED_num(entries); ++i) {
      const X509_REVOKED* entry = sk_X509_REVOKED_value(entries, i);
      const ASN1_INTEGER* serial = X509_REVOKED_get0_serialNumber(entry);
      known |= revoked != nullptr && ASN1_INTEGER_cmp(serial, X509_get0_serialNumber(revoked)) == 0;
      add(serial, X509_REVOKED_get0_revocationDate(entry));
    }
  }
  if (revoked != nullptr && !known) add(X509_get0_serialNumber(revoked), made.get());
  X509_CRL_sort(list.get());
  if (X509_CRL_sign(list.get(), authority.key.get(), EVP_sha256()) == 0) return Failed("a list");
  return list;
}

std::string CertificatesPem(const std::vector<Authority>& authorities) {
  std::string out;
  for (const Authority& authority : authorities) out += PemOf(authority.certificate.get());
  return out;
}
std::string KeysPem(const std::vector<Authority>& authorities) {
  std::string out;
  for (const Authority& authority : authorities) out += PemOf(authority.key.get());
  return out;
}

// The lists of all authorities, with `revoked` in that of its issuer; null adds nothing.
absl::StatusOr<std::string> ListsPem(const std::vector<Authority>& authorities,
                                     const std::string& before, const X509* revoked,
                                     absl::Time now) {
  const auto lists = ReadAll<CrlPtr>(before, PEM_read_bio_X509_CRL);
  std::string out;
  bool issued = revoked == nullptr;
  for (const Authority& authority : authorities) {
    const X509_NAME* name = X509_get_subject_name(authority.certificate.get());
    const X509_CRL* list = nullptr;
    for (const CrlPtr& one : lists) {
      if (X509_NAME_cmp(X509_CRL_get_issuer(one.get()), name) == 0) list = one.get();
    }
    const bool own = revoked != nullptr && X509_NAME_cmp(X509_get_issuer_name(revoked), name) == 0;
    issued |= own;
    ASSIGN_OR_RETURN(const CrlPtr made, NewList(authority, list, own ? revoked : nullptr, now));
    out += PemOf(made.get());
  }
  if (!issued) {
    return absl::InvalidArgumentError("the certificate is of none of the authorities in ca.crt");
  }
  return out;
}

// Files of servers that are not the coordinator begin so.
constexpr absl::string_view kMetricsFiles = "metrics-";

// In a file name.
absl::Status CheckFileName(const std::string& name) {
  RETURN_IF_ERROR(CheckPrincipalName(name));
  if (absl::StrContains(name, "/") || name[0] == '.' || absl::StrContains(name, ",")) {
    return absl::InvalidArgumentError(
        absl::StrCat("the name '", name, "' has a slash or comma, or begins with a dot"));
  }
  return absl::OkStatus();
}

absl::Status CheckHost(const std::string& host) {
  bool sound = !host.empty() && host.size() <= 253;
  for (const char c : host) {
    sound &= absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-' ||
             c == '*' || c == ':';
  }
  if (sound && (IsIpAddress(host) || !absl::StrContains(host, ":"))) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--host: '", host, "' is no DNS name and no IP address (give it without a port)"));
}

}  // namespace

absl::StatusOr<Issued> Pki::Init(const std::string& cluster, const std::vector<std::string>& hosts,
                                 absl::Duration lifetime) {
  RETURN_IF_ERROR(CheckFileName(cluster));
  Names names;
  names.common_name = "coordinator";
  names.server = true;
  names.hosts = hosts;
  for (const char* host : {"localhost", "127.0.0.1", "::1"}) names.hosts.push_back(host);
  for (const std::string& host : names.hosts) RETURN_IF_ERROR(CheckHost(host));
  if (::mkdir(directory_.c_str(), 0700) != 0 && errno != EEXIST) {
    return absl::UnavailableError(absl::StrCat(directory_, ": ", std::strerror(errno)));
  }
  std::vector<Authority> authorities(1);
  ASSIGN_OR_RETURN(authorities[0], NewAuthority(cluster, now_));
  ASSIGN_OR_RETURN(const std::string lists, ListsPem(authorities, "", nullptr, now_));
  // The certificate first: an existing authority is found before anything is written.
  RETURN_IF_ERROR(Write(Path("ca.crt"), CertificatesPem(authorities), 0644, false));
  RETURN_IF_ERROR(Write(Path("ca.key"), KeysPem(authorities), 0600, false));
  RETURN_IF_ERROR(Write(Path("ca.crl"), lists, 0644, false));
  return Issue("coordinator", names, lifetime, false);
}

absl::StatusOr<Issued> Pki::IssueWorker(const std::string& worker, absl::Duration lifetime) {
  RETURN_IF_ERROR(CheckFileName(worker));
  Names names;
  names.common_name = worker.substr(0, 64);
  names.organizations = {"muster:worker"};
  names.uris = {absl::StrCat(kTrustDomain, "/worker/", worker)};
  return Issue(absl::StrCat("worker-", worker == "*" ? "any" : worker), names, lifetime, false);
}

absl::StatusOr<Issued> Pki::IssueUser(const std::string& user, const std::vector<Grant>& roles,
                                      absl::Duration lifetime) {
  RETURN_IF_ERROR(CheckFileName(user));
  if (user == "*") return absl::InvalidArgumentError("a user's certificate names one user");
  Names names;
  names.common_name = user.substr(0, 64);
  for (const Grant& role : roles) {
    names.organizations.push_back(absl::StrCat("muster:", ToString(role)));
  }
  names.uris = {absl::StrCat(kTrustDomain, "/user/", user)};
  return Issue(absl::StrCat("user-", user), names, lifetime, false);
}

absl::StatusOr<Issued> Pki::IssueMetrics(const std::vector<std::string>& hosts,
                                         absl::Duration lifetime) {
  for (const std::string& host : hosts) RETURN_IF_ERROR(CheckHost(host));
  if (hosts.empty()) return absl::InvalidArgumentError("a server's certificate names its hosts");
  Names names;
  names.common_name = hosts.front().substr(0, 64);
  names.server = true;
  names.hosts = hosts;
  return Issue(absl::StrCat(kMetricsFiles, absl::StrReplaceAll(hosts.front(), {{"*", "any"}})),
               names, lifetime, false);
}

absl::StatusOr<Issued> Pki::Issue(const std::string& base, const Names& names,
                                  absl::Duration lifetime, bool replace) {
  ASSIGN_OR_RETURN(const std::vector<Authority> authorities, ReadAuthorities(directory_));
  X509* issuer = authorities[0].certificate.get();
  ASSIGN_OR_RETURN(const Certificate authority, ReadCertificate(PemOf(issuer)));
  if (lifetime < kLifetimeMin || now_ + lifetime > authority.not_after) {
    return absl::InvalidArgumentError(
        absl::StrCat("a lifetime of ", absl::FormatDuration(lifetime),
                     " is not between a minute and the end of the authority, ",
                     absl::FormatTime("%Y-%m-%d", authority.not_after, absl::UTCTimeZone()),
                     "; `muster admin pki rotate --new-authority` makes another"));
  }
  const KeyPtr key(EVP_EC_gen("P-256"));
  const X509Ptr certificate(X509_new());
  if (key == nullptr) return Failed("a key");
  RETURN_IF_ERROR(SetNumberAndTimes(certificate.get(), now_ - kBackdated, now_ + lifetime));
  X509_NAME* subject = X509_get_subject_name(certificate.get());
  for (const std::string& one : names.organizations) RETURN_IF_ERROR(AddName(subject, "O", one));
  RETURN_IF_ERROR(AddName(subject, "CN", names.common_name));
  X509_set_issuer_name(certificate.get(), X509_get_subject_name(issuer));
  X509_set_pubkey(certificate.get(), key.get());
  std::vector<std::string> alternatives;
  for (const std::string& uri : names.uris) alternatives.push_back("URI:" + uri);
  for (const std::string& host : names.hosts) {
    alternatives.push_back(absl::StrCat(IsIpAddress(host) ? "IP:" : "DNS:", host));
  }
  const std::vector<std::pair<int, std::string>> extensions = {
      {NID_basic_constraints, "critical,CA:FALSE"},
      {NID_key_usage, "critical,digitalSignature"},
      {NID_ext_key_usage, names.server ? "serverAuth" : "clientAuth"},
      {NID_subject_key_identifier, "hash"},
      {NID_authority_key_identifier, "keyid:always"},
      {NID_subject_alt_name, absl::StrJoin(alternatives, ",")},
  };
  for (const auto& [nid, value] : extensions) {
    RETURN_IF_ERROR(AddExtension(certificate.get(), issuer, nid, value));
  }
  if (X509_sign(certificate.get(), authorities[0].key.get(), EVP_sha256()) == 0) {
    return Failed("a signature");
  }
  Issued issued{Path(base + ".crt"), Path(base + ".key"), now_ + lifetime};
  if (!replace && PosixFileSystem()->Exists(issued.certificate)) {
    return absl::AlreadyExistsError(absl::StrCat(
        issued.certificate, " exists, and is not overwritten; move it away, or see `rotate`"));
  }
  RETURN_IF_ERROR(Write(issued.key, PemOf(key.get()), 0600, replace));
  RETURN_IF_ERROR(Write(issued.certificate, PemOf(certificate.get()), 0644, replace));
  return issued;
}

absl::StatusOr<std::vector<Issued>> Pki::Rotate(absl::Duration before) {
  ASSIGN_OR_RETURN(const std::vector<std::string> files, PosixFileSystem()->List(directory_));
  std::vector<Issued> out;
  for (const std::string& file : files) {
    if (file == "ca.crt" || !absl::EndsWith(file, ".crt")) continue;
    ASSIGN_OR_RETURN(const std::string pem, Read(Path(file)));
    absl::StatusOr<Certificate> old = ReadCertificate(pem);
    if (!old.ok()) {
      return absl::DataLossError(absl::StrCat(Path(file), ": ", old.status().message()));
    }
    if (old->not_after > now_ + before) continue;
    const std::string base = file.substr(0, file.size() - 4);
    const Names names{old->common_name, old->organizations, old->uris, old->hosts,
                      base == "coordinator" || absl::StartsWith(base, kMetricsFiles)};
    ASSIGN_OR_RETURN(
        Issued issued,
        Issue(base, names, old->not_after - old->not_before - kBackdated, /*replace=*/true));
    out.push_back(std::move(issued));
  }
  return out;
}

absl::Status Pki::AddAuthority() {
  ASSIGN_OR_RETURN(std::vector<Authority> authorities, ReadAuthorities(directory_));
  ASSIGN_OR_RETURN(Authority fresh, NewAuthority("cluster", now_));
  authorities.insert(authorities.begin(), std::move(fresh));
  const absl::StatusOr<std::string> lists = Read(Path("ca.crl"));
  ASSIGN_OR_RETURN(const std::string renewed,
                   ListsPem(authorities, lists.value_or(""), nullptr, now_));
  RETURN_IF_ERROR(Write(Path("ca.crl"), renewed, 0644, true));
  RETURN_IF_ERROR(Write(Path("ca.key"), KeysPem(authorities), 0600, true));
  return Write(Path("ca.crt"), CertificatesPem(authorities), 0644, true);
}

absl::Status Pki::RetireAuthorities() {
  ASSIGN_OR_RETURN(std::vector<Authority> authorities, ReadAuthorities(directory_));
  authorities.resize(1);
  ASSIGN_OR_RETURN(const std::vector<std::string> files, PosixFileSystem()->List(directory_));
  for (const std::string& file : files) {
    if (file == "ca.crt" || !absl::EndsWith(file, ".crt")) continue;
    ASSIGN_OR_RETURN(const std::string pem, Read(Path(file)));
    const std::vector<X509Ptr> certificates = CertificatesIn(pem);
    if (!certificates.empty() &&
        X509_verify(certificates[0].get(), authorities[0].key.get()) != 1) {
      ERR_clear_error();
      return absl::FailedPreconditionError(
          absl::StrCat(Path(file),
                       " is of an older authority; issue it again with `muster admin pki "
                       "rotate --before 3650d` first, or move it away"));
    }
  }
  ASSIGN_OR_RETURN(const std::string lists, Read(Path("ca.crl")));
  ASSIGN_OR_RETURN(const std::string renewed, ListsPem(authorities, lists, nullptr, now_));
  RETURN_IF_ERROR(Write(Path("ca.crt"), CertificatesPem(authorities), 0644, true));
  RETURN_IF_ERROR(Write(Path("ca.key"), KeysPem(authorities), 0600, true));
  return Write(Path("ca.crl"), renewed, 0644, true);
}

absl::Status Pki::Revoke(const std::string& certificate_path) {
  ASSIGN_OR_RETURN(const std::vector<Authority> authorities, ReadAuthorities(directory_));
  std::vector<X509Ptr> revoked;
  if (!certificate_path.empty()) {
    ASSIGN_OR_RETURN(const std::string pem, Read(certificate_path));
    revoked = CertificatesIn(pem);
    if (revoked.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(certificate_path, ": no certificate in PEM format"));
    }
  }
  const absl::StatusOr<std::string> lists = Read(Path("ca.crl"));
  ASSIGN_OR_RETURN(const std::string renewed,
                   ListsPem(authorities, lists.value_or(""),
                            revoked.empty() ? nullptr : revoked[0].get(), now_));
  return Write(Path("ca.crl"), renewed, 0644, true);
}

}  // namespace muster::security
