#include "ballast/storage/tier/nvme_tier.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/io/io_queue.h"

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

NvmeFileId MakeFileId() {
  std::random_device random;
  NvmeFileId id = 0;
  while (id == 0) id = uint64_t{random()} << 32 | random();
  return id;
}

std::vector<ExtentPlace> OfFile(const std::vector<ExtentPlace>& kept, NvmeFileId id) {
  std::vector<ExtentPlace> of;
  std::copy_if(kept.begin(), kept.end(), std::back_inserter(of), [id](const auto& place) { return place.file == id; });
  return of;
}

absl::Status BadDevice(absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig, message);
}

}  // namespace

std::string NvmeFilePath(absl::string_view directory, uint64_t number) {
  return number == 0 ? absl::StrCat(directory, "/nvme.tier") : absl::StrCat(directory, "/nvme.tier.", number);
}

std::string ShowFileId(NvmeFileId id) { return absl::StrFormat("%016x", id); }

uint64_t NvmeRoom::bytes() const {
  return std::accumulate(parts_.begin(), parts_.end(), uint64_t{0},
                         [](uint64_t sum, const FileRoom& part) { return sum + part.bytes(); });
}

void NvmeRoom::Mark(TierPart part) {
  for (FileRoom& room : parts_) room.Mark(part);
}

void NvmeRoom::Charge(const std::shared_ptr<Account>& account) {
  for (FileRoom& room : parts_) room.Charge(account);
}

NvmeRoom NvmeRoom::Split(uint64_t bytes) {
  const auto whole =
      std::find_if(parts_.begin(), parts_.end(), [bytes](const FileRoom& part) { return part.bytes() >= bytes; });
  NvmeRoom split;
  if (whole != parts_.end()) std::rotate(parts_.begin(), whole, whole + 1);
  for (FileRoom& part : parts_) {
    const uint64_t of_part = std::min(bytes, part.bytes());
    if (of_part > 0) split.Join(part.Split(of_part));
    bytes -= of_part;
  }
  std::erase_if(parts_, [](const FileRoom& part) { return part.bytes() == 0; });
  return split;
}

void NvmeRoom::Join(FileRoom part) {
  if (part.bytes() == 0) return;
  if (!parts_.empty()) {
    part.Mark(parts_.front().part());
    part.Charge(parts_.front().account());
  }
  const auto same =
      std::find_if(parts_.begin(), parts_.end(), [&](const FileRoom& other) { return other.file() == part.file(); });
  if (same != parts_.end()) return same->Join(std::move(part));
  parts_.push_back(std::move(part));
}

void NvmeRoom::Join(NvmeRoom other) {
  for (FileRoom& part : other.parts_) Join(std::move(part));
}

void NvmeRoom::Leave() {
  for (FileRoom& part : parts_) part.Leave();
  parts_.clear();
}

absl::StatusOr<std::unique_ptr<NvmeTier>> NvmeTier::Open(const TiersOptions& options, Ledger* ledger, Disk* disk) {
  std::unique_ptr<NvmeTier> tier(new NvmeTier(options, ledger, disk));
  BALLAST_RETURN_IF_ERROR(tier->OpenDevices(options));
  return tier;
}

std::unique_ptr<NvmeTier> NvmeTier::OpenOn(std::unique_ptr<BlockFile> file, Ledger* ledger) {
  std::unique_ptr<NvmeTier> tier(new NvmeTier({}, ledger, nullptr));
  auto device = std::make_unique<Device>();
  device->files.push_back(std::make_unique<NvmeFile>(std::move(file), ledger, NvmeFile::Options{}));
  absl::MutexLock lock(&tier->mutex_);
  tier->devices_.push_back(std::move(device));
  return tier;
}

