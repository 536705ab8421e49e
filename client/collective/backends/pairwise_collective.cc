#include "ballast/client/collective/backends/pairwise_collective.h"

#include <cstring>

#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

constexpr uint64_t kExchangeBytesMax = uint64_t{1} << 20;

absl::Status BadLength(const std::string& message) {
  return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength, message);
}

absl::Status CheckOffsets(absl::Span<const uint64_t> offsets, int world_size, uint64_t bytes) {
  if (offsets.size() != static_cast<size_t>(world_size) + 1) {
    return BadLength(absl::StrCat("AllGather of ", world_size, " ranks got ", offsets.size(), " offsets; expected ",
                                  world_size + 1));
  }
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) {
      return BadLength(absl::StrCat("AllGather's offsets fall from ", offsets[i - 1], " to ", offsets[i]));
    }
  }
  if (offsets.back() > bytes) {
    return BadLength(absl::StrCat("AllGather's offsets end at ", offsets.back(), " in a buffer of ", bytes, " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PairwiseCollective::Run(absl::Span<const Source> to, absl::Span<const Target> from) {
  if (!broken_.ok()) return broken_;
  if (world_size_ > 1) broken_ = Transfer(to, from);
  return broken_;
}

absl::StatusOr<std::vector<std::string>> PairwiseCollective::Exchange(const std::string& mine) {
  if (mine.size() > kExchangeBytesMax) {
    return BadLength(absl::StrCat("Exchange of ", mine.size(), " bytes; expected at most ", kExchangeBytesMax));
  }
  const size_t own = static_cast<size_t>(rank_);
  std::vector<uint64_t> sizes(world_size_, mine.size());
  const uint64_t own_size = mine.size();
  std::vector<Source> to(world_size_, Source(reinterpret_cast<const std::byte*>(&own_size), sizeof(own_size)));
  std::vector<Target> from(world_size_);
  for (int r = 0; r < world_size_; ++r) from[r] = Target(reinterpret_cast<std::byte*>(&sizes[r]), sizeof(sizes[r]));
  to[own] = {};
  from[own] = {};
  BALLAST_RETURN_IF_ERROR(Run(to, from));

  std::vector<std::string> all(world_size_);
  for (int r = 0; r < world_size_; ++r) {
    if (sizes[r] > kExchangeBytesMax) {
      return BadLength(absl::StrCat("Exchange: rank ", r, " announced ", sizes[r], " bytes; expected at most ",
                                    kExchangeBytesMax, ": do all ranks run the same version?"));
    }
    if (r == rank_) continue;
    all[r].resize(sizes[r]);
    to[r] = Source(reinterpret_cast<const std::byte*>(mine.data()), mine.size());
    from[r] = Target(reinterpret_cast<std::byte*>(all[r].data()), all[r].size());
  }
  all[own] = mine;
  BALLAST_RETURN_IF_ERROR(Run(to, from));
  return all;
}

absl::Status PairwiseCollective::AllGather(absl::Span<const uint64_t> offsets, absl::Span<std::byte> all) {
  BALLAST_RETURN_IF_ERROR(CheckOffsets(offsets, world_size_, all.size()));
  const auto part = [&](int r) { return all.subspan(offsets[r], offsets[r + 1] - offsets[r]); };
  std::vector<Source> to(world_size_, Source(part(rank_)));
  std::vector<Target> from(world_size_);
  for (int r = 0; r < world_size_; ++r) from[r] = part(r);
  to[rank_] = {};
  from[rank_] = {};
  return Run(to, from);
}

absl::Status PairwiseCollective::AllToAll(absl::Span<const Source> to, absl::Span<const Target> from) {
  const size_t ranks = static_cast<size_t>(world_size_);
  if (to.size() != ranks || from.size() != ranks) {
    return BadLength(
        absl::StrCat("AllToAll of ", ranks, " ranks got ", to.size(), " sources and ", from.size(), " targets"));
  }
  if (to[rank_].size() != from[rank_].size()) {
    return BadLength(absl::StrCat("AllToAll: rank ", rank_, " sends itself ", to[rank_].size(), " bytes and expects ",
                                  from[rank_].size()));
  }
  if (!to[rank_].empty()) std::memcpy(from[rank_].data(), to[rank_].data(), to[rank_].size());
  std::vector<Source> others_to(to.begin(), to.end());
  std::vector<Target> others_from(from.begin(), from.end());
  others_to[rank_] = {};
  others_from[rank_] = {};
  return Run(others_to, others_from);
}

}  // namespace ballast::client
