# ballast_library(<name> [SRCS ...] [DEPS ...] [PRIVATE_DEPS ...]): a static library `ballast_<name>`.
# One per folder; tests/tools/include_order.py checks that includes follow the order of the folders.
function(ballast_library name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(ballast_${name} STATIC ${ARG_SRCS})
  set_target_properties(ballast_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON EXPORT_NAME ${name})
  target_link_libraries(ballast_${name} PUBLIC ${ARG_DEPS} PRIVATE $<BUILD_INTERFACE:ballast_flags> ${ARG_PRIVATE_DEPS})
  target_include_directories(ballast_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(ballast_${name} PUBLIC cxx_std_20)
endfunction()

# ballast_grpc_glue(<target> [source...]): these sources (or all of the target) instantiate gRPC's templates. Under ThreadSanitizer they
# are compiled without it: gRPC hands calls between threads by lock-free queues inside its own library, where TSan cannot look,
# so its templates, and the messages that they keep, would be reported at random. All else is instrumented. Optimised, they have
# functions as small as a string's destructor within them; else the linker may take an instrumented copy from elsewhere.
function(ballast_grpc_glue target)
  if(NOT BALLAST_SANITIZE STREQUAL "thread")
    return()
  endif()
  if(ARGN)
    set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS "-fno-sanitize=thread;-O2")
  else()
    # A precompiled header is of the others' options: GCC breaks off over one that has ThreadSanitizer.
    set_target_properties(${target} PROPERTIES BALLAST_GRPC_GLUE TRUE DISABLE_PRECOMPILE_HEADERS ON)
  endif()
endfunction()

# The sources of an executable. Under ThreadSanitizer tsan_shared_ptr.cc (which says why) is linked in front of them.
function(ballast_add_executable name)
  if(BALLAST_SANITIZE STREQUAL "thread")
    set(first ${PROJECT_SOURCE_DIR}/tests/tools/tsan_shared_ptr.cc)
    set_source_files_properties(${first} PROPERTIES COMPILE_OPTIONS -fsanitize=thread)
  endif()
  add_executable(${name} ${first} ${ARGN})
  if(first)
    set_target_properties(${name} PROPERTIES UNITY_BUILD OFF)  # unity puts batches of sources in front of the others
  endif()
endfunction()

function(ballast_executable name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  ballast_add_executable(${name} ${ARG_SRCS})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} ballast_flags ${BALLAST_SANITIZER_OBJECTS})
endfunction()

# ballast_test(<name> SRCS ... DEPS ... [LABELS ...] [TIMEOUT s] [ENVIRONMENT ...] [ONLY_IN configuration] [ASAN_FULL]): a GoogleTest
# binary, one ctest test. ONLY_IN: run by `ctest -C configuration` alone, for what takes many minutes. ASAN_FULL: `tests/run.sh asan`
# does without it (tests/README.md).
# Exit code 77 means skipped. The folder under tests/ is a label: ctest -L storage.
function(ballast_test name)
  cmake_parse_arguments(ARG "ASAN_FULL" "TIMEOUT;ONLY_IN" "SRCS;DEPS;LABELS;ARGS;ENVIRONMENT" ${ARGN})
  ballast_add_executable(${name} ${ARG_SRCS})
  set_target_properties(${name} PROPERTIES BALLAST_TEST_OBJECTS TRUE)
  if(TARGET ballast_test_headers)
    target_precompile_headers(${name} REUSE_FROM ballast_test_headers)
  endif()
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gmock GTest::gtest_main ballast_flags ${BALLAST_SANITIZER_OBJECTS})
  if(ARG_ASAN_FULL AND BALLAST_SANITIZE AND BALLAST_TEST_ROUNDS STREQUAL "ci")
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  add_test(NAME ${name} COMMAND ${name} ${ARG_ARGS} CONFIGURATIONS ${ARG_ONLY_IN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR}/tests ${CMAKE_CURRENT_SOURCE_DIR})
  string(REGEX REPLACE "/.*" "" folder ${folder})
  set(labels ${folder} ${ARG_LABELS})
  # Those that may take long start first.
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT ${ARG_TIMEOUT} COST ${ARG_TIMEOUT} LABELS "${labels}"
    ENVIRONMENT "${ARG_ENVIRONMENT}")
endfunction()

# ballast_rounds(<variable> <full> <ci>): how many seeds, loops or damages a test tries. Sanitizers try a tenth.
function(ballast_rounds variable full ci)
  set(rounds ${full})
  if(BALLAST_TEST_ROUNDS STREQUAL "ci")
    set(rounds ${ci})
  endif()
  if(BALLAST_SANITIZE)
    math(EXPR rounds "(${rounds} + 9) / 10")
  endif()
  set(${variable} ${rounds} PARENT_SCOPE)
endfunction()

# The same test with a hundred times the seeds, for `tests/run.sh soak` alone: hours.
function(ballast_soak name)
  cmake_parse_arguments(ARG "" "" "ARGS;ENVIRONMENT" ${ARGN})
  add_test(NAME soak_${name} COMMAND ${name} ${ARG_ARGS} CONFIGURATIONS soak)
  set_tests_properties(soak_${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 172800 LABELS soak
    ENVIRONMENT "${ARG_ENVIRONMENT}")
endfunction()
