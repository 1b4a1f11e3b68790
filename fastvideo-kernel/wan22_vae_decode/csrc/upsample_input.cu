// SPDX-License-Identifier: Apache-2.0
// Input transform of nearest x2 + 3x3 conv as F(3x3, 2x2), shared by the four output phases, for a range of tile rows
// of x [F, H, W, C]:
//   v [16, F, tile rows, tiles, C], component 4i + j = (B^T d B)[i][j] of the 4 x 4 pixels d from (3k - 1, 3l - 1) on,
// with zeros, or two halo rows and zeros behind them, outside; in fp32, rounded once. Rows are counted in the image, of
// which x may be a band, so that tiles lie alike on every rank. A thread takes eight channels of a tile, a block eight
// tiles side by side, which share columns in L1.
// Bound: memory, x read once (L2 holds what tiles share), 16 / 9 of it written.
#include "launch.cuh"
#include "upsample.cuh"

struct UpsampleInputProblem {
  int32_t frames, rows, columns, channels, halo;
  int32_t first_row, first_tile_row, tile_rows;  // first_row: of x in the image
};

namespace wan {

struct UpsampleInputArguments {
  const void *x, *above, *below;
  void* v;
  int32_t rows, columns, vectors, halo;
  int32_t top, tiles_across, chunks;  // top: row of x that the first tile begins at, maybe negative
};

namespace upsample {

constexpr int kTiles = 8, kHaloRows = 2;

// A row of pixels, numbered from x's first: null where it is all zeros.
__device__ inline const uint4* locate(const UpsampleInputArguments& a, int64_t frame, int32_t row) {
  const int64_t line = int64_t(a.columns) * a.vectors;
  if (row >= 0 && row < a.rows) return static_cast<const uint4*>(a.x) + (frame * a.rows + row) * line;
  if (!a.halo || row < -kHaloRows || row >= a.rows + kHaloRows) return nullptr;
  if (row < 0) return static_cast<const uint4*>(a.above) + (frame * kHaloRows + row + kHaloRows) * line;
  return static_cast<const uint4*>(a.below) + (frame * kHaloRows + row - a.rows) * line;
}

template <typename T>
__global__ void __launch_bounds__(256, 2) upsample_input_kernel(const __grid_constant__ UpsampleInputArguments a) {
  const int32_t group = blockIdx.x / a.chunks;
  const int32_t vector = (blockIdx.x - group * a.chunks) * 32 + threadIdx.x % 32;
  const int32_t tile = group * kTiles + threadIdx.x / 32;
  if (vector >= a.vectors || tile >= a.tiles_across) return;
  const int64_t frame = blockIdx.z;
  const int32_t top = a.top + kTile * static_cast<int32_t>(blockIdx.y), left = kTile * tile - 1;

  uint4 data[kWindow][kWindow];
#pragma unroll
  for (int i = 0; i < kWindow; ++i) {
    const uint4* line = locate(a, frame, top + i);
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      const int32_t column = left + j;
      const bool inside = line != nullptr && column >= 0 && column < a.columns;
      data[i][j] = inside ? __ldg(line + int64_t(column) * a.vectors + vector) : make_uint4(0, 0, 0, 0);
    }
  }

  const int64_t lines = int64_t(gridDim.y) * a.tiles_across;
  const int64_t stride = int64_t(gridDim.z) * lines * a.vectors;  // between components
  const int64_t index = frame * lines + int64_t(blockIdx.y) * a.tiles_across + tile;
  uint4* target = static_cast<uint4*>(a.v) + index * a.vectors + vector;
#pragma unroll
  for (int i = 0; i < kWindow; ++i) {
    float line[kWindow][8];
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      float first[8];
      to_floats<T>(data[first_of(i)][j], first);
      to_floats<T>(data[last_of(i)][j], line[j]);
#pragma unroll
      for (int c = 0; c < 8; ++c) line[j][c] += sign_of(i) * first[c];
    }
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      float values[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) values[c] = kInputScale * (line[last_of(j)][c] + sign_of(j) * line[first_of(j)][c]);
      target[(kWindow * i + j) * stride] = from_floats<T>(values);
    }
  }
}

template <typename T>
int upsample_input(const UpsampleInputArguments& a, int tile_rows, int frames, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(a.tiles_across, kTiles) * a.chunks), tile_rows, frames);
  upsample_input_kernel<T><<<grid, 256, 0, stream>>>(a);
  return check_launch("upsample_input");
}

}  // namespace upsample
}  // namespace wan

WAN_EXPORT int wan_upsample_input(const UpsampleInputProblem* problem, const void* x, const void* above,
                                  const void* below, void* v, int dtype, int device, cudaStream_t stream) {
  const UpsampleInputProblem& p = *problem;
  if (p.frames < 1 || p.rows < 1 || p.columns < 1 || p.tile_rows < 1) return wan::fail("upsample_input: empty input");
  if (p.channels < 8 || p.channels % 8) {
    return wan::fail("upsample_input: %d channels are not a multiple of 8", p.channels);
  }
  const wan::upsample::Tiles tiles = wan::upsample::tiles_of(p.first_row, p.rows);
  if (p.first_row < 0 || p.first_tile_row < tiles.begin || p.first_tile_row + int64_t(p.tile_rows) > tiles.end) {
    return wan::fail("upsample_input: tile rows %d + %d of %lld to %lld", p.first_tile_row, p.tile_rows,
                     (long long)tiles.begin, (long long)tiles.end);
  }
  if (p.frames > 65535 || p.tile_rows > 65535) {
    return wan::fail("upsample_input: %d frames of %d tile rows in one launch", p.frames, p.tile_rows);
  }
  if (p.halo && (above == nullptr || below == nullptr)) return wan::fail("upsample_input: halo rows are missing");
  if (!wan::is_aligned16(x) || !wan::is_aligned16(above) || !wan::is_aligned16(below) || !wan::is_aligned16(v)) {
    return wan::fail("upsample_input: every pointer must be aligned to 16 bytes");
  }
  const int32_t tiles_across = p.columns / wan::upsample::kTile + 1;
  const int32_t vectors = p.channels / 8, chunks = static_cast<int32_t>(wan::ceil_div(vectors, 32));
  if (wan::ceil_div(tiles_across, wan::upsample::kTiles) * chunks > INT32_MAX) {
    return wan::fail("upsample_input: a row of %d x %d is too large", p.columns, p.channels);
  }
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  const int32_t top = wan::upsample::kTile * p.first_tile_row - 1 - p.first_row;
  const wan::UpsampleInputArguments arguments{x,      above, below,        v,     p.rows, p.columns, vectors,
                                              p.halo, top,   tiles_across, chunks};
  switch (dtype) {
    case wan::kFp16:
      return wan::upsample::upsample_input<__half>(arguments, p.tile_rows, p.frames, stream);
    case wan::kBf16:
      return wan::upsample::upsample_input<__nv_bfloat16>(arguments, p.tile_rows, p.frames, stream);
    default:
      return wan::fail("upsample_input: no kernel for dtype %d", dtype);
  }
}
