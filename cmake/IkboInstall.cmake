# The CMake package that consumers of the installed runtime find: ikboConfig.cmake and its targets.
include(CMakePackageConfigHelpers)
set(ikbo_config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ikbo)
set(ikbo_OPS_LIBRARY ${CMAKE_INSTALL_LIBDIR}/libikbo_ops.so)

set_target_properties(ikbo_core PROPERTIES EXPORT_NAME core)
install(EXPORT ikboTargets NAMESPACE ikbo:: DESTINATION ${ikbo_config_dir})
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/ikboConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/ikboConfig.cmake
  INSTALL_DESTINATION ${ikbo_config_dir}
  PATH_VARS ikbo_OPS_LIBRARY)
write_basic_package_version_file(
  ${CMAKE_CURRENT_BINARY_DIR}/ikboConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/ikboConfig.cmake
        ${CMAKE_CURRENT_BINARY_DIR}/ikboConfigVersion.cmake
  DESTINATION ${ikbo_config_dir})
