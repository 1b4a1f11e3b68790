// SPDX-License-Identifier: Apache-2.0
// Input of the nine-product form of nearest x2 + 3x3 conv, for a range of rows of x [F, H, W, C]:
//   d [3, 3, F, rows, W, C], d[i][j] = D_i along rows of D_j along columns, D = (x[-1] - x[0], x[0], x[1] - x[0]),
// with zeros, or halo rows, outside; in fp32, rounded once. A thread takes eight channels of a pixel, nine loads in
// flight, of which caches absorb eight. Bound: memory, x read once and nine times it written.
#include "launch.cuh"
#include "vec8.cuh"

struct DifferencesProblem {
  int32_t frames, rows, columns, channels, halo;
  int32_t first_row, band_rows;
};

namespace wan {

struct DifferencesArguments {
  const void *x, *above, *below;
  void* d;
  int32_t rows, columns, vectors, halo;
  int32_t first_row, band_rows;
};

template <typename T>
__global__ void __launch_bounds__(256) upsample_differences_kernel(const __grid_constant__ DifferencesArguments a) {
  const int32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  const int32_t pixel = index / a.vectors;
  if (pixel >= a.band_rows * a.columns) return;
  const int32_t vector = index - pixel * a.vectors;
  const int32_t band_row = pixel / a.columns;
  const int32_t row = a.first_row + band_row, column = pixel - band_row * a.columns;
  const int64_t frame = blockIdx.y;
  const int64_t row_vectors = int64_t(a.columns) * a.vectors;

  uint4 data[3][3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int32_t y = row + i - 1;
    const uint4* line = nullptr;
    if (y >= 0 && y < a.rows) {
      line = static_cast<const uint4*>(a.x) + (frame * a.rows + y) * row_vectors;
    } else if (a.halo) {
      line = static_cast<const uint4*>(y < 0 ? a.above : a.below) + frame * row_vectors;
    }
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      const int32_t x = column + j - 1;
      const bool inside = line != nullptr && x >= 0 && x < a.columns;
      data[i][j] = inside ? __ldg(line + int64_t(x) * a.vectors + vector) : make_uint4(0, 0, 0, 0);
    }
  }

  const int64_t stride = int64_t(gridDim.y) * a.band_rows * row_vectors;  // between the nine
  uint4* target = static_cast<uint4*>(a.d) + (frame * a.band_rows * a.columns + pixel) * a.vectors + vector;
  float middle[3][8];  // of each column, D along rows
#pragma unroll
  for (int j = 0; j < 3; ++j) to_floats<T>(data[1][j], middle[j]);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    float lines[3][8];
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      to_floats<T>(data[i][j], lines[j]);
#pragma unroll
      for (int c = 0; c < 8; ++c) lines[j][c] -= i == 1 ? 0.0f : middle[j][c];
    }
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      float values[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) values[c] = lines[j][c] - (j == 1 ? 0.0f : lines[1][c]);
      target[(3 * i + j) * stride] = from_floats<T>(values);
    }
  }
}

template <typename T>
int upsample_differences(const DifferencesArguments& a, int frames, cudaStream_t stream) {
  const int64_t threads = int64_t(a.band_rows) * a.columns * a.vectors;
  const dim3 grid(static_cast<unsigned>(ceil_div(threads, 256)), frames);
  upsample_differences_kernel<T><<<grid, 256, 0, stream>>>(a);
  return check_launch("upsample_differences");
}

}  // namespace wan

WAN_EXPORT int wan_upsample_differences(const DifferencesProblem* problem, const void* x, const void* above,
                                        const void* below, void* d, int dtype, int device, cudaStream_t stream) {
  const DifferencesProblem& p = *problem;
  if (p.frames < 1 || p.rows < 1 || p.columns < 1 || p.band_rows < 1) {
    return wan::fail("upsample_differences: empty input");
  }
  if (p.channels < 8 || p.channels % 8) {
    return wan::fail("upsample_differences: %d channels are not a multiple of 8", p.channels);
  }
  if (p.first_row < 0 || p.first_row + int64_t(p.band_rows) > p.rows) {
    return wan::fail("upsample_differences: rows %d + %d of %d", p.first_row, p.band_rows, p.rows);
  }
  // Room for the last block's overhang in 32-bit thread numbers.
  if (p.frames > 65535 || int64_t(p.band_rows) * p.columns * (p.channels / 8) > INT32_MAX - 256) {
    return wan::fail("upsample_differences: a frame of %d x %d is too large", p.band_rows, p.columns);
  }
  if (p.halo && (above == nullptr || below == nullptr)) {
    return wan::fail("upsample_differences: halo rows are missing");
  }
  if (!wan::is_aligned16(x) || !wan::is_aligned16(above) || !wan::is_aligned16(below) || !wan::is_aligned16(d)) {
    return wan::fail("upsample_differences: every pointer must be aligned to 16 bytes");
  }
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  const wan::DifferencesArguments arguments{x,         above,          below,  d,           p.rows,
                                            p.columns, p.channels / 8, p.halo, p.first_row, p.band_rows};
  switch (dtype) {
    case wan::kFp16:
      return wan::upsample_differences<__half>(arguments, p.frames, stream);
    case wan::kBf16:
      return wan::upsample_differences<__nv_bfloat16>(arguments, p.frames, stream);
    default:
      return wan::fail("upsample_differences: no kernel for dtype %d", dtype);
  }
}
