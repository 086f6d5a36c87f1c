// All kernels, for CUDA with NVSHMEM and for HIP with MORI-SHMEM.
//
// A kernel never waits for a peer's minibatch: transfers complete by themselves, and odc_wait, which is for what was promised or already
// seen by the host, ends after a given time. It then writes who was awaited, where, what was expected and what was found; every later
// kernel of this arena does nothing, and the host raises.
//
// Order. What a launch moved has arrived when the launch ends, in both directions, so the order of a stream is the order of its effects:
// a signal launched behind a put is stored behind its data. To PEs reached by the network a put sends data and signal on one queue pair.
#include "copy.h"

namespace odc {

// The whole block leaves, or nobody: later code synchronises the block.
__device__ __forceinline__ bool failed_before(const Context& context) {
  __shared__ bool failed;
  if (threadIdx.x == 0) failed = *reinterpret_cast<volatile uint64_t*>(&context.claimed->code) != kNoFailure;
  __syncthreads();
  return failed;
}

__device__ __forceinline__ void fail(const Context& context, Failure code, int pe, uint64_t offset, uint64_t expected, uint64_t found) {
  auto* claim = reinterpret_cast<unsigned long long*>(&context.claimed->code);
  if (atomicCAS(claim, static_cast<unsigned long long>(kNoFailure), static_cast<unsigned long long>(kClaimed)) != kNoFailure) return;
  Status* report = context.reported;
  report->who = uint64_t(pe);
  report->what = offset;
  report->expected = expected;
  report->found = found;
  __threadfence_system();
  store_word(&report->code, code);
}

// Byte `i` of a pattern that differs between seeds and between places.
__device__ __forceinline__ unsigned char pattern(uint64_t seed, uint64_t i) {
  uint64_t x = seed * 0x9E3779B97F4A7C15ull + (i / 8 + 1) * 0xD1B54A32D192ED03ull;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9ull;
  return static_cast<unsigned char>(x >> (8 * (i % 8)));
}

}  // namespace odc

using namespace odc;

// Row y of the grid reads transfer y.
extern "C" __global__ void __launch_bounds__(512) odc_get(Context context, Transfers transfers) {
  if (failed_before(context)) return;
  const Transfer& t = transfers.of[blockIdx.y];
  if (t.peer) {
    copy_bytes(t.local, t.peer, t.bytes, blockIdx.x, gridDim.x);
    return;
  }
  // Each block of the row reads a part of its own on a queue pair of its own.
  const uint64_t part = (t.bytes + gridDim.x - 1) / gridDim.x;
  const uint64_t share = (part + 255) / 256 * 256;
  const uint64_t begin = share * blockIdx.x, end = begin + share < t.bytes ? begin + share : t.bytes;
  for (uint64_t at = begin; at < end; at += kRequestBytes) {
    const uint64_t bytes = end - at < kRequestBytes ? end - at : kRequestBytes;
    nic_get(reinterpret_cast<void*>(t.local + at), reinterpret_cast<const void*>(t.symmetric + at), bytes, t.pe, blockIdx.x);
  }
}

// Row y of the grid writes transfer y. Signals to mapped PEs are stored by odc_signal, launched behind this kernel.
extern "C" __global__ void __launch_bounds__(512) odc_put(Context context, Transfers transfers) {
  if (failed_before(context)) return;
  const Transfer& t = transfers.of[blockIdx.y];
  if (t.peer) {
    copy_bytes(t.peer, t.local, t.bytes, blockIdx.x, gridDim.x);
    __threadfence_system();
    return;
  }
  if (blockIdx.x != 0) return;  // one queue pair, so that the signal cannot overtake data
  const int lane = blockIdx.y;
  auto* signal = reinterpret_cast<uint64_t*>(t.symmetric_signal);
  for (uint64_t at = 0; at < t.bytes; at += kRequestBytes) {
    auto* to = reinterpret_cast<void*>(t.symmetric + at);
    auto* from = reinterpret_cast<const void*>(t.local + at);
    if (t.bytes - at > kRequestBytes || signal == nullptr)
      nic_put(to, from, t.bytes - at > kRequestBytes ? kRequestBytes : t.bytes - at, t.pe, lane);
    else
      nic_put_signal(to, from, t.bytes - at, signal, t.value, t.pe, lane);
  }
  if (t.bytes == 0 && signal != nullptr && threadIdx.x == 0) nic_signal(signal, t.value, t.pe, lane);
  nic_complete(t.pe, lane);  // the source may be overwritten behind this kernel
}

// Block y stores the signal of transfer y.
extern "C" __global__ void __launch_bounds__(64) odc_signal(Context context, Transfers transfers) {
  if (failed_before(context)) return;
  const Transfer& t = transfers.of[blockIdx.y];
  if (t.symmetric_signal == 0) return;
  if (t.peer_signal) {
    if (threadIdx.x == 0) {
      __threadfence_system();
      store_word(reinterpret_cast<uint64_t*>(t.peer_signal), t.value);
    }
    return;
  }
  if (threadIdx.x == 0) nic_signal(reinterpret_cast<uint64_t*>(t.symmetric_signal), t.value, t.pe, 0);
  nic_complete(t.pe, 0);
}

// Thread i waits for word i, `ticks` of the device's clock at most.
extern "C" __global__ void __launch_bounds__(64) odc_wait(Context context, Waits waits, int count, uint64_t ticks) {
  if (failed_before(context)) return;
  if (int(threadIdx.x) >= count) return;
  const Wait& wait = waits.of[threadIdx.x];
  auto* word = reinterpret_cast<uint64_t*>(wait.address);
  for (uint64_t begin = now(); !reached(word, wait.at_least); relax()) {
    if (now() - begin <= ticks) continue;
    fail(context, kWaitTimedOut, wait.pe, wait.address - context.arena, wait.at_least, load_word(word));
    return;
  }
}

extern "C" __global__ void __launch_bounds__(512)
    odc_sum_float32(Context context, uint64_t out, Sources sources, int n, uint64_t count, int add) {
  if (!failed_before(context)) sum<float>(out, sources, n, count, add != 0);
}

extern "C" __global__ void __launch_bounds__(512)
    odc_sum_float64(Context context, uint64_t out, Sources sources, int n, uint64_t count, int add) {
  if (!failed_before(context)) sum<double>(out, sources, n, count, add != 0);
}

extern "C" __global__ void __launch_bounds__(512) odc_fill_pattern(uint64_t to, uint64_t bytes, uint64_t seed) {
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes; i += uint64_t(gridDim.x) * blockDim.x)
    reinterpret_cast<unsigned char*>(to)[i] = pattern(seed, i);
}

extern "C" __global__ void __launch_bounds__(512)
    odc_check_pattern(Context context, uint64_t from, uint64_t bytes, uint64_t seed, int pe) {
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < bytes; i += uint64_t(gridDim.x) * blockDim.x) {
    const unsigned char found = reinterpret_cast<const unsigned char*>(from)[i], expected = pattern(seed, i);
    if (found != expected) fail(context, kPatternDiffers, pe, from + i - context.arena, expected, found);
  }
}
