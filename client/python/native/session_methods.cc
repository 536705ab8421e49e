#include "ballast/client/python/native/session_methods.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "ballast/client/python/native/arrays.h"
#include "ballast/client/python/native/kept.h"
#include "ballast/client/python/native/options.h"
#include "ballast/client/python/native/python_session.h"
#include "ballast/client/python/native/server.h"
#include "ballast/client/python/native/status_error.h"

namespace ballast::python {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

// Memory of the session's tensors. A parameter that lives on the servers alone is None.
std::vector<client::TensorMemory> CheckedMemory(const PythonSession& session, const MaybeArrays& gradients,
                                                const MaybeArrays& parameters) {
  const std::vector<std::optional<uint64_t>> elements = ElementsOf(gradients, parameters);
  {
    const nb::gil_scoped_release release;
    session.CheckElements(elements);
  }
  return MemoryOf(gradients, parameters);
}

// Calls `ready` with a list of indices.
void Tell(const nb::object& ready, absl::Span<const size_t> tensors) {
  const nb::gil_scoped_acquire lock;
  try {
    nb::list indices;
    for (const size_t tensor : tensors) indices.append(tensor);
    ready(indices);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("ballast: a step's ready");
  }
}

// Calls `source` for the values of a tensor, and keeps them in `given`. Throws std::runtime_error if `source` raises.
client::TensorMemory Given(const nb::object& source, size_t tensor, std::optional<Array>* given) {
  const nb::gil_scoped_acquire lock;
  std::string why = "no tensor came";
  try {
    *given = nb::cast<Array>(source(tensor));
    client::TensorMemory memory;
    memory.parameter = static_cast<std::byte*>((*given)->data());
    memory.parameter_dtype = DtypeOf((*given)->dtype());
    return memory;
  } catch (nb::python_error& error) {
    why = nb::str(error.value()).c_str();
  } catch (const nb::cast_error&) {
  }
  throw std::runtime_error(absl::StrCat("no values came of tensor ", tensor, ": ", why));
}

// The tensors that `to` refers to live until the pull was awaited.
uint64_t StartPull(PythonSession& session, const std::vector<size_t>& which, const std::vector<Array>& to, bool whole) {
  std::vector<PythonSession::Place> places;
  for (const Array& array : to) {
    PythonSession::Place& place = places.emplace_back();
    const bool coded = array.dtype() == nb::dtype<uint8_t>();
    place = {static_cast<std::byte*>(array.data()),
             coded ? kernels::Dtype::kE4m3Blocks : DtypeOf(array.dtype()),
             array.size(),
             {}};
    for (size_t i = 0; i < array.ndim(); ++i) place.shape.push_back(array.shape(i));
  }
  const std::shared_ptr<void> kept = Kept(MaybeArrays(to.begin(), to.end()));
  const nb::gil_scoped_release release;
  return session.StartPull(which, places, whole, kept);
}

// let_go: the gradients' memory is kept until servers have it. Else the caller keeps it, until the step is over.
void PushEarly(PythonSession& session, size_t unit, const MaybeArrays& gradients, bool let_go) {
  std::vector<client::TensorMemory> memory(gradients.size());
  std::vector<std::optional<uint64_t>> elements(gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].has_value()) continue;
    memory[i].gradient = static_cast<const std::byte*>(gradients[i]->data());
    memory[i].gradient_dtype = DtypeOf(gradients[i]->dtype());
    elements[i] = gradients[i]->size();
  }
  std::shared_ptr<void> owner;
  if (let_go) owner = Kept(gradients);
  const nb::gil_scoped_release release;
  session.PushEarly(unit, memory, elements, std::exchange(owner, nullptr));
}

// A method that other threads' calls and Ctrl-C may interrupt.
template <typename Result, typename... Arguments>
auto Watched(Result (*method)(PythonSession&, Arguments...)) {
  return [method](PythonSession& session, Arguments... arguments) -> Result {
    return session.interrupt().Watch([&] { return method(session, arguments...); });
  };
}

client::TensorsReport Reported(absl::StatusOr<client::StepReport> stepped) {
  return {.step = Take(std::move(stepped))};
}

nb::list BytesOf(const std::vector<std::string>& all) {
  nb::list list;
  for (const std::string& one : all) list.append(nb::bytes(one.data(), one.size()));
  return list;
}

using Release = nb::call_guard<nb::gil_scoped_release>;

