// How storage names what a tensor's spec says of its freezing.
#pragma once

#include "ballast/storage/placement/tier_kind.h"
#include "ballast/v1/types.pb.h"

namespace ballast::services {

// REQUIRES: `frozen` is of a model::Layout, which refuses values that are none of v1's.
inline storage::Frozen FrozenOf(v1::Frozen frozen) {
  switch (frozen) {
    case v1::FROZEN_WORKING:
      return storage::Frozen::kWorking;
    case v1::FROZEN_Q8:
      return storage::Frozen::kQ8;
    default:
      return storage::Frozen::kNo;
  }
}

}  // namespace ballast::services
