// A data directory's mark, which tells the copy that served last from older ones. A copy or a restored backup has the
// number of its original, and so looks like the same server. The mark rises in the directory and in etcd while a server
// has the directory: a copy that was made earlier stays behind etcd's.
//
// The directory's mark rises first. So it is never behind etcd's in the directory that served last, and only one ahead
// of it, unless etcd lost its data or came back from a backup.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/proto/registry/registry.h"
#include "ballast/v1/registry.pb.h"

namespace ballast::services {

inline constexpr char kMarkFile[] = "ballast-mark";

// Whether the copy that has the mark `own` has all that was done until etcd's was written. Without one of etcd's, any
// copy is taken for the newest.
bool IsNewestCopy(const v1::DirectoryMark& own, const std::optional<v1::DirectoryMark>& etcds);
// The mark that the directory and then etcd get next: `own` where it did not get to etcd before, else one more, with
// `draw`, which is random. REQUIRES: IsNewestCopy.
v1::DirectoryMark NextMark(const v1::DirectoryMark& own, const std::optional<v1::DirectoryMark>& etcds, uint64_t draw);

// Threads: any for Check, one at a time for Raise.
class MarkedDirectory {
 public:
  // Borrows `registry`.
  MarkedDirectory(std::string path, registry::Registry* registry) : path_(std::move(path)), registry_(registry) {}

  // FAILED_PRECONDITION (BAD_CONFIG), with both marks and what to do, if another copy served since this one was made.
  // Any other error says nothing of that: of Registry, or IoError's of the file.
  absl::Status Check(const v1::ServerEntry& entry, absl::Time deadline) const;
  // Raises the mark of this directory, which serves as `entry` says. Each call to etcd takes `call_timeout` at most;
  // the disk has no bound. Errors of Check; ABORTED (BUSY) if etcd's mark changed meanwhile: the next try tells.
  // REQUIRES: the caller has the directory's lock.
  absl::Status Raise(const v1::ServerEntry& entry, absl::Duration call_timeout);

 private:
  struct Marks {
    v1::DirectoryMark own;
    std::optional<registry::Registry::Found<v1::DirectoryMark>> etcds;
  };
  // Errors of Check.
  absl::StatusOr<Marks> Look(const v1::ServerEntry& entry, absl::Time deadline) const;
  // Without the file, or with one that is no mark or has another number: none, which is older than any.
  absl::StatusOr<v1::DirectoryMark> Read(uint64_t disk) const;
  // False: only a mark that had not got to etcd is there now.
  absl::StatusOr<bool> RaiseOnce(const v1::ServerEntry& entry, absl::Duration call_timeout);
  absl::Status OlderCopy(const v1::ServerEntry& entry, const v1::DirectoryMark& own,
                         const v1::DirectoryMark& etcds) const;

  const std::string path_;
  registry::Registry* const registry_;
};

}  // namespace ballast::services
