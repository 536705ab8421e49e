#include "ballast/storage/tier/nvme_tier.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/base/status.h"

namespace ballast::storage {
namespace {

// By keys that other threads may change meanwhile: each is asked for once.
template <typename T, typename Key>
void SortBy(std::vector<T>* items, Key key) {
  std::vector<std::pair<decltype(key(items->front())), T>> keyed;
  for (const T item : *items) keyed.emplace_back(key(item), item);
  std::stable_sort(keyed.begin(), keyed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 0; i < keyed.size(); ++i) (*items)[i] = keyed[i].second;
}

}  // namespace

absl::StatusOr<std::unique_ptr<NvmeTier>> NvmeTier::Open(const TiersOptions& options, Ledger* ledger, Disk* disk) {
  std::unique_ptr<NvmeTier> tier(new NvmeTier(options, ledger, disk));
  absl::MutexLock lock(&tier->mutex_);
  BALLAST_RETURN_IF_ERROR(tier->devices_.Open(options));
  return tier;
}

std::unique_ptr<NvmeTier> NvmeTier::OpenOn(std::unique_ptr<BlockFile> file, Ledger* ledger) {
  std::unique_ptr<NvmeTier> tier(new NvmeTier({}, ledger, nullptr));
  absl::MutexLock lock(&tier->mutex_);
  tier->devices_.OpenOn(std::move(file));
  return tier;
}

NvmeFile* NvmeTier::FindFile(NvmeFileId id) const {
  absl::MutexLock lock(&mutex_);
  return devices_.Find(id);
}

std::vector<NvmeFile*> NvmeTier::Files() const {
  absl::MutexLock lock(&mutex_);
  std::vector<NvmeFile*> files;
  for (const auto& device : devices_.all()) {
    for (const auto& file : device->files) files.push_back(file.get());
  }
  return files;
}

absl::Status NvmeTier::CheckThere(NvmeFileId id) const {
  absl::MutexLock lock(&mutex_);
  return devices_.CheckThere(id);
}

const BlockFile& NvmeTier::file(NvmeFileId id) const { return FindFile(id)->file(); }

absl::Status NvmeTier::Trim() {
  for (NvmeFile* const file : Files()) BALLAST_RETURN_IF_ERROR(file->Trim());
  return absl::OkStatus();
}

absl::StatusOr<NvmeExtent> NvmeTier::TakeKept(uint64_t offset, NvmeFileId id) {
  BALLAST_RETURN_IF_ERROR(CheckThere(id));
  return FindFile(id)->TakeKept(offset);
}

absl::Status NvmeTier::Sync(std::vector<NvmeFileId> ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  for (const NvmeFileId id : ids) BALLAST_RETURN_IF_ERROR(FindFile(id)->Sync());
  return absl::OkStatus();
}

std::vector<NvmeTier::Device*> NvmeTier::Candidates(uint64_t bytes) const {
  std::vector<Device*> devices;
  for (const auto& device : devices_.all()) {
    if (!device->files.empty() && ledger_->NvmeFree(device->share) >= bytes) devices.push_back(device.get());
  }
  SortBy(&devices, [bytes](const Device* device) {
    const bool failing =
        std::any_of(device->files.begin(), device->files.end(), [](const auto& file) { return file->failing(); });
    return std::pair(failing, device->assigned + static_cast<double>(bytes) / device->speed);
  });
  return devices;
}

absl::StatusOr<FileRoom> NvmeTier::PromiseOn(Device* device, uint64_t bytes, absl::string_view what,
                                             FileSpace::Shape shape) {
  std::vector<NvmeFile*> files;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& file : device->files) files.push_back(file.get());
  }
  absl::StatusOr<FileRoom> room = absl::InternalError("no file");
  // An earlier file may have room again.
  for (NvmeFile* const file : files) {
    room = file->Promise(bytes, what, shape);
    if (!IsFileTooLong(room.status())) break;
  }
  if (IsFileTooLong(room.status()) && device->extends) {
    NvmeFile* added = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      if (device->files.size() == files.size()) BALLAST_RETURN_IF_ERROR(devices_.Grow(device));
      added = device->files.back().get();
    }
    room = added->Promise(bytes, what, shape);
  }
  if (!room.ok()) return room;
  absl::MutexLock lock(&mutex_);
  device->assigned += static_cast<double>(bytes) / device->speed;
  return room;
}

absl::StatusOr<FileRoom> NvmeTier::PromiseAnywhere(uint64_t bytes, absl::string_view what, FileSpace::Shape shape) {
  std::vector<Device*> devices;
  {
    absl::MutexLock lock(&mutex_);
    devices = Candidates(bytes);
  }
  absl::Status refused = Short(bytes, what);
  for (Device* const device : devices) {
    absl::StatusOr<FileRoom> room = PromiseOn(device, bytes, what, shape);
    if (room.ok()) return room;
    refused = room.status();
  }
  return refused;
}

