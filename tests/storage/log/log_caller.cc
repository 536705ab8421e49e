#include "ballast/tests/storage/log/log_caller.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/storage/log/payload_reader.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/storage/log/all_records.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kSnapshotBodyBytes = 100;

std::string Text(absl::Span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

std::vector<std::byte> Content(uint64_t seed, uint64_t bytes) {
  std::vector<std::byte> content(bytes);
  for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    const uint64_t word = sim::Mix(seed, at);
    std::memcpy(content.data() + at, &word, std::min<uint64_t>(sizeof(word), bytes - at));
  }
  return content;
}

bool LogCaller::Roll() {
  if (!log_->Roll()) return false;
  AppendHere(kSnapshotRecord, {.body_bytes = kSnapshotBodyBytes});
  return true;
}

bool LogCaller::Append(const RecordShape& shape) {
  if (!log_->HasRoom(shape.body_bytes, shape.payload_bytes)) {
    if (!Roll() || !log_->HasRoom(shape.body_bytes, shape.payload_bytes)) return false;
  }
  AppendHere(kOtherRecord, shape);
  return true;
}

void LogCaller::AppendHere(uint32_t type, const RecordShape& shape) {
  LogRecord record;
  record.lsn = next_lsn_++;
  record.type = type;
  const uint64_t seed = sim::Mix(seed_++, record.lsn);
  record.body = Text(Content(seed + 1, shape.body_bytes));
  record.keep_for = shape.keep_for;
  const uint64_t memory_bytes = AlignUp(shape.payload_bytes + 1) + kIoAlignment;
  const std::shared_ptr<std::byte> memory(static_cast<std::byte*>(std::aligned_alloc(kIoAlignment, memory_bytes)),
                                          std::free);
  const absl::Span<std::byte> payload(memory.get() + (shape.aligned ? 0 : 24), shape.payload_bytes);
  const std::vector<std::byte> content = Content(seed, shape.payload_bytes);
  std::copy(content.begin(), content.end(), payload.begin());
  record.payload = payload;
  record.payload_crc32c = kernels::Crc32c(payload);
  if (record.lsn % 2 == 0) record.parity.Add(payload);
  ++*borrowed_;
  record.written = [memory, payload, borrowed = borrowed_](const PayloadPlace*) {
    // A later reader finds the payload spoiled.
    std::fill(payload.begin(), payload.end(), std::byte{0xdd});
    --*borrowed;
  };
  written_[record.lsn] = {type, record.body, shape.payload_bytes, seed, shape.keep_for};
  log_->Append(std::move(record));
}

void LogCaller::Cut(int64_t step) {
  cut_step_ = std::max(cut_step_, step);
  log_->Cut(step);
}

absl::Status LogCaller::SyncAll() {
  log_->Sync(last_lsn());
  return PumpAll() ? log_->status() : absl::InternalError("the log is never done");
}

absl::Status LogCaller::CheckRecord(const ReadRecord& record, const BlockFile& file) const {
  const auto found = written_.find(record.lsn);
  if (found == written_.end()) return absl::InternalError(absl::StrCat("record ", record.lsn, " was never written"));
  const WrittenRecord& expected = found->second;
  if (record.type != expected.type || record.body != expected.body || record.payload.bytes != expected.payload_bytes) {
    return absl::InternalError(absl::StrCat("record ", record.lsn, " is another one"));
  }
  if (record.payload.bytes == 0) return absl::OkStatus();
  std::vector<std::byte> payload(record.payload.bytes);
  if (const absl::Status status = ReadPayload(file, record.payload, absl::MakeSpan(payload)); !status.ok()) {
    return status;
  }
  if (payload == Content(expected.seed, expected.payload_bytes)) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("record ", record.lsn, " has another payload"));
}

absl::Status LogCaller::Check(const ScannedLog& scanned, const BlockFile& file, uint64_t durable_lsn) const {
  absl::Status payloads;
  BALLAST_ASSIGN_OR_RETURN(const AllRecords all, RecordsOf(file, scanned));
  const std::vector<ReadRecord>& records = all.records;
  uint64_t next = records.empty() ? 1 : records.front().lsn, payload_bytes = 0;
  const uint64_t first = next;
  for (const ReadRecord& record : records) {
    payload_bytes += record.payload.bytes;
    if (record.lsn != next) return absl::InternalError(absl::StrCat("record ", record.lsn, " follows ", next - 1));
    ++next;
    if (const absl::Status status = CheckRecord(record, file); absl::IsDataLoss(status)) {
      payloads.Update(status);
    } else if (!status.ok()) {
      return status;
    }
  }
  if (next <= durable_lsn) {
    return absl::InternalError(absl::StrCat("records end at ", next - 1, ", durable was ", durable_lsn));
  }
  for (const auto& [lsn, record] : written_) {
    if (lsn >= first) break;
    if (record.keep_for > cut_step_) {
      return absl::InternalError(absl::StrCat("record ", lsn, " is needed, the oldest is ", first));
    }
  }
  for (size_t i = 0; i < records.size(); ++i) {
    const bool begins = i == 0 || all.segments[i] != all.segments[i - 1];
    if (begins && records[i].type != kSnapshotRecord) {
      return absl::InternalError(
          absl::StrCat("segment ", scanned.live[all.segments[i]].incarnation, " does not begin with a snapshot"));
    }
  }
  if (scanned.record_count != records.size() || scanned.payload_bytes != payload_bytes ||
      scanned.last_lsn != (records.empty() ? 0 : records.back().lsn)) {
    return absl::InternalError(absl::StrCat("the scan counted ", scanned.record_count, " records up to ",
                                            scanned.last_lsn, ", there are ", records.size()));
  }
  return payloads;
}

void LogCaller::Resume(const ScannedLog& scanned, std::unique_ptr<GradientLog> log) {
  log_ = std::move(log);
  next_lsn_ = scanned.last_lsn + 1;
  written_.erase(written_.lower_bound(next_lsn_), written_.end());
  const auto all = RecordsOf(log_->file(), scanned);
  if (!all.ok()) return;  // a disk that fails: every segment stays
  std::vector<int64_t> keep_for(scanned.live.size(), -1);
  for (size_t i = 0; i < all->records.size(); ++i) {
    int64_t& kept = keep_for[all->segments[i]];
    kept = std::max(kept, written_.at(all->records[i].lsn).keep_for);
  }
  for (size_t i = 0; i < scanned.live.size(); ++i) log_->Keep(scanned.live[i].incarnation, keep_for[i]);
}

}  // namespace ballast::storage
