// All files below a directory, for tests that nothing of them changes.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>

namespace ballast {

// Paths and bytes; of a directory the path alone.
inline std::map<std::string, std::string> ContentOf(const std::string& directory) {
  std::map<std::string, std::string> content;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    std::string& bytes = content[entry.path().string()];
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(file), {});
  }
  return content;
}

}  // namespace ballast