absl::Status NvmeTier::Short(uint64_t bytes, absl::string_view what) const {
  const TierUsage usage = ledger_->usage();
  uint64_t free = 0, most = 0;
  std::vector<std::string> each;
  for (size_t share = 0; share < std::max<size_t>(usage.nvme.size(), 1); ++share) {
    const uint64_t of_share = ledger_->NvmeFree(share);
    free += of_share;
    most = std::max(most, of_share);
    if (!usage.nvme.empty()) each.push_back(absl::StrCat(of_share, " in ", usage.nvme[share].directory));
  }
  const bool spread = bytes <= free;  // no device alone has the bytes
  const uint64_t missing = bytes - std::min(bytes, spread ? most : free);
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                      absl::StrCat("nvme is short of ", missing, " bytes", spread ? " on one device" : "", ": ", what,
                                   " needs ", bytes, ", ", free, " of ", usage.budget.nvme, " are free",
                                   each.empty() ? "" : absl::StrCat(" (", absl::StrJoin(each, ", "), ")"),
                                   "; raise the nvme budget by at least ", missing, " bytes"));
}

absl::StatusOr<NvmeRoom> NvmeTier::Promise(uint64_t bytes, absl::string_view what, uint64_t grain) {
  constexpr uint64_t kGrainsMax = 256;
  bytes = AlignUp(bytes);
  bool striped = false;
  {
    absl::MutexLock lock(&mutex_);
    striped = devices_.all().size() > 1;
  }
  // One device gets all at once: each promise may wait for the disk.
  grain = striped ? AlignUp(grain) * std::max<uint64_t>(1, bytes / AlignUp(grain) / kGrainsMax)
                  : std::min(bytes, std::max(AlignUp(file_bytes_max_ / 2), kIoAlignment));
  NvmeRoom room;
  for (uint64_t left = bytes; left > 0;) {
    const uint64_t now = std::min(left, grain);
    absl::StatusOr<FileRoom> part = PromiseAnywhere(now, what, FileSpace::Shape::kAnyPieces);
    if (part.ok()) {
      room.Join(*std::move(part));
      left -= now;
    } else if (striped && absl::IsResourceExhausted(part.status()) && now > kIoAlignment) {
      grain = AlignUp(now / 2);  // a device may have less than a grain left
    } else {
      room = NvmeRoom();
      return model::ReasonOf(part.status()) == model::kBudget ? Short(bytes, what) : part.status();
    }
  }
  return room;
}

absl::StatusOr<NvmeExtent> NvmeTier::Allocate(uint64_t bytes, absl::string_view what) {
  BALLAST_ASSIGN_OR_RETURN(FileRoom room, PromiseAnywhere(AlignUp(bytes), what, FileSpace::Shape::kOnePiece));
  return room.file()->AllocateFrom(&room, room.bytes(), what);
}

bool NvmeTier::Holds(const NvmeRoom& room, uint64_t bytes) const {
  const std::vector<NvmeFile*> files = Files();
  const bool all_fail = std::all_of(files.begin(), files.end(), [](const NvmeFile* file) { return file->failing(); });
  return std::any_of(room.parts().begin(), room.parts().end(), [&](const FileRoom& part) {
    return part.bytes() >= bytes && (all_fail || !part.file()->failing());
  });
}

absl::Status NvmeTier::Gather(NvmeRoom* room, uint64_t bytes, absl::string_view what) {
  BALLAST_ASSIGN_OR_RETURN(FileRoom part, PromiseAnywhere(bytes, what, FileSpace::Shape::kOnePiece));
  if (!room->parts().empty()) part.Charge(room->parts().front().account());
  // The smallest parts go, those of failing devices first.
  std::vector<FileRoom*> parts;
  for (FileRoom& given : room->parts()) parts.push_back(&given);
  SortBy(&parts, [](const FileRoom* given) { return std::pair(!given->file()->failing(), given->bytes()); });
  for (FileRoom* const given : parts) {
    const uint64_t gives = std::min(bytes, given->bytes());
    (void)given->Split(gives);
    bytes -= gives;
  }
  room->DropEmpty();
  room->Join(std::move(part));
  return absl::OkStatus();
}

absl::StatusOr<NvmeExtent> NvmeTier::AllocateFrom(NvmeRoom* room, uint64_t bytes, absl::string_view what) {
  std::vector<FileRoom*> parts;
  for (FileRoom& part : room->parts()) {
    if (part.bytes() >= bytes) parts.push_back(&part);
  }
  SortBy(&parts, [this](const FileRoom* part) {
    const NvmeFile& file = *part->file();
    return std::tuple(file.failing(), static_cast<double>(file.writing_bytes()) / SpeedOf(file),
                      static_cast<double>(file.given_bytes()) / SpeedOf(file));
  });
  if (parts.empty()) return Short(bytes, what);
  absl::StatusOr<NvmeExtent> extent = absl::InternalError("no part");
  for (FileRoom* const part : parts) {
    extent = part->file()->AllocateFrom(part, bytes, what);
    if (extent.ok()) break;
  }
  room->DropEmpty();
  return extent;
}

double NvmeTier::SpeedOf(const NvmeFile& file) const {
  absl::MutexLock lock(&mutex_);
  return devices_.all()[file.share()]->speed;
}

uint64_t NvmeTier::file_count() const { return Files().size(); }

}  // namespace ballast::storage
