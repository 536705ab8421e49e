// A small job on two servers in this process, and an image of a killed server's data directory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/services/server/state_server.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kBlock = 4096;  // of direct I/O
inline constexpr int kImageServers = 2;
inline constexpr int kImageSteps = 45;  // the log's ring goes round
inline constexpr char kImageJob[] = "job";
inline constexpr char kImageDevice[] = "device";  // below the second server's data directory, for some of its state

// Progress of the step after kImageSteps when the servers are killed.
enum class InFlight {
  kPrepared,    // on all servers, not decided
  kHalfPushed,  // every second slice is pushed; the servers were restarted once before
};

std::vector<services::TestTensor> ImageModel();
// Gradients of a step; values for step 0.
services::Fill FillOf(int64_t step);
// Server 0 keeps all state in DRAM, server 1 most of it on NVMe.
services::StateServerOptions ImageServer(const std::string& directory, int server);
absl::StatusOr<std::unique_ptr<services::StateServer>> StartImageServer(const std::string& directory, int server);

// Trains with durability `step` on servers under `directory`, in folders "0" and "1", and kills this process.
[[noreturn]] void TrainAndDie(const std::string& directory, InFlight in_flight);
// Runs the group's steps from its next step through `end`.
absl::Status TrainTo(services::TrainerGroup& group, int64_t end);

// A server's view of the job: its answer to GetJob, and all state of its chunks at the committed version.
struct JobSnapshot {
  v1::GetJobResponse job;
  std::vector<std::string> contents;  // by chunk, then working, master, moments
  // Empty, or the first difference.
  std::string Difference(const JobSnapshot& other) const;
};
// If the server refuses the job, returns the server's error.
absl::StatusOr<JobSnapshot> TakeSnapshot(services::StateServer& server, const std::string& job = kImageJob);

// The files of a data directory, in memory.
struct FileImage {
  std::string path;  // relative to the directory
  std::string bytes;
  std::vector<uint64_t> written;  // offsets of the 4 KiB blocks that are not all zero
  std::vector<uint64_t> headed;   // the written blocks that begin with the log's magic
};

class DirectoryImage {
 public:
  explicit DirectoryImage(const std::string& directory);
  const std::vector<FileImage>& files() const { return files_; }
  const FileImage& file(const std::string& path) const;
  bool has(const std::string& path) const {
    return std::any_of(files_.begin(), files_.end(), [&](const FileImage& file) { return file.path == path; });
  }
  // Brings `directory` back to the image: removes extra files and rewrites changed blocks.
  void Restore(const std::string& directory) const;
  static void RestoreFile(const FileImage& file, const std::string& directory);

 private:
  std::vector<FileImage> files_;
};

}  // namespace ballast
