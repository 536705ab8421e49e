#include "ballast/client/python/native/python_reader.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/client/python/native/arrays.h"
#include "ballast/client/python/native/interrupt.h"
#include "ballast/client/python/native/server.h"
#include "ballast/client/python/native/status_error.h"
#include "ballast/client/reader.h"
#include "ballast/proto/model/optimizer.h"

namespace ballast::python {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

using Release = nb::call_guard<nb::gil_scoped_release>;

// Calls block, and throw StatusError. Threads: one at a time.
class PythonReader {
 public:
  static std::unique_ptr<PythonReader> Open(const std::string& job, const std::vector<std::string>& servers,
                                            const model::Access& access, double timeout) {
    LetForkedChildrenExit();
    auto reader = std::make_unique<PythonReader>();
    client::ReaderOptions options;
    options.job = job;
    options.timeout = absl::Seconds(timeout);
    options.access = access;
    options.interrupted = reader->interrupt_.raised();
    reader->reader_ = reader->interrupt_.Watch([&] { return Take(client::Reader::Connect(options, servers)); });
    return reader;
  }
  void Close() { reader_ = nullptr; }
  int64_t Newest() const {
    return interrupt_.Watch([&] { return Take(Use().Newest()); });
  }
  std::pair<int64_t, uint64_t> TakeVersion() {
    const client::TakenVersion taken = interrupt_.Watch([&] { return Take(Use().Take()); });
    return {taken.version, taken.steps};
  }
  std::vector<std::pair<std::string, std::vector<uint64_t>>> tensors() const {
    std::vector<std::pair<std::string, std::vector<uint64_t>>> tensors;
    for (const client::ReadableTensor& tensor : Use().tensors()) tensors.emplace_back(tensor.name, tensor.shape);
    return tensors;
  }
  std::string working() const { return std::string(model::NameOf(Use().working())); }
  void Read(const std::vector<std::string>& names, const std::vector<Array>& to, bool masters) {
    if (names.size() != to.size()) throw nb::value_error("to: a tensor per name");
    std::vector<client::Reader::Place> places;
    for (size_t i = 0; i < names.size(); ++i) {
      places.push_back({names[i], {static_cast<std::byte*>(to[i].data()), to[i].nbytes()}});
    }
    const nb::gil_scoped_release release;
    interrupt_.Watch([&] { Check(Use().Read(places, masters)); });
  }
  // Also after a Ctrl-C, which is on its way to the caller.
  void LetGo() {
    if (reader_ != nullptr) reader_->LetGo();
  }

 private:
  client::Reader& Use() const {
    if (reader_ != nullptr && !interrupt_.raised()()) return *reader_;
    throw StatusError(
        model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest,
                     absl::StrCat(reader_ == nullptr ? "the reader was closed"
                                                     : "an interrupt (Ctrl-C) amid a call ended the reader",
                                  "; make another")));
  }

  const Interrupt interrupt_ = {};
  std::unique_ptr<client::Reader> reader_;
};

}  // namespace

void BindReader(nb::module_& m) {
  nb::class_<PythonReader>(m, "Reader")
      .def_static("open", &PythonReader::Open, "job"_a, "servers"_a, "access"_a, "timeout"_a, Release())
      .def("newest", &PythonReader::Newest, Release())
      .def("take", &PythonReader::TakeVersion, Release())
      .def_prop_ro("tensors", &PythonReader::tensors)
      .def_prop_ro("working", &PythonReader::working)
      .def("read", &PythonReader::Read, "names"_a, "to"_a, "masters"_a)
      .def("let_go", &PythonReader::LetGo, Release())
      .def("close", &PythonReader::Close, Release());
}

}  // namespace ballast::python
