#include "security/certificates.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "security/openssl.h"

namespace muster::security {
namespace {

constexpr char kOrganizationPrefix[] = "muster:";
constexpr char kWorkerOrganization[] = "worker";

absl::Time TimeOf(const ASN1_TIME* time) {
  std::tm fields = {};
  if (ASN1_TIME_to_tm(time, &fields) != 1) return absl::InfinitePast();
  return absl::FromTM(fields, absl::UTCTimeZone());
}

std::string TextOf(const ASN1_STRING* string) {
  unsigned char* text = nullptr;
  const int length = ASN1_STRING_to_UTF8(&text, string);
  if (length < 0) {
    ERR_clear_error();
    return "";
  }
  std::string out(reinterpret_cast<char*>(text), static_cast<size_t>(length));
  OPENSSL_free(text);
  return out;
}

std::vector<std::string> EntriesOf(const X509_NAME* name, int nid) {
  std::vector<std::string> out;
  for (int at = X509_NAME_get_index_by_NID(name, nid, -1); at >= 0;
       at = X509_NAME_get_index_by_NID(name, nid, at)) {
    out.push_back(TextOf(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(name, at))));
  }
  return out;
}

std::string AddressOf(const ASN1_OCTET_STRING* bytes) {
  const unsigned char* data = ASN1_STRING_get0_data(bytes);
  if (ASN1_STRING_length(bytes) == 4) {
    return absl::StrCat(data[0], ".", data[1], ".", data[2], ".", data[3]);
  }
  std::string out;
  for (int i = 0; i + 1 < ASN1_STRING_length(bytes); i += 2) {
    absl::StrAppend(&out, i == 0 ? "" : ":", absl::Hex(data[i] << 8 | data[i + 1]));
  }
  return out;
}

std::vector<X509Ptr> ReadAll(const std::string& pem) {
  std::vector<X509Ptr> out;
  const BioPtr reader = Reader(pem);
  while (X509Ptr next{PEM_read_bio_X509(reader.get(), nullptr, NoPassphrase, nullptr)}) {
    out.push_back(std::move(next));
  }
  ERR_clear_error();  // the end is an error, too
  return out;
}

// NAME of a URI whose path ends in /`kind`/NAME; empty: it does not.
std::string NameIn(const std::string& uri, absl::string_view kind) {
  const size_t scheme = uri.find("://");
  const size_t slash = uri.rfind('/');
  if (scheme == std::string::npos || slash == std::string::npos || slash < scheme + 3) return "";
  const absl::string_view before = absl::string_view(uri).substr(scheme + 3, slash - scheme - 3);
  return absl::EndsWith(before, absl::StrCat("/", kind)) ? uri.substr(slash + 1) : "";
}

class OpenSslAuthorities : public Authorities {
 public:
  explicit OpenSslAuthorities(StorePtr store) : store_(std::move(store)) {}

  absl::Status Verify(const std::string& chain_pem, absl::Time now) const override {
    std::vector<X509Ptr> chain = ReadAll(chain_pem);
    if (chain.empty()) return absl::UnauthenticatedError("the certificate cannot be read");
    STACK_OF(X509)* between = sk_X509_new_null();
    for (size_t i = 1; i < chain.size(); ++i) sk_X509_push(between, chain[i].get());
    const StoreContextPtr context(X509_STORE_CTX_new());
    absl::Status status;
    if (X509_STORE_CTX_init(context.get(), store_.get(), chain[0].get(), between) != 1) {
      status = absl::UnauthenticatedError(OpenSslError());
    } else {
      X509_STORE_CTX_set_time(context.get(), 0, absl::ToTimeT(now));
      X509_STORE_CTX_set_purpose(context.get(), X509_PURPOSE_SSL_CLIENT);
      if (X509_verify_cert(context.get()) != 1) {
        status = absl::UnauthenticatedError(
            X509_verify_cert_error_string(X509_STORE_CTX_get_error(context.get())));
      }
      ERR_clear_error();
    }
    sk_X509_free(between);
    return status;
  }

 private:
  const StorePtr store_;
};

}  // namespace

absl::StatusOr<Certificate> ReadCertificate(const std::string& pem) {
  const BioPtr reader = Reader(pem);
  const X509Ptr x509(PEM_read_bio_X509(reader.get(), nullptr, NoPassphrase, nullptr));
  if (x509 == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("no certificate in PEM format (", OpenSslError(), ")"));
  }
  Certificate out;
  const BignumPtr serial(ASN1_INTEGER_to_BN(X509_get0_serialNumber(x509.get()), nullptr));
  if (char* hex = serial == nullptr ? nullptr : BN_bn2hex(serial.get()); hex != nullptr) {
    out.serial = hex;
    OPENSSL_free(hex);
  }
  const X509_NAME* subject = X509_get_subject_name(x509.get());
  const std::vector<std::string> names = EntriesOf(subject, NID_commonName);
  if (!names.empty()) out.common_name = names.front();
  out.organizations = EntriesOf(subject, NID_organizationName);
  out.not_before = TimeOf(X509_get0_notBefore(x509.get()));
  out.not_after = TimeOf(X509_get0_notAfter(x509.get()));
  auto* alternatives = static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(x509.get(), NID_subject_alt_name, nullptr, nullptr));
  for (int i = 0; i < sk_GENERAL_NAME_num(alternatives); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(alternatives, i);
    if (name->type == GEN_URI) out.uris.push_back(TextOf(name->d.uniformResourceIdentifier));
    if (name->type == GEN_DNS) out.hosts.push_back(TextOf(name->d.dNSName));
    if (name->type == GEN_IPADD) out.hosts.push_back(AddressOf(name->d.iPAddress));
  }
  GENERAL_NAMES_free(alternatives);
  ERR_clear_error();
  return out;
}

