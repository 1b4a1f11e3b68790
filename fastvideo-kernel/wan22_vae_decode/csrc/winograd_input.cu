// SPDX-License-Identifier: Apache-2.0
// Causal history, RMS norm + SiLU (null gamma: neither), zero or halo padding and the input transform of F(4 x m, 3x3),
// m = 4 or 3:
//   v [6 (m + 2), 2 + T, tile rows, tiles, C], component (m + 2) i + j = (B^T d B')[i][j] of 6 x (m + 2) pixels d,
// for a range of tile rows of x [T, H, W, C]. The two frames of history are normalised already (null: zeros); the next
// history, the last two frames of history and x, is written in passing.
// A block goes down some rows of n tiles, through a ring of rows of mn + 2 pixels in shared memory: six that a row of
// tiles reads, of which the next keeps two, and four or two that the copy engine fills meanwhile. A warp normalises a
// pixel where it is, rounded as a stored activation would be; then a thread transforms four channels of a tile.
// Bound: memory, x read once (L2 holds what strips share), 2.25 (m = 4) x (T + 2) / T of it written. Instructions, the
// next bound: two thirds transform, one third norm and SiLU, run (1 + 1 / 2 rows) (mn + 2) / mn times.
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
  int32_t rows, columns, channels, edge;                   // edge: rows of halo on each side
  int32_t first_tile_row, tile_rows, tiles_across, steps;  // steps: rows of tiles that a block makes
  uint32_t component_stride;                               // in quads of channels
};

namespace winograd {

constexpr int kThreads = 256, kWarps = kThreads / 32, kHistory = 2;
constexpr int kBlocks = 2;  // that a multiprocessor holds, by its registers

// A row of pixels, numbered from the image's first: null where it is all zeros.
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

// The pixels of kTiles tiles across on their way through shared memory, kVectors 16-byte vectors a lane each, whatever
// the channels, so that offsets are constant. A step is a row of tiles, which reads six rows of pixels.
template <int kVectors, int kTileColumns, int kTiles>
struct Strip {
  static constexpr int kColumns = kTileColumns * kTiles + 2, kPitch = 512 * kVectors, kLine = kPitch * kColumns;
  static constexpr int kMultiprocessor = 224 << 10;  // bytes of shared memory for all its blocks
  // Rows that are filled ahead, and rows of the ring: even, so that pairs of rows stay together.
  static constexpr int kAhead = kBlocks * kLine * (kLines + kTileRows) <= kMultiprocessor ? kTileRows : kTileRows / 2;
  static constexpr int kRing = kLines + kAhead, kBytes = kLine * kRing;
  static_assert(kBlocks * kBytes <= kMultiprocessor, "too few blocks would fit");

  const WinogradInputArguments& a;
  uint32_t ring;  // address of [kRing, kColumns, kPitch bytes]
  int frame;
  int left, begin, end;  // the first pixel's column in the image, and which pixels of a row are in the image

  // The address of a lane's first vector of a pixel, numbered from a row of the ring on; less than once around.
  __device__ inline uint32_t pixel(int ring_row, int number) const {
    const uint32_t offset = ring_row * kLine + number * kPitch;
    return ring + threadIdx.x % 32 * 16 + min(offset, offset - kBytes);
  }

  // By one warp: asks for rows of the image. A row is one piece, unless there are too few channels.
  __device__ inline void request(int first_row, int rows, int ring_row, uint64_t* arrived) const {
    const int lane = threadIdx.x % 32, vectors = a.channels / 8;
    const uint4* source = lane < rows ? locate(a, frame, first_row + lane) : nullptr;
    const int found = __popc(__ballot_sync(0xffffffffu, source != nullptr));
    if (lane == 0) expect_bytes(arrived, found * (end - begin) * vectors * 16);
    __syncwarp();
    if (source == nullptr) return;
    source += int64_t(left + begin) * vectors;
    uint32_t target = ring + (ring_row + lane) % kRing * kLine + begin * kPitch;
    const int length = 16 * vectors == kPitch ? end - begin : 1;
    for (int column = begin; column < end; column += length) {
      copy_bulk(target, source, length * vectors * 16, arrived);
      source += length * vectors, target += length * kPitch;
    }
  }

