#include "ballast/storage/tier/tiers.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/io/io_queue.h"
#include "ballast/storage/tier/dram_tier.h"
#include "ballast/storage/tier/hbm_tier.h"
#include "ballast/storage/tier/ledger.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/storage/tier/processor_check.h"

namespace ballast::storage {

// Measured with 268M parameters and 1.5 GiB of DRAM: a step takes 2.3 s with 48 MiB of staging (three chunks), 1.9 s
// with 96 MiB, 2.2 s with 144 MiB.
uint64_t DefaultStagingBytes(uint64_t dram_bytes) {
  return std::clamp(dram_bytes / 4, uint64_t{52} << 20, uint64_t{100} << 20);
}

namespace {

std::vector<NvmeShare> SharesOf(const TiersOptions& options) {
  std::vector<NvmeShare> shares;
  for (const NvmeDevice& device : options.devices) shares.push_back({device.directory, device.budget});
  return shares;
}

}  // namespace

struct Tiers::Impl {
  explicit Impl(const TiersOptions& o)
      : options(o),
        staging_bytes(o.staging_bytes > 0 ? o.staging_bytes : DefaultStagingBytes(o.budget.dram)),
        ledger(o.budget, SharesOf(o)),
        dram(&ledger, o.budget.hbm > 0 ? std::optional(o.hbm_device) : std::nullopt) {}
  const TiersOptions options;
  const uint64_t staging_bytes;
  Ledger ledger;
  DramTier dram;
  std::unique_ptr<NvmeTier> nvme;
  std::unique_ptr<HbmTier> hbm;
  Disk* disk() const { return options.disk != nullptr ? options.disk : SystemDisk(); }
};

absl::StatusOr<std::unique_ptr<Tiers>> Tiers::Open(const TiersOptions& options) {
  // Once: a process does not change its processor.
  static const absl::Status checked =
      CheckProcessor(kernels::CpuProcessor(), absl::StrCat("the CPU (", kernels::ActiveIsa(), ")"));
  BALLAST_RETURN_IF_ERROR(checked);
  auto impl = std::make_unique<Impl>(options);
  if (options.budget.nvme == 0 && !options.kept.empty()) {
    return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                        absl::StrCat("the data directory ", options.directory, " holds the state of durable jobs in ",
                                     options.kept.size(), " extents, and the nvme budget is 0: give one"));
  }
  std::error_code error;
  std::filesystem::create_directories(options.directory, error);
  if (error) return IoError(error.value(), "creation", options.directory, 0, 0);
  if (access(options.directory.c_str(), W_OK | X_OK) != 0) return IoError(errno, "access", options.directory, 0, 0);
  if (options.budget.nvme > 0) {
    BALLAST_ASSIGN_OR_RETURN(impl->nvme, NvmeTier::Open(options, &impl->ledger, impl->disk()));
  }
  if (options.budget.hbm > 0) {
    const HbmOpener open = options.open_hbm ? options.open_hbm : OpenHbmTier;
    BALLAST_ASSIGN_OR_RETURN(impl->hbm, open(options.hbm_device, &impl->ledger));
  }
  return std::unique_ptr<Tiers>(new Tiers(std::move(impl)));
}

Tiers::Tiers(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tiers::~Tiers() = default;

TierBytes Tiers::budget() const { return impl_->ledger.budget(); }
absl::Status Tiers::SetBudget(const TierBytes& budget) {
  for (const TierKind tier : {TierKind::kHbm, TierKind::kNvme}) {
    if (impl_->options.budget[tier] > 0 || budget[tier] == 0) continue;
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        absl::StrCat("this server was started without a ", TierName(tier),
                                     " budget and has no such tier: restart it with one"));
  }
  impl_->ledger.SetBudget(budget);
  return absl::OkStatus();
}

TierBytes Tiers::used() const { return impl_->ledger.used(); }
TierUsage Tiers::usage() const { return impl_->ledger.usage(); }
TierTraffic Tiers::traffic() const { return impl_->ledger.traffic(); }

PartBytes Tiers::taken(const Account& account) const { return impl_->ledger.taken(account); }

absl::Status Tiers::Take(TierKind tier, uint64_t bytes, const std::string& what, TierPart part, Account* account) {
  return impl_->ledger.Take(tier, bytes, what, part, /*share=*/0, account);
}

void Tiers::Return(TierKind tier, uint64_t bytes, TierPart part, Account* account) {
  impl_->ledger.Return(tier, bytes, part, /*share=*/0, account);
}

void Tiers::CountTraffic(TierKind tier, uint64_t read, uint64_t written) {
  impl_->ledger.CountTraffic(tier, read, written);
}

void Tiers::CountRestored(uint64_t bytes) {
  if (impl_->options.restored_bytes != nullptr) *impl_->options.restored_bytes += bytes;
}

void Tiers::CountMove(TierKind from, TierKind to, MoveReason why, uint64_t bytes) {
  impl_->ledger.CountMove(from, to, why, bytes);
}
MovedBytes Tiers::moved() const { return impl_->ledger.moved(); }
bool Tiers::memory_locked() const { return impl_->dram.locked(); }

std::string Tiers::io_backend() const { return IoBackendProbe(); }
uint64_t Tiers::staging_bytes() const { return impl_->staging_bytes; }
Disk* Tiers::disk() { return impl_->disk(); }
const std::string& Tiers::directory() const { return impl_->options.directory; }
DramTier* Tiers::dram() { return &impl_->dram; }
NvmeTier* Tiers::nvme() { return impl_->nvme.get(); }
HbmTier* Tiers::hbm() { return impl_->hbm.get(); }

}  // namespace ballast::storage
