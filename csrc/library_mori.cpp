// The host half over MORI-SHMEM and the HIP runtime. Compiled as HIP, host side only: MORI's headers then leave out its host network stack,
// which needs packages that nothing here does. The kernels come as a code object that was built on this node, for its GPU and network card.
#include <hip/hip_runtime.h>

#include <cstring>
#include <stdexcept>

#include "arguments.h"
#include "library.h"
#include "mori/shmem/shmem_api.hpp"

namespace odc::library {
namespace {

hipModule_t module = nullptr;
hipFunction_t functions[kKernels] = {};

void hip(hipError_t code, const char* call) {
  if (code != hipSuccess) throw std::runtime_error(std::string(call) + ": " + hipGetErrorString(code));
}

void mori(int code, const char* call) {
  if (code != 0) throw std::runtime_error(std::string(call) + " failed with status " + std::to_string(code));
}

}  // namespace

std::string built_version() { return ODC_MORI_VERSION; }
std::string loaded_version() { return ""; }  // MORI has no call for it: the Python side reads what is installed

bool initialized() { return ::mori::shmem::ShmemIsInitialized(); }

std::vector<uint8_t> unique_id() {
  ::mori::shmem::mori_shmem_uniqueid_t id;
  mori(::mori::shmem::ShmemGetUniqueId(&id), "ShmemGetUniqueId");
  return {id.begin(), id.end()};
}

void init(int rank, int ranks, const std::vector<uint8_t>& bytes) {
  ::mori::shmem::mori_shmem_uniqueid_t id;
  if (bytes.size() != id.size()) throw std::runtime_error("the unique id has " + std::to_string(bytes.size()) + " bytes");
  std::memcpy(id.data(), bytes.data(), id.size());
  ::mori::shmem::mori_shmem_init_attr_t attributes{};
  mori(::mori::shmem::ShmemSetAttrUniqueIdArgs(rank, ranks, &id, &attributes), "ShmemSetAttrUniqueIdArgs");
  mori(::mori::shmem::ShmemInitAttr(::mori::shmem::MORI_SHMEM_INIT_WITH_UNIQUEID, &attributes), "ShmemInitAttr");
}

int rank() { return ::mori::shmem::ShmemMyPe(); }

void load_kernels(const std::string& code_object) {
  hip(hipModuleLoad(&module, code_object.c_str()), "hipModuleLoad");
  for (int k = 0; k < kKernels; ++k) hip(hipModuleGetFunction(&functions[k], module, kernel_names[k]), kernel_names[k]);
  mori(::mori::shmem::ShmemModuleInit(module), "ShmemModuleInit");
}

void* allocate(size_t bytes) {
  void* memory = ::mori::shmem::ShmemMalloc(bytes);
  if (memory == nullptr) throw std::runtime_error("ShmemMalloc: no " + std::to_string(bytes) + " bytes in the symmetric heap");
  return memory;
}

void release(void* memory) { ::mori::shmem::ShmemFree(memory); }

uint64_t peer_address(void* memory, int pe) {
  if (pe == rank()) return reinterpret_cast<uint64_t>(memory);
  return ::mori::shmem::ShmemPtrP2p(reinterpret_cast<uint64_t>(memory), rank(), pe);
}

void* device_allocate(size_t bytes) {
  void* memory = nullptr;
  hip(hipMalloc(&memory, bytes), "hipMalloc");
  hip(hipMemset(memory, 0, bytes), "hipMemset");
  hip(hipDeviceSynchronize(), "hipDeviceSynchronize");
  return memory;
}

void device_release(void* memory) { hip(hipFree(memory), "hipFree"); }

void* host_allocate(size_t bytes) {
  void* memory = nullptr;
  hip(hipHostMalloc(&memory, bytes, hipHostMallocMapped | hipHostMallocPortable | hipHostMallocCoherent), "hipHostMalloc");
  std::memset(memory, 0, bytes);
  return memory;
}

void host_release(void* memory) { hip(hipHostFree(memory), "hipHostFree"); }

uint64_t clock_ticks_per_ms() {
  int device = 0, kilohertz = 0;
  hip(hipGetDevice(&device), "hipGetDevice");
  hip(hipDeviceGetAttribute(&kilohertz, hipDeviceAttributeWallClockRate, device), "hipDeviceAttributeWallClockRate");
  if (kilohertz <= 0) throw std::runtime_error("this GPU does not tell the rate of its wall clock");
  return uint64_t(kilohertz);
}

void launch(Kernel kernel, unsigned columns, unsigned rows, unsigned threads, void** arguments, void* stream) {
  hip(hipModuleLaunchKernel(functions[kernel], columns, rows, 1, threads, 1, 1, 0, static_cast<hipStream_t>(stream), arguments, nullptr),
      kernel_names[kernel]);
}

}  // namespace odc::library
