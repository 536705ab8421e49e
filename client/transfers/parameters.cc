#include "ballast/client/transfers/parameters.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/float_formats.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

void Zero(absl::Span<std::byte> bytes) { std::fill(bytes.begin(), bytes.end(), std::byte{0}); }

double SecondsSince(absl::Time start) { return absl::ToDoubleSeconds(absl::Now() - start); }

// The calls for the parts of one lease. A part that is refused is pulled.
class LeaseCalls : public std::enable_shared_from_this<LeaseCalls> {
 public:
  // `request`: but for its range.
  LeaseCalls(Router* router, std::vector<Router::Source> sources, v1::PullRequest request, absl::Time deadline,
             std::shared_ptr<LeasedParts> parts)
      : router_(router),
        sources_(std::move(sources)),
        request_(std::move(request)),
        deadline_(deadline),
        parts_(std::move(parts)) {}

  // On a thread that may move bytes.
  void Start() {
    for (size_t i = 0; i < sources_.size(); ++i) parts_->leases() ? Lease(i) : Pull(i);
  }

 private:
  void Lease(size_t i) {
    router_->Lease(
        sources_[i], Request(i), deadline_, [self = shared_from_this(), i](absl::StatusOr<model::LeasedBytes> leased) {
          const bool moved = AreRoutesChanged(leased.status()) || model::ReasonOf(leased.status()) == model::kNotFilled;
          if (!leased.ok() && !moved) return self->parts_->tally().Finish(leased.status());
          if (!moved && self->parts_->Come(i, *std::move(leased))) return self->parts_->tally().Finish({});
          self->router_->HandOver([self, i] { self->Pull(i); });
        });
  }
  void Pull(size_t i) {
    const absl::Span<std::byte> room = parts_->RoomFor(i);
    if (room.empty()) return parts_->tally().Finish({});  // the lease has ended
    router_->Pull(sources_[i], Request(i), room, deadline_,
                  [parts = parts_](const absl::Status& status) { parts->tally().Finish(status); });
  }
  v1::PullRequest Request(size_t i) const {
    v1::PullRequest request = request_;
    request.set_begin(parts_->range(i).begin);
    request.set_end(parts_->range(i).end);
    return request;
  }

  Router* const router_;
  const std::vector<Router::Source> sources_;  // of the parts
  const v1::PullRequest request_;
  const absl::Time deadline_;
  const std::shared_ptr<LeasedParts> parts_;
};

}  // namespace

v1::PullRequest Parameters::Request(uint32_t unit) const {
  v1::PullRequest request;
  request.set_job(seat_->job);
  request.set_version(seat_->version);
  request.set_content(v1::CONTENT_WORKING);
  request.set_unit(unit);
  return request;
}

absl::Status Parameters::PullRange(const UnitMap& units, v1::PullRequest request, const PullRun& run,
                                   kernels::Dtype dtype, PullOne pull) {
  const uint64_t grain = kernels::GrainOf(dtype), elements = run.range.end - run.range.begin;
  if (run.range.begin % grain != 0) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRange,
                        absl::StrCat("a pull of elements from ", run.range.begin, " on begins amid a block: expected ",
                                     "a multiple of ", grain, ", since these have a scale"));
  }
  if (run.to.size() != kernels::BytesOf(dtype, elements)) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                        absl::StrCat("a pull of ", elements, " elements has room for ", run.to.size(),
                                     " bytes; expected ", kernels::BytesOf(dtype, elements)));
  }
  BALLAST_ASSIGN_OR_RETURN(const auto pieces, units.layout().Cut(request.unit(), {run.range.begin, run.range.end}));
  for (const model::Layout::Piece& piece : pieces) {
    request.set_begin(piece.range.begin);
    request.set_end(piece.range.end);
    pull(Router::Source{piece.chunk, static_cast<uint32_t>(units.rank())}, request,
         run.to.subspan(kernels::BytesOf(dtype, piece.range.begin - run.range.begin),
                        kernels::BytesOf(dtype, piece.range.size())));
  }
  return absl::OkStatus();
}

void Parameters::Start(const std::shared_ptr<Tally>& tally, List list) {
  tally->Start();
  seat_->router->HandOver([router = seat_->router, deadline = seat_->Deadline(), tally, list = std::move(list)] {
    tally->Finish(list([&](Router::Source source, const v1::PullRequest& request, absl::Span<std::byte> to) {
      tally->Start();
      router->Pull(source, request, to, deadline, [tally](const absl::Status& status) { tally->Finish(status); });
    }));
  });
}

Parameters::Pulling Parameters::StartOwned(uint32_t unit) {
  const UnitView& view = seat_->units->unit(unit);
  const kernels::Dtype dtype = seat_->optimizer.working;
  Pulling pulling{pool_->Take(seat_->WorkingBytes(view.elements)), seat_->version, std::make_shared<Tally>()};
  for (const UnitRange& gap : view.gaps) Zero(Part(*pulling.buffer, gap));
  for (const OwnedSlice& owned : view.slices) pulled_bytes_ += seat_->WorkingBytes(owned.slice.range.size());
  Start(pulling.tally, [units = seat_->units, unit, request = Request(unit), to = pulling.buffer->data.get(),
                        dtype](PullOne pull) mutable {
    for (const OwnedSlice& owned : units->unit(unit).slices) {
      request.set_begin(owned.slice.range.begin);
      request.set_end(owned.slice.range.end);
      pull(Router::Source{owned.slice.chunk, static_cast<uint32_t>(units->rank())}, request,
           {to + kernels::BytesOf(dtype, request.begin()), kernels::BytesOf(dtype, owned.slice.range.size())});
    }
    return absl::OkStatus();
  });
  return pulling;
}

