# Builds with sanitizers parse the standard library and GoogleTest once, not once a source, which takes a
# third of the compiler's time. Other builds do not: there a source that forgets an include does not compile.
# Included when all targets are known.

set(standard_headers <algorithm> <atomic> <chrono> <condition_variable> <cstring> <deque> <functional> <map> <memory>
  <mutex> <optional> <set> <span> <sstream> <string> <string_view> <thread> <tuple> <unordered_map> <variant> <vector>)

# Without a time in it, that ccache finds what was compiled with an equal one.
add_compile_options("SHELL:-Xclang -fno-pch-timestamp")

# A precompiled header fits targets with its compile options: those of the libraries, and those of gtest's programs,
# whose own code must be a program's, too.
set(no_source "${CMAKE_CURRENT_BINARY_DIR}/no_source.cc")
file(WRITE "${no_source}" "")
add_library(farandole_precompiled OBJECT "${no_source}")
target_precompile_headers(farandole_precompiled PRIVATE ${standard_headers})
add_executable(farandole_precompiled_gtest EXCLUDE_FROM_ALL "${no_source}")
target_link_libraries(farandole_precompiled_gtest PRIVATE GTest::gmock GTest::gtest_main)
target_compile_options(farandole_precompiled_gtest PRIVATE -O0)
target_precompile_headers(farandole_precompiled_gtest PRIVATE ${standard_headers} <gmock/gmock.h> <gtest/gtest.h>)

# Every target of this folder and of those below it that has our own compile options.
function(farandole_precompile folder)
  get_property(targets DIRECTORY "${folder}" PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(libraries ${target} LINK_LIBRARIES)
    get_target_property(type ${target} TYPE)
    if(libraries MATCHES "GTest::gtest")
      target_precompile_headers(${target} REUSE_FROM farandole_precompiled_gtest)
    elseif(libraries MATCHES "farandole_options" AND NOT type STREQUAL "EXECUTABLE")
      target_precompile_headers(${target} REUSE_FROM farandole_precompiled)
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
