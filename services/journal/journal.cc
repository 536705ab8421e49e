#include "ballast/services/journal/journal.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/storage/log/gradient_log.h"

namespace ballast::services {
namespace {

class None final : public Journal {
 public:
  bool Keeps(const StepRecord&) const override { return false; }
  void Sync(uint64_t) override {}
  bool durable() const override { return false; }
  std::optional<uint64_t> durable_lsn() const override { return std::nullopt; }
  absl::Status status() const override { return absl::OkStatus(); }
  bool HasRoomFor(const SliceNeeds&) const override { return true; }
  absl::Status MakeRoomFor(const SliceNeeds&, Begin) override { return absl::OkStatus(); }
  absl::Status MakeRoom(uint64_t, uint64_t, Begin) override { return absl::OkStatus(); }
  bool IsShort() const override { return false; }
  std::optional<uint64_t> StepsFree(uint64_t) const override { return std::nullopt; }
  std::optional<uint64_t> StepsHeld(uint64_t, uint64_t) const override { return std::nullopt; }
  void Release(int64_t) override {}
  absl::Status Cut(int64_t, Begin) override { return absl::OkStatus(); }
  JournalState state() const override { return {}; }
  uint64_t free_segments() const override { return 0; }
  absl::Status Extend(uint64_t, storage::Interrupt) override { return absl::OkStatus(); }
  storage::GradientLog* log() const override { return nullptr; }
};

// Room for records; each may become a batch of its own.
struct RecordNeeds {
  uint64_t records = 0;
  uint64_t bytes = 0;  // of bodies
  uint64_t payload_bytes = 0;
  uint64_t reserved_bytes = 0;  // for slices that come before
  // As a single body: with metas and padding on top.
  uint64_t body_bytes() const { return bytes + (records - 1) * 2 * storage::kLogBlock; }
};

// A log or a spill.
class FileJournal : public Journal {
 public:
  FileJournal(std::unique_ptr<storage::GradientLog> log, uint64_t segments_reserved, bool whole)
      : log_(std::move(log)), segments_reserved_(segments_reserved), whole_(whole) {}

  absl::Status status() const override { return log_->status(); }
  void Release(int64_t step) override { log_->Release(step); }
  absl::Status Cut(int64_t step, Begin begin) override {
    log_->Cut(step);
    return log_->cut_lacks_room() ? Make({1, 2 * storage::kLogBlock, 1}, begin) : absl::OkStatus();
  }
  JournalState state() const override {
    return {.durable = durable(),
            .path = log_->file().path(),
            .segment_bytes = log_->segment_bytes(),
            .bytes = log_->file_bytes(),
            .record_bytes_max = log_->record_bytes_max(),
            .steps_held = {}};
  }
  uint64_t free_segments() const override { return log_->free_segments(); }
  absl::Status Extend(uint64_t segments, storage::Interrupt interrupt) override {
    return log_->Extend(segments, interrupt);
  }
  storage::GradientLog* log() const override { return log_.get(); }

 protected:
  // The segment in use takes all, or there are segments for all beside the reserve, of which one is for the first.
  bool HasRoom(const RecordNeeds& needs) const {
    return log_->HasRoom(needs.body_bytes(), needs.payload_bytes + needs.reserved_bytes) ||
           log_->free_segments() + 1 >= segments_reserved_ + SegmentsOf(needs);
  }
  absl::Status Make(const RecordNeeds& needs, Begin begin) {
    if (InSegment(needs)) return absl::OkStatus();
    storage::LogRecord record = begin(whole_);
    head_bytes_ = std::max(head_bytes_, storage::RecordCostMax(record.body.size(), 0));
    if (storage::RecordCostMax(record.body.size(), 0) +
            storage::RecordCostMax(needs.body_bytes(), needs.payload_bytes) >
        log_->record_bytes_max()) {
      return ShortOf(absl::StrCat("records of ", needs.body_bytes() + needs.payload_bytes,
                                  " bytes beside a snapshot of ", record.body.size(),
                                  ": drop the job and make it with larger chunks"));
    }
    if (!log_->Roll()) return ShortOf("another segment although chunks were flushed");
    log_->Append(std::move(record));
    return absl::OkStatus();
  }

  const std::unique_ptr<storage::GradientLog> log_;
  const uint64_t segments_reserved_;

