#include "coordinator/rpc/usage.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "coordinator/core/device_account.h"
#include "coordinator/core/schema.h"
#include "coordinator/limits.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

constexpr int64_t kForEver = std::numeric_limits<int64_t>::max();

struct Sums {
  double all = 0, productive = 0, unused = 0;

  void Add(v1::UsageClass usage_class, double seconds) {
    all += seconds;
    if (usage_class == v1::USAGE_CLASS_PRODUCTIVE) productive += seconds;
    if (IsUnused(usage_class)) unused += seconds;
  }
  double goodput() const { return GoodputOf(productive, unused, all); }
};

class Summation {
 public:
  explicit Summation(const v1::GetUsageRequest& request)
      : request_(request),
        since_ms_(request.has_since() ? absl::ToUnixMillis(FromProto(request.since())) : 0),
        until_ms_(request.has_until() ? absl::ToUnixMillis(FromProto(request.until())) : kForEver) {
    for (const int key : request.by()) by_.insert(static_cast<v1::UsageKey>(key));
  }

  void Add(const v1::UsageRow& row) {
    if (!request_.job().empty() && row.job_id() != request_.job()) return;
    if (!request_.queue().empty() && row.queue() != request_.queue()) return;
    if (!request_.tenant().empty() && row.tenant() != request_.tenant()) return;
    const int64_t begin = std::max(row.begin_ms(), since_ms_);
    const int64_t end = std::min(row.end_ms(), until_ms_);
    if (end < begin) return;
    const int64_t length = row.end_ms() - row.begin_ms();
    const double share =
        length > 0 ? static_cast<double>(end - begin) / static_cast<double>(length) : 1;
    if (share <= 0) return;
    oldest_ms_ = std::min(oldest_ms_, begin);
    for (const v1::AccountEntry& entry : row.entries()) {
      const double seconds =
          share * DeviceTime{entry.period_ms(), entry.period_rest_us()}.seconds();
      sums_[KeyOf(row, entry)].Add(entry.usage_class(), seconds);
      total_.Add(entry.usage_class(), seconds);
    }
  }

  v1::GetUsageResponse Response(int64_t now_ms) const {
    v1::GetUsageResponse response;
    const int64_t until = std::min(until_ms_, now_ms);
    *response.mutable_since() =
        ToProto(absl::FromUnixMillis(std::min(std::max(oldest_ms_, since_ms_), until)));
    *response.mutable_until() = ToProto(absl::FromUnixMillis(until));
    std::vector<std::pair<double, const Key*>> largest;
    for (const auto& [key, sums] : sums_) largest.emplace_back(-sums.all, &key);
    std::sort(largest.begin(), largest.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first < b.first : *a.second < *b.second;
    });
    for (const auto& [minus_seconds, key] : largest) {
      if (response.rows_size() == kUsageRowsPerReplyMax) {
        response.set_rows_left_out(response.rows_left_out() + 1);
        response.set_left_out_device_seconds(response.left_out_device_seconds() - minus_seconds);
        continue;
      }
      v1::UsageTotal& row = *response.add_rows();
      row.set_job_id(key->job_id);
      row.set_job_name(key->job_name);
      row.set_queue(key->queue);
      row.set_tenant(key->tenant);
      row.set_usage_class(key->usage_class);
      row.set_cause(key->cause);
      row.set_device_seconds(-minus_seconds);
      if (!by_.contains(v1::USAGE_KEY_CLASS)) row.set_goodput(sums_.at(*key).goodput());
    }
    response.set_device_seconds(total_.all);
    response.set_goodput(total_.goodput());
    return response;
  }

 private:
  struct Key {
    std::string job_id, job_name, queue, tenant;
    v1::UsageClass usage_class = v1::USAGE_CLASS_UNSPECIFIED;
    v1::Cause cause = v1::CAUSE_UNSPECIFIED;
    friend auto operator<=>(const Key&, const Key&) = default;
  };

  Key KeyOf(const v1::UsageRow& row, const v1::AccountEntry& entry) const {
    Key key;
    if (by_.contains(v1::USAGE_KEY_JOB)) {
      key.job_id = row.job_id();
      key.job_name = row.job_name();
    }
    if (by_.contains(v1::USAGE_KEY_QUEUE)) key.queue = row.queue();
    if (by_.contains(v1::USAGE_KEY_TENANT)) key.tenant = row.tenant();
    if (by_.contains(v1::USAGE_KEY_CLASS)) key.usage_class = entry.usage_class();
    if (by_.contains(v1::USAGE_KEY_CAUSE)) key.cause = entry.cause();
    return key;
  }

  const v1::GetUsageRequest& request_;
  const int64_t since_ms_, until_ms_;
  std::set<v1::UsageKey> by_;
  std::map<Key, Sums> sums_;
  Sums total_;
  int64_t oldest_ms_ = kForEver;
};

}  // namespace

absl::Status CheckUsageRequest(const v1::GetUsageRequest& request) {
  for (const int key : request.by()) {
    if (key == v1::USAGE_KEY_UNSPECIFIED || !v1::UsageKey_IsValid(key)) {
      return absl::InvalidArgumentError(
          absl::StrCat("by: ", key, " is none of job, queue, tenant, class, cause"));
    }
  }
  if (request.has_since() && request.has_until() &&
      FromProto(request.until()) < FromProto(request.since())) {
    return absl::InvalidArgumentError("until: is before `since`");
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::GetUsageResponse> SumUsage(Store& store, const OpenUsage& open,
                                              const v1::GetUsageRequest& request) {
  Summation sums(request);
  absl::Status bad;
  RETURN_IF_ERROR(store.Scan(Table::kUsage, schema::EncodeU64(1),
                             schema::EncodeU64(open.last_row + 1),
                             [&](const std::string& key, const std::string& value) {
                               v1::UsageRow row;
                               bad = schema::Parse(Table::kUsage, key, value, row);
                               if (bad.ok()) sums.Add(row);
                               return bad.ok();
                             }));
  RETURN_IF_ERROR(bad);
  for (const v1::UsageRow& row : open.rows) sums.Add(row);
  return sums.Response(open.as_of_ms);
}

}  // namespace muster::coordinator
