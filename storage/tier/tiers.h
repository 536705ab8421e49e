// The memory of one server: its budgets, what is taken of them, and the devices behind them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/storage/placement/placement.h"

namespace ballast::storage {

class DramTier;
class NvmeTier;
class HbmTier;

class Disk;
class Ledger;

// Opens the HBM tier on a device, with a budget of the ledger. Errors: OpenHbmTier's.
using HbmOpener = std::function<absl::StatusOr<std::unique_ptr<HbmTier>>(int device, Ledger* ledger)>;

// A part of the NVMe tier's file.
struct ExtentPlace {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// For state on its way to and from NVMe, of so much DRAM: a quarter; but at least four chunks of 2^20 elements with
// fp32 moments, their labels and the readers' buffer, with some room (52 MiB), and at most eight (100 MiB).
uint64_t DefaultStagingBytes(uint64_t dram_bytes);

struct TiersOptions {
  TierBytes budget;
  std::string directory;       // holds the NVMe tier's file
  uint64_t staging_bytes = 0;  // 0: DefaultStagingBytes(budget.dram)
  int hbm_device = 0;
  HbmOpener open_hbm;             // null: OpenHbmTier
  Disk* disk = nullptr;           // null: the system's
  std::vector<ExtentPlace> kept;  // of the NVMe file: what durable jobs left there
  // Nor is what lies between `kept` and before the file's end free: some of it may be a job's whose entries cannot be
  // read, and which a rebuild finds by its labels. New extents lie behind the end. Such space is of no budget, since
  // nobody knows whether anything is there.
  bool unnamed_stays = false;
};

// Plain counters, for metrics: totals since start.
struct TierTraffic {
  TierBytes read;
  TierBytes written;
};

// Threads: any.
class Tiers {
 public:
  // Opens the devices and allocates nothing but the NVMe file's name. INVALID_ARGUMENT (BAD_CONFIG) for an HBM budget
  // where no GPU is; INTERNAL (IO) if the directory is not writable.
  static absl::StatusOr<std::unique_ptr<Tiers>> Open(const TiersOptions& options);
  ~Tiers();

  TierBytes budget() const;
  // What is taken beyond the new one stays until it is returned. INVALID_ARGUMENT (BAD_CONFIG) for a tier that was not
  // opened; then nothing has changed.
  absl::Status SetBudget(const TierBytes& budget);
  TierBytes used() const;
  TierTraffic traffic() const;
  // Takes or returns budget without allocating: for memory that others hold (provisional slices).
  absl::Status Take(TierKind tier, uint64_t bytes, const std::string& what);
  void Return(TierKind tier, uint64_t bytes);
  // Adds to traffic(): who moves a tier's bytes reports them.
  void CountTraffic(TierKind tier, uint64_t read, uint64_t written);
  // "io_uring" or "threads: <why>".
  std::string io_backend() const;
  uint64_t staging_bytes() const;

  // The devices; hbm() and nvme() are null when their budget is 0.
  Disk* disk();
  const std::string& directory() const;
  DramTier* dram();
  NvmeTier* nvme();
  HbmTier* hbm();

 private:
  struct Impl;
  explicit Tiers(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::storage
