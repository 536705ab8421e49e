// Memory of a large message that was parsed. Beside malloc's: that keeps what a message leaves, for each of its arenas
// apart, until somebody trims it.
#pragma once

#include <google/protobuf/arena.h>
#include <sys/mman.h>

#include <cstddef>
#include <memory>
#include <new>

namespace ballast::services {

// A message in blocks of the system, which go back with the message.
template <typename Message>
std::shared_ptr<Message> MakeLargeMessage() {
  google::protobuf::ArenaOptions options;
  options.start_block_size = size_t{128} << 10;
  options.max_block_size = size_t{1} << 20;
  options.block_alloc = [](size_t bytes) {
    void* const block = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return block == MAP_FAILED ? throw std::bad_alloc() : block;
  };
  options.block_dealloc = [](void* block, size_t bytes) { (void)::munmap(block, bytes); };
  const auto arena = std::make_shared<google::protobuf::Arena>(options);
  return {arena, google::protobuf::Arena::CreateMessage<Message>(arena.get())};
}

}  // namespace ballast::services
