// SPDX-License-Identifier: Apache-2.0
// Causal history, RMS norm + SiLU (null gamma: neither), zero or halo padding and the input transform of F(4 x m, 3x3),
// m = 4 or 3:
//   v [6 (m + 2), 2 + T, tile rows, tiles, C], component (m + 2) i + j = (B^T d B')[i][j] of 6 x (m + 2) pixels d,
// for a range of tile rows of x [T, H, W, C]. The two frames of history are normalised already (null: zeros); the next
// history, the last two frames of history and x, is written in passing.
// A block goes down kSteps rows of n tiles, through a ring of ten rows of mn + 2 pixels in shared memory: six that a
// row of tiles reads, of which the next keeps two, and four that the copy engine fills meanwhile. A warp normalises a
// pixel where it is, rounded as a stored activation would be; then a thread transforms four channels of a tile. Bound:
// memory, x read once (L2 holds what strips share), 2.25 (m = 4) x (T + 2) / T of it written. Instructions, the next
// bound: two thirds transform, one third norm and SiLU, run (1 + 1 / 2 kSteps) (mn + 2) / mn times.
#include "launch.cuh"
#include "norm_silu.cuh"
#include "shared_memory.cuh"
#include "winograd.cuh"

struct WinogradInputProblem {
  int32_t frames, rows, columns, channels, halo;
  int32_t tile_columns, first_tile_row, tile_rows;
};

namespace wan {

struct WinogradInputArguments {
  const void *x, *above, *below, *history;
  const float* gamma;
  void *v, *next_history;
  int32_t rows, columns, channels, edge;  // edge: rows of halo on each side
  int32_t first_tile_row, tile_rows, tiles_across;
  uint32_t component_stride;  // in quads of channels
};

namespace winograd {

constexpr int kThreads = 256, kWarps = kThreads / 32, kHistory = 2;
#ifndef STEPS
#define STEPS 4
#endif
constexpr int kSteps = STEPS;  // more would save little SiLU and leave too few blocks to share out evenly

constexpr int kStepLines = kTileRows * kSteps + 2;  // rows of pixels that a block reads
constexpr int kRing = kLines + kTileRows;           // that it holds; even, so that pairs of rows stay together

// A row of pixels of the block's frame, numbered from the image's first: null where it is all zeros.
__device__ inline const uint4* locate(const WinogradInputArguments& a, int frame, int row) {
  if (row < -a.edge || row >= a.rows + a.edge) return nullptr;
  const int64_t line = int64_t(a.columns) * (a.channels / 8);
  if (frame < kHistory) {
    const uint4* history = static_cast<const uint4*>(a.history);
    return history == nullptr ? nullptr : history + (int64_t(frame) * (a.rows + 2 * a.edge) + row + a.edge) * line;
  }
  const int64_t t = frame - kHistory;
  if (row < 0) return static_cast<const uint4*>(a.above) + t * line;
  if (row >= a.rows) return static_cast<const uint4*>(a.below) + t * line;
  return static_cast<const uint4*>(a.x) + (t * a.rows + row) * line;
}

// Rows of kColumns pixels on their way through shared memory, kVectors 16-byte vectors a lane each, whatever the
// channels, so that offsets are constant.
template <int kVectors, int kColumns>
struct Strip {
  static constexpr int kPitch = 512 * kVectors, kLine = kPitch * kColumns, kBytes = kLine * kRing;
  static constexpr int kBlocks = kBytes <= 112 << 10 ? 2 : 1;  // that a multiprocessor holds
  uint32_t ring;                                               // address of [kRing, kColumns, kPitch bytes]
  const uint4* const* lines;                                   // the block's rows of the image, null: zeros
  uint64_t* arrived;
  int vectors;           // of a pixel
  int left, begin, end;  // the first pixel's column in the image, and which pixels of a row are in the image

