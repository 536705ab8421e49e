#include "ballast/client/python/native/stash/stash.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk.h"

namespace ballast::stash {

using storage::AlignUp;
using storage::IoCompletion;
using storage::IoRequest;
using storage::NvmeExtent;

namespace {

constexpr uint64_t kAnyPart = ~uint64_t{0};

}  // namespace

StashedPart::~StashedPart() {
  if (stash_ == nullptr) return;
  if (stash_->own()) {
    stash_->Drop(number_);
  } else {
    new std::shared_ptr<Stash>(std::move(stash_));  // the threads of a Stash are not in a forked child
  }
}

absl::Span<std::byte> StashedPart::memory() const { return stash_->MemoryOf(number_).first(bytes_); }
void StashedPart::Finish() { stash_->Finish(number_, kernels::Crc32c(memory())); }
bool StashedPart::ready() const { return stash_->own() && stash_->Ready(number_); }
void StashedPart::Release() { stash_->Release(number_); }

absl::Status StashedPart::Take(absl::Span<std::byte> to) {
  if (to.size() != bytes_) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                        absl::StrCat("a part of ", bytes_, " bytes does not go into ", to.size()));
  }
  BALLAST_ASSIGN_OR_RETURN(const Stash::Held held, stash_->Hold(number_));
  absl::Status status;
  if (held.crc32c.has_value()) {
    status = stash_->Compare(number_, held, kernels::CopyCrc32c(held.bytes, to.data()));
  } else {
    std::memcpy(to.data(), held.bytes.data(), bytes_);
  }
  stash_->Release(number_);
  return status;
}

absl::StatusOr<absl::Span<const std::byte>> StashedPart::Hold() {
  BALLAST_ASSIGN_OR_RETURN(const Stash::Held held, stash_->Hold(number_));
  if (!held.crc32c.has_value()) return held.bytes;
  const absl::Status status = stash_->Compare(number_, held, kernels::Crc32c(held.bytes));
  if (status.ok()) return held.bytes;
  stash_->Release(number_);
  return status;
}

Stash::Stash(const StashOptions& options) : pid_(getpid()), space_(options.budget, options.gpu) {}

absl::StatusOr<std::shared_ptr<Stash>> Stash::Open(const StashOptions& options) {
  std::shared_ptr<Stash> stash(new Stash(options));
  if (options.budget.nvme > 0) BALLAST_RETURN_IF_ERROR(stash->OpenFile(options));
  return stash;
}

absl::Status Stash::OpenFile(const StashOptions& options) {
  if (options.staging_bytes < 2 * kPartBytesMax) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadConfig,
        absl::StrCat("staging of ", options.staging_bytes, " bytes: expected at least ", 2 * kPartBytesMax));
  }
  storage::Disk* const disk = options.disk == nullptr ? storage::SystemDisk() : options.disk;
  BALLAST_ASSIGN_OR_RETURN(auto file, disk->Open(options.path, storage::Disk::Mode::kEmptied));
  BALLAST_RETURN_IF_ERROR(disk->Remove(options.path));
  space_.UseFile(std::move(file));
  BALLAST_ASSIGN_OR_RETURN(storage::Arena memory, space_.MapBesideBudget(options.staging_bytes));
  const absl::Span<std::byte> registered = memory.bytes();
  staging_.Add(std::move(memory));
  BALLAST_ASSIGN_OR_RETURN(
      disk_, DiskThread::Start(disk, registered, [this](const IoCompletion& completion) { Transferred(completion); }));
  return absl::OkStatus();
}

bool Stash::own() const { return getpid() == pid_; }

absl::Status Stash::CheckProcess() const {
  if (own()) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                      "this process was forked from the one that has the stash, whose memory and file are not here; "
                      "make a stash after the fork, or start worker processes with spawn");
}

StashCounters Stash::counters() const {
  absl::MutexLock lock(&mutex_);
  StashCounters counters = counters_;
  counters.waited_seconds += space_.waited_seconds();
  return counters;
}

// --- staging

absl::Span<std::byte> Stash::TryStaging(uint64_t bytes, uint64_t before) {
  while (true) {
    const absl::Span<std::byte> taken = staging_.Take(bytes);
    if (!taken.empty() || clean_.empty() || *clean_.begin() >= before) return taken;
    const auto part = parts_.find(*clean_.begin());
    GiveStagingBack(part);
    in_file_.insert(part->first);
  }
}

