#include "ballast/tests/cuda_double/cuda_double.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "ballast/tests/cuda_double/kernel_double.h"

namespace ballast::cuda_double {
namespace {

// A call that queues work on a stream lasts at least so long: two at a time meet. Not on the default stream, where a
// tier's self-test queues thousands.
constexpr std::chrono::microseconds kQueueing{10};

struct Span {
  uintptr_t begin = 0;
  uint64_t bytes = 0;
  bool Overlaps(const Span& other) const { return begin < other.begin + other.bytes && other.begin < begin + bytes; }
  bool Holds(const Span& other) const { return begin <= other.begin && other.begin + other.bytes <= begin + bytes; }
};

Span SpanOf(const void* begin, uint64_t bytes) { return {reinterpret_cast<uintptr_t>(begin), bytes}; }

struct Work {
  std::function<void()> run;
  Span host;  // host memory read or written; empty: none
};

struct Stream {
  explicit Stream(int d) : device(d) {}
  const int device;
  std::deque<Work> queue;  // guarded by the device double's mutex
  std::mutex running;      // held by whoever runs what is queued
  std::atomic<bool> queueing = false;
};

struct Event {
  explicit Event(int d) : device(d) {}
  const int device;
  Stream* recorded_on = nullptr;  // until somebody has waited for it
  bool done = false;
};

struct Block {
  std::byte* host = nullptr;
  uint64_t bytes = 0;
  int device = 0;
};

struct PageLock {
  Span span;
  int device = 0;
};

class Runtime {
 public:
  std::mutex mu;
  Machine machine;
  Counts counts;
  bool refuses_page_locks = false;
  std::function<void()> before_kernels;
  std::vector<std::string> violations;
  std::set<int> contexts;
  std::map<Stream*, std::unique_ptr<Stream>> streams;
  std::map<int, Stream> defaults;  // of the devices
  std::map<Event*, std::unique_ptr<Event>> events;
  std::map<std::byte*, Block> blocks;
  std::map<uintptr_t, PageLock> page_locks;
  std::map<const void*, std::string> kernels;  // by their host function
};

// Never destroyed: code for the GPU registers and runs before and after main.
Runtime& The() {
  static auto* const runtime = new Runtime;
  return *runtime;
}

void Note(const std::string& what) {
  std::lock_guard lock(The().mu);
  The().violations.push_back(what);
}

struct ThreadState {
  int device = 0;
  bool selected = false;
  cudaError_t last = cudaSuccess;
  ~ThreadState() {
    if (last != cudaSuccess)
      Note(std::string("a thread ended with a failure that nobody asked for: ") + cudaGetErrorString(last));
  }
};
thread_local ThreadState thread_state;

cudaError_t Result(cudaError_t error) {
  if (error != cudaSuccess) thread_state.last = error;
  return error;
}

// Whatever works on a device makes a context on it.
void NeedContext(const char* call) {
  if (!thread_state.selected) Note(std::string(call) + " on a thread that selected no device");
  std::lock_guard lock(The().mu);
  The().contexts.insert(thread_state.device);
}

Stream* StreamOf(cudaStream_t handle) {
  if (handle != nullptr) return reinterpret_cast<Stream*>(handle);
  std::lock_guard lock(The().mu);
  return &The().defaults.try_emplace(thread_state.device, thread_state.device).first->second;
}

void* HostOf(const void* device, uint64_t bytes) {
  Runtime& the = The();
  {
    std::lock_guard lock(the.mu);
    auto block = the.blocks.upper_bound(const_cast<std::byte*>(static_cast<const std::byte*>(device)));
    if (block != the.blocks.begin()) {
      --block;
      const auto offset = static_cast<uint64_t>(static_cast<const std::byte*>(device) - block->first);
      if (offset <= block->second.bytes && bytes <= block->second.bytes - offset) return block->second.host + offset;
    }
  }
  // Whoever goes on would only end in the host's memory.
  std::fprintf(stderr, "the device has no %llu bytes at %p\n", static_cast<unsigned long long>(bytes), device);
  std::abort();
}

void Free(std::byte* device) {
  std::lock_guard lock(The().mu);
  const auto found = The().blocks.find(device);
  if (found == The().blocks.end()) {
    The().violations.push_back("device memory freed that is none, or twice");
    return;
  }
  munmap(found->first, found->second.bytes);
  munmap(found->second.host, found->second.bytes);
  The().blocks.erase(found);
}

cudaError_t Allocate(void** device, uint64_t bytes) {
  const int file = memfd_create("cuda_double", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return cudaErrorMemoryAllocation;
  *device = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0);
  void* const host = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (*device == MAP_FAILED || host == MAP_FAILED) return cudaErrorMemoryAllocation;
  std::memset(host, 0xa5, bytes);
  std::lock_guard lock(The().mu);
  The().blocks[static_cast<std::byte*>(*device)] = {static_cast<std::byte*>(host), bytes, thread_state.device};
  return cudaSuccess;
}

// Runs what is queued, all of it or until `*done`.
void RunQueued(Stream* stream, const bool* done = nullptr) {
  std::lock_guard running(stream->running);
  for (;;) {
    Work work;
    {
      std::lock_guard lock(The().mu);
      if (stream->queue.empty() || (done != nullptr && *done)) return;
      work = stream->queue.front();
    }
    work.run();
    std::lock_guard lock(The().mu);
    stream->queue.pop_front();
  }
}

cudaError_t Queue(const char* call, cudaStream_t handle, Work work) {
  NeedContext(call);
  Stream* const stream = StreamOf(handle);
  if (stream->device != thread_state.device) {
    Note(std::string(call) + " on a stream of another device than the thread's");
    return cudaErrorInvalidResourceHandle;
  }
  if (stream->queueing.exchange(true)) Note(std::string(call) + " while another thread queues on the same stream");
  if (handle != nullptr) std::this_thread::sleep_for(kQueueing);
  {
    std::lock_guard lock(The().mu);
    stream->queue.push_back(std::move(work));
  }
  stream->queueing = false;
  return cudaSuccess;
}

// 0: pageable, 1: page-locked; a violation and 0 if it is so in part.
bool IsPageLocked(const Span& host) {
  std::lock_guard lock(The().mu);
  for (const auto& [begin, page_lock] : The().page_locks) {
    if (page_lock.span.Holds(host)) return true;
    if (page_lock.span.Overlaps(host)) The().violations.push_back("a copy of memory that is page-locked in part");
  }
  return false;
}

void CheckDeviceOf(const void* device, const char* call) {
  std::lock_guard lock(The().mu);
  auto block = The().blocks.upper_bound(const_cast<std::byte*>(static_cast<const std::byte*>(device)));
  if (block == The().blocks.begin() || (--block)->second.device == thread_state.device) return;
  The().violations.push_back(std::string(call) + " of another device's memory");
}

Work CopyOf(void* to, const void* from, uint64_t bytes, cudaMemcpyKind kind) {
  const bool in = kind == cudaMemcpyHostToDevice;
  CheckDeviceOf(in ? to : from, "a copy");
  return {.run =
              [=] {
                if (in) {
                  std::memcpy(HostOf(to, bytes), from, bytes);
                } else {
                  std::memcpy(to, HostOf(from, bytes), bytes);
                }
              },
          .host = SpanOf(in ? from : to, bytes)};
}

cudaError_t Launch(const void* kernel, void** arguments, cudaStream_t stream) {
  std::string name;
  {
    std::lock_guard lock(The().mu);
    const auto found = The().kernels.find(kernel);
    if (found == The().kernels.end()) return cudaErrorInvalidDeviceFunction;
    name = found->second;
    ++The().counts.kernels;
  }
  std::function<void()> run = KernelCalled(name, arguments, HostOf);
  if (run == nullptr) return cudaErrorInvalidDeviceFunction;
  return Queue("a kernel", stream,
               {.run =
                    [run = std::move(run)] {
                      std::function<void()> before;
                      {
                        std::lock_guard lock(The().mu);
                        before = The().before_kernels;
                      }
                      if (before) before();
                      run();
                    },
                .host = {}});
}

// Pushed by <<<>>>, popped by the kernel's stub.
struct CallConfiguration {
  dim3 grid, block;
  size_t shared = 0;
  void* stream = nullptr;
};
thread_local std::vector<CallConfiguration> configurations;

}  // namespace

void Begin(const Machine& machine) {
  Runtime& the = The();
  std::lock_guard lock(the.mu);
  the.machine = machine;
  the.counts = {};
  the.refuses_page_locks = false;
  the.before_kernels = nullptr;
  the.violations.clear();
  the.contexts.clear();
  thread_state.selected = false;
  thread_state.device = 0;
  thread_state.last = cudaSuccess;
}

std::vector<std::string> End() {
  Runtime& the = The();
  std::lock_guard lock(the.mu);
  const auto left = [&](size_t count, const char* what) {
    if (count > 0) the.violations.push_back(std::to_string(count) + " " + what + " left behind");
  };
  left(the.streams.size(), "streams");
  left(the.events.size(), "events");
  left(the.blocks.size(), "blocks of device memory");
  left(the.page_locks.size(), "page-locked spans");
  if (thread_state.last != cudaSuccess) {
    the.violations.push_back(std::string("a failure that nobody asked for: ") + cudaGetErrorString(thread_state.last));
  }
  return std::exchange(the.violations, {});
}

void RefusePageLocks() {
  std::lock_guard lock(The().mu);
  The().refuses_page_locks = true;
}

void BeforeKernels(std::function<void()> hook) {
  std::lock_guard lock(The().mu);
  The().before_kernels = std::move(hook);
}

Counts counts() {
  std::lock_guard lock(The().mu);
  return The().counts;
}

std::set<int> contexts() {
  std::lock_guard lock(The().mu);
  return The().contexts;
}

}  // namespace ballast::cuda_double

