// The module `ballast._native`: what a file beside binds, the exception, and functions that belong to no class.
// Everything blocking releases the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "ballast/client/python/native/options.h"
#include "ballast/client/python/native/python_reader.h"
#include "ballast/client/python/native/python_stash.h"
#include "ballast/client/python/native/sample.h"
#include "ballast/client/python/native/server.h"
#include "ballast/client/python/native/session_methods.h"
#include "ballast/client/python/native/status_error.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/mutexes.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/registry/registry_url.h"

namespace ballast::python {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

// The exception's class lives in Python, where `except` finds it: ballast.errors.Error(message, reason, code, details).
void Translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const StatusError& error) {
    try {
      const nb::object type = nb::module_::import_("ballast.errors").attr("Error");
      nb::dict details;
      for (const auto& [key, value] : error.details()) details[key.c_str()] = nb::str(value.data(), value.size());
      const nb::object value = type(error.what(), error.reason(), error.code(), details);
      PyErr_SetObject(type.ptr(), value.ptr());
    } catch (nb::python_error& interrupt) {  // Ctrl-C while we were away
      interrupt.restore();
    }
  }
}

// The reason why `servers` are neither addresses nor the URL of a registry; empty if they are.
std::string ServersError(const std::vector<std::string>& servers) {
  return std::string(registry::CheckServers(servers).message());
}

}  // namespace

// An embedded server speaks on stderr, of what needs a look alone: stdout is the script's. Levels: spdlog's names.
void SetLogLevel(const std::string& level) { spdlog::set_level(spdlog::level::from_str(level)); }

NB_MODULE(_native, m) {
  model::StopDeadlockSearch();
  spdlog::set_default_logger(spdlog::stderr_logger_mt("ballast"));
  spdlog::set_level(spdlog::level::warn);
  m.def("set_log_level", &SetLogLevel, "level"_a);
  m.def("servers_error", &ServersError, "servers"_a);
  m.def(
      "crc32c",
      [](const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& bytes) {
        const nb::gil_scoped_release release;
        return kernels::Crc32c({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
      },
      "bytes"_a);
  m.def(
      "samples",
      [](const std::vector<nb::ndarray<nb::c_contig, nb::device::cpu>>& tensors, const std::vector<uint64_t>& turns) {
        if (tensors.size() != turns.size()) throw nb::value_error("turns: one per tensor");
        const nb::gil_scoped_release release;
        std::vector<absl::Span<const std::byte>> bytes;
        for (const auto& tensor : tensors)
          bytes.emplace_back(static_cast<const std::byte*>(tensor.data()), tensor.nbytes());
        return SamplesOf(bytes, turns);
      },
      "tensors"_a, "turns"_a);
  m.attr("EVERY_LINE") = kEveryLine;
  m.attr("JOB_NAME_RULE") = model::kJobNameRule;
  m.def(
      "is_job_name", [](const std::string& name) { return model::IsJobName(name); }, "name"_a);
  nb::register_exception_translator(Translate);
  BindOptions(m);
  BindServer(m);
  BindSession(m);
  BindReader(m);
  BindStash(m);
}

}  // namespace ballast::python
