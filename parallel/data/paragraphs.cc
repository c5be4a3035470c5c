#include "parallel/data/paragraphs.h"

#include <algorithm>

#include "absl/strings/match.h"

namespace muster::parallel {
namespace {

// Whether the line that ends with the '\n' at `end` is empty, and where it begins.
bool EmptyLine(absl::string_view text, size_t end, size_t* begin) {
  *begin = end;
  if (*begin > 0 && text[*begin - 1] == '\r') --*begin;
  return *begin == 0 || text[*begin - 1] == '\n';
}

// Whether a paragraph begins at the beginning of a line `at`, which is not 0.
bool BeginsParagraph(absl::string_view text, size_t at) {
  const absl::string_view rest = text.substr(at);
  if (rest.empty() || rest == "\r" || absl::StartsWith(rest, "\n") ||
      absl::StartsWith(rest, "\r\n")) {
    return false;
  }
  size_t line = 0;
  return EmptyLine(text, at - 1, &line);
}

}  // namespace

size_t FirstParagraph(absl::string_view text, size_t from) {
  for (size_t at = std::max<size_t>(from, 1); at <= text.size(); ++at) {
    const size_t line_end = text.find('\n', at - 1);
    if (line_end == absl::string_view::npos) return 0;
    at = line_end + 1;
    if (BeginsParagraph(text, at)) return at;
  }
  return 0;
}

size_t LastParagraph(absl::string_view text) {
  for (size_t at = text.size(); at > 0;) {
    const size_t line_end = text.rfind('\n', at - 1);
    if (line_end == absl::string_view::npos) return 0;
    if (BeginsParagraph(text, line_end + 1)) return line_end + 1;
    at = line_end;
  }
  return 0;
}

}  // namespace muster::parallel
