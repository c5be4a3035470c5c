#include "worker/rank/agreement.h"

#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/util/message_differencer.h"
#include "parallel/comm/gather_texts.h"
#include "parallel/train/failure.h"

namespace muster::worker {
namespace {

constexpr size_t kNamedMax = 8;  // how many ranks, and how many fields, a message names

// Serializes equal specs to equal bytes: map entries are sorted.
std::string Bytes(const v1::JobSpec& spec) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    spec.SerializeToCodedStream(&coded);
  }
  return bytes;
}

// FNV-1a, 64 bits.
uint64_t Hash(const std::string& bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

std::string Hex(uint64_t value) { return absl::StrFormat("%016x", value); }

// Joins the first kNamedMax items and says how many more there are.
template <typename Items>
std::string Some(const Items& items, const std::string& separator) {
  std::vector<std::string> named;
  for (const auto& item : items) {
    if (named.size() == kNamedMax) break;
    named.push_back(absl::StrCat(item));
  }
  const size_t more = items.size() - named.size();
  return absl::StrCat(absl::StrJoin(named, separator),
                      more > 0 ? absl::StrCat(" and ", more, " more") : "");
}

// Names the ranks whose text differs from rank 0's: "rank 1 has X, rank 3 has X, but rank 0 has Y".
std::string Dissent(const std::vector<std::string>& texts, std::vector<int>& ranks) {
  std::vector<std::string> parts;
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] != texts[0]) ranks.push_back(static_cast<int>(rank));
  }
  if (ranks.empty()) return "";
  for (const int rank : ranks) parts.push_back(absl::StrCat("rank ", rank, " has ", texts[rank]));
  return absl::StrCat(Some(parts, ", "), ", but rank 0 has ", texts[0]);
}

absl::Status SpecsDiffer(const std::string& who, int rank, const std::vector<std::string>& specs) {
  v1::JobSpec first, other;
  std::string report;
  google::protobuf::util::MessageDifferencer differencer;
  differencer.ReportDifferencesToString(&report);
  if (first.ParseFromString(specs[0]) && other.ParseFromString(specs[rank])) {
    differencer.Compare(first, other);
  }
  const std::vector<std::string> fields =
      absl::StrSplit(absl::StripAsciiWhitespace(report), '\n', absl::SkipEmpty());
  return parallel::Mark(absl::InvalidArgumentError(absl::StrCat(
                            "the ranks do not have the same job spec, by its hash: ", who,
                            ". From rank 0 to rank ", rank, ": ", Some(fields, "; "),
                            ". All ranks of an attempt must be started with one spec")),
                        parallel::FailureDomain::kConfiguration);
}

}  // namespace

absl::Status CheckAgreement(parallel::Communicator& world, kernels::Device& device,
                            const v1::JobSpec& spec, uint64_t data_fingerprint) {
  if (world.size() == 1) return absl::OkStatus();
  const auto gather = [&](const std::string& text) -> absl::StatusOr<std::vector<std::string>> {
    ASSIGN_OR_RETURN(const auto stream, device.MakeStream());
    auto texts = parallel::GatherTexts(world, *stream, text);
    if (!texts.ok()) {
      return parallel::Mark(Annotate(texts.status(), "comparison of job specs"),
                            parallel::FailureDomain::kCommunication);
    }
    return texts;
  };
  const std::string bytes = Bytes(spec);
  ASSIGN_OR_RETURN(const std::vector<std::string> all,
                   gather(Hex(Hash(bytes)) + Hex(data_fingerprint)));
  std::vector<std::string> specs, data;
  const size_t digits = Hex(0).size();
  for (const std::string& both : all) {
    specs.push_back(both.substr(0, digits));
    data.push_back(both.substr(digits));
  }
  std::vector<int> ranks;
  if (const std::string who = Dissent(specs, ranks); !ranks.empty()) {
    ASSIGN_OR_RETURN(const std::vector<std::string> whole, gather(bytes));
    return SpecsDiffer(who, ranks[0], whole);
  }
  if (const std::string who = Dissent(data, ranks); !ranks.empty()) {
    return parallel::Mark(
        absl::FailedPreconditionError(absl::StrCat(
            "engine.data.train: the ranks do not see the same data sets, by a fingerprint of their "
            "sizes: ",
            who, ". Every worker must have the same files under the same paths")),
        parallel::FailureDomain::kData);
  }
  return absl::OkStatus();
}

}  // namespace muster::worker
