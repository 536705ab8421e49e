// A small job on two servers in this process, and what is left of a server's data directory when it was killed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/services/state_server.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kBlock = 4096;  // of direct I/O
inline constexpr int kImageServers = 2;
inline constexpr int kImageSteps = 45;  // the log's ring goes round
inline constexpr char kImageJob[] = "job";

// What the step after kImageSteps has come to when the servers are killed.
enum class InFlight {
  kPrepared,    // on all servers; nobody has decided it
  kHalfPushed,  // every second slice; the servers were restarted once before
};

std::vector<services::TestTensor> ImageModel();
// Gradients of a step, or, of step 0, values.
services::Fill FillOf(int64_t step);
// Server 0 keeps all state in DRAM, server 1 most of it on NVMe.
services::StateServerOptions ImageServer(const std::string& directory, int server);
absl::StatusOr<std::unique_ptr<services::StateServer>> StartImageServer(const std::string& directory, int server);

// Trains with durability `step` on servers under `directory`, in folders "0" and "1", and kills this process.
[[noreturn]] void TrainAndDie(const std::string& directory, InFlight in_flight);
// Steps of one group until `end`, the first being its next.
absl::Status TrainTo(services::TrainerGroup& group, int64_t end);

// What a server knows of the job: its answer to GetJob, and all state of its chunks at the committed version.
struct JobSnapshot {
  v1::GetJobResponse job;
  std::vector<std::string> contents;  // by chunk, then working, master, moments
  // Empty, or the first thing that differs.
  std::string Difference(const JobSnapshot& other) const;
};
// The error with which the server refuses the job, if it does.
absl::StatusOr<JobSnapshot> TakeSnapshot(services::StateServer& server, const std::string& job = kImageJob);

// The files of a data directory, in memory.
struct FileImage {
  std::string path;  // in the directory
  std::string bytes;
  std::vector<uint64_t> written;  // offsets of 4 KiB blocks that are not all zero
  std::vector<uint64_t> headed;   // of these, those that begin with the log's magic
};

class DirectoryImage {
 public:
  explicit DirectoryImage(const std::string& directory);
  const std::vector<FileImage>& files() const { return files_; }
  const FileImage& file(const std::string& path) const;
  // Makes `directory` what it was: other files are removed, blocks that differ are rewritten.
  void Restore(const std::string& directory) const;
  static void RestoreFile(const FileImage& file, const std::string& directory);

 private:
  std::vector<FileImage> files_;
};

}  // namespace ballast
