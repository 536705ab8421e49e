// Python's view of a session and of an embedded state server. Everything blocking releases the interpreter's lock;
// tensors come as DLPack and are borrowed for one call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "ballast/client/python/native/kept.h"
#include "ballast/client/python/native/python_session.h"
#include "ballast/client/python/native/python_stash.h"
#include "ballast/client/python/native/sample.h"
#include "ballast/client/python/native/status_error.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/self_test.h"
#include "ballast/proto/model/mutexes.h"
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

using Array = nb::ndarray<nb::c_contig, nb::device::cpu>;

kernels::Dtype DtypeOf(const nb::dlpack::dtype& dtype) {
  if (dtype == nb::dtype<float>()) return kernels::Dtype::kF32;
  constexpr auto kFloat = static_cast<uint8_t>(nb::dlpack::dtype_code::Float);
  constexpr auto kBfloat = static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat);
  if (dtype.lanes == 1 && dtype.bits == 16 && dtype.code == kBfloat) return kernels::Dtype::kBf16;
  if (dtype.lanes == 1 && dtype.bits == 16 && dtype.code == kFloat) return kernels::Dtype::kF16;
  throw nb::type_error("a tensor has another dtype than float32, bfloat16 or float16");
}

using MaybeArrays = std::vector<std::optional<Array>>;

// Memory of tensors in the session's order. `gradients`: None for a tensor without a gradient; may be empty.
// `parameters`: None for a parameter that lives on the servers alone.
std::vector<client::TensorMemory> MemoryOf(const PythonSession& session, const MaybeArrays& gradients,
                                           const MaybeArrays& parameters) {
  std::vector<std::optional<uint64_t>> elements(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].has_value()) {
      elements[i] = parameters[i]->size();
    } else if (i < gradients.size() && gradients[i].has_value()) {
      elements[i] = gradients[i]->size();
    }
  }
  {
    const nb::gil_scoped_release release;
    session.CheckElements(elements);
  }
  if (!gradients.empty() && gradients.size() != parameters.size())
    throw nb::value_error("gradients: an entry per parameter");
  std::vector<client::TensorMemory> memory(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].has_value()) {
      memory[i].parameter = static_cast<std::byte*>(parameters[i]->data());
      memory[i].parameter_dtype = DtypeOf(parameters[i]->dtype());
    }
    if (gradients.empty() || !gradients[i].has_value()) continue;
    if (gradients[i]->size() != *elements[i]) throw nb::value_error("a gradient has another size than its parameter");
    memory[i].gradient = static_cast<const std::byte*>(gradients[i]->data());
    memory[i].gradient_dtype = DtypeOf(gradients[i]->dtype());
  }
  return memory;
}

using F32Array = nb::ndarray<float, nb::c_contig, nb::device::cpu>;

// The reason why `servers` are neither addresses nor the URL of a registry; empty if they are.
std::string ServersError(const std::vector<std::string>& servers) {
  return std::string(registry::CheckServers(servers).message());
}

