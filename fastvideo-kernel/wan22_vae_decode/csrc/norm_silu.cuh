// SPDX-License-Identifier: Apache-2.0
// RMS norm over a pixel's channels, then SiLU: n = x / max(|x|_2, 1e-12) * gamma, y = n * sigmoid(n), in fp32, rounded
// once. One warp a pixel: a lane holds the vectors of eight channels lane, lane + 32, ... Kernels that share this give
// the same bits for the same pixel, so a history may be made by one and continued by another.
#pragma once
#include "vec8.cuh"

namespace wan {

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

template <typename T>
__device__ inline float sum_of_squares(uint4 bits) {
  float values[8];
  to_floats<T>(bits, values);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(values[i], values[i], sum);
  return sum;
}

// Flushing denormals loses nothing in the following, and saves the instructions that would rescale them.
__device__ inline float inverse_norm(float sum) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaxf(sum, 1e-24f)));
  return y;
}
__device__ inline float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_flushed(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kMinusLog2E = -1.44269504f;

// What a channel's normalised value is multiplied by: gamma, and for SiLU the exponential's factor.
template <bool kSilu>
__device__ inline void load_weights(const float* gamma, float (&weights)[8]) {
  load_floats(gamma, weights);
#pragma unroll
  for (int i = 0; i < 8; ++i) weights[i] *= kSilu ? kMinusLog2E : 1.0f;
}

// n * sigmoid(n) from m = -log2(e) n, of two values, which share a reciprocal: special functions are what norm and SiLU
// wait for. Below n = -41 the result is no more than 1e-16 in any type.
__device__ inline void silu(float& first, float& second) {
  constexpr float kMost = 60.0f;
  const float a = fmaf(exp2_flushed(fminf(first, kMost)), kMinusLog2E, kMinusLog2E);
  const float b = fmaf(exp2_flushed(fminf(second, kMost)), kMinusLog2E, kMinusLog2E);
  const float shared = reciprocal_flushed(a * b);
  first *= shared * b, second *= shared * a;
}

template <typename T, bool kSilu>
__device__ inline uint4 normalise(uint4 bits, float scale, const float (&weights)[8]) {
  float values[8];
  to_floats<T>(bits, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = values[i] * scale * weights[i];
  if constexpr (kSilu) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) silu(values[i], values[i + 1]);
  }
  return from_floats<T>(values);
}

}  // namespace wan
