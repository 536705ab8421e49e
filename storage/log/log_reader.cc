#include "ballast/storage/log/log_reader.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/log/meta_reader.h"
#include "ballast/storage/log/payload_reader.h"
#include "ballast/storage/log/scan_reader.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kBufferBytes = uint64_t{1} << 20;

bool IsBlank(absl::Span<const std::byte> block) {
  return std::all_of(block.begin(), block.end(), [](std::byte b) { return b == std::byte{0}; });
}

class Scan {
 public:
  Scan(const BlockFile& file, std::atomic<uint64_t>* read_bytes) : file_(file), reader_(&file, read_bytes) {}

  absl::StatusOr<ScannedLog> Run();

 private:
  // A batch that was read, without its records: a log may have more of them than fit into memory.
  struct FoundBatch {
    uint64_t number = 0;
    uint64_t offset = 0;  // of the meta's first copy
    uint64_t meta_bytes = 0;
    uint64_t end = 0;  // in the file
    uint64_t oldest_incarnation = 0;
    uint64_t records = 0;
    uint64_t last_lsn = 0;
    uint64_t payload_bytes = 0;  // of the records
  };
  static FoundBatch Found(const ReadBatch& batch);
  struct FoundSegment {
    uint64_t index = 0;
    SegmentHead head;
    // Batches from this number on belong to later segments: batches here with a higher number became void earlier.
    uint64_t end_batch = ~uint64_t{0};
    bool read = false;
    std::vector<FoundBatch> batches;  // by number
    // False: there was a batch of this number already.
    bool Add(const FoundBatch& batch);
  };

  absl::Status ReadFileHead();
  absl::Status ReadMarks();
  absl::Status ReadSegmentHead(uint64_t index);
  absl::Status ReadBatches(FoundSegment& segment);
  // Finds all batches of this incarnation with their start or their second copy at or behind `offset`.
  absl::Status Search(FoundSegment& segment, uint64_t offset, uint64_t limit);
  // The same within `blocks`, read from `offset`.
  absl::Status SearchBlocks(FoundSegment& segment, absl::Span<const std::byte> blocks, uint64_t offset, uint64_t limit);
  absl::Status ReadNeeded();
  // The batches that were linked so far, and where the next one is expected.
  struct Chain {
    bool ended = false;     // batches from here on are void
    uint64_t expected = 0;  // number of the next batch; 0: no segment was linked
    uint64_t end = 0;       // its offset, if there is one
    uint64_t previous = 0;  // incarnation of the last segment with a batch
  };
  // Links segments from the oldest needed segment on, batch by batch, up to the first missing batch.
  absl::Status LinkAll();
  absl::Status LinkSegment(const FoundSegment& segment, Chain* chain);
  absl::StatusOr<bool> Follows(const FoundBatch& batch, const FoundSegment& segment, const Chain& chain);
  absl::StatusOr<bool> PayloadsWhole(const FoundBatch& found, const FoundSegment& segment);
  void LinkBatch(const FoundBatch& batch);
  void Note(uint64_t synced_batch, uint64_t oldest) {
    log_.synced_batch = std::max(log_.synced_batch, synced_batch);
    oldest_ = std::max(oldest_, oldest);
  }

  const BlockFile& file_;
  ScanReader reader_;
  ScannedLog log_;
  uint64_t oldest_ = 0;
  uint64_t oldest_kept_ = 0;  // oldest_ according to `log_.batches` and their segments
  bool marked_ = false;
  uint64_t marked_incarnation_ = 0;
  std::map<uint64_t, FoundSegment> segments_;  // by incarnation
};

