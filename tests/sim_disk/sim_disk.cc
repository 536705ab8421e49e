#include "ballast/tests/sim_disk/sim_disk.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/sim_disk/sim_queue.h"

namespace ballast::storage {
namespace {

const char* Verb(SimOperation operation) {
  switch (operation) {
    case SimOperation::kOpen:
      return "open";
    case SimOperation::kRemove:
      return "removal";
    case SimOperation::kRead:
      return "read";
    case SimOperation::kWrite:
      return "write";
    case SimOperation::kSync:
      return "sync";
    case SimOperation::kReserve:
      return "reservation";
    case SimOperation::kDiscard:
      return "discard";
    case SimOperation::kTruncate:
      return "truncation";
  }
  return "operation";
}

int ErrnoOf(SimFault fault) { return fault == SimFault::kEnospc ? ENOSPC : EIO; }

bool IsError(std::optional<SimFault> fault) { return fault == SimFault::kEio || fault == SimFault::kEnospc; }

void EndIf(bool mistake) {
  if (!mistake) return;
  std::fputs("a SimDisk's operation was to suffer a fault that it cannot, or the 0-th one any\n", stderr);
  std::abort();
}

}  // namespace

SimDisk::~SimDisk() = default;

absl::StatusOr<std::unique_ptr<BlockFile>> SimDisk::Open(const std::string& path, Mode mode) {
  absl::MutexLock lock(&mutex_);
  Target target = {.path = path, .inode = nullptr, .life = life_};
  BALLAST_ASSIGN_OR_RETURN(const auto fault, Begin(SimOperation::kOpen, target, {}));
  BALLAST_RETURN_IF_ERROR(End(DoOpen(mode, target, fault)));
  return std::make_unique<File>(this, std::move(target), mode != Mode::kShared);
}

absl::Status SimDisk::DoOpen(Mode mode, Target& target, std::optional<SimFault> fault) {
  if (fault.has_value()) return IoError(ErrnoOf(*fault), "open", target.path, 0, 0);
  const auto found = files_.find(target.path);
  if (found != files_.end()) {
    target.inode = found->second;
  } else if (mode == Mode::kShared) {
    return IoError(ENOENT, "open", target.path, 0, 0);
  } else {
    target.inode = files_[target.path] = std::make_shared<Inode>();
  }
  if (mode == Mode::kShared) return absl::OkStatus();
  if (target.inode->locked) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBusy, absl::StrCat(target.path, " is in use"));
  }
  target.inode->locked = true;
  if (mode == Mode::kEmptied) target.inode->content.Truncate(0);
  return absl::OkStatus();
}

bool SimDisk::Exists(const std::string& path) const {
  absl::MutexLock lock(&mutex_);
  return files_.contains(path);
}

absl::Status SimDisk::Remove(const std::string& path) {
  absl::MutexLock lock(&mutex_);
  BALLAST_ASSIGN_OR_RETURN(const auto fault,
                           Begin(SimOperation::kRemove, {.path = path, .inode = nullptr, .life = life_}, {}));
  if (fault.has_value()) return End(IoError(ErrnoOf(*fault), "removal", path, 0, 0));
  files_.erase(path);
  return End(absl::OkStatus());
}

absl::StatusOr<std::unique_ptr<IoQueue>> SimDisk::MakeQueue(const IoQueueOptions& options) {
  return std::make_unique<Queue>(this);
}

absl::StatusOr<std::optional<SimFault>> SimDisk::Begin(SimOperation operation, const Target& target, Extent extent) {
  const auto dead = [&] { return IoError(ENODEV, Verb(operation), target.path, extent.offset, extent.bytes); };
  if (off_ || target.life != life_) return dead();
  const std::optional<SimFault> fault = faults_.Next(operation, random_);
  if (operations_to_crash_ > 0 && --operations_to_crash_ == 0) {
    crash_is_due_ = random_.Percent(50);
    if (crash_is_due_) return std::optional<SimFault>();  // the operation is done, but reported as failed
    LosePower();
    off_ = true;
    return dead();
  }
  if (fault == SimFault::kRot) Rot(*target.inode, extent);
  return fault;
}

absl::Status SimDisk::End(absl::Status status) {
  if (!crash_is_due_) return status;
  crash_is_due_ = false;
  LosePower();
  off_ = true;
  return model::Error(absl::StatusCode::kInternal, model::kIo, "the machine crashed");
}

void SimDisk::LosePower() {
  for (Queue* queue : queues_) queue->LosePower();
  ++life_;
  for (const auto& [path, inode] : files_) {
    inode->content.Crash(random_);
    inode->locked = false;
  }
}

