// The first object of every executable under ThreadSanitizer. Reference counts of shared_ptr are inline functions that
// every object carries, and the linker keeps the first it meets: it must be an instrumented one, or the counts order
// nothing in TSan's eyes (ballast_grpc_glue objects are not instrumented).
#include <memory>

namespace {

using Count = std::_Sp_counted_base<__gnu_cxx::_S_atomic>;
[[gnu::used]] void (Count::*const kCounting[])() = {&Count::_M_add_ref_copy, &Count::_M_release,
                                                    &Count::_M_weak_release, &Count::_M_weak_add_ref};
[[gnu::used]] bool (Count::*const kLocking)() = &Count::_M_add_ref_lock_nothrow;

}  // namespace
