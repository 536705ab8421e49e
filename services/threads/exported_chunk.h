// The answer to a server that copies a chunk.
#pragma once

#include <cstdint>

#include "ballast/services/threads/answer_room.h"
#include "ballast/storage/store/whole_state.h"

namespace ballast::services {

struct ExportedChunk {
  // As in v1::ExportResponse.
  int64_t version = 0;
  int64_t changed = 0;
  uint64_t elements = 0;
  storage::WholeState state;
  AnswerRoom::Lease room;  // counts the state's bytes: keep it until the answer is sent
};

}  // namespace ballast::services
