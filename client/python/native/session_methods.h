// The methods of a session, as Python calls them.
#pragma once

#include <nanobind/nanobind.h>

namespace ballast::python {

void BindSession(nanobind::module_& m);

}  // namespace ballast::python
