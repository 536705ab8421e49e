// Throughput of the disk: of a file read or written from end to end, by the storage layer's queue and by fio with the
// same blocks, depth and pages; and of the transfers of a step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/io_queue.h"
#include "ballast/storage/memory/arena.h"

namespace ballast::bench {

double Median(std::vector<double> values);

struct StreamShape {
  uint64_t bytes = 0;  // of the file; a multiple of block_bytes
  uint64_t block_bytes = storage::kIoPieceBytesMax;
  uint32_t depth = 32;  // blocks in flight; a step over NVMe keeps more pieces in flight
};

struct StreamSpeed {
  double gb_per_s = 0;
  double cpu_seconds_per_gb = 0;  // user and system
};

// Runs fio in a process of its own.
class Fio {
 public:
  // UNAVAILABLE if fio is not installed. fio gets buffers of `bytes_max`: with `--mem=shmhuge` if the system has enough
  // reserved huge pages, else with transparent huge pages as in an Arena.
  static absl::StatusOr<Fio> Find(uint64_t bytes_max);
  // fio's version and the pages chosen, for the row's reference.
  const std::string& description() const { return description_; }
  // Transfers the existing file at `path`. The speed leaves out the process's start and exit.
  absl::StatusOr<StreamSpeed> Run(const StreamShape& shape, storage::IoRequest::Kind kind,
                                  const std::string& path) const;

 private:
  Fio(std::string environment, std::string memory, std::string description)
      : environment_(std::move(environment)), memory_(std::move(memory)), description_(std::move(description)) {}
  std::string environment_;  // precedes the command
  std::string memory_;       // flags of fio
  std::string description_;
};

// Our queue and fio over one file, in turn. Threads: only the thread that called Make.
class StreamComparison {
 public:
  // Writes the file at `path` once, because first writes into reserved extents are slower. UNAVAILABLE without fio, or
  // if `path` cannot be opened for direct I/O.
  static absl::StatusOr<StreamComparison> Make(const StreamShape& shape, const std::string& path);
  absl::Status Round(storage::IoRequest::Kind kind, bool ours_first);
  // Drops the results of all rounds so far.
  void Forget();

  // One entry per round; a ratio is our speed / fio's speed.
  const std::vector<StreamSpeed>& ours() const { return ours_; }
  const std::vector<StreamSpeed>& theirs() const { return theirs_; }
  std::vector<double> ratios() const;
  const std::string& reference() const { return fio_.description(); }

 private:
  StreamComparison(const StreamShape& shape, Fio fio) : shape_(shape), fio_(std::move(fio)) {}
  absl::Status Ours(storage::IoRequest::Kind kind);
  absl::Status Transfer(storage::IoRequest::Kind kind);

  StreamShape shape_;
  Fio fio_;
  std::unique_ptr<storage::BlockFile> file_;
  storage::Arena buffers_;
  std::unique_ptr<storage::IoQueue> queue_;  // destroyed before its registered memory
  std::vector<StreamSpeed> ours_, theirs_;
};

// The reads and writes of a step over state on NVMe, without the kernels. Reads each extent into a staging slot and
// writes the extent back from there, with the same queue, slots and window as the store.
class IoAlone {
 public:
  // Has as many slots as a store with `staging_bytes`. Borrows `file`, a row of extents of `chunk_bytes` each.
  static absl::StatusOr<IoAlone> Make(uint64_t staging_bytes, const storage::BlockFile* file, uint64_t chunk_bytes);
  uint64_t slots() const { return slots_; }
  // Transfers the first `chunks` extents; their content stays the same.
  absl::Status Run(uint64_t chunks);

 private:
  IoAlone(const storage::BlockFile* file, uint64_t chunk_bytes) : file_(file), chunk_bytes_(chunk_bytes) {}
  const storage::BlockFile* file_;
  uint64_t chunk_bytes_;
  uint64_t slots_ = 0;
  storage::Arena memory_;
  std::unique_ptr<storage::IoQueue> queue_;  // destroyed before its registered memory
};

}  // namespace ballast::bench
