#include "ops/shm/host_memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <sstream>

#include "core/descriptors.h"

namespace farandole {
namespace {

constexpr size_t kHeadBytes = 4096;  // a page before the slots: the releases
// Of addresses, for the buffers of a rank. The odd pages keep tensors of several ranks from having
// addresses that differ in high bits only: the first-level cache takes those for one another.
constexpr size_t kRegionBytes = (size_t{64} << 30) + 5 * size_t{4096};
// So that a segment can lie in huge pages, where the system gives shared memory any
// (shmem_enabled).
constexpr size_t kSegmentAlign = 2 * 1024 * 1024;

/// Allocated by one system call, in some ms.
constexpr size_t kReserveBytes = 16 * 1024 * 1024;

/// How many members have released a segment: a reference count that rises. Zero in a fresh page.
using Releases = std::atomic<uint32_t>;
static_assert(Releases::is_always_lock_free);

Status Failed(const std::string& what) { return SystemError(what, errno); }

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/// Which file it is, in whatever process and under whatever path.
std::string Identity(const struct stat& file) {
  return std::to_string(file.st_dev) + ":" + std::to_string(file.st_ino);
}

/// Whoever allocates beyond such a limit gets a signal, which ends the process.
Status CheckLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur == RLIM_INFINITY) return {};
  return Unavailable("the size of files is limited (ulimit -f)");
}

/// Where a process has the buffers of all ranks mapped.
struct Mapping {
  void* begin = nullptr;
  size_t bytes = 0;
  int file = -1;
  off_t offset = 0;
};

/// Maps buffers, `flags` say how. They stay out of core dumps: to dump a hole allocates it, and the
/// holes are larger than any memory.
bool Map(Mapping& mapping, int flags) {
  void* const mapped = mmap(mapping.begin, mapping.bytes, PROT_READ | PROT_WRITE,
                            flags | MAP_NORESERVE, mapping.file, mapping.offset);
  if (mapped == MAP_FAILED) return false;
  mapping.begin = mapped;
  (void)madvise(mapped, mapping.bytes, MADV_DONTDUMP);  // dumps matter where memory is short
  return true;
}

/// All mappings of this process. A forked child gets each of them anew, at its address: what it
/// writes there, say to a gradient, it keeps to itself, as with all other memory. Where addresses
/// or memory are limited it may be left without.
class Mappings {
 public:
  static Mappings& OfProcess() {
    static auto* const mappings = new Mappings();  // never destroyed: threads may fork at the end
    return *mappings;
  }

  void Add(const Mapping& mapping) {
    const std::lock_guard lock(mutex_);
    all_.push_back(mapping);
  }
  void Remove(const void* begin) {
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [begin](const Mapping& mapping) { return mapping.begin == begin; });
  }

 private:
  Mappings() {
    (void)::pthread_atfork([] { OfProcess().mutex_.lock(); }, [] { OfProcess().mutex_.unlock(); },
                           [] { OfProcess().BecomePrivate(); });
  }

  void BecomePrivate() {
    for (Mapping& mapping : all_) (void)Map(mapping, MAP_PRIVATE | MAP_FIXED);
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::vector<Mapping> all_;
};

// Made when the library is loaded: a child forked while another thread makes it would wait for that
// thread for ever.
[[maybe_unused]] const Mappings& made_at_load = Mappings::OfProcess();

}  // namespace

Result<std::shared_ptr<HostMemory>> HostMemory::Create(const User& user, Options options) {
  FARANDOLE_RETURN_IF_ERROR(CheckLimit());
  const int file = memfd_create("farandole", MFD_CLOEXEC);
  if (file < 0) return Failed("memfd_create");
  const std::shared_ptr<HostMemory> memory(new HostMemory(file, user, options));
  FARANDOLE_RETURN_IF_ERROR(memory->Reserve(0, memory->ControlBytes()));
  FARANDOLE_RETURN_IF_ERROR(memory->MapControl());
  return memory;
}

// In a container the path may lead to another process's file, or nowhere.
Result<std::shared_ptr<HostMemory>> HostMemory::Open(const std::string& address, const User& user,
                                                     Options options) {
  FARANDOLE_RETURN_IF_ERROR(CheckLimit());
  std::istringstream words(address);
  std::string path;
  std::string identity;
  words >> path >> identity >> options.cache_bytes;
  struct stat found {};
  if (stat(path.c_str(), &found) != 0) return Failed(path);
  if (Identity(found) != identity) return Unavailable(path + " is another file");
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return Failed(path);
  const std::shared_ptr<HostMemory> memory(new HostMemory(file, user, options));
  FARANDOLE_RETURN_IF_ERROR(memory->MapControl());
  return memory;
}

HostMemory::HostMemory(int file, const User& user, Options options)
    : SharedMemory(options),
      file_(file),
      user_(user),
      regions_begin_(RoundUp(ControlBytes(), kSegmentAlign)),
      segments_begin_(RoundUp(regions_begin_ + RegionsBytes(), kSegmentAlign)),
      segment_bytes_(RoundUp(kHeadBytes + MostSetBytes(user.ranks.size()), kSegmentAlign)) {}

/// A set of fewer ranks may need more, since its slots are larger.
size_t HostMemory::MostSetBytes(size_t ranks) const {
  size_t most = 0;
  for (size_t members = 1; members <= ranks; ++members)
    most = std::max(most, LayoutOf(members).Bytes());
  return most;
}

HostMemory::~HostMemory() {
  FreeBuffers();
  if (base_ != 0) {
    Mappings::OfProcess().Remove(At(0));
    munmap(At(0), RegionsBytes());
  }
  if (control_ != nullptr) munmap(control_, ControlBytes());
  close(file_);
}

