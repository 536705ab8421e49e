// How status is written: columns, bytes, JSON strings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ballast::services {

std::string ShowBytes(uint64_t bytes);

// As a JSON string, and as a JSON list of strings.
std::string Quote(const std::string& text);
std::string QuoteAll(const std::vector<std::string>& texts);

// Columns as wide as their widest cell.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string Show() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace ballast::services
