// The kept versions of the chunks that this server copies: which of their states are here, and which are still needed.
//
// A chunk counts as filled only once every durable pin of this server has the state that belongs to it. Otherwise a
// restore would set the chunk to zero. Order: the states of kept versions, of a batch of chunks; the pins' entries in
// the catalog; the newest states of these chunks. An entry names all chunks of its pin and is written whole, so a batch
// saves entries.
//
// A server that holds nothing yet asks a holder which versions it keeps. A version that is not here belongs to this
// server if it has no chunk of the version's time: then it began later. Of others it takes no notice, since a version
// that some server lacks cannot be restored.
//
// What a version keeps of a chunk that is here may turn out to be damaged. Its bytes are then copied too, and written
// to their place, while the chunk stays as it is.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/v1/log.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class JobCore;
class JobJournal;

// Threads: guarded by the job's lock, unless a method says otherwise.
class KeptCopies {
 public:
  KeptCopies(JobCore* core, const JobJournal* journal) : core_(core), journal_(journal) {}

  // What is to be copied next of a chunk that is missing.
  struct Next {
    std::optional<int64_t> version;  // what a pin of this version keeps of it
    bool newest = false;             // or its newest state; neither: nothing now
  };
  Next NextOf(const HeldChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The chunk is missing no more: forgets what belongs to it.
  void Filled(const HeldChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Forgets what belongs to chunks that a table took away. Has the worker write the pins' entries if a batch is
  // whole, or told versions need no state, and call `written` after that, under the lock.
  void Advance(std::function<void()> written) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // The members that hold something by the plan's table: their indices, by id. They have all kept versions.
  static std::map<std::string, uint32_t> HoldersOf(const model::EpochPlan& plan);
  // The member to ask which versions it keeps, an index of the plan's, after `failed` tries; none: nobody is to be
  // asked.
  std::optional<uint32_t> ToAsk(const model::EpochPlan& plan, uint32_t failed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Its answer, under the open epoch. `unpinning`: versions that this server is giving up.
  void Tell(const v1::ExportResponse& answer, const std::set<int64_t>& unpinning)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Versions may still come to this server.
  bool waits() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Is the version still needed here?
  bool Wants(int64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The store has what the version keeps of the chunk.
  void Took(int64_t version, const HeldChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Holder `server` of the chunk does not keep the version. True: none of `holders` does.
  bool Lack(int64_t version, const HeldChunk& chunk, const std::string& server, const std::vector<std::string>& holders)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The version is given up. True if the store may have states of it that no pin of the machine has.
  bool Forget(int64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // Class Filling: has it begin copies.
  void SetResume(std::function<void()> resume) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { resume_ = std::move(resume); }
  // What the version keeps of this chunk, by its store's index, is damaged here. True: the bytes are copied from
  // another server that holds the chunk, by themselves or with the chunk. False: nobody else holds it, or a copy under
  // this plan has failed for good.
  bool Mend(int64_t version, uint64_t store_index, const absl::Status& found) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The version has damaged bytes that are to be copied.
  bool Mends(int64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Those of chunks that are here, each with its version.
  std::vector<std::pair<int64_t, std::shared_ptr<HeldChunk>>> ToMend() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Such bytes are whole again, or `mended` says why they stay damaged.
  void EndMend(int64_t version, const HeldChunk& chunk, const absl::Status& mended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

 private:
  // Forgets damage that a copy of its chunk has mended, and damage that is of no concern any more.
  void AdvanceMends() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // This server knows which versions belong to it.
  bool IsTold() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  using Place = std::pair<int64_t, uint64_t>;  // version, and the store's index of a chunk
  // Pins of this server, and told ones, ascending.
  std::vector<int64_t> Wanted() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Did the chunk exist at the version?
  bool IsOf(const HeldChunk& chunk, int64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  bool KeepsNothing() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void ForgetFilled() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // On the worker.
  void Write(const std::function<void()>& written) ABSL_LOCKS_EXCLUDED(job_lock);
  std::vector<v1::PinnedVersion> Described() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore* const core_;
  const JobJournal* const journal_;
  // Versions that belong to this server and have no pin here yet.
  std::map<int64_t, v1::PinnedVersion> told_ ABSL_GUARDED_BY(job_lock);
  std::shared_ptr<const model::EpochPlan> asked_under_ ABSL_GUARDED_BY(job_lock);  // whose members have answered
  std::shared_ptr<const model::EpochPlan> looked_at_ ABSL_GUARDED_BY(job_lock);    // whose table has been looked at
  bool holds_ ABSL_GUARDED_BY(job_lock) = false;                                   // by that table
  std::set<Place> have_ ABSL_GUARDED_BY(job_lock);                                 // in the store
  std::set<Place> written_ ABSL_GUARDED_BY(job_lock);                              // ... and in the pins' entries
  std::map<Place, std::set<std::string>> lack_ ABSL_GUARDED_BY(job_lock);
  std::set<uint64_t> batch_ ABSL_GUARDED_BY(job_lock);  // chunks, by the store's index
  uint64_t batch_max_ ABSL_GUARDED_BY(job_lock) = 0;
  bool writing_ ABSL_GUARDED_BY(job_lock) = false;
  std::function<void()> resume_ ABSL_GUARDED_BY(job_lock);
  struct Damage {
    std::shared_ptr<HeldChunk> chunk;
    bool fills = false;  // the chunk is missing too: its copy brings all that versions keep of it
  };
  std::map<Place, Damage> mends_ ABSL_GUARDED_BY(job_lock);
  std::set<Place> unmended_ ABSL_GUARDED_BY(job_lock);                             // in vain
  std::shared_ptr<const model::EpochPlan> unmended_in_ ABSL_GUARDED_BY(job_lock);  // under this plan
  // When ForgetFilled last looked at the missing chunks.
  std::shared_ptr<const model::EpochPlan> forgot_under_ ABSL_GUARDED_BY(job_lock);
  uint64_t forgot_at_ ABSL_GUARDED_BY(job_lock) = 0;
};

}  // namespace ballast::services
