#include "ballast/storage/store/update_checks.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"

namespace ballast::storage {
namespace {

// The gradient covers all segments without a gradient of their own.
absl::Status CheckGradient(const StoredChunk& chunk, const ChunkUpdate& update) {
  const uint64_t width = chunk.layout.gradient_element_bytes();
  const uint64_t bytes = update.logged_gradient.has_value() ? update.logged_gradient->bytes : update.gradient.size();
  const uint64_t begin = update.gradient_begin, end = begin + bytes / width;
  const bool covers = std::all_of(update.segments.begin(), update.segments.end(), [&](const auto& segment) {
    return segment.begin == segment.end || segment.gradient != nullptr ||
           (begin <= segment.begin && segment.end <= end);
  });
  if (covers && bytes % width == 0 && end <= chunk.elements) return absl::OkStatus();
  return Bad(model::kBadLength,
             absl::StrCat("gradient of chunk ", chunk.index, " has ", bytes, " bytes, expected elements of ", width,
                          " bytes for all segments, from element ", begin, " of ", chunk.elements, " on"));
}

// The master is in the trainer's memory: an update without it would have nothing to update.
absl::Status CheckLentMaster(const StoredChunk& chunk, const ChunkUpdate& update) {
  if (!chunk.layout.lends_master()) return absl::OkStatus();
  const bool lent = std::all_of(update.segments.begin(), update.segments.end(), [](const auto& segment) {
    return segment.begin == segment.end || segment.working != nullptr;
  });
  if (lent && update.logged_values.empty()) return absl::OkStatus();
  return Bad(model::kBadRequest, absl::StrCat("chunk ", chunk.index, " has its master in the trainer's memory, and an ",
                                              "update came that does not name that memory"));
}

absl::Status CheckWorking(const StoredChunk& chunk, const ChunkUpdate& update) {
  const auto lent = [](const auto& part) { return part.working != nullptr; };
  const bool narrow = std::any_of(update.values.begin(), update.values.end(),
                                  [](const ChunkUpdate::Values& values) { return !values.narrow.empty(); });
  const bool any = narrow || std::any_of(update.segments.begin(), update.segments.end(), lent) ||
                   std::any_of(update.values.begin(), update.values.end(), lent) ||
                   std::any_of(update.logged_values.begin(), update.logged_values.end(), [&](const auto& values) {
                     return std::any_of(values.parts.begin(), values.parts.end(), lent);
                   });
  if (!any || chunk.memory.working() == nullptr) return absl::OkStatus();
  return Bad(model::kBadRequest, absl::StrCat("chunk ", chunk.index, " has a working copy of its own, and an update ",
                                              "names the trainer's"));
}

// Values that are coded in blocks cover whole segments. Logged values may come in any order.
absl::Status CheckBlocks(const StoredChunk& chunk, const ChunkUpdate& update, const char* what) {
  std::vector<std::pair<uint64_t, uint64_t>> parts;
  for (const ChunkUpdate::Values& values : update.values) {
    parts.emplace_back(values.begin, values.begin + values.count(chunk.layout.working_element_bytes()));
  }
  for (const ChunkUpdate::LoggedValues& values : update.logged_values) {
    for (const ChunkUpdate::LoggedValues::Part& part : values.parts) parts.emplace_back(part.begin, part.end);
  }
  std::sort(parts.begin(), parts.end());
  uint64_t end = 0;
  for (const auto& [from, to] : parts) {
    if (from < end || (from > end && from % kernels::kMomentBlock != 0)) {
      return Bad(model::kBadRange,
                 absl::StrCat(what, " from element ", from, " of chunk ", chunk.index, " on: expected a multiple of ",
                              kernels::kMomentBlock, ", or the end of others, ", end));
    }
    end = to;
  }
  return absl::OkStatus();
}

absl::Status CheckLoggedValues(const StoredChunk& chunk, const ChunkUpdate& update) {
  for (const ChunkUpdate::LoggedValues& values : update.logged_values) {
    const uint64_t count = values.place.bytes / sizeof(float);
    BALLAST_RETURN_IF_ERROR(CheckRange(chunk.index, chunk.elements, values.begin, count));
    for (const auto& [begin, end, working] : values.parts) {
      if (values.begin <= begin && begin <= end && end <= values.begin + count) continue;
      return Bad(model::kBadRange, absl::StrCat("elements [", begin, ", ", end, ") of chunk ", chunk.index,
                                                " are not in the slice of ", count, " from ", values.begin, " on"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckFrozen(const StoredChunk& chunk, const ChunkUpdate& update) {
  const StateForm form = chunk.layout.form();
  if (!IsFrozen(form)) return absl::OkStatus();
  if (!update.segments.empty() || update.values_of != StateArray::kMaster) {
    return Bad(model::kBadRequest, absl::StrCat("chunk ", chunk.index, " is frozen: values are all that it takes"));
  }
  return form == StateForm::kQ8 ? CheckBlocks(chunk, update, "values in 8 bits") : absl::OkStatus();
}

absl::Status CheckMomentValues(const StoredChunk& chunk, const ChunkUpdate& update) {
  if (update.values_of == StateArray::kMaster) return absl::OkStatus();
  if (static_cast<int>(update.values_of) >= chunk.layout.array_count()) {
    return Bad(model::kBadRequest,
               absl::StrCat("values of moment ", static_cast<int>(update.values_of), " of chunk ", chunk.index,
                            "; the job's optimizer keeps ", chunk.layout.array_count() - 1));
  }
  if (!update.segments.empty()) {
    return Bad(model::kBadRequest,
               absl::StrCat("chunk ", chunk.index, " is given moments and gradients in one update"));
  }
  for (const ChunkUpdate::Values& values : update.values) {
    if (!values.narrow.empty() || values.working != nullptr) {
      return Bad(model::kBadRequest, absl::StrCat("moments of chunk ", chunk.index, " are fp32, and no parameters"));
    }
  }
  return CheckBlocks(chunk, update, "moments");
}

absl::Status CheckArrays(const StoredChunk& chunk, const WholeState& imported) {
  for (size_t i = 0; i < imported.arrays.size(); ++i) {
    const auto& [bytes, crc32c] = imported.arrays[i];
    const uint64_t expected = chunk.layout.ArrayBytes(static_cast<StateArray>(i), chunk.elements);
    if (bytes.size() != expected) {
      return Bad(model::kBadLength, absl::StrCat("array ", i, " of an imported state of chunk ", chunk.id, " has ",
                                                 bytes.size(), " bytes, expected ", expected));
    }
    const uint32_t found = kernels::Crc32c(bytes);
    if (found == crc32c) continue;
    return model::Error(absl::StatusCode::kDataLoss, model::kChecksum,
                        absl::StrFormat("array %d of an imported state of chunk %d has CRC32C %08x, expected %08x: it "
                                        "was damaged on its way. Fetch it again",
                                        i, chunk.id, found, crc32c));
  }
  return absl::OkStatus();
}

// An imported state comes alone, and is whole.
absl::Status CheckImported(const StoredChunk& chunk, const ChunkUpdate& update) {
  const bool values = !update.values.empty() || !update.logged_values.empty();
  const bool gradient = !update.segments.empty() || !update.gradient.empty() || update.logged_gradient.has_value();
  if (values || gradient || update.restored.has_value()) {
    return Bad(model::kBadRequest, absl::StrCat("chunk ", chunk.id, " is given an imported state and more"));
  }
  return CheckWholeState(chunk, *update.imported);
}

}  // namespace

absl::Status CheckWhole(const StoredChunk& chunk) {
  if (!chunk.layout.keeps_remainder() && !chunk.layout.lends_master()) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnimplemented, model::kUnsupported,
                      absl::StrCat("the state of chunk ", chunk.id, " is not whole: a part of its master is ",
                                   chunk.layout.lends_master() ? "in the trainer's memory" : "its working copy"));
}

absl::Status NotKept(int64_t version, const StoredChunk& chunk) {
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                      absl::StrCat("version ", version, " of chunk ", chunk.id, " is not kept here"));
}

absl::Status CheckWholeState(const StoredChunk& chunk, const WholeState& imported) {
  BALLAST_RETURN_IF_ERROR(CheckWhole(chunk));
  if (imported.arrays.size() != static_cast<size_t>(chunk.layout.array_count())) {
    return Bad(model::kBadLength, absl::StrCat("an imported state of chunk ", chunk.id, " has ", imported.arrays.size(),
                                               " arrays, expected ", chunk.layout.array_count()));
  }
  return CheckArrays(chunk, imported);
}

absl::Status CheckNotVoid(const StoredChunk& chunk) {
  absl::ReaderMutexLock lock(&chunk.mutex);
  if (!chunk.history.is_void()) return absl::OkStatus();
  return Bad(model::kBadRequest, absl::StrCat("chunk ", chunk.id, " is void: only another server's state may come"));
}

absl::Status CheckUpdate(const StoredChunk& chunk, const ChunkUpdate& update) {
  if (update.imported != nullptr) return CheckImported(chunk, update);
  BALLAST_RETURN_IF_ERROR(CheckNotVoid(chunk));
  for (const ChunkUpdate::Values& values : update.values) {
    const uint64_t count = values.count(chunk.layout.working_element_bytes());
    BALLAST_RETURN_IF_ERROR(CheckRange(chunk.index, chunk.elements, values.begin, count));
  }
  for (const ChunkUpdate::SegmentUpdate& segment : update.segments) {
    const uint64_t count = segment.end < segment.begin ? ~uint64_t{0} : segment.end - segment.begin;
    BALLAST_RETURN_IF_ERROR(CheckRange(chunk.index, chunk.elements, segment.begin, count));
    // So a block's scales and random bits belong to a single segment.
    if (segment.begin % kernels::kMomentBlock != 0) {
      return Bad(model::kBadRange, absl::StrCat("segment at element ", segment.begin, " of chunk ", chunk.index,
                                                ": expected a multiple of ", kernels::kMomentBlock));
    }
  }
  BALLAST_RETURN_IF_ERROR(CheckLoggedValues(chunk, update));
  BALLAST_RETURN_IF_ERROR(CheckFrozen(chunk, update));
  BALLAST_RETURN_IF_ERROR(CheckMomentValues(chunk, update));
  BALLAST_RETURN_IF_ERROR(CheckWorking(chunk, update));
  BALLAST_RETURN_IF_ERROR(CheckLentMaster(chunk, update));
  return CheckGradient(chunk, update);
}

}  // namespace ballast::storage
