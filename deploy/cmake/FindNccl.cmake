# NCCL is looked for in NCCL_ROOT, the system, and an installed nvidia-nccl-cu13 (or cu12) wheel.
set(BALLAST_HAVE_NCCL FALSE)
if(BALLAST_HAVE_CUDA)
  set(wheel_roots "")
  find_program(BALLAST_PYTHON3 python3)
  if(BALLAST_PYTHON3)
    execute_process(
      COMMAND ${BALLAST_PYTHON3} -c "import site,sys,os\nfor p in site.getsitepackages()+[site.getusersitepackages()]:\n d=os.path.join(p,'nvidia','nccl')\n if os.path.isdir(d): print(d)"
      OUTPUT_VARIABLE wheel_roots OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    string(REPLACE "\n" ";" wheel_roots "${wheel_roots}")
  endif()
  find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${NCCL_ROOT} $ENV{NCCL_ROOT} PATHS ${wheel_roots} PATH_SUFFIXES include)
  find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${NCCL_ROOT} $ENV{NCCL_ROOT} PATHS ${wheel_roots} PATH_SUFFIXES lib lib64)
  if(NCCL_INCLUDE_DIR AND NCCL_LIBRARY)
    add_library(nccl SHARED IMPORTED)
    set_target_properties(nccl PROPERTIES
      IMPORTED_LOCATION ${NCCL_LIBRARY} IMPORTED_SONAME libnccl.so.2
      INTERFACE_INCLUDE_DIRECTORIES ${NCCL_INCLUDE_DIR})
    set(BALLAST_HAVE_NCCL TRUE)
  endif()
endif()
