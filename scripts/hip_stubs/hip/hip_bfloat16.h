// For the compile check without ROCm only: the name MORI's headers take from HIP's header of this name.
#pragma once
#include <hip/hip_runtime.h>

#include <cstdint>

struct hip_bfloat16 {
  uint16_t data;
  hip_bfloat16() = default;
  __host__ __device__ explicit hip_bfloat16(float value) : data(uint16_t(__builtin_bit_cast(uint32_t, value) >> 16)) {}
  __host__ __device__ operator float() const { return __builtin_bit_cast(float, uint32_t(data) << 16); }
};
