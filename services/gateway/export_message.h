// The wire form of a copied chunk, around the state's own memory.
#pragma once

#include <grpcpp/support/byte_buffer.h>

#include "ballast/services/threads/exported_chunk.h"

namespace ballast::services {

// v1::ExportResponse. The state goes with the bytes, which gRPC frees once they are sent.
grpc::ByteBuffer EncodeExport(ExportedChunk chunk);

}  // namespace ballast::services
