# Builds with sanitizers parse the standard library and GoogleTest once, not once a source, and compile the sources of
# a folder together, without optimisation where no test computes for long: a quarter of what the compiler would take.
# Other builds do not: there a source that forgets an include does not compile. Included when all targets are known.

set(standard_headers <algorithm> <atomic> <chrono> <condition_variable> <cstring> <deque> <functional> <map> <memory>
  <mutex> <optional> <set> <span> <sstream> <string> <string_view> <thread> <tuple> <unordered_map> <variant> <vector>)

# Without a time in it, that ccache finds what was compiled with an equal one.
add_compile_options("SHELL:-Xclang -fno-pch-timestamp")

# Sources with names of their own that are another's, too.
set(compiled_alone _core conformance_tcp farandole_fake_nccl farandole_fake_nccl_old farandole_test_support integration
  unit_coordinator unit_core unit_nccl unit_ops)
# Sources of which tests link copies of their own, in the place of an object in the library's archive.
set(copied "/(applier|decider|negotiation|vote_tally|membership|join|process_name|address|frames|handshake)[.]cc$")
set(unoptimised farandole farandole_coordinator farandole_proto)

# A precompiled header fits targets with its compile options: those of the libraries that compute, those of the others,
# and those of gtest's programs, whose own code must be a program's, too.
set(no_source "${CMAKE_CURRENT_BINARY_DIR}/no_source.cc")
file(WRITE "${no_source}" "")
add_library(farandole_precompiled OBJECT "${no_source}")
target_precompile_headers(farandole_precompiled PRIVATE ${standard_headers})
add_library(farandole_precompiled_unoptimised OBJECT "${no_source}")
target_compile_options(farandole_precompiled_unoptimised PRIVATE -O0)
target_precompile_headers(farandole_precompiled_unoptimised PRIVATE ${standard_headers})
add_executable(farandole_precompiled_gtest EXCLUDE_FROM_ALL "${no_source}")
target_link_libraries(farandole_precompiled_gtest PRIVATE GTest::gmock GTest::gtest_main)
target_compile_options(farandole_precompiled_gtest PRIVATE -O0)
target_precompile_headers(farandole_precompiled_gtest PRIVATE ${standard_headers} <gmock/gmock.h> <gtest/gtest.h>)

# The sources of `target`, which is in `folder`, by their own folders; generated and copied ones by themselves.
function(farandole_compile_together target folder)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY "${folder}" NORMALIZE OUTPUT_VARIABLE path)
    cmake_path(GET path PARENT_PATH group)
    string(MAKE_C_IDENTIFIER "${group}" group)
    if(NOT path MATCHES "^${PROJECT_BINARY_DIR}/" AND NOT path MATCHES "${copied}")
      set_source_files_properties("${path}" DIRECTORY "${folder}" PROPERTIES UNITY_GROUP "${group}")
    endif()
  endforeach()
endfunction()

# Every target of this folder and of those below it that has our own compile options.
function(farandole_precompile folder)
  get_property(targets DIRECTORY "${folder}" PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(libraries ${target} LINK_LIBRARIES)
    get_target_property(type ${target} TYPE)
    if(target IN_LIST unoptimised)
      target_compile_options(${target} PRIVATE -O0)
    endif()
    if(libraries MATCHES "GTest::gtest")
      target_precompile_headers(${target} REUSE_FROM farandole_precompiled_gtest)
    elseif(libraries MATCHES "farandole_options" AND target IN_LIST unoptimised)
      target_precompile_headers(${target} REUSE_FROM farandole_precompiled_unoptimised)
    elseif(libraries MATCHES "farandole_options" AND NOT type STREQUAL "EXECUTABLE")
      target_precompile_headers(${target} REUSE_FROM farandole_precompiled)
    endif()
    if(libraries MATCHES "farandole_options" AND NOT target IN_LIST compiled_alone)
      farandole_compile_together(${target} "${folder}")
    endif()
  endforeach()
  get_property(subfolders DIRECTORY "${folder}" PROPERTY SUBDIRECTORIES)
  foreach(subfolder IN LISTS subfolders)
    farandole_precompile("${subfolder}")
  endforeach()
endfunction()
foreach(folder core ops coordinator bindings test)
  farandole_precompile("${PROJECT_SOURCE_DIR}/${folder}")
endforeach()
