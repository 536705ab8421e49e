#include "ballast/services/tools/iotune/machine_measure.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"
#include "ballast/services/tools/iotune/memory_step.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/tier/dram_tier.h"
#include "ballast/storage/tier/hbm_tier.h"
#include "ballast/storage/tier/ledger.h"

namespace ballast::services {
namespace {

constexpr uint64_t kBlockBytes = uint64_t{1} << 20;
constexpr uint64_t kFileBytesMin = uint64_t{16} << 20;
constexpr uint64_t kDepths[] = {2, 4, 8};
constexpr int kMeasurements = 27;  // share the duration
constexpr int kRounds = 3;         // per measurement
constexpr size_t kAppendsMin = 100;

// Vectors of 16 bytes: every processor has them, and two loads a cycle outrun any DRAM.
using Words = uint64_t __attribute__((vector_size(16)));

// Reads all bytes; the result keeps the compiler from dropping the reads.
uint64_t ReadThrough(absl::Span<const std::byte> bytes) {
  const auto* from = reinterpret_cast<const Words*>(bytes.data());
  Words a = {}, b = {}, c = {}, d = {};
  for (size_t i = 0; i + 4 <= bytes.size() / sizeof(Words); i += 4) {
    a ^= from[i];
    b ^= from[i + 1];
    c ^= from[i + 2];
    d ^= from[i + 3];
  }
  const Words all = a ^ b ^ c ^ d;
  return all[0] ^ all[1];
}

// The median of kRounds, since other processes disturb.
template <typename Round>
absl::StatusOr<uint64_t> MedianSpeed(const Round& round) {
  std::array<uint64_t, kRounds> speeds = {};
  for (uint64_t& speed : speeds) {
    BALLAST_ASSIGN_OR_RETURN(speed, round());
  }
  std::sort(speeds.begin(), speeds.end());
  return speeds[kRounds / 2];
}

class Measuring {
 public:
  explicit Measuring(const MeasureOptions& options)
      : options_(options), slice_(std::max(options.duration / (kMeasurements * kRounds), absl::Milliseconds(5))) {}
  absl::StatusOr<Measured> Run();

 private:
  absl::Status Dram();
  absl::Status MeasureDram(uint64_t threads, bool copy, uint64_t* speed);
  absl::StatusOr<uint64_t> DramSpeed(uint64_t threads, bool copy);
  absl::Status Updates();
  absl::Status Digests();
  absl::Status OpenFile();
  absl::Status Streams();
  absl::StatusOr<uint64_t> DiskSpeed(const char* what, uint64_t depth);
  absl::Status SideBySide();
  absl::Status Append();
  void Gpu();
  absl::Status GpuLink();
  void Say(const std::string& line) {
    if (options_.say != nullptr) options_.say(absl::StrCat("measuring ", line));
  }

