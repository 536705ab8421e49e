// Large messages leave memory behind, which no thread of gRPC gives back: those carry all calls.
#include "ballast/services/gateway/trimmer.h"

#include <dlfcn.h>

#include <algorithm>
#include <string>

#include "absl/synchronization/mutex.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"

namespace {

// While `held`, each trim waits.
absl::Mutex trims;
bool held = false;
int within = 0, most = 0;

void Hold(bool on) {
  absl::MutexLock lock(&trims);
  held = on;
  most = within;
}

}  // namespace

// The server's trims come here: a program's own function goes before the system's.
extern "C" int malloc_trim(size_t pad) noexcept {
  {
    absl::MutexLock lock(&trims);
    most = std::max(most, ++within);
    trims.Await(absl::Condition(
        +[](bool* on) { return !*on; }, &held));
    --within;
  }
  static auto* const of_system = reinterpret_cast<int (*)(size_t)>(::dlsym(RTLD_NEXT, "malloc_trim"));
  return of_system == nullptr ? 0 : of_system(pad);
}

namespace ballast::services {
namespace {

class TrimmerTest : public RpcTest {};

TEST_F(TrimmerTest, IsOneThreadWhateverComes) {
  const std::string large(size_t{6} << 20, 'x');
  std::string answer;
  Hold(true);
  for (int i = 0; i < 2; ++i) {  // as many as have turns; answered before the memory is given back
    const grpc::Status told = RawCall(channel_, "/ballast.v1.StateService/Identify", large, &answer);
    EXPECT_EQ(told.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << told.error_message();
  }
  {
    absl::MutexLock lock(&trims);
    const auto one = +[](int*threads) { return *threads >= 1; }, two = +[](int*threads) { return *threads >= 2; };
    EXPECT_TRUE(trims.AwaitWithTimeout(absl::Condition(one, &most), absl::Minutes(1)));
    EXPECT_FALSE(trims.AwaitWithTimeout(absl::Condition(two, &most), absl::Seconds(1))) << "gRPC's threads trim";
  }
  Hold(false);
  v1::IdentifyResponse identified;
  EXPECT_EQ(Call(&v1::StateService::Stub::Identify, v1::IdentifyRequest(), &identified), absl::OkStatus());
}

TEST(Trimmer, TellsAllWhoAsked) {
  int woken = 0, told = 0;
  Trimmer trimmer([&woken] { ++woken; });
  trimmer.Run();
  for (int i = 0; i < 100; ++i) trimmer.Trim([&told] { ++told; });
  trimmer.Trim(nullptr);
  EXPECT_EQ(told, 0) << "nothing is given back yet";
  EXPECT_EQ(woken, 1);
  trimmer.Run();
  EXPECT_EQ(told, 100);
  trimmer.Trim([&told] { ++told; });
  EXPECT_EQ(woken, 2);
  trimmer.Stop();
  EXPECT_EQ(told, 101);
  trimmer.Trim([&told] { ++told; });
  EXPECT_EQ(told, 102) << "nobody would trim";
}

}  // namespace
}  // namespace ballast::services
