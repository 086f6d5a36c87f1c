// The only place that knows which library and which vendor: device functions over NVSHMEM (CUDA) and MORI-SHMEM (HIP).
//
// Contract of the nic_* functions, unless one says otherwise: all threads of a block call them with the same arguments; what the block
// wrote before may be the source; at most kRequestBytes at a time. `lane` picks a queue pair where the library has several; requests of
// one lane to one PE arrive in order. They are used for PEs that are not mapped here; mapped ones are read and written by plain loads and
// stores, which needs nothing of a library.
#pragma once
#include "arguments.h"

#if defined(__HIP__)
// One code object, loaded by the host half and then given the library's state (ShmemModuleInit): no static constructor of MORI's.
#define MORI_SHMEM_NO_STATIC_INIT
#define MORI_SHMEM_ENABLE_WEAK_GLOBAL_GPU_STATES
#include <hip/hip_runtime.h>  // first: MORI's headers tell host from device by what it defines

#include "mori/shmem/shmem.hpp"
#else
#include <cuda_runtime.h>
#include <nvshmem.h>
#include <nvshmemx.h>
#endif

namespace odc {

#if defined(__HIP__)

__device__ __forceinline__ uint64_t now() { return wall_clock64(); }
__device__ __forceinline__ void relax() { __builtin_amdgcn_s_sleep(8); }

__device__ __forceinline__ uint64_t load_word(const uint64_t* word) { return __hip_atomic_load(word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
__device__ __forceinline__ void store_word(uint64_t* word, uint64_t value) {
  __hip_atomic_store(word, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}

// MORI's waits neither acquire nor have "at least", and cannot be bounded: a load, and a fence where it succeeds.
__device__ __forceinline__ bool reached(uint64_t* word, uint64_t at_least) {
  if (load_word(word) < at_least) return false;
  __threadfence_system();
  return true;
}

__device__ __forceinline__ void nic_get(void* to, const void* from, uint64_t bytes, int pe, int lane) {
  mori::shmem::ShmemGetMemNbiBlock(to, from, bytes, pe, lane);
  // The first thread alone posted the request, so it alone can wait for it, and the others for that thread.
  if (threadIdx.x == 0) mori::shmem::ShmemQuietThread(pe, lane);
  __syncthreads();
  __threadfence_system();
}

__device__ __forceinline__ void nic_put(void* to, const void* from, uint64_t bytes, int pe, int lane) {
  mori::shmem::ShmemPutMemNbiBlock(to, from, bytes, pe, lane);
}

// By one thread. A signal of its own is an inline write of eight bytes; MORI's atomic would be the same, on another path for each card.
__device__ __forceinline__ void nic_signal(uint64_t* signal, uint64_t value, int pe, int lane) {
  __threadfence_system();
  mori::shmem::ShmemPutUint64ImmNbiThread(signal, value, pe, lane);
}

// Waits until this block's requests to `pe` have arrived there.
__device__ __forceinline__ void nic_complete(int pe, int lane) {
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) mori::shmem::ShmemQuietThread(pe, lane);
  __syncthreads();
}

// `bytes` > 0: MORI sends no signal with no data. Earlier nic_put of the lane are ordered before by the queue pair.
__device__ __forceinline__ void nic_put_signal(void* to, const void* from, uint64_t bytes, uint64_t* signal, uint64_t value, int pe, int lane) {
  if (mori::shmem::GetGlobalGpuStatesPtr()->transportTypes[pe] == mori::application::TransportType::RDMA) {
    mori::shmem::ShmemPutMemNbiSignalBlock(to, from, bytes, signal, value, mori::core::AMO_SIGNAL_SET, pe, lane);
    return;
  }
  // Over load and store MORI's own form does not wait for what the block's other waves stored.
  nic_put(to, from, bytes, pe, lane);
  nic_complete(pe, lane);
  if (threadIdx.x == 0) nic_signal(signal, value, pe, lane);
}

#else  // CUDA, NVSHMEM

__device__ __forceinline__ uint64_t now() {
  uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}
__device__ __forceinline__ void relax() { __nanosleep(200); }

__device__ __forceinline__ uint64_t load_word(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ void store_word(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// NVSHMEM's own test: where it succeeds it also makes visible what a network card wrote before the word.
__device__ __forceinline__ bool reached(uint64_t* word, uint64_t at_least) {
  if (!nvshmem_uint64_test(word, NVSHMEM_CMP_GE, at_least)) return false;
  __threadfence_system();
  return true;
}

__device__ __forceinline__ void nic_get(void* to, const void* from, uint64_t bytes, int pe, int) { nvshmemx_getmem_block(to, from, bytes, pe); }

__device__ __forceinline__ void nic_put(void* to, const void* from, uint64_t bytes, int pe, int) {
  nvshmemx_putmem_nbi_block(to, from, bytes, pe);
  // A later signal follows its own data only: requests before it need a fence.
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) nvshmem_fence();
  __syncthreads();
}

__device__ __forceinline__ void nic_signal(uint64_t* signal, uint64_t value, int pe, int) {
  __threadfence_system();
  nvshmemx_signal_op(signal, value, NVSHMEM_SIGNAL_SET, pe);
}

__device__ __forceinline__ void nic_complete(int, int) {
  __threadfence_system();  // quiet fences the stores of the thread that calls it
  __syncthreads();
  if (threadIdx.x == 0) nvshmem_quiet();
  __syncthreads();
}

__device__ __forceinline__ void nic_put_signal(void* to, const void* from, uint64_t bytes, uint64_t* signal, uint64_t value, int pe, int) {
  nvshmemx_putmem_signal_nbi_block(to, from, bytes, signal, value, NVSHMEM_SIGNAL_SET, pe);
}

#endif

}  // namespace odc
