// The machines of a run whose servers change their chunks (change_run.h), and the copies between them. Everything
// happens in turns, on one thread: a task of a server, a log's write, a request for a chunk or its answer.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ballast/services/threads/chunk_source.h"
#include "ballast/services/threads/exported_chunk.h"
#include "ballast/tests/sim/intent.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim_server/machine.h"

namespace ballast::sim {

class ChangeMachines {
 public:
  using Exported = std::function<void(const v1::ExportRequest&, const services::ExportedChunk&)>;
  // A server that is up is about to write its catalog, holding no lock.
  using Writes = std::function<void(int server, SimCatalog::Watched)>;

  // `directory` must exist. `exported` sees each chunk that a server hands to another.
  ChangeMachines(uint64_t seed, const std::string& directory, Random* random, Exported exported);
  ~ChangeMachines();

  Machine& of(int server) { return *machines_[static_cast<size_t>(server)]; }
  bool up(int server) { return of(server).up(); }
  // Budget and log of every server of the run.
  services::StateServerOptions OptionsOf(int server);
  absl::Status Start(int server) { return of(server).Start(OptionsOf(server)); }
  // The machine comes back with an empty disk. REQUIRES: !up().
  void Replace(int server);

  // Something happens somewhere.
  void Turn();
  // Turns until `done`. False if a machine has lost its power; or after so many turns that nothing more will come, and
  // then Stuck() says so.
  bool Await(absl::FunctionRef<bool()> done);
  // Turns until nothing is left to do. False as Await.
  bool Drain();
  bool stuck() const { return stuck_; }
  // Whoever else sees each PutAll and Erase.
  void Watch(Writes writes) { writes_ = std::move(writes); }
  // The first machine that is off.
  std::optional<int> Off();

  bool little_dram() const { return little_dram_; }
  // Copies that wait, and for what.
  std::string ShowCopies() const;
  uint64_t copies() const { return copies_; }  // chunks that arrived at the server that had asked for them

 private:
  class Source;
  // A request for a chunk, until its answer has reached the asking server.
  struct Copy {
    int asker, holder;
    std::shared_ptr<const bool> asker_lives, holder_lives;  // the latter null: not asked
    v1::ExportRequest request;
    services::Reply<v1::ExportResponse> reply;
    std::optional<v1::ExportResponse> answer;
    absl::Status why;  // the holder's last error
  };

  std::unique_ptr<Machine> MakeMachine(int server, uint64_t seed);
  void Ask(const std::shared_ptr<Copy>& copy);
  // True if a request or an answer was delivered.
  bool Deliver();

  const uint64_t seed_;
  const std::string directory_;
  Random* const random_;
  const Exported exported_;
  Writes writes_;
  const bool little_dram_;
  const uint64_t log_steps_;
  uint64_t replaced_ = 0;
  std::vector<std::unique_ptr<Source>> sources_;
  std::vector<std::unique_ptr<Machine>> machines_;
  std::list<std::shared_ptr<Copy>> flying_;
  uint64_t copies_ = 0;
  bool stuck_ = false;
};

}  // namespace ballast::sim
