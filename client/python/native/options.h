// The options of a session as Python gives them: the session's own, and how its group and servers are reached.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "ballast/client/session_types.h"

namespace ballast::python {

struct OpenOptions : client::SessionOptions {
  OpenOptions();                     // Python's defaults
  std::vector<std::string> servers;  // "host:port"; empty: the embedded server
  int rank = 0;
  int world_size = 1;
  std::string host = "127.0.0.1";  // where this rank listens for the rest
};

// "working", "master", "moment1", "moment2", "moment3"; throws StatusError (BAD_CONFIG) for another.
client::Content ContentNamed(const std::string& name);
// Names what servers keep of a tensor: "" for its state, "working", "q8".
std::string NameOf(v1::Frozen frozen);

// Options, tensors and reports, as Python sees them.
void BindOptions(nanobind::module_& m);

}  // namespace ballast::python
