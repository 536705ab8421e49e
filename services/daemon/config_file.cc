#include "ballast/services/daemon/config_file.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

// Keys with keys below them, as maps in the file.
constexpr absl::string_view kMaps[] = {"budget", "tls"};

std::string Where(const std::string& path, const YAML::Mark& mark) { return absl::StrCat(path, ":", mark.line + 1); }

// A list of `{path: ..., bytes: ...}` as flags spell it.
absl::StatusOr<std::string> DevicesText(const YAML::Node& list, const std::string& path) {
  std::vector<std::string> texts;
  for (const auto& item : list) {
    const std::string where = Where(path, item.Mark());
    if (!item.IsMap()) return BadConfig(absl::StrCat(where, ": budget.nvme: expected `path` and `bytes` of each disk"));
    std::map<std::string, std::string> fields;
    for (const auto& field : item) {
      const std::string name = field.first.Scalar();
      if ((name != "path" && name != "bytes") || !field.second.IsScalar()) {
        return BadConfig(absl::StrCat(Where(path, field.first.Mark()), ": budget.nvme: unknown key '", name,
                                      "'; expected path and bytes of each disk"));
      }
      if (!fields.emplace(name, field.second.Scalar()).second) {
        return BadConfig(
            absl::StrCat(Where(path, field.first.Mark()), ": budget.nvme: '", name, "' comes twice; keep one"));
      }
    }
    if (fields.size() != 2 || fields["path"].find(',') != std::string::npos) {
      return BadConfig(absl::StrCat(where, ": budget.nvme: expected a path without a comma and bytes of each disk"));
    }
    texts.push_back(absl::StrCat(fields["path"], "=", fields["bytes"]));
  }
  if (texts.empty()) return BadConfig(absl::StrCat(Where(path, list.Mark()), ": budget.nvme: the list is empty"));
  return absl::StrJoin(texts, ",");
}

// Adds the leaves of `map` under their dotted names.
absl::Status Collect(const YAML::Node& map, const std::string& prefix, const std::string& path, ConfigValues* out) {
  const std::vector<ConfigKey>& keys = ConfigKeys();
  for (const auto& entry : map) {
    const std::string name = prefix + entry.first.Scalar();
    const std::string where = Where(path, entry.first.Mark());
    if (entry.second.IsMap() && std::find(std::begin(kMaps), std::end(kMaps), name) != std::end(kMaps)) {
      BALLAST_RETURN_IF_ERROR(Collect(entry.second, name + ".", path, out));
      continue;
    }
    const auto key = std::find_if(keys.begin(), keys.end(), [&](const ConfigKey& known) { return known.name == name; });
    if (key == keys.end())
      return BadConfig(absl::StrCat(where, ": unknown key '", name, "'; expected one of ", KnownKeys()));
    if (name == "budget.nvme" && entry.second.IsSequence()) {
      BALLAST_ASSIGN_OR_RETURN(const std::string text, DevicesText(entry.second, path));
      if (out->insert({name, {text, where}}).second) continue;
      return BadConfig(absl::StrCat(where, ": key '", name, "' comes twice; keep one"));
    }
    if (!entry.second.IsScalar()) {
      return BadConfig(absl::StrCat(where, ": ", name, ": expected ", key->expected, ", got a ",
                                    entry.second.IsMap()        ? "map"
                                    : entry.second.IsSequence() ? "list"
                                                                : "null"));
    }
    if (!out->insert({name, {entry.second.Scalar(), where}}).second) {
      return BadConfig(absl::StrCat(where, ": key '", name, "' comes twice; keep one"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ConfigValues> ParseConfigFile(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return BadConfig(absl::StrCat(path, ": is a directory; expected a YAML file with keys ", KnownKeys()));
  }
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file.is_open() || file.bad()) {
    return BadConfig(absl::StrCat(path, ": cannot be read; expected a YAML file with keys ", KnownKeys()));
  }
  return ParseConfigText(text.str(), path);
}

absl::StatusOr<ConfigValues> ParseConfigText(const std::string& text, const std::string& path) {
  ConfigValues values;
  try {
    const YAML::Node root = YAML::Load(text);
    if (root.IsNull()) return values;
    if (!root.IsMap())
      return BadConfig(absl::StrCat(path, ":1: expected lines of `key: value`, with keys ", KnownKeys()));
    BALLAST_RETURN_IF_ERROR(Collect(root, "", path, &values));
  } catch (const YAML::Exception& error) {
    return BadConfig(absl::StrCat(Where(path, error.mark), ": not YAML: ", error.msg));
  }
  return values;
}

}  // namespace ballast::services