std::shared_ptr<Tally> Parameters::StartPull(uint32_t unit, absl::Span<const PullRun> runs) {
  auto tally = std::make_shared<Tally>();
  for (const PullRun& run : runs) pulled_bytes_ += run.to.size();
  Start(tally, [units = seat_->units, request = Request(unit), dtype = seat_->optimizer.working,
                runs = std::vector<PullRun>(runs.begin(), runs.end())](PullOne pull) {
    absl::Status status;
    for (const PullRun& run : runs) status.Update(PullRange(*units, request, run, dtype, pull));
    return status;
  });
  return tally;
}

absl::StatusOr<std::shared_ptr<LeasedParts>> Parameters::StartLease(uint32_t unit, absl::Span<const UnitRange> ranges) {
  std::vector<UnitRange> parts;
  std::vector<Router::Source> sources;
  for (const UnitRange& range : ranges) {
    BALLAST_ASSIGN_OR_RETURN(const auto pieces, seat_->units->layout().Cut(unit, {range.begin, range.end}));
    for (const model::Layout::Piece& piece : pieces) {
      parts.push_back({piece.range.begin, piece.range.end});
      sources.push_back(seat_->SourceOf(piece.chunk));
    }
  }
  BALLAST_ASSIGN_OR_RETURN(const auto lease, leases_->Begin(seat_->version, std::move(parts), seat_->optimizer.working,
                                                            seat_->inflight_bytes_max, seat_->step_timeout));
  lease->tally().Start(static_cast<int>(sources.size()));
  seat_->router->HandOver([calls = std::make_shared<LeaseCalls>(seat_->router, std::move(sources), Request(unit),
                                                                seat_->Deadline(), lease)] { calls->Start(); });
  return lease;
}

void Parameters::ReclaimStale() {
  for (size_t i = 0; i < stale_.size();) {
    if (!stale_[i].tally->idle()) {
      ++i;
      continue;
    }
    pool_->Return(std::move(stale_[i].buffer));
    stale_.erase(stale_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Parameters::Prefetch(uint32_t unit) {
  if (!seat_->units->CheckUnit(unit).ok() || seat_->version < 0) return;
  ReclaimStale();
  const auto it = under_way_.find(unit);
  if (it != under_way_.end()) {
    if (it->second.version == seat_->version) return;
    stale_.push_back(std::move(it->second));
    under_way_.erase(it);
  }
  under_way_[unit] = StartOwned(unit);
}

absl::Status Parameters::Wait(Tally& tally) {
  const absl::Time start = absl::Now();
  const absl::Status status = tally.Wait();
  pull_seconds_ += SecondsSince(start);
  return status;
}

absl::StatusOr<std::unique_ptr<UnitBuffer>> Parameters::TakeOwned(uint32_t unit) {
  Prefetch(unit);
  const auto it = under_way_.find(unit);
  Pulling pulling = std::move(it->second);
  under_way_.erase(it);
  if (absl::Status status = Wait(*pulling.tally); !status.ok()) {
    pool_->Return(std::move(pulling.buffer));
    return status;
  }
  return std::move(pulling.buffer);
}

absl::Status Parameters::CheckGathers(uint32_t unit) const {
  const uint64_t grain = kernels::GrainOf(seat_->optimizer.working);
  for (const std::vector<UnitRange>& of_rank : seat_->units->unit(unit).ranges) {
    for (const UnitRange& range : of_rank) {
      if (range.begin % grain == 0) continue;
      return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                          absl::StrCat("a rank's elements of unit ", unit, " begin at ", range.begin, ", amid a block ",
                                       "of ", grain, " that has one scale: gather with Split::kEven, or pull runs"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<UnitBuffer>> Parameters::Acquire(uint32_t unit) {
  BALLAST_RETURN_IF_ERROR(CheckGathers(unit));
  BALLAST_ASSIGN_OR_RETURN(auto buffer, TakeOwned(unit));
  if (group_->world_size() == 1) return buffer;
  const absl::Time start = absl::Now();
  for (const GatherRound& round : seat_->units->unit(unit).rounds) {
    std::vector<uint64_t> offsets = round.offsets;
    for (uint64_t& offset : offsets) offset = seat_->WorkingBytes(offset);
    const auto part = Part(*buffer, round);
    if (absl::Status status = group_->collective()->AllGather(offsets, part); !status.ok()) {
      pool_->Return(std::move(buffer));
      return model::Annotate(status,
                             absl::StrCat("all-gather of unit '", seat_->units->layout().units()[unit].name, "'"));
    }
    gathered_bytes_ += part.size();
  }
  gather_seconds_ += SecondsSince(start);
  return buffer;
}

absl::Status Parameters::Read(uint32_t unit, model::Range range, v1::Content content, int64_t version,
                              absl::Span<std::byte> to) {
  v1::PullRequest request = Request(unit);
  request.set_content(content);
  request.set_version(version);
  pulled_bytes_ += to.size();
  auto tally = std::make_shared<Tally>();
  const kernels::Dtype dtype = content == v1::CONTENT_WORKING ? seat_->optimizer.working : kernels::Dtype::kF32;
  Start(tally, [units = seat_->units, request, run = PullRun{{range.begin, range.end}, to}, dtype](PullOne pull) {
    return PullRange(*units, request, run, dtype, pull);
  });
  return Wait(*tally);
}

void Parameters::Forget() {
  for (auto& [unit, pulling] : under_way_) stale_.push_back(std::move(pulling));
  under_way_.clear();
  for (Pulling& pulling : stale_) {
    (void)pulling.tally->Wait();
    pool_->Return(std::move(pulling.buffer));
  }
  stale_.clear();
}

}  // namespace ballast::client
