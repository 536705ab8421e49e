// Memory of clients on this host, mapped by the server too, so that slices need no wire (proto/base/memory_socket.h).
#pragma once

#include <cstdint>
#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/proto/base/memory_socket.h"
#include "ballast/services/counters/counters.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// A client's memory. Stays mapped while a call uses the memory, though the client may have ended meanwhile.
class SharedRegion {
 public:
  SharedRegion(model::SharedMapping mapping, std::shared_ptr<SharedMemoryCounters> counters);
  ~SharedRegion();
  absl::Span<std::byte> bytes() const { return mapping_.bytes(); }

 private:
  const model::SharedMapping mapping_;
  const std::shared_ptr<SharedMemoryCounters> counters_;
};

// A thread of its own talks to the clients' sockets. Whoever has a ticket may use its memory: tickets are told by
// Identify alone, to callers that the guard let in. Bytes in this memory are hostile: a client may write at any moment.
// Threads: any.
class SharedMemory {
 public:
  // `bytes_max`: of all clients' memory together; a client that finds too little sends its bytes over the wire.
  // UNAVAILABLE (IO): this system has no such sockets.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Start(uint64_t bytes_max,
                                                             std::shared_ptr<SharedMemoryCounters> counters);
  ~SharedMemory();

  // For one client, and for model::kHandOverMax.
  absl::StatusOr<v1::MemoryOffer> Offer();

  struct Part {
    std::shared_ptr<const SharedRegion> region;
    absl::Span<std::byte> bytes;
  };
  // UNAVAILABLE (MEMORY_GONE): nobody shares memory with this ticket. INVALID_ARGUMENT (BAD_RANGE, VERSIONS_DIFFER).
  absl::StatusOr<Part> Find(const v1::SharedPlace& place) const;

  // For payloads that go through this memory.
  SharedMemoryCounters* counters() const;

 private:
  class Desk;
  SharedMemory(std::shared_ptr<Desk> desk, std::thread thread);

  const std::shared_ptr<Desk> desk_;  // the thread's too, which may outlive this object
  std::thread thread_;
};

}  // namespace ballast::services
