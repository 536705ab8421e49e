option(BALLAST_TESTS "Build the tests" ON)
option(BALLAST_PYTHON "Build the Python package's module; needs nanobind in the Python that is found" OFF)
option(BALLAST_WERROR "Warnings are errors" OFF)
set(BALLAST_TEST_ROUNDS ci CACHE STRING "Seeds, loops and damages of the tests that search: ci (few), or full")
# AUTO: when nvcc is found. ON: fail without it. OFF: without a trace.
set(BALLAST_CUDA AUTO CACHE STRING "GPU tiers, kernels and NCCL: AUTO, ON or OFF")
set(BALLAST_SANITIZE "" CACHE STRING "empty, address (with undefined) or thread")

if(NOT BALLAST_TEST_ROUNDS MATCHES "^(full|ci)$")
  message(FATAL_ERROR "BALLAST_TEST_ROUNDS is '${BALLAST_TEST_ROUNDS}'; expected ci or full")
endif()
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)

find_program(CCACHE ccache)
mark_as_advanced(CCACHE)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()

# Every target compiles with these. -ffp-contract=off: bit equality between paths rests on it.
add_library(ballast_flags INTERFACE)
target_compile_features(ballast_flags INTERFACE cxx_std_20)
target_compile_options(ballast_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers -ffp-contract=off>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  # Locks as the annotations say (ABSL_GUARDED_BY and its like), which GCC cannot check.
  target_compile_options(ballast_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wthread-safety>)
else()
  target_compile_options(ballast_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict -Wno-subobject-linkage>)
endif()
if(BALLAST_WERROR)
  target_compile_options(ballast_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_BUILD_TYPE STREQUAL "RelWithDebInfo")
  # GCC collects its garbage at 1 GB instead of 128 MB: a tenth of the time of a large source, for presets of those who develop.
  target_compile_options(ballast_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-expand=300 --param=ggc-min-heapsize=1000000>)
endif()
if(BALLAST_SANITIZE STREQUAL "address")
  # Undefined behaviour without null (a fault by itself) and alignment (every access pays): a third of the compile time. The
  # objects of tests do without it: an eighth to a fifth of theirs.
  target_compile_options(ballast_flags INTERFACE -fsanitize=address -fno-omit-frame-pointer
    $<$<NOT:$<BOOL:$<TARGET_PROPERTY:BALLAST_TEST_OBJECTS>>>:-fsanitize=undefined>
    $<$<NOT:$<BOOL:$<TARGET_PROPERTY:BALLAST_TEST_OBJECTS>>>:-fno-sanitize=null,alignment>)
  target_link_options(ballast_flags INTERFACE -fsanitize=address,undefined)
elseif(BALLAST_SANITIZE STREQUAL "thread")
  # Where __SANITIZE_THREAD__ is defined, protobuf's map fields get a member that Debian's libprotobuf does not know of: messages
  # with maps would crash. libstdc++ is told by its own macro instead.
  target_compile_options(ballast_flags INTERFACE -U__SANITIZE_THREAD__ -D_GLIBCXX_TSAN=1)
  # But for ballast_grpc_glue targets.
  target_compile_options(ballast_flags INTERFACE
    $<IF:$<BOOL:$<TARGET_PROPERTY:BALLAST_GRPC_GLUE>>,-O2,-fsanitize=thread> -fno-omit-frame-pointer)
  target_link_options(ballast_flags INTERFACE -fsanitize=thread)
  set(BALLAST_TSAN_OBJECTS "" CACHE PATH "What tests/tools/tsan_objects.sh built")
  file(GLOB BALLAST_SANITIZER_OBJECTS ${BALLAST_TSAN_OBJECTS}/*.o)
  if(NOT BALLAST_SANITIZER_OBJECTS)
    message(FATAL_ERROR "BALLAST_TSAN_OBJECTS='${BALLAST_TSAN_OBJECTS}' holds no objects; run tests/run.sh tsan, which makes them")
  endif()
  list(APPEND BALLAST_SANITIZER_OBJECTS absl::synchronization)  # what the objects need themselves
elseif(BALLAST_SANITIZE)
  message(FATAL_ERROR "BALLAST_SANITIZE is '${BALLAST_SANITIZE}'; expected empty, address or thread")
endif()

# One spelling of includes, in the tree and installed: "ballast/<folder>/<file>".
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/include)
file(CREATE_LINK ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR}/include/ballast SYMBOLIC)
target_include_directories(ballast_flags INTERFACE $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>)
