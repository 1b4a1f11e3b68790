// SPDX-License-Identifier: Apache-2.0
// Output transform of nearest x2 + 3x3 conv as F(3x3, 2x2), with bias and DupUp3D shortcut, for a range of tile rows:
//   y[j, 2h+r, 2w+c, o] = (A^T m[r][c] A)[h][w] + bias[o] + shortcut (upsample_shortcut.cuh)
// in fp32, rounded once; m [16, F, tile rows, tiles, 2, 2, C] are the components' products of the four phases. Tile k
// makes even outputs (r = 0) of the source rows 3k to 3k + 2 and odd ones of 3k - 1 to 3k + 1, counted in the image;
// likewise across. What lies outside of s [T, H, W, C_s], which may be a band of the image, and of y [F, 2H, 2W, C] is
// cropped. A thread takes eight channels of a tile and phase, sixteen loads in flight before the first use.
// Bound: memory, of F * H * W * C 64 / 9 read, 4 written, and the shortcut read once (L2 holds it for all phases).
#include "launch.cuh"
#include "upsample.cuh"
#include "upsample_shortcut.cuh"

struct UpsampleOutputProblem {
  int32_t frames, rows, columns, channels;       // F, H, W, C
  int32_t shortcut_channels, time_factor;        // C_s, f
  int32_t first_frame;                           // of the enlarged shortcut, at the first frame here
  int32_t first_row, first_tile_row, tile_rows;  // first_row: of y and s in the image, in source rows
};

namespace wan {

struct UpsampleOutputArguments {
  const void *m, *shortcut;
  const float* bias;
  void* y;
  int32_t rows, columns;
  uint32_t vectors, shortcut_channels, time_factor, first_frame, repeats;
  int32_t top;                   // source row of y that the first tile's even outputs begin at, maybe negative
  uint32_t tiles_across, items;  // items: tiles x phases x vectors of a frame
};

namespace upsample {

// A thread's eight channels of a tile and phase; `top` and `left` are its first source pixel, maybe outside.
struct Place {
  int32_t top, left;
  uint32_t row_phase, column_phase, vector;
};

// Row kRow of a tile's outputs.
template <typename T, Shortcut kShortcut, int kRow>
__device__ inline void store_row(const UpsampleOutputArguments& a, const Place& place,
                                 const uint4 (&m)[kWindow][kWindow]) {
  const int32_t row = place.top + kRow;
  if (row < 0 || row >= a.rows) return;
  const uint32_t time = a.first_frame + blockIdx.y;
  const uint32_t source_frame = time / a.time_factor, time_phase = time - source_frame * a.time_factor;
  const int64_t source_row = int64_t(source_frame) * a.rows + row;
  const T* source = static_cast<const T*>(a.shortcut) + source_row * a.columns * a.shortcut_channels;
  const int64_t target_row = 2 * (int64_t(blockIdx.y) * a.rows + row) + place.row_phase;
  uint4* target = static_cast<uint4*>(a.y) + (target_row * 2 * a.columns + place.column_phase) * a.vectors;

  ShortcutVectors<T, kShortcut> shortcut[kTile];
#pragma unroll
  for (int q = 0; q < kTile; ++q) {
    const int32_t column = place.left + q;
    if (column < 0 || column >= a.columns) continue;
    shortcut[q].load(source + int64_t(column) * a.shortcut_channels, place.vector);
  }
  float line[kWindow][8];
#pragma unroll
  for (int j = 0; j < kWindow; ++j) {
    float rows[kWindow][8];
#pragma unroll
    for (int i = 0; i < kWindow; ++i) to_floats<T>(m[i][j], rows[i]);
#pragma unroll
    for (int c = 0; c < 8; ++c) line[j][c] = output(kRow, rows[0][c], rows[1][c], rows[2][c], rows[3][c]);
  }
  float bias[8];
  load_floats(a.bias + 8 * place.vector, bias);
#pragma unroll
  for (int q = 0; q < kTile; ++q) {
    const int32_t column = place.left + q;
    if (column < 0 || column >= a.columns) continue;
    float values[8];
    shortcut[q].values(source + int64_t(column) * a.shortcut_channels, place.vector, a.time_factor, a.repeats,
                       time_phase, place.row_phase, place.column_phase, values);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      values[c] += bias[c] + output(q, line[0][c], line[1][c], line[2][c], line[3][c]);
    }
    target[2 * int64_t(column) * a.vectors + place.vector] = from_floats<T>(values);
  }
}

template <typename T, Shortcut kShortcut>
__global__ void __launch_bounds__(128, 4) upsample_output_kernel(const __grid_constant__ UpsampleOutputArguments a) {
  const uint32_t item = blockIdx.x * blockDim.x + threadIdx.x;
  if (item >= a.items) return;
  const uint32_t group = item / a.vectors;  // of a tile and phase
  const uint32_t tile = group / 4, phase = group % 4;
  const uint32_t tile_row = tile / a.tiles_across, tile_column = tile - tile_row * a.tiles_across;

  const int64_t stride = int64_t(gridDim.y) * a.items;  // between components
  const uint4* source = static_cast<const uint4*>(a.m) + blockIdx.y * int64_t(a.items) + item;
  uint4 m[kWindow][kWindow];
#pragma unroll
  for (int i = 0; i < kWindow; ++i) {
#pragma unroll
    for (int j = 0; j < kWindow; ++j) m[i][j] = __ldg(source + (kWindow * i + j) * stride);
  }
  Place place;
  place.row_phase = phase / 2, place.column_phase = phase % 2;
  place.vector = item - group * a.vectors;
  // A tile's odd outputs belong to pixels one before those of its even ones.
  place.top = a.top + kTile * static_cast<int32_t>(tile_row) - static_cast<int32_t>(place.row_phase);
  place.left = kTile * static_cast<int32_t>(tile_column) - static_cast<int32_t>(place.column_phase);
  store_row<T, kShortcut, 0>(a, place, m);
  store_row<T, kShortcut, 1>(a, place, m);
  store_row<T, kShortcut, 2>(a, place, m);
}

template <typename T>
int upsample_output(const UpsampleOutputArguments& a, int frames, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(a.items, 128)), frames);
  switch (shortcut_kind(a.vectors * 8, a.shortcut_channels, a.time_factor)) {
    case Shortcut::kSame:
      upsample_output_kernel<T, Shortcut::kSame><<<grid, 128, 0, stream>>>(a);
      break;
    case Shortcut::kRowPair:
      upsample_output_kernel<T, Shortcut::kRowPair><<<grid, 128, 0, stream>>>(a);
      break;
    case Shortcut::kAny:
      upsample_output_kernel<T, Shortcut::kAny><<<grid, 128, 0, stream>>>(a);
      break;
  }
  return check_launch("upsample_output");
}

}  // namespace upsample
}  // namespace wan

