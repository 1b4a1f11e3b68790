// SPDX-License-Identifier: Apache-2.0
// The direct conv's arguments, what is refused and the shape that CUTLASS takes, the same on every architecture:
//   y[b,t,h,w,n] = sum_{i,j,k,c} x[b, t+i, h+j-pad_h, w+k-pad_w, c] * w[n,i,j,k,c] + bias[n] (+ residual[b,t,h,w,n])
// x is channels-last with any batch, frame and row stride; time is never padded (causal history and halo rows lie in
// x); y and residual are dense.
#pragma once
#include "tensor_core.cuh"

// CUTLASS's conv headers compile in this order only.
#include "cutlass/conv/convolution.h"

#include "cutlass/conv/convnd_problem_shape.hpp"

struct Conv3dProblem {
  int64_t stride_batch, stride_frame, stride_row;  // of x, in elements
  int32_t batch, frames, rows, columns, c_in;      // of x as stored
  int32_t c_out, taps_t, taps_h, taps_w;
  int32_t pad_top, pad_bottom, pad_left, pad_right;
};

namespace wan {

using ConvShape = cutlass::conv::ConvProblemShape<cutlass::conv::Operator::kFprop, 3>;

inline int64_t output_pixels(const Conv3dProblem& p) {
  return int64_t(p.batch) * (p.frames - p.taps_t + 1) * (p.rows + p.pad_top + p.pad_bottom - p.taps_h + 1) *
         (p.columns + p.pad_left + p.pad_right - p.taps_w + 1);
}

inline int check_conv3d(const Conv3dProblem& p, const void* x, const void* w, const float* bias, const void* residual,
                        const void* y) {
  if (p.c_in % 8 || p.c_out % 8) return fail("conv3d: channels %d -> %d are not multiples of 8", p.c_in, p.c_out);
  if (p.stride_batch % 8 || p.stride_frame % 8 || p.stride_row % 8) {
    return fail("conv3d: strides of x must be multiples of 16 bytes");
  }
  if (p.batch < 1 || p.frames < p.taps_t || p.rows + p.pad_top + p.pad_bottom < p.taps_h ||
      p.columns + p.pad_left + p.pad_right < p.taps_w) {
    return fail("conv3d: input of %d x %d x %d x %d is smaller than the taps", p.batch, p.frames, p.rows, p.columns);
  }
  if (output_pixels(p) > INT32_MAX) {
    return fail("conv3d: %lld output pixels exceed the TMA limit", (long long)output_pixels(p));
  }
  if (!is_aligned16(x) || !is_aligned16(w) || !is_aligned16(bias) || !is_aligned16(residual) || !is_aligned16(y)) {
    return fail("conv3d: every pointer must be aligned to 16 bytes");
  }
  return 0;
}

inline ConvShape conv_shape(const Conv3dProblem& p) {
  const int64_t c_in = p.c_in;
  const ConvShape::TensorStride x_stride{p.stride_batch, p.stride_frame, p.stride_row, c_in, 1};
  const ConvShape::TensorStride w_stride{p.taps_t * p.taps_h * p.taps_w * c_in, p.taps_h * p.taps_w * c_in,
                                         p.taps_w * c_in, c_in, 1};
  return ConvShape(cutlass::conv::Mode::kCrossCorrelation, {p.batch, p.frames, p.rows, p.columns, p.c_in}, x_stride,
                   {p.c_out, p.taps_t, p.taps_h, p.taps_w, p.c_in}, w_stride, {0, p.pad_top, p.pad_left},
                   {0, p.pad_bottom, p.pad_right}, {1, 1, 1}, {1, 1, 1}, 1);
}

}  // namespace wan
