// Classes behind the Python module: a state server of this process, and what a job would take of servers. Methods
// block, and throw StatusError. Threads: any.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ballast/client/python/native/options.h"
#include "ballast/services/server/state_server.h"

namespace ballast::python {

// `directory` is created; budgets in bytes. `threads`: how many threads compute an update, and how many read for each
// job.
class PythonServer {
 public:
  // working_copies: the server keeps parameters too, for a trainer without parameters. Otherwise sessions lend the
  // trainer's parameters to the server.
  PythonServer(const std::string& directory, uint64_t dram, uint64_t nvme, int threads, bool working_copies);
  ~PythonServer();
  // Ends the server; further calls throw. Another server may use the directory once Stop has returned and the last
  // session with this server is closed. This object may live on.
  void Stop();
  // Names, sorted.
  std::vector<std::string> Jobs() const;
  // Deletes the job, if it exists, with all its data. No session may be open with the job.
  void Drop(const std::string& job);
  std::shared_ptr<services::StateServer> server() const;
  int threads() const { return threads_; }  // for compute, and for reads
  // (budget, used) in bytes: for DRAM, for NVMe.
  std::vector<std::pair<uint64_t, uint64_t>> Tiers() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<services::StateServer> server_;  // sessions share it; null after Stop()
  const pid_t pid_;
  const int threads_;
};

// Resources that a job would need: see services/server/estimate.h.
struct EstimateReport {
  bool fits = false;
  std::string text;                                     // for people
  double step_seconds = 0;                              // 0: not known
  std::vector<std::pair<std::string, uint64_t>> tiers;  // bytes on the fullest server
  // The same in parts: the tier's state, working copies, and the rest, such as slices, buffers and the log.
  std::vector<std::tuple<std::string, uint64_t, uint64_t, uint64_t>> parts;
  uint64_t server_parameters = 0;                   // on the fullest server
  uint64_t rank_bytes = 0, rank_bytes_sharded = 0;  // parameters and gradients of a trainer
};

// `servers`: 0 for an embedded server. Budgets of each server, in bytes; `profile`: from `ballastctl iotune`, empty for
// none. working_copies: as PythonServer's.
EstimateReport EstimateFor(const std::vector<client::TensorSpec>& tensors, const OpenOptions& options, uint64_t dram,
                           uint64_t nvme, int threads, uint32_t servers, const std::string& profile,
                           bool working_copies);

// Bytes of a server's DRAM reserved for staging: state on its way to and from NVMe.
uint64_t StagingBytes(uint64_t dram);

// The server and the estimate, as Python sees them.
void BindServer(nanobind::module_& m);

// A forked child lacks the parent's threads, so it must not end objects that belong to them: this leaks `shared`.
template <typename T>
void LeaveToParent(std::shared_ptr<T>* shared) {
  new std::shared_ptr<T>(std::move(*shared));
}
// Some libraries' static destructors wait for threads that a forked child lacks. After this call, exit() in a forked
// child skips all handlers that were registered before the fork.
void LetForkedChildrenExit();

}  // namespace ballast::python
