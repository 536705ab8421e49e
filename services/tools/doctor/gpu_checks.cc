// The GPU and its link.
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/daemon/machine_files.h"
#include "ballast/services/monitoring/show.h"
#include "ballast/services/tools/doctor/checks.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/tier/hbm_tier.h"

namespace ballast::services {
namespace {

constexpr uint64_t kCopiedBytes = uint64_t{64} << 20;
constexpr int kRounds = 8;

// Copies to the GPU and back: "12.3 GB/s in, 13.1 GB/s out".
absl::StatusOr<std::string> TryLink(int device) {
  storage::Ledger ledger({.hbm = kCopiedBytes + storage::kHbmScratchBytes, .dram = 0, .nvme = 0});
  BALLAST_ASSIGN_OR_RETURN(const auto tier, storage::OpenHbmTier(device, &ledger));
  BALLAST_ASSIGN_OR_RETURN(const storage::HbmBlock block, tier->Allocate(kCopiedBytes, "doctor"));
  BALLAST_ASSIGN_OR_RETURN(storage::Arena host, storage::Arena::Map(kCopiedBytes));
  const absl::Status locked = host.PageLockFor(device);
  std::string found;
  for (const bool in : {true, false}) {
    const absl::Time begin = absl::Now();
    for (int round = 0; round < kRounds; ++round) {
      BALLAST_RETURN_IF_ERROR(in ? tier->CopyIn(host.bytes(), block.data())
                                 : tier->CopyOut(block.data(), host.bytes()));
    }
    const double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
    absl::StrAppend(&found, in ? "" : ", ", absl::StrFormat("%.1f GB/s", kRounds * kCopiedBytes / seconds / 1e9),
                    in ? " in" : " out");
  }
  if (!locked.ok()) absl::StrAppend(&found, "; not page-locked: ", locked.message());
  return found;
}

// "GPU 0000:3b:00.0 has 8 of 16 lanes"; empty where each NVIDIA GPU has all. The speed of a lane is not compared: an
// idle link sleeps at a lower one.
std::string NarrowLinks(const std::string& root) {
  std::string found;
  std::error_code error;
  for (const auto& device : std::filesystem::directory_iterator(root + "/sys/bus/pci/devices", error)) {
    const std::string path = device.path().string();
    if (ReadMachineFile(path + "/vendor") != "0x10de" || ReadMachineFile(path + "/class").rfind("0x03", 0) != 0) {
      continue;
    }
    const std::string now = ReadMachineFile(path + "/current_link_width"),
                      most = ReadMachineFile(path + "/max_link_width");
    if (now.empty() || now == "0" || now == most) continue;
    absl::StrAppend(&found, found.empty() ? "" : ", ", "GPU ", device.path().filename().string(), " has ", now, " of ",
                    most, " lanes");
  }
  return found;
}

}  // namespace

Checks CheckGpu(const Subject& subject) {
  const uint64_t budget = subject.config.has_value() ? subject.config->server.budget.hbm : 0;
  const int device = subject.config.has_value() ? subject.config->server.hbm_device : 0;
  Check check{Verdict::kOk, "GPU", "",
              budget == 0 ? "none: budget.hbm is 0"
                          : absl::StrCat("GPU ", device, " with ", ShowBytes(budget), " (budget.hbm)")};
  const absl::StatusOr<std::string> link = TryLink(device);
  const std::string narrow = NarrowLinks(subject.root);
  check.found = link.ok()    ? absl::StrCat("GPU ", device, ": ", *link)
                : budget > 0 ? absl::StrCat("no GPU: ", link.status().message())
                             : "no GPU that this build can use";
  if (!link.ok() && budget > 0) {
    check.verdict = Verdict::kBad;
    check.mend = "nvidia-smi; podman, docker: --device nvidia.com/gpu=all; or budget.hbm: 0";
  } else if (link.ok() && !narrow.empty()) {
    check.verdict = Verdict::kNote;
    absl::StrAppend(&check.found, "; ", narrow);
    check.mend = "seat the card in a slot with all lanes; nvidia-smi -q -d PCIE tells more";
  }
  return {check};
}

}  // namespace ballast::services
