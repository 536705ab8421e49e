#include "ballast/proto/base/memory_socket.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"

namespace ballast::model {
namespace {

constexpr size_t kNameBytesMax = 100;
constexpr int kConnectionsWaitingMax = 64;

absl::Status SystemError(absl::string_view what) {
  return Error(absl::StatusCode::kUnavailable, kIo, absl::StrCat(what, ": ", std::strerror(errno)));
}

struct SocketAddress {
  sockaddr_un address = {};
  socklen_t bytes = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

absl::StatusOr<SocketAddress> AbstractAddress(const std::string& name) {
  if (name.empty() || name.size() > kNameBytesMax) {
    return Error(absl::StatusCode::kUnavailable, kIo,
                 absl::StrCat("a socket's name has 1 to ", kNameBytesMax, " bytes, got ", name.size()));
  }
  SocketAddress out;
  out.address.sun_family = AF_UNIX;
  std::memcpy(out.address.sun_path + 1, name.data(), name.size());
  out.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return out;
}

absl::StatusOr<Descriptor> NewSocket() {
  const int made = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (made < 0) return SystemError("socket");
  return Descriptor::Socket(made);
}

absl::Status BadMemory(absl::string_view why) {
  return Error(absl::StatusCode::kInvalidArgument, kBadRequest,
               absl::StrCat("this memory cannot be shared: ", why,
                            "; hand over a memfd of ordinary memory with all its pages, sealed by F_SEAL_SHRINK"));
}

}  // namespace

absl::StatusOr<std::string> HostName() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  struct stat network = {};
  if (!std::getline(file, boot) || boot.empty() || stat("/proc/self/ns/net", &network) != 0) {
    return Error(absl::StatusCode::kUnavailable, kIo,
                 "this system does not tell the running boot and network namespace");
  }
  return absl::StrCat(boot, "/", network.st_dev, "/", network.st_ino);
}

absl::StatusOr<std::string> MakeSecret(size_t bytes) {
  std::string secret(bytes, '\0');
  if (getrandom(secret.data(), secret.size(), 0) == static_cast<ssize_t>(bytes)) return secret;
  return Error(absl::StatusCode::kInternal, kIo, absl::StrCat("getrandom: ", std::strerror(errno)));
}

bool SameSecret(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned differs = 0;
  for (size_t i = 0; i < a.size(); ++i) differs |= static_cast<unsigned char>(a[i] ^ b[i]);
  return differs == 0;
}

absl::StatusOr<Descriptor> ListenAtMemorySocket(const std::string& name) {
  BALLAST_ASSIGN_OR_RETURN(const SocketAddress address, AbstractAddress(name));
  BALLAST_ASSIGN_OR_RETURN(Descriptor fd, NewSocket());
  if (bind(fd.get(), address.get(), address.bytes) != 0) return SystemError("bind");
  if (listen(fd.get(), kConnectionsWaitingMax) != 0) return SystemError("listen");
  return fd;
}

absl::StatusOr<Descriptor> ConnectToMemorySocket(const std::string& name) {
  BALLAST_ASSIGN_OR_RETURN(const SocketAddress address, AbstractAddress(name));
  BALLAST_ASSIGN_OR_RETURN(Descriptor fd, NewSocket());
  if (connect(fd.get(), address.get(), address.bytes) != 0) return SystemError("connect");
  return fd;
}

absl::Status SendSocketMessage(int socket, absl::string_view text, int descriptor) {
  iovec piece = {const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &descriptor, sizeof(int));
  }
  if (sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) != static_cast<ssize_t>(text.size())) {
    return SystemError("sendmsg");
  }
  return absl::OkStatus();
}

