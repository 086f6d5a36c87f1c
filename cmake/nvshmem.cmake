# CUDA with NVSHMEM: kernels and host half in one module, with relocatable device code, because NVSHMEM's device library is linked in.
if(NOT NVSHMEM_HOME)
  python_package(nvidia-nvshmem nvidia/nvshmem NVSHMEM_HOME)
endif()
find_path(nvshmem_include nvshmem.h PATHS "${NVSHMEM_HOME}/include" NO_DEFAULT_PATH)
find_file(nvshmem_device libnvshmem_device.a PATHS "${NVSHMEM_HOME}/lib" NO_DEFAULT_PATH)
find_file(nvshmem_host NAMES libnvshmem_host.so libnvshmem_host.so.3 PATHS "${NVSHMEM_HOME}/lib" NO_DEFAULT_PATH)
if(NOT nvshmem_include OR NOT nvshmem_device OR NOT nvshmem_host)
  message(FATAL_ERROR "NVSHMEM not found in '${NVSHMEM_HOME}': install nvidia-nvshmem-cu13 (torch for CUDA 13 brings it) or set NVSHMEM_HOME")
endif()
message(STATUS "NVSHMEM: ${NVSHMEM_HOME}")

if(NOT PRIMUS_ODC_ARCH)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE capabilities ERROR_QUIET
                  RESULT_VARIABLE status)
  if(status EQUAL 0 AND capabilities MATCHES "[0-9]")
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${capabilities}")
    list(REMOVE_DUPLICATES capabilities)
    string(REPLACE "." "" PRIMUS_ODC_ARCH "${capabilities}")
  else()
    set(PRIMUS_ODC_ARCH 90)
  endif()
endif()
message(STATUS "CUDA architectures: ${PRIMUS_ODC_ARCH}")
set(CMAKE_CUDA_ARCHITECTURES ${PRIMUS_ODC_ARCH})
set_target_properties(odc_module PROPERTIES CUDA_ARCHITECTURES "${PRIMUS_ODC_ARCH}")
set(CMAKE_CUDA_STANDARD 17)
enable_language(CUDA)

target_sources(odc_module PRIVATE csrc/kernels.cu csrc/library_nvshmem.cu)
target_include_directories(odc_module PRIVATE csrc "${nvshmem_include}")
set_target_properties(odc_module PROPERTIES CUDA_SEPARABLE_COMPILATION ON CUDA_RESOLVE_DEVICE_SYMBOLS ON CUDA_VISIBILITY_PRESET hidden
                                            CUDA_RUNTIME_LIBRARY Shared)  # torch's own: one runtime in the process
target_link_libraries(odc_module PRIVATE "${nvshmem_device}" "${nvshmem_host}")
# Found beside the package in the same site-packages; torch has usually loaded the same file before.
set_target_properties(odc_module PROPERTIES INSTALL_RPATH
                      "$ORIGIN/../../../nvidia/nvshmem/lib:$ORIGIN/../../../nvidia/cu13/lib:${NVSHMEM_HOME}/lib")
