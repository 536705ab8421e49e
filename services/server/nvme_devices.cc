#include "ballast/services/server/nvme_devices.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/placement/profile_file.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::services {
namespace {

namespace fs = std::filesystem;

absl::Status BadDevices(absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig, absl::StrCat("budget.nvme: ", message));
}

// A path that is the same at every start, whatever the spelling.
std::string Normal(const std::string& directory) {
  std::error_code error;
  fs::path path = fs::absolute(directory, error).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  return path;
}

bool SameDirectory(const std::string& a, const std::string& b) {
  std::error_code error;
  return Normal(a) == Normal(b) || (fs::equivalent(a, b, error) && !error);
}

// 0 where nothing was measured, or the profile cannot be read.
uint64_t MeasuredSpeed(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/", kMachineProfile);
  std::error_code error;
  if (!fs::exists(path, error)) return 0;
  const absl::StatusOr<storage::MachineProfile> profile = storage::ReadProfile(path);
  if (profile.ok()) return profile->disk_mixed_bytes_per_s;
  spdlog::warn("the speed of {} is not known: {}", directory, std::string(profile.status().message()));
  return 0;
}

}  // namespace

absl::StatusOr<std::vector<storage::NvmeDevice>> DevicesOf(const StateServerOptions& options) {
  if (options.nvme_devices.empty()) return std::vector<storage::NvmeDevice>();
  std::vector<storage::NvmeDevice> devices = {{options.data_directory, 0, 0}};
  for (const storage::NvmeDevice& device : options.nvme_devices) {
    for (size_t i = 1; i < devices.size(); ++i) {
      if (!SameDirectory(devices[i].directory, device.directory)) continue;
      return BadDevices(absl::StrCat(devices[i].directory, " and ", device.directory,
                                     " are one directory; expected a directory for each disk. Keep one of them"));
    }
    if (SameDirectory(options.data_directory, device.directory)) {
      if (devices[0].budget > 0) {
        return BadDevices(absl::StrCat(device.directory, " is the data directory, which came before; keep one"));
      }
      devices[0].budget = device.budget;
      continue;
    }
    std::error_code error;
    if (fs::exists(device.directory + "/LOCK.ballast", error)) {
      return BadDevices(absl::StrCat(device.directory,
                                     " is the data directory of another server; expected a directory "
                                     "that this server alone uses. Name another"));
    }
    devices.push_back({Normal(device.directory), device.budget, 0});
  }
  for (storage::NvmeDevice& device : devices) {
    device.bytes_per_s = MeasuredSpeed(device.directory);
  }
  return devices;
}

storage::MachineProfile WithDevices(storage::MachineProfile profile, const std::vector<storage::NvmeDevice>& devices) {
  uint64_t together = 0;
  for (const storage::NvmeDevice& device : devices) {
    if (device.budget == 0) continue;
    if (device.bytes_per_s == 0) return profile;
    together += device.bytes_per_s;
  }
  if (together == 0 || profile.disk_mixed_bytes_per_s == 0) return profile;
  const double times = static_cast<double>(together) / static_cast<double>(profile.disk_mixed_bytes_per_s);
  for (uint64_t* const speed : {&profile.disk_read_bytes_per_s, &profile.disk_write_bytes_per_s,
                                &profile.disk_mixed_bytes_per_s, &profile.disk_mixed_beside_update_bytes_per_s}) {
    *speed = static_cast<uint64_t>(static_cast<double>(*speed) * times);
  }
  return profile;
}

absl::StatusOr<storage::KnownFiles> ReadKnownFiles(storage::Catalog* catalog, const std::string& server_id) {
  storage::KnownFiles known;
  known.owner = server_id;
  BALLAST_ASSIGN_OR_RETURN(const auto pairs, catalog->List(kCatalogNvme));
  for (const auto& [key, path] : pairs) {
    if (const auto id = NvmeFileOfKey(key); id.has_value()) known.paths[*id] = path;
  }
  known.remember = [catalog](storage::NvmeFileId id, const std::string& path) {
    return catalog->Put(NvmeFileKey(id), path);
  };
  return known;
}

absl::Status CheckDevices(const std::string& name, const JobEntry& entry, storage::Tiers* tiers) {
  if (tiers->nvme() == nullptr) return absl::OkStatus();
  uint64_t missing = 0, bytes = 0;
  absl::Status why;
  const std::vector<storage::DurableChunk> chunks = entry.ChunksAndPinned();
  for (const storage::DurableChunk& chunk : chunks) {
    const absl::Status there = tiers->nvme()->CheckThere(chunk.file);
    if (there.ok()) continue;
    why = there;
    ++missing;
    bytes += chunk.bytes;
  }
  if (missing == 0) return absl::OkStatus();
  return model::Error(why.code(), model::kIo,
                      absl::StrCat(missing, " of ", chunks.size(), " extents of job '", name, "', ", bytes,
                                   " bytes, are where nothing can be read: ", why.message()));
}

}  // namespace ballast::services
