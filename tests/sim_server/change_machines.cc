#include "ballast/tests/sim_server/change_machines.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/optimizer.h"

namespace ballast::sim {
namespace {

constexpr uint64_t kReadBuffer = uint64_t{1} << 20;
constexpr uint64_t kAmpleDram = uint64_t{32} << 20;
// Beside staging: less than the largest chunk's state, which then lies on NVMe.
constexpr uint64_t kLittleDram = uint64_t{1} << 20;
constexpr uint64_t kNvme = uint64_t{64} << 20;
constexpr uint64_t kLogs[] = {3, 6, 16};
// Three times what the slowest wait of a run without cuts needs; then so many once more.
constexpr int kTurnsMax = 10000;
// A server may hold steps back for a second (services/job/filling.h).
constexpr absl::Duration kHold = absl::Milliseconds(1100);

}  // namespace

// Where one server's jobs copy chunks from.
class ChangeMachines::Source : public services::ChunkSource {
 public:
  Source(ChangeMachines* machines, int asker) : machines_(machines), asker_(asker) {}

  void Fetch(const v1::ExportRequest& request, const v1::Member& from, absl::Time,
             services::Reply<v1::ExportResponse> reply) override {
    machines_->flying_.push_back(std::make_shared<Copy>(Copy{.asker = asker_,
                                                             .holder = from.server_id()[0] - ServerName(0)[0],
                                                             .asker_lives = machines_->of(asker_).alive(),
                                                             .holder_lives = nullptr,
                                                             .request = request,
                                                             .reply = std::move(reply),
                                                             .answer = std::nullopt,
                                                             .why = absl::OkStatus()}));
  }

 private:
  ChangeMachines* const machines_;
  const int asker_;
};

ChangeMachines::ChangeMachines(uint64_t seed, const std::string& directory, Random* random, Exported exported)
    : seed_(seed),
      directory_(directory),
      random_(random),
      exported_(std::move(exported)),
      little_dram_(Mix(seed, 1) % 2 == 0),
      log_steps_(kLogs[Mix(seed, 2) % std::size(kLogs)]) {
  for (int server = 0; server < kServers; ++server) {
    sources_.push_back(std::make_unique<Source>(this, server));
    machines_.push_back(MakeMachine(server, random_->Next()));
  }
}

ChangeMachines::~ChangeMachines() = default;

services::StateServerOptions ChangeMachines::OptionsOf(int server) {
  const storage::StateLayout layout(*model::OptimizerOf(PlanOf(1).open().spec()));
  services::StateServerOptions options;
  options.staging_bytes = kReadBuffer + layout.StateBytes(model::kChunkElementsMin);
  options.budget = {0, little_dram_ ? options.staging_bytes + kLittleDram : kAmpleDram, kNvme};
  options.log_steps = log_steps_;
  options.chunk_source = sources_[static_cast<size_t>(server)].get();
  options.import_bytes_per_s = 0;
  return options;
}

void ChangeMachines::Replace(int server) {
  machines_[static_cast<size_t>(server)] = MakeMachine(server, Mix(seed_, ++replaced_, 3));
}

std::unique_ptr<Machine> ChangeMachines::MakeMachine(int server, uint64_t seed) {
  auto machine = std::make_unique<Machine>(server, seed, directory_);
  machine->catalog().Watch([this, server](SimCatalog::Watched write) {
    if (writes_ && up(server) && !of(server).off()) writes_(server, write);
  });
  return machine;
}

std::optional<int> ChangeMachines::Off() {
  for (int server = 0; server < kServers; ++server) {
    if (of(server).off()) return server;
  }
  return std::nullopt;
}

void ChangeMachines::Turn() {
  const uint64_t chance = random_->Below(100);
  Machine& machine = of(static_cast<int>(random_->Below(kServers)));
  if (chance < 10) {
    Deliver();
  } else if (machine.up() && chance < 60) {
    if (!machine.RunTask(random_)) machine.PumpOne(random_);
  } else if (machine.up()) {
    if (!machine.PumpOne(random_)) machine.RunTask(random_);
  }
}

bool ChangeMachines::Await(absl::FunctionRef<bool()> done) {
  for (int turns = 0; !Off().has_value(); ++turns) {
    if (done()) return true;
    if (turns == kTurnsMax) absl::SleepFor(kHold);
    stuck_ = stuck_ || turns == 2 * kTurnsMax;
    if (stuck_) return false;
    Turn();
  }
  return false;
}

bool ChangeMachines::Drain() {
  for (bool busy = true; busy && !Off().has_value();) {
    busy = Deliver();
    for (const auto& machine : machines_) {
      while (machine->up() && !machine->off() && (machine->RunTask(random_) || machine->PumpOne(random_))) busy = true;
    }
  }
  return !Off().has_value();
}

void ChangeMachines::Ask(const std::shared_ptr<Copy>& copy) {
  Machine& holder = of(copy->holder);
  copy->holder_lives = holder.alive();
  const auto reply = [this, copy, lives = copy->holder_lives](absl::StatusOr<services::ExportedChunk> chunk) {
    if (!*lives || of(copy->holder).off()) return;
    if (!chunk.ok()) {
      copy->why = chunk.status();
      copy->holder_lives = nullptr;  // asks again, until one of the two opens another table
      return;
    }
    exported_(copy->request, *chunk);
    v1::ExportResponse& response = copy->answer.emplace(chunk->head);
    for (const storage::WholeState::Array& array : chunk->state.arrays) {
      v1::ExportResponse::Array* const sent = response.add_arrays();
      sent->set_payload(std::string(reinterpret_cast<const char*>(array.bytes.data()), array.bytes.size()));
      sent->set_crc32c(array.crc32c);
    }
  };
  holder.server().Export(copy->request, absl::InfiniteFuture(), reply);
}

std::string ChangeMachines::ShowCopies() const {
  std::string shown;
  for (const auto& copy : flying_) {
    absl::StrAppend(&shown, " chunk ", copy->request.chunk(), " from ", copy->holder, " to ", copy->asker, ": ",
                    copy->why.ok() ? "no answer" : copy->why.ToString(), ";");
  }
  return shown;
}

bool ChangeMachines::Deliver() {
  flying_.remove_if([](const auto& copy) { return !*copy->asker_lives; });
  std::vector<std::shared_ptr<Copy>> ready;
  for (const auto& copy : flying_) {
    const bool asked = copy->holder_lives != nullptr && *copy->holder_lives;
    if (copy->answer.has_value() || (!asked && up(copy->holder))) ready.push_back(copy);
  }
  if (ready.empty()) return false;
  const std::shared_ptr<Copy> copy = ready[random_->Below(ready.size())];
  if (!copy->answer.has_value()) {
    Ask(copy);
    return copy->holder_lives != nullptr;
  }
  flying_.remove(copy);
  ++copies_;
  copy->reply(*std::move(copy->answer));
  return true;
}

}  // namespace ballast::sim
