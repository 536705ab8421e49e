#include "ballast/client/transfers/gradients.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

bool Contains(absl::Span<const uint32_t> list, uint32_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

}  // namespace

void Gradients::Resize() {
  units_.clear();
  units_.resize(seat_->units->unit_count());
  presence_ = model::MakeBitmap(static_cast<uint32_t>(seat_->units->layout().tensors().size()), {});
}

absl::Status Gradients::Check(uint32_t unit, size_t size) const {
  BALLAST_RETURN_IF_ERROR(seat_->units->CheckUnit(unit));
  const UnitView& view = seat_->units->unit(unit);
  if (size == view.owned_elements) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kInvalidArgument, model::kBadLength,
      absl::StrCat("unit '", seat_->units->layout().units()[unit].name, "': expected ", view.owned_elements,
                   " gradient elements (this rank's owned ranges, end to end), got ", size));
}

absl::StatusOr<std::vector<uint32_t>> Gradients::AbsentTensors(uint32_t unit,
                                                               absl::Span<const std::string> names) const {
  std::vector<uint32_t> absent;
  for (const std::string& name : names) {
    BALLAST_ASSIGN_OR_RETURN(const uint32_t tensor, seat_->units->layout().FindTensor(name));
    if (seat_->units->layout().tensors()[tensor].unit != unit) {
      return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                          absl::StrCat("tensor '", name, "' is named absent but is not in unit '",
                                       seat_->units->layout().units()[unit].name, "'"));
    }
    absent.push_back(tensor);
  }
  for (const uint32_t tensor : seat_->units->layout().units()[unit].tensors) {
    if (seat_->units->layout().tensors()[tensor].frozen != v1::FROZEN_UNSPECIFIED) absent.push_back(tensor);
  }
  return absent;
}

void Gradients::Mark(uint32_t unit, absl::Span<const uint32_t> absent) {
  touched_ = true;
  for (const uint32_t tensor : seat_->units->layout().units()[unit].tensors) {
    if (!seat_->units->layout().live(tensor) || Contains(absent, tensor)) continue;
    presence_[tensor / 8] = static_cast<char>(presence_[tensor / 8] | (1 << (tensor % 8)));
  }
}

absl::Status Gradients::CheckNone(uint32_t unit) const {
  const State state = units_[unit].state;
  if (state == State::kNone) return absl::OkStatus();
  const char* const came = state == State::kZeroes     ? "was counted as zeros by Norm() or Step() already"
                           : state == State::kLent     ? "was lent in this step"
                           : state == State::kReturned ? "was returned after a step that failed"
                                                       : "was pushed already in this step";
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest,
                      absl::StrCat("unit '", seat_->units->layout().units()[unit].name, "' ", came,
                                   "; add contributions up before Push, or Drop() starts over"));
}

absl::Status Gradients::Push(uint32_t unit, absl::Span<const std::byte> gradient,
                             absl::Span<const std::string> absent) {
  const uint64_t width = seat_->gradient_bytes();
  BALLAST_RETURN_IF_ERROR(Check(unit, gradient.size() / width));
  BALLAST_ASSIGN_OR_RETURN(const auto missing, AbsentTensors(unit, absent));
  BALLAST_RETURN_IF_ERROR(CheckNone(unit));
  UnitGradient& mine = units_[unit];
  mine.values.assign(gradient.begin(), gradient.end());
  for (const OwnedSegment& segment : seat_->units->unit(unit).segments) {
    if (!Contains(missing, segment.tensor)) continue;
    std::fill_n(mine.values.data() + segment.offset * width, segment.count * width, std::byte{0});
  }
  mine.state = State::kPushed;
  Mark(unit, missing);
  SendTouched(unit, presence_);
  return absl::OkStatus();
}