absl::Status NvmeTier::OpenDevices(const TiersOptions& options) {
  std::vector<NvmeDevice> wanted = options.devices;
  if (wanted.empty()) wanted.push_back({options.directory, options.budget.nvme, 0});
  const bool measured =
      std::all_of(wanted.begin(), wanted.end(), [](const NvmeDevice& device) { return device.bytes_per_s > 0; });
  absl::MutexLock lock(&mutex_);
  for (size_t share = 0; share < wanted.size(); ++share) {
    auto device = std::make_unique<Device>();
    device->options = wanted[share];
    device->share = share;
    if (measured) device->speed = static_cast<double>(wanted[share].bytes_per_s);
    devices_.push_back(std::move(device));
  }
  // Files are known by their ids, so where a file was last only counts once every file that is there was found.
  for (const auto& device : devices_) BALLAST_RETURN_IF_ERROR(FindFiles(device.get()));
  for (const auto& device : devices_) BALLAST_RETURN_IF_ERROR(MissFiles(options, device.get()));
  bool unnamed_stays = options.unnamed_stays;
  for (const ExtentPlace& place : options.kept) {
    if (Find(place.file) != nullptr) continue;
    Miss(place.file, "no device that is configured has this file");
    // What an entry with a wrong file means lies where no entry says.
    unnamed_stays = unnamed_stays || (place.file != 0 && !known_.paths.contains(place.file));
  }
  std::vector<std::pair<NvmeFileId, std::string>> moved;
  for (const auto& device : devices_) {
    device->extends = disk_ != nullptr && !device->missing;
    if (device->files.empty() && device->missing) {
      ledger_->DropShare(device->share);
    } else if (device->files.empty()) {
      BALLAST_RETURN_IF_ERROR(Grow(device.get()));
    }
    for (const auto& file : device->files) {
      const std::string& path = file->file().path();
      const absl::Status kept = file->Keep(OfFile(options.kept, file->id()), unnamed_stays);
      const auto last = known_.paths.find(file->id());
      if (last == known_.paths.end() || last->second == path) {
        BALLAST_RETURN_IF_ERROR(kept);
      } else {
        BALLAST_RETURN_IF_ERROR(model::Annotate(
            kept, absl::StrCat(path, " was at ", last->second,
                               " when this server ran last, and parts of budget.nvme go by paths: mount the disks as "
                               "they were, or change the parts with them")));
        moved.emplace_back(file->id(), path);
      }
    }
  }
  // After the last refusal, or the next start would not know what has moved.
  for (const auto& [id, path] : moved) {
    if (known_.remember != nullptr) BALLAST_RETURN_IF_ERROR(known_.remember(id, path));
  }
  return absl::OkStatus();
}

// Opens the files in the device's directory. A file whose creation was not finished is made anew when it is wanted.
absl::Status NvmeTier::FindFiles(Device* device) {
  const std::string& directory = device->options.directory;
  if (device->share == 0) {
    BALLAST_ASSIGN_OR_RETURN(auto file, disk_->Open(NvmeFilePath(directory, 0), Disk::Mode::kKept));
    AddFile(device, std::move(file), 0);
  }
  const auto known = [this](const std::string& path) {
    return std::any_of(known_.paths.begin(), known_.paths.end(), [&](const auto& file) { return file.second == path; });
  };
  for (uint64_t number = device->files.size();; ++number) {
    const std::string path = NvmeFilePath(directory, number);
    if (disk_->Exists(path)) {
      const absl::Status taken = TakeFile(device, path);
      if (!taken.ok()) device->foreign = taken;
    } else if (!known(path)) {
      return absl::OkStatus();
    }
  }
}

