#include "ballast/tests/bench/storage_streams.h"

#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/store/chunk_reader.h"

namespace ballast::bench {
namespace {

using storage::IoCompletion;
using storage::IoRequest;

double WallSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// CPU time of all threads: the queue may have a pool, and the kernel's io_uring workers count to the process.
double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

uint64_t FreeHugePages() {
  std::ifstream meminfo("/proc/meminfo");
  std::string word;
  while (meminfo >> word) {
    uint64_t pages = 0;
    if (word == "HugePages_Free:" && meminfo >> pages) return pages;
  }
  return 0;
}

absl::Status Refused(absl::string_view what) { return model::Error(absl::StatusCode::kUnavailable, model::kIo, what); }

struct Output {
  int exit_code = 0;
  std::string text;
};

// stdout of a shell command.
absl::StatusOr<Output> Capture(const std::string& command) {
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return Refused(absl::StrCat("cannot run: ", command));
  Output output;
  std::array<char, 4096> buffer;
  while (const size_t bytes = fread(buffer.data(), 1, buffer.size(), pipe)) output.text.append(buffer.data(), bytes);
  const int status = pclose(pipe);
  output.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return output;
}

// As one word of a shell command.
std::string Quoted(const std::string& word) {
  return absl::StrCat("'", absl::StrReplaceAll(word, {{"'", "'\\''"}}), "'");
}

}  // namespace

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

absl::StatusOr<Fio> Fio::Find(uint64_t bytes_max) {
  BALLAST_ASSIGN_OR_RETURN(const Output version, Capture("fio --version 2>&1"));
  if (version.exit_code != 0) {
    return Refused("fio is not there: the streams have nothing to be compared with (apt-get install fio)");
  }
  const std::string name = version.text.substr(0, version.text.find('\n'));
  // One page more: fio aligns within what it allocates.
  constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
  if (FreeHugePages() >= bytes_max / kHugePageBytes + 2) {
    return Fio("", "--mem=shmhuge", absl::StrCat(name, " --mem=shmhuge"));
  }
  // glibc then advises the kernel to back malloc's mappings with transparent huge pages; fio has no flag for them.
  return Fio("GLIBC_TUNABLES=glibc.malloc.hugetlb=1 ", "--mem=malloc --iomem_align=2m",
             absl::StrCat(name, ", transparent huge pages"));
}

absl::StatusOr<StreamSpeed> Fio::Run(const StreamShape& shape, IoRequest::Kind kind, const std::string& path) const {
  const char* const verb = kind == IoRequest::Kind::kRead ? "read" : "write";
  // Scrambled buffers and a clock read per request would slow fio down.
  BALLAST_ASSIGN_OR_RETURN(
      const Output output,
      Capture(absl::StrCat(environment_, "fio --name=stream --ioengine=io_uring --direct=1 --rw=", verb,
                           " --bs=", shape.block_bytes, " --iodepth=", shape.depth, " ", memory_,
                           " --size=", shape.bytes, " --filename=", Quoted(path),
                           " --scramble_buffers=0 --gtod_reduce=1 --thread --output-format=json")));
  if (output.exit_code != 0) return Refused(absl::StrCat("fio ended with ", output.exit_code, ": ", output.text));
  try {
    // Warnings may precede the object.
    const YAML::Node job = YAML::Load(output.text.substr(output.text.find('{')))["jobs"][0];  // JSON is YAML
    if (job["error"].as<int>() != 0) return Refused(absl::StrCat("fio: error ", job["error"].as<int>()));
    if (job[verb]["io_bytes"].as<uint64_t>() != shape.bytes) {
      return Refused(absl::StrCat("fio moved ", job[verb]["io_bytes"].as<uint64_t>(), " of ", shape.bytes, " bytes"));
    }
    const double gb_per_s = job[verb]["bw_bytes"].as<double>() / 1e9;
    const double cpu = (job["usr_cpu"].as<double>() + job["sys_cpu"].as<double>()) / 100;  // of its run time
    return StreamSpeed{.gb_per_s = gb_per_s, .cpu_seconds_per_gb = cpu / gb_per_s};
  } catch (const std::exception& error) {
    return Refused(absl::StrCat("fio's answer was not understood: ", error.what(), "\n", output.text));
  }
}

absl::StatusOr<StreamComparison> StreamComparison::Make(const StreamShape& shape, const std::string& path) {
  const uint64_t memory = shape.depth * shape.block_bytes;
  BALLAST_ASSIGN_OR_RETURN(Fio fio, Fio::Find(memory));
  StreamComparison streams(shape, std::move(fio));
  BALLAST_ASSIGN_OR_RETURN(streams.file_, storage::SystemDisk()->Open(path, storage::Disk::Mode::kEmptied));
  if (const std::string& why = streams.file_->buffered_because(); !why.empty()) {
    return Refused(absl::StrCat(why, ": the page cache would be measured; give a --directory on a disk"));
  }
  BALLAST_RETURN_IF_ERROR(streams.file_->Reserve(0, shape.bytes));
  BALLAST_ASSIGN_OR_RETURN(streams.buffers_, storage::Arena::Map(memory));
  BALLAST_ASSIGN_OR_RETURN(streams.queue_, storage::MakeIoQueue({.registered = streams.buffers_.bytes()}));
  BALLAST_RETURN_IF_ERROR(streams.Transfer(IoRequest::Kind::kWrite));
  return streams;
}

absl::Status StreamComparison::Round(IoRequest::Kind kind, bool ours_first) {
  if (ours_first) BALLAST_RETURN_IF_ERROR(Ours(kind));
  BALLAST_ASSIGN_OR_RETURN(const StreamSpeed theirs, fio_.Run(shape_, kind, file_->path()));
  theirs_.push_back(theirs);
  return ours_first ? absl::OkStatus() : Ours(kind);
}

void StreamComparison::Forget() {
  ours_.clear();
  theirs_.clear();
}

std::vector<double> StreamComparison::ratios() const {
  std::vector<double> ratios;
  for (size_t i = 0; i < ours_.size(); ++i) ratios.push_back(ours_[i].gb_per_s / theirs_[i].gb_per_s);
  return ratios;
}

absl::Status StreamComparison::Ours(IoRequest::Kind kind) {
  const double gb = static_cast<double>(shape_.bytes) / 1e9, cpu = CpuSeconds(), start = WallSeconds();
  BALLAST_RETURN_IF_ERROR(Transfer(kind));
  ours_.push_back({.gb_per_s = gb / (WallSeconds() - start), .cpu_seconds_per_gb = (CpuSeconds() - cpu) / gb});
  return absl::OkStatus();
}

absl::Status StreamComparison::Transfer(IoRequest::Kind kind) {
  uint64_t next = 0;
  // The next block, into the buffer that the tag names.
  const auto submit = [&](uint64_t buffer) {
    const uint64_t offset = std::exchange(next, next + shape_.block_bytes);
    return queue_->Submit({.kind = kind,
                           .file = file_.get(),
                           .offset = offset,
                           .buffer = buffers_.bytes().subspan(buffer * shape_.block_bytes, shape_.block_bytes),
                           .tag = buffer});
  };
  for (uint64_t i = 0; i < shape_.depth && next < shape_.bytes; ++i) BALLAST_RETURN_IF_ERROR(submit(i));
  std::vector<IoCompletion> completions;
  while (queue_->in_flight() > 0) {
    completions.clear();
    queue_->Reap(/*wait=*/true, &completions);
    for (const IoCompletion& completion : completions) {
      BALLAST_RETURN_IF_ERROR(completion.status);
      if (next < shape_.bytes) BALLAST_RETURN_IF_ERROR(submit(completion.tag));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<IoAlone> IoAlone::Make(uint64_t staging_bytes, const storage::BlockFile* file, uint64_t chunk_bytes) {
  IoAlone alone(file, chunk_bytes);
  const uint64_t memory = staging_bytes - storage::ChunkReader::kStagingBytes;
  alone.slots_ = std::min<uint64_t>(memory / chunk_bytes, storage::kIoRequestsMax);
  BALLAST_ASSIGN_OR_RETURN(alone.memory_, storage::Arena::Map(memory));
  BALLAST_ASSIGN_OR_RETURN(alone.queue_, storage::MakeIoQueue({.registered = alone.memory_.bytes()}));
  return alone;
}

absl::Status IoAlone::Run(uint64_t chunks) {
  uint64_t next = 0;
  std::vector<IoRequest> requests(slots_);
  const auto read_next = [&](uint64_t slot) {
    if (next == chunks) return absl::OkStatus();
    requests[slot] = {.kind = IoRequest::Kind::kRead,
                      .file = file_,
                      .offset = next++ * chunk_bytes_,
                      .buffer = memory_.bytes().subspan(slot * chunk_bytes_, chunk_bytes_),
                      .tag = slot};
    return queue_->Submit(requests[slot]);
  };
  for (uint64_t slot = 0; slot < slots_; ++slot) BALLAST_RETURN_IF_ERROR(read_next(slot));
  std::vector<IoCompletion> completions;
  while (queue_->in_flight() > 0) {
    completions.clear();
    queue_->Reap(/*wait=*/true, &completions);
    for (const IoCompletion& completion : completions) {
      BALLAST_RETURN_IF_ERROR(completion.status);
      IoRequest& request = requests[completion.tag];
      if (request.kind == IoRequest::Kind::kWrite) {
        BALLAST_RETURN_IF_ERROR(read_next(completion.tag));
      } else {
        request.kind = IoRequest::Kind::kWrite;
        BALLAST_RETURN_IF_ERROR(queue_->Submit(request));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace ballast::bench