absl::StatusOr<SocketMessage> ReceiveSocketMessage(int socket, absl::Time deadline) {
  pollfd ready = {socket, POLLIN, 0};
  int came = 0;
  do {
    const absl::Duration left = std::max(deadline - absl::Now(), absl::ZeroDuration());
    came = poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(std::min(left, absl::Minutes(1)))));
  } while (came < 0 && errno == EINTR);
  if (came < 0) return SystemError("poll");
  if (came == 0) return Error(absl::StatusCode::kUnavailable, kIo, "no message came in time");

  SocketMessage out;
  out.text.resize(kSocketMessageBytesMax);
  iovec piece = {out.text.data(), out.text.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  // Room for one descriptor, and not for the padding, into which a second one would fit: the kernel closes further
  // ones, and MSG_CTRUNC tells.
  message.msg_controllen = CMSG_LEN(sizeof(int));
  const ssize_t bytes = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (bytes < 0 && errno != ECONNRESET) return SystemError("recvmsg");
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(head), sizeof(int));
    out.descriptor = Descriptor::Foreign(fd);
  }
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return Error(absl::StatusCode::kUnavailable, kIo, "the message is too long, or brings several descriptors");
  }
  out.text.resize(static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
  return out;
}

bool SocketEnded(int socket) {
  pollfd ready = {socket, POLLIN, 0};
  return poll(&ready, 1, 0) != 0;
}

absl::StatusOr<SharedMapping> SharedMapping::Make(Descriptor* memory) {
  constexpr unsigned kNoexecSeal = 8;  // MFD_NOEXEC_SEAL, of Linux 6.3
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int fd = memfd_create("ballast", kFlags | kNoexecSeal);
  if (fd < 0 && errno == EINVAL) fd = memfd_create("ballast", kFlags);
  if (fd < 0) return SystemError("memfd_create");
  *memory = Descriptor(fd);
  if (ftruncate(fd, kSharedBytes) != 0) return SystemError("ftruncate");
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) return SystemError("F_ADD_SEALS");
  if (fallocate(fd, 0, 0, kSharedBytes) != 0) return SystemError("fallocate");
  BALLAST_ASSIGN_OR_RETURN(SharedMapping mapping, MapDescriptor(fd));
  // Now rather than slice by slice: each first touch costs a page fault, and the process's resident set tells the
  // truth.
  std::memset(mapping.bytes().data(), 0, kSharedBytes);
  return mapping;
}

absl::StatusOr<SharedMapping> SharedMapping::Map(const Descriptor& memory) {
  const int fd = memory.get();
  // Files of disks have no seals.
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return BadMemory("it can become shorter while it is read");
  struct statfs system = {};
  if (fstatfs(fd, &system) != 0) return SystemError("fstatfs");
  if (system.f_type != TMPFS_MAGIC) return BadMemory("it is no ordinary memory");
  struct stat file = {};
  if (fstat(fd, &file) != 0) return SystemError("fstat");
  if (static_cast<uint64_t>(file.st_size) != kSharedBytes) {
    return BadMemory(absl::StrCat("it has ", file.st_size, " bytes, expected ", kSharedBytes));
  }
  BALLAST_ASSIGN_OR_RETURN(SharedMapping mapping, MapDescriptor(fd));
  // Mappings that exist stay writable; pages that are there stay there.
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0)
    return BadMemory("it can lose pages");
  // Drops pages beyond the end, which count as blocks.
  if (ftruncate(fd, kSharedBytes) != 0 || fstat(fd, &file) != 0) return SystemError("ftruncate");
  if (static_cast<uint64_t>(file.st_size) != kSharedBytes ||
      static_cast<uint64_t>(file.st_blocks) * 512 < kSharedBytes) {
    return BadMemory("it has holes");
  }
  return mapping;
}

absl::StatusOr<SharedMapping> SharedMapping::MapDescriptor(int fd) {
  void* const at = mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return SystemError("mmap");
  SharedMapping out;
  out.bytes_ = {static_cast<std::byte*>(at), kSharedBytes};
  out.owner_ = getpid();
  // A forked child must neither keep the memory nor write into it.
  if (madvise(at, kSharedBytes, MADV_DONTFORK) != 0) return SystemError("MADV_DONTFORK");
  return out;
}

SharedMapping::SharedMapping(SharedMapping&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})), owner_(other.owner_) {}

SharedMapping& SharedMapping::operator=(SharedMapping&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(owner_, other.owner_);
  return *this;
}

SharedMapping::~SharedMapping() {
  // In a forked child nothing is mapped there, or something else.
  if (!bytes_.empty() && owner_ == getpid()) munmap(bytes_.data(), bytes_.size());
}

}  // namespace ballast::model
