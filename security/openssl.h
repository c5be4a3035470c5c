// OpenSSL's objects as owners, and its errors as text. Private to security.
#ifndef MUSTER_SECURITY_OPENSSL_H_
#define MUSTER_SECURITY_OPENSSL_H_

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace muster::security {

template <auto Free>
struct Freed {
  template <typename T>
  void operator()(T* object) const {
    Free(object);
  }
};
using BioPtr = std::unique_ptr<BIO, Freed<BIO_free>>;
using KeyPtr = std::unique_ptr<EVP_PKEY, Freed<EVP_PKEY_free>>;
using X509Ptr = std::unique_ptr<X509, Freed<X509_free>>;
using CrlPtr = std::unique_ptr<X509_CRL, Freed<X509_CRL_free>>;
using StorePtr = std::unique_ptr<X509_STORE, Freed<X509_STORE_free>>;
using StoreContextPtr = std::unique_ptr<X509_STORE_CTX, Freed<X509_STORE_CTX_free>>;
using TimePtr = std::unique_ptr<ASN1_TIME, Freed<ASN1_TIME_free>>;
using IntegerPtr = std::unique_ptr<ASN1_INTEGER, Freed<ASN1_INTEGER_free>>;
using BignumPtr = std::unique_ptr<BIGNUM, Freed<BN_free>>;

// The text that a reader reads; it lives as long as the text.
inline BioPtr Reader(const std::string& text) {
  return BioPtr(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}
// Keys behind a passphrase are not read: nobody is there to type it.
inline int NoPassphrase(char*, int, int, void*) { return 0; }

// What this thread's last failed call of OpenSSL says; forgets it.
inline std::string OpenSslError() {
  const unsigned long code = ERR_peek_last_error();  // NOLINT(google-runtime-int): OpenSSL's type
  char text[256];
  ERR_error_string_n(code, text, sizeof(text));
  ERR_clear_error();
  return code == 0 ? "no reason given" : text;
}

}  // namespace muster::security

#endif  // MUSTER_SECURITY_OPENSSL_H_
