// Loads, sums and stores of a whole grid row, as wide as the addresses allow. `part` of `parts` blocks work on one range.
#pragma once
#include "portable.h"

namespace odc {

template <typename V>
__device__ __forceinline__ void copy_items(V* to, const V* from, uint64_t count, unsigned part, unsigned parts) {
  const uint64_t stride = uint64_t(parts) * blockDim.x;
  uint64_t i = uint64_t(part) * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {  // four loads on their way at a time
    V a = from[i], b = from[i + stride], c = from[i + 2 * stride], d = from[i + 3 * stride];
    to[i] = a, to[i + stride] = b, to[i + 2 * stride] = c, to[i + 3 * stride] = d;
  }
  for (; i < count; i += stride) to[i] = from[i];
}

// `to` and `from` have the same address modulo sizeof(V): single bytes up to the first aligned address, items, single bytes again.
template <typename V>
__device__ __forceinline__ void copy_aligned(uint64_t to, uint64_t from, uint64_t bytes, unsigned part, unsigned parts) {
  uint64_t head = (sizeof(V) - to % sizeof(V)) % sizeof(V);
  if (head > bytes) head = bytes;
  const uint64_t items = (bytes - head) / sizeof(V), tail = head + items * sizeof(V);
  copy_items(reinterpret_cast<V*>(to + head), reinterpret_cast<const V*>(from + head), items, part, parts);
  if (part != 0) return;
  auto* out = reinterpret_cast<unsigned char*>(to);
  auto* in = reinterpret_cast<const unsigned char*>(from);
  if (threadIdx.x < head) out[threadIdx.x] = in[threadIdx.x];
  if (tail + threadIdx.x < bytes) out[tail + threadIdx.x] = in[tail + threadIdx.x];  // fewer than a block has threads
}

__device__ __forceinline__ void copy_bytes(uint64_t to, uint64_t from, uint64_t bytes, unsigned part, unsigned parts) {
  const uint64_t distance = to - from;
  if (distance % 16 == 0)
    copy_aligned<uint4>(to, from, bytes, part, parts);
  else if (distance % 4 == 0)
    copy_aligned<uint32_t>(to, from, bytes, part, parts);
  else if (distance % 2 == 0)
    copy_aligned<uint16_t>(to, from, bytes, part, parts);
  else
    copy_aligned<uint8_t>(to, from, bytes, part, parts);
}

// Sixteen bytes of numbers.
template <typename T>
struct alignas(16) Pack {
  static constexpr int kLength = 16 / sizeof(T);
  T at[kLength];
  __device__ void add(const Pack& other) {
#pragma unroll
    for (int k = 0; k < kLength; ++k) at[k] += other.at[k];
  }
};

template <typename T>
struct One {
  static constexpr int kLength = 1;
  T at[1];
  __device__ void add(const One& other) { at[0] += other.at[0]; }
};

// Items [first, count) of `out` := (add ? out : 0) + source 0 + source 1 + ..., added in this order for every item, kItems of them at a
// time. Returns the first item it left out.
template <typename P, int kItems>
__device__ __forceinline__ uint64_t sum_items(P* out, const Sources& sources, int n, uint64_t i, uint64_t count, uint64_t stride, bool add) {
  for (; i + (kItems - 1) * stride < count; i += kItems * stride) {
    P total[kItems] = {};
    if (add) {
#pragma unroll
      for (int k = 0; k < kItems; ++k) total[k] = out[i + k * stride];
    }
#pragma unroll 4
    for (int s = 0; s < n; ++s) {
      const P* source = reinterpret_cast<const P*>(sources.address[s]);
      P value[kItems];
#pragma unroll
      for (int k = 0; k < kItems; ++k) value[k] = source[i + k * stride];
#pragma unroll
      for (int k = 0; k < kItems; ++k) total[k].add(value[k]);
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) out[i + k * stride] = total[k];
  }
  return i;
}

template <typename P>
__device__ __forceinline__ void sum_range(P* out, const Sources& sources, int n, uint64_t count, bool add) {
  const uint64_t stride = uint64_t(gridDim.x) * blockDim.x;
  const uint64_t first = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  sum_items<P, 1>(out, sources, n, sum_items<P, 4>(out, sources, n, first, count, stride, add), count, stride, add);
}

template <typename T>
__device__ __forceinline__ void sum(uint64_t out, const Sources& sources, int n, uint64_t count, bool add) {
  uint64_t misaligned = out % 16;
  for (int s = 0; s < n; ++s) misaligned |= sources.address[s] % 16;
  if (misaligned) {
    sum_range(reinterpret_cast<One<T>*>(out), sources, n, count, add);
    return;
  }
  const uint64_t packs = count / Pack<T>::kLength, done = packs * Pack<T>::kLength;
  sum_range(reinterpret_cast<Pack<T>*>(out), sources, n, packs, add);
  if (blockIdx.x == 0 && done + threadIdx.x < count) {
    const uint64_t i = done + threadIdx.x;
    T total = add ? reinterpret_cast<T*>(out)[i] : T(0);
    for (int s = 0; s < n; ++s) total += reinterpret_cast<const T*>(sources.address[s])[i];
    reinterpret_cast<T*>(out)[i] = total;
  }
}

}  // namespace odc
