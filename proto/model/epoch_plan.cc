#include "ballast/proto/model/epoch_plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/brief_open.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/tiling.h"

namespace ballast::model {
namespace {

absl::Status BadOpen(absl::string_view reason, absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, reason, message);
}

// FNV-1a over bytes, finished by splitmix64's mixer (Steele et al. 2014): portable, and the same on every machine. The
// hash of a member's part is where the hashes of all chunks begin.
uint64_t AddByte(uint64_t h, uint8_t byte) { return (h ^ byte) * 0x100000001b3u; }

uint64_t HashOfMember(absl::string_view job, absl::string_view server_id) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const char c : job) h = AddByte(h, static_cast<uint8_t>(c));
  h = AddByte(h, 0);
  for (const char c : server_id) h = AddByte(h, static_cast<uint8_t>(c));
  return AddByte(h, 0);
}

uint64_t HashOfChunk(uint64_t of_member, uint64_t chunk) {
  uint64_t h = of_member;
  for (int i = 0; i < 8; ++i) h = AddByte(h, static_cast<uint8_t>(chunk >> (8 * i)));
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
  return h ^ (h >> 31);
}

// Uniform in (0, 1), 53 bits.
double UnitInterval(uint64_t h) { return (static_cast<double>(h >> 11) + 0.5) * 0x1p-53; }

absl::Status CheckMembers(const v1::OpenRequest& open) {
  const auto& members = MembersOf(open);
  if (open.has_table() && !open.members().empty()) {
    return BadOpen(kBadRequest, "an Open with a table names its members there alone");
  }
  if (members.empty()) return BadOpen(kBadRequest, "an epoch needs at least one member, got none");
  if (members.size() > kMembersMax) {
    return BadOpen(kBadRequest, absl::StrCat("at most ", kMembersMax, " members, got ", members.size()));
  }
  absl::flat_hash_set<absl::string_view> ids;
  for (const v1::Member& member : members) {
    if (member.server_id().size() > kServerIdBytesMax) {
      return BadOpen(kBadRequest, absl::StrCat("a server's id has at most ", kServerIdBytesMax, " bytes, got ",
                                               member.server_id().size()));
    }
    if (member.server_id().empty() || !(member.weight() > 0) || !std::isfinite(member.weight())) {
      return BadOpen(kBadRequest, absl::StrCat("member '", member.server_id(),
                                               "' needs an id and a positive finite weight, got ", member.weight()));
    }
    if (!ids.insert(member.server_id()).second) {
      return BadOpen(kBadRequest,
                     absl::StrCat("server '", member.server_id(), "' is a member twice; list each server once"));
    }
  }
  return absl::OkStatus();
}

// What a job whose members change cannot have: a pin of every-K is not copied to a server that joins, and lent memory
// is the trainer's own.
absl::Status CheckTableFits(const v1::OpenRequest& open) {
  if (!open.has_table()) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(CheckTable(open.table()));
  const bool every_k = open.spec().durability() == v1::DURABILITY_EVERY_K;
  if (!every_k && open.spec().master_format() != v1::MASTER_FORMAT_LENT) return absl::OkStatus();
  return Error(absl::StatusCode::kUnimplemented, kUnsupported,
               absl::StrCat("job '", open.spec().name(), "' has ",
                            every_k ? "durability every-K" : "parameters that are their own masters",
                            ", and cannot have copies on several servers: use ",
                            every_k ? "durability step or none" : "an fp32 master", ", or one copy"));
}