// Opens the file if it is one of this server's. A file without a first block is left for Grow.
absl::Status NvmeTier::TakeFile(Device* device, const std::string& path) {
  BALLAST_ASSIGN_OR_RETURN(auto file, disk_->Open(path, Disk::Mode::kKept));
  BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, file->Size());
  const auto found = ReadDeviceHeader(*file);
  if (absl::IsDataLoss(found.status()) || (found.ok() && !found->has_value())) damaged_.insert(path);
  BALLAST_RETURN_IF_ERROR(found.status());
  const std::optional<DeviceHeader>& header = *found;
  if (!header.has_value() && bytes <= kDeviceHeaderBytes) return absl::OkStatus();
  if (!header.has_value() || !known_.paths.contains(header->id)) {
    std::string owner = "an unknown server";
    if (header.has_value() && header->owner == known_.owner) {
      owner = "an earlier or later state of this server's data directory";
    }
    if (header.has_value() && header->owner != known_.owner) {
      owner = absl::StrCat("server '", absl::CEscape(header->owner), "'");
    }
    return model::Error(
        absl::StatusCode::kDataLoss, model::kIo,
        absl::StrCat(path, " belongs to ", owner,
                     ", and this server's catalog does not know it; nothing was changed there. Mount the right disk, "
                     "or move the file away if you do not need it"));
  }
  const NvmeFileId id = header->id;
  if (const NvmeFile* const other = Find(id); other != nullptr) {
    return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                        absl::StrCat(path, " and ", other->file().path(), " are copies of one file (", ShowFileId(id),
                                     "), and the newer one is not known: take the older away"));
  }
  AddFile(device, std::move(file), id);
  return absl::OkStatus();
}

// The files that were last in the device's directory, that are wanted, and that were found nowhere.
absl::Status NvmeTier::MissFiles(const TiersOptions& options, Device* device) {
  const std::string& directory = device->options.directory;
  std::error_code error;
  const bool there = device->share == 0 || std::filesystem::is_directory(directory, error);
  const std::string why = !there                  ? absl::StrCat("there is no directory ", directory)
                          : !device->foreign.ok() ? std::string(device->foreign.message())
                                                  : "the file is not there, or empty";
  for (const auto& [id, path] : known_.paths) {
    const bool wanted = !OfFile(options.kept, id).empty() || options.unnamed_stays;
    if (std::filesystem::path(path).parent_path() != directory || Find(id) != nullptr || !wanted) continue;
    Miss(id, why);
    device->missing = true;
  }
  if (device->missing) return absl::OkStatus();
  if (!there) {
    return BadDevice(absl::StrCat("nvme: there is no directory ", directory,
                                  "; expected the directory of a mounted disk. Mount the disk, or make the directory"));
  }
  return device->foreign;
}

absl::Status NvmeTier::NotThere(NvmeFileId id, absl::string_view why) const {
  const auto known = known_.paths.find(id);
  const std::string path = known == known_.paths.end() ? "a path that is not known any more" : known->second;
  // A file that lost its first blocks is damaged. A file that is not there, or another's, may come back.
  return model::Error(damaged_.contains(path) ? absl::StatusCode::kDataLoss : absl::StatusCode::kInternal, model::kIo,
                      absl::StrCat("the nvme device with ", path, " (file ", ShowFileId(id), ") is not there: ", why,
                                   ". Bring the disk back at that path, or name its new path under budget.nvme, and "
                                   "start the server again; drop the job if the disk is lost"));
}

void NvmeTier::Miss(NvmeFileId id, absl::string_view why) {
  const auto [at, fresh] = missing_.try_emplace(id, NotThere(id, why));
  if (fresh) spdlog::error("{}", std::string(at->second.message()));
}

void NvmeTier::AddFile(Device* device, std::unique_ptr<BlockFile> file, NvmeFileId id) {
  const NvmeFile::Options options{
      .id = id, .share = device->share, .header_bytes = id == 0 ? 0 : kDeviceHeaderBytes, .bytes_max = file_bytes_max_};
  spdlog::info("nvme tier: {}, I/O by {}", file->path(), IoBackendProbe());
  if (const std::string& why = file->buffered_because(); !why.empty()) {
    spdlog::warn("nvme tier goes through the page cache: {}", why);
  }
  device->files.push_back(std::make_unique<NvmeFile>(std::move(file), ledger_, options));
}

