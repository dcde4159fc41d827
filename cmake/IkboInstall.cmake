# The CMake package that consumers find: ikboConfig.cmake and the targets of what is built here.
# Builds of different parts may be installed into one prefix.
include(CMakePackageConfigHelpers)
set(ikbo_config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ikbo)
set(ikbo_OPS_LIBRARY ${CMAKE_INSTALL_LIBDIR}/libikbo_ops.so)

set_target_properties(ikbo_core PROPERTIES EXPORT_NAME core)
set(ikbo_exports core)

if(TARGET ikbo_runtime)
  list(APPEND ikbo_exports runtime)
  if(NOT IKBO_STUB_EXECUTOR)
    # Installed, the runtime finds the PyTorch it was built against, which may lie inside the source
    # tree (.venv), where INSTALL_RPATH_USE_LINK_PATH does not look; the programs find the runtime
    # beside them.
    set_target_properties(ikbo_runtime PROPERTIES INSTALL_RPATH "${IKBO_TORCH_DIR}/lib")
    set_target_properties(ikbo-replay ikbo-server PROPERTIES
      INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${IKBO_TORCH_DIR}/lib")
  endif()
endif()
if(TARGET ikbo_kernels)
  list(APPEND ikbo_exports kernels)
endif()

foreach(part ${ikbo_exports})
  install(EXPORT ikbo_${part} FILE ikbo-${part}.cmake NAMESPACE ikbo::
    DESTINATION ${ikbo_config_dir} COMPONENT ${part})
endforeach()
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/ikboConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/ikboConfig.cmake
  INSTALL_DESTINATION ${ikbo_config_dir}
  PATH_VARS ikbo_OPS_LIBRARY)
write_basic_package_version_file(
  ${CMAKE_CURRENT_BINARY_DIR}/ikboConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/ikboConfig.cmake
        ${CMAKE_CURRENT_BINARY_DIR}/ikboConfigVersion.cmake
  DESTINATION ${ikbo_config_dir} COMPONENT core)