// The largest message about a job is a fence's answer: the Open, the norms of one server's chunks, step counts, blobs.
// It must fit whole, or a step could be prepared and never decided.
absl::Status CheckMessages(const EpochPlan& plan) {
  constexpr uint64_t kChunkBytes = 16, kSegmentBytes = 18, kStepCountBytes = 5, kBlobBytes = 2 * (64 << 10);
  constexpr uint64_t kGroupBytes = 128, kKeptBytes = 10;  // of a shard, as a varint
  std::vector<uint64_t> norms(static_cast<size_t>(plan.members().size()), 0);
  for (const Chunk& chunk : plan.layout().chunks()) {
    const uint64_t bytes = kChunkBytes + kSegmentBytes * chunk.segments.size();
    for (const uint32_t holder : plan.holders_of(chunk.index)) norms[holder] += bytes;
    for (const uint32_t filler : plan.fillers_of(chunk.index)) norms[filler] += bytes;
  }
  const uint64_t open = plan.open().ByteSizeLong() + kBlobBytes + kStepCountBytes * plan.layout().tensors().size() +
                        kGroupBytes * plan.open().spec().group_count() +
                        kKeptBytes * static_cast<uint64_t>(plan.open().table().shards_size());
  const uint64_t largest = *std::max_element(norms.begin(), norms.end());
  if (open + largest <= kMessageBytesMax) return absl::OkStatus();
  return BadOpen(
      kBadSpec,
      absl::StrCat("the job's description takes ", open, " bytes (", plan.layout().tensors().size(), " tensors, ",
                   plan.open().tiling().ranges_size(), " ranges) and the norms of one server's chunks ", largest,
                   " bytes in one message, which may have ", kMessageBytesMax,
                   "; use larger chunks, more servers, or fewer tensors"));
}

absl::Status CheckRoutes(uint64_t chunks, uint64_t members) {
  if (chunks * members <= kRoutesWeighedMax) return absl::OkStatus();
  return BadOpen(kBadSpec, absl::StrCat("expected at most ", kRoutesWeighedMax, " chunks times members, got ", chunks,
                                        " chunks x ", members, " members; use larger chunks, or fewer servers"));
}

// Whether layout and slices are the same.
bool SameTiles(const v1::OpenRequest& a, const v1::OpenRequest& b) {
  return !a.spec_digest().empty() && SameSpec(a, b) && a.tiling().SerializeAsString() == b.tiling().SerializeAsString();
}

// An Open whose spec is another's.
struct SharingOpen {
  SharingOpen(const v1::OpenRequest& like, std::shared_ptr<const v1::JobSpec> lent)
      : open(MakeBrief(like)), spec(std::move(lent)) {
    open.unsafe_arena_set_allocated_spec(const_cast<v1::JobSpec*>(spec.get()));  // nobody changes it
  }
  ~SharingOpen() { (void)open.unsafe_arena_release_spec(); }
  SharingOpen(const SharingOpen&) = delete;
  SharingOpen& operator=(const SharingOpen&) = delete;

  v1::OpenRequest open;
  const std::shared_ptr<const v1::JobSpec> spec;
};

// Between two questions to `interrupt`: some 30 ms.
constexpr uint64_t kWeighedAtATime = uint64_t{1} << 20;

absl::StatusOr<std::vector<uint32_t>> Route(absl::string_view job, const Layout& layout,
                                            absl::Span<const v1::Member> members,
                                            absl::FunctionRef<absl::Status()> interrupt) {
  double weights = 0;
  std::vector<uint64_t> of_members;
  for (const v1::Member& member : members) {
    weights += member.weight();
    of_members.push_back(HashOfMember(job, member.server_id()));
  }
  uint64_t weighed = kWeighedAtATime;
  std::vector<uint64_t> load(members.size(), 0);
  std::vector<uint32_t> routes;
  routes.reserve(layout.chunks().size());
  uint64_t total = 0;
  for (const Chunk& chunk : layout.chunks()) {
    if (weighed >= kWeighedAtATime) {
      BALLAST_RETURN_IF_ERROR(interrupt());
      weighed = 0;
    }
    weighed += members.size();
    total += chunk.range.size();
    uint32_t best = 0;
    double best_score = -1;
    for (uint32_t i = 0; i < members.size(); ++i) {
      const double share = members[i].weight() / weights * static_cast<double>(total);
      const double excess = static_cast<double>(load[i] + chunk.range.size()) - share;
      if (excess > static_cast<double>(layout.chunk_elements())) continue;
      const double u = UnitInterval(HashOfChunk(of_members[i], chunk.index));
      const double score = -members[i].weight() / std::log(u);
      if (score > best_score) {
        best_score = score;
        best = i;
      }
    }
    if (best_score < 0) {
      // Rounding can leave nobody below the bound: the least loaded server by weight takes it.
      for (uint32_t i = 1; i < members.size(); ++i) {
        if (static_cast<double>(load[i]) / members[i].weight() <
            static_cast<double>(load[best]) / members[best].weight())
          best = i;
      }
    }
    load[best] += chunk.range.size();
    routes.push_back(best);
  }
  return routes;
}

}  // namespace

