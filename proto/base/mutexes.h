// Abseil's search for deadlocks, which programs turn off and tests keep.
#pragma once

namespace ballast::model {

// Every absl::Mutex of the process, gRPC's too, is locked without a search for cycles in the order of locks from now
// on. Abseil searches unless it was built with NDEBUG itself, and Debian's was not: each lock then takes a lock of the
// whole process and looks its mutex up in a table of 8171 lists, so that a lock costs more the more mutexes are alive.
// Programs call this once at their start; a library must not, but for the Python module. Tests of code in their own
// process are to find such cycles.
void StopDeadlockSearch();

}  // namespace ballast::model
