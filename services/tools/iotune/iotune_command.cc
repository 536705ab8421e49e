#include "ballast/services/tools/iotune/iotune_command.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ballast/services/monitoring/show.h"
#include "ballast/services/tools/iotune/machine_measure.h"
#include "ballast/storage/catalog/directory_format.h"
#include "ballast/storage/placement/profile_file.h"

namespace ballast::services {
namespace {

std::string ShowText(const Measured& measured) {
  Table table({"WHAT", "HOW", "GB/S"});
  for (const Measurement& row : measured.rows) {
    table.Add({row.what, row.how, absl::StrFormat("%.2f", static_cast<double>(row.bytes_per_s) / 1e9)});
  }
  std::string out = table.Show();
  absl::StrAppend(&out, "  append + fdatasync of 4096 bytes: p50 ", measured.profile.disk_append_p50_us, " us, p99 ",
                  measured.profile.disk_append_p99_us, " us\n");
  for (const std::string& note : measured.notes) absl::StrAppend(&out, "  ", note, "\n");
  return out;
}

std::string ShowJson(const Measured& measured, const std::string& path) {
  std::string profile, rows;
  for (const storage::ProfileKey& key : storage::ProfileKeys()) {
    absl::StrAppend(&profile, profile.empty() ? "" : ",", "\"", key.name, "\":", key.Of(measured.profile));
  }
  for (const Measurement& row : measured.rows) {
    absl::StrAppend(&rows, rows.empty() ? "" : ",", "{\"what\":", Quote(row.what), ",\"how\":", Quote(row.how),
                    ",\"bytes_per_s\":", row.bytes_per_s, "}");
  }
  return absl::StrCat("{\"profile\":{", profile, "},\"measurements\":[", rows, "],\"notes\":", QuoteAll(measured.notes),
                      ",\"written_to\":", Quote(path), "}\n");
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace

int RunIotune(const IotuneCommand& command) {
  const std::string path = command.out.empty() ? absl::StrCat(command.directory, "/ballast-profile.yaml") : command.out;
  const absl::Status usable = storage::CheckDirectoryFormat(command.directory);
  if (!usable.ok()) return Fail(usable);
  const auto say = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  const auto measured = Measure({.directory = command.directory,
                                 .duration = absl::Seconds(command.seconds),
                                 .hbm_device = command.hbm_device,
                                 .say = say});
  if (!measured.ok()) return Fail(measured.status());
  if (const absl::Status written = storage::WriteProfile(measured->profile, path); !written.ok()) return Fail(written);
  std::fputs((command.json ? ShowJson(*measured, path) : ShowText(*measured)).c_str(), stdout);
  if (!command.json) std::printf("  written to %s\n", path.c_str());
  return 0;
}

}  // namespace ballast::services
