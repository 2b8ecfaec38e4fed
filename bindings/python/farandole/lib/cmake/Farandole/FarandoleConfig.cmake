# find_package(Farandole [VERSION] [REQUIRED] [COMPONENTS Torch]): targets Farandole::farandole and,
# with the component Torch (needs libtorch's own package), Farandole::torch. Found by its place: the
# whole installation can be moved.

####### Expanded from @PACKAGE_INIT@ by configure_package_config_file() #######
####### Any changes to this file will be overwritten by the next CMake run ####
####### The input file was FarandoleConfig.cmake.in                            ########

get_filename_component(PACKAGE_PREFIX_DIR "${CMAKE_CURRENT_LIST_DIR}/../../../" ABSOLUTE)

macro(set_and_check _var _file)
  set(${_var} "${_file}")
  if(NOT EXISTS "${_file}")
    message(FATAL_ERROR "File or directory ${_file} referenced by variable ${_var} does not exist !")
  endif()
endmacro()

macro(check_required_components _NAME)
  foreach(comp ${${_NAME}_FIND_COMPONENTS})
    if(NOT ${_NAME}_${comp}_FOUND)
      if(${_NAME}_FIND_REQUIRED_${comp})
        set(${_NAME}_FOUND FALSE)
      endif()
    endif()
  endforeach()
endmacro()

####################################################################################

if(NOT TARGET Farandole::farandole)
  add_library(Farandole::farandole SHARED IMPORTED)
  set_target_properties(Farandole::farandole PROPERTIES
    IMPORTED_LOCATION "${PACKAGE_PREFIX_DIR}/./libfarandole.so.1"
    IMPORTED_SONAME libfarandole.so.1
    INTERFACE_INCLUDE_DIRECTORIES "${PACKAGE_PREFIX_DIR}/include"
    INTERFACE_COMPILE_FEATURES cxx_std_17)
endif()

foreach(component IN LISTS Farandole_FIND_COMPONENTS)
  if(component STREQUAL "Torch")
    include(CMakeFindDependencyMacro)
    find_dependency(Torch QUIET)
    if(NOT TARGET Farandole::torch)
      add_library(Farandole::torch INTERFACE IMPORTED)
      set_target_properties(Farandole::torch PROPERTIES
        INTERFACE_LINK_LIBRARIES "Farandole::farandole;${TORCH_LIBRARIES}"
        INTERFACE_COMPILE_OPTIONS "${TORCH_CXX_FLAGS}")
    endif()
    set(Farandole_Torch_FOUND TRUE)
  endif()
endforeach()
check_required_components(Farandole)
