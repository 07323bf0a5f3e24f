# An overlay port: it packs the clone that it lies in. vcpkg install lockstep --overlay-ports=packages/vcpkg
# It was written from vcpkg's manual and not tried, because vcpkg could not be had where it was written.
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
vcpkg_cmake_configure(SOURCE_PATH "${SOURCE_PATH}")
vcpkg_cmake_install()

# vcpkg keeps CMake's files in share/; lockstepConfig.cmake finds the prefix from there as well.
file(RENAME "${CURRENT_PACKAGES_DIR}/lib/cmake/lockstep" "${CURRENT_PACKAGES_DIR}/share/lockstep/cmake")
file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share" "${CURRENT_PACKAGES_DIR}/debug/bin"
  "${CURRENT_PACKAGES_DIR}/debug/lib/cmake")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