// Whoever holds the session may want the interpreter's lock: all let it go.
void BindFacts(nb::class_<PythonSession>& session) {
  session
      .def_prop_ro(
          "version", [](const PythonSession& s) { return s.Use()->version(); }, Release())
      .def_prop_ro("ended", &PythonSession::ended, Release())
      .def_prop_ro(
          "attempt", [](const PythonSession& s) { return s.Use()->attempt(); }, Release())
      .def_prop_ro(
          "needs_values", [](const PythonSession& s) { return s.Use()->needs_values(); }, Release())
      .def_prop_ro(
          "lends_masters", [](const PythonSession& s) { return s.Use()->lends_masters(); }, Release())
      .def_prop_ro("written", &PythonSession::written, Release())
      .def_prop_ro(
          "restored_version", [](const PythonSession& s) { return s.Use()->restored_version(); }, Release())
      .def_prop_ro("blobs",
                   [](const PythonSession& s) {
                     std::vector<std::string> all;
                     {
                       const nb::gil_scoped_release release;
                       all = s.Use()->resumed_blobs();
                     }
                     return BytesOf(all);
                   })
      .def_prop_ro(
          "pushes_gradients", [](const PythonSession& s) { return s.Use().tensors().pushes_gradients(); }, Release())
      .def_prop_ro(
          "units",
          [](const PythonSession& s) {
            const PythonSession::Using session = s.Use();
            std::vector<std::vector<size_t>> units;
            for (size_t unit = 0; unit < session.tensors().unit_count(); ++unit) {
              units.push_back(session.tensors().TensorsOf(unit));
            }
            return units;
          },
          Release());
}

void BindSteps(nb::class_<PythonSession>& session) {
  session
      .def(
          "initialise",
          [](PythonSession& s, const MaybeArrays& parameters, const nb::object& source, const nb::bytes& blob) {
            const auto memory = CheckedMemory(s, {}, parameters);
            std::optional<Array> given;
            const auto give = [&](size_t tensor) { return Given(source, tensor, &given); };
            const std::string sealed(blob.c_str(), blob.size());
            const nb::gil_scoped_release release;
            s.interrupt().Watch([&] { Check(s.Use().tensors().Initialise(memory, give, sealed)); });
          },
          "parameters"_a, "source"_a = nb::none(), "blob"_a = nb::bytes("", 0))
      .def(
          "step",
          [](PythonSession& s, const MaybeArrays& gradients, const MaybeArrays& parameters,
             const std::vector<client::GroupHyper>& groups, double scale, double max_norm, const nb::bytes& blob,
             const nb::object& ready) {
            const auto memory = CheckedMemory(s, gradients, parameters);
            client::Tensors::Ready tell;
            if (!ready.is_none()) tell = [&](absl::Span<const size_t> tensors) { Tell(ready, tensors); };
            const client::StepOptions options{.groups = groups,
                                              .gradient_scale = scale,
                                              .max_norm = max_norm,
                                              .blob = std::string(blob.c_str(), blob.size())};
            const nb::gil_scoped_release release;
            return s.interrupt().Watch([&] { return Take(s.Use().tensors().Step(memory, options, tell)); });
          },
          "gradients"_a, "parameters"_a, "groups"_a, "gradient_scale"_a = 1.0, "max_norm"_a = 0.0,
          "blob"_a = nb::bytes("", 0), "ready"_a = nb::none())
      .def("push_early", &PushEarly, "unit"_a, "gradients"_a, "let_go"_a = false)
      .def("start_pull", &StartPull, "which"_a, "to"_a, "whole"_a = false)
      .def(
          "pull_bytes", [](PythonSession& s, size_t tensor) { return s.PullBytes(tensor); }, "tensor"_a, Release())
      .def("await_pull", Watched(+[](PythonSession& s, uint64_t pull) { s.AwaitPull(pull); }), "pull"_a, Release())
      .def("drop", Watched(+[](PythonSession& s) { Check(s.Use().tensors().Drop()); }), Release())
      .def(
          "pull",
          [](PythonSession& s, const MaybeArrays& parameters) {
            const auto memory = CheckedMemory(s, {}, parameters);
            const nb::gil_scoped_release release;
            s.interrupt().Watch([&] { Check(s.Use().tensors().Pull(memory)); });
          },
          "parameters"_a)
      .def("register",
           Watched(+[](PythonSession& s, const std::vector<client::TensorSpec>& tensors) { s.Register(tensors); }),
           "tensors"_a, Release())
      .def(
          "exchange",
          [](PythonSession& s, const nb::bytes& mine) {
            std::vector<std::string> all;
            {
              const std::string bytes(mine.c_str(), mine.size());
              const nb::gil_scoped_release release;
              all = Take(s.Use().collective().Exchange(bytes));
            }
            return BytesOf(all);
          },
          "mine"_a);
}

