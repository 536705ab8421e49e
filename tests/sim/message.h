// Messages between ranks and servers of a schedule. Bodies are shared, so a doubled message costs only a pointer.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>

#include "absl/status/status.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::sim {

template <typename... T>
using Bodies = std::variant<std::shared_ptr<const T>...>;

using RequestBody = Bodies<v1::FenceRequest, v1::OpenRequest, v1::PushRequest, v1::NormRequest, v1::SealRequest,
                           v1::CommitRequest, v1::PinRequest, v1::UnpinRequest>;
// Has the same alternatives as RequestBody, in order. The pointer is null if the status is not OK.
using ResponseBody = Bodies<v1::FenceResponse, v1::OpenResponse, v1::PushResponse, v1::NormResponse, v1::SealResponse,
                            v1::CommitResponse, v1::PinResponse, v1::UnpinResponse>;

struct Request {
  uint32_t group = 0;
  uint32_t rank = 0;
  uint32_t life = 0;
  int server = 0;
  int64_t step = 0;
  uint64_t attempt = 0;
  uint32_t item = 0;  // in a push: index of the slice among the rank's pushes
  RequestBody body;
};

struct Response {
  Request request;
  absl::Status status;
  ResponseBody body;
};

}  // namespace ballast::sim
