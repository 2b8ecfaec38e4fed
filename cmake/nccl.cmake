# NCCL's header, which only a test wants: to compare our own declarations with. It comes with the
# wheels nvidia-nccl-cu12 and -cu13 and with NCCL's packages, and needs CUDA's headers.
#
# Sets FARANDOLE_NCCL_INCLUDES to what to include from, or to nothing. FARANDOLE_NCCL_LIBRARY is the
# libnccl beside it, if there is one.
set(FARANDOLE_NCCL_INCLUDE "" CACHE PATH "Where nccl.h is; empty: looked for")
set(FARANDOLE_NCCL_INCLUDES "")
set(FARANDOLE_NCCL_LIBRARY "")

find_package(Python 3.10 QUIET COMPONENTS Interpreter)
set(nccl_wheel "")
if(Python_FOUND)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import sysconfig; print(sysconfig.get_path('purelib'))"
    OUTPUT_VARIABLE nccl_wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
find_path(nccl_header nccl.h NO_CACHE
  HINTS ${FARANDOLE_NCCL_INCLUDE} "${nccl_wheel}/nvidia/nccl/include")
find_path(cuda_header cuda_runtime.h NO_CACHE
  HINTS /usr/local/cuda/include "${nccl_wheel}/nvidia/cu13/include"
        "${nccl_wheel}/nvidia/cuda_runtime/include")
if(nccl_header AND cuda_header)
  set(FARANDOLE_NCCL_INCLUDES "${nccl_header}" "${cuda_header}")
else()
  message(STATUS "No nccl.h with CUDA's headers: NCCL's declarations are not compared with it "
                 "(FARANDOLE_NCCL_INCLUDE says where it is)")
endif()
find_file(nccl_library libnccl.so.2 NO_CACHE NO_DEFAULT_PATH
  HINTS "${nccl_header}/../lib" "${nccl_wheel}/nvidia/nccl/lib")
if(nccl_library)
  get_filename_component(FARANDOLE_NCCL_LIBRARY "${nccl_library}" REALPATH)
endif()
