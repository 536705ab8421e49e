// The group's servers as people see them: ids, and the addresses of their status pages.
#pragma once

#include "absl/strings/string_view.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

// `reached`: the address by which this rank reaches the server. The server tells where its page listens: if that is all
// of its addresses, the page is at the host of `reached`; a page on loopback is none for a rank elsewhere.
v1::Peer MakePeer(const v1::IdentifyResponse& identity, absl::string_view reached);

}  // namespace ballast::client
