// A frame of `ballastctl top`: the cluster's view as lines of text. Pure functions; the terminal is elsewhere.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ballast/services/monitoring/cluster_view.h"
#include "ballast/services/tools/top/styled_line.h"

namespace ballast::services {

// Versions of jobs over the last minute.
class VersionHistory {
 public:
  void Add(const ClusterView& cluster, absl::Time now);
  // Over the last 15 s; nullopt before the second Add.
  std::optional<double> StepsPerMinute(const std::string& job) const;
  // Steps between the last Adds, oldest first.
  std::vector<double> Steps(const std::string& job) const;

 private:
  struct Sample {
    absl::Time time;
    int64_t version;
  };
  std::map<std::string, std::deque<Sample>> jobs_;
};

enum class JobOrder { kName, kRate, kVersion, kParameters };
inline constexpr int kJobOrders = 4;

struct TopLook {
  size_t columns = 120;
  std::optional<size_t> rows;  // none: as many as there are
  bool unicode = false;
  bool per_server = false;
  bool keys = false;  // names the keys in the last row
  JobOrder order = JobOrder::kName;
};

std::vector<StyledLine> DrawTop(const ClusterView& cluster, const VersionHistory& history, absl::Time now,
                                const TopLook& look);

// Parts of `whole`, stacked from the left, in `columns` columns with brackets. Each part of at least a column begins
// with its name.
struct BarPart {
  std::string name;
  double amount = 0;
  int style = kPlain;
};
StyledLine DrawBar(const std::vector<BarPart>& parts, double whole, size_t columns);

// Values as braille, two a column, or as one of " .:-=+*#" each without Unicode; the highest value fills the height.
std::string DrawSparkline(const std::vector<double>& values, size_t columns, bool unicode);

}  // namespace ballast::services
