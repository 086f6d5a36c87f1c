// For the compile check without ROCm only: the 8-bit float and bfloat16 types MORI's headers take from ROCm 7's headers. None computes; our
// kernels use none of them.
#pragma once
#include <hip/hip_bfloat16.h>

// As in ROCm: gfx942 has the FNUZ formats, gfx950 the OCP ones, the host both.
#if defined(__gfx942__)
#define HIP_FP8_TYPE_FNUZ 1
#define HIP_FP8_TYPE_OCP 0
#elif defined(__gfx950__)
#define HIP_FP8_TYPE_FNUZ 0
#define HIP_FP8_TYPE_OCP 1
#else
#define HIP_FP8_TYPE_FNUZ 1
#define HIP_FP8_TYPE_OCP 1
#endif

using __hip_fp8_storage_t = uint8_t;
using __hip_fp8x2_storage_t = uint16_t;
using __hip_fp8x4_storage_t = uint32_t;
enum __hip_saturation_t { __HIP_NOSAT, __HIP_SATFINITE };
enum __hip_fp8_interpretation_t { __HIP_E4M3, __HIP_E5M2, __HIP_E4M3_FNUZ, __HIP_E5M2_FNUZ };

struct __hip_bfloat16 {
  __bf16 value;
  __host__ __device__ operator __bf16() const { return value; }
};
struct __hip_bfloat162_raw {
  unsigned short x, y;
};
struct __hip_bfloat162 {
  __hip_bfloat16 x, y;
  __host__ __device__ __hip_bfloat162() = default;
  __host__ __device__ __hip_bfloat162(__hip_bfloat16 first, __hip_bfloat16 second) : x(first), y(second) {}
  template <typename From>
  __host__ __device__ __hip_bfloat162(From) {}
  __host__ __device__ operator __hip_bfloat162_raw() const { return {}; }
};
__device__ __hip_bfloat162 __float22bfloat162_rn(float2);
__device__ __hip_fp8x2_storage_t __hip_cvt_float2_to_fp8x2(float2, __hip_saturation_t, __hip_fp8_interpretation_t);
__device__ __hip_fp8x2_storage_t __hip_cvt_bfloat16raw2_to_fp8x2(__hip_bfloat162_raw, __hip_saturation_t, __hip_fp8_interpretation_t);

namespace odc_stub {
template <typename Storage, typename Wide, __hip_fp8_interpretation_t kFormat>
struct Float8 {
  Storage __x;
  static constexpr __hip_saturation_t __default_saturation = __HIP_SATFINITE;
  static constexpr __hip_fp8_interpretation_t __default_interpret = kFormat;
  __host__ __device__ Float8() = default;
  template <typename... From>
  __host__ __device__ explicit Float8(From...) {}
  __host__ __device__ operator Wide() const { return {}; }
};
}  // namespace odc_stub

using __hip_fp8_e4m3 = odc_stub::Float8<__hip_fp8_storage_t, float, __HIP_E4M3>;
using __hip_fp8_e5m2 = odc_stub::Float8<__hip_fp8_storage_t, float, __HIP_E5M2>;
using __hip_fp8_e4m3_fnuz = odc_stub::Float8<__hip_fp8_storage_t, float, __HIP_E4M3_FNUZ>;
using __hip_fp8_e5m2_fnuz = odc_stub::Float8<__hip_fp8_storage_t, float, __HIP_E5M2_FNUZ>;
using __hip_fp8x4_e4m3 = odc_stub::Float8<__hip_fp8x4_storage_t, float4, __HIP_E4M3>;
using __hip_fp8x4_e4m3_fnuz = odc_stub::Float8<__hip_fp8x4_storage_t, float4, __HIP_E4M3_FNUZ>;
