#include "ballast/storage/memory/arena.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/memory/memory_nodes.h"
#include "ballast/storage/memory/page_lock.h"

namespace ballast::storage {
namespace {
constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
// The least memory worth another touching thread, and the most threads.
constexpr uint64_t kTouchBytesMin = uint64_t{128} << 20;
constexpr uint64_t kTouchThreadsMax = 8;

// The kernel clears a page at its first touch: large memory is touched by several threads, to clear it faster.
void TouchParts(absl::Span<std::byte> bytes, absl::FunctionRef<void(absl::Span<std::byte>)> touch) {
  const uint64_t processors = std::max(1u, std::thread::hardware_concurrency());
  const uint64_t threads =
      std::clamp<uint64_t>(bytes.size() / kTouchBytesMin, 1, std::min(processors, kTouchThreadsMax));
  const uint64_t part_bytes = (bytes.size() / threads + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const auto part = [&](uint64_t i) {
    touch(bytes.subspan(std::min<uint64_t>(i * part_bytes, bytes.size()), part_bytes));
  };
  std::vector<std::thread> others;
  for (uint64_t i = 1; i < threads; ++i) {
    absl::StatusOr<std::thread> other = model::MakeThread([&part, i] { part(i); });
    if (other.ok()) {
      others.push_back(*std::move(other));
    } else {
      part(i);  // slower
    }
  }
  part(0);
  for (std::thread& other : others) other.join();
}

// 4096 on x86; up to 65536 on Arm.
uint64_t PageBytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

// The system would round the end of a part up, and discard what lies behind it.
absl::Span<std::byte> WholePages(absl::Span<std::byte> part) {
  const uint64_t page = PageBytes(), begin = reinterpret_cast<uintptr_t>(part.data()), end = begin + part.size();
  const uint64_t first = (begin + page - 1) / page * page, last = end / page * page;
  return first < last ? part.subspan(first - begin, last - first) : absl::Span<std::byte>();
}

// Said once each: a system that refuses one mapping refuses all.
void SayShared(int error) {
  static std::once_flag said;
  std::call_once(said, [error] {
    spdlog::warn("forked children share this process's large memory: each fork makes the next update slower ({})",
                 std::strerror(error));
  });
}

void SayKept(int error) {
  static std::once_flag said;
  std::call_once(said, [error] {
    spdlog::warn("memory that is not used any more stays with the process: {}", std::strerror(error));
  });
}
// Mappings of this process that /proc lists, and how many it may have; 0 where /proc does not tell. Reads without the
// heap, which may be refused memory, too.
uint64_t Mappings() {
  const int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  std::array<char, 4096> text;
  uint64_t lines = 0;
  for (ssize_t n = 0; (n = read(file, text.data(), text.size())) > 0;) {
    lines += static_cast<uint64_t>(std::count(text.begin(), text.begin() + n, '\n'));
  }
  close(file);
  return lines;
}

uint64_t MappingsMax() {
  const int file = open("/proc/sys/vm/max_map_count", O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  std::array<char, 32> text = {};
  const ssize_t n = read(file, text.data(), text.size() - 1);
  close(file);
  return n > 0 ? std::strtoull(text.data(), nullptr, 10) : 0;
}

// The system says ENOMEM for each of its limits.
absl::Status Refused(uint64_t bytes, int error) {
  // Other threads unmap meanwhile, and /proc lists one that does not count (vsyscall).
  constexpr uint64_t kNear = 64;
  const uint64_t most = MappingsMax(), mappings = most > 0 ? Mappings() : 0;
  std::string why = absl::StrCat("the system refused ", bytes, " bytes of memory: ", std::strerror(error));
  if (most > 0 && mappings + kNear > most) {
    absl::StrAppend(
        &why, ". This process has ", mappings, " mappings, and vm.max_map_count allows ", most,
        "; beside a GPU each chunk in DRAM is one. At least ", 2 * most, ": sysctl -w vm.max_map_count=", 2 * most,
        " (`ballastctl doctor --config` says how many the budget needs); or a larger ", "chunk_elements for new jobs");
  } else {
    absl::StrAppend(&why,
                    ". Free memory, raise the limit of this process (ulimit -v) or of the system "
                    "(vm.overcommit_memory), or lower the DRAM budget");
  }
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget, why);
}
}  // namespace

absl::StatusOr<Arena> Arena::Map(uint64_t bytes, Touch touch) {
  Arena arena;
  bytes = AlignUp(bytes);
  if (bytes == 0) return arena;
  // mmap aligns to pages only: map more, keep the part from the first 2 MiB boundary on.
  const uint64_t mapped = bytes + kHugePageBytes;
  void* const start = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return Refused(bytes, errno);
  auto* const first = static_cast<std::byte*>(start);
  const uint64_t skip = (kHugePageBytes - reinterpret_cast<uintptr_t>(start) % kHugePageBytes) % kHugePageBytes;
  if (skip > 0) munmap(first, skip);
  const uint64_t kept = skip + (bytes + PageBytes() - 1) / PageBytes() * PageBytes();
  if (kept < mapped) munmap(first + kept, mapped - kept);
  arena.bytes_ = {first + skip, bytes};
  arena.owner_ = getpid();
  (void)madvise(first + skip, bytes, MADV_HUGEPAGE);
  // A forked child (a data loader's worker) would share the pages, and the next write to each would copy it first.
  // Where the disk transfers straight into such a page, old kernels leave the outcome with the child.
  if (madvise(first + skip, bytes, MADV_DONTFORK) != 0) SayShared(errno);
  static const std::vector<int> nodes = MemoryNodes();
  if (nodes.size() > 1) (void)Interleave(arena.bytes_, nodes);
  if (touch == Touch::kNow) {
    TouchParts(arena.bytes_, [](absl::Span<std::byte> part) {
      volatile std::byte* const touched = part.data();
      for (uint64_t at = 0; at < part.size(); at += kIoAlignment) touched[at] = std::byte{0};
    });
  }
  return arena;
}

void Arena::TouchBesideUse() const {
  // Before Linux 5.14 pages come with their first use.
  TouchParts(bytes_, [](absl::Span<std::byte> part) { (void)madvise(part.data(), part.size(), MADV_POPULATE_WRITE); });
}

Arena::Arena(Arena&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})),
      owner_(std::exchange(other.owner_, 0)),
      page_locked_for_(std::exchange(other.page_locked_for_, std::nullopt)),
      locked_(std::exchange(other.locked_, false)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  if (this != &other) {
    Release();
    bytes_ = std::exchange(other.bytes_, {});
    owner_ = std::exchange(other.owner_, 0);
    page_locked_for_ = std::exchange(other.page_locked_for_, std::nullopt);
    locked_ = std::exchange(other.locked_, false);
  }
  return *this;
}