void BindState(nb::class_<PythonSession>& session) {
  session
      .def(
          "write",
          [](PythonSession& s, const std::string& tensor, const F32Array& values) {
            const absl::Span<const float> span(values.data(), values.size());
            const nb::gil_scoped_release release;
            s.interrupt().Watch([&] {
              const PythonSession::Using session = s.Use();
              Check(session.tensors().Write(session.Find(tensor, span.size()), span));
            });
          },
          "tensor"_a, "values"_a)
      .def("commit_values", Watched(+[](PythonSession& s) { return Reported(s.Use()->CommitValues()); }), Release())
      .def(
          "commit_state",
          [](PythonSession& s, const std::string& array, const std::vector<std::string>& tensors,
             const std::vector<F32Array>& values, const std::vector<uint64_t>& steps, const nb::bytes& blob) {
            if (tensors.size() != values.size() || tensors.size() != steps.size())
              throw nb::value_error("values and steps: an entry per tensor");
            std::vector<const float*> memory;
            for (const F32Array& each : values) memory.push_back(each.data());
            std::vector<size_t> elements;
            for (const F32Array& each : values) elements.push_back(each.size());
            const std::string sealed(blob.c_str(), blob.size());
            const nb::gil_scoped_release release;
            return s.interrupt().Watch([&] {
              const PythonSession::Using session = s.Use();
              std::vector<size_t> which;
              for (size_t i = 0; i < tensors.size(); ++i) which.push_back(session.Find(tensors[i], elements[i]));
              return Reported(session.tensors().CommitState(ContentNamed(array), which, memory, steps, sealed));
            });
          },
          "array"_a, "tensors"_a, "values"_a, "steps"_a, "blob"_a)
      .def(
          "read",
          [](PythonSession& s, const std::string& tensor, const std::string& content, const F32Array& to) {
            const absl::Span<float> span(to.data(), to.size());
            const nb::gil_scoped_release release;
            s.interrupt().Watch([&] {
              const PythonSession::Using session = s.Use();
              Check(session->Read(tensor, ContentNamed(content), session->version(), span));
            });
          },
          "tensor"_a, "content"_a, "to"_a)
      .def(
          "read_part",
          [](PythonSession& s, const std::string& tensor, const std::string& content, const F32Array& to) {
            const absl::Span<float> span(to.data(), to.size());
            const nb::gil_scoped_release release;
            s.interrupt().Watch([&] {
              const PythonSession::Using session = s.Use();
              Check(session.tensors().Read(session.Find(tensor, span.size()), ContentNamed(content), span));
            });
          },
          "tensor"_a, "content"_a, "to"_a)
      .def("tensor_steps", Watched(+[](PythonSession& s, const std::string& tensor) {
             const PythonSession::Using session = s.Use();
             return Take(session->TensorSteps(tensor, session->version()));
           }),
           "tensor"_a, Release())
      .def("frozen_as", Watched(+[](PythonSession& s, const std::string& tensor) {
             return NameOf(Take(s.Use()->FrozenAs(tensor)));
           }),
           "tensor"_a, Release());
}

void BindVersions(nb::class_<PythonSession>& session) {
  session.def("pin", Watched(+[](PythonSession& s) { Check(s.Use()->PinDurably()); }), Release())
      .def("unpin", Watched(+[](PythonSession& s, int64_t version) { Check(s.Use()->UnpinDurably(version)); }),
           "version"_a, Release())
      .def("pins", Watched(+[](PythonSession& s) { return Take(s.Use()->DurablePins()); }), Release())
      .def("check_kept",
           Watched(+[](PythonSession& s, const client::KeptVersion& wanted) { Check(s.Use()->CheckKept(wanted)); }),
           "wanted"_a, Release())
      .def("restore",
           Watched(+[](PythonSession& s, const client::KeptVersion& kept) { return Reported(s.Use()->Restore(kept)); }),
           "kept"_a, Release());
}

}  // namespace

void BindSession(nb::module_& m) {
  nb::class_<PythonSession> session(m, "Session");
  session
      .def_static(
          "open",
          [](const OpenOptions& options, const std::vector<client::TensorSpec>& tensors, PythonServer* server,
             nb::object store) {
            PythonStore shared(std::move(store));
            const Interrupt interrupt;
            const nb::gil_scoped_release release;
            auto session =
                interrupt.Watch([&] { return PythonSession::Open(options, tensors, server, &shared, interrupt); });
            session->HandToPython();
            return session;
          },
          "options"_a, "tensors"_a, "server"_a.none(), "store"_a.none())
      // Ends what another thread waits for, and the session. A call of the server in this process goes on.
      .def("interrupt", [](const PythonSession& s) { s.interrupt().EndWait(); })
      .def("close", &PythonSession::Close, Release());
  BindFacts(session);
  BindSteps(session);
  BindState(session);
  BindVersions(session);
}

}  // namespace ballast::python
