#include "ballast/storage/tier/nvme_devices.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/io_queue.h"
#include "ballast/storage/tier/device_header.h"

namespace ballast::storage {
namespace {

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

void NvmeDevices::List(const TiersOptions& options) {
  std::vector<NvmeDevice> wanted = options.devices;
  if (wanted.empty()) wanted.push_back({options.directory, options.budget.nvme, 0});
  const bool measured =
      std::all_of(wanted.begin(), wanted.end(), [](const NvmeDevice& device) { return device.bytes_per_s > 0; });
  for (size_t share = 0; share < wanted.size(); ++share) {
    auto device = std::make_unique<Device>();
    device->options = wanted[share];
    device->share = share;
    if (measured) device->speed = static_cast<double>(wanted[share].bytes_per_s);
    devices_.push_back(std::move(device));
  }
}

void NvmeDevices::OpenOn(std::unique_ptr<BlockFile> file) {
  auto device = std::make_unique<Device>();
  device->files.push_back(std::make_unique<NvmeFile>(std::move(file), ledger_, NvmeFile::Options{}));
  devices_.push_back(std::move(device));
}

absl::Status NvmeDevices::Open(const TiersOptions& options) {
  List(options);
  // Files are known by their ids, so where a file was last only counts once every file that is there was found.
  for (const auto& device : devices_) BALLAST_RETURN_IF_ERROR(FindFiles(device.get()));
  for (const auto& device : devices_) BALLAST_RETURN_IF_ERROR(MissFiles(options, device.get()));
  // What an entry with a wrong file means lies where no entry says.
  const bool unnamed_stays = MissKept(options.kept) || options.unnamed_stays;
  Moved moved;
  for (const auto& device : devices_) {
    device->extends = disk_ != nullptr && !device->missing;
    if (device->files.empty() && device->missing) {
      ledger_->DropShare(device->share);
    } else if (device->files.empty()) {
      BALLAST_RETURN_IF_ERROR(Grow(device.get()));
    }
    for (const auto& file : device->files) {
      BALLAST_RETURN_IF_ERROR(Keep(options.kept, unnamed_stays, file.get(), &moved));
    }
  }
  // After the last refusal, or the next start would not know what has moved.
  for (const auto& [id, path] : moved) {
    if (known_.remember != nullptr) BALLAST_RETURN_IF_ERROR(known_.remember(id, path));
  }
  return absl::OkStatus();
}

bool NvmeDevices::MissKept(const std::vector<ExtentPlace>& kept) {
  bool unknown = false;
  for (const ExtentPlace& place : kept) {
    if (Find(place.file) != nullptr) continue;
    Miss(place.file, "no device that is configured has this file");
    unknown = unknown || (place.file != 0 && !known_.paths.contains(place.file));
  }
  return unknown;
}

absl::Status NvmeDevices::Keep(const std::vector<ExtentPlace>& kept, bool unnamed_stays, NvmeFile* file, Moved* moved) {
  const std::string& path = file->file().path();
  const absl::Status taken = file->Keep(OfFile(kept, file->id()), unnamed_stays);
  const auto last = known_.paths.find(file->id());
  if (last == known_.paths.end() || last->second == path) return taken;
  BALLAST_RETURN_IF_ERROR(model::Annotate(
      taken, absl::StrCat(path, " was at ", last->second,
                          " when this server ran last, and parts of budget.nvme go by paths: mount the disks as they "
                          "were, or change the parts with them")));
  moved->emplace_back(file->id(), path);
  return absl::OkStatus();
}

// Opens the files in the device's directory. A file whose creation was not finished is made anew when it is wanted.
absl::Status NvmeDevices::FindFiles(Device* device) {
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
absl::Status NvmeDevices::TakeFile(Device* device, const std::string& path) {
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
                                     "), and this server does not know which is newer: remove the older one"));
  }
  AddFile(device, std::move(file), id);
  return absl::OkStatus();
}

// The files that were last in the device's directory, that are wanted, and that were found nowhere.
absl::Status NvmeDevices::MissFiles(const TiersOptions& options, Device* device) {
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

absl::Status NvmeDevices::NotThere(NvmeFileId id, absl::string_view why) const {
  const auto known = known_.paths.find(id);
  const std::string path = known == known_.paths.end() ? "a path that is not known any more" : known->second;
  // A file that lost its first blocks is damaged. A file that is not there, or another's, may come back.
  return model::Error(damaged_.contains(path) ? absl::StatusCode::kDataLoss : absl::StatusCode::kInternal, model::kIo,
                      absl::StrCat("the nvme device with ", path, " (file ", ShowFileId(id), ") is not there: ", why,
                                   ". Bring the disk back at that path, or name its new path under budget.nvme, and "
                                   "start the server again; drop the job if the disk is lost"));
}

void NvmeDevices::Miss(NvmeFileId id, absl::string_view why) {
  const auto [at, fresh] = missing_.try_emplace(id, NotThere(id, why));
  if (fresh) spdlog::error("{}", std::string(at->second.message()));
}

void NvmeDevices::AddFile(Device* device, std::unique_ptr<BlockFile> file, NvmeFileId id) {
  const NvmeFile::Options options{
      .id = id, .share = device->share, .header_bytes = id == 0 ? 0 : kDeviceHeaderBytes, .bytes_max = file_bytes_max_};
  spdlog::info("nvme tier: {}, I/O by {}", file->path(), IoBackendProbe());
  if (const std::string& why = file->buffered_because(); !why.empty()) {
    spdlog::warn("nvme tier goes through the page cache: {}", why);
  }
  device->files.push_back(std::make_unique<NvmeFile>(std::move(file), ledger_, options));
}

absl::Status NvmeDevices::Grow(Device* device) {
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

NvmeFile* NvmeDevices::Find(NvmeFileId id) const {
  for (const auto& device : devices_) {
    for (const auto& file : device->files) {
      if (file->id() == id) return file.get();
    }
  }
  return nullptr;
}

absl::Status NvmeDevices::CheckThere(NvmeFileId id) const {
  const auto missing = missing_.find(id);
  if (missing != missing_.end()) return missing->second;
  return Find(id) != nullptr ? absl::OkStatus() : NotThere(id, "a file that no device has");
}

}  // namespace ballast::storage
