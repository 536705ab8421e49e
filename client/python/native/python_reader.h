// A reader of another process's job, as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

namespace ballast::python {

void BindReader(nanobind::module_& m);

}  // namespace ballast::python