  // The address of a lane's first vector of a pixel, by number from a row of the ring on; less than once around.
  __device__ inline uint32_t pixel(int ring_row, int number) const {
    const uint32_t offset = ring_row * kLine + number * kPitch;
    return ring + threadIdx.x % 32 * 16 + min(offset, offset - kBytes);
  }

  // By one warp: asks for the block's rows first to last. A row is one piece, unless there are too few channels.
  __device__ inline void request(int first, int last) const {
    const int lane = threadIdx.x % 32;
    const int length = 16 * vectors == kPitch ? end - begin : 1, pieces = (end - begin) / length;
    int found = 0;
    for (int row = first; row < last; ++row) found += lines[row] != nullptr;
    if (lane == 0) expect_bytes(arrived, found * (end - begin) * vectors * 16);
    __syncwarp();
#pragma unroll 1
    for (int n = lane; n < (last - first) * pieces; n += 32) {
      const int row = first + n / pieces, column = begin + n % pieces;
      if (lines[row] == nullptr) continue;
      const uint4* source = lines[row] + int64_t(left + column) * vectors;
      copy_bulk(ring + row % kRing * kLine + column * kPitch, source, length * vectors * 16, arrived);
    }
  }

  // By one warp.
  __device__ inline void clear(int ring_row, int number) const {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) store_shared16(pixel(ring_row, number) + 512 * n, make_uint4(0, 0, 0, 0));
  }
};

// Normalises pixels first to last, from a row of the ring on, where they are; kPixels of them at once in a warp. Those
// that are zeros stay so.
template <typename T, int kVectors, int kColumns, int kPixels>
__device__ inline void normalise_strip(const Strip<kVectors, kColumns>& strip, const float* gamma, int warp,
                                       int ring_row, int first, int last) {
  const int lane = threadIdx.x % 32;
  float weights[kVectors][8] = {};
#pragma unroll
  for (int n = 0; n < kVectors; ++n) {
    if (lane + 32 * n < strip.vectors) load_weights<true>(gamma + 8 * (lane + 32 * n), weights[n]);
  }
#pragma unroll 1
  for (int number = first + warp; number < last; number += kWarps * kPixels) {
    uint4 data[kPixels][kVectors];
    uint32_t places[kPixels];
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      places[p] = strip.pixel(ring_row, number + p * kWarps);
#pragma unroll
      for (int n = 0; n < kVectors; ++n) {
        data[p][n] = make_uint4(0, 0, 0, 0);
        if (number + p * kWarps < last) data[p][n] = load_shared16(places[p] + 512 * n);
      }
    }
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kVectors; ++n) sum += sum_of_squares<T>(data[p][n]);
      const float scale = inverse_norm(warp_sum(sum));
#pragma unroll
      for (int n = 0; n < kVectors; ++n) data[p][n] = normalise<T, true>(data[p][n], scale, weights[n]);
    }
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      if (number + p * kWarps >= last) break;
#pragma unroll
      for (int n = 0; n < kVectors; ++n) store_shared16(places[p] + 512 * n, data[p][n]);
    }
  }
}

// Transforms along a row and stores its components. A 32-bit stride makes an address one multiplication.
template <typename T, int kRow, int kWidth>
__device__ inline void store_row(const float (&line)[4][kWidth], void* v, uint32_t component_stride) {
  float components[4][kWidth];
#pragma unroll
  for (int c = 0; c < 4; ++c) input_row<kRow>(line[c], components[c]);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float values[4] = {components[0][j], components[1][j], components[2][j], components[3][j]};
    uint64_t* target = static_cast<uint64_t*>(v) + uint64_t(component_stride) * (kWidth * kRow + j);
    store_floats(reinterpret_cast<T*>(target), values);
  }
}

