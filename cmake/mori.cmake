# HIP with MORI-SHMEM: the host half, and the kernel sources for the node that will run them.
if(NOT MORI_HOME)
  python_package(amd-mori mori MORI_HOME)
endif()
set(mori_include "${MORI_HOME}/_jit-sources/include")
set(mori_library "${MORI_HOME}/libmori_shmem.so")
if(NOT EXISTS "${MORI_HOME}/_version.py" OR NOT EXISTS "${mori_include}/mori/shmem/shmem.hpp" OR NOT EXISTS "${mori_library}")
  message(FATAL_ERROR "MORI not found in '${MORI_HOME}' (needs _version.py, _jit-sources/include and libmori_shmem.so): install amd-mori "
                      ">= 1.2.4 or set MORI_HOME")
endif()

# MORI copies a structure of its own into our code object, whose size differs between versions: the version built against is kept, and
# compared with the one that is installed when the module is loaded.
file(READ "${MORI_HOME}/_version.py" version_file)
if(NOT version_file MATCHES "__version__[^=\n]*= *(version *= *)?['\"]([0-9]+\\.[0-9]+\\.[0-9]+[^'\"]*)['\"]")
  message(FATAL_ERROR "${MORI_HOME}/_version.py names no version")
endif()
set(mori_version "${CMAKE_MATCH_2}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+\\.[0-9]+" mori_release "${mori_version}")
if(mori_release VERSION_LESS 1.2.4)
  message(FATAL_ERROR "MORI ${mori_version} in '${MORI_HOME}' is too old: 1.2.4 is the first that is served (before 1.2.1 its reads returned "
                      "before their data, before 1.2.4 completions were lost)")
endif()
message(STATUS "MORI ${mori_version}: ${MORI_HOME}")

find_program(hipcc hipcc PATHS "${ROCM_PATH}/bin" NO_DEFAULT_PATH)
find_library(hip_library amdhip64 PATHS "${ROCM_PATH}/lib" NO_DEFAULT_PATH)
if(NOT hipcc OR NOT hip_library)
  message(FATAL_ERROR "no hipcc or libamdhip64 in '${ROCM_PATH}': set ROCM_PATH to a ROCm 7 with its compiler")
endif()

set(host_object "${CMAKE_CURRENT_BINARY_DIR}/library_mori.o")
add_custom_command(
  OUTPUT "${host_object}"
  COMMAND "${hipcc}" -x hip --cuda-host-only -std=c++17 -O2 -fPIC "-DODC_MORI_VERSION=\"${mori_version}\"" -isystem "${mori_include}" -c
          "${CMAKE_CURRENT_SOURCE_DIR}/csrc/library_mori.cpp" -o "${host_object}"
  DEPENDS csrc/library_mori.cpp csrc/library.h csrc/arguments.h
  VERBATIM)
target_sources(odc_module PRIVATE "${host_object}")
target_link_libraries(odc_module PRIVATE "${mori_library}" "${hip_library}")
target_link_options(odc_module PRIVATE -Wl,--allow-shlib-undefined)  # what MORI itself needs is looked for when it is loaded
set_target_properties(odc_module PROPERTIES INSTALL_RPATH "$ORIGIN/../../../mori:${ROCM_PATH}/lib:${MORI_HOME}")
install(FILES csrc/kernels.cu csrc/copy.h csrc/portable.h csrc/arguments.h DESTINATION ${package}/csrc)
