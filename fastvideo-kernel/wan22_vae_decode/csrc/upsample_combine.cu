// SPDX-License-Identifier: Apache-2.0
// Second half of nearest x2 + 3x3 conv: interleaves the four phases and adds bias and DupUp3D shortcut,
//   y[j, 2h+r, 2w+c, o] = phase[r][c][j, h, w, o] + bias[o] + s[(j+skip)/f, h, w, (4f*o + 4*((j+skip)%f) + 2r + c) / q]
// with q = 4f * C_out / C_s. Phases are given as such, parts [2, 2, F, rows, W, C_out], or as nine products, parts
// [3, 3, ...], of which phase[r][c] is the sum of rows r, r + 1 and columns c, c + 1. Parts are dense and cover a range
// of rows of s [T, H, W, C_s] and y [F, 2H, 2W, C_out]. A thread takes eight channels of one source pixel, all its
// loads in flight before the first use. Bound: memory (parts and shortcut read once, y written once).
#include "launch.cuh"
#include "vec8.cuh"

struct UpsampleProblem {
  int32_t frames, rows, columns, channels;  // F, H, W, C_out
  int32_t shortcut_channels, time_factor;   // C_s, f
  int32_t first_frame;                      // j + skip of the first frame here
  int32_t first_row, image_rows, products;  // of s; H; whether parts are products
};

namespace wan {

struct UpsampleArguments {
  const void *parts, *shortcut;
  const float* bias;
  void* y;
  uint32_t rows, columns, vectors;
  uint32_t shortcut_channels, time_factor, first_frame, repeats;
  uint32_t first_row, image_rows;
  int64_t part_stride;  // in elements
};

enum class Shortcut {
  kSame,     // C_s = C_out: channel o for every phase
  kRowPair,  // C_s = 2 C_out, f = 1: channel 2o + r
  kAny,
};

template <typename T, bool kProducts>
__device__ inline void sum_parts(const uint4* parts, int row, int column, float (&sums)[8]) {
  if constexpr (!kProducts) {
    to_floats<T>(parts[2 * row + column], sums);
  } else {
    to_floats<T>(parts[3 * row + column], sums);
#pragma unroll
    for (int k = 1; k < 4; ++k) {
      float values[8];
      to_floats<T>(parts[3 * (row + k / 2) + column + k % 2], values);
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[i] += values[i];
    }
  }
}

template <typename T, Shortcut kShortcut, bool kProducts>
__global__ void __launch_bounds__(256) upsample_combine_kernel(const __grid_constant__ UpsampleArguments a) {
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t pixel = index / a.vectors;
  if (pixel >= a.rows * a.columns) return;
  const uint32_t vector = index - pixel * a.vectors;
  const uint32_t row = pixel / a.columns;
  const uint32_t column = pixel - row * a.columns;
  const uint32_t j = blockIdx.y;
  const int64_t channels = int64_t(a.vectors) * 8;
  const int64_t frame_pixels = int64_t(a.rows) * a.columns;

  constexpr int kParts = kProducts ? 9 : 4;
  const T* part = static_cast<const T*>(a.parts) + (j * frame_pixels + pixel) * channels + 8 * vector;
  uint4 parts[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) parts[i] = *reinterpret_cast<const uint4*>(part + i * a.part_stride);

  const uint32_t time = a.first_frame + j;
  const uint32_t source_frame = time / a.time_factor;
  const uint32_t time_phase = time - source_frame * a.time_factor;
  const int64_t image_pixel = (int64_t(source_frame) * a.image_rows + a.first_row) * a.columns + pixel;
  const T* source = static_cast<const T*>(a.shortcut) + image_pixel * a.shortcut_channels;
  float shortcut[2][8];  // of row phase 0 and 1, where it does not depend on the column phase
  if constexpr (kShortcut == Shortcut::kSame) {
    to_floats<T>(*reinterpret_cast<const uint4*>(source + 8 * vector), shortcut[0]);
  } else if constexpr (kShortcut == Shortcut::kRowPair) {
    float low[8], high[8];
    to_floats<T>(*reinterpret_cast<const uint4*>(source + 16 * vector), low);
    to_floats<T>(*reinterpret_cast<const uint4*>(source + 16 * vector + 8), high);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      shortcut[0][i] = low[2 * i], shortcut[1][i] = low[2 * i + 1];
      shortcut[0][i + 4] = high[2 * i], shortcut[1][i + 4] = high[2 * i + 1];
    }
  }
  float bias[8];
  load_floats(a.bias + 8 * vector, bias);

