#include "ballast/client/group/group.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/client/transport/grpc_status.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

// Below what Collective::Exchange takes from a rank.
constexpr size_t kPieceBytes = 512 << 10;
// 2 GiB: far above the largest Open request; a bound on what a confused peer can make us hold.
constexpr int kPiecesMax = 4096;

}  // namespace

// Every piece starts with a byte: 1 if this rank has more to come. All ranks go on until none has.
absl::StatusOr<std::vector<std::string>> Group::ExchangeAll(const std::string& mine) {
  std::vector<std::string> all(world_size());
  size_t sent = 0;
  for (int piece = 0; piece < kPiecesMax; ++piece) {
    const size_t bytes = std::min(kPieceBytes, mine.size() - sent);
    std::string message(1, sent + bytes < mine.size() ? '\1' : '\0');
    message.append(mine, sent, bytes);
    sent += bytes;
    BALLAST_ASSIGN_OR_RETURN(const auto parts, collective_->Exchange(message));
    bool more = false;
    for (int r = 0; r < world_size(); ++r) {
      if (parts[r].empty())
        return model::Error(absl::StatusCode::kInternal, model::kBadRequest, "a rank sent no piece");
      more = more || parts[r][0] == '\1';
      all[r].append(parts[r], 1, std::string::npos);
    }
    if (!more) return all;
  }
  return model::Error(absl::StatusCode::kInternal, model::kBadRequest, "the ranks' exchange does not end");
}

absl::StatusOr<std::vector<std::string>> Group::Agree(const std::string& what, const absl::Status& status,
                                                      const std::string& mine) {
  const Router::Watch watch(router_, absl::StrCat("the other ranks of the group (", what, ")"));
  // A status byte, then the error or the rank's part.
  const std::string message =
      status.ok() ? absl::StrCat("+", mine) : absl::StrCat("-", ToWire(status).SerializeAsString());
  auto parts = ExchangeAll(message);
  // The own error is the better news where both are known.
  if (!parts.ok()) return status.ok() ? model::Annotate(parts.status(), what) : status;
  for (int r = 0; r < world_size(); ++r) {
    std::string& part = (*parts)[r];
    if (!part.empty() && part[0] == '+') {
      part.erase(0, 1);
      continue;
    }
    v1::RpcStatus wire;
    if (part.empty() || !wire.ParseFromArray(part.data() + 1, static_cast<int>(part.size()) - 1) || wire.code() == 0) {
      return model::Error(absl::StatusCode::kInternal, model::kBadRequest,
                          absl::StrCat("rank ", r, " sent a message that cannot be read"));
    }
    if (r == rank()) return status;
    return model::Annotate(FromWire(wire), absl::StrCat("rank ", r));
  }
  return parts;
}

}  // namespace ballast::client
