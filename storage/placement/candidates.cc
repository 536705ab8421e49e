#include "ballast/storage/placement/candidates.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ballast::storage {
namespace {

bool Stays(ChunkOrder order) { return order == ChunkOrder::kStay || order == ChunkOrder::kStayAndFill; }

// Gives a tier's room to chunks. `bytes`: what a chunk would take; 0: it is none of those that may.
class Room {
 public:
  Room(uint64_t bytes, ChunkOrder order) : left_(bytes), order_(order) {}

  void Give(absl::Span<const uint64_t> bytes, absl::FunctionRef<void(size_t)> take) {
    uint64_t all = 0;
    for (const uint64_t each : bytes) all += each;
    if (order_ == ChunkOrder::kByTier || all <= left_) return GiveFirst(bytes, take);
    std::vector<uint64_t> rest(bytes.begin(), bytes.end());
    const uint64_t room = left_;
    uint64_t seen = 0, given = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      seen += bytes[i];
      // At each point of the update the share of the bytes with a place is the room's share of all bytes, rounded to
      // whole chunks.
      const auto due = static_cast<uint64_t>(static_cast<unsigned __int128>(room) * seen / all);
      if (bytes[i] == 0 || bytes[i] > left_ || given + bytes[i] / 2 > due) continue;
      given += bytes[i];
      left_ -= bytes[i];
      take(i);
      rest[i] = 0;
    }
    GiveFirst(rest, take);
  }
  uint64_t left() const { return left_; }

 private:
  void GiveFirst(absl::Span<const uint64_t> bytes, absl::FunctionRef<void(size_t)> take) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (bytes[i] == 0 || bytes[i] > left_) continue;
      left_ -= bytes[i];
      take(i);
    }
  }

  uint64_t left_;
  const ChunkOrder order_;
};

// The groups of chunks that come to a tier one after the other, as a number per chunk: 0 first, kNever not at all.
constexpr int kNever = 2;
int Turn(const PlanRequest& request, const Choice& choice, TierKind tier, size_t chunk) {
  if (request.present.empty() || !Stays(choice.order)) return 0;
  const TierKind from = request.present[chunk].state;
  if (from == tier) return 0;
  // The tiers are numbered from the fastest on.
  return choice.order == ChunkOrder::kStayAndFill || from < tier ? 1 : kNever;
}

void GiveInTurn(const PlanRequest& request, const Choice& choice, TierKind tier, absl::Span<const uint64_t> bytes,
                Room* room, absl::FunctionRef<void(size_t)> take) {
  for (int turn = 0; turn < kNever; ++turn) {
    std::vector<uint64_t> these(bytes.begin(), bytes.end());
    bool any = false;
    for (size_t i = 0; i < these.size(); ++i) {
      if (Turn(request, choice, tier, i) != turn) these[i] = 0;
      any = any || these[i] > 0;
    }
    if (any) room->Give(these, take);
  }
}

// A store without working copies puts nothing in HBM: the trainer lends host memory, which the GPU's kernels do not
// write. Nor are frozen chunks there, nor remainders, which those kernels do not read.
struct HbmBytes {
  HbmBytes(const PlanRequest& request, const Plan& plan) {
    for (size_t i = 0; i < request.elements.size(); ++i) {
      const StateLayout layout = request.LayoutOf(i);
      const bool may = layout.working_copies() && !layout.keeps_remainder() && plan.chunks[i].state != TierKind::kHbm;
      // A working copy that left HBM does not come back.
      const bool follows = request.present.empty() || request.present[i].working == TierKind::kHbm;
      const uint64_t working = follows ? layout.WorkingBytes(request.elements[i]) : 0;
      state.push_back(may ? layout.StateBytes(request.elements[i]) : 0);
      both.push_back(may ? state.back() + working : 0);
      copy.push_back(layout.working_copies() && follows ? working : 0);
    }
  }
  std::vector<uint64_t> state, both, copy;
};

// DRAM needed before any state.
uint64_t Fixed(const PlanRequest& request, const Plan& plan) {
  const bool flushes = request.durable && plan.state.hbm > 0;
  return plan.working.dram + plan.slice_bytes + (flushes ? request.flush_buffer_bytes : 0);
}

// DRAM needed before any state if some state is on NVMe. Any number may be configured: an overflow would look like
// room.
uint64_t Staged(const PlanRequest& request, const Plan& plan, uint64_t passing) {
  const uint64_t bytes = plan.working.dram + plan.slice_bytes + plan.pull.bytes() + passing;
  return bytes + std::min(request.staging_bytes, std::numeric_limits<uint64_t>::max() - bytes);
}