// Pairs kFirst to kLast of rows of components, of one tile and four channels. `rows` are the shared addresses of its
// rows 0, 2 and 4, each followed by the next; neighbouring columns are kPitch bytes apart, rows kColumns of them.
template <typename T, int kFirst, int kLast, int kWidth, int kColumns, int kPitch>
__device__ inline void transform_pairs(const uint32_t (&rows)[3], void* v, uint32_t component_stride) {
  float lines[2 * (kLast - kFirst + 1)][4][kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    float d[4][kLines];
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      if (kFirst != 0 && (i == 0 || i == 5)) continue;
      float values[4];
      to_floats<T>(load_shared8(rows[i / 2] + (i % 2 * kColumns + j) * kPitch), values);
#pragma unroll
      for (int c = 0; c < 4; ++c) d[c][i] = values[c];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      input_pair<kFirst>(d[c], 1.0f, 1.0f, lines[0][c][j], lines[1][c][j]);
      if constexpr (kLast > kFirst) input_pair<kLast>(d[c], 1.0f, 1.0f, lines[2][c][j], lines[3][c][j]);
    }
  }
  store_row<T, pair_row(kFirst, 0)>(lines[0], v, component_stride);
  store_row<T, pair_row(kFirst, 1)>(lines[1], v, component_stride);
  if constexpr (kLast > kFirst) {
    store_row<T, pair_row(kLast, 0)>(lines[2], v, component_stride);
    store_row<T, pair_row(kLast, 1)>(lines[3], v, component_stride);
  }
}

// The next history's part of the pixels first to last of the six rows of a row of tiles: the last two frames, of the
// rows of this block's tiles and the halo rows beside them, and of the tiles' columns; the outer two are other blocks'.
template <int kVectors, int kColumns>
__device__ inline void keep_strip(const WinogradInputArguments& a, const Strip<kVectors, kColumns>& strip, int frame,
                                  int warp, int ring_row, int tile_row, int block_begin, int block_end, int first) {
  const int kept_frame = frame - (static_cast<int>(gridDim.z) - kHistory);
  if (kept_frame < 0) return;
  const int begin = kTileRows * block_begin, end = kTileRows * block_end;
  const int row_begin = begin == 0 ? -a.edge : begin, row_end = end >= a.rows ? a.rows + a.edge : end;
#pragma unroll 1
  for (int number = first + warp; number < kLines * kColumns; number += kWarps) {
    const int row = kTileRows * tile_row - 1 + number / kColumns, column = number % kColumns;
    if (row < row_begin || row >= row_end || column == 0 || column == kColumns - 1 || column >= strip.end) continue;
    const int64_t line = int64_t(kept_frame) * (a.rows + 2 * a.edge) + row + a.edge;
    const int64_t place = (line * a.columns + strip.left + column) * strip.vectors;
    uint4* target = static_cast<uint4*>(a.next_history) + place;
    const uint32_t source = strip.pixel(ring_row, number);
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const int vector = threadIdx.x % 32 + 32 * n;
      if (vector < strip.vectors) target[vector] = load_shared16(source + 512 * n);
    }
  }
}

