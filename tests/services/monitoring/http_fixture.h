// A client of the HTTP port that keeps no rules.
#pragma once

#include <string>

namespace ballast::services {

struct HttpAnswer {
  int status = 0;  // 0: none came
  std::string head, body;
};

// Sends `request` as it is, then reads until the end of the connection or a minute.
HttpAnswer Ask(const std::string& address, const std::string& request);
HttpAnswer Get(const std::string& address, const std::string& path);

}  // namespace ballast::services