// Gives slices the least memory: they are read back. `passing`: DRAM for first values, which none need then.
void ReadBack(const PlanRequest& request, Plan* plan, uint64_t* passing) {
  const uint64_t shared = request.read_back->shared_bytes;
  const uint64_t least = shared + request.read_back->buffer_bytes_min;
  if (least >= plan->slice_bytes + *passing) return;
  *passing = 0;
  plan->reads_back = true;
  plan->slice_bytes = least;
  plan->spill_bytes = request.read_back->spill_bytes;
  plan->read_back_bytes = request.TrainedElements() * request.layout.gradient_element_bytes() - shared;
}

// Working copies that do not fit into `room`, DRAM for all working copies, are left out, where pulls can do without.
// Copies that stay are spread: so a forward pass finds work in memory while the disk reads the next masters.
void LeaveCopiesOut(const PlanRequest& request, uint64_t room, Plan* plan) {
  std::vector<uint64_t> copies(plan->chunks.size());
  uint64_t stay = plan->working.dram;  // copies of state in HBM
  for (size_t i = 0; i < copies.size(); ++i) {
    if (plan->chunks[i].state == TierKind::kHbm) continue;
    copies[i] = request.LayoutOf(i).WorkingBytes(request.elements[i]);
    stay -= copies[i];
    if (copies[i] > 0) plan->chunks[i].working = std::nullopt;
  }
  plan->working.dram = stay;
  plan->pull = *request.pull;
  Room(room - std::min(room, stay), ChunkOrder::kSpread).Give(copies, [&](size_t i) {
    plan->chunks[i].working = TierKind::kDram;
    plan->working.dram += copies[i];
  });
}

// The working copy in DRAM that a chunk gives up as its state comes to DRAM.
uint64_t CopyGivenUp(const PlanRequest& request, const Choice& choice, const Plan& plan, size_t chunk) {
  if (!choice.rounds_masters || plan.chunks[chunk].working != TierKind::kDram) return 0;
  return request.LayoutOf(chunk).WorkingBytes(request.elements[chunk]);
}

// Fills HBM and returns the bytes of state left for the host. Sets working copies and slices.
uint64_t FillMemory(const PlanRequest& request, const Choice& choice, Plan* plan) {
  FillHbm(request, choice, plan);
  uint64_t state_left = 0;
  for (size_t i = 0; i < plan->chunks.size(); ++i) {
    const StateLayout layout = request.LayoutOf(i);
    if (plan->chunks[i].working == TierKind::kDram) plan->working.dram += layout.WorkingBytes(request.elements[i]);
    if (plan->chunks[i].state != TierKind::kHbm) state_left += layout.StateBytes(request.elements[i]);
  }
  plan->slice_bytes = request.provisional_bytes_per_element * request.TrainedElements() + request.value_buffer_bytes;
  return state_left;
}

class Arranging {
 public:
  Arranging(const PlanRequest& request, const Choice& choice) : request_(request), choice_(choice) {
    out_.plan.choice = choice;
  }
  Candidate Run();

 private:
  void MissFrom(const char* tier, uint64_t needed, uint64_t free, const char* what, const char* or_else = "") {
    if (needed <= free) return;
    const uint64_t missing = needed - free;
    out_.missing += std::min(missing, std::numeric_limits<uint64_t>::max() - out_.missing);
    shortages_.push_back(absl::StrCat(tier, " is short of ", missing, " bytes: ", what, " needs ", needed, ", ", free,
                                      " are free; raise the ", tier, " budget by at least ", missing, " bytes",
                                      or_else));
  }
  // Has slices read back and leaves working copies out, if all of them do not fit beside the memory for moving state.
  // Returns the DRAM needed before any state.
  uint64_t MakeRoomForStaging();
  void FillDram(uint64_t room);
  Candidate CheckNvme();

  const PlanRequest& request_;
  const Choice& choice_;
  Candidate out_;
  std::vector<std::string> shortages_;
};

