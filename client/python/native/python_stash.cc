#include "ballast/client/python/native/python_stash.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <utility>

#include "ballast/client/python/native/stash/stash.h"
#include "ballast/client/python/native/status_error.h"

namespace ballast::python {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;
using stash::Stash;
using stash::StashCounters;
using stash::StashedPart;

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A Stash as Python holds it: a forked child leaves it to its parent, whose threads it needs.
class PythonStash {
 public:
  PythonStash(const std::string& path, uint64_t dram, uint64_t nvme, uint64_t staging, std::optional<int> gpu)
      : stash_(Take(Stash::Open(
            {.budget = {.hbm = 0, .dram = dram, .nvme = nvme}, .path = path, .staging_bytes = staging, .gpu = gpu}))) {}
  PythonStash(const PythonStash&) = delete;
  PythonStash& operator=(const PythonStash&) = delete;
  ~PythonStash() {
    if (!stash_->own()) new std::shared_ptr<Stash>(std::move(stash_));
  }
  Stash* operator->() const { return stash_.get(); }

 private:
  std::shared_ptr<Stash> stash_;
};

// The memory of a part as a tensor. The caller keeps the part while it uses the tensor.
using Tensor = nb::ndarray<nb::pytorch, uint8_t, nb::ndim<1>>;
Tensor Borrowed(absl::Span<std::byte> memory) { return Tensor(memory.data(), {memory.size()}, nb::handle()); }

}  // namespace

void BindStash(nb::module_& m) {
  // A script may end with a graph that waits for its backward pass: the graph keeps parts beyond the interpreter's end.
  nb::set_leak_warnings(false);
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<StashCounters>(m, "StashCounters")
      .def_ro("dram", &StashCounters::dram)
      .def_ro("nvme", &StashCounters::nvme)
      .def_ro("written", &StashCounters::written)
      .def_ro("read", &StashCounters::read)
      .def_ro("waited_seconds", &StashCounters::waited_seconds);
  nb::class_<StashedPart>(m, "StashedPart")
      .def(
          "take",
          [](StashedPart& part, const Bytes& to) {
            const absl::Span<std::byte> span(reinterpret_cast<std::byte*>(to.data()), to.size());
            const nb::gil_scoped_release release;
            Check(part.Take(span));
          },
          "to"_a)
      .def(
          "memory", [](const StashedPart& part) { return Borrowed(part.memory()); }, nb::rv_policy::reference)
      .def("finish", &StashedPart::Finish, Release())
      .def(
          "hold",
          [](StashedPart& part) {
            absl::Span<const std::byte> held;
            {
              const nb::gil_scoped_release release;
              held = Take(part.Hold());
            }
            return Borrowed({const_cast<std::byte*>(held.data()), held.size()});
          },
          nb::rv_policy::reference)
      .def("release", &StashedPart::Release, Release())
      .def_prop_ro("ready", &StashedPart::ready);
  nb::class_<PythonStash>(m, "Stash")
      .def(nb::init<const std::string&, uint64_t, uint64_t, uint64_t, std::optional<int>>(), "path"_a, "dram"_a,
           "nvme"_a, "staging"_a, "gpu"_a.none(), Release())
      .def(
          "put",
          [](const PythonStash& stash, const ConstBytes& bytes) {
            const absl::Span<const std::byte> span(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
            const nb::gil_scoped_release release;
            return Take(stash->Put(span));
          },
          "bytes"_a)
      .def(
          "begin",
          [](const PythonStash& stash, uint64_t bytes) {
            const nb::gil_scoped_release release;
            return Take(stash->Begin(bytes));
          },
          "bytes"_a)
      .def_prop_ro("counters", [](const PythonStash& stash) { return stash->counters(); })
      .def_prop_ro("buffered_because", [](const PythonStash& stash) { return stash->buffered_because(); });
  m.attr("STASH_PART_BYTES") = stash::kPartBytesMax;
}

}  // namespace ballast::python