 private:
  bool InSegment(const RecordNeeds& needs) const { return log_->HasRoom(needs.body_bytes(), needs.payload_bytes); }
  // How many segments the slice and those before it take at most, in whatever order they come. A segment begins with a
  // snapshot and ends when the next slice, of at most an eighth (UsedBytes), does not fit with what may come along.
  uint64_t SegmentsOf(const RecordNeeds& needs) const {
    if (needs.reserved_bytes == 0) return 1;
    const uint64_t bytes = needs.reserved_bytes + storage::RecordCostMax(kSliceBodyBytesMax, needs.payload_bytes);
    const uint64_t others = head_bytes_ + storage::RecordCostMax(needs.body_bytes(), log_->segment_bytes() / 8);
    const uint64_t held = std::max(others + 1, log_->record_bytes_max()) - others;
    return (bytes + held - 1) / held;
  }
  absl::Status ShortOf(absl::string_view what) const {
    return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                        absl::StrCat("the gradient log ", log_->file().path(), " of ", log_->file_bytes(),
                                     " bytes in segments of ", log_->segment_bytes(), " has no room for ", what));
  }

  const bool whole_;         // segments begin with snapshots of the job
  uint64_t head_bytes_ = 0;  // of the largest snapshot so far
};

class Log final : public FileJournal {
 public:
  Log(std::unique_ptr<storage::GradientLog> log, uint64_t before_lsn)
      : FileJournal(std::move(log), kLogSegmentsReserved, /*whole=*/true), before_lsn_(before_lsn) {}

  bool Keeps(const StepRecord&) const override { return true; }
  void Sync(uint64_t lsn) override { log_->Sync(lsn); }
  bool durable() const override { return true; }
  std::optional<uint64_t> durable_lsn() const override { return std::max(log_->durable_lsn(), before_lsn_); }
  bool HasRoomFor(const SliceNeeds& slice) const override { return HasRoom(NeedsOf(slice)); }
  absl::Status MakeRoomFor(const SliceNeeds& slice, Begin begin) override { return Make(NeedsOf(slice), begin); }
  absl::Status MakeRoom(uint64_t records, uint64_t record_bytes, Begin begin) override {
    return Make({records, record_bytes, 0}, begin);
  }
  bool IsShort() const override { return log_->free_segments() + 1 < segments_reserved_; }
  std::optional<uint64_t> StepsFree(uint64_t step_bytes) const override {
    const uint64_t free = log_->free_segments();
    if (free <= segments_reserved_) return 0;
    return (free - segments_reserved_) * log_->segment_bytes() / std::max<uint64_t>(1, step_bytes);
  }
  // As many as SizeJournal made it for.
  std::optional<uint64_t> StepsHeld(uint64_t step_bytes, uint64_t values_bytes) const override {
    if (step_bytes == 0) return std::nullopt;
    const uint64_t others = segments_reserved_ + 1, segments = log_->segments();
    const uint64_t bytes = (segments - std::min(segments, others)) * UsedBytes(log_->segment_bytes());
    return (bytes - std::min(bytes, values_bytes)) / step_bytes;
  }

 private:
  static RecordNeeds NeedsOf(const SliceNeeds& slice) {
    return {2, 2 * kSliceBodyBytesMax + slice.prepared_bytes, slice.payload_bytes, slice.reserved_bytes};
  }

  const uint64_t before_lsn_;
};

class Spill final : public FileJournal {
 public:
  explicit Spill(std::unique_ptr<storage::GradientLog> log)
      : FileJournal(std::move(log), kSpillSegmentsReserved, /*whole=*/false) {}

  bool Keeps(const StepRecord& record) const override {
    const auto* const slice = std::get_if<SliceRecord>(&record);
    return slice != nullptr && slice->bytes != nullptr && slice->bytes->receipt.logged;
  }
  void Sync(uint64_t) override {}
  bool durable() const override { return false; }
  std::optional<uint64_t> durable_lsn() const override { return std::nullopt; }
  bool HasRoomFor(const SliceNeeds& slice) const override { return !slice.leaves_memory || HasRoom(NeedsOf(slice)); }
  absl::Status MakeRoomFor(const SliceNeeds& slice, Begin begin) override {
    return slice.leaves_memory ? Make(NeedsOf(slice), begin) : absl::OkStatus();
  }
  absl::Status MakeRoom(uint64_t, uint64_t, Begin) override { return absl::OkStatus(); }
  bool IsShort() const override { return false; }
  std::optional<uint64_t> StepsFree(uint64_t) const override { return std::nullopt; }
  std::optional<uint64_t> StepsHeld(uint64_t, uint64_t) const override { return std::nullopt; }

 private:
  static RecordNeeds NeedsOf(const SliceNeeds& slice) {
    return {1, kSliceBodyBytesMax, slice.payload_bytes, slice.reserved_bytes};
  }
};

}  // namespace

std::shared_ptr<Journal> NoJournal() { return std::make_shared<None>(); }

std::shared_ptr<Journal> LogJournal(std::unique_ptr<storage::GradientLog> log, uint64_t before_lsn) {
  return std::make_shared<Log>(std::move(log), before_lsn);
}

std::shared_ptr<Journal> SpillJournal(std::unique_ptr<storage::GradientLog> log) {
  return std::make_shared<Spill>(std::move(log));
}

}  // namespace ballast::services