Candidate Arranging::Run() {
  Plan& plan = out_.plan;
  const uint64_t free = request_.free.dram;
  const uint64_t state_left = FillMemory(request_, choice_, &plan);
  const uint64_t all = Fixed(request_, plan) + request_.passing_bytes + state_left;
  const bool stays = Stays(choice_.order) && !request_.present.empty();
  if (all <= free && choice_.order != ChunkOrder::kStay) {
    plan.state.dram = state_left;  // the placements' default
    return CheckNvme();
  }
  if (request_.free.nvme == 0 && !(stays && all <= free)) {
    MissFrom("dram", all, free, "state, working copies and slices in flight", ", or give an nvme budget");
    return CheckNvme();
  }
  const uint64_t staged = MakeRoomForStaging();
  uint64_t room = free - std::min(free, staged);
  if (plan.reads_back) {
    // Buffers come before state: with too few buffers each step would wait for the log slice by slice.
    const uint64_t more = std::min(room, request_.read_back->buffer_bytes_max - request_.read_back->buffer_bytes_min);
    plan.slice_bytes += more;
    room -= more;
  }
  FillDram(room);
  MissFrom("dram", staged, free, "working copies, slices in flight and buffers for moving nvme state");
  return CheckNvme();
}

uint64_t Arranging::MakeRoomForStaging() {
  Plan& plan = out_.plan;
  const uint64_t free = request_.free.dram;
  uint64_t passing = request_.passing_bytes;
  if (choice_.rounds_masters) plan.pull = *request_.pull;
  uint64_t staged = Staged(request_, plan, passing);
  if (request_.read_back.has_value() && (choice_.reads_back || staged > free)) {
    ReadBack(request_, &plan, &passing);
    staged = Staged(request_, plan, passing);
  }
  if (staged <= free || !request_.pull.has_value()) return staged;
  uint64_t others = staged - plan.working.dram - plan.pull.bytes() + request_.pull->bytes();
  if (plan.reads_back) others += request_.read_back->buffer_bytes_max - request_.read_back->buffer_bytes_min;
  Plan leaner = plan;
  LeaveCopiesOut(request_, free - std::min(free, others), &leaner);
  // A few small copies take less than the memory for pulls without them.
  const uint64_t less = Staged(request_, leaner, passing);
  if (less >= staged) return staged;
  plan = std::move(leaner);
  return less;
}

// Frozen chunks come first: they are pulled in every pass.
void Arranging::FillDram(uint64_t room) {
  Plan& plan = out_.plan;
  Room dram(room, choice_.order);
  for (const bool frozen : {true, false}) {
    std::vector<uint64_t> bytes(plan.chunks.size()), more(plan.chunks.size());
    bool any = false;
    for (size_t i = 0; i < plan.chunks.size(); ++i) {
      const bool gap = request_.elements[i] == 0;
      if (gap || plan.chunks[i].state == TierKind::kHbm || request_.IsFrozen(i) != frozen) continue;
      bytes[i] = request_.LayoutOf(i, plan.chunks[i]).StateBytes(request_.elements[i]);
      // At least 1, since 0 stands for a chunk that may not come.
      more[i] = std::max<uint64_t>(bytes[i] - CopyGivenUp(request_, choice_, plan, i), 1);
      plan.chunks[i].state = TierKind::kNvme;
      plan.state.nvme += bytes[i];
      any = true;
    }
    if (!any) continue;
    GiveInTurn(request_, choice_, TierKind::kDram, more, &dram, [&](size_t i) {
      plan.chunks[i].state = TierKind::kDram;
      plan.state.nvme -= bytes[i];
      plan.state.dram += bytes[i];
      const uint64_t copy = CopyGivenUp(request_, choice_, plan, i);
      if (copy == 0) return;
      plan.chunks[i].working = std::nullopt;
      plan.working.dram -= copy;
    });
  }
}

// The last check: what NVMe must hold. Both tiers are named where both are short.
Candidate Arranging::CheckNvme() {
  Plan& plan = out_.plan;
  if (request_.durable) plan.durable_bytes = plan.state.hbm + plan.state.dram;
  const uint64_t needed = plan.state.nvme + plan.durable_bytes + request_.nvme_fixed_bytes + plan.spill_bytes;
  if (shortages_.empty() || request_.free.nvme > 0) {
    MissFrom("nvme", needed, request_.free.nvme,
             request_.durable  ? "durable state, room for its next versions and the gradient log"
             : plan.reads_back ? "what finds no room in dram, state and slices in flight,"
                               : "state that finds no room in dram");
  }
  out_.shortage = absl::StrJoin(shortages_, ". ");
  return std::move(out_);
}

