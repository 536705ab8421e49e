// Keeps trainers and servers of different versions apart.
#pragma once

#include <cstdint>

namespace ballast::model {

// The version of the calls and of their meaning. proto/README.md says when it rises.
inline constexpr uint32_t kProtocolVersion = 1;

}  // namespace ballast::model
