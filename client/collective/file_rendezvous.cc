#include "ballast/client/collective/file_rendezvous.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

namespace fs = std::filesystem;

constexpr size_t kKeyBytesMax = 64;  // twice that as hex, and the generation, must fit a file name
constexpr size_t kValueBytesMax = size_t{1} << 20;
// Short beside a process's start, long beside a directory lookup. Polling works on network file systems too.
constexpr absl::Duration kPoll = absl::Milliseconds(5);

std::string FreshId() {
  std::random_device device;
  const auto word = [&] { return static_cast<uint64_t>(device()) << 32 | device(); };
  const uint64_t first = word(), second = word();
  return absl::StrCat(absl::Hex(first, absl::kZeroPad16), absl::Hex(second, absl::kZeroPad16));
}

// nullopt: not there (yet). Files appear whole, by rename.
std::optional<std::string> Read(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return std::nullopt;
  std::string text;
  char buffer[4096];
  for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), file)) > 0;) text.append(buffer, n);
  std::fclose(file);
  return text;
}

absl::Status Write(const std::string& path, absl::string_view text, int rank) {
  const std::string temporary = absl::StrCat(path, ".", rank, ".tmp");
  std::FILE* const file = std::fopen(temporary.c_str(), "we");
  bool ok = file != nullptr;
  if (ok && !text.empty()) ok = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file != nullptr) ok = std::fclose(file) == 0 && ok;
  ok = ok && std::rename(temporary.c_str(), path.c_str()) == 0;
  if (ok) return absl::OkStatus();
  return model::Error(absl::StatusCode::kInternal, model::kIo,
                      absl::StrCat("cannot write ", path, ": ", std::strerror(errno)));
}

std::vector<std::string> Words(const std::optional<std::string>& text) {
  if (!text.has_value()) return {};
  return absl::StrSplit(*text, ' ');
}

std::string RankNames(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

}  // namespace

FileRendezvous::FileRendezvous(FileRendezvousOptions options, RankLock lock)
    : options_(std::move(options)), lock_(std::move(lock)) {}

std::string FileRendezvous::Path(absl::string_view name) const { return absl::StrCat(options_.directory, "/", name); }

absl::StatusOr<std::unique_ptr<FileRendezvous>> FileRendezvous::Join(const FileRendezvousOptions& options) {
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadConfig,
        absl::StrCat("rank ", options.rank, " of ", options.world_size, ": expected 0 <= rank < world size"));
  }
  FileRendezvousOptions absolute = options;
  std::error_code error;
  fs::create_directories(options.directory, error);
  // One spelling, since the process's table of locks goes by path.
  if (!error) absolute.directory = fs::canonical(options.directory, error).string();
  if (error) {
    return model::Error(absl::StatusCode::kInternal, model::kIo,
                        absl::StrCat("rendezvous directory '", options.directory, "' cannot be used: ", error.message(),
                                     "; give one that every rank may write to"));
  }
  auto lock = RankLock::Take(absl::StrCat(absolute.directory, "/rank-", options.rank, ".lock"));
  if (!lock.ok()) return model::Annotate(lock.status(), absl::StrCat("rank ", options.rank));
  std::unique_ptr<FileRendezvous> joined(new FileRendezvous(std::move(absolute), *std::move(lock)));
  BALLAST_RETURN_IF_ERROR(options.rank == 0 ? joined->Gather() : joined->Answer());
  return joined;
}

// Rank 0: steps 1 and 3.
absl::Status FileRendezvous::Gather() {
  const absl::Time deadline = absl::Now() + options_.timeout;
  generation_ = FreshId();
  BALLAST_RETURN_IF_ERROR(Write(Path("invitation"), generation_, 0));
  std::vector<std::string> nonces(options_.world_size);
  nonces[0] = generation_;
  for (;;) {
    std::vector<int> missing;
    for (int rank = 1; rank < options_.world_size; ++rank) {
      const std::vector<std::string> answer = Words(Read(Path(absl::StrCat("answer-", rank))));
      if (answer.size() != 3 || answer[0] != generation_) {
        missing.push_back(rank);
        continue;
      }
      nonces[rank] = answer[1];
      int world_size = 0;
      if (!absl::SimpleAtoi(answer[2], &world_size) || world_size != options_.world_size) {
        const std::string message = absl::StrCat("rank 0 was started with world size ", options_.world_size, ", rank ",
                                                 rank, " with ", answer[2], "; start all ranks with the same");
        BALLAST_RETURN_IF_ERROR(Write(Path("start"), absl::StrCat("refused ", answer[1], " ", message), 0));
        return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig, message);
      }
    }
    if (missing.empty()) break;
    if (absl::Now() >= deadline) {
      return model::Error(
          absl::StatusCode::kDeadlineExceeded, model::kRankMissing,
          absl::StrCat(RankNames(missing), " of ", options_.world_size, " did not come to ", options_.directory,
                       " within ", absl::FormatDuration(options_.timeout), "; start every rank with this directory"));
    }
    absl::SleepFor(kPoll);
  }
  RemoveOldValues();
  return Write(Path("start"), absl::StrCat("joined ", absl::StrJoin(nonces, " ")), 0);
}

