// The memory of one server: its budgets, their usage, and the devices behind them.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <map>
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

// The id of a file of the NVMe tier. The data directory's own file has 0, every other file a random id in its first
// block (tier/device_header.h).
using NvmeFileId = uint64_t;

// A part of a file of the NVMe tier.
struct ExtentPlace {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  NvmeFileId file = 0;
};

// A directory for NVMe state, on a disk of its own.
struct NvmeDevice {
  std::string directory;
  uint64_t budget = 0;
  uint64_t bytes_per_s = 0;  // of reads and writes mixed, as measured; 0: not measured
};

// How the NVMe tier keeps what it knows of files outside the data directory. A file whose id is not known is another
// server's, and a known file that is not there is missing.
struct KnownFiles {
  std::map<NvmeFileId, std::string> paths;
  // Keeps a new file's id and path durably, before the file gets its first block. Null: nothing is kept.
  std::function<absl::Status(NvmeFileId id, const std::string& path)> remember;
  std::string owner;  // written into the files, for people and for a rebuild: the server's id
};

// DRAM for state on its way to and from NVMe: a quarter of the DRAM budget. At least 52 MiB: four chunks of 2^20
// elements with fp32 moments, their labels and the readers' buffer, with some room. At most 100 MiB: eight chunks.
uint64_t DefaultStagingBytes(uint64_t dram_bytes);

// A device begins a further file beyond this size, because ext4 limits a file to 16 TiB.
inline constexpr uint64_t kNvmeFileBytesMax = uint64_t{8} << 40;

struct TiersOptions {
  TierBytes budget;
  std::string directory;  // the data directory, which holds a file of the NVMe tier
  // All directories of the NVMe tier with their parts of budget.nvme, the data directory first. Empty: the data
  // directory has all of it.
  std::vector<NvmeDevice> devices;
  KnownFiles known;
  uint64_t nvme_file_bytes_max = kNvmeFileBytesMax;
  uint64_t staging_bytes = 0;  // 0: DefaultStagingBytes(budget.dram)
  int hbm_device = 0;
  HbmOpener open_hbm;             // null: OpenHbmTier
  Disk* disk = nullptr;           // null: the system's
  std::vector<ExtentPlace> kept;  // extents of NVMe files with state that durable jobs left
  // Grows by the bytes of each state that is read back from an earlier run's extent. Outlives the tiers;
  // may be null.
  std::atomic<uint64_t>* restored_bytes = nullptr;
  // The space between `kept` extents, up to the file's end, is not free either: a job whose entries cannot be read may
  // have state there, for a rebuild to find by its labels. New extents lie behind the end. No budget counts this space,
  // since its content is not known.
  bool unnamed_stays = false;
};

// The parts of a tier's used bytes.
enum class TierPart {
  kState,    // master weights and moments; on NVMe all extents of versions, also of states that live in memory
  kWorking,  // working copies
  kSlices,   // slices of the step in flight, and buffers for slices that are read back
  kBuffers,  // scratch memory of a device
  kStaging,  // DRAM through which NVMe state moves
  kLog,      // gradient logs and spills
  kPins,     // pinned copies, kept versions, and room set aside for automatic ones
  kSpare     // promised to versions to come, or to jobs that are still to be recovered
};
inline constexpr int kTierParts = 8;
inline constexpr std::array<const char*, kTierParts> kTierPartNames = {"state",   "working", "slices", "buffers",
                                                                       "staging", "log",     "pins",   "spare"};

// Why bytes go from tier to tier.
enum class MoveReason { kUpdate, kFlush, kMove, kReadBack, kRecovery, kPin, kRestore };
inline constexpr int kMoveReasons = 7;
inline constexpr std::array<const char*, kMoveReasons> kMoveReasonNames = {"update",   "flush", "move",   "read_back",
                                                                           "recovery", "pin",   "restore"};
// By source, target and reason: bytes since start.
using MovedBytes = std::array<std::array<std::array<uint64_t, kMoveReasons>, kTierKinds>, kTierKinds>;

// Plain counters, for metrics: totals since start.
struct TierTraffic {
  TierBytes read;
  TierBytes written;
};

// Bytes of each tier by part.
using PartBytes = std::array<TierBytes, kTierParts>;

// The bytes of one holder, a job. The ledger, whose lock guards the figures, counts bytes as they are taken, marked and
// returned. Bytes without an account are the server's own. A lease keeps its account alive.
struct Account {
  PartBytes parts = {};
};

// Budgets, and the bytes taken of them at the same moment.
struct TierUsage {
  TierBytes budget;
  TierBytes used;
  PartBytes parts = {};  // each tier's sum to `used`
  struct Device {
    std::string directory;
    uint64_t budget = 0, used = 0;
  };
  std::vector<Device> nvme;  // empty where the data directory is the only device
};

// Threads: any.
class Tiers {
 public:
  // Opens the devices and allocates nothing but the NVMe file's name. INVALID_ARGUMENT (BAD_CONFIG) for an HBM budget
  // without a GPU; INTERNAL (IO) if the directory is not writable; INTERNAL (WRONG_BITS) as CheckProcessor.
  static absl::StatusOr<std::unique_ptr<Tiers>> Open(const TiersOptions& options);
  ~Tiers();

  TierBytes budget() const;
  // Bytes taken beyond a lowered budget stay taken until they are returned. INVALID_ARGUMENT (BAD_CONFIG) for a tier
  // that was not opened; then nothing has changed.
  absl::Status SetBudget(const TierBytes& budget);
  TierBytes used() const;
  TierUsage usage() const;
  TierTraffic traffic() const;
  // The account's bytes at one moment.
  PartBytes taken(const Account& account) const;
  // Takes or returns budget without allocating, for memory held elsewhere (provisional slices). `account`: null for the
  // server itself; the same for both.
  absl::Status Take(TierKind tier, uint64_t bytes, const std::string& what, TierPart part, Account* account = nullptr);
  void Return(TierKind tier, uint64_t bytes, TierPart part, Account* account = nullptr);
  // Adds to traffic(). Code that moves a tier's bytes must call this.
  void CountTraffic(TierKind tier, uint64_t read, uint64_t written);
  // Adds to moved().
  void CountMove(TierKind from, TierKind to, MoveReason why, uint64_t bytes);
  MovedBytes moved() const;
  // All memory of the DRAM tier so far is locked, for a GPU or against swapping.
  bool memory_locked() const;
  // Adds to TiersOptions::restored_bytes.
  void CountRestored(uint64_t bytes);
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
