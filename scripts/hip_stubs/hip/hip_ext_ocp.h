// For the compile check without ROCm only: the names MORI's 4-bit float helpers take from ROCm 7's header of this name. None computes.
#pragma once
#include <hip/hip_fp8.h>

using __amd_bf16_storage_t = __bf16;
typedef __bf16 __amd_bf16x2_storage_t __attribute__((ext_vector_type(2)));
typedef float __amd_floatx2_storage_t __attribute__((ext_vector_type(2)));

namespace fcbx {
enum class Encoding { E2M1 };
template <typename To, Encoding, bool>
__host__ __device__ uint8_t from_float(To, int) {
  return 0;
}
template <typename To, Encoding, bool>
__host__ __device__ To to_float(unsigned, int) {
  return {};
}
}  // namespace fcbx