absl::Status SimDisk::Read(const Target& target, uint64_t offset, absl::Span<std::byte> buffer) {
  BALLAST_ASSIGN_OR_RETURN(const auto fault, Begin(SimOperation::kRead, target, {offset, buffer.size()}));
  return End(DoRead(target, offset, buffer, fault));
}

absl::Status SimDisk::DoRead(const Target& target, uint64_t offset, absl::Span<std::byte> buffer,
                             std::optional<SimFault> fault) {
  const SimContent& content = target.inode->content;
  if (IsError(fault)) {
    content.newest().Read(offset, buffer.first(random_.Below(buffer.size() / kIoAlignment + 1) * kIoAlignment));
    return IoError(ErrnoOf(*fault), "read", target.path, offset, buffer.size());
  }
  const uint64_t size = content.newest().size();
  if (buffer.size() > size || offset > size - buffer.size()) {
    return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                        absl::StrCat("read of ", buffer.size(), " bytes at offset ", offset, " of ", target.path,
                                     " moved no more: the file ends at ", size));
  }
  (fault == SimFault::kStale ? content.durable() : content.newest()).Read(offset, buffer);
  if (fault == SimFault::kBitFlip && !buffer.empty()) {
    buffer[random_.Below(buffer.size())] ^= std::byte{1} << random_.Below(8);
  }
  return absl::OkStatus();
}

absl::Status SimDisk::Write(const Target& target, uint64_t offset, absl::Span<const std::byte> buffer) {
  BALLAST_ASSIGN_OR_RETURN(const auto fault, Begin(SimOperation::kWrite, target, {offset, buffer.size()}));
  return End(DoWrite(target, offset, buffer, fault));
}

absl::Status SimDisk::DoWrite(const Target& target, uint64_t offset, absl::Span<const std::byte> buffer,
                              std::optional<SimFault> fault) {
  SimContent& content = target.inode->content;
  const uint64_t count = buffer.size() / kIoAlignment;
  if (count == 0) return absl::OkStatus();
  uint64_t first = offset / kIoAlignment;
  bool lost = fault == SimFault::kLostWrite;
  if (fault == SimFault::kMisdirected) {
    const std::optional<uint64_t> elsewhere = Elsewhere(*target.inode, first, count);
    lost = !elsewhere.has_value();
    first = elsewhere.value_or(first);
  }
  if (lost) {
    // The file system set the size; only the device did nothing.
    content.Write({.sequence = ++sequence_, .first = first, .blocks = {}, .end = offset + buffer.size()});
    return absl::OkStatus();
  }
  const uint64_t tried = IsError(fault) ? random_.Below(count + 1) : count;
  const uint64_t done = BlocksThatFit(*target.inode, first, tried);
  if (done > 0) {
    content.Write({.sequence = ++sequence_,
                   .first = first,
                   .blocks = SimBlocks(buffer.first(done * kIoAlignment)),
                   .end = offset + done * kIoAlignment});
  }
  if (IsError(fault)) return IoError(ErrnoOf(*fault), "write", target.path, offset, buffer.size());
  if (done < count) return IoError(ENOSPC, "write", target.path, offset, buffer.size());
  return absl::OkStatus();
}

absl::Status SimDisk::Sync(const Target& target, uint64_t sequence) {
  BALLAST_ASSIGN_OR_RETURN(const auto fault, Begin(SimOperation::kSync, target, {}));
  return End(DoSync(target, sequence, fault));
}

absl::Status SimDisk::DoSync(const Target& target, uint64_t sequence, std::optional<SimFault> fault) {
  SimContent& content = target.inode->content;
  if (IsError(fault)) {
    content.FailSync(sequence, random_);
    return IoError(ErrnoOf(*fault), "sync", target.path, 0, 0);
  }
  if (fault != SimFault::kLostSync) content.Sync(sequence);
  return absl::OkStatus();
}

uint64_t SimDisk::UsedBlocks() const {
  uint64_t used = 0;
  for (const auto& [path, inode] : files_) used += inode->content.newest().allocated_blocks();
  return used;
}

uint64_t SimDisk::FreeBlocks() const {
  const uint64_t capacity = capacity_bytes_ / kIoAlignment;
  return capacity - std::min(capacity, UsedBlocks());
}

uint64_t SimDisk::BlocksThatFit(const Inode& inode, uint64_t first, uint64_t count) const {
  uint64_t left = FreeBlocks();
  const SimVersion& newest = inode.content.newest();
  for (uint64_t i = 0; i < count; ++i) {
    if (newest.AllocatedIn(first + i, 1) == 1) continue;
    if (left == 0) return i;
    --left;
  }
  return count;
}