// ---- the runtime's own names

using namespace ballast::cuda_double;

extern "C" {

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorInvalidDeviceFunction:
      return "invalid device function";
    case cudaErrorHostMemoryAlreadyRegistered:
      return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered:
      return "pointer does not correspond to a registered memory region";
    case cudaErrorNotSupported:
      return "operation not supported";
    default:
      return "an error";
  }
}

cudaError_t cudaGetLastError() { return std::exchange(thread_state.last, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return thread_state.last; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = The().machine.devices;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= The().machine.devices) return Result(cudaErrorInvalidDevice);
  thread_state.device = device;
  thread_state.selected = true;
  std::lock_guard lock(The().mu);
  The().contexts.insert(device);  // since CUDA 12
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = thread_state.device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMemoryPoolsSupported) return Result(cudaErrorNotSupported);
  *value = The().machine.memory_pools ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  NeedContext("cudaDeviceSynchronize");
  std::vector<Stream*> streams = {StreamOf(nullptr)};
  {
    std::lock_guard lock(The().mu);
    ++The().counts.waits;
    for (const auto& [stream, owned] : The().streams) {
      if (stream->device == thread_state.device) streams.push_back(stream);
    }
  }
  for (Stream* stream : streams) RunQueued(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned) {
  NeedContext("cudaStreamCreateWithFlags");
  auto stream = std::make_unique<Stream>(thread_state.device);
  *handle = reinterpret_cast<cudaStream_t>(stream.get());
  std::lock_guard lock(The().mu);
  The().streams.emplace(stream.get(), std::move(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  NeedContext("cudaStreamSynchronize");
  {
    std::lock_guard lock(The().mu);
    ++The().counts.waits;
  }
  RunQueued(StreamOf(handle));
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  NeedContext("cudaStreamDestroy");
  RunQueued(StreamOf(handle));
  std::lock_guard lock(The().mu);
  The().streams.erase(reinterpret_cast<Stream*>(handle));
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  NeedContext("cudaEventCreateWithFlags");
  auto event = std::make_unique<Event>(thread_state.device);
  *handle = reinterpret_cast<cudaEvent_t>(event.get());
  std::lock_guard lock(The().mu);
  The().events.emplace(event.get(), std::move(event));
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  auto* const event = reinterpret_cast<Event*>(handle);
  {
    std::lock_guard lock(The().mu);
    if (event->recorded_on != nullptr)
      The().violations.push_back("an event recorded again before anybody waited for it");
    event->recorded_on = reinterpret_cast<Stream*>(stream);
    event->done = false;
  }
  return Result(Queue("cudaEventRecord", stream,
                      {.run =
                           [event] {
                             std::lock_guard lock(The().mu);
                             event->done = true;
                           },
                       .host = {}}));
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  NeedContext("cudaEventSynchronize");
  auto* const event = reinterpret_cast<Event*>(handle);
  Stream* stream = nullptr;
  {
    std::lock_guard lock(The().mu);
    ++The().counts.waits;
    stream = std::exchange(event->recorded_on, nullptr);
    if (stream == nullptr) The().violations.push_back("an event waited for that was not recorded");
  }
  if (stream != nullptr) RunQueued(stream, &event->done);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  NeedContext("cudaEventDestroy");
  std::lock_guard lock(The().mu);
  The().events.erase(reinterpret_cast<Event*>(handle));
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** device, size_t bytes) {
  NeedContext("cudaMalloc");
  return Result(Allocate(device, bytes));
}

cudaError_t cudaFree(void* device) {
  NeedContext("cudaFree");
  if (device != nullptr) Free(static_cast<std::byte*>(device));
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** device, size_t bytes, cudaStream_t stream) {
  if (!The().machine.memory_pools) return Result(cudaErrorNotSupported);
  // A pool's memory may be of an earlier block that is free in the order of the stream.
  if (const cudaError_t error = Queue("cudaMallocAsync", stream, {.run = [] {}, .host = {}}); error != cudaSuccess) {
    return Result(error);
  }
  return Result(Allocate(device, bytes));
}

cudaError_t cudaFreeAsync(void* device, cudaStream_t stream) {
  CheckDeviceOf(device, "cudaFreeAsync");
  return Result(
      Queue("cudaFreeAsync", stream, {.run = [device] { Free(static_cast<std::byte*>(device)); }, .host = {}}));
}

cudaError_t cudaMemsetAsync(void* device, int value, size_t bytes, cudaStream_t stream) {
  CheckDeviceOf(device, "cudaMemsetAsync");
  return Result(
      Queue("cudaMemsetAsync", stream, {.run = [=] { std::memset(HostOf(device, bytes), value, bytes); }, .host = {}}));
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (const cudaError_t error = Queue("cudaMemcpy", nullptr, CopyOf(to, from, bytes, kind)); error != cudaSuccess) {
    return Result(error);
  }
  RunQueued(StreamOf(nullptr));
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  Work copy = CopyOf(to, from, bytes, kind);
  const bool page_locked = IsPageLocked(copy.host);
  {
    std::lock_guard lock(The().mu);
    ++(page_locked ? The().counts.page_locked_copies : The().counts.pageable_copies);
  }
  if (const cudaError_t error = Queue("cudaMemcpyAsync", stream, std::move(copy)); error != cudaSuccess) {
    return Result(error);
  }
  if (!page_locked) RunQueued(StreamOf(stream));
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* host, size_t bytes, unsigned) {
  NeedContext("cudaHostRegister");
  const Span span = SpanOf(host, bytes);
  std::lock_guard lock(The().mu);
  if (The().refuses_page_locks) {
    ++The().counts.refused_page_locks;
    return Result(cudaErrorMemoryAllocation);
  }
  for (const auto& [begin, page_lock] : The().page_locks) {
    if (page_lock.span.Overlaps(span)) return Result(cudaErrorHostMemoryAlreadyRegistered);
  }
  The().page_locks[span.begin] = {span, thread_state.device};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* host) {
  NeedContext("cudaHostUnregister");
  std::lock_guard lock(The().mu);
  const auto found = The().page_locks.find(reinterpret_cast<uintptr_t>(host));
  if (found == The().page_locks.end()) return Result(cudaErrorHostMemoryNotRegistered);
  if (found->second.device != thread_state.device) {
    The().violations.push_back("page-lock released under another device than its own");
  }
  const auto check = [&](const Stream& stream) {
    for (const Work& work : stream.queue) {
      if (work.host.bytes == 0 || !work.host.Overlaps(found->second.span)) continue;
      The().violations.push_back("page-lock released under a queued copy");
    }
  };
  for (const auto& [stream, owned] : The().streams) check(*stream);
  for (const auto& [device, stream] : The().defaults) check(stream);
  The().page_locks.erase(found);
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return Result(Launch(kernel, arguments, stream));
}

// ---- what nvcc's stubs call; a kernel's handle is its host function

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  std::lock_guard lock(The().mu);
  The().kernels[host] = name;
}
cudaError_t __cudaGetKernel(const void** kernel, const void* host) {
  *kernel = host;
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const CallConfiguration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid, *block = last.block, *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return Result(Launch(kernel, arguments, stream));
}

}  // extern "C"