absl::Status Gradients::PushBorrowed(uint32_t unit, std::vector<GradientRun> runs, absl::Span<const std::string> absent,
                                     const std::shared_ptr<const void>& owner, Keep keep) {
  BALLAST_RETURN_IF_ERROR(seat_->units->CheckUnit(unit));
  BALLAST_ASSIGN_OR_RETURN(const auto missing, AbsentTensors(unit, absent));
  BALLAST_RETURN_IF_ERROR(CheckNone(unit));
  uint64_t end = 0;
  const uint64_t width = seat_->gradient_bytes(), owned = seat_->units->unit(unit).owned_elements;
  for (const GradientRun& run : runs) {
    if (run.begin < end || run.elements.size() % width != 0 || run.begin > owned ||
        run.elements.size() / width > owned - run.begin) {
      return model::Error(
          absl::StatusCode::kInvalidArgument, model::kBadRange,
          absl::StrCat("runs of a gradient: expected ascending ones of ", width, "-byte elements within ", owned,
                       ", got ", run.elements.size(), " bytes from element ", run.begin, " on, behind ", end));
    }
    end = run.begin + run.elements.size() / width;
  }
  UnitGradient& mine = units_[unit];
  mine.runs = std::move(runs);
  mine.state = State::kBorrowed;
  const bool lent = owner != nullptr && keep == Keep::kUntilApplied;
  if (lent) mine.lent = std::make_shared<model::LentGradients>(owner);
  Mark(unit, missing);
  SendTouched(unit, presence_, lent ? nullptr : owner);
  if (owner != nullptr && !lent) {
    mine.runs.clear();
    mine.state = State::kLetGo;
  }
  return absl::OkStatus();
}

void Gradients::Return() {
  (void)pushes_->Wait();
  for (UnitGradient& mine : units_) {
    if (mine.state != State::kBorrowed && mine.state != State::kLetGo && mine.state != State::kPushed) continue;
    mine.state = State::kReturned;
    mine.runs.clear();
  }
}

absl::Span<const std::byte> Gradients::BytesOf(const UnitGradient& gradient, const OwnedSlice& owned,
                                               std::shared_ptr<std::vector<std::byte>>* gathered) const {
  const uint64_t width = seat_->gradient_bytes(), count = owned.slice.range.size();
  // Slices of kLetGo that were not sent lie in absent tensors: zeros.
  if (gradient.state != State::kBorrowed && gradient.state != State::kLetGo) {
    return absl::MakeConstSpan(gradient.values).subspan(owned.offset * width, count * width);
  }
  // The first run that ends behind the slice's beginning.
  auto run =
      std::lower_bound(gradient.runs.begin(), gradient.runs.end(), owned.offset + 1,
                       [&](const GradientRun& r, uint64_t at) { return r.begin + r.elements.size() / width < at; });
  const uint64_t end = owned.offset + count;
  if (run != gradient.runs.end() && run->begin <= owned.offset && end <= run->begin + run->elements.size() / width) {
    return run->elements.subspan((owned.offset - run->begin) * width, count * width);
  }
  *gathered = std::make_shared<std::vector<std::byte>>(count * width);
  for (; run != gradient.runs.end() && run->begin < end; ++run) {
    const uint64_t from = std::max(run->begin, owned.offset);
    const uint64_t to = std::min(run->begin + run->elements.size() / width, end);
    std::memcpy((*gathered)->data() + (from - owned.offset) * width, run->elements.data() + (from - run->begin) * width,
                (to - from) * width);
  }
  return **gathered;
}

void Gradients::SendSlice(UnitGradient& gradient, const OwnedSlice& owned, const std::shared_ptr<const void>& owner) {
  // Flush tells all ranks of the error; each slice more would wait for the same server as long again.
  if (pushes_->failed()) return;
  std::shared_ptr<std::vector<std::byte>> gathered;
  const absl::Span<const std::byte> bytes = BytesOf(gradient, owned, &gathered);
  pushed_bytes_ += bytes.size();
  pushes_->Start();
  // Lets go before it counts: who waited for the pushes finds the memory free.
  seat_->PushSlice(
      v1::SLICE_KIND_GRADIENT, owned, bytes,
      [tally = pushes_, gathered, owner = owner](const absl::Status& status) mutable {
        gathered.reset();
        owner.reset();
        tally->Finish(status);
      },
      gathered == nullptr ? gradient.lent : nullptr);
}