std::optional<uint64_t> SimDisk::Elsewhere(const Inode& inode, uint64_t first, uint64_t count) {
  const uint64_t blocks = std::max(inode.content.newest().size() / kIoAlignment, first + count);
  const uint64_t others = blocks - count;  // than `first`, of the blocks + 1 - count where it fits
  if (others == 0) return std::nullopt;
  const uint64_t chosen = random_.Below(others);
  return chosen < first ? chosen : chosen + 1;
}

void SimDisk::Rot(Inode& inode, Extent extent) {
  const uint64_t size = inode.content.durable().size();
  const uint64_t bytes = std::min(extent.bytes, size - std::min(size, extent.offset));
  if (size == 0) return;
  const uint64_t at = bytes == 0 ? random_.Below(size) : extent.offset + random_.Below(bytes);
  const std::byte mask = std::byte{1} << random_.Below(8);
  inode.content.Damage(at, absl::MakeConstSpan(&mask, 1));
}

SimDisk::Inode& SimDisk::At(const std::string& path) {
  std::shared_ptr<Inode>& inode = files_[path];
  if (inode == nullptr) inode = std::make_shared<Inode>();
  return *inode;
}

void SimDisk::Crash() {
  absl::MutexLock lock(&mutex_);
  operations_to_crash_ = 0;
  if (!std::exchange(off_, false)) LosePower();
}

void SimDisk::CrashAfter(uint64_t operations) {
  absl::MutexLock lock(&mutex_);
  operations_to_crash_ = operations;
}

bool SimDisk::off() const {
  absl::MutexLock lock(&mutex_);
  return off_;
}

void SimDisk::set_capacity_bytes(uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  capacity_bytes_ = bytes;
}

uint64_t SimDisk::used_bytes() const {
  absl::MutexLock lock(&mutex_);
  return UsedBlocks() * kIoAlignment;
}

void SimDisk::FailNext(SimOperation operation, uint64_t k, SimFault fault) {
  absl::MutexLock lock(&mutex_);
  EndIf(!faults_.FailNext(operation, k, fault));
}

void SimDisk::SetFaultProbability(SimOperation operation, SimFault fault, double probability) {
  absl::MutexLock lock(&mutex_);
  EndIf(!faults_.SetProbability(operation, fault, probability));
}

uint64_t SimDisk::operations() const {
  absl::MutexLock lock(&mutex_);
  return faults_.operations();
}

uint64_t SimDisk::operations(SimOperation operation) const {
  absl::MutexLock lock(&mutex_);
  return faults_.operations(operation);
}

uint64_t SimDisk::suffered(SimFault fault) const {
  absl::MutexLock lock(&mutex_);
  return faults_.suffered(fault);
}

std::vector<std::string> SimDisk::List() const {
  absl::MutexLock lock(&mutex_);
  std::vector<std::string> paths;
  for (const auto& [path, inode] : files_) paths.push_back(path);
  return paths;
}

std::vector<std::byte> SimDisk::DurableContent(const std::string& path) const {
  absl::MutexLock lock(&mutex_);
  const auto found = files_.find(path);
  if (found == files_.end()) return {};
  const SimVersion& durable = found->second->content.durable();
  std::vector<std::byte> bytes(durable.size());
  durable.Read(0, absl::MakeSpan(bytes));
  return bytes;
}

void SimDisk::SetContent(const std::string& path, absl::Span<const std::byte> bytes) {
  absl::MutexLock lock(&mutex_);
  At(path).content.Set(bytes);
}

void SimDisk::TruncateTo(const std::string& path, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  At(path).content.Truncate(bytes);
}

void SimDisk::Corrupt(const std::string& path, uint64_t offset, uint64_t length) {
  absl::MutexLock lock(&mutex_);
  SimContent& content = At(path).content;
  const uint64_t size = content.durable().size();
  std::vector<std::byte> mask(std::min(length, size - std::min(size, offset)));
  for (std::byte& b : mask) b = static_cast<std::byte>(1 + random_.Below(255));
  content.Damage(offset, mask);
}

void SimDisk::FlipBit(const std::string& path, uint64_t bit) {
  absl::MutexLock lock(&mutex_);
  const std::byte mask = std::byte{1} << (bit % 8);
  SimContent& content = At(path).content;
  if (bit / 8 < content.durable().size()) content.Damage(bit / 8, absl::MakeConstSpan(&mask, 1));
}

}  // namespace ballast::storage
