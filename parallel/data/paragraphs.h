// Paragraphs of text: each ends after one or more empty lines, which belong to it.
#ifndef MUSTER_PARALLEL_DATA_PARAGRAPHS_H_
#define MUSTER_PARALLEL_DATA_PARAGRAPHS_H_

#include <cstddef>

#include "absl/strings/string_view.h"

namespace muster::parallel {

// Where the first paragraph at or behind `from` begins that is not the first of `text`. 0: nowhere,
// or it cannot be told without what follows `text`.
size_t FirstParagraph(absl::string_view text, size_t from);
// Where the last one begins; 0: as above.
size_t LastParagraph(absl::string_view text);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_PARAGRAPHS_H_
