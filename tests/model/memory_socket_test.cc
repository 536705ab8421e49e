// Handing memory over by a socket: what a hostile or a dying peer can do.
#include "ballast/proto/base/memory_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/storage/in_child.h"

namespace ballast::model {
namespace {

constexpr uint64_t kBytes = kSharedBytes;

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

struct Pair {
  Descriptor client, server;
};

Pair Connected() {
  static int counter = 0;
  const std::string name = absl::StrCat("ballast-test/", getpid(), "/", ++counter);
  auto listener = ListenAtMemorySocket(name);
  EXPECT_TRUE(listener.ok()) << listener.status();
  auto client = ConnectToMemorySocket(name);
  EXPECT_TRUE(client.ok()) << client.status();
  return {*std::move(client), Descriptor(accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK))};
}

absl::Status MapStatus(int fd) { return SharedMapping::Map(Descriptor(fd)).status(); }

TEST(MemorySocketTest, BothSidesSeeTheSameBytes) {
  const Pair pair = Connected();
  Descriptor memory;
  auto made = SharedMapping::Make(&memory);
  ASSERT_TRUE(made.ok()) << made.status();
  ASSERT_EQ(SendSocketMessage(pair.client.get(), "memory", memory.get()), absl::OkStatus());
  auto message = ReceiveSocketMessage(pair.server.get(), Soon());
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(message->text, "memory");
  auto mapped = SharedMapping::Map(message->descriptor);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  made->bytes()[kBytes - 1] = std::byte{7};
  EXPECT_EQ(mapped->bytes()[kBytes - 1], std::byte{7});
  mapped->bytes()[0] = std::byte{9};
  EXPECT_EQ(made->bytes()[0], std::byte{9});
  // The mapping outlives what it came by.
  message->descriptor = Descriptor();
  memory = Descriptor();
  const SharedMapping moved = *std::move(mapped);
  made = absl::UnknownError("gone");
  EXPECT_EQ(moved.bytes()[0], std::byte{9});
}

int Memory(unsigned flags, int seals, off_t bytes = kBytes, off_t allocated = kBytes) {
  const int fd = memfd_create("test", flags);
  EXPECT_EQ(ftruncate(fd, bytes), 0);
  EXPECT_EQ(allocated > 0 ? fallocate(fd, 0, 0, allocated) : 0, 0);
  EXPECT_EQ(seals != 0 ? fcntl(fd, F_ADD_SEALS, seals) : 0, 0);
  return fd;
}

TEST(MemorySocketTest, OnlyWholeMemoryThatCannotBecomeLessIsMapped) {
  EXPECT_EQ(MapStatus(Memory(MFD_ALLOW_SEALING, F_SEAL_SHRINK)), absl::OkStatus());
  const ScratchDirectory directory;
  const int file = open((directory.path() + "/f").c_str(), O_RDWR | O_CREAT, 0600);
  ASSERT_EQ(ftruncate(file, kBytes), 0);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  close(ends[1]);
  for (const int fd :
       {Memory(MFD_ALLOW_SEALING, 0), Memory(MFD_ALLOW_SEALING, F_SEAL_GROW), Memory(0, 0), file, ends[0],
        Memory(MFD_ALLOW_SEALING, F_SEAL_SHRINK, 0, 0), Memory(MFD_ALLOW_SEALING, F_SEAL_SHRINK, kBytes + 4096),
        Memory(MFD_ALLOW_SEALING, F_SEAL_SHRINK, off_t{1} << 50), Memory(MFD_ALLOW_SEALING, F_SEAL_SHRINK, kBytes, 0),
        Memory(MFD_ALLOW_SEALING, F_SEAL_SHRINK, kBytes, kBytes - 4096),
        // Later seals are not possible, so it might lose pages.
        Memory(MFD_ALLOW_SEALING, F_SEAL_SHRINK | F_SEAL_SEAL), -1}) {
    const absl::Status status = MapStatus(fd);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(ReasonOf(status), kBadRequest) << status;
  }
}

TEST(MemorySocketTest, PagesBeyondTheEndFillNoHoles) {
  const int fd = memfd_create("test", MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(fd, kBytes), 0);
  ASSERT_EQ(fallocate(fd, FALLOC_FL_KEEP_SIZE, kBytes, kBytes), 0);
  ASSERT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  const absl::Status status = MapStatus(fd);
  EXPECT_NE(status.message().find("it has holes"), std::string::npos) << status;
}

TEST(MemorySocketTest, HugePagesAreNoOrdinaryMemory) {
  const int fd = memfd_create("test", MFD_ALLOW_SEALING | MFD_HUGETLB);
  if (fd < 0) GTEST_SKIP() << "this kernel has no huge pages";
  ASSERT_EQ(ftruncate(fd, kBytes), 0);
  ASSERT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  const absl::Status status = MapStatus(fd);
  EXPECT_NE(status.message().find("no ordinary memory"), std::string::npos) << status;
}

TEST(MemorySocketTest, MemoryThatIsMappedByBothKeepsItsPages) {
  Descriptor memory;
  auto made = SharedMapping::Make(&memory);
  ASSERT_TRUE(made.ok()) << made.status();
  const auto mapped = SharedMapping::Map(memory);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_NE(ftruncate(memory.get(), 0), 0);
  EXPECT_NE(fallocate(memory.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kBytes), 0);
  EXPECT_NE(madvise(made->bytes().data(), kBytes, MADV_REMOVE), 0);
  EXPECT_NE(fcntl(memory.get(), F_ADD_SEALS, F_SEAL_WRITE), 0);
  made->bytes()[0] = std::byte{1};
  EXPECT_EQ(mapped->bytes()[0], std::byte{1});
}

// A socket whose close lasts for half a minute, or until its listener is closed.
int SlowSocket(int* listener) {
  *listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int slow = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(address);
  EXPECT_EQ(bind(*listener, reinterpret_cast<sockaddr*>(&address), bytes), 0);
  EXPECT_EQ(listen(*listener, 1), 0);
  EXPECT_EQ(getsockname(*listener, reinterpret_cast<sockaddr*>(&address), &bytes), 0);
  EXPECT_EQ(connect(slow, reinterpret_cast<sockaddr*>(&address), bytes), 0);
  const linger lasting = {.l_onoff = 1, .l_linger = 30};
  EXPECT_EQ(setsockopt(slow, SOL_SOCKET, SO_LINGER, &lasting, sizeof(lasting)), 0);
  const std::string data(1 << 16, 'x');
  while (send(slow, data.data(), data.size(), MSG_DONTWAIT) > 0) {
  }
  return slow;
}

// Closes a SlowSocket by `close`, opens and closes other descriptors meanwhile, and closes the listener.
void ExpectHoldsUpNobody(int listener, const std::function<void()>& close) {
  std::atomic<bool> closed{false};
  std::thread closing([&] {
    close();
    closed = true;
  });
  for (int i = 0; i < 1000; ++i) Descriptor opened(open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_FALSE(closed) << "the close did not last, or the others waited for it";
  ::close(listener);
  closing.join();
}

// A process that sends a descriptor decides how long its close takes; nobody else may wait for that.
TEST(MemorySocketTest, AForeignDescriptorThatClosesSlowlyHoldsUpNobody) {
  int listener = -1;
  const int slow = SlowSocket(&listener);
  ExpectHoldsUpNobody(listener, [&] { Descriptor::Foreign(slow) = Descriptor(); });
}

// The descriptor is closed with the socket where it waits unread.
TEST(MemorySocketTest, ASocketWithAForeignDescriptorHoldsUpNobody) {
  int listener = -1;
  Pair pair = Connected();
  const int slow = SlowSocket(&listener);
  ASSERT_EQ(SendSocketMessage(pair.server.get(), "x", slow), absl::OkStatus());
  close(slow);
  ExpectHoldsUpNobody(listener, [&] { pair.client = Descriptor(); });
}

TEST(MemorySocketTest, AMessageBringsOneDescriptorAtMost) {
  const Pair pair = Connected();
  const int before = dup(0);  // the lowest free number: what is left open would be below the next one
  close(before);
  const std::array<int, 2> two = {0, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(two))] = {};
  char text[] = "memory";
  iovec piece = {text, sizeof(text) - 1};
  msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* const head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof(two));
  std::memcpy(CMSG_DATA(head), two.data(), sizeof(two));
  ASSERT_EQ(sendmsg(pair.client.get(), &message, 0), static_cast<ssize_t>(piece.iov_len));
  EXPECT_FALSE(ReceiveSocketMessage(pair.server.get(), Soon()).ok());
  const int after = dup(0);
  close(after);
  EXPECT_EQ(after, before) << "a descriptor was left open";
}

