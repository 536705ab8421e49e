// Findings of a scrub of a data directory, and their consequences for a server that started on the directory.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ballast::services {

// Worse is greater.
enum class Harm {
  kNone,           // nothing needs the damaged data
  kRepaired,       // a server's recovery repairs the damage, from the log or from a copy
  kJobRefused,     // a server would start and refuse the job
  kUnnoticed,      // a server would start without seeing the damage, and go on with wrong state or none
  kServerRefused,  // a server would not start, and so do no harm
};

inline constexpr char kRebuildAdvice[] = "run `ballastctl verify --rebuild`";

struct Finding {
  Harm harm = Harm::kNone;
  std::string job;  // empty: not of a single job
  std::string what;
  std::string file;
  uint64_t offset = 0;  // in the file; 0 where an offset says nothing
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
  uint64_t torn_batches = 0;         // behind the end of a log: left by a crash, void
};

struct ScrubReport {
  std::string directory;
  std::vector<Finding> findings;
  ScrubCounts counts;

  Harm worst() const;
};

// Hears of long work, at most every two seconds; shorter work is not reported.
using SayProgress = std::function<void(const std::string& line)>;

}  // namespace ballast::services
