// Python objects that C++ keeps, and whose last holder may be any thread.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"

namespace ballast::python {

// Runs `end` soon, with the interpreter's lock, on a thread of the module's own. Threads: any; never waits for Python.
// The end of an object runs Python, which may collect garbage and so close a session, and a session joins its threads:
// none of these may run it.
void EndLater(absl::AnyInvocable<void() &&> end);

// `object`, until its last holder is gone.
template <typename T>
std::shared_ptr<void> Kept(T object) {
  return {new T(std::move(object)), [](void* kept) { EndLater([kept] { delete static_cast<T*>(kept); }); }};
}

}  // namespace ballast::python
