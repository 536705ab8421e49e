#include "ballast/services/job/peers.h"

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/address.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/names.h"

namespace ballast::services {
namespace {

constexpr size_t kPageBytesMax = 262;  // a host name of 255 bytes, a colon, a port; or an IPv6 address

}  // namespace

absl::Status Peers::Check(const v1::FenceRequest& request) {
  if (request.peers_size() > model::kMembersMax) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("at most ", model::kMembersMax, " peers, got ", request.peers_size()));
  }
  for (const v1::Peer& peer : request.peers()) {
    if (peer.server_id().empty() || peer.server_id().size() > model::kServerIdBytesMax) {
      return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                          absl::StrCat("a peer's server id has 1 to ", model::kServerIdBytesMax, " bytes, got ",
                                       peer.server_id().size()));
    }
    if (peer.page().empty()) continue;
    const absl::Status parsed = model::ParseAddress(peer.page(), model::AddressUse::kConnect).status();
    if (parsed.ok() && peer.page().size() <= kPageBytesMax) continue;
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadRequest,
        absl::StrCat("the page of peer '", peer.server_id(), "' is not host:port of at most ", kPageBytesMax,
                     " bytes: ", parsed.ok() ? absl::StrCat(peer.page().size(), " bytes") : parsed.message()));
  }
  return absl::OkStatus();
}

void Peers::Set(const v1::FenceRequest& request) {
  pages_.clear();
  for (const v1::Peer& peer : request.peers()) pages_[peer.server_id()] = peer.page();
}

void Peers::Tell(const std::string& self, v1::JobStatus* status) const {
  for (const std::string& id : status->member_ids()) {
    if (id == self) continue;
    v1::Peer* peer = status->add_peers();
    peer->set_server_id(id);
    if (const auto page = pages_.find(id); page != pages_.end()) peer->set_page(page->second);
  }
}

}  // namespace ballast::services
