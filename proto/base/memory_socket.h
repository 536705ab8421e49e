// How a client hands memory to a server on its own host, over an abstract UNIX socket (Linux, unix(7)).
//
// `Identify` offers a socket and two secrets. The client connects and sends the ticket; the server answers with the
// proof; the client hands over a sealed memfd; the server answers kTaken, or says why it refused. Each of these is one
// message. The socket stays open for as long as the memory is shared, so each side notices when the other ends. Each
// host and network namespace has its own sockets. A client on another host (HostName) does not connect, because there
// the name may belong to another process. All its bytes go over the wire.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/proto/base/descriptor.h"

namespace ballast::model {

inline constexpr size_t kSecretBytes = 16;
// Memory that a client shares with one server: all bytes that a session has in flight by default.
inline constexpr uint64_t kSharedBytes = uint64_t{64} << 20;
// Places in shared memory begin at multiples: vector code may rely on them.
inline constexpr uint64_t kPlaceAlignment = 64;
inline constexpr absl::string_view kTaken = "taken";
// If the server does not map a client's memory within this time, it gives the client up.
inline constexpr absl::Duration kHandOverMax = absl::Seconds(5);

// Names this boot of the host and this process's network namespace. Two processes with the same name see the same
// abstract sockets. UNAVAILABLE (IO).
absl::StatusOr<std::string> HostName();
// `bytes` random bytes from the system. INTERNAL (IO).
absl::StatusOr<std::string> MakeSecret(size_t bytes);
// True if both are equal; takes as long for any two texts of one length.
bool SameSecret(absl::string_view a, absl::string_view b);

// Errors of all below: UNAVAILABLE (IO), with the system's reason.

// `name`: without the leading NUL, at most 100 bytes. Neither blocks.
absl::StatusOr<Descriptor> ListenAtMemorySocket(const std::string& name);
absl::StatusOr<Descriptor> ConnectToMemorySocket(const std::string& name);

struct SocketMessage {
  std::string text;       // empty: the other side has ended
  Descriptor descriptor;  // foreign; -1: the message had none
};
inline constexpr size_t kSocketMessageBytesMax = 512;
// `descriptor`: goes with the message; -1: none.
absl::Status SendSocketMessage(int socket, absl::string_view text, int descriptor = -1);
// Waits for a message until `deadline`, but at most a minute.
absl::StatusOr<SocketMessage> ReceiveSocketMessage(int socket, absl::Time deadline);
// Whether the other side has closed the socket, or sent something. Call it when no message is expected.
bool SocketEnded(int socket);

// Memory that two processes map. A forked child does not have it. Threads: any.
class SharedMapping {
 public:
  // New memory of kSharedBytes, sealed against changing its length. All pages are allocated now, and count as this
  // process's. `memory`: becomes the memfd to hand over.
  static absl::StatusOr<SharedMapping> Make(Descriptor* memory);
  // Memory that came through a socket. Seals it against losing pages, so that no touch of it can fail (SIGBUS) or cost
  // this process memory. INVALID_ARGUMENT (BAD_REQUEST) if that is not possible, or if it is not kSharedBytes of
  // ordinary memory.
  static absl::StatusOr<SharedMapping> Map(const Descriptor& memory);
  SharedMapping(SharedMapping&& other) noexcept;
  SharedMapping& operator=(SharedMapping&& other) noexcept;
  ~SharedMapping();

  absl::Span<std::byte> bytes() const { return bytes_; }

 private:
  SharedMapping() = default;
  static absl::StatusOr<SharedMapping> MapDescriptor(int fd);
  absl::Span<std::byte> bytes_;
  pid_t owner_ = 0;
};

}  // namespace ballast::model