WAN_EXPORT int wan_upsample_output(const UpsampleOutputProblem* problem, const void* m, const float* bias,
                                   const void* shortcut, void* y, int dtype, int device, cudaStream_t stream) {
  const UpsampleOutputProblem& p = *problem;
  if (p.frames < 1 || p.rows < 1 || p.columns < 1 || p.tile_rows < 1) return wan::fail("upsample_output: empty output");
  if (wan::check_shortcut("upsample_output", p.channels, p.shortcut_channels, p.time_factor)) return 1;
  const wan::upsample::Tiles tiles = wan::upsample::tiles_of(p.first_row, p.rows);
  if (p.first_row < 0 || p.first_tile_row < tiles.begin || p.first_tile_row + int64_t(p.tile_rows) > tiles.end) {
    return wan::fail("upsample_output: tile rows %d + %d of %lld to %lld", p.first_tile_row, p.tile_rows,
                     (long long)tiles.begin, (long long)tiles.end);
  }
  const int32_t tiles_across = p.columns / wan::upsample::kTile + 1;
  const int64_t items = int64_t(p.tile_rows) * tiles_across * 4 * (p.channels / 8);
  // Room for the last block's overhang in 32-bit thread numbers.
  if (p.frames > 65535 || items > INT32_MAX - 128) {
    return wan::fail("upsample_output: %d frames of %d tile rows in one launch", p.frames, p.tile_rows);
  }
  if (!wan::is_aligned16(m) || !wan::is_aligned16(bias) || !wan::is_aligned16(shortcut) || !wan::is_aligned16(y)) {
    return wan::fail("upsample_output: every pointer must be aligned to 16 bytes");
  }
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  const wan::UpsampleOutputArguments arguments{m,
                                               shortcut,
                                               bias,
                                               y,
                                               p.rows,
                                               p.columns,
                                               uint32_t(p.channels / 8),
                                               uint32_t(p.shortcut_channels),
                                               uint32_t(p.time_factor),
                                               uint32_t(p.first_frame),
                                               uint32_t(p.channels * 4 * p.time_factor / p.shortcut_channels),
                                               wan::upsample::kTile * p.first_tile_row - p.first_row,
                                               uint32_t(tiles_across),
                                               uint32_t(items)};
  switch (dtype) {
    case wan::kFp16:
      return wan::upsample::upsample_output<__half>(arguments, p.frames, stream);
    case wan::kBf16:
      return wan::upsample::upsample_output<__nv_bfloat16>(arguments, p.frames, stream);
    default:
      return wan::fail("upsample_output: no kernel for dtype %d", dtype);
  }
}
