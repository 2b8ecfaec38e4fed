include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# farandole_install_development(COMPONENT name ABI 1 LIBRARY_DIR lib INCLUDE_DIR include PACKAGE_DIR lib)
# Libraries, headers, CMake package and pkg-config file for C and C++ users. All folders are relative to
# one prefix, which can be moved: PACKAGE_DIR holds cmake/ and pkgconfig/.
function(farandole_install_development)
  cmake_parse_arguments(arg "" "COMPONENT;ABI;LIBRARY_DIR;INCLUDE_DIR;PACKAGE_DIR" "" ${ARGN})
  set(abi "${arg_ABI}")
  set(library_dir "${arg_LIBRARY_DIR}")
  set(include_dir "${arg_INCLUDE_DIR}")
  set(cmake_dir "${arg_PACKAGE_DIR}/cmake/Farandole")
  file(RELATIVE_PATH up "/${arg_PACKAGE_DIR}/pkgconfig" "/")
  set(work "${PROJECT_BINARY_DIR}/package-${arg_COMPONENT}")
  configure_package_config_file(
    "${PROJECT_SOURCE_DIR}/bindings/package/FarandoleConfig.cmake.in" "${work}/FarandoleConfig.cmake"
    INSTALL_DESTINATION "${cmake_dir}"
    PATH_VARS library_dir include_dir)
  write_basic_package_version_file("${work}/FarandoleConfigVersion.cmake"
                                   COMPATIBILITY SameMinorVersion)
  configure_file("${PROJECT_SOURCE_DIR}/bindings/package/farandole.pc.in" "${work}/farandole.pc" @ONLY)
  set(rest COMPONENT ${arg_COMPONENT})
  set(link NAMELINK_COMPONENT ${arg_COMPONENT})
  if(NOT arg_COMPONENT STREQUAL "development")
    list(APPEND rest EXCLUDE_FROM_ALL)  # `cmake --install` without a component is for C++ users
    set(link NAMELINK_SKIP)             # a wheel would hold the library twice
  endif()
  install(FILES "${work}/FarandoleConfig.cmake" "${work}/FarandoleConfigVersion.cmake"
          DESTINATION "${cmake_dir}" ${rest})
  install(FILES "${work}/farandole.pc" DESTINATION "${arg_PACKAGE_DIR}/pkgconfig" ${rest})
  install(FILES "${PROJECT_SOURCE_DIR}/bindings/c/farandole.h" DESTINATION "${include_dir}/farandole" ${rest})
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/bindings/cpp/farandole" "${PROJECT_SOURCE_DIR}/bindings/libtorch/farandole"
          DESTINATION "${include_dir}" ${rest} FILES_MATCHING PATTERN "*.h")
  install(TARGETS farandole LIBRARY DESTINATION "${library_dir}" ${rest} ${link})
  install(TARGETS farandole_mpi_plugin farandole_cuda_plugin LIBRARY DESTINATION "${library_dir}" ${rest})
endfunction()