std::vector<uint32_t> RouteChunks(absl::string_view job, const Layout& layout, absl::Span<const v1::Member> members) {
  return *Route(job, layout, members, [] { return absl::OkStatus(); });
}

absl::StatusOr<std::shared_ptr<const EpochPlan::Tiles>> EpochPlan::Tile(const v1::OpenRequest& open,
                                                                        absl::FunctionRef<absl::Status()> interrupt) {
  auto tiles = std::make_shared<Tiles>();
  BALLAST_ASSIGN_OR_RETURN(tiles->layout, Layout::Make(open.spec()));
  BALLAST_RETURN_IF_ERROR(CheckRoutes(tiles->layout.chunks().size(), static_cast<uint64_t>(MembersOf(open).size())));
  BALLAST_RETURN_IF_ERROR(interrupt());
  BALLAST_ASSIGN_OR_RETURN(const std::vector<OwnedRange> ranges, Expand(tiles->layout, open.tiling()));
  for (const OwnedRange& r : ranges) {
    BALLAST_ASSIGN_OR_RETURN(const auto pieces, tiles->layout.Cut(r.unit, r.range));
    for (const Layout::Piece& piece : pieces) tiles->slices.push_back({r.rank, r.unit, piece.chunk, piece.range});
  }
  BALLAST_RETURN_IF_ERROR(interrupt());
  tiles->hash.Add(uint64_t{open.tiling().world_size()});
  tiles->hash.Add(static_cast<uint64_t>(tiles->slices.size()));
  for (const Slice& slice : tiles->slices) {
    tiles->hash.Add(uint64_t{slice.rank});
    tiles->hash.Add(uint64_t{slice.unit});
    tiles->hash.Add(slice.range.begin);
    tiles->hash.Add(slice.range.end);
  }
  tiles->by_rank.resize(open.tiling().world_size());
  tiles->by_chunk.resize(tiles->layout.chunks().size());
  for (uint32_t i = 0; i < tiles->slices.size(); ++i) {
    tiles->by_rank[tiles->slices[i].rank].push_back(i);
    tiles->by_chunk[tiles->slices[i].chunk].push_back(i);
  }
  return std::shared_ptr<const Tiles>(std::move(tiles));
}

void EpochPlan::ShareWith(const EpochPlan& like, const v1::OpenRequest& open) {
  spec_ = like.spec_;
  tiles_ = like.tiles_;
  const auto sharing = std::make_shared<const SharingOpen>(open, spec_);
  open_ = std::shared_ptr<const v1::OpenRequest>(sharing, &sharing->open);
}

absl::StatusOr<EpochPlan> EpochPlan::Make(const v1::OpenRequest& open, absl::FunctionRef<absl::Status()> interrupt,
                                          const EpochPlan* like) {
  if (like != nullptr && !SameTiles(open, like->open())) like = nullptr;
  if (like == nullptr && IsBrief(open)) {
    return Error(
        absl::StatusCode::kFailedPrecondition, kBadSpec,
        absl::StrCat("the Open of job '", open.spec().name(),
                     "' leaves its spec out, and no Open with that spec and tiling came before: send it whole"));
  }
  EpochPlan plan;
  BALLAST_RETURN_IF_ERROR(CheckOpen(open, like == nullptr ? SpecIs::kUnknown : SpecIs::kChecked));
  BALLAST_RETURN_IF_ERROR(CheckMembers(open));
  if (like == nullptr) {
    BALLAST_ASSIGN_OR_RETURN(plan.tiles_, Tile(open, interrupt));
    plan.open_ = std::make_shared<const v1::OpenRequest>(open);
    plan.spec_ = std::shared_ptr<const v1::JobSpec>(plan.open_, &plan.open_->spec());
  } else {
    plan.ShareWith(*like, open);
    BALLAST_RETURN_IF_ERROR(CheckRoutes(plan.layout().chunks().size(), static_cast<uint64_t>(plan.members().size())));
  }
  BALLAST_RETURN_IF_ERROR(CheckTableFits(plan.open()));
  if (!open.has_table()) {
    const std::vector<v1::Member> members(open.members().begin(), open.members().end());
    BALLAST_ASSIGN_OR_RETURN(plan.routes_, Route(open.spec().name(), plan.layout(), members, interrupt));
  }
  plan.short_chunks_.resize(static_cast<size_t>(plan.members().size()));
  for (const Chunk& chunk : plan.layout().chunks()) {
    const absl::Span<const uint32_t> holders = plan.holders_of(chunk.index);
    if (holders.size() < open.table().replicas()) ++plan.short_chunks_[holders[0]];
  }
  BALLAST_RETURN_IF_ERROR(CheckMessages(plan));
  return plan;
}