absl::Status NvmeTier::Grow(Device* device) {
  const auto open = [device](const std::string& path) {
    return std::any_of(device->files.begin(), device->files.end(),
                       [&](const auto& file) { return file->file().path() == path; });
  };
  uint64_t number = 0;
  while (open(NvmeFilePath(device->options.directory, number))) ++number;
  const std::string path = NvmeFilePath(device->options.directory, number);
  const NvmeFileId id = MakeFileId();
  // The catalog first: a file that it does not know would be another server's.
  if (known_.remember != nullptr) BALLAST_RETURN_IF_ERROR(known_.remember(id, path));
  BALLAST_ASSIGN_OR_RETURN(auto file, disk_->Open(path, Disk::Mode::kKept));
  BALLAST_RETURN_IF_ERROR(WriteDeviceHeader({id, known_.owner}, *file));
  AddFile(device, std::move(file), id);
  return absl::OkStatus();
}

NvmeFile* NvmeTier::Find(NvmeFileId id) const {
  for (const auto& device : devices_) {
    for (const auto& file : device->files) {
      if (file->id() == id) return file.get();
    }
  }
  return nullptr;
}

NvmeFile* NvmeTier::FindFile(NvmeFileId id) const {
  absl::MutexLock lock(&mutex_);
  return Find(id);
}

std::vector<NvmeFile*> NvmeTier::Files() const {
  absl::MutexLock lock(&mutex_);
  std::vector<NvmeFile*> files;
  for (const auto& device : devices_) {
    for (const auto& file : device->files) files.push_back(file.get());
  }
  return files;
}

absl::Status NvmeTier::CheckThere(NvmeFileId id) const {
  absl::MutexLock lock(&mutex_);
  const auto missing = missing_.find(id);
  if (missing != missing_.end()) return missing->second;
  return Find(id) != nullptr ? absl::OkStatus() : NotThere(id, "a file that no device has");
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
  for (const auto& device : devices_) {
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
      if (device->files.size() == files.size()) BALLAST_RETURN_IF_ERROR(Grow(device));
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
    striped = devices_.size() > 1;
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
  return std::any_of(room.parts_.begin(), room.parts_.end(), [&](const FileRoom& part) {
    return part.bytes() >= bytes && (all_fail || !part.file()->failing());
  });
}

absl::Status NvmeTier::Gather(NvmeRoom* room, uint64_t bytes, absl::string_view what) {
  BALLAST_ASSIGN_OR_RETURN(FileRoom part, PromiseAnywhere(bytes, what, FileSpace::Shape::kOnePiece));
  if (!room->parts_.empty()) part.Charge(room->parts_.front().account());
  // The smallest parts go, those of failing devices first.
  std::vector<FileRoom*> parts;
  for (FileRoom& given : room->parts_) parts.push_back(&given);
  SortBy(&parts, [](const FileRoom* given) { return std::pair(!given->file()->failing(), given->bytes()); });
  for (FileRoom* const given : parts) {
    const uint64_t gives = std::min(bytes, given->bytes());
    (void)given->Split(gives);
    bytes -= gives;
  }
  std::erase_if(room->parts_, [](const FileRoom& given) { return given.bytes() == 0; });
  room->Join(std::move(part));
  return absl::OkStatus();
}

absl::StatusOr<NvmeExtent> NvmeTier::AllocateFrom(NvmeRoom* room, uint64_t bytes, absl::string_view what) {
  std::vector<FileRoom*> parts;
  for (FileRoom& part : room->parts_) {
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
  std::erase_if(room->parts_, [](const FileRoom& part) { return part.bytes() == 0; });
  return extent;
}

double NvmeTier::SpeedOf(const NvmeFile& file) const {
  absl::MutexLock lock(&mutex_);
  return devices_[file.share()]->speed;
}

uint64_t NvmeTier::file_count() const { return Files().size(); }

}  // namespace ballast::storage
