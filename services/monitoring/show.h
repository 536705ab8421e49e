// How status is written: columns, bytes, JSON strings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "ballast/v1/admin_service.pb.h"

namespace ballast::services {

std::string ShowBytes(uint64_t bytes);

// Control characters, marks of direction and invalid UTF-8 become '?': a text from a server must neither steer the
// terminal nor begin a line.
std::string Printable(absl::string_view text);

// "none", "step" or "every-K"; `unknown` for a job that is not opened yet, or not there any more.
std::string ShowDurability(const v1::JobStatus& job, const std::string& unknown);

// As a JSON string, and as a JSON list of strings. Invalid UTF-8 becomes U+FFFD.
std::string Quote(const std::string& text);
std::string QuoteAll(const std::vector<std::string>& texts);

// Columns as wide as their widest cell. Cells are made Printable.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void Add(std::vector<std::string> row);
  bool empty() const { return rows_.size() == 1; }
  std::string Show() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace ballast::services
