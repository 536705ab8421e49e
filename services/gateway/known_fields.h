// Drops the fields of a request that this version does not know, before anybody keeps the request. Not for Open, Push,
// Seal and Commit: StateServer refuses unknown fields there.
#pragma once

namespace ballast::services {

// `request`: as gRPC parsed it, used by this call alone.
template <typename Request>
const Request& KnownFields(const Request* request) {
  const_cast<Request*>(request)->DiscardUnknownFields();
  return *request;
}

}  // namespace ballast::services
