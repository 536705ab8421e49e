// An epoch's plan: the layout, the servers of each chunk, and the slices that each rank owes. Clients and servers
// compute it alike from the Open.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/proto/model/field_hash.h"
#include "ballast/proto/model/layout.h"
#include "ballast/proto/model/table.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::model {

inline constexpr int kMembersMax = 4096;
// Chunks times members of an epoch: each chunk weighs each member. 2^20 chunks over 256 servers take some seconds.
inline constexpr uint64_t kRoutesWeighedMax = uint64_t{1} << 28;

// The part of one rank's range within one chunk: the unit of every push, and at most 4 MiB of fp32.
struct Slice {
  uint32_t rank = 0;
  uint32_t unit = 0;
  uint64_t chunk = 0;
  Range range;  // in the unit
};

// Maps chunks, in registration order, to indices into `members`. Uses weighted rendezvous hashing (Thaler & Ravishankar
// 1998; weights by -w / ln(u) as in Schindelhauer & Schomaker 2005) on (job, chunk, server id). Skips a server whose
// elements would exceed its share of all elements so far by more than one chunk. A chunk's server depends only on
// earlier chunks, so chunks registered later never move earlier ones.
std::vector<uint32_t> RouteChunks(absl::string_view job, const Layout& layout, absl::Span<const v1::Member> members);

class EpochPlan {
 public:
  // INVALID_ARGUMENT for an Open of another version (VERSIONS_DIFFER, as CheckOpen), a bad spec, missing or doubled
  // members, a bad table, too many chunks for so many members, or a tiling that Expand refuses. `interrupt` is asked
  // several times a second, and its error ends the work. `like`: the plan of an earlier Open of the job, or null. If
  // spec and tiling are the same, the new plan shares them and what follows from them, and costs little more than its
  // table. A brief Open (brief_open.h) takes its spec from there; FAILED_PRECONDITION (BAD_SPEC) if that has
  // another.
  static absl::StatusOr<EpochPlan> Make(
      const v1::OpenRequest& open, absl::FunctionRef<absl::Status()> interrupt = [] { return absl::OkStatus(); },
      const EpochPlan* like = nullptr);
  static absl::StatusOr<EpochPlan> Make(const v1::OpenRequest& open, const EpochPlan* like) {
    return Make(
        open, [] { return absl::OkStatus(); }, like);
  }

  // Whole, also if the plan was made of a brief Open.
  const v1::OpenRequest& open() const { return *open_; }
  std::shared_ptr<const v1::OpenRequest> shared_open() const { return open_; }
  const Layout& layout() const { return tiles_->layout; }
  uint32_t world_size() const { return open_->tiling().world_size(); }
  const google::protobuf::RepeatedPtrField<v1::Member>& members() const { return MembersOf(*open_); }
  // Servers, as indices into members(). Holders have all decided steps of the chunk; without a table there is one.
  // Fillers copy the chunk from a holder while steps go on. Slices of the chunk go to both.
  absl::Span<const uint32_t> holders_of(uint64_t chunk) const;
  absl::Span<const uint32_t> fillers_of(uint64_t chunk) const;
  // Whether `member` holds or fills the chunk.
  bool Has(uint32_t member, uint64_t chunk) const;
  // Chunks that have fewer holders than the table wants, and `server_id` as their first.
  uint64_t short_chunks(absl::string_view server_id) const;
  // Their ids, for messages: "'e1', 'e2'".
  std::string ShowServersOf(uint64_t chunk) const;
  // The holder that `reader` (a rank, or any number) pulls the chunk from: readers and chunks spread evenly over
  // holders.
  uint32_t SourceFor(uint64_t chunk, uint32_t reader) const;
  // NOT_FOUND if `server_id` is not a member.
  absl::StatusOr<uint32_t> FindMember(absl::string_view server_id) const;

  // All slices, by (unit, begin). Ranks partition them.
  const std::vector<Slice>& slices() const { return tiles_->slices; }
  // Indices into slices(): of one rank; of one chunk.
  absl::Span<const uint32_t> slices_of_rank(uint32_t rank) const { return tiles_->by_rank[rank]; }
  absl::Span<const uint32_t> slices_of_chunk(uint64_t chunk) const { return tiles_->by_chunk[chunk]; }
  // The hash of the world size and all slices. Every plan hash of the epoch begins with it. The plan computes it once,
  // because there may be millions of slices and each step has a plan hash.
  const FieldHash& tiling_hash() const { return tiles_->hash; }
  // Finds exactly this slice, or nullopt: only whole slices are accepted.
  std::optional<uint32_t> FindSlice(uint32_t rank, uint32_t unit, Range range) const;
  // Whether the slice touches a tensor of the bitmap.
  bool Touches(const Slice& slice, absl::string_view tensor_bitmap) const;

 private:
  // What follows from the spec and the tiling.
  struct Tiles {
    Layout layout;
    std::vector<Slice> slices;
    FieldHash hash;
    std::vector<std::vector<uint32_t>> by_rank;
    std::vector<std::vector<uint32_t>> by_chunk;
  };
  static absl::StatusOr<std::shared_ptr<const Tiles>> Tile(const v1::OpenRequest& open,
                                                           absl::FunctionRef<absl::Status()> interrupt);

  // Takes spec and tiles from a plan that has the same.
  void ShareWith(const EpochPlan& like, const v1::OpenRequest& open);

  std::shared_ptr<const v1::OpenRequest> open_ = std::make_shared<const v1::OpenRequest>();
  std::shared_ptr<const v1::JobSpec> spec_;  // the Open's: of the first Open that had it
  std::shared_ptr<const Tiles> tiles_ = std::make_shared<const Tiles>();
  std::vector<uint32_t> routes_;        // without a table
  std::vector<uint64_t> short_chunks_;  // by member
};

}  // namespace ballast::model
