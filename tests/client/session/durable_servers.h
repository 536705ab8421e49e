// Servers with disks that a test can restart, and a training with values that tell every step apart.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/services/gateway/embedded_transport.h"
#include "ballast/services/server/state_server.h"
#include "ballast/tests/client/session/session_fixture.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::client {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr int kServers = 2;

struct Budget {
  const char* name;
  storage::TierBytes bytes;
};

// Servers "s0" and "s1" with disks. Restart keeps the disks.
class Servers {
 public:
  explicit Servers(const storage::TierBytes& budget) : budget_(budget), servers_(kServers) { Restart(); }
  void Restart() {
    for (int i = 0; i < kServers; ++i) Restart(i);
  }
  // All servers end, and start again on copies of the directories `from` (as `Copy` made them).
  void RestartOn(const std::deque<ScratchDirectory>& from) {
    for (int i = 0; i < kServers; ++i) {
      servers_[i].state.reset();
      std::filesystem::remove_all(servers_[i].directory.path());
      std::filesystem::copy(from[i].path(), servers_[i].directory.path(), std::filesystem::copy_options::recursive);
    }
    Restart();
  }
  // All servers end, their directories are copied, and the servers start again.
  std::deque<ScratchDirectory> Copy() {
    std::deque<ScratchDirectory> copies(kServers);
    for (int i = 0; i < kServers; ++i) {
      servers_[i].state.reset();
      std::filesystem::copy(servers_[i].directory.path(), copies[i].path(), std::filesystem::copy_options::recursive);
    }
    Restart();
    return copies;
  }
  void Restart(int i) {
    servers_[i].state.reset();
    services::StateServerOptions options;
    options.data_directory = servers_[i].directory.path();
    options.server_id = absl::StrCat("s", i);
    options.budget = budget_;
    options.staging_bytes = 4 * kMiB;
    auto state = services::StateServer::Start(options);
    ASSERT_TRUE(state.ok()) << state.status();
    servers_[i].state = *std::move(state);
  }
  std::vector<std::unique_ptr<Transport>> Connect() const {
    std::vector<std::unique_ptr<Transport>> transports;
    for (const Server& server : servers_) transports.push_back(services::MakeEmbeddedTransport(server.state.get(), 3));
    return transports;
  }
  v1::GetServerStatusResponse Status(int i) const { return servers_[i].state->Status(); }
  // Pins durably on server i alone, at the open epoch, like a rank whose calls to its peer are lost.
  absl::Status PinDurably(int i, int64_t version) const {
    return services::PinDurably(servers_[i].state.get(), "test", Status(i).jobs(0).epoch(), version);
  }
  // NVMe bytes in use on all servers, without the logs, because a restart may extend a log.
  uint64_t NvmeUsed() const {
    uint64_t used = 0;
    for (int i = 0; i < kServers; ++i) {
      used += Status(i).tiers(2).used_bytes();
      std::error_code none;
      const auto log_bytes = std::filesystem::file_size(servers_[i].directory.path() + "/log-test", none);
      if (!none) used -= log_bytes;
    }
    return used;
  }

 private:
  struct Server {
    ScratchDirectory directory;
    std::unique_ptr<services::StateServer> state;
  };
  const storage::TierBytes budget_;
  std::deque<Server> servers_;
};

inline std::vector<int64_t> Numbers(const std::vector<KeptVersion>& kept) {
  std::vector<int64_t> numbers;
  for (const KeptVersion& each : kept) numbers.push_back(each.version);
  return numbers;
}

inline SessionOptions DurableOptions() {
  SessionOptions options = TestOptions();
  options.durability = v1::DURABILITY_STEP;
  options.resume = Resume::kAuto;
  return options;
}

inline std::string Blob(int rank, int64_t step) { return absl::StrCat("cursor of rank ", rank, " at ", step); }

// Runs steps `first` to `last` of the reference's training. The session's version numbers may differ from them.
inline absl::Status Train(Session& session, int64_t first, int64_t last) {
  for (int64_t step = first; step <= last; ++step) {
    StepOptions options = TestStep();
    options.blob = Blob(session.rank(), step);
    BALLAST_RETURN_IF_ERROR(TrainStep(session, step, options).status());
  }
  return absl::OkStatus();
}

inline Reference ReferenceAt(int64_t step) {
  Reference reference(TestTensors());
  for (int64_t s = 1; s <= step; ++s) reference.Step(s, TestStep());
  return reference;
}

inline absl::Status ExpectIsStep(Session& session, int64_t step) {
  BALLAST_RETURN_IF_ERROR(ReferenceAt(step).Compare(session, session.version()));
  BALLAST_ASSIGN_OR_RETURN(const uint64_t t, session.TensorSteps("layer.up", session.version()));
  return Expect(static_cast<int64_t>(t) == step, absl::StrCat("t is ", t, ", expected ", step));
}

}  // namespace ballast::client
