// What a request says beyond the fields that this version knows is dropped before anybody keeps the request.
#pragma once

namespace ballast::services {

// `request` is what gRPC parsed, for this call alone.
template <typename Request>
const Request& KnownFields(const Request* request) {
  const_cast<Request*>(request)->DiscardUnknownFields();
  return *request;
}

}  // namespace ballast::services