// A strip has kTiles tiles of kTileColumns.
template <typename T, int kTileColumns, int kVectors, int kTiles, int kPixels>
__global__ void __launch_bounds__(kThreads, (Strip<kVectors, kTileColumns * kTiles + 2>::kBlocks))
    winograd_input_kernel(const __grid_constant__ WinogradInputArguments a) {
  constexpr int kWidth = kTileColumns + 2, kColumns = kTileColumns * kTiles + 2;
  static_assert(kTiles * kVectors * 64 <= kThreads, "a thread has one tile and four channels");
  extern __shared__ uint4 ring[];
  __shared__ const uint4* lines[kStepLines];
  __shared__ uint64_t arrived;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be uniform
  const int frame = blockIdx.z, first_tile = blockIdx.x * kTiles;
  const int block_begin = a.first_tile_row + kSteps * static_cast<int>(blockIdx.y);
  const int block_end = min(block_begin + kSteps, a.first_tile_row + a.tile_rows);
  const int left = kTileColumns * first_tile - 1;
  const bool raw = a.gamma == nullptr || frame < kHistory;
  const Strip<kVectors, kColumns> strip{
      shared_address(ring), lines, &arrived, a.channels / 8, left, left < 0 ? 1 : 0, min(kColumns, a.columns - left)};
  if (threadIdx.x < kStepLines) {
    lines[threadIdx.x] = locate(a, frame, kTileRows * block_begin - 1 + static_cast<int>(threadIdx.x));
  }
  if (threadIdx.x == 0) init_barrier(&arrived);
  // Columns beside the image and channels that are missing stay zeros.
  if (strip.begin > 0 || strip.end < kColumns || 32 * kVectors > strip.vectors) {
    for (int number = warp; number < kRing * kColumns; number += kWarps) strip.clear(0, number);
    fence_before_copies();
  }
  __syncthreads();
  if (warp == 0) strip.request(0, kLines);

  const int quads = a.channels / 4;
  const int tile = static_cast<int>(threadIdx.x) / quads;
  const bool transforms = tile < min(kTiles, a.tiles_across - first_tile);
  const uint32_t corner = strip.ring + kTileColumns * tile * strip.kPitch + (threadIdx.x - tile * quads) * 8;
  const int64_t line = int64_t(frame) * a.tile_rows + (block_begin - a.first_tile_row);
  uint64_t* v = static_cast<uint64_t*>(a.v) + (line * a.tiles_across + first_tile) * quads + threadIdx.x;
#pragma unroll 1
  for (int tile_row = block_begin; tile_row < block_end; ++tile_row) {
    const int step = tile_row - block_begin, first_line = kTileRows * step, ring_row = first_line % kRing;
    const int fresh = step == 0 ? 0 : kLines - kTileRows;  // the first of this step's six rows that is new
    wait_barrier(&arrived, step % 2);
    for (int row = fresh; row < kLines; ++row) {
      if (lines[first_line + row] != nullptr) continue;
      // A pixel's warp is the one that normalises it.
      const int first_column = (warp - (row - fresh) * kColumns) & (kWarps - 1);
      for (int column = first_column; column < kColumns; column += kWarps) {
        strip.clear(ring_row, row * kColumns + column);
      }
    }
    if (!raw) {
      normalise_strip<T, kVectors, kColumns, kPixels>(strip, a.gamma, warp, ring_row, fresh * kColumns,
                                                      kLines * kColumns);
    }
    fence_before_copies();
    __syncthreads();
    // The rows that are filled next were last read before this barrier.
    if (warp == 0 && tile_row + 1 < block_end) strip.request(first_line + kLines, first_line + kLines + kTileRows);
    if (transforms) {
      uint32_t rows[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) rows[i] = corner + (ring_row + 2 * i) % kRing * strip.kLine;
      transform_pairs<T, 0, 0, kWidth, kColumns, strip.kPitch>(rows, v, a.component_stride);
      transform_pairs<T, 1, 2, kWidth, kColumns, strip.kPitch>(rows, v, a.component_stride);
    }
    v += int64_t(a.tiles_across) * quads;
    keep_strip(a, strip, frame, warp, ring_row, tile_row, block_begin, block_end, fresh * kColumns);
  }
}

template <typename T, int kTileColumns, int kVectors, int kTiles, int kPixels>
int launch_input(const WinogradInputArguments& a, int frames, cudaStream_t stream) {
  const auto kernel = winograd_input_kernel<T, kTileColumns, kVectors, kTiles, kPixels>;
  constexpr int bytes = Strip<kVectors, kTileColumns * kTiles + 2>::kBytes;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return fail("winograd_input: %d bytes shared: %s", bytes, cudaGetErrorString(status));
  const dim3 grid(static_cast<unsigned>(ceil_div(a.tiles_across, kTiles)),
                  static_cast<unsigned>(ceil_div(a.tile_rows, kSteps)), kHistory + frames);
  kernel<<<grid, kThreads, bytes, stream>>>(a);
  return check_launch("winograd_input");
}

