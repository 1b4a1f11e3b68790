// SPDX-License-Identifier: Apache-2.0
// Eight neighbouring channels as one 16-byte access, computed on in fp32.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace wan {

__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

__device__ inline float2 unpack(__half2 pair) { return __half22float2(pair); }
__device__ inline float2 unpack(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
template <typename T>
struct Pair;
template <>
struct Pair<__half> {
  using type = __half2;
  static __device__ __half2 pack(float a, float b) { return __floats2half2_rn(a, b); }
};
template <>
struct Pair<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static __device__ __nv_bfloat162 pack(float a, float b) { return __floats2bfloat162_rn(a, b); }
};

// The bits of eight elements, as one load or store moves them.
union Bits8 {
  uint4 bits;
  uint32_t words[4];
};

template <typename T>
__device__ inline void to_floats(uint4 bits, float (&values)[8]) {
  using T2 = typename Pair<T>::type;
  Bits8 vector{bits};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack(*reinterpret_cast<const T2*>(&vector.words[i]));
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

template <typename T>
__device__ inline uint4 from_floats(const float (&values)[8]) {
  using T2 = typename Pair<T>::type;
  Bits8 vector;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const T2 pair = Pair<T>::pack(values[2 * i], values[2 * i + 1]);
    vector.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return vector.bits;
}

__device__ inline void load_floats(const float* source, float (&values)[8]) {
  const float4 low = __ldg(reinterpret_cast<const float4*>(source));
  const float4 high = __ldg(reinterpret_cast<const float4*>(source) + 1);
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

}  // namespace wan
