#include "ballast/client/transfers/parameters.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"

namespace ballast::client {
namespace {

void Zero(absl::Span<std::byte> bytes) { std::fill(bytes.begin(), bytes.end(), std::byte{0}); }

double SecondsSince(absl::Time start) { return absl::ToDoubleSeconds(absl::Now() - start); }

}  // namespace

std::unique_ptr<UnitBuffer> BufferPool::Take(uint64_t bytes) {
  {
    absl::MutexLock lock(&mutex_);
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const bool fits = (*it)->capacity >= bytes;
      if (fits && (best == free_.end() || (*it)->capacity < (*best)->capacity)) best = it;
    }
    if (best != free_.end()) {
      std::unique_ptr<UnitBuffer> buffer = std::move(*best);
      free_.erase(best);
      return buffer;
    }
    // A larger buffer replaces one that was too small, so the number of buffers does not grow.
    if (!free_.empty()) free_.pop_back();
  }
  auto buffer = std::make_unique<UnitBuffer>();
  constexpr uint64_t kAlign = 64;
  buffer->capacity = std::max(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
  buffer->data.reset(static_cast<std::byte*>(std::aligned_alloc(kAlign, buffer->capacity)));
  if (buffer->data == nullptr) throw std::bad_alloc();
  return buffer;
}

void BufferPool::Return(std::unique_ptr<UnitBuffer> buffer) {
  absl::MutexLock lock(&mutex_);
  free_.push_back(std::move(buffer));
}

v1::PullRequest Parameters::Request(uint32_t unit, model::Range range) const {
  v1::PullRequest request;
  request.set_job(seat_->job);
  request.set_version(seat_->version);
  request.set_content(v1::CONTENT_WORKING);
  request.set_unit(unit);
  request.set_begin(range.begin);
  request.set_end(range.end);
  return request;
}

void Parameters::Start(uint32_t server, v1::PullRequest request, absl::Span<std::byte> to,
                       const std::shared_ptr<Tally>& tally) {
  pulled_bytes_ += to.size();
  tally->Start();
  seat_->router->Pull(server, std::move(request), to, seat_->Deadline(),
                      [tally](const absl::Status& status) { tally->Finish(status); });
}

Parameters::Pulling Parameters::StartOwned(uint32_t unit) {
  const UnitView& view = seat_->units->unit(unit);
  Pulling pulling{pool_.Take(view.elements * seat_->working_bytes()), seat_->version, std::make_shared<Tally>()};
  for (const UnitRange& gap : view.gaps) Zero(Part(*pulling.buffer, gap));
  for (const OwnedSlice& owned : view.slices) {
    const model::Range range = owned.slice.range;
    Start(owned.server, Request(unit, range), Part(*pulling.buffer, range), pulling.tally);
  }
  return pulling;
}

std::shared_ptr<Tally> Parameters::StartPull(uint32_t unit, absl::Span<const PullRun> runs) {
  auto tally = std::make_shared<Tally>();
  const uint64_t width = seat_->working_bytes();
  for (const PullRun& run : runs) {
    const auto pieces = seat_->units->layout().Cut(unit, {run.range.begin, run.range.end});
    if (!pieces.ok()) {
      tally->Start();
      tally->Finish(pieces.status());
      continue;
    }
    for (const model::Layout::Piece& piece : *pieces) {
      Start(seat_->units->plan().server_of(piece.chunk), Request(unit, piece.range),
            run.to.subspan((piece.range.begin - run.range.begin) * width, piece.range.size() * width), tally);
    }
  }
  return tally;
}

void Parameters::ReclaimStale() {
  for (size_t i = 0; i < stale_.size();) {
    if (!stale_[i].tally->idle()) {
      ++i;
      continue;
    }
    pool_.Return(std::move(stale_[i].buffer));
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
    pool_.Return(std::move(pulling.buffer));
    return status;
  }
  return std::move(pulling.buffer);
}

absl::Status Parameters::PullOwned(uint32_t unit, absl::Span<std::byte> to) {
  const UnitView& view = seat_->units->unit(unit);
  const uint64_t width = seat_->working_bytes();
  if (to.size() != view.owned_elements * width) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadLength,
        absl::StrCat("unit '", seat_->units->layout().units()[unit].name, "': expected room for ", view.owned_elements,
                     " elements (this rank's owned ranges), got ", to.size() / width));
  }
  if (const auto it = under_way_.find(unit); it != under_way_.end() && it->second.version == seat_->version) {
    BALLAST_ASSIGN_OR_RETURN(auto buffer, TakeOwned(unit));
    uint64_t offset = 0;
    for (const UnitRange& range : view.ranges[seat_->rank()]) {
      const absl::Span<const std::byte> part = Part(*buffer, range);
      std::copy(part.begin(), part.end(), to.begin() + offset);
      offset += part.size();
    }
    pool_.Return(std::move(buffer));
    return absl::OkStatus();
  }
  Zero(to);  // where a range spans elements that no chunk has
  auto tally = std::make_shared<Tally>();
  for (const OwnedSlice& owned : view.slices) {
    Start(owned.server, Request(unit, owned.slice.range),
          to.subspan(owned.offset * width, owned.slice.range.size() * width), tally);
  }
  return Wait(*tally);
}

