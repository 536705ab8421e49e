// Checked private copies of the certificate files: one that gRPC watches in place of the files themselves, and one for
// the HTTP port.
#pragma once

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/services/gateway/security/certificates.h"
#include "ballast/services/gateway/security/counters.h"

namespace ballast::services {

// A file in memory, under a path of /proc. Its content is exchanged as a whole: a reader of the path gets the old
// content or the new. Threads: Replace one at a time; readers at any time.
class MemoryFile {
 public:
  MemoryFile() = default;
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  // `number`: the time of modification to show, in seconds; another for each content. gRPC reads key and certificate
  // one after the other, and takes them for one pair if this time stayed the same. INTERNAL (IO).
  absl::Status Replace(const std::string& content, int64_t number);
  // "/proc/self/fd/N"; for this process alone. REQUIRES: a Replace has succeeded.
  std::string path() const;

 private:
  int fd_ = -1;
};

// Threads: Read and Load one at a time; `current` any, after the first Read; the rest any, after the first Load.
class ServedCertificates {
 public:
  explicit ServedCertificates(CertificatePaths paths);

  // Checks the files and exchanges `current` alone. Writes nothing.
  absl::Status Read(absl::Time now);
  // Checks the files and exchanges both copies. Warns of names that the certificate no longer has. On an error the copy
  // stays as it was. gRPC takes the new copy within a second, for new connections. Errors: those of ReadCertificates;
  // INTERNAL (IO) if the copy cannot be written.
  absl::Status Load(absl::Time now, SecurityCounters* counters);

  const CertificatePaths& paths() const { return paths_; }
  // The content that was checked last, and found good.
  std::shared_ptr<const Certificates> current() const {
    absl::MutexLock lock(&mu_);
    return current_;
  }
  std::string pair_path() const { return pair_.path(); }
  std::string client_ca_path() const { return paths_.client_ca.empty() ? "" : client_ca_.path(); }

 private:
  void Keep(Certificates read);

  const CertificatePaths paths_;
  MemoryFile pair_, client_ca_;
  int64_t number_ = 0;
  mutable absl::Mutex mu_;
  std::shared_ptr<const Certificates> current_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast::services
