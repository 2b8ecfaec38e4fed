# nvcc, where there is one: sets FARANDOLE_CUDA_FOUND. A sanitizer's program has no GPU, and nvcc's
# own code is not instrumented, so that such a build has none.
set(FARANDOLE_CUDA_FOUND FALSE)
if(FARANDOLE_CUDA AND NOT FARANDOLE_SANITIZE)
  # Host code of all libraries must come from one compiler: see kBuildId in core/plugin.h.
  if(NOT CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
    set(CMAKE_CUDA_HOST_COMPILER "${CMAKE_CXX_COMPILER}")
  endif()
  set(own_architectures TRUE)
  if(CMAKE_CUDA_ARCHITECTURES)
    set(own_architectures FALSE)
  else()
    set(CMAKE_CUDA_ARCHITECTURES 80)  # for CMake's own trials; ours follow from the version
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25.1 does not know that nvcc has C++20
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    message(WARNING "nvcc was not found: tensors on GPUs will be refused. It comes with the CUDA toolkit >= 12.1; "
      "-DFARANDOLE_CUDA=OFF is silent about it.")
  elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.1)
    # Kernel parameters above 4 KiB.
    message(WARNING "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.1: tensors on GPUs will be refused.")
  elseif(TARGET CUDA::cudart_static)
    set(FARANDOLE_CUDA_FOUND TRUE)
  else()
    message(WARNING "libcudart_static.a was not found: tensors on GPUs will be refused.")
  endif()
  if(own_architectures)
    # Machine code for A100, H100 and, from 12.8 on, B200; PTX of the newest for what comes later.
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
    else()
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
    endif()
  endif()
endif()

# Compiler settings of a target with .cu files; farandole_options holds those of host code.
function(farandole_cuda_options target)
  set_target_properties(${target} PROPERTIES
    CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:--threads 3>"
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xfatbin -compress-all>"  # an eighth of the size
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wshadow,-Wconversion>")
  if(FARANDOLE_WERROR)
    target_compile_options(${target} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings>"
      "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror cross-execution-space-call>"
      "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Werror>")
  endif()
endfunction()
