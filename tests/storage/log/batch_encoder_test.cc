// Batches as bytes: what the encoder says to write, decoded from where it says.
#include "ballast/storage/log/batch_encoder.h"

#include <cstring>

#include "ballast/kernels/kernels.h"
#include "ballast/tests/storage/log/log_caller.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kEncodedSegmentBytes = 64 * kLogBlock;
constexpr uint64_t kSecondSegment = kLogFirstSegment + kEncodedSegmentBytes;

class BatchEncoderTest : public ::testing::Test {
 protected:
  // The payload begins `shift` bytes behind a block's boundary in memory.
  LogRecord Record(uint64_t lsn, uint64_t payload_bytes, uint64_t shift, bool parity) {
    LogRecord record;
    record.lsn = lsn;
    record.type = static_cast<uint32_t>(lsn % 3);
    record.body = std::string(lsn, static_cast<char>('a' + lsn));
    if (payload_bytes == 0) return record;
    payloads_.push_back(MakeLogMemory(AlignUp(payload_bytes + shift)));
    const absl::Span<std::byte> payload(payloads_.back().get() + shift, payload_bytes);
    const std::vector<std::byte> content = Content(lsn, payload_bytes);
    std::copy(content.begin(), content.end(), payload.begin());
    record.payload = payload;
    record.payload_crc32c = kernels::Crc32c(payload);
    if (parity) record.parity.Add(payload);
    return record;
  }
  LogBatch Encode(LogRecord record) {
    std::vector<LogRecord> records;
    records.push_back(std::move(record));
    return Encode(std::move(records));
  }
  LogBatch EncodeEmpty() { return Encode(std::vector<LogRecord>()); }
  LogBatch Encode(std::vector<LogRecord> records) {
    LogBatch batch = encoder_.Encode(std::move(records), /*oldest_incarnation=*/4, /*synced_batch=*/11);
    for (const LogBatch::Write& write : batch.writes) {
      EXPECT_EQ(write.offset % kLogBlock, 0);
      EXPECT_EQ(write.bytes.size() % kLogBlock, 0);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(write.bytes.data()) % kLogBlock, 0);
      std::memcpy(file_.data() + write.offset, write.bytes.data(), write.bytes.size());
    }
    return batch;
  }
  absl::Span<const std::byte> At(uint64_t offset, uint64_t bytes) const {
    return absl::MakeConstSpan(file_).subspan(offset, bytes);
  }
  void Begin() {
    std::vector<std::byte> blocks(kSegmentHeadBytes);
    const uint64_t begin = encoder_.BeginSegment({.incarnation = 5, .segment = 1, .oldest = 4}, /*synced_batch=*/10,
                                                 absl::MakeSpan(blocks));
    std::memcpy(file_.data() + begin, blocks.data(), blocks.size());
  }

  BatchEncoder encoder_{kEncodedSegmentBytes, /*salt=*/77, /*next_batch=*/12, /*previous_incarnation=*/3};
  std::vector<LogMemory> payloads_;
  std::vector<std::byte> file_ = std::vector<std::byte>(kSecondSegment + kEncodedSegmentBytes, std::byte{0xee});
};

TEST_F(BatchEncoderTest, ASegmentsHeadLiesTwiceInFrontOfItsBatches) {
  EXPECT_FALSE(encoder_.has_segment());
  Begin();
  EXPECT_TRUE(encoder_.has_segment());
  for (uint64_t copy = 0; copy < 2; ++copy) {
    SegmentHead head;
    ASSERT_TRUE(DecodeHead(At(kSecondSegment + copy * kLogBlock, kLogBlock), &head));
    EXPECT_EQ(head.salt, 77);
    EXPECT_EQ(head.incarnation, 5);
    EXPECT_EQ(head.first_batch, 12);
    EXPECT_EQ(head.synced_batch, 10);
    EXPECT_EQ(head.oldest_incarnation, 4);
    EXPECT_EQ(head.previous_incarnation, 3);
  }
  const LogBatch batch = Encode(Record(1, 0, 0, false));
  EXPECT_EQ(batch.writes[0].offset, kSecondSegment + kSegmentHeadBytes);
  std::vector<std::byte> blocks(kSegmentHeadBytes);
  encoder_.BeginSegment({.incarnation = 6, .segment = 0, .oldest = 4}, 12, absl::MakeSpan(blocks));
  SegmentHead next;
  ASSERT_TRUE(DecodeHead(absl::MakeConstSpan(blocks).subspan(0, kLogBlock), &next));
  EXPECT_EQ(next.first_batch, 13);
  EXPECT_EQ(next.previous_incarnation, 5) << "segment of batch 12";
}