  // Clears a lane's vectors of a pixel, from vector `first` on.
  __device__ inline void clear(uint32_t pixel, int first) const {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const int vector = threadIdx.x % 32 + 32 * n;
      if (vector >= first) store_shared16(pixel + 512 * n, make_uint4(0, 0, 0, 0));
    }
  }

  // Clears those of a step's pixels from its row `fresh` on that are beside the image, by the warps that normalise
  // them.
  __device__ inline void clear_outside(int top, int ring_row, int fresh, int warp) const {
    const bool zeros = frame < kHistory && a.history == nullptr;
    const int row_begin = zeros ? kLines : -a.edge - top, row_end = a.rows + a.edge - top;
    if (begin == 0 && end == kColumns && row_begin <= fresh && row_end >= kLines) return;
#pragma unroll 1
    for (int number = fresh * kColumns + warp; number < kLines * kColumns; number += kWarps) {
      const int row = number / kColumns, column = number % kColumns;
      if (row < row_begin || row >= row_end || column < begin || column >= end) clear(pixel(ring_row, number), 0);
    }
  }

  // Normalises a step's pixels from its row `fresh` on where they are, kPixels at once in a warp; zeros stay zeros.
  template <typename T, int kPixels>
  __device__ inline void normalise_fresh(const float4* weights, int ring_row, int fresh, int warp) const {
    constexpr int kLast = kLines * kColumns;
    const int vectors = a.channels / 8;
    float factors[kVectors][8];
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const float4 low = weights[2 * (threadIdx.x % 32 + 32 * n)], high = weights[2 * (threadIdx.x % 32 + 32 * n) + 1];
      factors[n][0] = low.x, factors[n][1] = low.y, factors[n][2] = low.z, factors[n][3] = low.w;
      factors[n][4] = high.x, factors[n][5] = high.y, factors[n][6] = high.z, factors[n][7] = high.w;
    }
#pragma unroll 1
    for (int number = fresh * kColumns + warp; number < kLast; number += kWarps * kPixels) {
      uint4 data[kPixels][kVectors];
      uint32_t places[kPixels];
#pragma unroll
      for (int p = 0; p < kPixels; ++p) {
        places[p] = pixel(ring_row, number + p * kWarps);
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
          data[p][n] = make_uint4(0, 0, 0, 0);
          if (number + p * kWarps < kLast) data[p][n] = load_shared16(places[p] + 512 * n);
        }
      }
#pragma unroll
      for (int p = 0; p < kPixels; ++p) {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kVectors; ++n) sum += sum_of_squares<T>(data[p][n]);
        const float scale = inverse_norm(warp_sum(sum));
#pragma unroll
        for (int n = 0; n < kVectors; ++n) data[p][n] = normalise<T, true>(data[p][n], scale, factors[n]);
      }
#pragma unroll
      for (int p = 0; p < kPixels; ++p) {
        if (number + p * kWarps >= kLast) break;
#pragma unroll
        for (int n = 0; n < kVectors; ++n) {
          if (static_cast<int>(threadIdx.x % 32) + 32 * n < vectors) store_shared16(places[p] + 512 * n, data[p][n]);
        }
      }
    }
  }

  // Writes a step's part of the next history, if the frame is one of the last two: its rows and columns of tiles, and
  // the halo rows beside the first and the last.
  __device__ inline void keep(int top, int ring_row, int warp) const {
    const int kept_frame = frame - (static_cast<int>(gridDim.z) - kHistory);
    if (kept_frame < 0) return;
    const int vectors = a.channels / 8, columns = min(end, kColumns - 1);
    const int row_begin = top < 0 && a.edge ? 0 : 1;
    const int row_end = a.rows - top < kLines ? a.rows - top + a.edge : kLines - 1;
#pragma unroll 1
    for (int number = row_begin * kColumns + warp; number < row_end * kColumns; number += kWarps) {
      const int row = number / kColumns, column = number % kColumns;
      if (column == 0 || column >= columns) continue;
      const int64_t line = int64_t(kept_frame) * (a.rows + 2 * a.edge) + top + row + a.edge;
      uint4* target = static_cast<uint4*>(a.next_history) + (line * a.columns + left + column) * vectors;
      const uint32_t source = pixel(ring_row, number);
#pragma unroll
      for (int n = 0; n < kVectors; ++n) {
        const int vector = threadIdx.x % 32 + 32 * n;
        if (vector < vectors) target[vector] = load_shared16(source + 512 * n);
      }
    }
  }
};

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