  const int64_t line = 2 * (int64_t(j) * a.image_rows + a.first_row + row);
  T* y = static_cast<T*>(a.y) + (line * 2 * a.columns + 2 * column) * channels + 8 * vector;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float values[8];
      sum_parts<T, kProducts>(parts, r, c, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float extra;
        if constexpr (kShortcut == Shortcut::kAny) {
          const uint32_t position = (8 * vector + i) * 4 * a.time_factor + 4 * time_phase + 2 * r + c;
          extra = to_float(source[position / a.repeats]);
        } else {
          extra = shortcut[kShortcut == Shortcut::kSame ? 0 : r][i];
        }
        values[i] += bias[i] + extra;
      }
      *reinterpret_cast<uint4*>(y + (r * 2 * int64_t(a.columns) + c) * channels) = from_floats<T>(values);
    }
  }
}

template <typename T, bool kProducts>
int upsample_combine(const UpsampleArguments& a, uint32_t frames, cudaStream_t stream) {
  const int64_t threads = int64_t(a.rows) * a.columns * a.vectors;
  const dim3 grid(static_cast<unsigned>(ceil_div(threads, 256)), frames);
  if (a.shortcut_channels == a.vectors * 8) {
    upsample_combine_kernel<T, Shortcut::kSame, kProducts><<<grid, 256, 0, stream>>>(a);
  } else if (a.shortcut_channels == a.vectors * 16 && a.time_factor == 1) {
    upsample_combine_kernel<T, Shortcut::kRowPair, kProducts><<<grid, 256, 0, stream>>>(a);
  } else {
    upsample_combine_kernel<T, Shortcut::kAny, kProducts><<<grid, 256, 0, stream>>>(a);
  }
  return check_launch("upsample_combine");
}

}  // namespace wan

WAN_EXPORT int wan_upsample_combine(const UpsampleProblem* problem, const void* parts, const float* bias,
                                    const void* shortcut, void* y, int dtype, int device, cudaStream_t stream) {
  const UpsampleProblem& p = *problem;
  if (p.frames < 1 || p.rows < 1 || p.columns < 1) return wan::fail("upsample_combine: empty input");
  if (p.channels < 8 || p.channels % 8 || p.shortcut_channels < 8 || p.shortcut_channels % 8) {
    return wan::fail("upsample_combine: channels %d, %d are not multiples of 8", p.channels, p.shortcut_channels);
  }
  const int32_t enlarged = p.channels * 4 * p.time_factor;
  if (enlarged % p.shortcut_channels) {
    return wan::fail("upsample_combine: %d shortcut channels do not divide %d", p.shortcut_channels, enlarged);
  }
  if (p.first_row < 0 || p.first_row + int64_t(p.rows) > p.image_rows) {
    return wan::fail("upsample_combine: rows %d + %d of %d", p.first_row, p.rows, p.image_rows);
  }
  if (p.frames > 65535 || int64_t(p.rows) * p.columns * (p.channels / 8) > INT32_MAX) {
    return wan::fail("upsample_combine: a frame of %d x %d is too large", p.rows, p.columns);
  }
  if (!wan::is_aligned16(parts) || !wan::is_aligned16(bias) || !wan::is_aligned16(shortcut) || !wan::is_aligned16(y)) {
    return wan::fail("upsample_combine: every pointer must be aligned to 16 bytes");
  }
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  const wan::UpsampleArguments arguments{parts,
                                         shortcut,
                                         bias,
                                         y,
                                         uint32_t(p.rows),
                                         uint32_t(p.columns),
                                         uint32_t(p.channels / 8),
                                         uint32_t(p.shortcut_channels),
                                         uint32_t(p.time_factor),
                                         uint32_t(p.first_frame),
                                         uint32_t(enlarged / p.shortcut_channels),
                                         uint32_t(p.first_row),
                                         uint32_t(p.image_rows),
                                         int64_t(p.frames) * p.rows * p.columns * p.channels};
  switch (dtype) {
    case wan::kFp16:
      return p.products ? wan::upsample_combine<__half, true>(arguments, p.frames, stream)
                        : wan::upsample_combine<__half, false>(arguments, p.frames, stream);
    case wan::kBf16:
      return p.products ? wan::upsample_combine<__nv_bfloat16, true>(arguments, p.frames, stream)
                        : wan::upsample_combine<__nv_bfloat16, false>(arguments, p.frames, stream);
    default:
      return wan::fail("upsample_combine: no kernel for dtype %d", dtype);
  }
}
