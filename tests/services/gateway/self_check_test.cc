// What /readyz says of a server whose disk hangs under a write of the catalog.
#include "ballast/services/gateway/self_check.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "ballast/tests/services/answer.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"
#include "gmock/gmock.h"

namespace {

// While it hangs, syncs of the catalog's files wait.
absl::Mutex disk;
bool hangs = false;

void Hang(bool on) {
  absl::MutexLock lock(&disk);
  hangs = on;
}

}  // namespace

// RocksDB's syncs come here: a program's own function goes before the system's.
extern "C" int fdatasync(int fd) {
  std::error_code none;
  const std::filesystem::path file = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), none);
  if (file.parent_path().filename() == "catalog") {
    absl::MutexLock lock(&disk);
    disk.Await(absl::Condition(
        +[](bool* on) { return !*on; }, &hangs));
  }
  return static_cast<int>(::syscall(SYS_fdatasync, fd));
}

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

// Waits for a fault with these words; empty: for none.
std::string AwaitFault(const SelfCheck& check, const std::string& words) {
  std::string fault;
  for (const absl::Time end = absl::Now() + absl::Seconds(60); absl::Now() < end;) {
    fault = check.Fault();
    if (words.empty() ? fault.empty() : absl::StrContains(fault, words)) break;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return fault;
}

class SelfCheckTest : public RpcTest {};

TEST_F(SelfCheckTest, AWriteOfTheCatalogThatHangsIsAFaultUntilItEnds) {
  const auto check = SelfCheck::Start(rpc_.get(), server_.get(), absl::Seconds(1));
  ASSERT_TRUE(check.ok()) << check.status();
  Answer<v1::FenceResponse> answer;
  v1::FenceRequest request;
  request.set_job("waits");
  request.mutable_epoch()->set_counter(1);
  request.mutable_epoch()->set_nonce(7);
  request.set_protocol_version(model::kProtocolVersion);
  Hang(true);
  server_->Fence(request, absl::Now() + absl::Seconds(120), answer.reply());  // its promise is written
  EXPECT_THAT(AwaitFault(**check, "the catalog: "), HasSubstr("the catalog: a write to "));
  Hang(false);
  EXPECT_TRUE(answer.Wait().ok());
  EXPECT_EQ(AwaitFault(**check, ""), "");
}

}  // namespace
}  // namespace ballast::services
