// The answer to a server that copies a chunk.
#pragma once

#include "ballast/services/threads/answer_room.h"
#include "ballast/storage/store/whole_state.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

struct ExportedChunk {
  v1::ExportResponse head;    // without arrays
  storage::WholeState state;  // the arrays
  AnswerRoom::Lease room;     // counts the state's bytes: keep it until the answer is sent
};

}  // namespace ballast::services
