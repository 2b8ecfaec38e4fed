include(CMakePackageConfigHelpers)

# farandole_install_development(COMPONENT name LIBRARY_DIR lib)
# Headers, CMake package and pkg-config file for C and C++ users, relative to one prefix whose libraries
# are in LIBRARY_DIR.
function(farandole_install_development)
  cmake_parse_arguments(arg "" "COMPONENT;LIBRARY_DIR" "" ${ARGN})
  set(library_dir "${arg_LIBRARY_DIR}")
  set(include_dir include)
  set(work "${PROJECT_BINARY_DIR}/package-${arg_COMPONENT}")
  configure_package_config_file(
    "${PROJECT_SOURCE_DIR}/bindings/package/FarandoleConfig.cmake.in" "${work}/FarandoleConfig.cmake"
    INSTALL_DESTINATION lib/cmake/Farandole
    PATH_VARS library_dir include_dir)
  write_basic_package_version_file("${work}/FarandoleConfigVersion.cmake"
                                   COMPATIBILITY SameMinorVersion)
  configure_file("${PROJECT_SOURCE_DIR}/bindings/package/farandole.pc.in" "${work}/farandole.pc" @ONLY)
  set(rest COMPONENT ${arg_COMPONENT})
  if(NOT arg_COMPONENT STREQUAL "development")
    list(APPEND rest EXCLUDE_FROM_ALL)  # `cmake --install` without a component is for C++ users
  endif()
  install(FILES "${work}/FarandoleConfig.cmake" "${work}/FarandoleConfigVersion.cmake"
          DESTINATION lib/cmake/Farandole ${rest})
  install(FILES "${work}/farandole.pc" DESTINATION lib/pkgconfig ${rest})
  install(FILES "${PROJECT_SOURCE_DIR}/bindings/c/farandole.h" DESTINATION include/farandole ${rest})
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/bindings/cpp/farandole" "${PROJECT_SOURCE_DIR}/bindings/libtorch/farandole" DESTINATION include ${rest}
          FILES_MATCHING PATTERN "*.h")
  install(TARGETS farandole farandole_mpi_plugin farandole_cuda_plugin LIBRARY DESTINATION ${library_dir} ${rest})
endfunction()
