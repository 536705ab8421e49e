// What storage keeps of a chunk, by how its tensors were registered.
#pragma once

#include "ballast/proto/model/layout.h"
#include "ballast/storage/placement/tier_kind.h"

namespace ballast::services {

inline storage::StateForm FormOf(const model::Chunk& chunk) {
  switch (chunk.frozen) {
    case v1::FROZEN_WORKING:
      return storage::StateForm::kWorking;
    case v1::FROZEN_Q8:
      return storage::StateForm::kQ8;
    default:
      return chunk.assist == v1::ASSIST_UNSPECIFIED ? storage::StateForm::kFull : storage::StateForm::kMaster;
  }
}

}  // namespace ballast::services
