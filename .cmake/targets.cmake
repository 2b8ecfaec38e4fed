# How a folder declares what it builds. Nothing is globbed: each CMakeLists.txt lists its sources.

# farandole_layer(core SOURCES a.cc b.cc [DEPENDS farandole_x ...])
# One layer of the library as a static, position-independent archive `farandole_<name>`.
function(farandole_layer name)
  cmake_parse_arguments(arg "" "" "SOURCES;DEPENDS" ${ARGN})
  if(NOT arg_SOURCES)  # A layer that so far consists of interfaces.
    add_library(farandole_${name} INTERFACE)
    target_link_libraries(farandole_${name} INTERFACE ${arg_DEPENDS})
    return()
  endif()
  add_library(farandole_${name} STATIC ${arg_SOURCES})
  target_link_libraries(farandole_${name} PUBLIC ${arg_DEPENDS}
                        PRIVATE $<BUILD_INTERFACE:farandole_options>)
endfunction()

# farandole_program(name SOURCES ... LIBRARIES ...)
# A program of ours that is not installed: test body, benchmark, example.
function(farandole_program name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBRARIES" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE farandole_options ${arg_LIBRARIES})
endfunction()

# farandole_gtest(name LABELS unit SOURCES x_test.cc LIBRARIES farandole_core [TIMEOUT 60])
# A gtest program; each of its cases is one ctest test.
function(farandole_gtest name)
  cmake_parse_arguments(arg "" "TIMEOUT" "LABELS;SOURCES;LIBRARIES" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 60)
  endif()
  farandole_program(${name} SOURCES ${arg_SOURCES}
                    LIBRARIES ${arg_LIBRARIES} GTest::gtest GTest::gmock GTest::gtest_main)
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
                       PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT})
endfunction()

# farandole_mpi_test(name LABELS conformance PROGRAM target RANKS 1 2 3 [ARGS ...] [TIMEOUT 60])
# Runs a program under mpirun, one ctest test `<name>.np<N>` per number of ranks.
function(farandole_mpi_test name)
  cmake_parse_arguments(arg "" "PROGRAM;TIMEOUT" "LABELS;RANKS;ARGS" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 60)
  endif()
  foreach(ranks IN LISTS arg_RANKS)
    add_test(NAME ${name}.np${ranks}
             COMMAND timeout -k 5 ${arg_TIMEOUT} ${MPIEXEC_EXECUTABLE} --oversubscribe -np ${ranks}
                     $<TARGET_FILE:${arg_PROGRAM}> ${arg_ARGS})
    # Several ranks per core: yielding keeps a 4-byte message at microseconds instead of milliseconds.
    set_tests_properties(${name}.np${ranks} PROPERTIES LABELS "${arg_LABELS}" RUN_SERIAL ON
      ENVIRONMENT "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_mpi_yield_when_idle=1")
  endforeach()
endfunction()
