// Copies chunks from other servers by gRPC, with this server's own certificate or token.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/proto/base/access.h"
#include "ballast/services/threads/chunk_source.h"

namespace ballast::services {

class ChunkClient final : public ChunkSource {
 public:
  // `access`: read anew when the files change. Without `ca` connections are not encrypted.
  explicit ChunkClient(model::Access access);
  ~ChunkClient() override;  // ends the calls under way; their replies have run then

  void Fetch(const v1::ExportRequest& request, const v1::Member& from, absl::Time deadline,
             Reply<v1::ExportResponse> reply) override ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // A job has few servers, and each of them a connection here.
  static constexpr size_t kConnectionsMax = 64;
  // The last holder of a channel on a thread of gRPC's would make this thread join itself (gRPC 1.51).
  static constexpr size_t kRetiredMax = 8;
  struct Connection;
  struct Call;

  absl::StatusOr<std::shared_ptr<Connection>> ConnectionTo(const std::string& address) ABSL_LOCKS_EXCLUDED(mu_);
  void End(Call* call, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);
  void Retire(std::shared_ptr<Connection> connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Files have changed: the next calls connect anew.
  void LookAtFiles(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const model::Access access_;
  absl::Mutex mu_;
  std::map<std::string, std::shared_ptr<Connection>> connections_ ABSL_GUARDED_BY(mu_);  // by address
  std::deque<std::shared_ptr<Connection>> retired_ ABSL_GUARDED_BY(mu_);
  std::set<Call*> calls_ ABSL_GUARDED_BY(mu_);
  int ending_ ABSL_GUARDED_BY(mu_) = 0;  // calls whose replies run
  std::string stamp_ ABSL_GUARDED_BY(mu_);
  absl::Time looked_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace ballast::services