TEST_F(BatchEncoderTest, RecordsOfEveryShapeAreReadFromWhereTheBatchSays) {
  Begin();
  std::vector<LogRecord> records;
  records.push_back(Record(1, 0, 0, false));
  records.push_back(Record(2, 3 * kLogBlock, 0, true));
  records.push_back(Record(3, kLogBlock + 100, 0, false));
  records.push_back(Record(4, kLogBlock - 8, 24, true));
  records.push_back(Record(5, 1, 0, true));
  const LogBatch batch = Encode(std::move(records));
  EXPECT_EQ(batch.number, 12);
  EXPECT_EQ(batch.last_lsn, 5);
  EXPECT_EQ(batch.incarnation, 5);
  EXPECT_EQ(batch.outstanding, batch.writes.size());
  const uint64_t meta_bytes = kLogBlock, begin = kSecondSegment + kSegmentHeadBytes;
  for (uint64_t copy = 0; copy < 2; ++copy) {
    const uint64_t at = begin + copy * meta_bytes;
    ReadBatch read;
    ASSERT_TRUE(DecodeBatchHead(At(at, meta_bytes), at, kSecondSegment + kEncodedSegmentBytes, &read.head));
    ASSERT_TRUE(DecodeMeta(At(at, meta_bytes), &read));
    EXPECT_EQ(read.head.batch, 12);
    EXPECT_EQ(read.head.salt, 77);
    EXPECT_EQ(read.head.incarnation, 5);
    EXPECT_EQ(read.head.oldest_incarnation, 4);
    EXPECT_EQ(read.head.synced_batch, 11);
    ASSERT_EQ(read.records.size(), 5);
    for (size_t i = 0; i < 5; ++i) {
      const LogRecord& written = batch.records[i];
      const ReadRecord& record = read.records[i];
      EXPECT_EQ(record.lsn, written.lsn);
      EXPECT_EQ(record.type, written.type);
      EXPECT_EQ(record.body, written.body);
      EXPECT_EQ(record.payload.bytes, written.payload.size());
      EXPECT_EQ(record.payload.crc32c, written.payload_crc32c);
      EXPECT_EQ(record.payload.parity_sum, written.parity_sum());
      if (record.payload.bytes == 0) continue;
      EXPECT_EQ(record.payload.offset, batch.payload_offsets[i]);
      EXPECT_EQ(At(record.payload.offset, record.payload.bytes), written.payload) << "record " << record.lsn;
      if (written.parity.empty()) continue;
      EXPECT_EQ(At(record.payload.parity_offset(), kLogBlock), written.parity.block()) << "record " << record.lsn;
    }
    // Whole blocks: 3 + parity, 2, 1 + parity, 1 + parity.
    EXPECT_EQ(read.end, begin + 2 * meta_bytes + 10 * kLogBlock);
  }
  EXPECT_EQ(EncodeEmpty().writes[0].offset, begin + 2 * meta_bytes + 10 * kLogBlock) << "without a gap";
}

TEST_F(BatchEncoderTest, WholeBlocksOfAnAlignedPayloadAreNotCopied) {
  Begin();
  std::vector<LogRecord> records;
  records.push_back(Record(1, 2 * kLogBlock + 8, 0, false));
  records.push_back(Record(2, 2 * kLogBlock, 8, false));
  const std::byte* const aligned = records[0].payload.data();
  const LogBatch batch = Encode(std::move(records));
  ASSERT_EQ(batch.writes.size(), 4);
  EXPECT_EQ(batch.writes[1].bytes.data(), aligned);
  EXPECT_EQ(batch.writes[1].bytes.size(), 2 * kLogBlock);
  EXPECT_EQ(batch.writes[2].bytes.size(), kLogBlock) << "its rest";
  EXPECT_EQ(batch.writes[3].bytes.size(), 2 * kLogBlock) << "a copy of the other";
}

TEST_F(BatchEncoderTest, TheBytesBehindAPayloadAreZeros) {
  Begin();
  const LogBatch batch = Encode(Record(1, 100, 16, false));
  for (const std::byte byte : At(batch.payload_offsets[0] + 100, kLogBlock - 100)) ASSERT_EQ(byte, std::byte{0});
}

TEST_F(BatchEncoderTest, AnEmptyBatchTakesWhatTheRingKeepsForIt) {
  Begin();
  const LogBatch batch = EncodeEmpty();
  EXPECT_EQ(batch.last_lsn, 0);
  ASSERT_EQ(batch.writes.size(), 1);
  EXPECT_EQ(batch.writes[0].bytes.size(), RecordCostMax(0, 0));
  EXPECT_EQ(batch.writes[0].bytes.size(), 2 * kLogBlock);
  ReadBatch read;
  const uint64_t at = batch.writes[0].offset;
  ASSERT_TRUE(DecodeMeta(At(at, kLogBlock), &read));
  EXPECT_EQ(read.records.size(), 0);
  EXPECT_EQ(read.end, at + 2 * kLogBlock);
}

TEST_F(BatchEncoderTest, NoRecordTakesMoreThanItsCost) {
  Begin();
  for (const uint64_t payload_bytes : {uint64_t{0}, uint64_t{1}, kLogBlock, kLogBlock + 1}) {
    for (const uint64_t shift : {uint64_t{0}, uint64_t{8}}) {
      LogRecord record = Record(7, payload_bytes, shift, /*parity=*/true);
      const uint64_t cost = RecordCostMax(record.body.size(), payload_bytes);
      const uint64_t before = EncodeEmpty().writes[0].offset;
      Encode(std::move(record));
      const uint64_t after = EncodeEmpty().writes[0].offset;
      EXPECT_LE(after - before - 2 * kLogBlock, cost) << payload_bytes << " bytes, " << shift << " behind";
    }
  }
}

}  // namespace
}  // namespace ballast::storage