absl::Status Scan::ReadFileHead() {
  BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, reader_.Begin());
  log_.file_bytes = bytes;
  if (bytes < kLogBlock) {
    if (bytes > 0) return RottenLog(file_, absl::StrCat("only ", bytes, " bytes are left of it"));
    return model::Error(absl::StatusCode::kNotFound, model::kIo, absl::StrCat(file_.path(), " holds no log"));
  }
  bool blank = true;
  for (int copy = 0; copy < 2; ++copy) {
    const uint64_t at = static_cast<uint64_t>(copy) * kLogBlock;
    if (at + kLogBlock > bytes) break;
    BALLAST_ASSIGN_OR_RETURN(const auto block, reader_.ReadCopy(at, kLogBlock, at + kLogBlock));
    blank = blank && IsBlank(block);
    FileHead head;
    if (block.empty() || !DecodeHead(block, &head)) continue;
    if (head.format != kLogFormat) {
      return model::Error(absl::StatusCode::kFailedPrecondition, model::kUnsupported,
                          absl::StrCat(file_.path(), " has format ", head.format, ", this version reads ", kLogFormat));
    }
    if (copy == 1) ++log_.repaired_blocks;
    log_.name.assign(head.name, strnlen(head.name, sizeof(head.name)));
    log_.life = head.life;
    log_.segment_bytes = head.segment_bytes;
    if (log_.segment_bytes < kLogSegmentBytesMin || log_.segment_bytes % kLogBlock != 0) break;
    if (bytes < kLogFirstSegment) break;
    log_.segment_count = (bytes - kLogFirstSegment) / log_.segment_bytes;
    return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(reader_.UnreadFrom(0));
  // The head is written last: without it there never was a log.
  if (blank) return model::Error(absl::StatusCode::kNotFound, model::kIo, absl::StrCat(file_.path(), " holds no log"));
  return RottenLog(file_, "it is cut off, or both copies of its head, at offsets 0 and 4096, are damaged");
}

absl::Status Scan::ReadMarks() {
  for (const uint64_t at : {2 * kLogBlock, 3 * kLogBlock}) {
    BALLAST_ASSIGN_OR_RETURN(const auto block, reader_.ReadCopy(at, kLogBlock, at + kLogBlock));
    LogMark mark;
    if (block.empty() || !DecodeHead(block, &mark)) continue;
    Note(mark.synced_batch, 0);
    marked_ = true;
    marked_incarnation_ = std::max(marked_incarnation_, mark.incarnation);
  }
  return marked_ ? absl::OkStatus() : reader_.UnreadFrom(2 * kLogBlock);
}

absl::Status Scan::ReadSegmentHead(uint64_t index) {
  const uint64_t begin = kLogFirstSegment + index * log_.segment_bytes;
  SegmentHead newest;
  bool blank = false;  // a copy was never written, so no sync has covered the second copy either
  for (uint64_t copy = 0; copy < 2; ++copy) {
    const uint64_t at = begin + copy * kLogBlock;
    BALLAST_ASSIGN_OR_RETURN(const auto block, reader_.ReadCopy(at, kLogBlock, begin + kSegmentHeadBytes));
    if (block.empty()) continue;
    blank = blank || IsBlank(block);
    SegmentHead head;
    // A torn rewrite leaves an old copy beside a new one.
    if (DecodeHead(block, &head) && head.incarnation > newest.incarnation) newest = head;
  }
  if (newest.incarnation == 0) return blank ? absl::OkStatus() : reader_.UnreadFrom(begin);
  log_.last_incarnation = std::max(log_.last_incarnation, newest.incarnation);
  Note(newest.synced_batch, newest.oldest_incarnation);
  if (!segments_.emplace(newest.incarnation, FoundSegment{.index = index, .head = newest, .batches = {}}).second) {
    return RottenLog(file_, absl::StrCat("two segments have incarnation ", newest.incarnation));
  }
  return absl::OkStatus();
}

absl::Status Scan::Search(FoundSegment& segment, uint64_t offset, uint64_t limit) {
  for (uint64_t bytes = 0; offset < limit; offset += bytes) {
    bytes = std::min(kBufferBytes, limit - offset);
    const auto blocks = reader_.Read(offset, bytes);
    if (blocks.ok()) {
      BALLAST_RETURN_IF_ERROR(SearchBlocks(segment, *blocks, offset, limit));
      continue;
    }
    if (!absl::IsInternal(blocks.status())) return blocks.status();
    for (uint64_t at = offset; at < offset + bytes; at += kLogBlock) {
      BALLAST_ASSIGN_OR_RETURN(const auto block, reader_.ReadCopy(at, kLogBlock, at + kLogBlock));
      BALLAST_RETURN_IF_ERROR(SearchBlocks(segment, block, at, limit));
    }
  }
  return absl::OkStatus();
}

absl::Status Scan::SearchBlocks(FoundSegment& segment, absl::Span<const std::byte> blocks, uint64_t offset,
                                uint64_t limit) {
  std::vector<uint64_t> candidates;
  for (uint64_t at = 0; at < blocks.size(); at += kLogBlock) {
    BatchHead head;
    if (DecodeBatchHead(blocks.subspan(at, kLogBlock), offset + at, limit, &head)) candidates.push_back(offset + at);
  }
  for (const uint64_t at : candidates) {
    BALLAST_ASSIGN_OR_RETURN(std::optional<ReadBatch> batch, reader_.ReadBatchAt(at, limit, segment.head));
    if (!batch.has_value() || batch->head.batch < segment.head.first_batch) continue;
    Note(batch->head.synced_batch, batch->head.oldest_incarnation);
    if (segment.Add(Found(*batch)) && batch->head.copy == 1) ++log_.repaired_blocks;
  }
  return absl::OkStatus();
}

