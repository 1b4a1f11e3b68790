// SPDX-License-Identifier: Apache-2.0
// Causal history, RMS norm + SiLU (null gamma: neither), zero or halo padding and the input transform of F(4 x m, 3x3),
// m = 4 or 3:
//   v [6 (m + 2), 2 + T, tile rows, tiles, C], component (m + 2) i + j = (B^T d B')[i][j] of 6 x (m + 2) pixels d,
// for a range of tile rows of x [T, H, W, C]. The two frames of history are normalised already (null: zeros); the next
// history, the last two frames of history and x, is written in passing.
// A block goes down kSteps rows of n tiles. Of each it normalises a strip of 6 rows x (mn + 2) columns, a warp a pixel,
// into shared memory, rounded as a stored activation would be; the strip is a ring of rows, of which the next row of
// tiles keeps two. Then a thread transforms four channels of a tile, two rows of components at a time.
// Bound: memory, x read once (L2 holds what strips share), 2.25 (m = 4) x (T + 2) / T of it written: 54 to 59 % of the
// copy rate. Instructions, the next bound: SiLU runs (1 + 1 / 2 kSteps) (mn + 2) / mn times, 1.3 for m = n = 4.
#include "launch.cuh"
#include "norm_silu.cuh"
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
  int64_t component_stride;  // in elements
};

namespace winograd {

constexpr int kThreads = 256, kWarps = kThreads / 32, kHistory = 2;
constexpr int kSteps = 3;  // more would save little SiLU and leave too few blocks to share out evenly

constexpr int kStepLines = kTileRows * kSteps + 2;  // rows of pixels that a block reads

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

// Four channels of a pixel. Volatile, because the compiler would keep a whole tile in registers, where it does not fit.
__device__ inline uint2 load_shared(uint32_t address) {
  uint2 bits;
  asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "r"(address));
  return bits;
}

// Transforms along a row and stores its components.
template <typename T, int kRow, int kWidth>
__device__ inline void store_row(const float (&line)[4][kWidth], T* v, int64_t component_stride) {
  float components[4][kWidth];
#pragma unroll
  for (int c = 0; c < 4; ++c) input_row<kRow>(line[c], components[c]);
  T* target = v + kWidth * kRow * component_stride;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const float values[4] = {components[0][j], components[1][j], components[2][j], components[3][j]};
    store_floats(target + j * component_stride, values);
  }
}

// Two rows of components of one tile and four channels. `rows` are the shared addresses of its rows
// 0, 2 and 4, each followed by the next; neighbouring columns are kPitch bytes apart, rows kColumns of them.
template <typename T, int kPair, int kWidth, int kColumns, int kPitch>
__device__ inline void transform_pair(const uint32_t (&rows)[3], T* v, int64_t component_stride) {
  float lines[2][4][kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    float d[4][kLines];
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      if (kPair != 0 && (i == 0 || i == 5)) continue;
      float values[4];
      to_floats<T>(load_shared(rows[i / 2] + (i % 2 * kColumns + j) * kPitch), values);
#pragma unroll
      for (int c = 0; c < 4; ++c) d[c][i] = values[c];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) input_pair<kPair>(d[c], 1.0f, 1.0f, lines[0][c][j], lines[1][c][j]);
  }
  store_row<T, pair_row(kPair, 0)>(lines[0], v, component_stride);
  store_row<T, pair_row(kPair, 1)>(lines[1], v, component_stride);
}

// The next history's part of a strip, from its pixel number `first` on: the last two frames, of the rows of this
// block's tiles and the halo rows beside them, and of the tiles' columns; the outer two are other blocks'.
template <int kVectors, int kColumns>
__device__ inline void keep_strip(const WinogradInputArguments& a, const uint4* strip, int frame, int first_row,
                                  int top, int left, int ring, int first) {
  const int kept_frame = frame - (static_cast<int>(gridDim.z) - kHistory);
  if (kept_frame < 0) return;
  const int vectors = a.channels / 8;
  const int begin = kTileRows * (a.first_tile_row + first_row);
  const int end = kTileRows * (a.first_tile_row + min(first_row + kSteps, a.tile_rows));
  const int row_begin = begin == 0 ? -a.edge : begin, row_end = end >= a.rows ? a.rows + a.edge : end;
#pragma unroll 1
  for (int pixel = first + static_cast<int>(threadIdx.x) / 32; pixel < kLines * kColumns; pixel += kWarps) {
    const int row = top + pixel / kColumns, column = pixel % kColumns;
    if (row < row_begin || row >= row_end || column == 0 || column == kColumns - 1 || left + column >= a.columns) {
      continue;
    }
    const int64_t line = int64_t(kept_frame) * (a.rows + 2 * a.edge) + row + a.edge;
    uint4* target = static_cast<uint4*>(a.next_history) + (line * a.columns + left + column) * int64_t(vectors);
    const int place = (pixel + ring * kColumns) % (kLines * kColumns);
#pragma unroll 1
    for (int n = threadIdx.x % 32; n < vectors; n += 32) target[n] = strip[place * (32 * kVectors) + n];
  }
}