absl::StatusOr<std::unique_ptr<UnitBuffer>> Parameters::Acquire(uint32_t unit) {
  BALLAST_ASSIGN_OR_RETURN(auto buffer, TakeOwned(unit));
  if (group_->world_size() == 1) return buffer;
  const absl::Time start = absl::Now();
  for (const GatherRound& round : seat_->units->unit(unit).rounds) {
    std::vector<uint64_t> offsets = round.offsets;
    for (uint64_t& offset : offsets) offset *= seat_->working_bytes();
    const auto part = Part(*buffer, round);
    if (absl::Status status = group_->collective()->AllGather(offsets, part); !status.ok()) {
      pool_.Return(std::move(buffer));
      return model::Annotate(status,
                             absl::StrCat("all-gather of unit '", seat_->units->layout().units()[unit].name, "'"));
    }
    gathered_bytes_ += part.size();
  }
  gather_seconds_ += SecondsSince(start);
  return buffer;
}

absl::StatusOr<std::unique_ptr<UnitBuffer>> Parameters::AcquireWhole(uint32_t unit) {
  const UnitView& view = seat_->units->unit(unit);
  ReclaimStale();
  auto buffer = pool_.Take(view.elements * seat_->working_bytes());
  Zero(Part(*buffer, UnitRange{0, view.elements}));
  auto tally = std::make_shared<Tally>();
  for (const uint64_t index : seat_->units->layout().units()[unit].chunks) {
    const model::Range range = seat_->units->layout().chunks()[index].range;
    Start(seat_->units->plan().server_of(index), Request(unit, range), Part(*buffer, range), tally);
  }
  if (absl::Status status = Wait(*tally); !status.ok()) {
    pool_.Return(std::move(buffer));
    return status;
  }
  return buffer;
}

absl::Status Parameters::Read(uint32_t unit, model::Range range, v1::Content content, int64_t version,
                              absl::Span<std::byte> to) {
  BALLAST_ASSIGN_OR_RETURN(const auto pieces, seat_->units->layout().Cut(unit, range));
  const uint64_t element_bytes = to.size() / range.size();
  auto tally = std::make_shared<Tally>();
  for (const model::Layout::Piece& piece : pieces) {
    v1::PullRequest request = Request(unit, piece.range);
    request.set_content(content);
    request.set_version(version);
    Start(seat_->units->plan().server_of(piece.chunk), std::move(request),
          to.subspan((piece.range.begin - range.begin) * element_bytes, piece.range.size() * element_bytes), tally);
  }
  return Wait(*tally);
}

void Parameters::Forget() {
  for (auto& [unit, pulling] : under_way_) stale_.push_back(std::move(pulling));
  under_way_.clear();
  for (Pulling& pulling : stale_) {
    (void)pulling.tally->Wait();
    pool_.Return(std::move(pulling.buffer));
  }
  stale_.clear();
}

}  // namespace ballast::client
