#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/storage/io/block_file.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

// Syncs end when the test lets them.
class GatedFile : public BlockFile {
 public:
  GatedFile() : BlockFile("gated") {}
  int fd() const override { return -1; }
  const std::string& buffered_because() const override { return path(); }
  absl::StatusOr<uint64_t> Size() const override { return 0; }
  absl::Status Read(uint64_t, absl::Span<std::byte>) const override { return absl::OkStatus(); }
  absl::Status Write(uint64_t, absl::Span<const std::byte>) const override { return absl::OkStatus(); }
  absl::Status Sync() const override {
    const int at_once = ++under_way;
    EXPECT_EQ(at_once, 1);
    ++begun;
    absl::MutexLock lock(&mutex);
    const auto allowed = [this] { return begun.load() <= end_up_to; };
    mutex.Await(absl::Condition(&allowed));
    --under_way;
    return begun.load() == fails ? absl::InternalError("the disk is gone") : absl::OkStatus();
  }
  absl::Status Reserve(uint64_t, uint64_t) override { return absl::OkStatus(); }
  void Discard(uint64_t, uint64_t) override {}
  absl::Status Truncate(uint64_t) override { return absl::OkStatus(); }

  void EndUpTo(int count) {
    absl::MutexLock lock(&mutex);
    end_up_to = count;
  }
  mutable std::atomic<int> under_way = 0, begun = 0;
  mutable absl::Mutex mutex;
  int end_up_to = 0;
  int fails = -1;
};

// How many syncs a first caller and six others take, who have so long to come before the first sync ends.
int SyncsOfSeven(absl::Duration time) {
  GatedFile file;
  SharedSync shared(&file);
  std::thread first([&] { EXPECT_EQ(shared.Sync(), absl::OkStatus()); });
  while (file.begun.load() < 1) std::this_thread::yield();
  std::atomic<int> returned = 0;
  std::vector<std::thread> others;
  for (int i = 0; i < 6; ++i) {
    others.emplace_back([&] {
      EXPECT_EQ(shared.Sync(), absl::OkStatus());
      ++returned;
    });
  }
  absl::SleepFor(time);
  file.EndUpTo(1);
  first.join();
  while (file.begun.load() < 2) std::this_thread::yield();
  EXPECT_EQ(returned.load(), 0) << "by a sync that had begun before";
  file.EndUpTo(100);
  for (std::thread& other : others) other.join();
  return file.begun.load();
}

// A caller while a sync runs cannot take that one's word, whose beginning may lie before the caller's writes: the next
// one answers it, and everybody who waits.
TEST(SharedSyncTest, CallersThatWaitShareTheNextSync) {
  // On a busy machine a caller may come after the second sync began, and begin a third.
  int syncs = 0;
  for (absl::Duration time = absl::Milliseconds(50); time < absl::Seconds(30) && syncs != 2; time *= 4) {
    syncs = SyncsOfSeven(time);
  }
  EXPECT_EQ(syncs, 2);
}

TEST(SharedSyncTest, OneAfterTheOtherEachSyncs) {
  GatedFile file;
  file.EndUpTo(100);
  SharedSync shared(&file);
  for (int i = 1; i <= 3; ++i) {
    EXPECT_EQ(shared.Sync(), absl::OkStatus());
    EXPECT_EQ(file.begun.load(), i);
  }
}

TEST(SharedSyncTest, AnErrorIsEverybodysForGood) {
  GatedFile file;
  file.fails = 1;
  SharedSync shared(&file);
  std::thread first([&] { EXPECT_EQ(shared.Sync().code(), absl::StatusCode::kInternal); });
  while (file.begun.load() < 1) std::this_thread::yield();
  std::thread second([&] { EXPECT_EQ(shared.Sync().code(), absl::StatusCode::kInternal); });
  absl::SleepFor(absl::Milliseconds(20));
  file.EndUpTo(100);
  first.join();
  second.join();
  EXPECT_EQ(shared.Sync().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(file.begun.load(), 1) << "never tried again";
}

}  // namespace
}  // namespace ballast::storage
