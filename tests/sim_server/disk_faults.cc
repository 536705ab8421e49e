#include "ballast/tests/sim_server/disk_faults.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/log/log_reader.h"

namespace ballast::sim {

using storage::SimFault;
using storage::SimOperation;

namespace {

constexpr uint64_t kDiskBytes = uint64_t{1} << 30;
// The first three most.
constexpr SimOperation kMayFail[] = {SimOperation::kRead,    SimOperation::kWrite,    SimOperation::kSync,
                                     SimOperation::kReserve, SimOperation::kTruncate, SimOperation::kOpen};

}  // namespace

bool DiskFaults::Happen() {
  storage::SimDisk& disk = machine_->disk();
  switch (faults_) {
    case Faults::kCrashes:
      return false;
    case Faults::kIoErrors: {
      if (random_->Percent(10)) {
        machine_->catalog().FailAfter(1 + random_->Below(5));
        return true;
      }
      const size_t which = random_->Below(random_->Percent(70) ? 3 : std::size(kMayFail));
      const double probability = random_->Percent(40) ? 0 : 0.01 * static_cast<double>(1 + random_->Below(10));
      disk.SetFaultProbability(kMayFail[which], SimFault::kEio, probability);
      return true;
    }
    case Faults::kFullDisk:
      if (random_->Percent(40)) {
        disk.set_capacity_bytes(disk.used_bytes() + (random_->Below(64) << 12));
      } else if (random_->Percent(60)) {
        const SimOperation operation = random_->Percent(50) ? SimOperation::kWrite : SimOperation::kReserve;
        disk.SetFaultProbability(operation, SimFault::kEnospc, random_->Percent(40) ? 0 : 0.02);
      } else {
        disk.set_capacity_bytes(kDiskBytes);
      }
      return true;
    case Faults::kRot:
      return !machine_->up() && Rot();
  }
  return false;
}

// A log's last batches may be durable and acknowledged while their mark is not, because a mark is not synced on its
// own. Damage there looks like a torn batch, so the log ends before it; a log without a second copy of payloads cannot
// tell. This is a limit, not a promise.
bool DiskFaults::EndIsKnown(const std::string& file) {
  machine_->disk().CrashAfter(0);
  const auto log = machine_->disk().Open(file, storage::Disk::Mode::kShared);
  if (!log.ok()) return false;
  const auto scanned = storage::ScanLog(**log);
  return scanned.ok() && scanned->last_batch == scanned->synced_batch;
}

bool DiskFaults::Rot() {
  storage::SimDisk& disk = machine_->disk();
  const std::vector<std::string> files = disk.List();
  if (files.empty()) return false;
  const std::string& file = files[random_->Below(files.size())];
  if (absl::StrContains(file, "/log-") && !EndIsKnown(file)) return false;
  // Choose among blocks with content, because most of a log is still zeros.
  const std::vector<std::byte> content = disk.DurableContent(file);
  std::vector<uint64_t> blocks;
  for (uint64_t at = 0; at < content.size(); at += 4096) {
    const auto begin = content.begin() + static_cast<std::ptrdiff_t>(at);
    const auto end = content.begin() + static_cast<std::ptrdiff_t>(std::min<uint64_t>(at + 4096, content.size()));
    if (std::any_of(begin, end, [](std::byte b) { return b != std::byte{0}; })) blocks.push_back(at);
  }
  if (blocks.empty()) return false;
  disk.FlipBit(file, (blocks[random_->Below(blocks.size())] + random_->Below(4096)) * 8 + random_->Below(8));
  ++tally_->rotten_bits;
  return true;
}

bool DiskFaults::NeedsPowerCut() {
  const uint64_t errors = machine_->disk().suffered(SimFault::kEio) + machine_->disk().suffered(SimFault::kEnospc);
  return std::exchange(errors_seen_, errors) != errors;
}

void DiskFaults::End() {
  storage::SimDisk& disk = machine_->disk();
  machine_->catalog().FailAfter(0);
  for (const SimOperation operation : kMayFail) disk.SetFaultProbability(operation, SimFault::kEio, 0);
  for (const SimOperation operation : {SimOperation::kWrite, SimOperation::kReserve}) {
    disk.SetFaultProbability(operation, SimFault::kEnospc, 0);
  }
  disk.set_capacity_bytes(kDiskBytes);
}

bool DiskFaults::Explains(const absl::Status& status, bool* refused) const {
  const std::string reason = model::ReasonOf(status);
  switch (faults_) {
    case Faults::kCrashes:
      return false;
    case Faults::kIoErrors:
      return absl::IsInternal(status) && reason == model::kIo;
    case Faults::kFullDisk:
      return reason == model::kDiskFull;
    case Faults::kRot:
      *refused = *refused || absl::IsDataLoss(status);
      return absl::IsDataLoss(status);
  }
  return false;
}

}  // namespace ballast::sim
