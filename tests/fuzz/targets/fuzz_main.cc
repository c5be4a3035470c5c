// What libFuzzer calls. MUSTER_FUZZ_TARGET is one of targets.h.
#include <google/protobuf/stubs/logging.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "tests/fuzz/targets/targets.h"

// Messages about strings that are not UTF-8 would fill the log.
extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  muster::fuzz::MUSTER_FUZZ_TARGET(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
