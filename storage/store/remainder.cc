#include "ballast/storage/store/remainder.h"

#include <algorithm>

#include "ballast/kernels/kernels.h"

namespace ballast::storage {
namespace {

// Elements per byte of the bitmap of carries.
constexpr uint64_t kCarriesPerByte = 8;

uint8_t* CarriesAt(const StateView& state, uint64_t at) {
  auto* const carries =
      reinterpret_cast<uint8_t*>(state.base + state.layout->ScalesAt(StateArray::kMaster, state.elements));
  return carries + at / kCarriesPerByte;
}

uint16_t* LowerHalvesAt(const StateView& state, uint64_t at) { return reinterpret_cast<uint16_t*>(state.base) + at; }

}  // namespace

void JoinMaster(const StateView& state, const std::byte* working, uint64_t at, absl::Span<float> to) {
  const auto join = [&](uint64_t from, absl::Span<float> master) {
    kernels::JoinF32(reinterpret_cast<const kernels::bf16*>(working) + from, LowerHalvesAt(state, from),
                     CarriesAt(state, from), master);
  };
  // The elements before the first whole byte of carries.
  if (const uint64_t amid = at % kCarriesPerByte; amid > 0 && !to.empty()) {
    float first[kCarriesPerByte];
    const uint64_t taken = std::min<uint64_t>(to.size(), kCarriesPerByte - amid);
    join(at - amid, absl::MakeSpan(first, amid + taken));
    std::copy_n(first + amid, taken, to.data());
    at += taken;
    to.remove_prefix(taken);
  }
  if (!to.empty()) join(at, to);
}

void SetRemainder(absl::Span<const float> master, uint64_t at, const StateView& state) {
  kernels::SplitF32(master, LowerHalvesAt(state, at), CarriesAt(state, at));
}

}  // namespace ballast::storage
