#include "worker/rank/start_anew.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "absl/strings/str_cat.h"

namespace muster::worker {
namespace {

constexpr size_t kBytes = 4096;

// Shared memory with a name, and mapped if that is wanted.
class Shared {
 public:
  Shared(const std::string& prefix, bool map) : name_(absl::StrCat("/", prefix, getpid())) {
    const int file = shm_open(name_.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    EXPECT_GE(file, 0) << name_;
    EXPECT_EQ(ftruncate(file, kBytes), 0);
    if (map) memory_ = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    EXPECT_NE(memory_, MAP_FAILED);
    close(file);
  }
  ~Shared() {
    if (memory_ != nullptr) munmap(memory_, kBytes);
    shm_unlink(name_.c_str());
  }
  bool HasName() const {
    const int file = shm_open(name_.c_str(), O_RDWR, 0600);
    if (file >= 0) close(file);
    return file >= 0;
  }
  void* memory() const { return memory_; }

 private:
  const std::string name_;
  void* memory_ = nullptr;
};

TEST(StartAnew, NamesOfMappedSharedMemory_GoAndItsMemoryStays) {
  const Shared ours("muster-start-anew-", true), nccls("nccl-start-anew-", true);
  ASSERT_TRUE(ours.HasName() && nccls.HasName());
  UnlinkSharedMemory();
  EXPECT_FALSE(ours.HasName());
  EXPECT_FALSE(nccls.HasName());
  *static_cast<char*>(ours.memory()) = 1;
  UnlinkSharedMemory();  // there is nothing left to do
}

TEST(StartAnew, NamesOfOthers_Stay) {
  const Shared unmapped("muster-start-anew-other-", false), foreign("start-anew-", true);
  UnlinkSharedMemory();
  EXPECT_TRUE(unmapped.HasName()) << "another process may be about to open it";
  EXPECT_TRUE(foreign.HasName());
}

}  // namespace
}  // namespace muster::worker