absl::Status Arena::PageLockFor(int device) {
  if (page_locked() || bytes_.empty()) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(PageLock(bytes_, device));
  page_locked_for_ = device;
  return absl::OkStatus();
}

bool Arena::Lock(Touch touch) {
  if (locked_ || bytes_.empty()) return true;
  const bool later = touch == Touch::kLater && mlock2(bytes_.data(), bytes_.size(), MLOCK_ONFAULT) == 0;
  const bool unknown = touch == Touch::kLater && !later && (errno == ENOSYS || errno == EINVAL);
  locked_ = later || ((touch == Touch::kNow || unknown) && mlock(bytes_.data(), bytes_.size()) == 0);
  if (!locked_) (void)munlock(bytes_.data(), bytes_.size());  // a part may be locked
  return locked_;
}

// The addresses stay mapped: every hole cut into the mapping would use up one of the process's few mappings. The
// addresses of locked memory go on counting against the limit.
void Arena::Discard(absl::Span<std::byte> part) {
  part = WholePages(part);
  if (part.empty()) return;
  if (locked_) {
    if (madvise(part.data(), part.size(), MADV_DONTNEED_LOCKED) == 0) return;
    (void)munlock(part.data(), part.size());  // before Linux 5.18
  }
  if (madvise(part.data(), part.size(), MADV_DONTNEED) != 0) SayKept(errno);
}

Arena::~Arena() { Release(); }

void Arena::Release() {
  const absl::Span<std::byte> bytes = std::exchange(bytes_, {});
  const std::optional<int> page_locked_for = std::exchange(page_locked_for_, std::nullopt);
  // In a forked child the addresses may be another mapping's by now.
  if (bytes.empty() || owner_ != getpid()) return;
  if (page_locked_for.has_value()) PageUnlock(bytes, *page_locked_for);
  munmap(bytes.data(), bytes.size());
}

}  // namespace ballast::storage
