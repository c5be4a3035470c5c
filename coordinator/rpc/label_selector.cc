#include "coordinator/rpc/label_selector.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "proto/spec/names.h"

namespace muster::coordinator {
namespace {

constexpr size_t kBytesMax = 4 << 10;

std::string Trimmed(absl::string_view text) {
  return std::string(absl::StripAsciiWhitespace(text));
}

}  // namespace

absl::StatusOr<LabelSelector> LabelSelector::Parse(const std::string& text) {
  if (text.size() > kBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("label_selector: ", text.size(), " bytes; at most ", kBytesMax));
  }
  LabelSelector selector;
  if (Trimmed(text).empty()) return selector;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    Term term{Kind::kHas, Trimmed(part), ""};
    if (const size_t equals = part.find('='); equals != absl::string_view::npos) {
      const bool negated = equals > 0 && part[equals - 1] == '!';
      const bool doubled = !negated && equals + 1 < part.size() && part[equals + 1] == '=';
      term = {negated ? Kind::kNotEqual : Kind::kEqual,
              Trimmed(part.substr(0, equals - (negated ? 1 : 0))),
              Trimmed(part.substr(equals + (doubled ? 2 : 1)))};
    } else if (!term.name.empty() && term.name[0] == '!') {
      term = {Kind::kHasNot, Trimmed(term.name.substr(1)), ""};
    }
    // Sets as kubectl has them, `team in (a, b)`, would else be two names that no job has.
    if (term.name.empty() || term.name.find_first_of("!()") != std::string::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat("label_selector: ", spec::Quoted(part),
                       " is not NAME=VALUE, NAME!=VALUE, NAME or !NAME"));
    }
    selector.terms_.push_back(std::move(term));
  }
  return selector;
}

bool LabelSelector::Matches(const google::protobuf::Map<std::string, std::string>& labels) const {
  return std::all_of(terms_.begin(), terms_.end(), [&labels](const Term& term) {
    const auto label = labels.find(term.name);
    const bool has = label != labels.end();
    switch (term.kind) {
      case Kind::kEqual:
        return has && label->second == term.value;
      case Kind::kNotEqual:
        return !has || label->second != term.value;
      case Kind::kHas:
        return has;
      default:
        return !has;
    }
  });
}

}  // namespace muster::coordinator