template <typename T, int kTileColumns, int kVectors, int kTiles, int kPixels>
__global__ void __launch_bounds__(kThreads, kBlocks)
    winograd_input_kernel(const __grid_constant__ WinogradInputArguments a) {
  using Strip = Strip<kVectors, kTileColumns, kTiles>;
  static_assert(kTiles * kVectors * 64 <= kThreads, "a thread has one tile and four channels");
  extern __shared__ uint4 memory[];
  __shared__ float4 weights[64 * kVectors];
  __shared__ uint64_t arrived[2];  // what is asked for before a step's transform, and after it
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be uniform
  const int first_tile = blockIdx.x * kTiles, left = kTileColumns * first_tile - 1;
  // The frames of history come last: their blocks are short and fill the gaps.
  const int frame = gridDim.z - 1 - blockIdx.z;
  const Strip strip{a, shared_address(memory), frame, left, left < 0 ? 1 : 0, min(Strip::kColumns, a.columns - left)};
  const int first_row = a.first_tile_row + a.steps * static_cast<int>(blockIdx.y);
  const int steps = min(a.steps, a.first_tile_row + a.tile_rows - first_row);
  if (warp == 0) {
    if (threadIdx.x == 0) init_barrier(&arrived[0]), init_barrier(&arrived[1]);
    __syncwarp();
    strip.request(kTileRows * first_row - 1, kLines, 0, &arrived[0]);
  }
  if (a.channels < 256 * kVectors) {  // channels that are missing stay zeros
    for (int n = warp; n < Strip::kRing * Strip::kColumns; n += kWarps) strip.clear(strip.pixel(0, n), a.channels / 8);
  }
  const bool normalises = a.gamma != nullptr && frame >= kHistory;
  if (normalises && threadIdx.x < 32 * kVectors) {
    float values[8] = {};
    if (8 * static_cast<int>(threadIdx.x) < a.channels) load_weights<true>(a.gamma + 8 * threadIdx.x, values);
    weights[2 * threadIdx.x] = make_float4(values[0], values[1], values[2], values[3]);
    weights[2 * threadIdx.x + 1] = make_float4(values[4], values[5], values[6], values[7]);
  }
  __syncthreads();

  const int quads = a.channels / 4;
  const int tile = static_cast<int>(threadIdx.x) / quads;
  const bool transforms = tile < min(kTiles, a.tiles_across - first_tile);
  const uint32_t corner = strip.ring + kTileColumns * tile * Strip::kPitch + (threadIdx.x - tile * quads) * 8;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int top = kTileRows * (first_row + step) - 1, ring_row = kTileRows * step % Strip::kRing;
    const int fresh = step == 0 ? 0 : kLines - kTileRows;
    strip.clear_outside(top, ring_row, fresh, warp);
    wait_barrier(&arrived[0], step % 2);
    if (Strip::kAhead < kTileRows && step > 0) wait_barrier(&arrived[1], (step - 1) % 2);
    if (normalises) strip.template normalise_fresh<T, kPixels>(weights, ring_row, fresh, warp);
    fence_before_copies();
    __syncthreads();
    // The rows that are filled now were last read before this barrier.
    if (warp == 0 && step + 1 < steps) {
      strip.request(top + kLines, Strip::kAhead, ring_row + kLines, &arrived[0]);
    }
    if (transforms) {
      const int64_t line = int64_t(frame) * a.tile_rows + (first_row - a.first_tile_row + step);
      uint64_t* v = static_cast<uint64_t*>(a.v) + (line * a.tiles_across + first_tile) * quads + threadIdx.x;
      uint32_t rows[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) rows[i] = corner + (ring_row + 2 * i) % Strip::kRing * Strip::kLine;
      transform_pairs<T, 0, 0, kTileColumns + 2, Strip::kColumns, Strip::kPitch>(rows, v, a.component_stride);
      transform_pairs<T, 1, 2, kTileColumns + 2, Strip::kColumns, Strip::kPitch>(rows, v, a.component_stride);
    }
    strip.keep(top, ring_row, warp);
    if constexpr (Strip::kAhead < kTileRows) {
      __syncthreads();
      if (warp == 0 && step + 1 < steps) {
        strip.request(top + Strip::kRing, kTileRows - Strip::kAhead, ring_row + Strip::kRing, &arrived[1]);
      }
    }
  }
}