void Gradients::SendTouched(uint32_t unit, const std::string& presence, const std::shared_ptr<const void>& owner) {
  UnitGradient& mine = units_[unit];
  const UnitView& view = seat_->units->unit(unit);
  mine.sent.resize(view.slices.size(), false);
  for (size_t i = 0; i < view.slices.size(); ++i) {
    if (mine.sent[i] || !seat_->units->plan().Touches(view.slices[i].slice, presence)) continue;
    mine.sent[i] = true;
    SendSlice(mine, view.slices[i], owner);
  }
}

absl::Status Gradients::Flush() {
  for (const UnitGradient& mine : units_) {
    if (mine.state == State::kReturned) {
      return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest,
                          "gradients of a step that failed were returned; Drop() comes before another step");
    }
  }
  return pushes_->Wait();
}

absl::Status Gradients::Cover(const std::string& presence) {
  for (uint32_t unit = 0; unit < units_.size(); ++unit) {
    UnitGradient& mine = units_[unit];
    const UnitView& view = seat_->units->unit(unit);
    const bool needed = std::any_of(view.slices.begin(), view.slices.end(), [&](const OwnedSlice& owned) {
      return seat_->units->plan().Touches(owned.slice, presence);
    });
    if (!needed || mine.state == State::kLent) continue;
    if (mine.state == State::kNone) {
      mine.values.assign(view.owned_elements * seat_->gradient_bytes(), std::byte{0});
      mine.state = State::kZeroes;
      touched_ = true;
    }
    SendTouched(unit, presence);
  }
  return pushes_->Wait();
}

absl::Status Gradients::CheckLend() const {
  if (empty()) return absl::OkStatus();
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest,
                      "this step already has gradients, and a step lends gradients of all tensors or of none; "
                      "Drop() starts over");
}

void Gradients::Lend(const std::string& presence) {
  touched_ = true;
  presence_ = presence;
  for (uint32_t unit = 0; unit < units_.size(); ++unit) {
    for (const uint32_t tensor : seat_->units->layout().units()[unit].tensors) {
      if (model::HasBit(presence, tensor)) units_[unit].state = State::kLent;
    }
  }
}

absl::Status Gradients::Resend(const OwnedSlice& owned) {
  UnitGradient& mine = units_[owned.slice.unit];
  if (mine.state == State::kLetGo) {
    return model::Error(
        absl::StatusCode::kAborted, model::kStateLost,
        absl::StrCat("a server (", seat_->units->plan().ShowServersOf(owned.slice.chunk),
                     ") has lost gradients of unit '", seat_->units->layout().units()[owned.slice.unit].name,
                     "', which this rank had let go: start the group again with resume = auto, from version ",
                     seat_->version));
  }
  if (mine.state == State::kPushed || mine.state == State::kBorrowed || mine.state == State::kZeroes) {
    SendSlice(mine, owned);
  }
  return absl::OkStatus();
}

absl::Status Gradients::ResendAll(const std::string& presence) {
  for (uint32_t unit = 0; unit < units_.size(); ++unit) {
    for (const OwnedSlice& owned : seat_->units->unit(unit).slices) {
      if (seat_->units->plan().Touches(owned.slice, presence)) BALLAST_RETURN_IF_ERROR(Resend(owned));
    }
    seat_->router->push_admissions().Await();
  }
  return absl::OkStatus();
}

void Gradients::TakeBack() {
  (void)pushes_->Wait();
  for (UnitGradient& mine : units_) {
    if (mine.lent != nullptr) mine.lent->TakeBack();
  }
}

void Gradients::Forget() {
  (void)pushes_->Wait();
  for (UnitGradient& mine : units_) {
    mine.state = State::kNone;
    mine.runs.clear();
    mine.lent = nullptr;
    std::fill(mine.sent.begin(), mine.sent.end(), false);
  }
  std::fill(presence_.begin(), presence_.end(), '\0');
  touched_ = false;
}

}  // namespace ballast::client
