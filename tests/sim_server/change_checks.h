// What must hold in a run whose servers change their chunks (change_run.h): whatever a server hands out, to trainers or
// to other servers, has the bits of the undisturbed run; what it calls filled is; what it has given up is free.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "ballast/proto/model/members.h"
#include "ballast/services/threads/exported_chunk.h"
#include "ballast/tests/sim_server/machine.h"
#include "ballast/tests/sim_server/reference.h"

namespace ballast::sim {

class ChangeChecks {
 public:
  // Borrows the pointers.
  ChangeChecks(const GroupIntent* intent, Random* random) : intent_(intent), random_(random) {}

  // The first broken promise; empty: all were kept.
  const std::string& violation() const { return violation_; }
  bool kept() const { return violation_.empty(); }
  void Broken(const std::string& what);

  // The members' records of a step: each norm is that of the slices.
  void Prepared(const model::EpochPlan& plan, absl::Span<const v1::PreparedRecord> records);
  void Decided(const v1::Decision& decision);
  // A group begins at a base. `acknowledged`: the last step that an earlier group took for decided.
  void StartsFrom(const model::Found& found, int64_t acknowledged);
  void Exported(const v1::ExportRequest& request, const services::ExportedChunk& chunk);
  // The server's catalog is about to forget chunks: until then nobody else may have their bytes.
  void Forgets(int server, Machine* machine);
  // A server that has come back: it has its state, and each chunk that it calls filled.
  void CameBack(int server, Machine* machine);
  // A server of the open epoch has these chunks at `step`, and nothing else, neither in tiers nor in the catalog.
  // `alike`: what a fresh server with these chunks takes of each tier.
  using Taken = std::map<std::string, uint64_t>;  // bytes by tier
  void Holds(int server, Machine* machine, const model::EpochPlan& plan, int64_t step, const Taken& alike);
  // Pulls a part of any chunk at about the newest version.
  void PullSomething(Machine* machine);

  static Taken TakenBy(services::StateServer& server);
  uint64_t pulls() const { return pulls_; }  // compared

 private:
  std::optional<std::string> Compare(const v1::PullRequest& request, uint64_t chunk,
                                     absl::Span<const std::byte> bits) const;
  v1::PullRequest PullOf(const model::Chunk& chunk, int64_t version, int content) const;
  // Compares the whole chunk at the version, or the next version if `ahead` and that is gone.
  void CheckChunk(int server, Machine* machine, const model::Chunk& chunk, int64_t version, bool ahead);
  // Nothing rots in these runs.
  void CheckNoDamage(int server, Machine* machine);
  void CheckCatalog(int server, Machine* machine, const std::set<uint64_t>& chunks);

  const GroupIntent* const intent_;
  Random* const random_;
  Reference reference_;
  std::map<int64_t, v1::Decision> decided_;
  uint64_t pulls_ = 0;
  std::string violation_;
};

}  // namespace ballast::sim
