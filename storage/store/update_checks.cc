#include "ballast/storage/store/update_checks.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
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

}  // namespace

absl::Status CheckUpdate(const StoredChunk& chunk, const ChunkUpdate& update) {
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
  for (const ChunkUpdate::LoggedValues& values : update.logged_values) {
    const uint64_t count = values.place.bytes / sizeof(float);
    BALLAST_RETURN_IF_ERROR(CheckRange(chunk.index, chunk.elements, values.begin, count));
    for (const auto& [begin, end, working] : values.parts) {
      if (values.begin <= begin && begin <= end && end <= values.begin + count) continue;
      return Bad(model::kBadRange, absl::StrCat("elements [", begin, ", ", end, ") of chunk ", chunk.index,
                                                " are not in the slice of ", count, " from ", values.begin, " on"));
    }
  }
  BALLAST_RETURN_IF_ERROR(CheckFrozen(chunk, update));
  BALLAST_RETURN_IF_ERROR(CheckMomentValues(chunk, update));
  BALLAST_RETURN_IF_ERROR(CheckWorking(chunk, update));
  BALLAST_RETURN_IF_ERROR(CheckLentMaster(chunk, update));
  return CheckGradient(chunk, update);
}

}  // namespace ballast::storage