absl::StatusOr<Validity> ReadValidity(const std::string& pem) {
  Validity all = {absl::InfinitePast(), absl::InfiniteFuture()};
  const auto narrow = [&all](const ASN1_TIME* begin, const ASN1_TIME* end) {
    all.not_before = std::max(all.not_before, TimeOf(begin));
    if (end != nullptr) all.not_after = std::min(all.not_after, TimeOf(end));
  };
  for (const X509Ptr& certificate : ReadAll(pem)) {
    narrow(X509_get0_notBefore(certificate.get()), X509_get0_notAfter(certificate.get()));
  }
  const BioPtr reader = Reader(pem);
  while (const CrlPtr list{PEM_read_bio_X509_CRL(reader.get(), nullptr, NoPassphrase, nullptr)}) {
    narrow(X509_CRL_get0_lastUpdate(list.get()), X509_CRL_get0_nextUpdate(list.get()));
  }
  ERR_clear_error();  // the end is an error, too
  if (all.not_after == absl::InfiniteFuture()) {
    return absl::InvalidArgumentError("no certificate or revocation list that ends");
  }
  return all;
}

absl::Status CheckKeyPair(const std::string& certificate_pem, const std::string& key_pem) {
  const BioPtr certificate_reader = Reader(certificate_pem);
  const X509Ptr x509(PEM_read_bio_X509(certificate_reader.get(), nullptr, NoPassphrase, nullptr));
  if (x509 == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("the certificate is not in PEM format (", OpenSslError(), ")"));
  }
  const BioPtr key_reader = Reader(key_pem);
  const KeyPtr key(PEM_read_bio_PrivateKey(key_reader.get(), nullptr, NoPassphrase, nullptr));
  if (key == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the private key is not in PEM format, or behind a passphrase (", OpenSslError(), ")"));
  }
  if (X509_check_private_key(x509.get(), key.get()) != 1) {
    ERR_clear_error();
    return absl::InvalidArgumentError("the private key is not that of the certificate");
  }
  return absl::OkStatus();
}

absl::StatusOr<Named> WhoIs(const Certificate& certificate) {
  Named named;
  std::vector<std::string> workers, users;
  for (const std::string& uri : certificate.uris) {
    if (std::string name = NameIn(uri, "worker"); !name.empty()) workers.push_back(name);
    if (std::string name = NameIn(uri, "user"); !name.empty()) users.push_back(name);
  }
  for (const std::string& organization : certificate.organizations) {
    absl::string_view role = organization;
    if (!absl::ConsumePrefix(&role, kOrganizationPrefix)) {
      named.groups.push_back(organization);
    } else if (role == kWorkerOrganization) {
      if (workers.empty()) workers.push_back(certificate.common_name);
    } else {
      ASSIGN_OR_RETURN(Grant grant, ParseGrant(role));
      named.principal.grants.push_back(std::move(grant));
    }
  }
  if (workers.size() + users.size() > 1 || (!workers.empty() && !named.principal.grants.empty())) {
    return absl::InvalidArgumentError(
        "the certificate names more than one worker or user; one certificate is one identity");
  }
  if (!workers.empty()) {
    named.principal.kind = Principal::Kind::kWorker;
    named.principal.name = workers.front();
    named.groups.clear();
  } else {
    named.principal.kind = Principal::Kind::kUser;
    named.principal.name = users.empty() ? certificate.common_name : users.front();
  }
  if (const absl::Status status = CheckPrincipalName(named.principal.name); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the certificate with serial ", certificate.serial, " names nobody: ", status.message()));
  }
  return named;
}

absl::StatusOr<std::shared_ptr<const Authorities>> Authorities::Make(const std::string& ca_pem,
                                                                     const std::string& crl_pem) {
  StorePtr store(X509_STORE_new());
  const std::vector<X509Ptr> authorities = ReadAll(ca_pem);
  if (authorities.empty()) {
    return absl::InvalidArgumentError("no certificate of an authority in PEM format");
  }
  for (const X509Ptr& authority : authorities) {
    if (X509_STORE_add_cert(store.get(), authority.get()) != 1) {
      return absl::InvalidArgumentError(absl::StrCat("an authority: ", OpenSslError()));
    }
  }
  // An authority that another one signed is trusted by itself.
  uint64_t flags = X509_V_FLAG_PARTIAL_CHAIN;
  if (!crl_pem.empty()) {
    const BioPtr reader = Reader(crl_pem);
    int lists = 0;
    while (CrlPtr list{PEM_read_bio_X509_CRL(reader.get(), nullptr, NoPassphrase, nullptr)}) {
      X509_STORE_add_crl(store.get(), list.get());
      ++lists;
    }
    ERR_clear_error();
    if (lists == 0) return absl::InvalidArgumentError("no revocation list in PEM format");
    flags |= X509_V_FLAG_CRL_CHECK;
  }
  X509_STORE_set_flags(store.get(), flags);
  return std::make_shared<OpenSslAuthorities>(std::move(store));
}

}  // namespace muster::security
