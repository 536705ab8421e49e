#include "ballast/tests/fault/job_image.h"

#include <fcntl.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/tests/services/answer.h"
#include "ballast/tests/sim/random.h"

namespace ballast {
namespace {

namespace fs = std::filesystem;
using services::Answer;
using services::StateServer;
using services::TrainerGroup;

constexpr v1::Content kContents[] = {v1::CONTENT_WORKING, v1::CONTENT_MASTER, v1::CONTENT_MOMENT1, v1::CONTENT_MOMENT2};

absl::Status Train(const std::string& directory, InFlight in_flight) {
  std::vector<std::unique_ptr<StateServer>> servers(kImageServers);
  std::vector<StateServer*> borrowed(kImageServers);
  const auto start = [&]() -> absl::Status {
    for (int i = 0; i < kImageServers; ++i) {
      servers[i].reset();
      BALLAST_ASSIGN_OR_RETURN(servers[i], StartImageServer(absl::StrCat(directory, "/", i), i));
      borrowed[i] = servers[i].get();
    }
    return absl::OkStatus();
  };
  BALLAST_RETURN_IF_ERROR(start());
  v1::JobSpec spec = services::MakeSpec(kImageJob, ImageModel());
  spec.set_durability(v1::DURABILITY_STEP);
  auto group = std::make_unique<TrainerGroup>(borrowed, spec, 2);
  BALLAST_RETURN_IF_ERROR(group->Start());
  BALLAST_RETURN_IF_ERROR(TrainTo(*group, in_flight == InFlight::kPrepared ? kImageSteps : kImageSteps - 15));
  const uint32_t tensors = ImageModel().size();
  if (in_flight == InFlight::kHalfPushed) {
    BALLAST_RETURN_IF_ERROR(start());
    group = std::make_unique<TrainerGroup>(borrowed, spec, 3, /*epoch_counter=*/2);
    BALLAST_RETURN_IF_ERROR(group->Start());
    BALLAST_RETURN_IF_ERROR(TrainTo(*group, kImageSteps));
    for (uint32_t slice = 0; slice < group->plan().slices().size(); slice += 2) {
      BALLAST_RETURN_IF_ERROR(group->PushSlice(slice, v1::SLICE_KIND_GRADIENT, FillOf(group->step())));
    }
  } else {
    BALLAST_RETURN_IF_ERROR(
        group->PushAll(v1::SLICE_KIND_GRADIENT, services::AllTensors(tensors), FillOf(group->step())));
    BALLAST_RETURN_IF_ERROR(group->SealAll(services::UpdateHeader(tensors)).status());
  }
  if (servers[1]->Status().tiers(2).state_bytes() == 0) return absl::InternalError("no state of server 1 is on NVMe");
  if (servers[0]->Status().tiers(2).state_bytes() != 0) return absl::InternalError("state of server 0 is on NVMe");
  absl::SleepFor(absl::Milliseconds(300));  // flushes under way end, marks are written
  ::kill(::getpid(), SIGKILL);              // before the servers' destructors
  return absl::InternalError("survived SIGKILL");
}

absl::StatusOr<std::string> PullChunk(StateServer& server, const v1::PullRequest& request) {
  std::string bytes;
  Answer<uint32_t> answer;
  server.Pull(
      request, absl::Now() + absl::Seconds(30),
      [&bytes](uint64_t size, const services::AnswerRoom::Lease&) {
        bytes.resize(size);
        return absl::MakeSpan(reinterpret_cast<std::byte*>(bytes.data()), size);
      },
      answer.reply());
  BALLAST_RETURN_IF_ERROR(answer.Wait().status());
  return bytes;
}

}  // namespace

std::vector<services::TestTensor> ImageModel() {
  return {{"embed", "u0", 140000, 0}, {"norm", "u0", 100, 1}, {"weight", "u1", 300000, 0}, {"bias", "u1", 300, 1}};
}

services::Fill FillOf(int64_t step) {
  return [step](uint32_t tensor, uint64_t element) {
    const uint64_t bits = sim::Mix(element + (uint64_t{tensor} << 40) + (static_cast<uint64_t>(step) << 48));
    return static_cast<float>(static_cast<int64_t>(bits >> 40) - (1 << 23)) / static_cast<float>(1 << 23);
  };
}

services::StateServerOptions ImageServer(const std::string& directory, int server) {
  services::StateServerOptions options;
  options.data_directory = directory;
  options.server_id = absl::StrCat("s", server);
  options.staging_bytes = kMiB + storage::StateLayout().StateBytes(model::kChunkElementsMin);
  options.budget = {0, server == 0 ? 64 * kMiB : 4 * kMiB, 64 * kMiB};
  if (server == 1) {
    const std::string device = absl::StrCat(directory, "/", kImageDevice);
    fs::create_directories(device);
    options.nvme_devices = {{directory, 64 * kMiB}, {device, 32 * kMiB}};
    options.budget.nvme = 96 * kMiB;
  }
  return options;
}

absl::StatusOr<std::unique_ptr<StateServer>> StartImageServer(const std::string& directory, int server) {
  return StateServer::Start(ImageServer(directory, server));
}

absl::Status TrainTo(TrainerGroup& group, int64_t end) {
  const uint32_t tensors = ImageModel().size();
  while (group.step() <= end) {
    if (group.step() == 0) {
      BALLAST_RETURN_IF_ERROR(group.Initialise(FillOf(0)));
      continue;
    }
    BALLAST_RETURN_IF_ERROR(
        group.PushAll(v1::SLICE_KIND_GRADIENT, services::AllTensors(tensors), FillOf(group.step())));
    BALLAST_RETURN_IF_ERROR(group.Finish(services::UpdateHeader(tensors)).status());
  }
  return absl::OkStatus();
}

void TrainAndDie(const std::string& directory, InFlight in_flight) {
  std::fprintf(stderr, "%s\n", Train(directory, in_flight).ToString().c_str());
  std::_Exit(1);
}

std::string JobSnapshot::Difference(const JobSnapshot& other) const {
  if (job.committed() != other.job.committed()) {
    return absl::StrCat("step ", job.committed(), " against ", other.job.committed());
  }
  if (!google::protobuf::util::MessageDifferencer::Equals(job, other.job)) {
    return absl::StrCat("GetJob: ", job.ShortDebugString(), "\nagainst ", other.job.ShortDebugString());
  }
  if (contents.size() != other.contents.size()) return "numbers of chunks";
  for (size_t i = 0; i < contents.size(); ++i) {
    if (contents[i] != other.contents[i]) {
      return absl::StrCat("bits of ", v1::Content_Name(kContents[i % std::size(kContents)]), " of chunk ",
                          i / std::size(kContents), " of this server");
    }
  }
  return "";
}

absl::StatusOr<JobSnapshot> TakeSnapshot(StateServer& server, const std::string& job) {
  JobSnapshot snapshot;
  v1::GetJobRequest get;
  get.set_job(job);
  Answer<v1::GetJobResponse> answer;
  server.GetJob(get, answer.reply());
  BALLAST_ASSIGN_OR_RETURN(snapshot.job, answer.Wait());
  if (!snapshot.job.exists()) return absl::NotFoundError("the server does not know the job");
  BALLAST_ASSIGN_OR_RETURN(const model::EpochPlan plan, model::EpochPlan::Make(snapshot.job.open()));
  BALLAST_ASSIGN_OR_RETURN(const uint32_t member, plan.FindMember(server.server_id()));
  for (const model::Chunk& chunk : plan.layout().chunks()) {
    if (!plan.Has(member, chunk.index)) continue;
    for (const v1::Content content : kContents) {
      v1::PullRequest request;
      request.set_job(job);
      request.set_version(snapshot.job.committed());
      request.set_content(content);
      request.set_unit(chunk.unit);
      request.set_begin(chunk.range.begin);
      request.set_end(chunk.range.end);
      BALLAST_ASSIGN_OR_RETURN(snapshot.contents.emplace_back(), PullChunk(server, request));
    }
  }
  if (snapshot.job.state_lost()) return absl::InternalError("a job whose state is lost answered pulls");
  return snapshot;
}

DirectoryImage::DirectoryImage(const std::string& directory) {
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file()) continue;
    FileImage& file = files_.emplace_back();
    file.path = fs::relative(entry.path(), directory).string();
    std::ostringstream text;
    text << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    file.bytes = text.str();
    for (uint64_t at = 0; at < file.bytes.size(); at += kBlock) {
      const absl::string_view block = absl::string_view(file.bytes).substr(at, kBlock);
      if (block.find_first_not_of('\0') == absl::string_view::npos) continue;
      file.written.push_back(at);
      if (absl::StartsWith(block, "BALL")) file.headed.push_back(at);
    }
  }
}

