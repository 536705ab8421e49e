// A state server of a schedule: the shipped step machine, a log whose durable prefix survives a crash, slices as
// digests, updates that may lag behind their decisions, chunks in memory and on the disk, and imports.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ballast/services/step/step_machine.h"
#include "ballast/tests/sim_members/bugs.h"
#include "ballast/tests/sim_members/oracle.h"
#include "ballast/tests/sim_members/world.h"

namespace ballast::sim_members {

struct ChunkState {
  int64_t version = -1;
  uint64_t content = 0;
};

class Server : private services::StepJournal, private services::StepHost {
 public:
  Server(int index, uint64_t disk, Bug bug, Random* random, Oracle* oracle);

  int index() const { return index_; }
  uint64_t disk() const { return disk_; }
  bool up() const { return machine_ != nullptr; }
  bool gone() const { return gone_; }  // for good
  uint64_t life() const { return life_; }
  services::StepMachine& machine() { return *machine_; }
  const services::StepMachine& machine() const { return *machine_; }
  // Takes the slice, if the machine admits it.
  absl::Status Push(const v1::PushRequest& header);

  bool has_unsynced() const { return synced_ < log_.size(); }

  // Events. Each does nothing if there is nothing to do.
  void FinishSync();
  void ApplyNext();
  void Flush();
  void WriteImport();  // an installed import becomes durable, and counts as filled if the machine says so
  void MaybeSnapshot();

  // A chunk that this server may import, if any.
  std::optional<uint64_t> Wants() const;
  // What a holder gives to an importer; nullopt: it has none.
  std::optional<ChunkState> Export(uint64_t chunk) const;
  void Install(uint64_t chunk, const ChunkState& state);

  // `loses_all`: all that is not synced; else perhaps a part of it.
  void Crash(bool loses_all = false);
  void Restart();
  // The disk is lost. `back`: an empty server has its name from now on.
  void LoseDisk(bool back, uint64_t disk);
  // May the server give the chunk up, if what it has of it turns out to be damaged? Damage: it does so.
  bool MayDamage(uint64_t chunk) const;
  void Damage(uint64_t chunk);
  // Gives chunks up because a wish is without this server; only a seeded bug does.
  void FreeAll();

  // Could this server show the chunk with all steps up to `last`, by itself or with one commit? For the oracle's
  // question whether a copy is left.
  bool HasCopy(uint64_t chunk, int64_t last, const v1::Decision* decision) const;
  bool Keeps(uint64_t chunk) const { return disk_chunks_.contains(chunk) || chunks_.contains(chunk); }
  uint64_t imports() const { return imports_; }
  uint64_t late_imports() const { return late_imports_; }
  uint64_t passed_over() const { return passed_over_; }

 private:
  struct Place {
    uint64_t attempt = 0;
    uint32_t digest = 0;
  };
  struct Update {
    int64_t step = 0;
    v1::StepHeader header;
    v1::Verdict verdict;
    std::shared_ptr<const model::EpochPlan> plan;
    std::map<std::pair<int, uint32_t>, uint32_t> slices;  // (kind, slice) -> digest
  };

  uint64_t Append(const services::StepRecord& record) override;
  void Sync(uint64_t lsn) override { sync_wanted_ = std::max(sync_wanted_, lsn); }
  v1::ChunkNorm Norm(uint64_t chunk, absl::string_view gradient_presence) override;
  void Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) override;
  void Opened(std::shared_ptr<const model::EpochPlan> plan, const services::OpenChange& change) override;
  bool ChangesChunks() const override { return true; }
  bool KeepsSlices() const override { return true; }
  void TableDurable() override;
  void PinDue(int64_t) override {}
  void PinChanged(const v1::PinnedVersion&) override {}

  std::string Name() const { return "server " + ServerName(index_); }
  bool Lies(uint64_t chunk) const;
  void ApplyTo(uint64_t chunk, const Update& update);
  // Of the step in flight, in this attempt.
  std::map<std::pair<int, uint32_t>, uint32_t> SlicesOf(uint64_t attempt) const;
  // After a replay: the undecided step was prepared without all slices of the chunk, which had been given up.
  bool PreparedWithout(uint64_t chunk) const;
  // The chunk's slices as one number; nullopt: some are missing.
  std::optional<uint64_t> Digests(uint64_t chunk, const Update& update) const;
  std::optional<uint32_t> SliceIndex(const v1::PushRequest& header) const;
  // An import that was written does not count after all.
  void ForgetImport(uint64_t chunk);
  void CutLog();
  void Reconcile();

  const int index_;
  const Bug bug_;
  Random* const random_;
  Oracle* const oracle_;
  uint64_t disk_;
  bool gone_ = false;
  uint64_t life_ = 0;
  // Durable.
  std::vector<services::StepRecord> log_;
  std::map<uint64_t, ChunkState> disk_chunks_;
  std::set<uint64_t> damaged_;  // given up since the disk last had a state that counts
  // Volatile.
  std::unique_ptr<services::StepMachine> machine_;
  bool replaying_ = false;
  uint64_t synced_ = 0, sync_wanted_ = 0;
  std::shared_ptr<const model::EpochPlan> plan_;
  std::map<std::pair<int, uint32_t>, Place> places_;  // of the step in flight, by (kind, slice): the newest
  std::deque<Update> queue_;
  int64_t applied_ = -1;
  std::map<uint64_t, ChunkState> chunks_;
  std::map<uint64_t, bool> imported_;  // installed, not yet counted as filled; true: on the disk
  std::set<uint64_t> leaving_;         // what there was of them goes once the Open is durable
  uint64_t imports_ = 0, late_imports_ = 0, passed_over_ = 0;
};

}  // namespace ballast::sim_members