absl::Span<std::byte> Stash::AwaitStaging(uint64_t bytes) {
  absl::Span<std::byte> taken;
  while ((taken = TryStaging(bytes, kAnyPart)).empty()) Wait();
  return taken;
}

void Stash::Wait() {
  const auto began = std::chrono::steady_clock::now();
  changed_.Wait(&mutex_);
  counters_.waited_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

void Stash::GiveStagingBack(Parts::iterator part) {
  staging_.Return(std::exchange(part->second.memory, {}));
  clean_.erase(part->first);
}

NvmeExtent Stash::Settle(Parts::iterator part) {
  Part& settled = part->second;
  changed_.SignalAll();
  if (settled.holders > 0 || settled.in_transfer()) return {};
  if (settled.dropped) {
    NvmeExtent freed = Erase(part);
    ReadAhead(ahead_);
    return freed;
  }
  if (settled.where != Part::Where::kFile || settled.memory.empty()) return {};
  if (settled.failed.ok() && !settled.taken) {
    clean_.insert(part->first);
    return {};
  }
  GiveStagingBack(part);
  if (settled.failed.ok()) taken_.insert(part->first);
  ReadAhead(ahead_);  // the write may have ended after the part was taken
  return {};
}

NvmeExtent Stash::Erase(Parts::iterator part) {
  Part gone = std::move(part->second);
  const bool in_dram = gone.extent.bytes() == 0;
  if (in_dram) {
    space_.ReturnDram(gone.memory);
  } else if (!gone.memory.empty()) {
    staging_.Return(gone.memory);
  }
  (in_dram ? counters_.dram : counters_.nvme) -= AlignUp(gone.bytes);
  clean_.erase(part->first);
  in_file_.erase(part->first);
  taken_.erase(part->first);
  parts_.erase(part);
  return std::move(gone.extent);
}

// --- putting aside

absl::StatusOr<StashedPart> Stash::Begin(uint64_t bytes) {
  BALLAST_RETURN_IF_ERROR(CheckProcess());
  if (bytes == 0 || bytes > kPartBytesMax) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                        absl::StrCat("a part of ", bytes, " bytes: expected 1 to ", kPartBytesMax));
  }
  const uint64_t space = AlignUp(bytes);
  Part part{.bytes = bytes, .memory = space_.TakeDram(space)};
  const bool in_dram = !part.memory.empty();
  if (!in_dram) {
    BALLAST_ASSIGN_OR_RETURN(part.extent, space_.TakeExtent(space));
  }
  NvmeExtent unused;
  absl::Status failed;
  {
    absl::MutexLock lock(&mutex_);
    ahead_ = 0;
    if (!in_dram && write_failed_.ok()) part.memory = AwaitStaging(space);
    if (!part.memory.empty()) {
      (in_dram ? counters_.dram : counters_.nvme) += space;
      const uint64_t number = next_++;
      parts_.emplace(number, std::move(part));
      return StashedPart(shared_from_this(), number, bytes);
    }
    failed = write_failed_;
    unused = std::move(part.extent);
    space_.Leaves();
  }
  space_.Return(std::move(unused));
  return failed;
}

absl::StatusOr<StashedPart> Stash::Put(absl::Span<const std::byte> bytes) {
  BALLAST_ASSIGN_OR_RETURN(StashedPart part, Begin(bytes.size()));
  Finish(part.number_, kernels::CopyCrc32c(bytes, part.memory().data()));
  return part;
}

void Stash::Finish(uint64_t number, uint32_t crc32c) {
  absl::MutexLock lock(&mutex_);
  Part& part = parts_.at(number);
  if (part.extent.bytes() == 0) {
    part.where = Part::Where::kDram;
    return;
  }
  part.where = Part::Where::kWriting;
  part.crc32c = crc32c;
  disk_->Hand({.kind = IoRequest::Kind::kWrite,
               .file = space_.file(),
               .offset = part.extent.offset(),
               .buffer = part.memory,
               .tag = number},
              DiskThread::Turn::kLast);
}

absl::Span<std::byte> Stash::MemoryOf(uint64_t number) const {
  absl::MutexLock lock(&mutex_);
  return parts_.at(number).memory;
}