// Rows of tiles a block: few make many blocks, which share out evenly; each costs about one more, for what it waits for
// first and the pixels that it shares with the next.
inline int steps_per_block(int tile_rows, int64_t columns_of_blocks, int blocks_at_once) {
  int best = 1;
  int64_t least = INT64_MAX;
  for (int parts = 1; parts <= tile_rows; ++parts) {
    const int64_t steps = ceil_div(tile_rows, parts);
    const int64_t cost = ceil_div(columns_of_blocks * ceil_div(tile_rows, steps), blocks_at_once) * (steps + 1);
    if (cost < least) least = cost, best = static_cast<int>(steps);
  }
  return best;
}

template <typename T, int kTileColumns, int kVectors, int kTiles, int kPixels>
int launch_input(WinogradInputArguments a, int frames, int device, cudaStream_t stream) {
  const auto kernel = winograd_input_kernel<T, kTileColumns, kVectors, kTiles, kPixels>;
  constexpr int bytes = Strip<kVectors, kTileColumns, kTiles>::kBytes;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return fail("winograd_input: %d bytes shared: %s", bytes, cudaGetErrorString(status));
  const int64_t strips = ceil_div(a.tiles_across, kTiles);
  a.steps = steps_per_block(a.tile_rows, strips * (kHistory + frames), kBlocks * multiprocessors(device));
  const dim3 grid(static_cast<unsigned>(strips), static_cast<unsigned>(ceil_div(a.tile_rows, a.steps)),
                  kHistory + frames);
  kernel<<<grid, kThreads, bytes, stream>>>(a);
  return check_launch("winograd_input");
}

// Wide strips where shared memory still holds several blocks of them.
template <typename T, int kTileColumns>
int winograd_input(const WinogradInputArguments& a, int frames, int device, cudaStream_t stream) {
  if (a.channels <= 256) return launch_input<T, kTileColumns, 1, 4, 3>(a, frames, device, stream);
  if (a.channels <= 512) return launch_input<T, kTileColumns, 2, 2, 2>(a, frames, device, stream);
  return launch_input<T, kTileColumns, 4, 1, 1>(a, frames, device, stream);
}

template <typename T>
int winograd_input(const WinogradInputArguments& a, int tile_columns, int frames, int device, cudaStream_t stream) {
  return tile_columns == 4 ? winograd_input<T, 4>(a, frames, device, stream)
                           : winograd_input<T, 3>(a, frames, device, stream);
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
                                              0,  // as the launch shares them out
                                              static_cast<uint32_t>(quads)};
  switch (dtype) {
    case wan::kFp16:
      return wan::winograd::winograd_input<__half>(arguments, p.tile_columns, p.frames, device, stream);
    case wan::kBf16:
      return wan::winograd::winograd_input<__nv_bfloat16>(arguments, p.tile_columns, p.frames, device, stream);
    default:
      return wan::fail("winograd_input: no kernel for dtype %d", dtype);
  }
}
