# GPU: nvcc makes the kernels and the HBM tier, NCCL the collective; either may be absent.
set(BALLAST_CUDA_ARCHITECTURES "" CACHE STRING "GPUs to compile for, as CMAKE_CUDA_ARCHITECTURES; empty: all that a release serves")
set(BALLAST_HAVE_CUDA FALSE)
if(NOT BALLAST_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
    enable_language(CUDA)
    # Machine code for Ampere, Ada, Hopper and Blackwell: what is missing a GPU compiles from PTX, all kernels at each first start.
    # PTX (an entry without -real) for later ones: those of a later family start from the newest.
    if(BALLAST_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES ${BALLAST_CUDA_ARCHITECTURES})
    elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100-real 120)
    endif()
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")  # CMake 3.25 does not know CUDA's C++20
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA_STANDARD 20)
    find_package(CUDAToolkit REQUIRED)
    set(BALLAST_HAVE_CUDA TRUE)
  elseif(BALLAST_CUDA STREQUAL "ON")
    message(FATAL_ERROR "BALLAST_CUDA=ON but no nvcc was found; put it on PATH, set CUDACXX, or use BALLAST_CUDA=OFF")
  endif()
endif()
include(FindNccl OPTIONAL)  # BALLAST_HAVE_NCCL and the target nccl
message(STATUS "Ballast: CUDA ${BALLAST_HAVE_CUDA}, NCCL ${BALLAST_HAVE_NCCL}, sanitizer '${BALLAST_SANITIZE}'")