// kVectors 16-byte vectors a lane hold a pixel, kPixels of them in flight; a strip has kTiles tiles of kTileColumns.
template <typename T, int kTileColumns, int kVectors, int kTiles, int kPixels>
__global__ void __launch_bounds__(kThreads, 3) winograd_input_kernel(const __grid_constant__ WinogradInputArguments a) {
  constexpr int kWidth = kTileColumns + 2, kColumns = kTileColumns * kTiles + 2;
  constexpr int kPitch = 32 * kVectors;  // vectors between pixels, whatever the channels, so that offsets are constant
  extern __shared__ uint4 strip[];       // [6, kColumns, kPitch]
  __shared__ const uint4* lines[kStepLines];
  const int lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be uniform
  const int vectors = a.channels / 8;
  const int frame = blockIdx.z, first_tile = blockIdx.x * kTiles;
  const int first_row = kSteps * static_cast<int>(blockIdx.y), left = kTileColumns * first_tile - 1;
  const bool raw = a.gamma == nullptr || frame < kHistory;
  constexpr bool kHeld = kVectors == 1;  // gamma in registers; more of it would not fit beside a tile
  float gammas[8] = {};
  if (kHeld && !raw && lane < vectors) load_floats(a.gamma + 8 * lane, gammas);
  if (threadIdx.x < kStepLines) {
    const int top = kTileRows * (a.first_tile_row + first_row) - 1;
    lines[threadIdx.x] = locate(a, frame, top + static_cast<int>(threadIdx.x));
  }
  __syncthreads();

  const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(strip));
  const int quads = a.channels / 4;
  const int items = min(kTiles, a.tiles_across - first_tile) * quads;
  const int steps = min(kSteps, a.tile_rows - first_row);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int top = kTileRows * (a.first_tile_row + first_row + step) - 1;
    const int ring = kTileRows * step % kLines;  // its first row; even, so that pairs of rows stay together
    const int held = step == 0 ? 0 : (kLines - kTileRows) * kColumns;
    int row = held / kColumns + warp / kColumns, column = warp % kColumns;
    while (row < kLines) {
      uint4 data[kPixels][kVectors];
      uint4* targets[kPixels];  // null: none
#pragma unroll
      for (int p = 0; p < kPixels; ++p) {
        const uint4* source = row < kLines ? lines[kTileRows * step + row] : nullptr;
        const bool image = source != nullptr && static_cast<unsigned>(left + column) < static_cast<unsigned>(a.columns);
        source += (left + column) * vectors + lane;
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
          const bool load = image && lane + 32 * n < vectors;
          data[p][n] = load ? __ldg(source + 32 * n) : make_uint4(0, 0, 0, 0);
        }
        const int place = row + ring < kLines ? row + ring : row + ring - kLines;
        targets[p] = row < kLines ? strip + (place * kColumns + column) * kPitch : nullptr;
        column += kWarps;
#pragma unroll
        for (int wrap = 0; wrap < (kWarps + kColumns - 1) / kColumns; ++wrap) {
          if (column >= kColumns) column -= kColumns, ++row;
        }
      }
#pragma unroll
      for (int p = 0; p < kPixels; ++p) {
        if (targets[p] == nullptr) break;
        if (!raw) {  // zeros stay zeros
          float sum = 0.0f;
#pragma unroll
          for (int n = 0; n < kVectors; ++n) sum += sum_of_squares<T>(data[p][n]);
          const float scale = inverse_norm(warp_sum(sum));
#pragma unroll
          for (int n = 0; n < kVectors; ++n) {
            if constexpr (kHeld) {
              data[p][n] = normalise<T, true>(data[p][n], scale, gammas);
            } else if (lane + 32 * n < vectors) {
              data[p][n] = normalise<T, true>(data[p][n], scale, a.gamma + 8 * (lane + 32 * n));
            }
          }
        }
#pragma unroll
        for (int n = 0; n < kVectors; ++n) targets[p][lane + 32 * n] = data[p][n];
      }
    }
    __syncthreads();
    const int64_t line = int64_t(frame) * a.tile_rows + first_row + step;
    T* v = static_cast<T*>(a.v) + (line * a.tiles_across + first_tile) * a.channels;
    for (int item = threadIdx.x; item < items; item += kThreads) {
      const int tile = item / quads;
      const uint32_t first = base + kTileColumns * tile * kPitch * 16 + (item - tile * quads) * 8;
      uint32_t rows[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int row = ring + 2 * i;
        rows[i] = first + (row < kLines ? row : row - kLines) * (kColumns * kPitch * 16);
      }
      transform_pair<T, 0, kWidth, kColumns, kPitch * 16>(rows, v + 4 * item, a.component_stride);
      transform_pair<T, 1, kWidth, kColumns, kPitch * 16>(rows, v + 4 * item, a.component_stride);
      transform_pair<T, 2, kWidth, kColumns, kPitch * 16>(rows, v + 4 * item, a.component_stride);
    }
    keep_strip<kVectors, kColumns>(a, strip, frame, first_row, top, left, ring, held);
    if (step + 1 < steps) __syncthreads();
  }
}

template <typename T, int kTileColumns, int kVectors, int kTiles, int kPixels>
int launch_input(const WinogradInputArguments& a, int frames, cudaStream_t stream) {
  const auto kernel = winograd_input_kernel<T, kTileColumns, kVectors, kTiles, kPixels>;
  constexpr int bytes = kLines * (kTileColumns * kTiles + 2) * kVectors * 512;
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
  if (a.channels <= 256) return launch_input<T, kTileColumns, 1, 4, 6>(a, frames, stream);
  if (a.channels <= 512) return launch_input<T, kTileColumns, 2, 2, 3>(a, frames, stream);
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
  const wan::WinogradInputArguments arguments{
      x,
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
      (p.frames + int64_t(wan::winograd::kHistory)) * p.tile_rows * tiles_across * p.channels};
  switch (dtype) {
    case wan::kFp16:
      return wan::winograd::winograd_input<__half>(arguments, p.tile_columns, p.frames, stream);
    case wan::kBf16:
      return wan::winograd::winograd_input<__nv_bfloat16>(arguments, p.tile_columns, p.frames, stream);
    default:
      return wan::fail("winograd_input: no kernel for dtype %d", dtype);
  }
}
