#include "parallel/comm/transport_choice.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace muster::parallel {
namespace {

std::string TextOf(const std::vector<TransportTime>& times) {
  return absl::StrJoin(times, ",", [](std::string* out, const TransportTime& time) {
    absl::StrAppendFormat(out, "%d %.9g %.9g", time.bytes, time.copy_engines_s, time.nccl_s);
  });
}

absl::StatusOr<std::vector<TransportTime>> TimesOf(const std::string& text) {
  std::vector<TransportTime> times;
  if (text.empty()) return times;
  for (const absl::string_view entry : absl::StrSplit(text, ',')) {
    const std::vector<absl::string_view> fields = absl::StrSplit(entry, ' ');
    TransportTime time;
    if (fields.size() != 3 || !absl::SimpleAtoi(fields[0], &time.bytes) ||
        !absl::SimpleAtod(fields[1], &time.copy_engines_s) ||
        !absl::SimpleAtod(fields[2], &time.nccl_s)) {
      return absl::InvalidArgumentError(absl::StrCat("'", entry, "' is no time of a transport"));
    }
    times.push_back(time);
  }
  return times;
}

absl::Status KeepLongest(const std::vector<TransportTime>& times,
                         std::vector<TransportTime>& longest) {
  const auto same_size = [](const TransportTime& a, const TransportTime& b) {
    return a.bytes == b.bytes;
  };
  if (!std::equal(times.begin(), times.end(), longest.begin(), longest.end(), same_size)) {
    return absl::InvalidArgumentError("ranks have timed transports on different sizes");
  }
  for (size_t i = 0; i < times.size(); ++i) {
    longest[i].copy_engines_s = std::max(longest[i].copy_engines_s, times[i].copy_engines_s);
    longest[i].nccl_s = std::max(longest[i].nccl_s, times[i].nccl_s);
  }
  return absl::OkStatus();
}

bool GoodEnough(const TransportTime& time) {
  return time.copy_engines_s <= kCopyEnginesMayTake * time.nccl_s;
}

std::string SizeText(int64_t bytes) {
  return bytes < (1 << 20) ? absl::StrCat(bytes >> 10, " KiB") : absl::StrCat(bytes >> 20, " MiB");
}

std::string Listed(const std::vector<TransportTime>& times) {
  return absl::StrJoin(times, "; ", [](std::string* out, const TransportTime& time) {
    absl::StrAppendFormat(out, "%s: %.0f us, NCCL %.0f us", SizeText(time.bytes),
                          time.copy_engines_s * 1e6, time.nccl_s * 1e6);
  });
}

}  // namespace

std::string TransportTimes::ToText() const {
  return absl::StrCat(TextOf(all_gather), ";", TextOf(reduce_scatter));
}

absl::StatusOr<TransportTimes> TransportTimes::FromText(const std::string& text) {
  const std::vector<std::string> kinds = absl::StrSplit(text, ';');
  if (kinds.size() != 2) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' are no times of transports"));
  }
  TransportTimes times;
  ASSIGN_OR_RETURN(times.all_gather, TimesOf(kinds[0]));
  ASSIGN_OR_RETURN(times.reduce_scatter, TimesOf(kinds[1]));
  return times;
}

absl::StatusOr<TransportTimes> SlowestOf(const std::vector<TransportTimes>& by_rank) {
  CHECK(!by_rank.empty());
  TransportTimes slowest = by_rank[0];
  for (const TransportTimes& times : by_rank) {
    RETURN_IF_ERROR(KeepLongest(times.all_gather, slowest.all_gather));
    RETURN_IF_ERROR(KeepLongest(times.reduce_scatter, slowest.reduce_scatter));
  }
  return slowest;
}

TransportChoice ChooseTransports(const TransportTimes& times) {
  TransportChoice choice;
  const std::vector<TransportTime>& timed = times.all_gather;
  size_t from = timed.size();
  while (from > 0 && GoodEnough(timed[from - 1])) --from;
  if (from == 0) return choice;
  choice.all_gather_from = from < timed.size() ? timed[from].bytes : TransportChoice::kNever;
  return choice;
}

std::string Describe(const TransportChoice& choice, const TransportTimes& times) {
  if (times.all_gather.empty()) return "copy engines for all that they can carry, not timed";
  const std::string by =
      choice.all_gather_from == 0 ? "copy engines"
      : choice.all_gather_from == TransportChoice::kNever
          ? "NCCL"
          : absl::StrCat("copy engines from ", SizeText(choice.all_gather_from), " on, else NCCL");
  std::string text = absl::StrCat("all-gather by ", by, " (", Listed(times.all_gather),
                                  "); sums by copy engines, always");
  if (!times.reduce_scatter.empty()) {
    absl::StrAppend(&text, " (", Listed(times.reduce_scatter), ")");
  }
  const bool slow = !times.reduce_scatter.empty() && !GoodEnough(times.reduce_scatter.back());
  if (slow) {
    absl::StrAppend(&text, ": NCCL sums faster here, parallel.copy_engines: false gives it all");
  }
  return text;
}

}  // namespace muster::parallel
