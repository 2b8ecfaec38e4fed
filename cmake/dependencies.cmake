# What the build needs of the machine. What is missing is named, with the command that brings it.

# farandole_need(found what how): ends the configure step unless `found`.
function(farandole_need found what how)
  if(NOT found)
    message(FATAL_ERROR "Farandole needs ${what}, which was not found.\n"
      "Install it with: ${how}\n"
      "If it is somewhere that CMake does not search, name its prefix: -DCMAKE_PREFIX_PATH=...")
  endif()
endfunction()

set(found TRUE)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
  set(found FALSE)
endif()
farandole_need(${found} "GCC 12 or newer (this is ${CMAKE_CXX_COMPILER_VERSION})"
  "apt install g++-12, and configure with -DCMAKE_CXX_COMPILER=g++-12")

find_package(Threads REQUIRED)
find_package(Protobuf QUIET)
farandole_need("${Protobuf_FOUND}" "the library of Protocol Buffers" "apt install libprotobuf-dev")
farandole_need("${Protobuf_PROTOC_EXECUTABLE}" "protoc, the compiler of Protocol Buffers"
  "apt install protobuf-compiler")
find_package(hwy 1.0.3 CONFIG QUIET)
farandole_need("${hwy_FOUND}" "Highway 1.0.3 or newer" "apt install libhwy-dev")
# SHA-256 and nothing else of it, within our libraries: users' programs have an OpenSSL of their own.
find_library(FARANDOLE_LIBCRYPTO libcrypto.a)
find_path(FARANDOLE_OPENSSL_INCLUDE openssl/sha.h)
set(found FALSE)
if(FARANDOLE_LIBCRYPTO AND FARANDOLE_OPENSSL_INCLUDE)
  set(found TRUE)
endif()
farandole_need(${found} "OpenSSL's libcrypto.a with its headers" "apt install libssl-dev")
add_library(farandole_libcrypto INTERFACE)
target_include_directories(farandole_libcrypto SYSTEM INTERFACE "${FARANDOLE_OPENSSL_INCLUDE}")
target_link_libraries(farandole_libcrypto INTERFACE "${FARANDOLE_LIBCRYPTO}" ${CMAKE_DL_LIBS})
target_link_options(farandole_libcrypto INTERFACE LINKER:--exclude-libs,libcrypto.a)
if(FARANDOLE_MPI)
  find_package(MPI QUIET COMPONENTS C)
  if(NOT MPI_C_FOUND)
    message(WARNING "Open MPI's development files were not found: ranks will use TCP; --mpi and mpirun will not work.\n"
      "They come with: apt install libopenmpi-dev openmpi-bin. -DFARANDOLE_MPI=OFF is silent about it.")
  endif()
endif()
if(FARANDOLE_PYTHON)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Module)
  farandole_need("${Python_FOUND}" "Python 3.10 or newer with its headers"
    "apt install python3-dev, or leave the Python module out with -DFARANDOLE_PYTHON=OFF")
  execute_process(COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
                  OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_package(pybind11 3 CONFIG QUIET)
  farandole_need("${pybind11_FOUND}" "pybind11 3 or newer in ${Python_EXECUTABLE}"
    "${Python_EXECUTABLE} -m pip install 'pybind11>=3'")
  # DLPack's own header, of version 1.3 at least; the wheel apache-tvm-ffi ships it. It is not imported.
  execute_process(COMMAND "${Python_EXECUTABLE}" -c
"import importlib.util as u; s = u.find_spec('tvm_ffi'); print(s.submodule_search_locations[0] if s else '')"
                  OUTPUT_VARIABLE tvm_ffi_dir OUTPUT_STRIP_TRAILING_WHITESPACE)
  find_path(DLPACK_INCLUDE_DIR dlpack/dlpack.h HINTS "${tvm_ffi_dir}/include"
            NO_CACHE DOC "The folder that holds dlpack/dlpack.h; pip install apache-tvm-ffi brings it")
  farandole_need("${DLPACK_INCLUDE_DIR}" "DLPack's header dlpack/dlpack.h"
    "${Python_EXECUTABLE} -m pip install 'apache-tvm-ffi>=0.1.15'")
endif()
if(FARANDOLE_TESTS)
  find_package(GTest QUIET)
  farandole_need("${GTest_FOUND}" "GoogleTest, for the tests"
    "apt install libgtest-dev libgmock-dev, or leave the tests out with -DFARANDOLE_TESTS=OFF")
  include(GoogleTest)
  enable_testing()
endif()
