// Python objects that C++ keeps, and whose last holder may be any thread.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"

namespace ballast::python {

// Runs `end` soon, with the interpreter's lock, on a thread of the module's own. Threads: any; never waits for Python.
// A session's own threads must not run `end`: it runs Python, whose garbage collector may close the session, and
// closing waits for these threads.
void EndLater(absl::AnyInvocable<void() &&> end);

// Keeps `object` until its last holder lets go, then ends it by EndLater.
template <typename T>
std::shared_ptr<void> Kept(T object) {
  return {new T(std::move(object)), [](void* kept) { EndLater([kept] { delete static_cast<T*>(kept); }); }};
}

}  // namespace ballast::python
