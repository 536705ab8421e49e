// What the disk gives: to a file read or written from end to end, by the storage layer's own queue and by fio with the
// same blocks, depth and pages; and to the transfers of a step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/storage/io/arena.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/io_queue.h"

namespace ballast::bench {

double Median(std::vector<double> values);

struct StreamShape {
  uint64_t bytes = 0;  // of the file; a multiple of block_bytes
  uint64_t block_bytes = storage::kIoPieceBytesMax;
  uint32_t depth = 32;  // a step over NVMe keeps more pieces than these with the kernel
};

struct StreamSpeed {
  double gb_per_s = 0;
  double cpu_seconds_per_gb = 0;  // user and system
};

// fio in a process of its own.
class Fio {
 public:
  // UNAVAILABLE: it is not installed. Buffers of `bytes_max`: `--mem=shmhuge` if the system has that many huge pages
  // reserved, else transparent ones, which are what an Arena has.
  static absl::StatusOr<Fio> Find(uint64_t bytes_max);
  // What was chosen, for the row's reference.
  const std::string& description() const { return description_; }
  // Over the existing file at `path`, without process start and exit.
  absl::StatusOr<StreamSpeed> Run(const StreamShape& shape, storage::IoRequest::Kind kind,
                                  const std::string& path) const;

 private:
  Fio(std::string environment, std::string memory, std::string description)
      : environment_(std::move(environment)), memory_(std::move(memory)), description_(std::move(description)) {}
  std::string environment_;  // in front of the command
  std::string memory_;       // its flags
  std::string description_;
};

// Both over one file, in turn. Threads: the one that made it.
class StreamComparison {
 public:
  // Writes the file at `path` once: first writes into reserved extents are slower. UNAVAILABLE without fio, or where
  // `path` cannot be had past the page cache.
  static absl::StatusOr<StreamComparison> Make(const StreamShape& shape, const std::string& path);
  absl::Status Round(storage::IoRequest::Kind kind, bool ours_first);
  // All rounds so far.
  void Forget();

  // One per round; ratios: ours / theirs.
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
  std::unique_ptr<storage::IoQueue> queue_;  // dies before the memory registered with it
  std::vector<StreamSpeed> ours_, theirs_;
};

// The reads and writes of a step over state on NVMe, without a kernel between them: each extent is read into a staging
// slot and written back from there, through a queue, slots and a window as the store's.
class IoAlone {
 public:
  // Of a store with this `staging_bytes`. Borrows `file`, whose extents of `chunk_bytes` lie one behind the other.
  static absl::StatusOr<IoAlone> Make(uint64_t staging_bytes, const storage::BlockFile* file, uint64_t chunk_bytes);
  uint64_t slots() const { return slots_; }
  // Over the first `chunks` extents, whose content stays.
  absl::Status Run(uint64_t chunks);

 private:
  IoAlone(const storage::BlockFile* file, uint64_t chunk_bytes) : file_(file), chunk_bytes_(chunk_bytes) {}
  const storage::BlockFile* file_;
  uint64_t chunk_bytes_;
  uint64_t slots_ = 0;
  storage::Arena memory_;
  std::unique_ptr<storage::IoQueue> queue_;  // dies before the memory registered with it
};

}  // namespace ballast::bench
