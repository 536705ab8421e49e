// Reads a job's parameters while a group trains it: for evaluators and exporters. A reader never fences and never
// writes. It needs only the right `read`.
//
// Take pins the newest version on all servers. So all reads are of one version, even if the group decides further
// steps. Until LetGo the servers need memory for what changes after that, so let go soon. A reader that makes no call
// for ReaderOptions::lease loses its version. If servers need the memory, they take away readers' pins first
// (VERSION_GONE).
//
// Threads: one thread at a time per reader. Fork: not supported after Open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/client/transport.h"
#include "ballast/kernels/float_formats.h"
#include "ballast/proto/base/access.h"

namespace ballast::client {

struct ReaderOptions {
  std::string job;
  // How long servers may take for a call, how long Open waits for servers that are down, and Take for a version that
  // all servers show.
  absl::Duration timeout = absl::Seconds(120);
  // How long servers keep the version for a reader that makes no more calls; at most 10 minutes. Read renews it.
  absl::Duration lease = absl::Seconds(30);
  model::Access access;                              // for Connect
  uint64_t inflight_bytes_max = uint64_t{64} << 20;  // of pulls
  // As SessionOptions::progress and interrupted. May be empty.
  std::function<void(const std::string&)> progress;
  std::function<bool()> interrupted;
};

// A tensor of the job. Elements lie row-major.
struct ReadableTensor {
  std::string name;
  std::vector<uint64_t> shape;
};

struct TakenVersion {
  int64_t version = -1;
  uint64_t steps = 0;  // optimizer steps of the tensor that has had most
};

struct ReaderCore;

class Reader {
 public:
  // Owns the transports, one per server, in any order. Errors: BAD_CONFIG, BAD_SPEC, SERVER_DOWN, VERSIONS_DIFFER.
  static absl::StatusOr<std::unique_ptr<Reader>> Open(const ReaderOptions& options,
                                                      std::vector<std::unique_ptr<Transport>> servers);
  // A gRPC transport per "host:port", or those of a registry's URL.
  static absl::StatusOr<std::unique_ptr<Reader>> Connect(const ReaderOptions& options,
                                                         const std::vector<std::string>& servers);
  ~Reader();  // as LetGo

  // The newest version. Takes nothing.
  absl::StatusOr<int64_t> Newest();
  // Takes the newest version in place of the one taken before. If the group has changed, follows it, also to other
  // servers. If a member does not answer for 5 seconds and others have its chunks, goes on without that member. Errors:
  // JOB_MISSING; FAILED_PRECONDITION (BAD_REQUEST), the job has no values yet; STATE_LOST; OTHER_SERVER, UNSUPPORTED,
  // VERSIONS_DIFFER, each naming the server; after `timeout` the last error that stood in the way.
  absl::StatusOr<TakenVersion> Take();
  // The job's tensors as of the version taken, and the dtype of its working parameters. Valid until the next Take.
  const std::vector<ReadableTensor>& tensors() const;
  kernels::Dtype working() const;

  // A whole tensor by name or alias, and the memory for its elements: in the working dtype, or in fp32 for masters.
  struct Place {
    std::string tensor;
    absl::Span<std::byte> to;
  };
  // Reads the tensors at the version taken: working parameters, or `masters`. What a lost server had comes from others
  // that have it, if etcd named the servers. Errors: UNKNOWN_TENSOR, BAD_LENGTH; VERSION_GONE, the version was lost on
  // the way, perhaps with all servers that had a part: Take a newer one. After an error the places may hold anything.
  absl::Status Read(absl::Span<const Place> places, bool masters = false);
  // Frees the version on the servers. Without effect if none is taken.
  void LetGo();

 private:
  explicit Reader(std::unique_ptr<ReaderCore> core);
  std::unique_ptr<ReaderCore> core_;
};

}  // namespace ballast::client
