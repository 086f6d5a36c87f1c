// The host half over NVSHMEM and the CUDA runtime. Compiled by nvcc into the library that holds the kernels, whose device state
// nvshmemx_init_attr sets up.
#include <cuda_runtime.h>
#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstring>
#include <stdexcept>

#include "arguments.h"
#include "library.h"

extern "C" {
__global__ void odc_get(odc::Context, odc::Transfers);
__global__ void odc_put(odc::Context, odc::Transfers);
__global__ void odc_signal(odc::Context, odc::Transfers);
__global__ void odc_wait(odc::Context, odc::Waits, int, uint64_t);
__global__ void odc_sum_float32(odc::Context, uint64_t, odc::Sources, int, uint64_t, int);
__global__ void odc_sum_float64(odc::Context, uint64_t, odc::Sources, int, uint64_t, int);
__global__ void odc_fill_pattern(uint64_t, uint64_t, uint64_t);
__global__ void odc_check_pattern(odc::Context, uint64_t, uint64_t, uint64_t, int);
}

namespace odc::library {
namespace {

const void* const kernels[kKernels] = {
    reinterpret_cast<const void*>(odc_get),           reinterpret_cast<const void*>(odc_put),
    reinterpret_cast<const void*>(odc_signal),        reinterpret_cast<const void*>(odc_wait),
    reinterpret_cast<const void*>(odc_sum_float32),   reinterpret_cast<const void*>(odc_sum_float64),
    reinterpret_cast<const void*>(odc_fill_pattern),  reinterpret_cast<const void*>(odc_check_pattern),
};

void cuda(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(code));
}

void nvshmem(int code, const char* call) {
  if (code != 0) throw std::runtime_error(std::string(call) + " failed with status " + std::to_string(code));
}

std::string dotted(int major, int minor, int patch) {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

}  // namespace

std::string built_version() {
  return dotted(NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION);
}

std::string loaded_version() {
  int major = 0, minor = 0, patch = 0;
  nvshmemx_vendor_get_version_info(&major, &minor, &patch);
  return dotted(major, minor, patch);
}

bool initialized() { return nvshmemx_init_status() != NVSHMEM_STATUS_NOT_INITIALIZED; }

std::vector<uint8_t> unique_id() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  nvshmem(nvshmemx_get_uniqueid(&id), "nvshmemx_get_uniqueid");
  std::vector<uint8_t> bytes(sizeof(id));
  std::memcpy(bytes.data(), &id, sizeof(id));
  return bytes;
}

void init(int rank, int ranks, const std::vector<uint8_t>& bytes) {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (bytes.size() != sizeof(id)) throw std::runtime_error("the unique id has " + std::to_string(bytes.size()) + " bytes");
  std::memcpy(&id, bytes.data(), sizeof(id));
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  nvshmem(nvshmemx_set_attr_uniqueid_args(rank, ranks, &id, &attributes), "nvshmemx_set_attr_uniqueid_args");
  nvshmem(nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes), "nvshmemx_init_attr");
}

int rank() { return nvshmem_my_pe(); }

void load_kernels(const std::string& code_object) {
  if (!code_object.empty()) throw std::runtime_error("the NVSHMEM kernels are linked in, no code object is loaded");
  // CUDA loads a kernel at its first launch, which may wait for kernels that run: for an odc_wait, in the worst case.
  cudaFuncAttributes attributes;
  for (int k = 0; k < kKernels; ++k) cuda(cudaFuncGetAttributes(&attributes, kernels[k]), kernel_names[k]);
}

void* allocate(size_t bytes) {
  void* memory = nvshmem_align(4096, bytes);
  if (memory == nullptr) throw std::runtime_error("nvshmem_align: no " + std::to_string(bytes) + " bytes in the symmetric heap");
  return memory;
}

void release(void* memory) { nvshmem_free(memory); }
uint64_t peer_address(void* memory, int pe) { return reinterpret_cast<uint64_t>(nvshmem_ptr(memory, pe)); }

void* device_allocate(size_t bytes) {
  void* memory = nullptr;
  cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
  cuda(cudaMemset(memory, 0, bytes), "cudaMemset");
  cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return memory;
}

void device_release(void* memory) { cuda(cudaFree(memory), "cudaFree"); }

void* host_allocate(size_t bytes) {
  void* memory = nullptr;
  cuda(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  std::memset(memory, 0, bytes);
  return memory;
}

void host_release(void* memory) { cuda(cudaFreeHost(memory), "cudaFreeHost"); }

uint64_t clock_ticks_per_ms() { return 1000000; }  // %globaltimer counts nanoseconds

void launch(Kernel kernel, unsigned columns, unsigned rows, unsigned threads, void** arguments, void* stream) {
  cuda(cudaLaunchKernel(kernels[kernel], dim3(columns, rows), dim3(threads), arguments, 0, static_cast<cudaStream_t>(stream)),
       kernel_names[kernel]);
}

}  // namespace odc::library