// Rank r > 0: step 2, and the wait for step 3.
absl::Status FileRendezvous::Answer() {
  const absl::Time deadline = absl::Now() + options_.timeout;
  const std::string nonce = FreshId();
  const size_t own = static_cast<size_t>(options_.rank);
  for (;;) {
    const std::optional<std::string> invitation = Read(Path("invitation"));
    if (invitation.has_value() && *invitation != generation_) {
      generation_ = *invitation;
      BALLAST_RETURN_IF_ERROR(Write(Path(absl::StrCat("answer-", options_.rank)),
                                    absl::StrCat(generation_, " ", nonce, " ", options_.world_size), options_.rank));
    }
    const std::vector<std::string> start = Words(Read(Path("start")));
    if (start.size() > own + 1 && start[0] == "joined" && start[own + 1] == nonce) {
      // The nonce was sealed under the generation that rank 0 names first.
      generation_ = start[1];
      return absl::OkStatus();
    }
    if (start.size() > 2 && start[0] == "refused" && start[1] == nonce) {
      return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                          absl::StrJoin(start.begin() + 2, start.end(), " "));
    }
    if (absl::Now() >= deadline) return Missing("the group's start");
    absl::SleepFor(kPoll);
  }
}

absl::Status FileRendezvous::Missing(absl::string_view waited_for) const {
  std::vector<int> missing;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    if (!RankLock::Holder(Path(absl::StrCat("rank-", rank, ".lock"))).has_value()) missing.push_back(rank);
  }
  const std::string who =
      missing.empty() ? "all ranks run, but not in one group (a lost rank cannot rejoin: start all of them again)"
                      : absl::StrCat(RankNames(missing), " of ", options_.world_size,
                                     missing.size() == 1 ? " does" : " do", " not run");
  return model::Error(
      absl::StatusCode::kDeadlineExceeded, model::kRankMissing,
      absl::StrCat("rank ", options_.rank, " waited for ", waited_for, " in ", options_.directory, ": ", who));
}

void FileRendezvous::RemoveOldValues() const {
  // The writers have lost their lock, or their place in the group. A file that cannot be removed is only clutter.
  std::error_code ignored;
  const std::string keep = absl::StrCat("value-", generation_);
  for (const auto& entry : fs::directory_iterator(options_.directory, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("value-", 0) == 0 && name.rfind(keep, 0) != 0) fs::remove(entry.path(), ignored);
  }
}

absl::StatusOr<std::string> FileRendezvous::ValuePath(absl::string_view key) const {
  if (key.empty() || key.size() > kKeyBytesMax) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("rendezvous key of ", key.size(), " bytes: expected 1 to ", kKeyBytesMax));
  }
  return Path(absl::StrCat("value-", generation_, "-", absl::BytesToHexString(key)));
}

absl::Status FileRendezvous::Set(absl::string_view key, absl::string_view value) {
  BALLAST_ASSIGN_OR_RETURN(const std::string path, ValuePath(key));
  if (value.size() > kValueBytesMax) {
    return model::Error(
        absl::StatusCode::kInvalidArgument, model::kBadRequest,
        absl::StrCat("rendezvous value of ", value.size(), " bytes: expected at most ", kValueBytesMax));
  }
  return Write(path, value, options_.rank);
}

absl::StatusOr<std::string> FileRendezvous::Get(absl::string_view key, absl::Time deadline) {
  BALLAST_ASSIGN_OR_RETURN(const std::string path, ValuePath(key));
  for (;;) {
    if (std::optional<std::string> value = Read(path); value.has_value()) return *std::move(value);
    if (absl::Now() >= deadline) return Missing(absl::StrCat("'", key, "'"));
    absl::SleepFor(kPoll);
  }
}

}  // namespace ballast::client
