// What a scrub of a data directory found, and what it would do to a server that started on it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ballast::services {

// Worse is greater.
enum class Harm {
  kNone,           // nothing needs what is damaged
  kRepaired,       // a server's recovery makes it good, from the log or from a copy
  kJobRefused,     // a server would start and refuse the job
  kUnnoticed,      // a server would start, not see it, and go on with wrong state or none
  kServerRefused,  // a server would not start, and so do no harm
};

inline constexpr char kRebuildAdvice[] = "run `ballastctl verify --rebuild`";

struct Finding {
  Harm harm = Harm::kNone;
  std::string job;  // empty: of no one job
  std::string what;
  std::string file;
  uint64_t offset = 0;  // in it; 0 where that says nothing
  std::string expected;
  std::string found;
  std::string advice;
};

struct ScrubCounts {
  uint64_t jobs = 0;
  uint64_t durable_jobs = 0;
  uint64_t extents = 0;
  uint64_t extent_bytes = 0;
  uint64_t log_records = 0;
  uint64_t payloads_needed = 0;
  uint64_t payload_bytes = 0;
  uint64_t payloads_not_needed = 0;  // older than their chunk's durable version, or overtaken: not read
  uint64_t torn_batches = 0;         // behind the end of a log: what a crash leaves, void
};

struct ScrubReport {
  std::string directory;
  std::vector<Finding> findings;
  ScrubCounts counts;

  Harm worst() const;
};

// Hears what is being done, every two seconds at most; what takes less is not told of.
using SayProgress = std::function<void(const std::string& line)>;

}  // namespace ballast::services