TEST(MemorySocketTest, LongMessagesAndSilenceAreErrors) {
  const Pair pair = Connected();
  EXPECT_FALSE(ReceiveSocketMessage(pair.server.get(), absl::InfinitePast()).ok());
  ASSERT_EQ(SendSocketMessage(pair.client.get(), std::string(kSocketMessageBytesMax + 1, 'x')), absl::OkStatus());
  EXPECT_FALSE(ReceiveSocketMessage(pair.server.get(), Soon()).ok());
}

TEST(MemorySocketTest, AnEndIsSeen) {
  Pair pair = Connected();
  EXPECT_FALSE(SocketEnded(pair.client.get()));
  pair.server = Descriptor();
  EXPECT_TRUE(SocketEnded(pair.client.get()));
  const auto message = ReceiveSocketMessage(pair.client.get(), Soon());
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(message->text, "");
}

// A data loader's worker must not keep the memory of a trainer that died.
TEST(MemorySocketTest, AForkedChildHasNeitherMemoryNorSocket) {
  Pair pair = Connected();
  Descriptor memory;
  auto made = SharedMapping::Make(&memory);
  ASSERT_TRUE(made.ok()) << made.status();
  made->bytes()[0] = std::byte{1};
  int alive[2];
  ASSERT_EQ(pipe(alive), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(alive[1]);
    char byte = 0;
    while (read(alive[0], &byte, 1) > 0) {
    }
    _exit(0);
  }
  pair.client = Descriptor();
  for (const absl::Time end = Soon(); !SocketEnded(pair.server.get()) && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(1));  // the child closes its copy as it starts
  }
  EXPECT_TRUE(SocketEnded(pair.server.get())) << "the child keeps the socket open";
  close(alive[1]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(
      storage::InChild([&] { return msync(made->bytes().data(), kBytes, MS_ASYNC) != 0 && errno == ENOMEM ? 0 : 1; }),
      0)
      << "the child has the memory";
}

TEST(MemorySocketTest, SecretsDiffer) {
  const auto one = MakeSecret(kSecretBytes), other = MakeSecret(kSecretBytes);
  ASSERT_TRUE(one.ok() && other.ok());
  EXPECT_FALSE(SameSecret(*one, *other));
  EXPECT_TRUE(SameSecret(*one, *one));
  EXPECT_FALSE(SameSecret(*one, one->substr(1)));
}

TEST(MemorySocketTest, NobodyListensUnderOtherNames) {
  EXPECT_FALSE(ConnectToMemorySocket("ballast-test/nobody").ok());
  EXPECT_FALSE(ConnectToMemorySocket("").ok());
  EXPECT_FALSE(ConnectToMemorySocket(std::string(500, 'x')).ok());
}

}  // namespace
}  // namespace ballast::model