  const MeasureOptions& options_;
  const absl::Duration slice_;
  Measured out_;
  storage::Arena memory_;
  std::unique_ptr<storage::BlockFile> file_;
  uint64_t file_bytes_ = 0;
};

absl::StatusOr<Measured> Measuring::Run() {
  BALLAST_ASSIGN_OR_RETURN(memory_, storage::Arena::Map(options_.memory_bytes));
  BALLAST_RETURN_IF_ERROR(OpenFile());  // first, to report a bad directory at once
  BALLAST_RETURN_IF_ERROR(Dram());
  BALLAST_RETURN_IF_ERROR(Updates());
  BALLAST_RETURN_IF_ERROR(Digests());
  BALLAST_RETURN_IF_ERROR(Streams());
  BALLAST_RETURN_IF_ERROR(SideBySide());
  BALLAST_RETURN_IF_ERROR(Append());
  Gpu();
  return std::move(out_);
}

absl::Status Measuring::MeasureDram(uint64_t threads, bool copy, uint64_t* speed) {
  const std::string what = copy ? "DRAM copy" : "DRAM read", how = absl::StrCat(threads, " thread(s)");
  Say(absl::StrCat(what, " with ", how));
  BALLAST_ASSIGN_OR_RETURN(*speed, MedianSpeed([&]() -> absl::StatusOr<uint64_t> { return DramSpeed(threads, copy); }));
  out_.rows.push_back({what, how, *speed});
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Measuring::DramSpeed(uint64_t threads, bool copy) {
  const absl::Span<std::byte> all = memory_.bytes();
  const uint64_t half = all.size() / 2, share = half / threads / 4096 * 4096;
  std::vector<uint64_t> moved(threads, 0);
  const absl::Time begin = absl::Now(), end = begin + slice_;
  std::vector<std::thread> running;
  absl::Status made;
  for (uint64_t t = 0; t < threads && made.ok(); ++t) {
    absl::StatusOr<std::thread> thread = model::MakeThread([&, t] {
      const absl::Span<std::byte> from = all.subspan(t * share, share), to = all.subspan(half + t * share, share);
      while (absl::Now() < end) {
        if (copy) {
          std::memcpy(to.data(), from.data(), share);
        } else {
          volatile uint64_t keep = ReadThrough(from) ^ ReadThrough(to);
          static_cast<void>(keep);
        }
        moved[t] += copy ? share : 2 * share;
      }
    });
    made = thread.status();
    if (thread.ok()) running.push_back(*std::move(thread));
  }
  for (std::thread& thread : running) thread.join();
  BALLAST_RETURN_IF_ERROR(made);
  uint64_t bytes = 0;
  for (const uint64_t m : moved) bytes += m;
  return PerSecond(bytes, absl::Now() - begin);
}

absl::Status Measuring::Dram() {
  storage::MachineProfile& p = out_.profile;
  p.threads = std::max(1u, std::thread::hardware_concurrency());
  BALLAST_RETURN_IF_ERROR(MeasureDram(1, /*copy=*/false, &p.dram_read_bytes_per_s.one_thread));
  BALLAST_RETURN_IF_ERROR(MeasureDram(p.threads, /*copy=*/false, &p.dram_read_bytes_per_s.all_threads));
  BALLAST_RETURN_IF_ERROR(MeasureDram(1, /*copy=*/true, &p.dram_copy_bytes_per_s.one_thread));
  BALLAST_RETURN_IF_ERROR(MeasureDram(p.threads, /*copy=*/true, &p.dram_copy_bytes_per_s.all_threads));
  return absl::OkStatus();
}

// The optimizer itself, as a store runs it: no copy has its mix of reads, writes and arithmetic.
absl::Status Measuring::Updates() {
  storage::MachineProfile& p = out_.profile;
  struct Kind {
    const char* name;
    kernels::MomentFormat moments;
    uint64_t* one;
    uint64_t* all;
  };
  const Kind kinds[] = {
      {"f32", kernels::MomentFormat::kF32, &p.update_f32_elements_per_s.one_thread,
       &p.update_f32_elements_per_s.all_threads},
      {"bf16", kernels::MomentFormat::kBf16, &p.update_bf16_elements_per_s.one_thread,
       &p.update_bf16_elements_per_s.all_threads},
      {"i8", kernels::MomentFormat::kI8, &p.update_i8_elements_per_s.one_thread,
       &p.update_i8_elements_per_s.all_threads},
      {"f8", kernels::MomentFormat::kF8, &p.update_f8_elements_per_s.one_thread,
       &p.update_f8_elements_per_s.all_threads},
  };
  for (const Kind& kind : kinds) {
    BALLAST_ASSIGN_OR_RETURN(const auto step, MemoryStep::Make(options_.directory, kind.moments));
    for (const bool all : {false, true}) {
      const std::string what = absl::StrCat("AdamW, ", kind.name, " moments");
      const std::string how = absl::StrCat(all ? p.threads : 1, " thread(s)");
      Say(absl::StrCat(what, " with ", how));
      BALLAST_ASSIGN_OR_RETURN(const uint64_t speed, MedianSpeed([&] {
                                 return step->ElementsPerSecond(all ? static_cast<int>(p.threads) : 1, slice_);
                               }));
      *(all ? kind.all : kind.one) = speed;
      const double bytes = static_cast<double>(speed) * step->bytes_per_element();
      out_.rows.push_back({what, how, static_cast<uint64_t>(bytes)});
    }
  }
  return absl::OkStatus();
}

absl::Status Measuring::Digests() {
  storage::MachineProfile& p = out_.profile;
  for (const bool all : {false, true}) {
    const int threads = all ? static_cast<int>(p.threads) : 1;
    const std::string how = absl::StrCat(threads, " thread(s)");
    Say(absl::StrCat("CRC32C of state with ", how));
    BALLAST_ASSIGN_OR_RETURN(const uint64_t speed, MedianSpeed([&]() -> absl::StatusOr<uint64_t> {
                               return DigestBytesPerSecond(memory_.bytes(), threads, slice_);
                             }));
    (all ? p.digest_bytes_per_s.all_threads : p.digest_bytes_per_s.one_thread) = speed;
    out_.rows.push_back({"CRC32C of state", how, speed});
  }
  return absl::OkStatus();
}

absl::Status Measuring::OpenFile() {
  std::error_code error;
  const auto space = std::filesystem::space(options_.directory, error);
  if (error) return storage::IoError(error.value(), "look", options_.directory, 0, 0);
  file_bytes_ = std::min<uint64_t>(options_.file_bytes, space.available / 2) / kBlockBytes * kBlockBytes;
  if (file_bytes_ < kFileBytesMin) {
    return model::Error(absl::StatusCode::kResourceExhausted, model::kDiskFull,
                        absl::StrCat("'", options_.directory, "' has ", space.available, " bytes free; ",
                                     2 * kFileBytesMin, " are needed to measure its disk"));
  }
  const std::string path = absl::StrCat(options_.directory, "/ballast-iotune.tmp");
  BALLAST_ASSIGN_OR_RETURN(file_, storage::SystemDisk()->Open(path, storage::Disk::Mode::kEmptied));
  BALLAST_RETURN_IF_ERROR(storage::SystemDisk()->Remove(path));
  out_.profile.disk_direct = file_->buffered_because().empty();
  if (!file_->buffered_because().empty()) {
    out_.notes.push_back(absl::StrCat("the disk was measured through the page cache: ", file_->buffered_because()));
  }
  return absl::OkStatus();
}

// `what`: "read", "write" or "mixed". In a mix half of the requests in flight write.
absl::StatusOr<uint64_t> Measuring::DiskSpeed(const char* what, uint64_t depth) {
  const bool mixed = std::strcmp(what, "mixed") == 0, write = std::strcmp(what, "write") == 0;
  BALLAST_ASSIGN_OR_RETURN(const auto queue, storage::SystemDisk()->MakeQueue({.registered = memory_.bytes()}));
  // Reads and writes each go through the file from its start, the writes of a mix from its middle.
  uint64_t next[2] = {0, mixed ? file_bytes_ / 2 / kBlockBytes * kBlockBytes : 0};
  const auto submit = [&](uint64_t slot) {
    const bool writes = write || (mixed && slot % 2 == 1);
    uint64_t& at = next[writes];
    const uint64_t offset = at;
    at = at + kBlockBytes == file_bytes_ ? 0 : at + kBlockBytes;
    return queue->Submit({.kind = writes ? storage::IoRequest::Kind::kWrite : storage::IoRequest::Kind::kRead,
                          .file = file_.get(),
                          .offset = offset,
                          .buffer = memory_.bytes().subspan(slot * kBlockBytes, kBlockBytes),
                          .tag = slot});
  };
  const absl::Time begin = absl::Now(), end = begin + slice_;
  for (uint64_t slot = 0; slot < depth; ++slot) BALLAST_RETURN_IF_ERROR(submit(slot));
  uint64_t bytes = 0;
  std::vector<storage::IoCompletion> completions;
  while (queue->in_flight() > 0) {
    completions.clear();
    queue->Reap(/*wait=*/true, &completions);
    const bool more = absl::Now() < end;
    for (const storage::IoCompletion& completion : completions) {
      BALLAST_RETURN_IF_ERROR(completion.status);
      bytes += kBlockBytes;
      if (more) BALLAST_RETURN_IF_ERROR(submit(completion.tag));
    }
  }
  return PerSecond(bytes, absl::Now() - begin);
}

absl::Status Measuring::Streams() {
  Say(absl::StrCat("nothing yet: writing ", file_bytes_ >> 20, " MiB once, since first writes are slower"));
  BALLAST_RETURN_IF_ERROR(file_->Reserve(0, file_bytes_));
  for (uint64_t at = 0; at < file_bytes_; at += kBlockBytes) {
    BALLAST_RETURN_IF_ERROR(file_->Write(at, memory_.bytes().subspan(0, kBlockBytes)));
  }
  BALLAST_RETURN_IF_ERROR(file_->Sync());
  storage::MachineProfile& p = out_.profile;
  struct Kind {
    const char* name;
    uint64_t* bytes_per_s;
    uint64_t* depth;
  };
  const Kind kinds[] = {{"read", &p.disk_read_bytes_per_s, &p.disk_read_depth},
                        {"write", &p.disk_write_bytes_per_s, &p.disk_write_depth},
                        {"mixed", &p.disk_mixed_bytes_per_s, &p.disk_mixed_depth}};
  for (const Kind& kind : kinds) {
    for (const uint64_t depth : kDepths) {
      Say(absl::StrCat("disk ", kind.name, " at depth ", depth));
      BALLAST_ASSIGN_OR_RETURN(const uint64_t speed, MedianSpeed([&] { return DiskSpeed(kind.name, depth); }));
      out_.rows.push_back({absl::StrCat("disk ", kind.name), absl::StrCat("depth ", depth), speed});
      if (speed <= *kind.bytes_per_s) continue;
      *kind.bytes_per_s = speed;
      *kind.depth = depth;
    }
  }
  return absl::OkStatus();
}

// As a step over NVMe, whose parts disturb each other where the disk needs processors or memory.
absl::Status Measuring::SideBySide() {
  storage::MachineProfile& p = out_.profile;
  Say("AdamW beside reads and writes of the disk");
  BALLAST_ASSIGN_OR_RETURN(const auto step, MemoryStep::Make(options_.directory, kernels::MomentFormat::kF32));
  std::vector<uint64_t> moved;
  BALLAST_ASSIGN_OR_RETURN(
      p.update_f32_beside_disk_elements_per_s, MedianSpeed([&]() -> absl::StatusOr<uint64_t> {
        absl::StatusOr<uint64_t> disk;
        BALLAST_ASSIGN_OR_RETURN(std::thread mixing,
                                 model::MakeThread([&] { disk = DiskSpeed("mixed", p.disk_mixed_depth); }));
        const absl::StatusOr<uint64_t> updated = step->ElementsPerSecond(static_cast<int>(p.threads), slice_);
        mixing.join();
        BALLAST_RETURN_IF_ERROR(disk.status());
        moved.push_back(*disk);
        return updated;
      }));
  std::sort(moved.begin(), moved.end());
  p.disk_mixed_beside_update_bytes_per_s = moved[moved.size() / 2];
  const double bytes = static_cast<double>(p.update_f32_beside_disk_elements_per_s) * step->bytes_per_element();
  out_.rows.push_back({"AdamW, f32 moments", "beside the disk", static_cast<uint64_t>(bytes)});
  out_.rows.push_back({"disk mixed", "beside AdamW", p.disk_mixed_beside_update_bytes_per_s});
  return absl::OkStatus();
}

// As the gradient log appends: into extents that were written before.
absl::Status Measuring::Append() {
  Say("appends of 4096 bytes, each with an fdatasync");
  std::vector<int64_t> times_us;
  const absl::Time end = absl::Now() + kRounds * slice_;
  for (uint64_t at = 0; absl::Now() < end || times_us.size() < kAppendsMin;) {
    const absl::Time began = absl::Now();
    BALLAST_RETURN_IF_ERROR(file_->Write(at, memory_.bytes().subspan(0, storage::kIoAlignment)));
    BALLAST_RETURN_IF_ERROR(file_->Sync());
    times_us.push_back(absl::ToInt64Microseconds(absl::Now() - began));
    at = at + storage::kIoAlignment == file_bytes_ ? 0 : at + storage::kIoAlignment;
  }
  std::sort(times_us.begin(), times_us.end());
  out_.profile.disk_append_p50_us = static_cast<uint64_t>(times_us[times_us.size() / 2]);
  out_.profile.disk_append_p99_us = static_cast<uint64_t>(times_us[times_us.size() * 99 / 100]);
  return absl::OkStatus();
}

void Measuring::Gpu() {
  Say("the GPU's link");
  const absl::Status status = GpuLink();
  if (!status.ok()) out_.notes.push_back(absl::StrCat("no GPU link: ", status.message()));
}

absl::Status Measuring::GpuLink() {
  constexpr uint64_t kBytes = uint64_t{64} << 20;
  storage::Ledger ledger({.hbm = kBytes + storage::kHbmScratchBytes, .dram = 0, .nvme = 0});
  BALLAST_ASSIGN_OR_RETURN(const auto tier, storage::OpenHbmTier(options_.hbm_device, &ledger));
  BALLAST_ASSIGN_OR_RETURN(const storage::HbmBlock block, tier->Allocate(kBytes, "iotune"));
  // As the slices of a step, and the answers to pulls, beside a GPU.
  BALLAST_ASSIGN_OR_RETURN(const storage::Arena host, storage::DramTier(&ledger, options_.hbm_device).Map(kBytes));
  for (const bool in : {true, false}) {
    uint64_t bytes = 0;
    const absl::Time begin = absl::Now(), end = begin + kRounds * slice_;
    do {
      BALLAST_RETURN_IF_ERROR(in ? tier->CopyIn(host.bytes(), block.data())
                                 : tier->CopyOut(block.data(), host.bytes()));
      bytes += kBytes;
    } while (absl::Now() < end);
    const uint64_t speed = PerSecond(bytes, absl::Now() - begin);
    (in ? out_.profile.gpu_in_bytes_per_s : out_.profile.gpu_out_bytes_per_s) = speed;
    out_.rows.push_back({in ? "GPU in" : "GPU out", host.page_locked() ? "page-locked" : "pageable", speed});
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Measured> Measure(const MeasureOptions& options) { return Measuring(options).Run(); }

}  // namespace ballast::services
