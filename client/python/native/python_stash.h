// Python's view of a stash: what ballast.torch.stash puts aside.
#pragma once

#include <nanobind/nanobind.h>

namespace ballast::python {

void BindStash(nanobind::module_& m);

}  // namespace ballast::python
