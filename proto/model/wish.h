// Which servers a job with a table shall have, and how many copies (rule 31 of services/step/README.md): as many as it
// was founded with, unless an operator wishes otherwise. ballastctl and trainers compute it alike.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/v1/registry.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::model {

// An empty wish: as the table says.
uint32_t WantedServers(const v1::Table& table, const v1::Wish& wish);
uint32_t WantedCopies(const v1::Table& table, const v1::Wish& wish);

// The servers that shall have the job, by id: WantedServers of them, if so many are there. First `members`, the ids of
// those that count, in their order; then those of `others` that the wish names, in the wish's order; then the rest of
// `others` by name. None that the wish excludes, but for members without which there would not be a server for each
// copy. Empty: those that have the job keep it.
std::vector<std::string> ChooseServers(const v1::Table& table, const v1::Wish& wish,
                                       absl::Span<const std::string> members, std::vector<std::string> others);

// Whether an operator says that the job went on without a server that is named. Then its id cannot be checked: the
// table keeps none of lost servers.
enum class Lost { kNone, kSome };

// The wish after what an operator asks for, which comes on top of the wish so far. INVALID_ARGUMENT (BAD_CONFIG) if it
// makes no sense for the job as `table` and the wish so far have it: a server that is there already, or is not; fewer
// servers than copies; copies above kReplicasMax. With kSome, a server that is not there may be drained or replaced
// while the job lacks servers. It shall not come back.
absl::StatusOr<v1::Wish> WishToAdd(const v1::Table& table, v1::Wish wish, absl::Span<const std::string> servers);
absl::StatusOr<v1::Wish> WishToDrain(const v1::Table& table, v1::Wish wish, absl::Span<const std::string> servers,
                                     Lost lost = Lost::kNone);
absl::StatusOr<v1::Wish> WishToReplace(const v1::Table& table, v1::Wish wish, const std::string& old_server,
                                       const std::string& by, Lost lost = Lost::kNone);
// `servers` shall be left out at once, as if they did not answer. Also refused if a chunk would be on no other member.
absl::StatusOr<v1::Wish> WishToRemove(const v1::Table& table, v1::Wish wish, absl::Span<const std::string> servers);
absl::StatusOr<v1::Wish> WishForCopies(const v1::Table& table, v1::Wish wish, uint32_t replicas);

// Whether the wish ends this membership at once.
bool IsRemoved(const v1::Wish& wish, const v1::Member& member);

// "4 server(s), 'd' first, without 'b', 2 copies of each chunk"
std::string ShowWish(const v1::Table& table, const v1::Wish& wish);

}  // namespace ballast::model
