// What a dataset holds.
#ifndef MUSTER_TESTS_PARALLEL_READ_DOCUMENTS_H_
#define MUSTER_TESTS_PARALLEL_READ_DOCUMENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "parallel/data/indexed_dataset.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {

using Documents = std::vector<std::vector<int32_t>>;

inline Documents ReadDocuments(const std::string& prefix) {
  auto dataset = IndexedDataset::Open(prefix);
  CHECK_OK(dataset);
  Documents documents;
  for (int64_t i = 0; i < (*dataset)->documents(); ++i) {
    const int64_t begin = (*dataset)->DocumentBegin(i);
    documents.emplace_back((*dataset)->DocumentBegin(i + 1) - begin);
    CHECK_OK((*dataset)->Read(begin, 1 << 20, absl::MakeSpan(documents.back())));
  }
  return documents;
}

}  // namespace muster::parallel

#endif  // MUSTER_TESTS_PARALLEL_READ_DOCUMENTS_H_
