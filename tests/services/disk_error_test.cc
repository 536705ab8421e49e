// A disk that cannot read what a recovery wants: what others still have does not refuse a job.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <functional>
#include <utility>

#include "absl/time/clock.h"
#include "ballast/services/foundation.h"
#include "ballast/tests/services/logged_slices.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

// Reads of `bad` bytes of any file fail with EIO while it is set.
class BadBlocks {
 public:
  void Set(storage::PayloadPlace bad) { bad_ = bad; }
  bool Touch(uint64_t offset, uint64_t bytes) const {
    return offset < bad_.offset + bad_.bytes && bad_.offset < offset + bytes;
  }

 private:
  storage::PayloadPlace bad_;
};

class BadFile : public storage::BlockFile {
 public:
  BadFile(std::unique_ptr<BlockFile> file, const BadBlocks* bad)
      : BlockFile(file->path()), file_(std::move(file)), bad_(*bad) {}
  int fd() const override { return file_->fd(); }
  const std::string& buffered_because() const override { return file_->buffered_because(); }
  absl::StatusOr<uint64_t> Size() const override { return file_->Size(); }
  absl::Status Read(uint64_t offset, absl::Span<std::byte> buffer) const override {
    if (bad_.Touch(offset, buffer.size())) return storage::IoError(EIO, "read", path(), offset, buffer.size());
    return file_->Read(offset, buffer);
  }
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> buffer) const override {
    return file_->Write(offset, buffer);
  }
  absl::Status Sync() const override { return file_->Sync(); }
  absl::Status Reserve(uint64_t offset, uint64_t bytes) override { return file_->Reserve(offset, bytes); }
  void Discard(uint64_t offset, uint64_t bytes) override { file_->Discard(offset, bytes); }
  absl::Status Truncate(uint64_t bytes) override { return file_->Truncate(bytes); }

 private:
  const std::unique_ptr<BlockFile> file_;
  const BadBlocks& bad_;
};

// This machine, but for the log of "job", which has bad blocks.
class BadDisk : public Foundation, private storage::Disk {
 public:
  BadBlocks& bad() { return bad_; }
  storage::Disk* disk() override { return this; }
  absl::StatusOr<std::unique_ptr<storage::Catalog>> OpenCatalog(const std::string& directory) override {
    return SystemFoundation()->OpenCatalog(directory);
  }
  std::unique_ptr<Executor> MakeExecutor(int threads) override { return SystemFoundation()->MakeExecutor(threads); }
  void Pump(storage::GradientLog* log, std::function<void()> progress) override {
    SystemFoundation()->Pump(log, std::move(progress));
  }
  void StopPumping(storage::GradientLog* log) override { SystemFoundation()->StopPumping(log); }

 private:
  absl::StatusOr<std::unique_ptr<storage::BlockFile>> Open(const std::string& path, Mode mode) override {
    auto file = storage::SystemDisk()->Open(path, mode);
    if (!file.ok() || !path.ends_with("/log-job")) return file;
    return std::make_unique<BadFile>(*std::move(file), &bad_);
  }
  absl::Status Remove(const std::string& path) override { return storage::SystemDisk()->Remove(path); }
  absl::StatusOr<std::unique_ptr<storage::IoQueue>> MakeQueue(const storage::IoQueueOptions& options) override {
    return storage::SystemDisk()->MakeQueue(options);
  }

  BadBlocks bad_;
};

float Ones(uint32_t, uint64_t) { return 1; }

// As one that has rotted: nobody else needs its bytes before its step is prepared, and its rank has them.
TEST(DiskError, ASliceThatCannotBeReadIsPushedAgainUnlessItsStepIsPrepared) {
  BadDisk disk;
  TestServer server("s", {0, uint64_t{64} << 20, uint64_t{128} << 20});
  server.options().foundation = &disk;
  server.Restart();
  v1::JobSpec spec = MakeSpec("job", SmallModel());
  spec.set_durability(v1::DURABILITY_STEP);
  const auto tensors = static_cast<uint32_t>(SmallModel().size());
  const std::string log = server.directory() + "/log-job";
  std::optional<v1::Decision> first;
  {
    TrainerGroup group({server.get()}, spec, 1);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.PushAll(v1::SLICE_KIND_VALUE, AllTensors(tensors), Ones), absl::OkStatus());
    const auto decision = group.Finish(ValuesHeader(tensors));
    ASSERT_TRUE(decision.ok()) << decision.status();
    first = *decision;
  }
  {
    TrainerGroup group({server.get()}, spec, 1, 2);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(tensors), Ones), absl::OkStatus());
    while (LoggedSlices(1, log).size() < group.plan().slices().size()) absl::SleepFor(absl::Milliseconds(5));
  }
  server.End();
  disk.bad().Set(LoggedSlices(1, log).back());
  server.Restart();
  ASSERT_EQ(server->Status().jobs(0).failure(), "");
  // The group that kept its gradients is told what is missing.
  TrainerGroup same({server.get()}, spec, 1, 2);
  ASSERT_EQ(same.Open(0, first), absl::OkStatus());
  Answer<v1::SealResponse> sealed;
  server->Seal(same.SealOf(0, UpdateHeader(tensors), 0), absl::Now() + absl::Seconds(20), sealed.reply());
  const auto pending = sealed.Wait();
  ASSERT_TRUE(pending.ok()) << pending.status();
  EXPECT_EQ(pending->pending().missing_count(), 1u);
  ASSERT_EQ(same.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(tensors), Ones), absl::OkStatus());
  ASSERT_TRUE(same.SealAll(UpdateHeader(tensors)).ok());
  // The older record does not count any more.
  server.Restart();
  ASSERT_EQ(server->Status().jobs(0).failure(), "");
  server.End();
  disk.bad().Set(LoggedSlices(1, log).back());
  server.Restart();
  EXPECT_THAT(server->Status().jobs(0).failure(), ::testing::HasSubstr("Input/output error"));
  EXPECT_FALSE(server->Status().jobs(0).state_lost()) << "another start may read it";
  server.End();
  disk.bad().Set({});
  server.Restart();
  TrainerGroup next({server.get()}, spec, 1, 3);
  ASSERT_EQ(next.Start(), absl::OkStatus());
  EXPECT_EQ(next.step(), 2);
}

}  // namespace
}  // namespace ballast::services