absl::Status Scan::ReadBatches(FoundSegment& segment) {
  const uint64_t begin = kLogFirstSegment + segment.index * log_.segment_bytes;
  const uint64_t limit = begin + log_.segment_bytes;
  uint64_t at = begin + kSegmentHeadBytes;
  for (uint64_t expected = segment.head.first_batch; expected < segment.end_batch; ++expected) {
    BALLAST_ASSIGN_OR_RETURN(std::optional<ReadBatch> batch, reader_.ReadBatchAt(at, limit, segment.head));
    if (!batch.has_value() || batch->head.batch != expected) return Search(segment, at, limit);
    Note(batch->head.synced_batch, batch->head.oldest_incarnation);
    at = batch->end;
    segment.Add(Found(*batch));
  }
  return absl::OkStatus();
}

Scan::FoundBatch Scan::Found(const ReadBatch& batch) {
  FoundBatch found{.number = batch.head.batch,
                   .offset = batch.head.offset,
                   .meta_bytes = batch.head.meta_bytes,
                   .end = batch.end,
                   .oldest_incarnation = batch.head.oldest_incarnation,
                   .records = batch.records.size()};
  for (const ReadRecord& record : batch.records) {
    found.last_lsn = record.lsn;
    found.payload_bytes += record.payload.bytes;
  }
  return found;
}

bool Scan::FoundSegment::Add(const FoundBatch& batch) {
  const auto place = std::lower_bound(batches.begin(), batches.end(), batch.number,
                                      [](const FoundBatch& found, uint64_t number) { return found.number < number; });
  if (place != batches.end() && place->number == batch.number) return false;
  batches.insert(place, batch);  // nearly always at the end
  return true;
}

absl::StatusOr<bool> Scan::PayloadsWhole(const FoundBatch& found, const FoundSegment& segment) {
  BatchHead which;
  which.offset = found.offset;
  which.meta_bytes = found.meta_bytes;
  which.batch = found.number;
  which.incarnation = segment.head.incarnation;
  which.salt = segment.head.salt;
  const uint64_t limit = kLogFirstSegment + (segment.index + 1) * log_.segment_bytes;
  BALLAST_ASSIGN_OR_RETURN(const std::optional<ReadBatch> batch, ReadBatchOf(&reader_.metas(), which, limit));
  if (!batch.has_value()) {
    // A torn batch would have been torn before.
    return RottenLog(file_, absl::StrCat("batch ", found.number, " at offset ", found.offset,
                                         " was whole a moment ago, and now reads otherwise"));
  }
  for (const ReadRecord& record : batch->records) {
    if (record.payload.bytes == 0) continue;
    const auto bytes = reader_.Read(record.payload.offset, AlignUp(record.payload.bytes));
    // An unreadable payload is not known to be torn: its reader gets the error later, and if the rank still has the
    // gradient the slice is pushed again.
    if (absl::IsInternal(bytes.status())) continue;
    BALLAST_RETURN_IF_ERROR(bytes.status());
    if (kernels::Crc32c(bytes->subspan(0, record.payload.bytes)) != record.payload.crc32c) return false;
  }
  return true;
}

void Scan::LinkBatch(const FoundBatch& batch) {
  log_.batches.push_back({batch.offset, batch.meta_bytes});
  log_.last_batch = batch.number;
  log_.record_count += batch.records;
  log_.payload_bytes += batch.payload_bytes;
  if (batch.records > 0) log_.last_lsn = batch.last_lsn;
}

absl::StatusOr<bool> Scan::Follows(const FoundBatch& batch, const FoundSegment& segment, const Chain& chain) {
  if (chain.ended || batch.number != chain.expected) return false;
  // Payloads of durable batches are checked when they are needed; payloads that may be torn are checked now.
  if (batch.number <= log_.synced_batch) return true;
  return PayloadsWhole(batch, segment);
}