const FileImage& DirectoryImage::file(const std::string& path) const {
  const auto found = std::find_if(files_.begin(), files_.end(), [&](const FileImage& f) { return f.path == path; });
  if (found == files_.end()) std::abort();
  return *found;
}

void DirectoryImage::Restore(const std::string& directory) const {
  std::set<std::string> known;
  for (const FileImage& file : files_) known.insert(file.path);
  fs::create_directories(directory);
  std::vector<fs::path> others;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file() && !known.contains(fs::relative(entry.path(), directory).string())) {
      others.push_back(entry.path());
    }
  }
  for (const fs::path& other : others) fs::remove(other);
  for (const FileImage& file : files_) RestoreFile(file, directory);
}

void DirectoryImage::RestoreFile(const FileImage& file, const std::string& directory) {
  const fs::path path = fs::path(directory) / file.path;
  fs::create_directories(path.parent_path());
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_GE(fd, 0) << path;
  ASSERT_EQ(::ftruncate(fd, static_cast<off_t>(file.bytes.size())), 0) << path;
  std::string found(kMiB, '\0');
  for (uint64_t at = 0; at < file.bytes.size(); at += found.size()) {
    const uint64_t bytes = std::min<uint64_t>(found.size(), file.bytes.size() - at);
    ASSERT_EQ(::pread(fd, found.data(), bytes, static_cast<off_t>(at)), static_cast<ssize_t>(bytes)) << path;
    for (uint64_t block = 0; block < bytes; block += kBlock) {
      const uint64_t size = std::min(kBlock, bytes - block);
      const char* wanted = file.bytes.data() + at + block;
      if (std::memcmp(found.data() + block, wanted, size) == 0) continue;
      ASSERT_EQ(::pwrite(fd, wanted, size, static_cast<off_t>(at + block)), static_cast<ssize_t>(size)) << path;
    }
  }
  ::close(fd);
}

}  // namespace ballast