// Wide strips where shared memory still holds several blocks of them.
template <typename T, int kTileColumns>
int winograd_input(const WinogradInputArguments& a, int frames, cudaStream_t stream) {
  if (a.channels <= 256) return launch_input<T, kTileColumns, 1, 4, 3>(a, frames, stream);
  if (a.channels <= 512) return launch_input<T, kTileColumns, 2, 2, 2>(a, frames, stream);
  return launch_input<T, kTileColumns, 4, 1, 1>(a, frames, stream);
}

template <typename T>
int winograd_input(const WinogradInputArguments& a, int tile_columns, int frames, cudaStream_t stream) {
  return tile_columns == 4 ? winograd_input<T, 4>(a, frames, stream) : winograd_input<T, 3>(a, frames, stream);
}

}  // namespace winograd
}  // namespace wan

WAN_EXPORT int wan_winograd_input(const WinogradInputProblem* problem, const void* x, const void* above,
                                  const void* below, const void* history, const float* gamma, void* v,
                                  void* next_history, int dtype, int device, cudaStream_t stream) {
  const WinogradInputProblem& p = *problem;
  if (p.channels < 8 || p.channels % 8 || p.channels > 1024) {
    return wan::fail("winograd_input: %d channels are not a multiple of 8 up to 1024", p.channels);
  }
  if (p.tile_columns != 3 && p.tile_columns != 4) {
    return wan::fail("winograd_input: tiles have 3 or 4 columns, not %d", p.tile_columns);
  }
  const int64_t tiles_down = wan::ceil_div(p.rows, wan::winograd::kTileRows);
  if (p.frames < 1 || p.rows < 1 || p.columns < 1 || p.tile_rows < 1) return wan::fail("winograd_input: empty input");
  if (p.first_tile_row < 0 || p.first_tile_row + int64_t(p.tile_rows) > tiles_down) {
    return wan::fail("winograd_input: tile rows %d + %d of %lld", p.first_tile_row, p.tile_rows, (long long)tiles_down);
  }
  if (p.tile_rows > 65535 || p.frames > 65533) return wan::fail("winograd_input: %d frames in one launch", p.frames);
  if (p.halo && (above == nullptr || below == nullptr)) return wan::fail("winograd_input: halo rows are missing");
  const void* pointers[] = {x, above, below, history, gamma, v, next_history};
  for (const void* pointer : pointers) {
    if (!wan::is_aligned16(pointer)) return wan::fail("winograd_input: every pointer must be aligned to 16 bytes");
  }
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  const int32_t tiles_across = static_cast<int32_t>(wan::ceil_div(p.columns, p.tile_columns));
  const int64_t quads = (p.frames + int64_t(wan::winograd::kHistory)) * p.tile_rows * tiles_across * (p.channels / 4);
  if (quads > UINT32_MAX) return wan::fail("winograd_input: %lld elements in a component", (long long)(4 * quads));
  const wan::WinogradInputArguments arguments{x,
                                              above,
                                              below,
                                              history,
                                              gamma,
                                              v,
                                              next_history,
                                              p.rows,
                                              p.columns,
                                              p.channels,
                                              p.halo ? 1 : 0,
                                              p.first_tile_row,
                                              p.tile_rows,
                                              tiles_across,
                                              static_cast<uint32_t>(quads)};
  switch (dtype) {
    case wan::kFp16:
      return wan::winograd::winograd_input<__half>(arguments, p.tile_columns, p.frames, stream);
    case wan::kBf16:
      return wan::winograd::winograd_input<__nv_bfloat16>(arguments, p.tile_columns, p.frames, stream);
    default:
      return wan::fail("winograd_input: no kernel for dtype %d", dtype);
  }
}
