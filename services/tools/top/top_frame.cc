#include "ballast/services/tools/top/top_frame.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ballast/services/monitoring/show.h"

namespace ballast::services {
namespace {

constexpr absl::Duration kRateSpan = absl::Seconds(15);
constexpr size_t kSamplesKept = 61;
constexpr std::array<const char*, kJobOrders> kOrderNames = {"name", "rate", "version", "parameters"};

struct TierView {
  std::string tier;
  uint64_t used = 0, capacity = 0;
  std::vector<std::pair<std::string, uint64_t>> parts;
};

void AddTier(const v1::TierStatus& tier, std::vector<TierView>* tiers) {
  auto view = std::find_if(tiers->begin(), tiers->end(), [&](const TierView& t) { return t.tier == tier.tier(); });
  if (view == tiers->end()) view = tiers->insert(tiers->end(), TierView{tier.tier()});
  view->used += tier.used_bytes();
  view->capacity += tier.capacity_bytes();
  for (const v1::TierPart& part : tier.parts()) {
    auto at =
        std::find_if(view->parts.begin(), view->parts.end(), [&](const auto& p) { return p.first == part.part(); });
    if (at == view->parts.end()) at = view->parts.insert(at, {part.part(), 0});
    at->second += part.bytes();
  }
}

void DrawTiers(const std::vector<TierView>& tiers, size_t columns, std::vector<StyledLine>* lines) {
  for (const TierView& tier : tiers) {
    if (tier.capacity == 0 && tier.used == 0) continue;
    const double whole = static_cast<double>(std::max(tier.capacity, tier.used));
    const std::string numbers = absl::StrFormat(" %3.0f %%  %s of %s", 100 * static_cast<double>(tier.used) / whole,
                                                ShowBytes(tier.used), ShowBytes(tier.capacity));
    constexpr size_t kNumbersColumns = 34;
    std::vector<BarPart> parts;
    if (tier.parts.empty()) parts.push_back({"used", static_cast<double>(tier.used), kKinds});  // of an older server
    for (size_t i = 0; i < tier.parts.size(); ++i) {
      parts.push_back({tier.parts[i].first, static_cast<double>(tier.parts[i].second), kKinds + static_cast<int>(i)});
    }
    StyledLine line;
    line.Add(absl::StrFormat("%-5s", tier.tier), kBold);
    const size_t bar = std::max<size_t>(columns, 60) - line.width() - kNumbersColumns;
    const StyledLine stack = DrawBar(parts, whole, bar);
    line.Append(stack).Add(numbers);
    lines->push_back(std::move(line));
  }
}

void DrawServers(const ClusterView& cluster, size_t columns, std::vector<StyledLine>* lines) {
  for (const ServerView& server : cluster.servers) {
    StyledLine line;
    if (!server.error.ok()) {
      lines->push_back(line.Add(server.address, kBold).Add("  down", kBad));
      continue;
    }
    const v1::GetServerStatusResponse& s = server.status;
    line.Add(absl::StrCat(server.address, "  ", s.server_id()), kBold);
    line.Add(absl::StrFormat("  %s  up %.0f s  %s  %s", s.state(), s.uptime_seconds(), s.version(), s.io_backend()),
             kQuiet);
    lines->push_back(std::move(line));
    std::vector<TierView> tiers;
    for (const v1::TierStatus& tier : s.tiers()) AddTier(tier, &tiers);
    DrawTiers(tiers, columns, lines);
  }
}

std::string Versions(const JobView& job) {
  return job.committed_min == job.committed_max ? absl::StrCat(job.committed_max)
                                                : absl::StrCat(job.committed_min, "..", job.committed_max);
}

std::vector<const JobView*> Sorted(const ClusterView& cluster, const VersionHistory& history, JobOrder order) {
  std::vector<const JobView*> jobs;
  for (const JobView& job : cluster.jobs) jobs.push_back(&job);
  const auto key = [&](const JobView* job) -> double {
    switch (order) {
      case JobOrder::kName:
        return 0;
      case JobOrder::kRate:
        return -history.StepsPerMinute(job->name).value_or(0);
      case JobOrder::kVersion:
        return -static_cast<double>(job->committed_max);
      case JobOrder::kParameters:
        return -static_cast<double>(job->parameters);
    }
    return 0;
  };
  std::stable_sort(jobs.begin(), jobs.end(), [&](const JobView* a, const JobView* b) { return key(a) < key(b); });
  return jobs;
}

// 467.8K, 7.0B: as people name models.
std::string ShowParameters(uint64_t parameters) {
  constexpr std::array<const char*, 4> kUnits = {"K", "M", "B", "T"};
  if (parameters < 1000) return absl::StrCat(parameters);
  double value = static_cast<double>(parameters) / 1000;
  size_t unit = 0;
  for (; value >= 999.95 && unit + 1 < kUnits.size(); ++unit) value /= 1000;
  return absl::StrFormat("%.1f%s", value, kUnits[unit]);
}

// Widths of the columns of jobs. Below 100 columns the sparkline and the durability yield to what binds the steps.
struct Columns {
  explicit Columns(size_t all)
      : narrow(all < 100),
        spark(narrow      ? 0
              : all < 130 ? 12
                          : 30),
        words(all >= 150),
        bound(words ? 31 : 17) {
    const size_t fixed = (narrow ? 45 : 54) + spark + bound;
    name = std::clamp<size_t>(all > fixed ? all - fixed : 0, 6, 40);
  }
  bool narrow;
  size_t spark;
  bool words;  // stages by words, not by their short names
  size_t bound, name;
};

StyledLine DrawJob(const JobView& job, const VersionHistory& history, const Columns& columns, bool unicode) {
  const std::optional<double> rate = history.StepsPerMinute(job.name);
  StyledLine line;
  const bool bad = job.state_lost || !job.problems.empty();
  line.Add(CutTo(Printable(job.name), columns.name), bad ? kBad : kBold).PadTo(columns.name);
  line.Add(absl::StrFormat("%s %9s %9s  ", bad ? "!" : " ", Versions(job),
                           rate.has_value() ? absl::StrFormat("%.1f", *rate) : "-"));
  const size_t behind = line.width() + columns.spark;
  line.Add(DrawSparkline(history.Steps(job.name), columns.spark, unicode)).PadTo(behind);
  const std::string bound = job.bound.has_value() ? ShowBound(*job.bound, columns.words) : "-";
  line.Add("  ").Add(CutTo(Printable(bound), columns.bound)).PadTo(behind + 2 + columns.bound);
  line.Add(absl::StrFormat(" %5d %7s", job.world_size, ShowParameters(job.parameters)));
  if (!columns.narrow) line.Add(absl::StrFormat(" %8s", job.durability));
  return line.Add(absl::StrFormat(" %5d", job.servers.size()));
}

void DrawJobs(const ClusterView& cluster, const VersionHistory& history, const TopLook& look, size_t rows,
              std::vector<StyledLine>* lines) {
  const Columns columns(look.columns);
  StyledLine header;
  header.Add("JOB").PadTo(columns.name).Add(absl::StrFormat("  %9s %9s  ", "VERSION", "STEPS/MIN"));
  const size_t behind = header.width() + columns.spark;
  if (columns.spark > 0) header.Add("LAST MINUTE").PadTo(behind);
  header.Add("  BOUND BY").PadTo(behind + 2 + columns.bound);
  header.Add(absl::StrFormat(" %5s %7s", "RANKS", "PARAMS"));
  if (!columns.narrow) header.Add(absl::StrFormat(" %8s", "DURABLE"));
  header.Add(absl::StrFormat(" %5s", "ON"));
  StyledLine reversed;
  lines->push_back(reversed.Add(header.Show(look.columns, false), kReversed).PadTo(look.columns));
  if (cluster.jobs.empty()) {
    StyledLine none;
    lines->push_back(none.Add("no job", kQuiet));
    return;
  }
  const std::vector<const JobView*> jobs = Sorted(cluster, history, look.order);
  const size_t shown = jobs.size() <= rows ? jobs.size() : std::max<size_t>(rows, 2) - 1;
  for (size_t i = 0; i < shown; ++i) lines->push_back(DrawJob(*jobs[i], history, columns, look.unicode));
  if (shown == jobs.size()) return;
  StyledLine more;
  lines->push_back(
      more.Add(absl::StrCat("and ", jobs.size() - shown, " more jobs; a taller terminal shows them"), kQuiet));
}

StyledLine DrawVerdict(const ClusterView& cluster, absl::Time now, size_t columns) {
  const bool healthy = cluster.problems.empty();
  const std::string time = absl::FormatTime("%H:%M:%S", now, absl::LocalTimeZone());
  StyledLine line;
  line.Add("Ballast  ", kBold).Add(healthy ? "HEALTHY" : "DEGRADED", healthy ? kGood : kBad);
  line.Add(absl::StrCat("  ", cluster.servers.size(), " server(s), ", cluster.jobs.size(), " job(s)"));
  if (line.width() + time.size() < columns) line.PadTo(columns - time.size());
  return line.Add(time, kQuiet);
}

}  // namespace

void VersionHistory::Add(const ClusterView& cluster, absl::Time now) {
  std::map<std::string, std::deque<Sample>> jobs;
  for (const JobView& job : cluster.jobs) {
    std::deque<Sample>& samples = jobs[job.name] = std::move(jobs_[job.name]);
    samples.push_back({now, job.committed_max});
    if (samples.size() > kSamplesKept) samples.pop_front();
  }
  jobs_ = std::move(jobs);
}

std::optional<double> VersionHistory::StepsPerMinute(const std::string& job) const {
  const auto found = jobs_.find(job);
  if (found == jobs_.end() || found->second.size() < 2) return std::nullopt;
  const Sample& last = found->second.back();
  const auto first = std::find_if(found->second.begin(), found->second.end(),
                                  [&](const Sample& s) { return last.time - s.time <= kRateSpan; });
  const Sample& from = &*first == &last ? *std::prev(first) : *first;
  const double minutes = absl::ToDoubleMinutes(last.time - from.time);
  if (minutes <= 0) return std::nullopt;
  return static_cast<double>(std::max<int64_t>(0, last.version - from.version)) / minutes;
}

std::vector<double> VersionHistory::Steps(const std::string& job) const {
  std::vector<double> steps;
  const auto found = jobs_.find(job);
  if (found == jobs_.end()) return steps;
  for (size_t i = 1; i < found->second.size(); ++i) {
    const int64_t step = found->second[i].version - found->second[i - 1].version;
    steps.push_back(static_cast<double>(std::max<int64_t>(0, step)));
  }
  return steps;
}

StyledLine DrawBar(const std::vector<BarPart>& parts, double whole, size_t columns) {
  StyledLine line;
  line.Add("[");
  const size_t inner = std::max<size_t>(columns, 3) - 2;
  double sum = 0;
  for (const BarPart& part : parts) {
    sum += part.amount;
    const auto end = std::min(inner, static_cast<size_t>(std::lround(sum / whole * static_cast<double>(inner))));
    if (end + 1 <= line.width()) continue;
    const size_t cells = end + 1 - line.width();
    std::string label = CutTo(Printable(part.name), cells);
    label.append(cells - WidthOf(label), '.');
    line.Add(label, part.style);
  }
  return line.PadTo(inner + 1).Add("]");
}

std::string DrawSparkline(const std::vector<double>& values, size_t columns, bool unicode) {
  const size_t count = std::min(values.size(), columns * (unicode ? 2 : 1));
  const double most = count == 0 ? 0 : *std::max_element(values.end() - static_cast<ptrdiff_t>(count), values.end());
  const auto level = [&](size_t i, int levels) {  // of the i-th shown value
    const double value = values[values.size() - count + i];
    return most > 0 ? static_cast<int>(std::ceil(value / most * levels)) : 0;
  };
  std::string out;
  if (!unicode) {
    constexpr absl::string_view kLevels = " .:-=+*#";
    for (size_t i = 0; i < count; ++i) out.push_back(kLevels[static_cast<size_t>(level(i, 7))]);
    return out;
  }
  // Dots of a braille character from below, left and right.
  constexpr std::array<int, 5> kLeft = {0, 0x40, 0x44, 0x46, 0x47}, kRight = {0, 0x80, 0xa0, 0xb0, 0xb8};
  for (size_t i = 0; i < count; i += 2) {
    const int dots = kLeft[level(i, 4)] | (i + 1 < count ? kRight[level(i + 1, 4)] : 0);
    const int code = 0x2800 + dots;
    out.push_back(static_cast<char>(0xe0 | code >> 12));
    out.push_back(static_cast<char>(0x80 | (code >> 6 & 0x3f)));
    out.push_back(static_cast<char>(0x80 | (code & 0x3f)));
  }
  return out;
}

std::vector<StyledLine> DrawTop(const ClusterView& cluster, const VersionHistory& history, absl::Time now,
                                const TopLook& look) {
  std::vector<StyledLine> lines;
  lines.push_back(DrawVerdict(cluster, now, look.columns));
  for (const std::string& problem : cluster.problems) {
    StyledLine line;
    lines.push_back(line.Add(absl::StrCat("! ", problem), kBad));
    if (look.rows.has_value() && lines.size() > *look.rows / 4) break;
  }
  lines.emplace_back();
  if (look.per_server) {
    DrawServers(cluster, look.columns, &lines);
  } else {
    std::vector<TierView> tiers;
    for (const ServerView& server : cluster.servers) {
      for (const v1::TierStatus& tier : server.status.tiers()) AddTier(tier, &tiers);
    }
    DrawTiers(tiers, look.columns, &lines);
  }
  lines.emplace_back();
  std::vector<StyledLine> waits;
  for (const JobView& job : cluster.jobs) {
    std::vector<std::string> sentences = job.waits;
    if (std::string copies = ShowCopies(job); !copies.empty()) sentences.insert(sentences.begin(), std::move(copies));
    for (const std::string& sentence : sentences) {
      StyledLine line;
      waits.push_back(line.Add(absl::StrCat("~ ", job.name, ": ", sentence), kWarn));
    }
  }
  const size_t footer = look.keys ? 1 : 0;
  size_t rows = cluster.jobs.size();
  if (look.rows.has_value()) {
    const size_t left = *look.rows > lines.size() + 1 + footer ? *look.rows - lines.size() - 1 - footer : 1;
    waits.resize(std::min(waits.size(), left / 3));
    rows = left - waits.size();
  }
  DrawJobs(cluster, history, look, rows, &lines);
  lines.insert(lines.end(), waits.begin(), waits.end());
  if (!look.keys) return lines;
  if (look.rows.has_value()) lines.resize(std::max<size_t>(*look.rows, 1) - 1);
  StyledLine keys;
  lines.push_back(keys.Add(absl::StrCat("q quit   s sort by ", kOrderNames[static_cast<size_t>(look.order)], "   1 ",
                                        look.per_server ? "all servers together" : "each server"),
                           kQuiet));
  return lines;
}

}  // namespace ballast::services
