#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace muster::internal_check {

CheckFailure::CheckFailure(const char* file, int line, const std::string& condition) {
  stream_ << "CHECK failed at " << file << ":" << line << ": " << condition << " ";
}

CheckFailure::~CheckFailure() {
  std::fprintf(stderr, "%s\n", stream_.str().c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace muster::internal_check