absl::StatusOr<uint32_t> EpochPlan::FindMember(absl::string_view server_id) const {
  for (int i = 0; i < members().size(); ++i) {
    if (members()[i].server_id() == server_id) return static_cast<uint32_t>(i);
  }
  return Error(absl::StatusCode::kNotFound, kBadRequest,
               absl::StrCat("server '", server_id, "' is no member of this epoch"));
}

absl::Span<const uint32_t> EpochPlan::holders_of(uint64_t chunk) const {
  if (!open_->has_table()) return {&routes_[chunk], 1};
  return ShardOf(open_->table(), chunk).holders();
}

absl::Span<const uint32_t> EpochPlan::fillers_of(uint64_t chunk) const {
  if (!open_->has_table()) return {};
  return ShardOf(open_->table(), chunk).fillers();
}

bool EpochPlan::Has(uint32_t member, uint64_t chunk) const {
  const absl::Span<const uint32_t> holders = holders_of(chunk), fillers = fillers_of(chunk);
  return std::find(holders.begin(), holders.end(), member) != holders.end() ||
         std::find(fillers.begin(), fillers.end(), member) != fillers.end();
}

uint64_t EpochPlan::short_chunks(absl::string_view server_id) const {
  const absl::StatusOr<uint32_t> member = FindMember(server_id);
  return open_->has_table() && member.ok() ? short_chunks_[*member] : 0;
}

std::string EpochPlan::ShowServersOf(uint64_t chunk) const {
  std::string shown;
  for (const auto places : {holders_of(chunk), fillers_of(chunk)}) {
    for (const uint32_t member : places) {
      absl::StrAppend(&shown, shown.empty() ? "'" : ", '", members()[static_cast<int>(member)].server_id(), "'");
    }
  }
  return shown;
}

uint32_t EpochPlan::SourceFor(uint64_t chunk, uint32_t reader) const {
  const absl::Span<const uint32_t> holders = holders_of(chunk);
  return holders[HashOfChunk(reader, chunk) % holders.size()];
}

std::optional<uint32_t> EpochPlan::FindSlice(uint32_t rank, uint32_t unit, Range range) const {
  const auto it = std::lower_bound(slices().begin(), slices().end(), std::make_pair(unit, range.begin),
                                   [](const Slice& s, const std::pair<uint32_t, uint64_t>& key) {
                                     return s.unit != key.first ? s.unit < key.first : s.range.begin < key.second;
                                   });
  if (it == slices().end() || it->rank != rank || it->unit != unit || !(it->range == range)) return std::nullopt;
  return static_cast<uint32_t>(it - slices().begin());
}

bool EpochPlan::Touches(const Slice& slice, absl::string_view tensor_bitmap) const {
  const Chunk& chunk = layout().chunks()[slice.chunk];
  const Range in_chunk{slice.range.begin - chunk.range.begin, slice.range.end - chunk.range.begin};
  for (const Segment& segment : chunk.segments) {
    if (Intersect(segment.in_chunk, in_chunk).size() > 0 && HasBit(tensor_bitmap, segment.tensor)) return true;
  }
  return false;
}

}  // namespace ballast::model