// The uses of HBM to compare.
std::vector<Choice> HbmChoices(const PlanRequest& request) {
  if (request.free.hbm == 0) return {Choice()};
  std::vector<Choice> hbm;
  for (const HbmUse use : {HbmUse::kFull, HbmUse::kPairs, HbmUse::kState}) {
    if (use != HbmUse::kFull && !request.present.empty()) continue;
    for (int quarters = 4; quarters > 0; --quarters) hbm.push_back({.hbm = use, .hbm_quarters = quarters});
  }
  hbm.push_back({.hbm = HbmUse::kNone});
  return hbm;
}

std::vector<bool> WithAndWithout(bool possible) {
  return possible ? std::vector<bool>{false, true} : std::vector<bool>{false};
}

}  // namespace

void FillHbm(const PlanRequest& request, const Choice& choice, Plan* plan) {
  plan->chunks.assign(request.elements.size(), {});
  for (size_t i = 0; i < request.present.size(); ++i) {
    if (!request.present[i].working.has_value()) plan->chunks[i].working = std::nullopt;
  }
  if (choice.hbm == HbmUse::kNone || request.free.hbm == 0) return;
  const HbmBytes bytes(request, *plan);
  const uint64_t budget =
      choice.hbm_quarters == 4 ? request.free.hbm : request.free.hbm / 4 * static_cast<uint64_t>(choice.hbm_quarters);
  Room room(budget, choice.order);
  const auto take_state = [&](size_t i) {
    plan->chunks[i].state = TierKind::kHbm;
    plan->state.hbm += bytes.state[i];
  };
  const auto take_copy = [&](size_t i) {
    plan->chunks[i].working = TierKind::kHbm;
    plan->working.hbm += bytes.copy[i];
  };
  // Where budgets change, a copy that is in HBM stays with its state.
  if (choice.hbm != HbmUse::kState || !request.present.empty()) {
    GiveInTurn(request, choice, TierKind::kHbm, bytes.both, &room, [&](size_t i) {
      take_state(i);
      if (bytes.copy[i] > 0) take_copy(i);
    });
  }
  if (choice.hbm == HbmUse::kPairs || !request.present.empty()) return;
  room.Give(HbmBytes(request, *plan).state, take_state);
  std::vector<uint64_t> copies = bytes.copy;
  for (size_t i = 0; i < copies.size(); ++i) {
    if (plan->chunks[i].state != TierKind::kHbm || plan->chunks[i].working == TierKind::kHbm) copies[i] = 0;
  }
  room.Give(copies, take_copy);
}

std::vector<Choice> Choices(const PlanRequest& request) {
  if (request.shape.machine == nullptr) return {Choice()};
  const std::vector<Choice> hbm = HbmChoices(request);
  std::vector<ChunkOrder> orders = {ChunkOrder::kByTier, ChunkOrder::kSpread};
  if (!request.present.empty()) orders.insert(orders.end(), {ChunkOrder::kStayAndFill, ChunkOrder::kStay});
  // Working copies beside a GPU stay, and so do those of chunks that are placed already. A remainder needs its copy.
  const bool copies_stay = request.free.hbm > 0 || !request.present.empty() || request.layout.keeps_remainder();
  const bool rounds = request.pull.has_value() && !copies_stay;
  std::vector<Choice> choices;
  for (const bool rounds_masters : WithAndWithout(rounds)) {
    for (const bool reads_back : WithAndWithout(request.read_back.has_value())) {
      for (const ChunkOrder order : orders) {
        for (Choice choice : hbm) {
          choice.order = order;
          choice.reads_back = reads_back;
          choice.rounds_masters = rounds_masters;
          choices.push_back(choice);
        }
      }
    }
  }
  return choices;
}

Candidate Arrange(const PlanRequest& request, const Choice& choice) { return Arranging(request, choice).Run(); }

uint64_t LeastDram(const PlanRequest& request) {
  Plan plan;
  const uint64_t state_left = FillMemory(request, Choice(), &plan);
  const uint64_t all = Fixed(request, plan) + state_left;
  uint64_t passing = 0;  // frozen chunks that come back have their values
  if (request.read_back.has_value()) ReadBack(request, &plan, &passing);
  uint64_t least = std::min(all, Staged(request, plan, passing));
  if (!request.pull.has_value()) return least;
  LeaveCopiesOut(request, 0, &plan);
  return std::min(least, Staged(request, plan, passing));
}

}  // namespace ballast::storage
