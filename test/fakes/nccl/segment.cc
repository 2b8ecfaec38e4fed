#include "test/fakes/nccl/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <utility>

namespace farandole {

std::shared_ptr<FakeNcclSegment> FakeNcclSegment::Open(const std::string& name) {
  const int file = shm_open(name.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0) return nullptr;
  void* memory = MAP_FAILED;
  if (ftruncate(file, sizeof(FakeNcclShared)) == 0) {
    memory = mmap(nullptr, sizeof(FakeNcclShared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  if (memory == MAP_FAILED) {
    shm_unlink(name.c_str());
    return nullptr;
  }
  return std::shared_ptr<FakeNcclSegment>(
      new FakeNcclSegment(name, static_cast<FakeNcclShared*>(memory)));
}

FakeNcclSegment::FakeNcclSegment(std::string name, FakeNcclShared* shared)
    : name_(std::move(name)), shared_(shared) {}

FakeNcclSegment::~FakeNcclSegment() { munmap(shared_, sizeof(FakeNcclShared)); }

void FakeNcclSegment::Unlink() { shm_unlink(name_.c_str()); }

}  // namespace farandole
