#include "ballast/client/group/peers.h"

#include <string>

#include "absl/strings/match.h"
#include "ballast/proto/model/address.h"

namespace ballast::client {
namespace {

bool IsLoopback(const std::string& host) {
  return host == "localhost" || host == "::1" || absl::StartsWith(host, "127.");
}

}  // namespace

v1::Peer MakePeer(const v1::IdentifyResponse& identity, absl::string_view reached) {
  v1::Peer peer;
  peer.set_server_id(identity.server_id());
  const auto page = model::ParseAddress(identity.page(), model::AddressUse::kConnect);
  const auto server = model::ParseAddress(reached, model::AddressUse::kConnect);
  if (!page.ok() || !server.ok()) return peer;  // no page, or a server in the trainer's process
  if (page->host == "0.0.0.0" || page->host == "::") {
    peer.set_page(model::FormatAddress({server->host, page->port}));
  } else if (!IsLoopback(page->host) || IsLoopback(server->host)) {
    peer.set_page(identity.page());
  }
  return peer;
}

}  // namespace ballast::client
