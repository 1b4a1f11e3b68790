// SPDX-License-Identifier: Apache-2.0
// The tap GEMM's arguments and what is refused, the same on every architecture:
//   d[l, m, n] = sum_{tap, c} a[l, m, tap, c] * b[l, n, tap, c] + bias[n] (+ residual[l, m, n])
// in the element type, or in fp32 the plain sum.
#pragma once
#include "launch.cuh"

struct TapGemmProblem {
  int64_t a_stride_m, a_stride_tap, a_stride_batch;  // in elements, channels are contiguous
  int64_t b_stride_n, b_stride_tap, b_stride_batch;
  int64_t d_stride_m, d_stride_batch;  // of d and residual
  int32_t m, n, channels, taps, batch;
};

namespace wan {

// `element`: of a, b and the residual.
inline int check_tap_gemm(const TapGemmProblem& p, const void* a, const void* b, const float* bias,
                          const void* residual, const void* d, Dtype element, int d_dtype) {
  if (p.m < 1 || p.n < 1 || p.channels < 1 || p.taps < 1 || p.batch < 1) return fail("tap_gemm: empty problem");
  if (p.channels % 8 || p.n % 8) {
    return fail("tap_gemm: channels %d -> %d are not multiples of 8", p.channels, p.n);
  }
  // TMA reads even the stride of an extent of one. A stride of 0 repeats: one weight for all batches.
  const int64_t strides[] = {p.a_stride_m,   p.a_stride_tap,   p.a_stride_batch, p.b_stride_n,
                             p.b_stride_tap, p.b_stride_batch, p.d_stride_m,     p.d_stride_batch};
  for (const int64_t stride : strides) {
    if (stride < 0 || stride % 8) {
      return fail("tap_gemm: stride %lld is not a multiple of 16 bytes", (long long)stride);
    }
  }
  if (!is_aligned16(a) || !is_aligned16(b) || !is_aligned16(bias) || !is_aligned16(residual) || !is_aligned16(d)) {
    return fail("tap_gemm: every pointer must be aligned to 16 bytes");
  }
  if (d_dtype != element && d_dtype != kFp32) return fail("tap_gemm: no kernel for results of dtype %d", d_dtype);
  if (d_dtype == kFp32 && (bias != nullptr || residual != nullptr)) {
    return fail("tap_gemm: results in fp32 take neither bias nor residual");
  }
  return 0;
}

}  // namespace wan
