# Compiler settings of our own code; third-party headers come in as SYSTEM and stay unchecked.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN")

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Build type" FORCE)
endif()

# Lines in backtraces; all of -g takes a third longer to compile.
add_compile_options($<$<AND:$<COMPILE_LANGUAGE:C,CXX>,$<CONFIG:RelWithDebInfo>>:-g1>)

option(FARANDOLE_PYTHON "Build the extension module farandole._core" ON)
option(FARANDOLE_TESTS "Build the C++ tests" ON)
option(FARANDOLE_UNIT_TESTS "Build the unit tests among them that are not about compiled code" ON)
option(FARANDOLE_MPI "Build the MPI plug-in (a stub when MPI is not found)" ON)
option(FARANDOLE_CUDA "Build the CUDA plug-in (a stub when nvcc is not found)" ON)
option(FARANDOLE_WERROR "Warnings are errors; the presets for developers set it" OFF)
set(FARANDOLE_SANITIZE "" CACHE STRING "Sanitizers: empty, \"address,undefined\" or \"thread\"")

find_program(FARANDOLE_CCACHE ccache)
if(FARANDOLE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${FARANDOLE_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${FARANDOLE_CCACHE}")
endif()

# Linked privately by every target of ours.
add_library(farandole_options INTERFACE)
set(host_only $<COMPILE_LANGUAGE:C,CXX>)
target_compile_options(farandole_options INTERFACE
  $<${host_only}:-Wall> $<${host_only}:-Wextra> $<${host_only}:-Wshadow> $<${host_only}:-Wconversion>
  $<$<AND:${host_only},$<BOOL:${FARANDOLE_WERROR}>>:-Werror>)
target_include_directories(farandole_options INTERFACE "${PROJECT_SOURCE_DIR}")
# What a plug-in and the library must have in common; compared when the plug-in is loaded.
target_compile_definitions(farandole_options INTERFACE FARANDOLE_BUILD_ID="${PROJECT_VERSION}")
if(FARANDOLE_SANITIZE)
  # Program-wide, because gtest and protobuf code must be instrumented alike.
  add_compile_options(-fsanitize=${FARANDOLE_SANITIZE} -fno-omit-frame-pointer
                      -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${FARANDOLE_SANITIZE})
  # For tests; compilers differ in how they say it.
  string(REGEX MATCH "address|thread" sanitizer "${FARANDOLE_SANITIZE}")
  string(TOUPPER "FARANDOLE_SANITIZE_${sanitizer}" sanitizer)
  add_compile_definitions(${sanitizer})
  if(FARANDOLE_SANITIZE MATCHES undefined)
    # Checks of every use of a pointer, which take a quarter of the compiler's time, and half of the
    # kernels': what follows from a bad one AddressSanitizer reports itself.
    add_compile_options(-fno-sanitize=null,alignment,object-size,vptr,pointer-overflow)
  endif()
endif()