absl::Status Scan::LinkSegment(const FoundSegment& segment, Chain* chain) {
  if (chain->expected == 0 && !chain->ended) {
    chain->expected = segment.head.first_batch;
    log_.last_batch = chain->expected - 1;
  }
  const bool follows = chain->previous == 0 || segment.head.previous_incarnation == chain->previous;
  if (segment.head.first_batch != chain->expected || !follows) chain->ended = true;
  if (!chain->ended) chain->end = kLogFirstSegment + segment.index * log_.segment_bytes + kSegmentHeadBytes;
  const size_t first_batch = log_.batches.size();
  for (const FoundBatch& batch : segment.batches) {
    if (batch.number >= segment.end_batch) break;
    BALLAST_ASSIGN_OR_RETURN(const bool next, Follows(batch, segment, *chain));
    if (!next) {
      chain->ended = true;
      ++log_.torn_batches;
      continue;
    }
    LinkBatch(batch);
    oldest_kept_ = std::max({oldest_kept_, segment.head.oldest_incarnation, batch.oldest_incarnation});
    ++chain->expected;
    chain->end = batch.end;
  }
  // A segment without a batch holds nothing, and may be used again.
  if (log_.batches.size() == first_batch) return absl::OkStatus();
  log_.live.push_back({segment.index, segment.head.incarnation, segment.head.salt, first_batch});
  chain->previous = segment.head.incarnation;
  return absl::OkStatus();
}

absl::Status Scan::LinkAll() {
  // If the marked segment's head is missing, void batches of the previous segment might seem to go on.
  if (marked_incarnation_ > 0 && marked_incarnation_ >= oldest_ && !segments_.contains(marked_incarnation_)) {
    return RottenLog(file_, absl::StrCat("the head of segment ", marked_incarnation_, " cannot be read"));
  }
  log_.batches.clear();
  log_.live.clear();
  log_.torn_batches = log_.last_batch = 0;
  log_.record_count = log_.last_lsn = log_.payload_bytes = 0;
  // Nothing is durable before the oldest segment's head is durable.
  Chain chain{.ended = !segments_.contains(oldest_)};
  for (const auto& [incarnation, segment] : segments_) {
    if (incarnation < oldest_ || segment.end_batch <= segment.head.first_batch) continue;
    BALLAST_RETURN_IF_ERROR(LinkSegment(segment, &chain));
  }
  // The next batch may exist in an unreadable block: nobody may write over this block while the disk cannot read it.
  if (chain.end > 0) BALLAST_RETURN_IF_ERROR(reader_.UnreadAt(chain.end));
  if (log_.last_batch >= log_.synced_batch) return absl::OkStatus();
  return RottenLog(file_, absl::StrFormat("batch %d cannot be read, and all up to %d were durable", log_.last_batch + 1,
                                          log_.synced_batch));
}

absl::Status Scan::ReadNeeded() {
  for (auto& [incarnation, segment] : segments_) {
    // Segments before the oldest needed segment need not be whole.
    if (incarnation < oldest_ || segment.read) continue;
    BALLAST_RETURN_IF_ERROR(ReadBatches(segment));
    segment.read = true;
  }
  return absl::OkStatus();
}

absl::StatusOr<ScannedLog> Scan::Run() {
  BALLAST_RETURN_IF_ERROR(ReadFileHead());
  BALLAST_RETURN_IF_ERROR(ReadMarks());
  for (uint64_t i = 0; i < log_.segment_count; ++i) BALLAST_RETURN_IF_ERROR(ReadSegmentHead(i));
  // The first segment's head is durable before a mark of this segment replaces the initial marks.
  if (segments_.empty() && !marked_) return RottenLog(file_, "it has neither marks nor segments");
  uint64_t end_batch = ~uint64_t{0};
  for (auto segment = segments_.rbegin(); segment != segments_.rend(); ++segment) {
    segment->second.end_batch = end_batch;
    end_batch = std::min(end_batch, segment->second.head.first_batch);
  }
  BALLAST_RETURN_IF_ERROR(ReadNeeded());
  BALLAST_RETURN_IF_ERROR(LinkAll());
  if (oldest_kept_ < oldest_ && !log_.live.empty()) {
    // A void batch names a cut that never was durable. The batch will be overwritten, so nothing may be freed by it.
    oldest_ = oldest_kept_;
    BALLAST_RETURN_IF_ERROR(ReadNeeded());
    oldest_ = oldest_kept_;
    BALLAST_RETURN_IF_ERROR(LinkAll());
  }
  log_.read_bytes = reader_.read_bytes();
  return std::move(log_);
}

}  // namespace

absl::StatusOr<ScannedLog> ScanLog(const BlockFile& file, std::atomic<uint64_t>* read_bytes) {
  return Scan(file, read_bytes).Run();
}

}  // namespace ballast::storage
