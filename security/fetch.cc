#include "security/fetch.h"

#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#ifdef MUSTER_HAVE_CURL
#include <curl/curl.h>
#endif

namespace muster::security {

absl::Status CheckKeyUrl(const std::string& url) {
  if (absl::StartsWith(url, "https://")) return absl::OkStatus();
  for (const char* host : {"http://127.0.0.1", "http://[::1]", "http://localhost"}) {
    const size_t length = std::char_traits<char>::length(host);
    if (absl::StartsWith(url, host) &&
        (url.size() == length || url[length] == ':' || url[length] == '/')) {
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "'", url, "' is neither a file nor https://...; keys over plain HTTP could be anybody's"));
}

#ifndef MUSTER_HAVE_CURL

absl::StatusOr<std::string> Fetch(const std::string&, absl::Duration) {
  return absl::UnimplementedError(
      "this build has no libcurl (Debian's libcurl4-openssl-dev): name a file");
}

#else

namespace {

constexpr size_t kBytesMax = 1 << 20;

struct Clean {
  void operator()(CURL* handle) const { curl_easy_cleanup(handle); }
};

// Less than all of it ends the transfer.
size_t Append(const char* data, size_t size, size_t count, void* body) {
  std::string& text = *static_cast<std::string*>(body);
  if (text.size() + size * count > kBytesMax) return 0;
  text.append(data, size * count);
  return size * count;
}

}  // namespace

absl::StatusOr<std::string> Fetch(const std::string& url, absl::Duration patience) {
  static const CURLcode started = curl_global_init(CURL_GLOBAL_DEFAULT);
  const std::unique_ptr<CURL, Clean> handle(curl_easy_init());
  if (started != CURLE_OK || handle == nullptr) {
    return absl::UnavailableError("libcurl does not start");
  }
  std::string body;
  char error[CURL_ERROR_SIZE] = "";
  const auto milliseconds = static_cast<long>(absl::ToInt64Milliseconds(patience));  // NOLINT
  curl_easy_setopt(handle.get(), CURLOPT_URL, url.c_str());
  curl_easy_setopt(handle.get(), CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(handle.get(), CURLOPT_FOLLOWLOCATION, 0L);
  curl_easy_setopt(handle.get(), CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(handle.get(), CURLOPT_TIMEOUT_MS, milliseconds);
  curl_easy_setopt(handle.get(), CURLOPT_ERRORBUFFER, error);
  curl_easy_setopt(handle.get(), CURLOPT_WRITEFUNCTION, &Append);
  curl_easy_setopt(handle.get(), CURLOPT_WRITEDATA, &body);
  const CURLcode result = curl_easy_perform(handle.get());
  if (result != CURLE_OK) {
    return absl::UnavailableError(
        absl::StrCat(url, ": ", error[0] == '\0' ? curl_easy_strerror(result) : error));
  }
  long status = 0;  // NOLINT(google-runtime-int): libcurl's type
  curl_easy_getinfo(handle.get(), CURLINFO_RESPONSE_CODE, &status);
  if (status != 200) {
    return absl::UnavailableError(absl::StrCat(url, ": answered with status ", status));
  }
  return body;
}

#endif

}  // namespace muster::security