void BindServer(nb::module_& m) {
  nb::class_<PythonServer>(m, "Server")
      .def(nb::init<const std::string&, uint64_t, uint64_t, int, bool>(), "directory"_a, "dram"_a, "nvme"_a,
           "threads"_a, "working_copies"_a = false, nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &PythonServer::Stop, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("jobs", &PythonServer::Jobs, nb::call_guard<nb::gil_scoped_release>())
      .def("drop", &PythonServer::Drop, "job"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("tiers", &PythonServer::Tiers);
}

void BindEstimate(nb::module_& m) {
  nb::class_<EstimateReport>(m, "EstimateReport")
      .def_ro("fits", &EstimateReport::fits)
      .def_ro("text", &EstimateReport::text)
      .def_ro("step_seconds", &EstimateReport::step_seconds)
      .def_ro("tiers", &EstimateReport::tiers)
      .def_ro("rank_bytes", &EstimateReport::rank_bytes)
      .def_ro("rank_bytes_sharded", &EstimateReport::rank_bytes_sharded);
  m.def("staging", &StagingBytes, "dram"_a);
  m.def("estimate", &EstimateFor, "tensors"_a, "options"_a, "dram"_a, "nvme"_a, "threads"_a, "servers"_a, "profile"_a,
        "working_copies"_a, nb::call_guard<nb::gil_scoped_release>());
}

void BindOptions(nb::module_& m) {
  nb::class_<client::GroupHyper>(m, "GroupHyper")
      .def(nb::init<>())
      .def_rw("learning_rate", &client::GroupHyper::learning_rate)
      .def_rw("beta1", &client::GroupHyper::beta1)
      .def_rw("beta2", &client::GroupHyper::beta2)
      .def_rw("epsilon", &client::GroupHyper::epsilon)
      .def_rw("weight_decay", &client::GroupHyper::weight_decay)
      .def_rw("dampening", &client::GroupHyper::dampening)
      .def_rw("learning_rate_decay", &client::GroupHyper::learning_rate_decay)
      .def_rw("initial_accumulator", &client::GroupHyper::initial_accumulator)
      .def_rw("maximize", &client::GroupHyper::maximize);
  nb::class_<Optimizer>(m, "Optimizer")
      .def(nb::init<>())
      .def_rw("kind", &Optimizer::kind)
      .def_rw("amsgrad", &Optimizer::amsgrad)
      .def_rw("momentum", &Optimizer::momentum)
      .def_rw("nesterov", &Optimizer::nesterov)
      .def_rw("moments", &Optimizer::moments)
      .def_rw("master", &Optimizer::master)
      .def_rw("gradient", &Optimizer::gradient)
      .def_rw("working", &Optimizer::working);
  nb::class_<model::Access>(m, "Access")
      .def(nb::init<>())
      .def_rw("ca", &model::Access::ca)
      .def_rw("certificate", &model::Access::certificate)
      .def_rw("key", &model::Access::key)
      .def_rw("token_file", &model::Access::token_file);
  nb::class_<OpenOptions>(m, "OpenOptions")
      .def(nb::init<>())
      .def_rw("job", &OpenOptions::job)
      .def_rw("resume", &OpenOptions::resume)
      .def_rw("durability", &OpenOptions::durability)
      .def_rw("pin_interval", &OpenOptions::pin_interval)
      .def_rw("optimizer", &OpenOptions::optimizer)
      .def_rw("group_count", &OpenOptions::group_count)
      .def_rw("chunk_elements", &OpenOptions::chunk_elements)
      .def_rw("seed", &OpenOptions::seed)
      .def_rw("placed", &OpenOptions::placed)
      .def_rw("servers", &OpenOptions::servers)
      .def_rw("access", &OpenOptions::access)
      .def_rw("rank", &OpenOptions::rank)
      .def_rw("world_size", &OpenOptions::world_size)
      .def_rw("host", &OpenOptions::host)
      .def_rw("step_timeout", &OpenOptions::step_timeout)
      .def_rw("open_timeout", &OpenOptions::open_timeout)
      .def_rw("progress", &OpenOptions::progress);
  nb::class_<Placement>(m, "Placement")
      .def(nb::init<std::vector<uint32_t>, std::vector<uint32_t>, std::vector<std::pair<uint32_t, uint32_t>>>(),
           "ranks"_a, "sizes"_a, "cuts"_a)
      .def("box", &BoxOf, "shape"_a, "place"_a)
      .def_ro("ranks", &Placement::ranks)
      .def_ro("sizes", &Placement::sizes)
      .def_ro("cuts", &Placement::cuts);
  nb::class_<Tensor>(m, "Tensor")
      .def(nb::init<std::string, std::string, std::vector<uint64_t>, uint32_t>(), "name"_a, "unit"_a, "shape"_a,
           "group"_a)
      .def_rw("name", &Tensor::name)
      .def_rw("unit", &Tensor::unit)
      .def_rw("shape", &Tensor::shape)
      .def_rw("group", &Tensor::group)
      .def_rw("placement", &Tensor::placement)
      .def_rw("parts", &Tensor::parts)
      .def_rw("frozen", &Tensor::frozen);
  // decided_by: counter and nonce of an epoch, (0, 0) if not known.
  nb::class_<client::KeptVersion>(m, "KeptVersion")
      .def(
          "__init__",
          [](client::KeptVersion* kept, int64_t version, uint64_t life, std::pair<uint64_t, uint64_t> decided_by) {
            new (kept) client::KeptVersion{.version = version, .life = life};
            kept->decided_by.set_counter(decided_by.first);
            kept->decided_by.set_nonce(decided_by.second);
          },
          "version"_a, "life"_a = 0, "decided_by"_a = std::pair<uint64_t, uint64_t>(0, 0))
      .def_ro("version", &client::KeptVersion::version)
      .def_ro("life", &client::KeptVersion::life)
      .def_prop_ro("decided_by", [](const client::KeptVersion& kept) {
        return std::pair(kept.decided_by.counter(), kept.decided_by.nonce());
      });
  nb::class_<Report>(m, "Report")
      .def_ro("version", &Report::version)
      .def_ro("skipped", &Report::skipped)
      .def_ro("norm", &Report::norm)
      .def_ro("push_seconds", &Report::push_seconds)
      .def_ro("seal_seconds", &Report::seal_seconds)
      .def_ro("pull_seconds", &Report::pull_seconds);
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
    place = {static_cast<std::byte*>(array.data()), DtypeOf(array.dtype()), array.size(), {}};
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

template <typename Result, typename... Arguments>
auto Watched(Result (PythonSession::*method)(Arguments...)) {
  return [method](PythonSession& session, Arguments... arguments) -> Result {
    return session.interrupt().Watch([&] { return (session.*method)(arguments...); });
  };
}

void BindSession(nb::module_& m) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<PythonSession>(m, "Session")
      .def_static(
          "open",
          [](const OpenOptions& options, const std::vector<Tensor>& tensors, PythonServer* server, nb::object store) {
            PythonStore shared(std::move(store));
            const Interrupt interrupt;
            const nb::gil_scoped_release release;
            return interrupt.Watch([&] { return PythonSession::Open(options, tensors, server, &shared, interrupt); });
          },
          "options"_a, "tensors"_a, "server"_a.none(), "store"_a.none())
      // Whoever holds the session may want the interpreter's lock.
      .def_prop_ro("version", &PythonSession::version, Release())
      .def_prop_ro("ended", &PythonSession::ended, Release())
      .def_prop_ro("attempt", &PythonSession::attempt, Release())
      .def_prop_ro("needs_values", &PythonSession::needs_values, Release())
      .def_prop_ro("lends_masters", &PythonSession::lends_masters, Release())
      .def_prop_ro("written", &PythonSession::written, Release())
      .def_prop_ro("restored_version", &PythonSession::restored_version, Release())
      .def_prop_ro("blobs",
                   [](const PythonSession& session) {
                     std::vector<std::string> all;
                     {
                       const nb::gil_scoped_release release;
                       all = session.blobs();
                     }
                     nb::list blobs;
                     for (const std::string& blob : all) blobs.append(nb::bytes(blob.data(), blob.size()));
                     return blobs;
                   })
      .def(
          "initialise",
          [](PythonSession& session, const MaybeArrays& parameters, const nb::object& source) {
            const auto memory = MemoryOf(session, {}, parameters);
            std::optional<Array> given;
            const auto give = [&](size_t tensor) { return Given(source, tensor, &given); };
            const nb::gil_scoped_release release;
            session.interrupt().Watch([&] { return session.Initialise(memory, give); });
          },
          "parameters"_a, "source"_a = nb::none())
      .def(
          "step",
          [](PythonSession& session, const MaybeArrays& gradients, const MaybeArrays& parameters,
             const std::vector<client::GroupHyper>& groups, double scale, double max_norm, const nb::bytes& blob,
             const nb::object& ready) {
            const auto memory = MemoryOf(session, gradients, parameters);
            client::Tensors::Ready tell;
            if (!ready.is_none()) tell = [&](absl::Span<const size_t> tensors) { Tell(ready, tensors); };
            const client::StepOptions options{.groups = groups,
                                              .gradient_scale = scale,
                                              .max_norm = max_norm,
                                              .blob = std::string(blob.c_str(), blob.size())};
            const nb::gil_scoped_release release;
            return session.interrupt().Watch([&] { return session.Step(memory, options, tell); });
          },
          "gradients"_a, "parameters"_a, "groups"_a, "gradient_scale"_a = 1.0, "max_norm"_a = 0.0,
          "blob"_a = nb::bytes("", 0), "ready"_a = nb::none())
      .def_prop_ro("pushes_gradients", &PythonSession::pushes_gradients, Release())
      .def_prop_ro("units", &PythonSession::Units, Release())
      .def("push_early", &PushEarly, "unit"_a, "gradients"_a, "let_go"_a = false)
      .def("start_pull", &StartPull, "which"_a, "to"_a, "whole"_a = false)
      .def("await_pull", Watched(&PythonSession::AwaitPull), "pull"_a, Release())
      .def("drop", Watched(&PythonSession::Drop), Release())
      .def(
          "pull",
          [](PythonSession& session, const MaybeArrays& parameters) {
            const auto memory = MemoryOf(session, {}, parameters);
            const nb::gil_scoped_release release;
            session.interrupt().Watch([&] { return session.Pull(memory); });
          },
          "parameters"_a)
      .def(
          "write",
          [](PythonSession& session, const std::string& tensor, const F32Array& values) {
            const absl::Span<const float> span(values.data(), values.size());
            const nb::gil_scoped_release release;
            session.interrupt().Watch([&] { return session.Write(tensor, span); });
          },
          "tensor"_a, "values"_a)
      .def("commit_values", Watched(&PythonSession::CommitValues), Release())
      .def(
          "commit_state",
          [](PythonSession& session, const std::string& array, const std::vector<std::string>& tensors,
             const std::vector<F32Array>& values, const std::vector<uint64_t>& steps, const nb::bytes& blob) {
            if (tensors.size() != values.size() || tensors.size() != steps.size())
              throw nb::value_error("values and steps: an entry per tensor");
            std::vector<PythonSession::State> states(tensors.size());
            for (size_t i = 0; i < tensors.size(); ++i) {
              states[i] = {tensors[i], {values[i].data(), values[i].size()}, steps[i]};
            }
            const std::string sealed(blob.c_str(), blob.size());
            const nb::gil_scoped_release release;
            return session.interrupt().Watch([&] { return session.CommitState(array, states, sealed); });
          },
          "array"_a, "tensors"_a, "values"_a, "steps"_a, "blob"_a)
      .def(
          "read",
          [](PythonSession& session, const std::string& tensor, const std::string& content, const F32Array& to) {
            const absl::Span<float> span(to.data(), to.size());
            const nb::gil_scoped_release release;
            session.interrupt().Watch([&] { return session.Read(tensor, content, span); });
          },
          "tensor"_a, "content"_a, "to"_a)
      .def(
          "read_part",
          [](PythonSession& session, const std::string& tensor, const std::string& content, const F32Array& to) {
            const absl::Span<float> span(to.data(), to.size());
            const nb::gil_scoped_release release;
            session.interrupt().Watch([&] { return session.ReadPart(tensor, content, span); });
          },
          "tensor"_a, "content"_a, "to"_a)
      .def("tensor_steps", Watched(&PythonSession::TensorSteps), "tensor"_a, Release())
      .def("frozen_as", Watched(&PythonSession::FrozenAs), "tensor"_a, Release())
      .def("register", Watched(&PythonSession::Register), "tensors"_a, Release())
      .def(
          "exchange",
          [](PythonSession& session, const nb::bytes& mine) {
            std::vector<std::string> all;
            {
              const std::string bytes(mine.c_str(), mine.size());
              const nb::gil_scoped_release release;
              all = session.Exchange(bytes);
            }
            nb::list answers;
            for (const std::string& one : all) answers.append(nb::bytes(one.data(), one.size()));
            return answers;
          },
          "mine"_a)
      .def("pin", Watched(&PythonSession::Pin), Release())
      .def("unpin", Watched(&PythonSession::Unpin), "version"_a, Release())
      .def("pins", Watched(&PythonSession::Pins), Release())
      .def("check_kept", Watched(&PythonSession::CheckKept), "wanted"_a, Release())
      .def("restore", Watched(&PythonSession::Restore), "kept"_a, Release())
      // Ends what another thread waits for, and the session. A call of the server in this process goes on.
      .def("interrupt", [](const PythonSession& session) { session.interrupt().EndWait(); })
      .def("close", &PythonSession::Close, Release());
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
  m.attr("JOB_NAME_RULE") = model::kJobNameRule;
  m.def(
      "is_job_name", [](const std::string& name) { return model::IsJobName(name); }, "name"_a);
  nb::register_exception_translator(Translate);
  BindServer(m);
  BindOptions(m);
  BindEstimate(m);
  BindSession(m);
  BindStash(m);
}

}  // namespace ballast::python
