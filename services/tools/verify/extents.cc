#include "ballast/services/tools/verify/extents.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/job_state/state_form.h"
#include "ballast/storage/memory/arena.h"

namespace ballast::services {
namespace {

using storage::StateArray;
using storage::StateForm;
using storage::StateLayout;

constexpr uint64_t kPieceBytes = uint64_t{4} << 20;
constexpr char kOlderVersionAdvice[] =
    "run `ballastctl verify --rebuild`, which looks for an older version in the file";

std::string Hex(uint32_t digest) { return absl::StrFormat("CRC32C %08x", digest); }

std::string NameOf(const NamedExtent& extent) {
  return absl::StrCat("chunk ", extent.chunk.id, " at version ", extent.chunk.version,
                      extent.pin.has_value() ? absl::StrCat(", which the pin of version ", *extent.pin, " keeps") : "");
}

// A server reads the pinned state only for a restore of its version, and refuses the restore if the state is damaged.
// It copies a chunk whose newest state is damaged from another holder.
Harm HarmOf(const NamedExtent& extent) {
  if (!extent.pin.has_value() && extent.copied) return Harm::kRepaired;
  return extent.pin.has_value() && !extent.automatic ? Harm::kNone : Harm::kJobRefused;
}
std::string AdviceOf(const NamedExtent& extent) {
  if (extent.automatic) {
    return "the job cannot go back to that version, which servers do after a restart (durability every-K): drop "
           "it with `ballastctl drop` and start it again";
  }
  if (!extent.pin.has_value() && extent.copied) {
    return "nothing: once it is started, the server copies the chunk from another one that holds it, and that must "
           "run. Without such a server it refuses the job";
  }
  return extent.pin.has_value() ? absl::StrCat("`ballastctl unpin --version ", *extent.pin, "`: it cannot be restored")
                                : kOlderVersionAdvice;
}

const char* NameOf(StateArray array) {
  static constexpr const char* kNames[] = {"master", "moment 1", "moment 2", "moment 3"};
  return kNames[static_cast<int>(array)];
}

absl::StatusOr<uint32_t> DigestOf(const storage::BlockFile& file, uint64_t offset, uint64_t bytes,
                                  absl::Span<std::byte> buffer) {
  uint32_t digest = 0;
  for (uint64_t at = 0; at < bytes; at += buffer.size()) {
    const absl::Span<std::byte> piece = buffer.subspan(0, std::min<uint64_t>(buffer.size(), bytes - at));
    BALLAST_RETURN_IF_ERROR(file.Read(offset + at, piece));
    digest = kernels::Crc32c(piece, digest);
  }
  return digest;
}

std::string Show(const storage::DurableChunk& chunk) {
  return absl::StrCat("chunk ", chunk.id, " at version ", chunk.version, " with ", chunk.elements,
                      " elements at offset ", chunk.offset);
}

// How the label differs from the label that the catalog names; empty if it does not.
std::string LabelFault(absl::Span<const std::byte> block, const NamedExtent& extent) {
  storage::DurableChunk chunk;
  std::string job;
  uint64_t layout_bits = 0;
  if (!storage::DecodeLabel(block, &chunk, &job, &layout_bits)) return "no label, or a damaged one";
  if (job != extent.job) return absl::StrCat("the label of job '", job, "'");
  if (chunk.life != extent.chunk.life) {
    return absl::StrCat("the label of life ", ShowLife(chunk.life), " of the job, which was dropped and made again");
  }
  if (layout_bits != storage::LayoutBits(extent.layout)) return "the label of another optimizer's or dtype's state";
  if (chunk.Encode() == extent.chunk.Encode()) return "";
  if (Show(chunk) == Show(extent.chunk)) return "the label of that version with other digests";
  return absl::StrCat("the label of ", Show(chunk));
}

void CheckLabel(const storage::BlockFile& file, const NamedExtent& extent, absl::Span<std::byte> block,
                ScrubReport* report) {
  const uint64_t at = extent.chunk.offset + extent.layout.LabelAt(extent.chunk.elements);
  const absl::Status read = file.Read(at, block);
  const std::string fault = read.ok() ? LabelFault(block, extent) : std::string(read.message());
  if (fault.empty()) return;
  report->findings.push_back({.harm = HarmOf(extent),
                              .job = extent.job,
                              .what = absl::StrCat("the label of ", NameOf(extent)),
                              .file = file.path(),
                              .offset = at,
                              .expected = absl::StrCat("the label of ", Show(extent.chunk)),
                              .found = fault,
                              .advice = AdviceOf(extent)});
}

}  // namespace

std::vector<NamedExtent> PinnedExtents(const std::string& job, LayoutOf layout_of,
                                       const std::vector<storage::DurableChunk>& chunks,
                                       const std::vector<v1::PinnedVersion>& pins) {
  std::set<std::string> known;  // another entry for the same place is in dispute
  for (const storage::DurableChunk& chunk : chunks) known.insert(chunk.Encode());
  std::vector<NamedExtent> extents;
  for (const v1::PinnedVersion& pin : pins) {
    for (const storage::DurableChunk& chunk : PinnedChunks(pin)) {
      if (!known.insert(chunk.Encode()).second) continue;
      extents.push_back({job, layout_of(chunk), chunk, pin.version(), pin.automatic()});
    }
  }
  return extents;
}

void CheckPlaces(const std::vector<NamedExtent>& extents, const std::string& path, uint64_t file_bytes,
                 ScrubReport* report) {
  std::vector<const NamedExtent*> sorted;
  for (const NamedExtent& extent : extents) sorted.push_back(&extent);
  std::sort(sorted.begin(), sorted.end(),
            [](const auto* a, const auto* b) { return a->chunk.offset < b->chunk.offset; });
  uint64_t end = 0;
  const NamedExtent* before = nullptr;
  for (const NamedExtent* extent : sorted) {
    const uint64_t offset = extent->chunk.offset, bytes = extent->chunk.bytes;
    std::string fault;
    if (bytes == 0 || (offset | bytes) % storage::kIoAlignment != 0) {
      fault = absl::StrCat("offset ", offset, " and ", bytes, " bytes");
    } else if (offset > file_bytes || bytes > file_bytes - offset) {
      fault = absl::StrCat("an extent up to ", offset + bytes, " in a file of ", file_bytes, " bytes");
    } else if (offset < end) {
      fault = absl::StrCat("an overlap with ", NameOf(*before), " of job '", before->job, "', which ends at ", end);
    }
    if (!fault.empty()) {
      report->findings.push_back(
          {.harm = Harm::kJobRefused,
           .job = extent->job,
           .what = absl::StrCat("the place of ", NameOf(*extent), " by the catalog"),
           .file = path,
           .offset = offset,
           .expected = absl::StrCat("multiples of 4096 within the file and behind other extents"),
           .found = fault,
           .advice = kOlderVersionAdvice});
      continue;
    }
    end = offset + bytes;
    before = extent;
  }
}

void CheckExtent(const storage::BlockFile& file, const NamedExtent& extent, Progress* progress, ScrubReport* report) {
  auto arena = storage::Arena::Map(kPieceBytes);
  if (!arena.ok()) return;
  CheckLabel(file, extent, arena->bytes().subspan(0, StateLayout::kLabelBytes), report);
  for (int i = 0; i < extent.layout.array_count(); ++i) {
    const auto array = static_cast<StateArray>(i);
    const uint64_t at = extent.chunk.offset + extent.layout.ArrayAt(array, extent.chunk.elements);
    const uint32_t expected = extent.chunk.digests[static_cast<size_t>(i)];
    const auto found = DigestOf(file, at, extent.layout.ArrayBytes(array, extent.chunk.elements), arena->bytes());
    if (found.ok() && *found == expected) continue;
    report->findings.push_back({.harm = HarmOf(extent),
                                .job = extent.job,
                                .what = absl::StrCat("the ", NameOf(array), " array of ", NameOf(extent)),
                                .file = file.path(),
                                .offset = at,
                                .expected = Hex(expected),
                                .found = found.ok() ? Hex(*found) : std::string(found.status().message()),
                                .advice = AdviceOf(extent)});
  }
  ++report->counts.extents;
  report->counts.extent_bytes += extent.chunk.bytes;
  progress->At("extents", report->counts.extent_bytes, report->counts.extent_bytes);
}

absl::StatusOr<bool> DigestsHold(const storage::BlockFile& file, const StateLayout& layout,
                                 const storage::DurableChunk& chunk) {
  BALLAST_ASSIGN_OR_RETURN(storage::Arena arena, storage::Arena::Map(kPieceBytes));
  for (int i = 0; i < layout.array_count(); ++i) {
    const auto array = static_cast<StateArray>(i);
    BALLAST_ASSIGN_OR_RETURN(const uint32_t digest, DigestOf(file, chunk.offset + layout.ArrayAt(array, chunk.elements),
                                                             layout.ArrayBytes(array, chunk.elements), arena.bytes()));
    if (digest != chunk.digests[static_cast<size_t>(i)]) return false;
  }
  return true;
}

StateLayout LayoutOfChunk(const StateLayout& trained, const model::Layout& chunks, const storage::DurableChunk& chunk) {
  if (chunk.id < chunks.chunks().size()) return trained.Of(FormOf(chunks.chunks()[chunk.id]));
  if (chunk.elements > model::kChunkElementsMax) return trained;
  for (const StateForm form : {StateForm::kWorking, StateForm::kQ8, StateForm::kMaster}) {
    if (chunk.bytes == trained.Of(form).StateBytes(chunk.elements)) return trained.Of(form);
  }
  return trained;
}

std::optional<StateLayout> LayoutOfBits(const StateLayout& job, uint64_t layout_bits) {
  for (const StateForm form : {StateForm::kFull, StateForm::kWorking, StateForm::kQ8, StateForm::kMaster}) {
    if (storage::LayoutBits(job.Of(form)) == layout_bits) return job.Of(form);
  }
  return std::nullopt;
}

absl::StatusOr<FoundLabels> FindLabels(const storage::BlockFile& file, storage::NvmeFileId id,
                                       const std::map<std::string, WantedLabels>& wanted, Progress* progress) {
  FoundLabels found;
  BALLAST_ASSIGN_OR_RETURN(storage::Arena arena, storage::Arena::Map(kPieceBytes));
  BALLAST_ASSIGN_OR_RETURN(const uint64_t file_bytes, file.Size());
  const uint64_t end = file_bytes / StateLayout::kLabelBytes * StateLayout::kLabelBytes;
  const auto look = [&](uint64_t offset, absl::Span<const std::byte> block) {
    FoundLabel label;
    std::string job;
    if (!storage::DecodeLabel(block, &label.chunk, &job, &label.layout_bits)) return;
    const auto of = wanted.find(job);
    if (of == wanted.end()) return;
    if (label.chunk.life != of->second.life) {
      ++found.of_other_lives;
      return;
    }
    const std::optional<StateLayout> layout = LayoutOfBits(of->second.layout, label.layout_bits);
    if (!layout.has_value()) return;
    const storage::DurableChunk& chunk = label.chunk;
    if (chunk.elements > model::kChunkElementsMax || chunk.bytes != layout->StateBytes(chunk.elements)) return;
    if (chunk.file != id || chunk.offset + layout->LabelAt(chunk.elements) != offset) return;
    found.of_jobs[job].push_back(label);
  };
  for (uint64_t at = 0; at < end; at += kPieceBytes) {
    const absl::Span<std::byte> piece = arena.bytes().subspan(0, std::min(kPieceBytes, end - at));
    const bool whole = file.Read(at, piece).ok();
    for (uint64_t block = 0; block < piece.size(); block += StateLayout::kLabelBytes) {
      const absl::Span<std::byte> bytes = piece.subspan(block, StateLayout::kLabelBytes);
      if (!whole && !file.Read(at + block, bytes).ok()) {
        ++found.unreadable_blocks;
        continue;
      }
      look(at + block, bytes);
    }
    progress->At("looking for labels", at, end);
  }
  return found;
}

}  // namespace ballast::services
