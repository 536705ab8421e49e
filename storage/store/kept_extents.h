// Kept versions: states of a durable store's chunks that stay on the disk until their pin is dropped.
//
// Nothing is copied: a pin keeps the extents that hold its version. While a kept extent is its chunk's newest, the
// chunk owns the extent. When the chunk moves on to a new extent, the pin takes over the old extent and hands the chunk
// the room that was taken when the pin was made.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/storage/store/extent_label.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::storage {

// Threads: the store's thread. `chunk`: the store's own index.
class KeptExtents {
 public:
  // `account`: whose all that the pins take is.
  explicit KeptExtents(NvmeTier* nvme, std::shared_ptr<Account> account = nullptr)
      : nvme_(nvme), account_(std::move(account)) {}

  // Sets room aside for automatic pins only. Dropping an automatic pin returns its room here, so that automatic
  // pins always find room. `AddShare`: so much of it is for the chunk's pins, and goes with the chunk.
  void SetAside(NvmeRoom room);
  void AddShare(uint64_t chunk, uint64_t bytes) { shares_[chunk] += bytes; }
  // Takes room for keeping `bytes`; an automatic pin first uses what was set aside. RESOURCE_EXHAUSTED: (BUDGET), or
  // (DISK_FULL) if the disk itself is full.
  absl::StatusOr<NvmeRoom> Reserve(uint64_t bytes, bool automatic = false);
  // Does some pin keep the chunk's newest extent already?
  bool KeepsNewest(uint64_t chunk) const;
  // Would a further pin of the chunk's newest extent have to bring the extent's bytes? Yes if no pin keeps the extent
  // yet, or if only automatic pins do and the further pin is not automatic.
  bool NeedsBytes(uint64_t chunk, bool automatic) const;
  // Bytes of set-aside room in use by `pin`.
  uint64_t AsideBytes(int64_t pin) const;

  // Registers the pin, which may keep nothing.
  void Expect(int64_t pin) { pins_.try_emplace(pin); }
  bool Has(int64_t pin) const { return pins_.contains(pin); }
  // `entry`: the chunk's newest extent. Takes the extent's bytes out of `reserve` if NeedsBytes.
  void Keep(int64_t pin, uint64_t chunk, const DurableChunk& entry, NvmeRoom* reserve, bool automatic = false);
  // Pays from `reserve` for all of `pin` that set-aside budget paid for. REQUIRES: `reserve` has AsideBytes(pin).
  void Adopt(int64_t pin, NvmeRoom reserve);
  // After a restart, for an `entry` that is not the chunk's newest extent. DATA_LOSS (IO) unless the NVMe tier kept the
  // extent.
  absl::Status TakeBack(int64_t pin, uint64_t chunk, const DurableChunk& entry, bool automatic = false);
  // The pin keeps this state too, which another server kept; registers the pin.
  void Add(int64_t pin, uint64_t chunk, const DurableChunk& entry, NvmeExtent extent);
  // The same where a pin keeps that very state already: false if none does.
  bool Share(int64_t pin, uint64_t chunk, int64_t version, const ArrayDigests& digests);
  // The same of a chunk that was zero: the pin keeps nothing of it.
  void AddZero(int64_t pin, uint64_t chunk);
  // The chunks that the pin keeps, ascending.
  std::vector<uint64_t> ChunksOf(int64_t pin) const;
  // Null if the pin does not keep the chunk: it was zero then, unless the pin lacks it.
  const DurableChunk* Find(int64_t pin, uint64_t chunk) const;
  // A state of the chunk belongs to the pin, and is not here.
  bool Lacks(int64_t pin, uint64_t chunk) const;
  // The chunks that the pin lacks, ascending.
  std::vector<uint64_t> LackedBy(int64_t pin) const;

  // A pin that keeps the chunk's state at this place; none if no pin does.
  std::optional<int64_t> PinAt(uint64_t chunk, const DurableChunk& place) const;
  // The chunk's states that pins keep, each once.
  std::vector<DurableChunk> Of(uint64_t chunk) const;
  // Their bytes, of chunks 0 to `chunks` - 1.
  std::vector<uint64_t> Bytes(uint64_t chunks) const;

  // The chunk has moved on from extent `old` to a new extent. If pins keep `old`, the pins take `old` over, which
  // leaves it empty, and the chunk gets the pin's room of the same size in return.
  NvmeRoom TakeOver(uint64_t chunk, NvmeExtent* old);
  // The chunk was imported: pins that know no state of it lack it.
  void Imported(uint64_t chunk);
  // Frees the extents that neither a further pin nor a chunk has.
  void Drop(int64_t pin);
  // The chunk has gone, and no entry of a pin names its extents any more: frees them, and its share of what is set
  // aside.
  void Remove(uint64_t chunk);
  // Call before destroying a store whose pins stay: leaves the extents to the next run.
  void Leave();

 private:
  struct Kept {
    DurableChunk entry;
    NvmeRoom reserve;    // held until the extent is taken over
    NvmeExtent extent;   // held from then on
    bool aside = false;  // its budget comes from what was set aside
  };
  struct Pin {
    std::map<uint64_t, std::shared_ptr<Kept>> chunks;
    // Of the chunks that it does not keep: those that another server told to be zero, and those that it lacks.
    std::set<uint64_t> zero, lacked;
  };
  void Pay(Kept* kept, NvmeRoom* reserve);
  // A pin has no use of `kept` any more: if no other has, what was set aside returns there.
  void Release(std::shared_ptr<Kept> kept);

  NvmeTier* const nvme_;
  const std::shared_ptr<Account> account_;
  NvmeRoom aside_;
  std::map<uint64_t, uint64_t> shares_;  // of what was set aside, by chunk
  uint64_t owed_ = 0;                    // shares of removed chunks that other chunks' pins still use
  std::map<int64_t, Pin> pins_;
  std::map<uint64_t, std::weak_ptr<Kept>> newest_;  // by chunk: its newest extent, while kept
};

}  // namespace ballast::storage
