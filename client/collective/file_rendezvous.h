// A rendezvous in a directory that all ranks see: one machine, or a shared file system with POSIX locks.
//
// Every rank holds a lock while its process lives, so a second process with the same rank is refused. The group agrees
// on a generation, so the directory may be used again after any crash:
//   1. rank 0 writes `invitation`: a fresh random id, the generation;
//   2. rank r writes `answer-r`: the generation read and a fresh random nonce, again whenever the invitation changes;
//   3. when all answers name its generation, rank 0 writes `start` with their nonces;
//   4. rank r has joined when its own nonce is in `start`.
// Files of earlier starts never hold a fresh generation or nonce, so they are never taken for new files. Values are
// files whose names carry the generation; rank 0 removes files of older generations.
#pragma once

#include <memory>
#include <string>

#include "ballast/client/collective/rank_lock.h"
#include "ballast/client/collective/rendezvous.h"

namespace ballast::client {

struct FileRendezvousOptions {
  std::string directory;  // created if missing
  int rank = 0;
  int world_size = 1;
  absl::Duration timeout = absl::Seconds(60);  // for all ranks to come
};

class FileRendezvous : public Rendezvous {
 public:
  // Blocks until all ranks are here. The rank's lock is held until destruction or the end of the process, even by a
  // crash. Errors: RANK_TAKEN (names the process), RANK_MISSING (names the ranks that did not come), BAD_CONFIG (ranks
  // disagree about the world size), IO.
  static absl::StatusOr<std::unique_ptr<FileRendezvous>> Join(const FileRendezvousOptions& options);

  // Keys: at most 64 bytes. Values: at most 1 MiB.
  absl::Status Set(absl::string_view key, absl::string_view value) override;
  absl::StatusOr<std::string> Get(absl::string_view key, absl::Time deadline) override;

 private:
  FileRendezvous(FileRendezvousOptions options, RankLock lock);
  absl::Status Gather();
  absl::Status Answer();
  absl::StatusOr<std::string> ValuePath(absl::string_view key) const;
  std::string Path(absl::string_view name) const;
  absl::Status Missing(absl::string_view waited_for) const;
  void RemoveOldValues() const;

  FileRendezvousOptions options_;
  RankLock lock_;
  std::string generation_;
};

}  // namespace ballast::client