Status HostMemory::MapControl() {
  static_assert(sizeof(FutexDoorbell::State) % 64 == 0);
  void* const mapped = mmap(nullptr, ControlBytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (mapped == MAP_FAILED) return Failed("mmap of shared memory");
  control_ = static_cast<std::byte*>(mapped);
  auto* const states = reinterpret_cast<FutexDoorbell::State*>(control_);
  for (size_t i = 0; i < user_.ranks.size(); ++i) bells_.emplace_back(states[i]);
  return {};
}

/// Of all ranks.
size_t HostMemory::RegionsBytes() const { return user_.ranks.size() * kRegionBytes; }

size_t HostMemory::IndexOf(int rank) const {
  return static_cast<size_t>(std::ranges::lower_bound(user_.ranks, rank) - user_.ranks.begin());
}

void HostMemory::UseBell(FutexDoorbell& bell) {
  bell.MoveTo(reinterpret_cast<FutexDoorbell::State*>(control_)[IndexOf(user_.rank)]);
}

Doorbell* HostMemory::bell(int rank) const { return &bells_[IndexOf(rank)]; }

std::string HostMemory::address() const {
  struct stat file {};
  (void)fstat(file_, &file);  // cannot fail; if it did, nobody would find this file
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file_) + " " +
         Identity(file) + " " + std::to_string(options().cache_bytes);
}

Result<std::shared_ptr<std::byte>> HostMemory::Join(uint32_t set, std::span<const int> ranks,
                                                    int my_index) {
  const auto members = static_cast<uint32_t>(ranks.size());
  if (!std::ranges::includes(user_.ranks, ranks)) {
    return InvalidArgument("process set " + std::to_string(set) +
                           " has members that do not share memory with rank " +
                           std::to_string(user_.rank));
  }
  const SlotLayout layout = LayoutOf(members);
  const size_t begin = segments_begin_ + set * segment_bytes_;
  const size_t header = kHeadBytes + layout.HeaderBytes();
  const size_t bytes = kHeadBytes + layout.Bytes();
  FARANDOLE_RETURN_IF_ERROR(Reserve(begin, header));
  FARANDOLE_RETURN_IF_ERROR(Reserve(
      begin + header + static_cast<size_t>(my_index) * layout.MemberBytes(), layout.MemberBytes()));
  void* const mapped =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, static_cast<off_t>(begin));
  if (mapped == MAP_FAILED) {
    return ResourceExhausted("cannot map " + std::to_string(bytes) +
                             " bytes of shared memory: " + std::strerror(errno));
  }
  auto* const segment = static_cast<std::byte*>(mapped);
  const auto release = [this, segment, begin, bytes, members](std::byte*) {
    const bool is_last =
        !IsForked() && reinterpret_cast<Releases*>(segment)->fetch_add(1) + 1 == members;
    munmap(segment, bytes);
    if (!is_last) return;
    Discard(begin, bytes);
  };
  return std::shared_ptr<std::byte>(segment + kHeadBytes, release);
}

/// Lengthens the file where it has to. Slice by slice: a signal undoes the whole call before Linux
/// 5.18, so that under a profiler's timer a call for a gigabyte would never return.
Status HostMemory::Reserve(size_t offset, size_t bytes) const {
  for (size_t done = 0; done < bytes;) {
    const size_t slice = std::min(bytes - done, kReserveBytes);
    if (fallocate(file_, 0, static_cast<off_t>(offset + done), static_cast<off_t>(slice)) == 0) {
      done += slice;
    } else if (errno != EINTR) {
      const int error = errno;
      if (done > 0) Discard(offset, done);
      return ResourceExhausted("cannot allocate " + std::to_string(bytes) +
                               " bytes of shared memory: " + std::strerror(error));
    }
  }
  return {};
}

/// Gives memory back to the system. Failing that, it is used until the job ends.
void HostMemory::Discard(size_t offset, size_t bytes) const {
  (void)fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes));
}

/// Addresses only: a page takes up memory once it is allocated. Where addresses are limited
/// (ulimit -v) this may fail, and the rank has no buffers.
Status HostMemory::MapBuffers() {
  if (base_ != 0) return {};
  Mapping mapping{nullptr, RegionsBytes(), file_, static_cast<off_t>(regions_begin_)};
  if (!Map(mapping, MAP_SHARED)) {
    return ResourceExhausted(Failed("mmap of buffers").message());
  }
  Mappings::OfProcess().Add(mapping);
  base_ = reinterpret_cast<uintptr_t>(mapping.begin);
  return {};
}

/// First fit in this rank's region.
Result<int64_t> HostMemory::Take(const Buffers& buffers, size_t bytes) {
  FARANDOLE_RETURN_IF_ERROR(MapBuffers());
  size_t begin = IndexOf(user_.rank) * kRegionBytes;
  const size_t end = begin + kRegionBytes;
  for (const auto& [offset, size] : buffers) {
    const auto next = static_cast<size_t>(offset);
    if (next - begin >= bytes) break;
    begin = next + size;
  }
  if (bytes > end - begin) {
    return ResourceExhausted("no room for a shared buffer of " + std::to_string(bytes) + " bytes");
  }
  FARANDOLE_RETURN_IF_ERROR(Reserve(regions_begin_ + begin, bytes));
  return static_cast<int64_t>(begin);
}

void HostMemory::Free(int64_t offset, size_t bytes) {
  Discard(regions_begin_ + static_cast<size_t>(offset), bytes);
}

}  // namespace farandole