void Stash::Drop(uint64_t number) {
  NvmeExtent freed;
  {
    absl::MutexLock lock(&mutex_);
    const auto part = parts_.find(number);
    part->second.dropped = true;
    if (part->second.extent.bytes() > 0) space_.Leaves();
    if (part->second.in_transfer() && disk_->Withdraw(number)) part->second.where = Part::Where::kFile;
    freed = Settle(part);
  }
  space_.Return(std::move(freed));
}

// --- taking back

void Stash::StartRead(Parts::iterator part, absl::Span<std::byte> memory, DiskThread::Turn turn) {
  in_file_.erase(part->first);
  taken_.erase(part->first);
  part->second.where = Part::Where::kReading;
  part->second.taken = false;
  part->second.memory = memory;
  disk_->Hand({.kind = IoRequest::Kind::kRead,
               .file = space_.file(),
               .offset = part->second.extent.offset(),
               .buffer = memory,
               .tag = part->first},
              turn);
}

void Stash::ReadAhead(uint64_t before) {
  auto next = in_file_.lower_bound(before);
  while (next != in_file_.begin()) {
    --next;
    const auto part = parts_.find(*next);
    const absl::Span<std::byte> memory = TryStaging(AlignUp(part->second.bytes), /*before=*/part->first);
    if (memory.empty()) return;
    StartRead(part, memory, DiskThread::Turn::kLast);
    next = in_file_.lower_bound(part->first);
  }
}

void Stash::Transferred(const IoCompletion& completion) {
  NvmeExtent freed;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = parts_.find(completion.tag);
    Part& part = found->second;
    const bool written = part.where == Part::Where::kWriting;
    part.where = Part::Where::kFile;
    if (completion.status.ok()) {
      (written ? counters_.written : counters_.read) += part.memory.size();
    } else if (written) {
      part.failed = model::Annotate(completion.status, "what autograd saved could not be written");
      write_failed_.Update(part.failed);
    } else {
      part.failed = model::Error(
          absl::StatusCode::kDataLoss, model::kIo,
          absl::StrCat("what autograd saved cannot be read back: ", std::string(completion.status.message())));
    }
    freed = Settle(found);
  }
  space_.Return(std::move(freed));
}

absl::StatusOr<Stash::Held> Stash::Hold(uint64_t number) {
  BALLAST_RETURN_IF_ERROR(CheckProcess());
  absl::MutexLock lock(&mutex_);
  const auto found = parts_.find(number);
  Part& part = found->second;
  if (part.where == Part::Where::kFilling) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest, "the part is not finished");
  }
  ++part.holders;
  clean_.erase(number);
  if (taken_.contains(number)) in_file_.merge(taken_);  // another backward pass over the same graph
  while (part.failed.ok() && part.memory.empty()) {
    // Meanwhile another caller's read-ahead may begin to read this part.
    const absl::Span<std::byte> memory = TryStaging(AlignUp(part.bytes), kAnyPart);
    memory.empty() ? Wait() : StartRead(found, memory, DiskThread::Turn::kFirst);
  }
  ahead_ = number;
  ReadAhead(number);
  while (part.where == Part::Where::kReading) Wait();
  if (!part.failed.ok()) {
    --part.holders;
    (void)Settle(found);  // not dropped: the caller has the part
    return part.failed;
  }
  Held held{.bytes = part.memory.first(part.bytes), .crc32c = std::nullopt};
  if (part.extent.bytes() > 0) held.crc32c = part.crc32c;
  return held;
}

void Stash::Release(uint64_t number) {
  NvmeExtent freed;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = parts_.find(number);
    --found->second.holders;
    found->second.taken = true;
    freed = Settle(found);
  }
  space_.Return(std::move(freed));
}

absl::Status Stash::Compare(uint64_t number, const Held& held, uint32_t came) const {
  if (came == *held.crc32c) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  return model::Error(
      absl::StatusCode::kDataLoss, model::kChecksum,
      absl::StrCat("what autograd saved comes back damaged from ", space_.file()->path(), ": ", held.bytes.size(),
                   " bytes at offset ", parts_.at(number).extent.offset(), " have CRC-32C ", absl::Hex(came),
                   ", written were ", absl::Hex(*held.crc32c), "; run the step again, and check the disk"));
}

bool Stash::Ready(uint64_t number) const {
  absl::MutexLock lock(&mutex_);
  const Part& part = parts_.at(number);
  return !part.failed.ok() || (part.where != Part::Where::kReading && !part.memory.empty());
}

}  // namespace ballast::stash
