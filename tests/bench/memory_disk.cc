#include "ballast/tests/bench/memory_disk.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"

namespace ballast::bench {

using storage::kIoAlignment;

namespace {

// Adds the bytes, and the nanoseconds of its life.
class Counted {
 public:
  Counted(MemoryDisk::Totals* totals, uint64_t bytes) : totals_(totals) { totals_->bytes += bytes; }
  ~Counted() {
    totals_->nanoseconds += static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begun_).count());
  }

 private:
  MemoryDisk::Totals* const totals_;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

}  // namespace

class MemoryDisk::Content {
 public:
  explicit Content(Totals* totals) : totals_(totals) {}
  absl::Status Read(uint64_t offset, absl::Span<std::byte> to) {
    const Counted counted(totals_, to.size());
    absl::MutexLock lock(&mutex_);
    if (offset + to.size() > bytes_) {
      return model::Error(absl::StatusCode::kDataLoss, model::kIo, "a read goes beyond the end of the file");
    }
    for (uint64_t at = 0; at < to.size(); at += kIoAlignment) {
      const Block* const block = blocks_[(offset + at) / kIoAlignment].get();
      const uint64_t n = std::min<uint64_t>(kIoAlignment, to.size() - at);
      block == nullptr ? std::memset(&to[at], 0, n) : std::memcpy(&to[at], block->data(), n);
    }
    return absl::OkStatus();
  }
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> from) {
    const Counted counted(totals_, from.size());
    absl::MutexLock lock(&mutex_);
    Grow(offset + from.size());
    for (uint64_t at = 0; at < from.size(); at += kIoAlignment) {
      std::unique_ptr<Block>& block = blocks_[(offset + at) / kIoAlignment];
      if (block == nullptr) block = std::make_unique<Block>();
      std::memcpy(block->data(), &from[at], std::min<uint64_t>(kIoAlignment, from.size() - at));
    }
    return absl::OkStatus();
  }
  void Discard(uint64_t offset, uint64_t bytes) {
    const Counted counted(totals_, bytes);
    absl::MutexLock lock(&mutex_);
    const uint64_t end = std::min<uint64_t>((offset + bytes) / kIoAlignment, blocks_.size());
    for (uint64_t block = offset / kIoAlignment; block < end; ++block) blocks_[block].reset();
  }
  void Resize(uint64_t bytes) {
    absl::MutexLock lock(&mutex_);
    bytes_ = bytes;
    blocks_.resize((bytes + kIoAlignment - 1) / kIoAlignment);
  }
  void Reserve(uint64_t end) {
    absl::MutexLock lock(&mutex_);
    Grow(end);
  }
  uint64_t bytes() {
    absl::MutexLock lock(&mutex_);
    return bytes_;
  }

 private:
  using Block = std::array<std::byte, kIoAlignment>;
  void Grow(uint64_t end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (end <= bytes_) return;
    bytes_ = end;
    blocks_.resize((end + kIoAlignment - 1) / kIoAlignment);
  }

  Totals* const totals_;
  absl::Mutex mutex_;
  uint64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::unique_ptr<Block>> blocks_ ABSL_GUARDED_BY(mutex_);
};

class MemoryDisk::File : public storage::BlockFile {
 public:
  File(std::string path, std::shared_ptr<Content> content) : BlockFile(std::move(path)), content_(std::move(content)) {}
  int fd() const override { return -1; }
  const std::string& buffered_because() const override { return direct_; }
  absl::StatusOr<uint64_t> Size() const override { return content_->bytes(); }
  absl::Status Read(uint64_t offset, absl::Span<std::byte> buffer) const override {
    return content_->Read(offset, buffer);
  }
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> buffer) const override {
    return content_->Write(offset, buffer);
  }
  absl::Status Sync() const override { return absl::OkStatus(); }
  absl::Status Reserve(uint64_t offset, uint64_t bytes) override {
    content_->Reserve(offset + bytes);
    return absl::OkStatus();
  }
  void Discard(uint64_t offset, uint64_t bytes) override { content_->Discard(offset, bytes); }
  absl::Status Truncate(uint64_t bytes) override {
    content_->Resize(bytes);
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<Content> content_;
  const std::string direct_;
};

class MemoryDisk::Queue : public storage::IoQueue {
 public:
  absl::Status Submit(const storage::IoRequest& request) override {
    absl::Status status;
    if (request.kind == storage::IoRequest::Kind::kRead) status = request.file->Read(request.offset, request.buffer);
    if (request.kind == storage::IoRequest::Kind::kWrite) status = request.file->Write(request.offset, request.buffer);
    done_.push_back({.tag = request.tag, .status = std::move(status)});
    return absl::OkStatus();
  }
  void Reap(bool, std::vector<storage::IoCompletion>* completions) override {
    std::move(done_.begin(), done_.end(), std::back_inserter(*completions));
    done_.clear();
  }
  uint64_t in_flight() const override { return done_.size(); }
  const char* name() const override { return "memory"; }

 private:
  std::vector<storage::IoCompletion> done_;
};

MemoryDisk::MemoryDisk() = default;
MemoryDisk::~MemoryDisk() = default;

absl::StatusOr<std::unique_ptr<storage::BlockFile>> MemoryDisk::Open(const std::string& path, Mode mode) {
  absl::MutexLock lock(&mutex_);
  std::shared_ptr<Content>& content = files_[path];
  if (content == nullptr || mode == Mode::kEmptied) content = std::make_shared<Content>(&totals_);
  return std::make_unique<File>(path, content);
}

bool MemoryDisk::Exists(const std::string& path) const {
  absl::MutexLock lock(&mutex_);
  return files_.contains(path);
}

absl::Status MemoryDisk::Remove(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  files_.erase(path);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<storage::IoQueue>> MemoryDisk::MakeQueue(const storage::IoQueueOptions&) {
  return std::make_unique<Queue>();
}

}  // namespace ballast::bench
