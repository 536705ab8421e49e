// Copies of a chunk, compared in turn. The update of step n digests the chunks with index = n mod kDigestPeriod on all
// servers that have them. The digests come with the prepared answer of step n + kDigestLag, and rank 0 compares them.
// Nothing depends on the outcome but what an operator hears.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::model {

// A chunk that every step changes is compared once in so many steps.
inline constexpr int64_t kDigestPeriod = 64;
// So many decided steps may wait for their updates. A server that has prepared step n has applied n - kDigestLag, so
// all servers tell of the same version in the same step.
inline constexpr int64_t kDigestLag = 8;
// After so many further steps a difference that was not found again counts no more.
inline constexpr int64_t kDifferenceLasts = kDigestPeriod + 2 * kDigestLag;

inline bool IsDigested(uint64_t chunk, int64_t step) {
  return static_cast<int64_t>(chunk % kDigestPeriod) == step % kDigestPeriod;
}

// What one server told. Borrowed.
struct ToldDigests {
  absl::string_view server_id;
  const google::protobuf::RepeatedPtrField<v1::ChunkDigest>* digests = nullptr;
};
// The chunks of which servers told different digests of one version, in order. Each names all servers that told of the
// chunk at that version, in their order.
std::vector<v1::DifferingCopies> FindDiffering(absl::Span<const ToldDigests> told);

// "chunk 5 at version 128: the master has CRC32C 0000002a on 'a', 0000002b on 'b'": the first array that differs.
std::string ShowDiffering(const v1::DifferingCopies& differing);

}  // namespace ballast::model
